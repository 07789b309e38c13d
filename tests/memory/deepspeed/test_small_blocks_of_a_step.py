"""Small blocks of a step of DeepSpeed, and calls that its hooks count: with a card that is just large enough a run dies of a
segment of 2 MiB. Each is as the events of ten steps of PyTorch 2.13's CUDA build with DeepSpeed 0.19.8 say it."""

from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.estimator.named_run import NamedRun, named_run
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.deepspeed.modules import Act, find_stops
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.memory.deepspeed.small_model import SMALL, given_for

BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 1003,
}
LONGT5: dict[str, Any] = {
    "model_type": "longt5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "vocab_size": 1003, "encoder_attention_type": "transient-global",
}  # fmt: skip
_NORM = "a gradient in fp32, for its norm"


def run_of(config: dict[str, Any], **fields: Any) -> NamedRun:
    """Each block of a run by name."""
    given: dict[str, Any] = {
        "engine": "deepspeed", "zero_stage": 3, "num_gpus": 2, "seq_len": 64, "precision": "fp16-master",
        "engine_options": {"zero_init": False},
    }  # fmt: skip
    setup = TrainingSetup(**{**given, **fields})
    return named_run(estimate(load_model(config, "causal-lm"), setup, None, rank=0))


def test_whether_one_overflows_is_a_small_block_of_the_stream_that_reduces() -> None:
    """``isinf(gradients).any()`` and ``isnan``'s, which fill a segment of that stream."""
    run = run_of(SMALL)
    streams = run.ledger.streams
    flags = [
        block for block, each in run.labels.items() if each.name == "flags that look for overflow"
    ]
    small = [block for block in flags if run.ledger.events[block] == ALLOCATION_ROUNDING]
    assert len(small) == len(flags) / 2
    assert len({streams[block] for block in flags}) == 1


@pytest.mark.parametrize(("stage", "num_alive"), [(1, 1), (3, 2)])
def test_norms_stay_until_all_are_summed_up(stage: int, num_alive: int) -> None:
    """The norm that is kept is made while there are others still; under stage 3 weights that stay gathered are, too."""
    run = run_of(SMALL, zero_stage=stage)
    events = run.ledger.events
    kept = next(b for b, each in run.labels.items() if each.name == "norm of all gradients")
    blocks = [b for b, each in run.labels.items() if each.name == _NORM and b < kept]
    alive = [block for block in blocks if ~block not in events[:kept]]
    assert len(alive) == num_alive
    assert all(~block in events for block in alive)
    most = max(
        sum(~block not in events[:other] for block in blocks if block < other) for other in blocks
    )
    # All of them at once: what each gradient comes to, and the last one's copy.
    assert most > len({events.index(~block) for block in blocks}) / 3


def test_a_bias_is_summed_while_its_layers_input_is_there() -> None:
    """``LinearFunctionForZeroStage3`` sums by itself; autograd's own node does when its variables have gone."""
    before: dict[int, bool] = {}
    for stage in (2, 3):
        given = given_for(BLOOM, zero_stage=stage, checkpointing="full")
        layer = next(each for each in given.passes.backward if each.segment.checkpointed)
        linear = max(
            number for number, each in enumerate(layer.segment.operations)
            if each.kind is OperationKind.LINEAR and len(each.inputs) == 3 and each.saved
        )  # fmt: skip
        operation = layer.segment.operations[linear]
        events = [event for interval in layer.intervals for event in interval.events]
        keys = [key for key, _ in events]
        gone = len(keys) - 1 - keys[::-1].index(operation.saved[-1])
        bias = next(each for each in layer.intervals if each.parameter is operation.inputs[2])
        before[stage] = keys.index(bias.gradient) < gone
    assert before == {2: False, 3: True}


def test_slopes_stay_until_a_checkpointed_layer_has_run_again() -> None:
    """BLOOM's ``alibi`` is an argument of each of its layers."""
    tape = given_for(BLOOM, checkpointing="full").tape
    operations = tape.segments[0].operations
    repeated = next(n for n, each in enumerate(operations) if each.kind is OperationKind.REPEAT)
    (slopes,) = operations[repeated + 1].outputs  # cast
    layer = next(each for each in tape.segments if each.checkpointed)
    assert slopes.storage in layer.external_reads


def test_a_mask_is_made_behind_what_it_is_made_of() -> None:
    """``sdpa_mask``'s numbers of sequences, heads, queries and keys; ``eager_mask``'s zero and least number."""
    tape = given_for(SMALL, attention="eager").tape
    kinds = [each.kind for each in tape.segments[0].operations]
    at = kinds.index(OperationKind.LE)
    arange, add = OperationKind.ARANGE, OperationKind.ADD_SCALAR
    assert kinds[at - 6 : at] == [arange, arange, arange, add, arange, add]
    zeros = OperationKind.ZEROS
    assert kinds[at + 1 : at + 4] == [zeros, zeros, OperationKind.WHERE]
    ranges = [
        out.storage for each in tape.segments[0].operations[at - 6 : at] for out in each.outputs
    ]
    assert sum(each.last_read >= at or each.touched > 0 for each in ranges) >= 4


def test_hooks_stand_around_each_call() -> None:
    """LongT5's global tokens have their keys and values by the layers that made all others': in the forward pass either
    is gathered for each call, and behind the backward pass only the last call's is let go."""
    tape = given_for(LONGT5, task="seq2seq-lm", zero_stage=3).tape
    segment = next(each for each in tape.segments if each.is_layer and "encoder" in each.name)
    found = find_stops(tape)[segment.index]
    stops = found.stops
    fetched = [
        number for acts in stops.forward.values() for act, number in acts if act is Act.FETCH
    ]
    twice = {number for number in fetched if fetched.count(number) == 2}
    assert len(twice) == 2
    behind = [each for acts in stops.after_backward.values() for each in acts]
    assert {number for act, number in behind if act is Act.PASS_BY} == twice
    assert {number for act, number in behind if act is Act.RELEASE} >= twice
