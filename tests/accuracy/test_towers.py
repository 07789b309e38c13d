"""One training step of models that see or hear, against real classes on fake CUDA tensors."""

from pathlib import Path
from typing import Any

import pytest

from memplan.api import estimate
from memplan.compute.flops import count_flops
from memplan.fast_dataclass import replace
from memplan.model.spec import ModelSpec
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy import test_diffusion
from tests.accuracy.allocator_records import TASKS
from tests.accuracy.comparison import Comparison, read_records, remember_off, remember_parted
from tests.accuracy.test_activations_reference import PRECISIONS
from tests.memory.test_orders import (
    LEAST_UNITS,
    events_of_step,
    num_parted,
    rank_input,
    recorded_tokens,
    tokens_of,
)

FIGURES = ("bytes_before", "activations", "peak_backward", "peak_step", "peak")
EXACT = 0.0001
NUM_EXACT = {
    "towers": (46, 51, 47, 47, 46), "senses": (21, 16, 15, 21, 14), "sounds": (41, 43, 42, 41, 39),
    "sights": (26, 21, 21, 26, 20), "pictures": (18, 17, 16, 17, 14),
}  # fmt: skip
"""Of each file, how many records are within ``EXACT``, by figure: a slip in one class takes one away."""


def setup_of(record: dict[str, Any], model: ModelSpec) -> TrainingSetup:
    """The record's settings in memplan's words."""
    settings = record["settings"]
    # A class that raises where it is asked for sdpa was built without asking: its parts had what they take.
    asks = settings["attn"] != "sdpa" or not model.without_sdpa
    return TrainingSetup(
        engine="ddp",
        micro_batch_size=settings["b"],
        seq_len=settings.get("s"),
        precision=PRECISIONS[settings["precision"]],
        attention=settings["attn"] if asks else None,
        checkpointing="full" if settings["ckpt"] else "none",
        optimizer=settings["opt"].replace("_", "-"),
        **settings.get("setup", {}),
    )


def asked_of(file: str, record: dict[str, Any], model: ModelSpec) -> TrainingSetup:
    """What a record of any of these files was run with."""
    if file == "diffusion":
        return replace(test_diffusion.setup_of(record), kernel_scratch=True)
    return setup_of(record, model)


def predict(record: dict[str, Any]) -> dict[str, int]:
    """The record's figures, as memplan estimates them."""
    model = load_model(record["config"], record.get("task"))
    assert not model.activations_left_out
    answer = estimate(model, replace(setup_of(record, model), kernel_scratch=False))
    return {
        "params": answer.num_params,
        "bytes_before": answer.held_bytes,
        "activations": answer.activations_bytes,
        "peak_backward": answer.phases["backward"].peak_bytes,
        "peak_step": answer.phases["step"].peak_bytes,
        "peak": answer.peak_bytes,
    }


@pytest.mark.parametrize("name", NUM_EXACT)
def test_towers(
    name: str, checkout: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison()
    for record in read_records(checkout / "tests" / "data" / f"{name}.jsonl"):
        comparison.add(record, record["truth"], predict)
    with capsys.disabled():
        print(f"\n{name}.jsonl: {comparison.table()}")
    assert not comparison.refused
    assert comparison.worst("params")[0] == 0
    for figure, num_exact in zip(FIGURES, NUM_EXACT[name], strict=True):
        assert comparison.worst(figure)[0] <= 0.01, (figure, comparison.worst(figure))
        assert comparison.num_within(figure, EXACT) >= num_exact, figure
    remember_off(name, comparison, update=pytestconfig.getoption("--update-accuracy"))


def test_recorded_steps(checkout: Path, pytestconfig: pytest.Config) -> None:
    """Second steps of these records, of rare models of text and of denoisers, block by block, on PyTorch's own CUDA
    build (as ``orders.json`` has those of common ones): no more events stand elsewhere than did.

    FLOPs of the forward pass are those that torch's ``FlopCounterMode`` counted, to a thousandth: it runs a
    pooled token's product, too, that no loss reaches. What its zeros decide (tokens of an expert, of a language) is not
    compared; CTC losses were given their labels' lengths, without which they have no paths.
    """
    data = checkout / "tests" / "data"
    records = {
        (name, each["id"]): each
        for name in (*NUM_EXACT, "long_tail", "diffusion")
        for each in read_records(data / f"{name}.jsonl")
    }
    parted = {}
    for step in read_records(data / "recorded_steps.jsonl"):
        record = records[step["file"], step["id"]]
        task = record.get("task")
        model = load_model(record["config"], TASKS.get(task, task))
        given = rank_input(model, asked_of(step["file"], record, model))
        # Where it was recorded with every block, however small, all are compared.
        least = 1 if step.get("whole") else LEAST_UNITS
        recorded = recorded_tokens(step["events"], least)
        parted[step["id"]] = num_parted(tokens_of(*events_of_step(given), least), recorded)
        if "flops" in step:
            assert count_flops(given.tape, model).forward == step["flops"], step["id"]
    remember_parted(parted, update=pytestconfig.getoption("--update-accuracy"))
