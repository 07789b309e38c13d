"""memplan as people use it from Python: what values look like, and what errors say."""

import ast
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import memplan
from memplan.errors import MemplanError
from memplan.search.planning.goal import Objective
from memplan.sources.cards.catalog import all_gpus, load_gpu
from memplan.training.choices import Recomputation
from memplan.training.precision import Engine, Precision

LLAMA = memplan.TrainingSetup(seq_len=512, precision="bf16", checkpointing="full")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """One of each kind of answer."""
    return {
        "estimate": memplan.estimate("llama-3.1-8b", LLAMA, gpu="h100"),
        "sweep": memplan.sweep("gpt2", {"micro_batch_size": [1, 2], "seq_len": 64}, gpus=["t4"]),
        "plan": memplan.plan("gpt2", memplan.Goal(num_gpus=(1,)), gpu="t4"),
        "model": memplan.load_model("t5-3b"),
    }


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("estimate", r"Estimate\(llama-3.1-8b on 1xH100-80: \d\d\.\d GiB allocated, fits\)"),
        ("sweep", r"Sweep\(gpt2: 2 combinations on T4\)"),
        ("plan", r"Plan\(gpt2 on T4: \d setups fit, the best Estimate\(gpt2 on 1xT4: .*\)\)"),
        ("model", r"ModelSpec\(t5-3b, t5 for seq2seq-lm: 48 layers, hidden size 1024\)"),
    ],
)
def test_a_value_is_one_line(values: dict[str, Any], name: str, shown: str) -> None:
    assert re.fullmatch(shown, repr(values[name]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("estimate", ["H100-80", "activations"]),
        ("sweep", ["batch", "fits"]),
        ("plan", ["speed", "Fastest first"]),
        ("model", ["feed-forward", "1,610,612,736"]),
    ],
)
def test_rich_and_notebooks_show_the_table(
    values: dict[str, Any], name: str, words: list[str]
) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(values[name])
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    html = values[name]._repr_html_()
    assert html.startswith("<pre") and html.endswith("</pre>")  # noqa: PT018
    for word in words:
        assert word in printed
        assert word in html


def test_a_name_out_of_a_file_is_no_markup() -> None:
    config = {
        "model_type": "gpt2", "name": "<script>[red]", "n_layer": 2, "n_embd": 64, "n_head": 2,
    }  # fmt: skip
    html = memplan.load_model(config)._repr_html_()
    assert "&lt;script&gt;[red]" in html


def test_a_large_sweep_is_shown_in_part() -> None:
    axes = {"micro_batch_size": list(range(1, 61)), "seq_len": 16}
    html = memplan.sweep("gpt2", axes)._repr_html_()
    assert "The first 50 of 60: rows() has all" in html


def test_parameters_are_counted_on_the_model() -> None:
    model = memplan.load_model("llama-3.1-8b")
    assert model.num_params == 8_030_261_248
    assert memplan.load_model(model, None).num_params == memplan.estimate(model, LLAMA).num_params


def test_a_model_is_transformers_own_config() -> None:
    class BFloat16:
        def __str__(self) -> str:
            return "torch.bfloat16"

    class Config:
        def to_dict(self) -> dict[str, object]:
            own = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2}
            return {**own, "id2label": {0: "A"}, "dtype": BFloat16()}

    assert memplan.load_model(Config()).num_layers == 2
    with pytest.raises(memplan.MemplanError, match="this is of type type"):
        memplan.load_model(Config)


def test_a_verdict_is_its_word(values: dict[str, Any]) -> None:
    assert values["estimate"].verdict == "fits"
    assert f"{values['estimate'].verdict}" == "fits"
    assert values["estimate"].verdict is memplan.Verdict.FITS


@pytest.mark.parametrize(
    ("gpu", "capacity"),
    [("46GiB", 46 * 2**30), ("46 GiB", 46 * 2**30), ("80G", 80 * 2**30), ("80GB", 80 * 10**9)],
)
def test_a_gpu_is_known_by_its_memory(gpu: str, capacity: int) -> None:
    answer = memplan.estimate("gpt2", LLAMA, gpu=gpu)
    assert answer.to_dict()["gpu_capacity_bytes"] == capacity


def test_short_names_tell_cards_apart() -> None:
    names = [gpu.short_name for gpu in all_gpus()]
    assert len(set(names)) == len(names)
    assert all(load_gpu(gpu.short_name) == gpu for gpu in all_gpus() if gpu.aliases)
    assert load_gpu("H100 80GB") is load_gpu("h100")
    assert load_gpu("h200-141gb") is load_gpu("h200")
    assert [load_gpu(name).short_name for name in ("v100", "a100", "h100", "h200", "46GiB")] == [
        "V100-32", "A100-80", "H100-80", "H200", "46GiB",
    ]  # fmt: skip


