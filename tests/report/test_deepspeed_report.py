"""DeepSpeed's tables as text for people and rows for scripts."""

import io
import json
import re

import pytest
from rich.console import Console

from memplan.errors import SetupError
from memplan.formulas.deepspeed import DeepSpeedFormula
from memplan.report.lookups.deepspeed import (
    DeepSpeedReport,
    deepspeed_document,
    deepspeed_report,
    deepspeed_rows,
    deepspeed_text,
    print_deepspeed,
)


def report(
    *,
    num_gpus_total: int = 8,
    num_nodes: int = 1,
    formula: DeepSpeedFormula = DeepSpeedFormula.DOCUMENTED,
    additional_buffer_factor: float = 1.5,
) -> DeepSpeedReport:
    """t5-3b's tables."""
    return deepspeed_report(
        total_params=2_851_598_336,
        largest_layer_params=32_899_072,
        num_gpus_total=num_gpus_total,
        num_nodes=num_nodes,
        formula=formula,
        additional_buffer_factor=additional_buffer_factor,
    )


class TestText:
    @pytest.mark.parametrize(
        ("num_gpus_total", "num_nodes", "line"),
        [
            pytest.param(1, 1, "HW: Setup with 1 node, 1 GPU per node.", id="one-gpu"),
            pytest.param(8, 1, "HW: Setup with 1 node, 8 GPUs per node.", id="one-node"),
            pytest.param(16, 2, "HW: Setup with 2 nodes, 8 GPUs per node.", id="two-nodes"),
            pytest.param(2, 2, "HW: Setup with 2 nodes, 1 GPU per node.", id="one-gpu-each"),
        ],
    )
    def test_hardware_line(self, num_gpus_total: int, num_nodes: int, line: str) -> None:
        text = deepspeed_text(report(num_gpus_total=num_gpus_total, num_nodes=num_nodes))
        assert text.splitlines().count(line) == 2

    def test_software_lines(self) -> None:
        lines = deepspeed_text(report()).splitlines()
        assert "SW: Model with 2851M total params." in lines
        assert "SW: Model with 2851M total params, 32M largest layer params." in lines

    @pytest.mark.parametrize(
        ("formula", "equation", "other"),
        [
            pytest.param(
                DeepSpeedFormula.DOCUMENTED, "4 x params + 16 x params", "current", id="documented"
            ),
            pytest.param(
                DeepSpeedFormula.CURRENT, "2 x params + 18 x params", "documented", id="current"
            ),
        ],
    )
    def test_says_which_formula(self, formula: DeepSpeedFormula, equation: str, other: str) -> None:
        text = deepspeed_text(report(formula=formula))
        assert f"ZeRO-2 formula: {formula.value}" in text
        assert equation in text
        assert f"--deepspeed-formula {other}" in text

    def test_formulas_differ_in_one_row_only(self) -> None:
        documented = deepspeed_rows(report())
        current = deepspeed_rows(report(formula=DeepSpeedFormula.CURRENT))
        assert [a == b for a, b in zip(documented, current, strict=True)] == [True, False] + [
            True
        ] * 6

    def test_pinned_memory_and_footnotes(self) -> None:
        text = deepspeed_text(report(additional_buffer_factor=1.25))
        assert "offload_param=cpu: 15.93GB (6 bytes x params)" in text
        assert "gradient accumulation: 21.25GB (8 bytes x params)" in text
        assert "offload_optimizer=cpu only: 10.62GB (4 bytes x params)" in text
        assert "ZeRO-2: cannot be controlled" in text
        assert "GB above is GiB (2^30 bytes)" in text
        assert "additional_buffer_factor 1.25" in text

    def test_megabyte_cases_of_t5_large(self) -> None:
        t5_large = deepspeed_report(
            total_params=737_668_096,
            largest_layer_params=32_899_072,
            num_gpus_total=4,
            num_nodes=1,
            formula=DeepSpeedFormula.DOCUMENTED,
            additional_buffer_factor=1.5,
        )
        lines = deepspeed_text(t5_large).splitlines()
        assert "  total params: 737.67M" in lines
        assert "  largest layer params: 32.90M" in lines
        assert "  largest layer memory: 125MB" in lines
        assert "  case 1, nothing on the CPU: 3291MB" in lines
        assert "  case 2, optimizer and parameters on the CPU: 125MB" in lines
        assert "  case 3, optimizer on the CPU: 477MB" in lines

    def test_fits_a_narrow_terminal_without_trailing_blanks(self) -> None:
        for formula in DeepSpeedFormula:
            lines = deepspeed_text(report(formula=formula)).splitlines()
            assert max(map(len, lines)) <= 80
            assert lines == [line.rstrip() for line in lines]

    def test_console_prints_the_text_untouched(self) -> None:
        stream = io.StringIO()
        print_deepspeed(Console(file=stream, width=20), report())
        assert stream.getvalue() == deepspeed_text(report()) + "\n"


