"""Published figures, computed by the formulas they were made with (``formulas.yaml``)."""

from pathlib import Path
from typing import Any

import pytest

from memplan.compute.flops import count_flops
from memplan.dtypes import DType
from memplan.estimator import estimate
from memplan.formulas import activations_memory, gpu_memory_required
from memplan.formulas.activations import (
    TextbookRecomputation,
    layer_activation_bytes,
    parallel_layer_bytes,
)
from memplan.formulas.flops import layer_step_flops
from memplan.formulas.parameters import llama_parameters
from memplan.formulas.states import FP32_STATES, MIXED_STATES, table_bytes
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import GB, GIB
from tests.yaml_files import read_yaml

PUBLISHED = read_yaml(Path(__file__).with_name("formulas.yaml"))
ARTICLE = PUBLISHED["article"]


def published(section: str) -> list[Any]:
    return [pytest.param(entry, id=entry["id"]) for entry in PUBLISHED[section]]


def test_every_entry_says_where() -> None:
    assert ARTICLE["where"]
    entries = [each for name, rows in PUBLISHED.items() if name != "article" for each in rows]
    assert all(entry["where"] for entry in entries)


@pytest.mark.parametrize(
    "row", ARTICLE["rows"], ids=lambda row: f"stage{row['stage']}-ckpt{row['checkpointed']:d}"
)
def test_article_table(row: dict[str, Any]) -> None:
    shape = ARTICLE["shape"]

    found = gpu_memory_required(
        **shape, activations_checkpoint=row["checkpointed"], stage=row["stage"]
    )

    assert round(found, 2) == row["gb"]


def test_article_activations() -> None:
    shape = {key: ARTICLE["shape"][key] for key in _ACTIVATION_KEYS}

    assert activations_memory(**shape, precision=2) == ARTICLE["activations_gb"]


_ACTIVATION_KEYS = ("num_layers", "seq_len", "batch_size", "hidden_dim", "num_heads")


@pytest.mark.parametrize("row", ARTICLE["rows"][:4], ids=lambda row: f"stage{row['stage']}")
def test_article_beside_memplan(row: dict[str, Any]) -> None:
    """The same question to memplan, for the real number of parameters."""
    model = load_model("xlm-roberta-xxl")
    setup = TrainingSetup(
        num_gpus=64, num_nodes=8, zero_stage=row["stage"], micro_batch_size=8, seq_len=512
    )

    own = estimate(model, setup)

    assert count_parameters(model).base == 10_712_735_744
    assert own.activations_bytes < ARTICLE["activations_gb"] * GB
    assert own.peak_bytes / GB == pytest.approx(row["memplan_gb"], rel=7e-4)


@pytest.mark.parametrize("entry", published("states"))
def test_states(entry: dict[str, Any]) -> None:
    found = table_bytes(entry["num_params"], table=MIXED_STATES)

    assert found == table_bytes(entry["num_params"], table=FP32_STATES)
    if "gb" in entry:
        assert found == entry["gb"] * GB
    else:
        assert f"{found / GIB:.2f}".startswith(str(entry["gib"]))


@pytest.mark.parametrize("entry", published("parameters"))
def test_llama_parameters(entry: dict[str, Any]) -> None:
    found = llama_parameters(
        num_layers=entry["num_layers"],
        hidden_size=entry["hidden_size"],
        intermediate_size=entry["intermediate_size"],
        vocab_size=entry["vocab_size"],
    )

    assert round(found / 10**9, 2) == entry["billions"]


@pytest.mark.parametrize("entry", published("parameters"))
def test_llama_parameters_on_the_tape(entry: dict[str, Any]) -> None:
    """The formula leaves out the norms and the output matrix; the tape does not."""
    layers, hidden = entry["num_layers"], entry["hidden_size"]
    model = load_model(
        {
            "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
            "intermediate_size": entry["intermediate_size"], "vocab_size": entry["vocab_size"],
            "num_attention_heads": hidden // 128,
        }
    )  # fmt: skip

    found = count_parameters(model).total

    formula = llama_parameters(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=entry["intermediate_size"],
        vocab_size=entry["vocab_size"],
    )
    assert found == formula + (2 * layers + 1) * hidden + entry["vocab_size"] * hidden


@pytest.mark.parametrize("entry", published("activations"))
def test_activations(entry: dict[str, Any]) -> None:
    layer = layer_activation_bytes(
        entry["hidden_size"],
        num_heads=entry["num_heads"],
        seq_len=entry["seq_len"],
        batch_size=1,
    )
    digits = len(entry["gib"].partition(".")[2])

    assert f"{entry['num_layers'] * layer / GIB:.{digits}f}" == entry["gib"]


@pytest.mark.parametrize("entry", published("layer_flops"))
def test_layer_flops(entry: dict[str, Any]) -> None:
    b, s, h = 2, 2048, 1024
    found = layer_step_flops(h, seq_len=s, batch_size=b, recomputed=entry["recomputed"])

    assert found == pytest.approx(entry["factor"] * b * s * h**2 * (1 + s / (6 * h)), rel=1e-12)


@pytest.mark.parametrize("entry", published("layer_flops"))
def test_layer_flops_on_the_tape(entry: dict[str, Any]) -> None:
    b, s, h = 2, 2048, 1024

    def step(layers: int) -> int:
        model = load_model(
            {
                "model_type": "gpt2", "n_embd": h, "n_head": 16, "n_layer": layers,
                "n_positions": s, "vocab_size": 1000,
            }
        )  # fmt: skip
        options = TapeOptions(
            batch_size=b,
            seq_len=s,
            compute=DType.BF16,
            checkpointed_layers=float(entry["recomputed"]),
        )
        return count_flops(record_model(model, options), model).total

    assert step(3) - step(2) == layer_step_flops(
        h, seq_len=s, batch_size=b, recomputed=entry["recomputed"]
    )


@pytest.mark.parametrize("entry", published("parallel_layers"))
def test_parallel_layers(entry: dict[str, Any]) -> None:
    s, b, h, a, t = 2048, 2, 12288, 96, entry["t"]
    found = parallel_layer_bytes(
        h,
        num_heads=a,
        seq_len=s,
        batch_size=b,
        tensor_parallel=t,
        sequence_parallel=entry["sequence_parallel"],
        recomputation=TextbookRecomputation(entry["recomputation"]),
    )

    factor = entry["whole"] + entry["shared"] / t + entry["scores"] * a * s / (h * t)
    assert found == s * b * h * factor
