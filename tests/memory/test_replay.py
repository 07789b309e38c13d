"""Replays: compiled and in Python alike, until a step changes nothing, and the least capacity of all."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from memplan import TrainingSetup, load_gpu, load_model
from memplan.estimator import estimate
from memplan.memory.replaying import replay as replays
from memplan.memory.replaying.in_python import PythonRun
from memplan.memory.replaying.ledger import Cycle, Ledger, cycle_of
from memplan.memory.replaying.replay import (
    AllocatorPeaks,
    Replayer,
    floor_bytes,
    gaps,
    is_enough,
    islands,
    peaks_in_python,
    replay,
)
from memplan.units import KIB, MIB
from tests.memory.test_repeated_steps import again

KINDS = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])
COMPILED = pytest.mark.skipif(replays.COMPILED is None, reason="no compiled code was built")


@COMPILED
def test_what_was_compiled_for_another_version_is_left_aside(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    monkeypatch.delenv(replays.PURE_PYTHON, raising=False)
    assert replays.compiled_code() is not None
    monkeypatch.setattr(replays, "INTERFACE", replays.INTERFACE + 1)
    assert replays.compiled_code() is None
    monkeypatch.setattr(replays, "COMPILED", None)
    assert "of another version: install memplan again" in run("--version", "--verbose").stdout


def drawn(chance: random.Random, *, num_events: int) -> Ledger:
    """Blocks that stay, then a step that recurs: what it leaves goes in its copy."""
    ledger = Ledger()
    sizes = [30 * KIB, 700 * KIB, *(number * MIB for number in (2, 3, 9, 12, 25, 64))]

    def block() -> int:
        stream = chance.choice((0, 0, 0, 1, 9))
        return ledger.allocate(chance.choice(sizes) + chance.randrange(3) * 512, stream)

    for _ in range(chance.randrange(1, 12)):
        number = block()
        if chance.random() < 0.5:
            ledger.free(number)
    plan = [chance.random() for _ in range(num_events)]
    seed = chance.randrange(1 << 30)
    left: list[int] = []
    for _ in range(2):
        # The same choices in either step.
        step = random.Random(seed)
        ledger.begin_step()
        chance, there = step, []
        stays, left = left, []
        for each in plan:
            if each < 0.04:
                ledger.empty_cache()
            elif stays and each < 0.3:
                ledger.free(stays.pop())
            elif there and each < 0.55:
                ledger.free(there.pop(step.randrange(len(there))))
            else:
                there.append(block())
        for number in stays:
            ledger.free(number)
        left = there[: step.randrange(3)]
        for number in there[len(left) :]:
            ledger.free(number)
    ledger.recurs()
    return ledger


def in_python(ledger: Ledger, capacity_bytes: int | None, *, expandable: bool) -> AllocatorPeaks:
    run = PythonRun(ledger.events, ledger.streams, ledger.cycle, expandable=expandable)
    return peaks_in_python(run, capacity_bytes)


@pytest.fixture(params=["compiled", "Python"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replays are made by both, one after the other."""
    name: str = request.param
    if name == "Python":
        monkeypatch.setattr(replays, "COMPILED", None)
    elif replays.COMPILED is None:
        pytest.skip("no compiled code was built")
    return name


@COMPILED
@KINDS
def test_compiled_code_finds_what_python_does(*, expandable: bool) -> None:
    chance = random.Random(11)
    recurring = flushed = died = 0
    for number in range(120):
        ledger = drawn(chance, num_events=chance.randrange(3, 90))
        recurring += ledger.cycle is not None
        roomy = in_python(ledger, None, expandable=expandable)
        capacities = [chance.randrange(MIB, roomy.reserved_bytes + MIB) for _ in range(4)]
        # One run is asked again and again: it begins where it was when nothing was lacking yet.
        run = Replayer(ledger.events, ledger.streams, ledger.cycle, expandable=expandable)
        asked = [None, *capacities, *(capacity + MIB for capacity in capacities)]
        chance.shuffle(asked)
        for capacity in asked:
            alone = in_python(ledger, capacity, expandable=expandable)
            assert run.on_card(capacity) == alone, (number, capacity)
            flushed += alone.num_flushes > 0
            died += alone.died_at is not None
    assert recurring > 20
    assert flushed > 50
    assert died > 50