class TestRows:
    def test_document_survives_json(self) -> None:
        document = deepspeed_document(report(num_gpus_total=16, num_nodes=2))
        assert json.loads(json.dumps(document)) == document
        assert document["schema_version"] == 1
        assert document["assumptions"] == {
            "estimator": "deepspeed",
            "zero2_formula": "documented",
            "total_params": 2_851_598_336,
            "largest_layer_params": 32_899_072,
            "num_gpus": 16,
            "num_nodes": 2,
            "num_gpus_per_node": 8,
            "additional_buffer_factor": 1.5,
        }

    def test_rows_share_their_keys(self) -> None:
        rows = deepspeed_rows(report())
        assert [row["zero_stage"] for row in rows] == [2, 2, 3, 3, 3, 3, 3, 3]
        assert len({tuple(row) for row in rows}) == 1

    def test_row(self) -> None:
        assert deepspeed_rows(report())[2] == {
            "zero_stage": 3,
            "offload_param": "cpu",
            "offload_optimizer": "cpu",
            "zero_init": True,
            "per_cpu_bytes": 27 * 2_851_598_336,
            "documented_cpu_bytes": None,
            "per_gpu_bytes": 4 * 32_899_072,
            "pinned_bytes": 6 * 2_851_598_336,
            "pinned_accumulating_bytes": 8 * 2_851_598_336,
        }

    def test_zero2_has_no_pinned_figure(self) -> None:
        row = deepspeed_rows(report())[0]
        assert row["pinned_bytes"] is None
        assert row["pinned_accumulating_bytes"] is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("num_gpus_total", "num_nodes", "reason"),
        [
            pytest.param(8, 3, "8 GPUs cannot be spread evenly over 3 nodes", id="indivisible"),
            pytest.param(2, 4, "2 GPUs cannot be spread evenly over 4 nodes", id="empty-nodes"),
            pytest.param(0, 1, "at least 1", id="no-gpus"),
            pytest.param(8, 0, "at least 1", id="no-nodes"),
            pytest.param(-8, -1, "at least 1", id="negative"),
        ],
    )
    def test_cluster(self, num_gpus_total: int, num_nodes: int, reason: str) -> None:
        with pytest.raises(SetupError, match=reason) as caught:
            report(num_gpus_total=num_gpus_total, num_nodes=num_nodes)
        assert "\n" not in str(caught.value)


def test_ram_in_letters_is_what_the_rows_hold() -> None:
    """Each line, with its letters put in, against the row that it is of."""
    report = deepspeed_report(
        total_params=10**9, largest_layer_params=10**8, num_gpus_total=8, num_nodes=2,
        formula=DeepSpeedFormula.CURRENT, additional_buffer_factor=1.5,
    )  # fmt: skip
    values = {"P": 10**9, "L": 10**8, "n": 2, "g": 4, "G": 8, "k": 1.5, "max": max}
    lines = [
        line.strip().rpartition(": ")
        for line in deepspeed_text(report).splitlines()
        if line.endswith(" x k")
    ]
    rows = {
        "ZeRO-2, offload_optimizer=cpu": report.zero2_rows[0],
        "ZeRO-2, offload_optimizer=none": report.zero2_rows[1],
        "ZeRO-3, offload_param=cpu, zero_init=1": report.zero3_rows[0],
        "ZeRO-3, offload_param=cpu, zero_init=0": report.zero3_rows[1],
        "ZeRO-3, offload_optimizer=cpu, zero_init=1": report.zero3_rows[2],
        "ZeRO-3, offload_optimizer=cpu, zero_init=0": report.zero3_rows[3],
        "ZeRO-3, nothing on the CPU, zero_init=1": report.zero3_rows[4],
        "ZeRO-3, nothing on the CPU, zero_init=0": report.zero3_rows[5],
    }
    assert [name for name, _, _ in lines] == list(rows)
    for name, _, letters in lines:
        formula = re.sub(r"(\d)([A-Za-z])", r"\1 * \2", letters.replace(" x ", " * "))
        assert eval(formula, values) == rows[name].per_cpu_bytes, name


def test_deepspeeds_own_words_stand_above_its_tables() -> None:
    report = deepspeed_report(
        total_params=10**9, largest_layer_params=10**8, num_gpus_total=8, num_nodes=1,
        formula=DeepSpeedFormula.CURRENT, additional_buffer_factor=1.5,
    )  # fmt: skip
    words = "Estimated memory needed for params, optim states and gradients for a:\nHW: Setup with"
    assert deepspeed_text(report).count(words) == 2