def test_rows_make_a_data_frame() -> None:
    axes = {
        "num_gpus": [1, 8], "engine": ["ddp", "deepspeed", "fsdp"], "seq_len": 64,
        "checkpointing": ["none", 0.5, "full"],
    }  # fmt: skip
    rows = memplan.sweep("gpt2", axes, gpus=["t4", "46GiB"]).rows()
    assert len(rows) == 36
    for name in rows[0]:
        kinds = {type(row[name]) for row in rows} - {type(None)}
        assert kinds <= {str} or kinds <= {int} or kinds <= {float}, name
    assert {frozenset(row) for row in rows} == {frozenset(rows[0])}


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_rows_make_a_data_frame_of(library: str) -> None:
    frames = pytest.importorskip(library)
    rows = memplan.sweep("gpt2", {"num_gpus": [1, 8], "seq_len": 64}, gpus=["t4"]).rows()
    assert frames.DataFrame(rows).shape == (2, len(rows[0]))


def test_a_plan_has_rows(values: dict[str, Any]) -> None:
    rows = values["plan"].rows()
    assert [row["verdict"] for row in rows] == ["fits"] * len(values["plan"].setups)


def test_a_goal_takes_words_and_single_values() -> None:
    typed = memplan.Goal(
        num_gpus=8,
        engines="fsdp2",
        precisions=["bf16"],
        checkpointing="full",
        objective="gpus",  # type: ignore[arg-type]
    )
    made = memplan.Goal(
        num_gpus=(8,), engines=(Engine.FSDP,), precisions=(Precision.BF16,),
        checkpointing=(Recomputation.FULL,), objective=Objective.GPUS,
    )  # fmt: skip
    assert typed == made
    with pytest.raises(MemplanError, match=r"engines: 'fsdp3' is not one of .* Did you mean 'fsdp"):
        memplan.Goal(engines=("fsdp3",))  # type: ignore[arg-type]


# -- errors ----------------------------------------------------------------------------------------

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")


FACES = ("cli", "options", "report")
"""Rooms that know what is typed; ``memplan.api`` puts it in Python's words."""

OF_OTHERS = {
    "--nproc-per-node", "--nproc_per_node", "--num_processes", "--num_machines", "--config", "--config_file",
    "--query-gpu", "--format",
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint",
    "--asic", "--vram", "--driver", "--json", "--mem-usage", "--showproductname", "--showmeminfo", "--showdriverversion",
    "--showuniqueid",
    "--job-name", "--nodes", "--partition", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--mem", "--time",
}  # fmt: skip
"""Of torchrun, accelerate, their trainers and nvidia-smi, which ``memplan.verify`` calls or names; of amd-smi, rocm-smi and sbatch."""


def texts(path: Path) -> list[str]:
    """The texts of a module with two dashes in it, but for its documentation."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source if "--" in source else "")
    spoken = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # docstrings and the strings under fields
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in spoken
    ]


def test_the_library_never_speaks_of_options(checkout: Path) -> None:
    found = [
        f"{path.name}: {text}"
        for path in (checkout / "memplan").rglob("*.py")
        if not any(path.is_relative_to(checkout / "memplan" / room) for room in FACES)
        for text in texts(path)
        if set(OPTION.findall(text)) - OF_OTHERS
    ]
    assert found == []


@pytest.mark.parametrize(
    ("call", "said", "typed", "printed"),
    [
        (
            lambda: memplan.estimate("gpt2", gpu="h10"), "`gpu='46GiB'`",
            ["estimate", "gpt2", "--gpu", "h10"], "--gpu 46GiB",
        ),
        (
            lambda: memplan.estimate("gpt2", gpu="8"), "`num_gpus=8`",
            ["estimate", "gpt2", "--gpu", "8"], "--gpus 8",
        ),
        (
            lambda: memplan.TrainingSetup(micro_batch_size=0), "micro_batch_size: must be",
            ["estimate", "gpt2", "--batch-size", "0"], "--batch-size: must be",
        ),
        (
            lambda: memplan.load_model("bert-base-uncased", "causal-lm"), "one with `task`: ",
            ["models", "bert-base-uncased", "--task", "causal-lm"], "one with --task: ",
        ),
        (
            lambda: memplan.load_model({"architectures": ["Unheard"]}), "with `family`",
            ["models", "tests/data/no_type.json"], "with --family",
        ),
    ],
)  # fmt: skip
def test_errors_name_fields_and_the_command_line_options(
    call: Any, said: str, typed: list[str], printed: str, run: Any, tmp_path: Path
) -> None:
    with pytest.raises(MemplanError) as caught:
        call()
    assert said in str(caught.value)
    assert "--" not in str(caught.value)
    file = tmp_path / "no_type.json"
    file.write_text('{"architectures": ["Unheard"]}')
    outcome = run(*(str(file) if word.endswith("no_type.json") else word for word in typed))
    assert outcome.exit_code in (2, 3)
    assert printed in outcome.stderr
