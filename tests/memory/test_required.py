"""A run's replays: one that its card did not hinder serves every card with as much room."""

from itertools import pairwise

import pytest

from memplan import TrainingSetup, Verdict, estimate, load_gpu, load_model
from memplan.estimator.job import prepared
from memplan.fast_dataclass import replace
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.replaying.replay import Replayer, replay
from memplan.memory.required import NUMBERED, KeptRuns, PlayedRun, RunSource
from memplan.units import MIB


def ledger() -> Ledger:
    """A run whose cache stays in the way of its last block: 90 MiB reserved with room, 60 required."""
    found = Ledger()
    found.free(found.allocate(30 * MIB))
    found.allocate(60 * MIB)
    return found


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(
    "order", [(None, 200, 90, 60, 40), (40, 60, 90, 200, None), (90, None, 60, 200)]
)
def test_the_order_of_questions_makes_no_difference(
    order: tuple[int | None, ...], *, expandable: bool
) -> None:
    played = ledger()
    run = PlayedRun(lambda: Replayer(played.events, expandable=expandable))
    for room in order:
        capacity = None if room is None else room * MIB
        events = played.events
        alone = replay(events, capacity_bytes=capacity, expandable=expandable)
        assert run.on_card(capacity) == alone, room


def test_cards_with_room_share_a_replay_and_others_do_not() -> None:
    played = ledger()
    run = PlayedRun(lambda: Replayer(played.events))
    found = [run.on_card(room * MIB) for room in (200, 150, 90, 89)]
    assert [one is other for one, other in pairwise(found)] == [True, True, False]


def test_a_model_whose_operations_are_not_written_down_runs_as_its_states() -> None:
    model = load_model({"model_type": "encodec"})
    assert model.activations_left_out
    found = estimate(model, TrainingSetup(), gpu=load_gpu("h100"))
    assert found.verdict is Verdict.STATES_FIT
    assert found.required_bytes >= found.peak_bytes >= 8 * MIB


def test_runs_of_one_shape_are_kept_while_they_are_short_enough_together() -> None:
    kept, long = KeptRuns[Ledger](most_events=6), Ledger()
    for _ in range(7):
        long.allocate(MIB)
    runs = {name: ledger() for name in "abcd"}  # of three events each
    for name in "ab":
        kept.keep(name, runs[name], 3)
    assert kept.get("a") is runs["a"]
    kept.keep("c", runs["c"], 3)
    assert [kept.get(name) for name in "abc"] == [runs["a"], None, runs["c"]]
    kept.keep("long", long, 7)
    assert [kept.get(name) for name in ("a", "c", "long")] == [None, None, None]
    kept.keep("d", runs["d"], 3)
    assert kept.get("d") is runs["d"]


def test_of_runs_that_are_asked_again_the_latest_few_are_kept_however_long() -> None:
    kept = KeptRuns[str](most_events=6, most_runs=2, least_runs=1)
    for name in "abc":
        kept.keep(name, name, 1)
    assert [kept.get(name) for name in "abc"] == [None, "b", "c"]
    kept.keep("long", "long", 7)
    assert [kept.get(name) for name in ("b", "c", "long")] == [None, None, "long"]
    kept.clear()
    assert kept.get("long") is None


def test_a_sweep_over_numbers_of_gpus_and_ways_to_shard_finds_its_runs_again() -> None:
    """With the next micro-batch all of them come once more: one that is gone by then is played anew."""
    numbers_of_gpus, ways, cards = 10, 6, 2
    setup = TrainingSetup(num_gpus=8, zero_stage=3, checkpointing="full", seq_len=2048)
    run = estimate("llama-3.1-8b", setup, gpu=load_gpu("h100")).run
    assert isinstance(run, PlayedRun)
    num_events = run._play().num_events
    assert NUMBERED.most_events > numbers_of_gpus * ways * cards * num_events


def test_runs_of_one_tape_are_told_apart_by_what_is_beside_it() -> None:
    """Recorded once, a model is asked for again with the same beside it, as in a sweep, and with something else."""
    setup = TrainingSetup(seq_len=64).resolve(1024, has_bf16=True)
    given = prepared(load_model("gpt2"), setup, load_gpu("a100-80gb")).rank_input

    def played(found: RankInput) -> PlayedRun:
        source = RunSource(
            record=lambda: found, setup=setup, rank=0, workspace_bytes=0, capacity_bytes=None
        )
        return source.played

    assert played(replace(given)) is played(given)
    other = replace(given, beside=replace(given.beside))
    assert played(other) is not played(given)
    assert played(other) is played(replace(other))
