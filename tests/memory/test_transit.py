"""What goes to CPU RAM and comes back: both ledgers agree, and what stays is what the hooks leave."""

from itertools import cycle
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.memory.accounts import rank_account
from memplan.memory.replaying.ledger import Part
from memplan.training.setup import TrainingSetup
from tests.memory.test_tally import ENGINES, MODELS, WAYS, given_for, played

HOWS = ("save-on-cpu", "streamed", "torchtune")


def compare(model: str, fields: dict[str, Any]) -> None:
    given = given_for(model, fields)
    account = rank_account(given, rank=0)
    peaks = {phase.name: phase.peak_bytes for phase in account.phases if phase.name != "save"}
    expected = played(given, 0)
    if Part.FIRST_STEP.value not in peaks:
        expected.pop(Part.FIRST_STEP.value)
    assert {**peaks, "held": account.held_bytes} == expected, (model, fields)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_added_up_is_what_is_played_out(engine: str) -> None:
    models, hows = cycle(MODELS), cycle(HOWS)
    num_compared = 0
    for way in WAYS:
        fields = {**ENGINES[engine], **way, "offload_activations": next(hows)}
        try:
            compare(next(models), fields)
        except SetupError:
            continue
        num_compared += 1
    assert num_compared >= 3


@pytest.mark.parametrize("how", [*HOWS, "checkpoints"])
def test_what_goes_is_in_cpu_ram(how: str) -> None:
    ways = {"checkpointing": "full"} if how == "checkpoints" else {}
    here = rank_account(given_for("llama", {"engine": "ddp", **ways}), rank=0)
    away = rank_account(
        given_for("llama", {"engine": "ddp", **ways, "offload_activations": how}), rank=0
    )
    assert away.host.held_bytes > here.host.held_bytes
    kept = [
        next(phase for phase in account.phases if phase.name == "forward").components
        for account in (away, here)
    ]
    assert kept[0].get("activations", 0) < kept[1]["activations"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        pytest.param({"offload_activations": "checkpoints"}, "checkpointing full", id="nothing"),
        pytest.param({"compile": "layer"}, "torch.compile", id="compiled"),
        pytest.param({"fp8": "torchao-tensorwise"}, "fp8", id="fp8"),
        pytest.param(
            {"checkpointing": "selective", "kernels": "megatron"}, "attention", id="regions"
        ),
        pytest.param({"offload_activations": "cpu"}, "save-on-cpu", id="another name"),
        pytest.param({"offload_activations": "chunks"}, "pipeline_parallel", id="one stage"),
        pytest.param({"offload_activations_ratio": 0.5}, "say chunks", id="a share of another"),
        pytest.param({"offload_activations_ratio": 1.5}, "from 0 to 1", id="more than all"),
        pytest.param({"num_gpus": 2, "pipeline_parallel": 2}, "chunks, save", id="in a pipeline"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], named: str) -> None:
    given = {"offload_activations": "streamed", "precision": "bf16", "engine": "ddp", **fields}
    with pytest.raises(SetupError, match=named):
        TrainingSetup(**given)
