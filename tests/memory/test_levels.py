"""A timeline's levels are what a named run's events come to, added up moment by moment."""

from collections import Counter
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.estimator.named_run import named_run
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.account import ComponentKind
from memplan.memory.replaying.ledger import Part
from memplan.memory.snapshots.levels import NUM_LARGEST, run_levels
from memplan.memory.snapshots.named import NamedRun
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import round_up

SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 999}
Moment = dict[int, int]
"""Blocks that are alive, with their sizes [bytes]."""


def moments(run: NamedRun) -> list[Moment]:
    """What is alive behind each event; the first: before any."""
    found: list[Moment] = [{}]
    for number, event in enumerate(run.ledger.events):
        alive = dict(found[-1])
        if event > 0:
            alive[number] = round_up(event, ALLOCATION_ROUNDING)
        elif event < 0:
            del alive[~event]
        found.append(alive)
    return found


def components(run: NamedRun, moment: Moment) -> dict[ComponentKind, int]:
    sums: Counter[ComponentKind] = Counter()
    for block, size in moment.items():
        sums[run.labels[block].kind] += size
    return dict(+sums)


def largest(run: NamedRun, moment: Moment) -> list[int]:
    """What the largest take, blocks of one name together."""
    sums: Counter[tuple[ComponentKind, str]] = Counter()
    for block, size in moment.items():
        sums[run.labels[block].kind, run.labels[block].name] += size
    return sorted(sums.values(), reverse=True)[:NUM_LARGEST]


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16"},
        {"num_gpus": 2, "engine": "fsdp", "gradient_accumulation_steps": 2},
        {"num_gpus": 2, "zero_stage": 2, "checkpointing": "full"},
    ],
    ids=["one GPU", "FSDP2", "stage 2"],
)
def test_levels_are_the_fullest_moments_and_what_each_layer_leaves(fields: dict[str, Any]) -> None:
    answer = estimate(load_model(SMALL), TrainingSetup(seq_len=64, **fields))
    run = named_run(answer)
    alive, ledger = moments(run), run.ledger
    ends = [*(each.start for each in ledger.stretches[1:]), len(ledger.events)]
    ends_at = {id(each): end for each, end in zip(ledger.stretches, ends, strict=True)}
    levels = run_levels(run)
    before = None
    for level in levels:
        there = alive[level.stretch.start : ends_at[id(level.stretch)] + 1]
        fullest = max(there, key=lambda each: sum(each.values()))
        expected = there[-1] if level.stretch is before else fullest  # the second of a layer
        before = level.stretch
        assert {kind: size for kind, size in level.components.items() if size} == components(
            run, expected
        )
        assert level.total_bytes == sum(expected.values())
        assert [size for _, size in level.largest] == largest(run, expected)
        assert level.total_bytes <= level.reserved_bytes or not expected
    parts = {level.stretch.part for level in levels}
    assert {Part.LOAD, Part.FORWARD, Part.BACKWARD, Part.STEP} <= parts
    assert all(
        names[0][1] >= names[-1][1] for names in (level.largest for level in levels) if names
    )


def test_a_gradient_that_several_tensors_see_parts_of_is_one_block() -> None:
    """Layers that are weighed: what flows back to each is a part of one gradient (``torch.stack``)."""
    config = {
        "model_type": "wavlm", "architectures": ["WavLMForSequenceClassification"], "num_hidden_layers": 2,
        "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "use_weighted_layer_sum": True,
    }  # fmt: skip
    found = estimate(load_model(config), TrainingSetup(precision="bf16", micro_batch_size=1))
    backward = found.phases["backward"]
    assert min(entry.num_bytes for entry in backward.entries) >= 0
    assert sum(entry.num_bytes for entry in backward.entries) == backward.peak_bytes