def test_what_a_card_reaches_is_the_same_whatever_others_were_asked_about_before() -> None:
    """Of more cards than the states of their runs are kept for: compiled code forgets all of them at 4 MiB."""
    chance, ledger, there = random.Random(29), Ledger(), list[int]()
    for number in range(20_000):
        if number > 6000 and number % 2:
            ledger.free(there.pop(chance.randrange(len(there))))
        else:
            there.append(ledger.allocate(chance.randrange(2, 40) * MIB))
    run = Replayer(ledger.events)
    most, lived = run.on_card(None).reserved_bytes, 0
    for _ in range(100):
        capacity = chance.randrange(most * 24 // 25, most)
        alone = replay(ledger.events, capacity_bytes=capacity)
        assert run.on_card(capacity) == alone
        lived += alone.died_at is None
    assert 10 < lived < 90


def test_who_is_asked_again_goes_on_to_what_the_whole_run_comes_to() -> None:
    chance = random.Random(17)
    died = lasted = 0
    for number in range(150):
        ledger = drawn(chance, num_events=chance.randrange(3, 120))
        run = PythonRun(ledger.events, ledger.streams, ledger.cycle)
        most = in_python(ledger, None, expandable=False).reserved_bytes + MIB
        for _ in range(12):
            capacity = chance.choice([None, *(chance.randrange(MIB, most) for _ in range(4))])
            steps = chance.choice([1, 3, replays.MAX_CYCLES])
            whole = PythonRun(ledger.events, ledger.streams, ledger.cycle)
            alone = peaks_in_python(whole, capacity, steps)
            assert peaks_in_python(run, capacity, steps) == alone, (number, capacity, steps)
            died += alone.died_at is not None
            lasted += alone.num_cycles > 1
    assert died > 100
    assert lasted > 5


@KINDS
def test_a_search_follows_no_stretch_that_it_has_followed_from_the_same_state(
    monkeypatch: pytest.MonkeyPatch, *, expandable: bool
) -> None:
    followed: list[int] = []
    explore = PythonRun._explore

    def watched(run: PythonRun, place: Any, capacity: int) -> Any:
        followed.append(place.stretch)
        return explore(run, place, capacity)

    monkeypatch.setattr(replays, "COMPILED", None)
    monkeypatch.setattr(PythonRun, "_explore", watched)
    chance, places = random.Random(23), 0
    for _ in range(30):
        ledger = drawn(chance, num_events=80)
        run = Replayer(ledger.events, ledger.streams, ledger.cycle, expandable=expandable)
        floor = floor_bytes(run.on_card)
        before = len(followed)
        assert floor_bytes(run.on_card) == floor
        assert len(followed) == before, "all is known"
        assert run._in_python is not None
        places += len(run._in_python._places)
    assert places < 0.9 * len(followed), "several ways lead to one place"


@COMPILED
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("t5-small", {"engine": "deepspeed", "zero_stage": 3}),
        ("gpt2", {"engine": "deepspeed", "zero_stage": 1, "gradient_accumulation_steps": 3}),
        ("bert-base", {"engine": "fsdp"}),
        ("qwen3-0.6b", {"engine": "ddp"}),
    ],
)
def test_of_models_too(
    model: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = TrainingSetup(num_gpus=4, seq_len=128, **options)  # type: ignore[arg-type]
    answers = []
    for compiled in (replays.COMPILED, None):
        monkeypatch.setattr(replays, "COMPILED", compiled)
        from memplan.memory import required

        required._played.cache_clear()
        required.REPLAYERS.clear()
        found = estimate(load_model(model), setup, load_gpu("a100"))
        answers.append((found.required_bytes, found.reserved_bytes, found.run.peaks))
    assert answers[0] == answers[1]


@COMPILED
@pytest.mark.parametrize(
    ("events", "before", "cycle"),
    [([512, ~5], 0, 2), ([~0, 512], 0, 2), ([512, ~0, ~0], 0, 3), ([512, 512, ~0], 0, 2)],
    ids=["of what is to come", "of nothing", "twice", "of what no step leaves"],
)
def test_events_that_are_no_run_are_refused(events: list[int], before: int, cycle: int) -> None:
    with pytest.raises(ValueError, match=r"no run|freed twice"):
        Replayer(events, {}, Cycle(before, cycle)).on_card(None)


class TestSettling:
    @pytest.mark.usefixtures("either")
    def test_a_step_that_changes_nothing_is_followed_once_more(self) -> None:
        run = [64 * MIB, 3 * MIB, ~1, 3 * MIB, ~3]
        found = replay(run, {}, Cycle(1, 3))
        assert (found.num_cycles, found.is_settled) == (1, True)

    def test_a_run_may_die_long_after_its_first_steps(self) -> None:
        """BERT under FSDP2 lives some MiB below the floor for steps on end, and then dies."""
        setup = TrainingSetup(num_gpus=8, engine="fsdp", micro_batch_size=4, seq_len=256)  # type: ignore[arg-type]
        run = estimate(load_model("bert-base"), setup, load_gpu("a100")).run
        floor = run.required_bytes
        late = [
            capacity
            for capacity in range(floor - 200 * MIB, floor, 2 * MIB)
            if (found := run.on_card(capacity)).died_at is not None and found.num_cycles > 3
        ]
        assert late
        for capacity in late:
            assert run.on_card(capacity, max_cycles=2).died_at is None
        assert run.on_card(floor).is_settled

    def test_that_it_was_not_followed_to_the_end_is_said(self) -> None:
        chance, unsettled = random.Random(4), 0
        for _ in range(150):
            ledger = drawn(chance, num_events=60)
            run = Replayer(ledger.events, ledger.streams, ledger.cycle)
            peaks = run.on_card(None)
            for capacity in range(peaks.requested_bytes, peaks.reserved_bytes, 6 * MIB):
                found = run.on_card(capacity)
                if found.died_at is None and found.num_cycles > 1:
                    assert found.is_settled
                    short = run.on_card(capacity, max_cycles=found.num_cycles - 1)
                    assert not short.is_settled
                    unsettled += 1
        assert unsettled > 5


class TestFloor:
    @pytest.mark.usefixtures("either")
    def test_it_is_the_least_of_all_that_are_enough_from_there_on(self) -> None:
        chance = random.Random(3)
        islanded = 0
        for number in range(60):
            ledger = drawn(chance, num_events=chance.randrange(5, 70))
            run = Replayer(ledger.events, ledger.streams, ledger.cycle)
            floor = floor_bytes(run.on_card)
            reserved = run.on_card(None).reserved_bytes
            for capacity in range(floor, reserved, 2 * MIB):
                assert run.on_card(capacity).died_at is None, (number, capacity)
            if floor:
                assert run.on_card(floor - 512).died_at is not None, number
            for capacity in range(2 * MIB, reserved + 2 * MIB, 6 * MIB):
                asked = Replayer(ledger.events, ledger.streams, ledger.cycle)
                assert is_enough(asked.on_card, capacity) == (capacity >= floor)
            below = islands(run.on_card, below_bytes=floor)
            islanded += bool(below)
            for start, end in below:
                assert run.on_card(start).died_at is None
                assert run.on_card(end - 512).died_at is None
            assert not gaps(run.on_card, above_bytes=floor), (
                "a short run's ranges are all looked at"
            )
            dead = gaps(run.on_card, above_bytes=floor // 2)
            assert not floor or dead[0][1] == floor
            assert all(run.on_card(end - 512).died_at is not None for _, end in dead)
        assert islanded > 3

    def test_what_dies_only_late_is_not_taken_for_enough_on_an_island_among_what_does(self) -> None:
        # All lives for a few steps down to 10 MiB; in the end what has less than 40 dies, but for an island.
        def on_card(
            capacity_bytes: int | None, *, max_cycles: int = replays.MAX_CYCLES
        ) -> AllocatorPeaks:
            capacity = 60 if capacity_bytes is None else capacity_bytes // MIB
            asked = min(60, capacity // 2 * 2)
            lives = asked >= 40 or asked == 20 or (asked >= 10 and max_cycles <= replays.TEN_STEPS)
            return AllocatorPeaks(
                requested_bytes=0,
                allocated_bytes=0,
                reserved_bytes=asked * MIB,
                num_mallocs=0,
                num_flushes=0,
                died_at=None if lives else 7,
                lacked_bytes=None if asked == 60 else (asked + 2) * MIB,
            )

        assert floor_bytes(on_card) == 40 * MIB

    @pytest.mark.parametrize("name", ["gpt2", "t5-small"])
    def test_of_real_runs_too(self, name: str) -> None:
        for options in ({"engine": "fsdp"}, {"engine": "deepspeed", "zero_stage": 3}):
            setup = TrainingSetup(num_gpus=8, seq_len=256, **options)  # type: ignore[arg-type]
            run = estimate(load_model(name), setup, load_gpu("h100")).run
            floor, reserved = run.required_bytes, run.peaks.reserved_bytes
            for capacity in range(floor, reserved, 2 * MIB):
                assert run.on_card(capacity).died_at is None, (name, options, capacity)

    def test_an_answer_serves_every_capacity_that_makes_the_same_decisions(self) -> None:
        chance = random.Random(8)
        for _ in range(40):
            ledger = drawn(chance, num_events=50)
            reserved = in_python(ledger, None, expandable=False).reserved_bytes
            capacity = chance.randrange(MIB, reserved + 1)
            found = in_python(ledger, capacity, expandable=False)
            ends = [
                found.reserved_bytes,
                *((found.lacked_bytes - 512,) if found.lacked_bytes else ()),
            ]
            for other in ends:
                if found.holds_on(other):
                    assert in_python(ledger, other, expandable=False) == found


def test_a_cycle_does_what_its_copies_do() -> None:
    """A step that recurs, against the same step written down as often."""
    chance, checked = random.Random(2), 0
    for number in range(120):
        ledger = drawn(chance, num_events=30)
        if ledger.cycle is None:
            continue
        checked += 1
        events, streams = again(ledger, len(ledger.steps) + 3)
        capacity = chance.randrange(MIB, replay(events, streams).reserved_bytes + 1)
        for room in (None, capacity):
            run = Replayer(ledger.events, ledger.streams, ledger.cycle)
            found, whole = (
                run.on_card(room, max_cycles=3),
                replay(events, streams, capacity_bytes=room),
            )
            assert (found.died_at is None) == (whole.died_at is None), (number, room)
            if not found.is_settled:
                assert found.num_mallocs == whole.num_mallocs, (number, room)
            assert found.reserved_bytes == whole.reserved_bytes, (number, room)
    assert checked > 20


def test_what_is_no_cycle() -> None:
    assert cycle_of([512, 512, ~0], {}, 1, 2) is None, "it frees what no step left"
    assert cycle_of([512, 512, 1024, ~1], {}, 1, 2) is None, "what it leaves is of another size"
