"""Pipeline schedules as data: which passes a rank runs, of which stage and micro-batch, in which order.

The orders are those of torch 2.13 (torch/distributed/pipelining/schedules.py), pass by pass; its idle
steps and its communication are left out. Looped placements give rank r the stages r, r + pp, …; a V gives
it r and the one as far from the end.

References
----------
.. [1] Y. Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism,"
   NeurIPS 2019. arXiv:1811.06965.
.. [2] D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
   Megatron-LM," SC21. arXiv:2104.04473 (1F1B, interleaved).
.. [3] J. Lamy-Poirier, "Breadth-first pipeline parallelism," 2022. arXiv:2211.05953.
.. [4] P. Qi et al., "Zero bubble pipeline parallelism," ICLR 2024. arXiv:2401.10241 (ZB1P, ZB-V).
.. [5] DeepSeek-AI, "DeepSeek-V3 technical report," 2024. arXiv:2412.19437 (DualPipe).
"""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from memplan.errors import SetupError
from memplan.training.splitting.parallelism import (
    PipelineParallel,
    PipelineRuntime,
    PipelineSchedule,
)


class PassKind(Enum):
    """What a pass computes."""

    FORWARD = "F"
    BACKWARD = "B"
    """All gradients."""
    INPUT = "I"
    """The gradient of what the stage was given."""
    WEIGHT = "W"
    """Those of its weights, behind ``INPUT``."""

    __hash__ = object.__hash__


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: PassKind
    stage: int
    """Of all stages, in the model's order."""
    micro_batch: int


_F, _B, _I, _W = PassKind.FORWARD, PassKind.BACKWARD, PassKind.INPUT, PassKind.WEIGHT


def rank_stages(
    schedule: PipelineSchedule, *, num_ranks: int, num_virtual: int, rank: int
) -> tuple[int, ...]:
    """The stages that a rank of the pipeline has, in the model's order.

    (torch/distributed/pipelining/_utils.py, ``generate_stage_to_rank_mapping``)

    >>> rank_stages(PipelineSchedule.ZBV, num_ranks=4, num_virtual=2, rank=1)
    (1, 6)
    >>> rank_stages(PipelineSchedule.LOOPED_BFS, num_ranks=4, num_virtual=2, rank=1)
    (1, 5)
    """
    if schedule.is_v:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(range(rank, num_ranks * num_virtual, num_ranks))


def takes_few(pipeline: PipelineParallel) -> bool:
    """Whether its 1F1B takes fewer micro-batches than there are stages, as torch's alone does not: Megatron-core and DeepSpeed
    warm up with as many as there are (core/pipeline_parallel/schedules.py, ``num_warmup_microbatches``)."""
    is_torchs = pipeline.runtime is PipelineRuntime.TORCH
    return pipeline.schedule is PipelineSchedule.ONE_F_ONE_B and not is_torchs


def fewest_micro_batches(schedule: PipelineSchedule, num_ranks: int) -> int:
    """Micro-batches of a step that torch's schedule takes at least.

    >>> fewest_micro_batches(PipelineSchedule.ONE_F_ONE_B, 4)
    4
    """
    if schedule is PipelineSchedule.ONE_F_ONE_B:
        return num_ranks
    return 2 * num_ranks if schedule is PipelineSchedule.DUALPIPEV else 1


def check_schedule(
    schedule: PipelineSchedule, *, num_ranks: int, num_virtual: int, num_micro_batches: int
) -> None:
    """Refuse what torch's schedule refuses, with the arithmetic.

    Raises ``SetupError``.

    >>> check_schedule(PipelineSchedule.ZBV, num_ranks=4, num_virtual=2, num_micro_batches=3)
    """
    name = schedule.value
    if schedule.is_single and num_virtual != 1:
        msg = (
            f"virtual_stages: {name} has one stage a rank, got {num_virtual}; schedules with several: "
            "interleaved-1f1b, looped-bfs, interleaved-zero-bubble"
        )
        raise SetupError(msg)
    if schedule.is_v and num_virtual != 2:
        msg = f"virtual_stages: {name} has exactly 2 stages a rank, got {num_virtual}"
        raise SetupError(msg)
    least = fewest_micro_batches(schedule, num_ranks)
    if num_micro_batches < least:
        msg = (
            f"gradient_accumulation_steps: {name} over {num_ranks} ranks needs at least as many "
            f"micro-batches as stages: {num_micro_batches} < {least}; give {least} or more"
        )
        raise SetupError(msg)
    if schedule in _IN_ROUNDS:
        rounds = max(1, num_micro_batches // num_ranks)
        if num_micro_batches % rounds:
            msg = (
                f"gradient_accumulation_steps: {name} runs its micro-batches in rounds of at least one a "
                f"rank: {num_micro_batches} // {num_ranks} = {rounds} rounds, and {num_micro_batches} is "
                f"not divisible by {rounds}; {num_micro_batches // num_ranks * num_ranks} is"
            )
            raise SetupError(msg)


_IN_ROUNDS = (
    PipelineSchedule.INTERLEAVED_ONE_F_ONE_B,
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
)


def passes_of(pipeline: PipelineParallel, place: int) -> tuple[Pass, ...]:
    """The passes of a place in a pipeline, in order: DeepSpeed's 1F1B (runtime/pipe/schedule.py, ``TrainSchedule``) and
    Megatron-core's are torch's, of any number of micro-batches."""
    shape = Shape(pipeline.degree, pipeline.num_virtual, pipeline.num_micro_batches, place)
    if takes_few(pipeline):
        return ordered_passes(pipeline.schedule, shape)
    return rank_passes(
        pipeline.schedule,
        num_ranks=pipeline.degree,
        num_virtual=pipeline.num_virtual,
        num_micro_batches=pipeline.num_micro_batches,
        rank=place,
    )


def rank_passes(
    schedule: PipelineSchedule,
    *,
    num_ranks: int,
    num_virtual: int,
    num_micro_batches: int,
    rank: int,
) -> tuple[Pass, ...]:
    """The passes of a rank of the pipeline, in order.

    Raises ``SetupError`` as ``check_schedule`` does.

    >>> passes = rank_passes(
    ...     PipelineSchedule.ONE_F_ONE_B, num_ranks=2, num_virtual=1, num_micro_batches=3, rank=0
    ... )
    >>> " ".join(f"{each.kind.value}{each.micro_batch}" for each in passes)
    'F0 F1 B0 F2 B1 B2'
    """
    check_schedule(
        schedule,
        num_ranks=num_ranks,
        num_virtual=num_virtual,
        num_micro_batches=num_micro_batches,
    )
    return ordered_passes(schedule, Shape(num_ranks, num_virtual, num_micro_batches, rank))


class Shape(NamedTuple):
    """What decides which passes a rank runs, beside the schedule."""

    num_ranks: int
    num_virtual: int
    num_micro_batches: int
    rank: int


@lru_cache(maxsize=256)
def ordered_passes(schedule: PipelineSchedule, shape: Shape) -> tuple[Pass, ...]:
    """The passes of a rank, in order, whether its runtime takes so few micro-batches or not."""
    num_ranks, num_virtual, _, rank = shape
    stages = rank_stages(schedule, num_ranks=num_ranks, num_virtual=num_virtual, rank=rank)
    return tuple(_ORDERS[schedule](shape, stages))


def _breadth_first(shape: Shape, stages: Sequence[int], *, reverse: bool) -> Iterator[Pass]:
    """All forward passes, stage by stage; then all backward ones (``ScheduleLoopedBFS``)."""
    batches = range(shape.num_micro_batches)
    for stage in stages:
        yield from (Pass(_F, stage, batch) for batch in batches)
    for stage in reversed(stages):
        yield from (Pass(_B, stage, batch) for batch in (reversed(batches) if reverse else batches))


def _gpipe(shape: Shape, stages: Sequence[int]) -> Iterator[Pass]:
    return _breadth_first(shape, stages, reverse=False)


def _looped_bfs(shape: Shape, stages: Sequence[int]) -> Iterator[Pass]:
    return _breadth_first(shape, stages, reverse=True)


def _one_f_one_b(shape: Shape, stages: Sequence[int]) -> Iterator[Pass]:
    """As many forward passes as there are stages to the end; then one backward, one forward."""
    (stage,) = stages
    count = shape.num_micro_batches
    warmup = min(count, shape.num_ranks - shape.rank)
    yield from (Pass(_F, stage, batch) for batch in range(warmup))
    for batch in range(count):
        yield Pass(_B, stage, batch)
        if batch + warmup < count:
            yield Pass(_F, stage, batch + warmup)


class _Counter:
    """The next micro-batch of each stage, for passes of one kind."""

    def __init__(self, kind: PassKind) -> None:
        self.kind = kind
        self.counts: dict[int, int] = {}

    def next(self, stage: int) -> Pass:
        batch = self.counts.get(stage, 0)
        self.counts[stage] = batch + 1
        return Pass(self.kind, stage, batch)


def _interleaved(
    shape: Shape, stages: Sequence[int], *, hop: int, backward: PassKind, lag: int | None
) -> Iterator[Pass]:
    """Depth first, round by round (``_get_1f1b_rank_ops``).

    ``hop``: further forward passes before the first backward one, for each rank behind. ``lag``: how many
    backward passes come before the first one for weights; None: there are none apart.
    """
    count, num_stages = shape.num_micro_batches, len(stages)
    in_round = count // max(1, count // shape.num_ranks)
    total = count * num_stages
    behind = shape.num_ranks - 1 - shape.rank
    warmup = min((num_stages - 1) * in_round + hop * behind, total)
    forwards, backwards, weights = _Counter(_F), _Counter(backward), _Counter(_W)
    order: list[int] = []
    for step in range(total + warmup):
        if step < total:
            yield forwards.next(stages[step // in_round % num_stages])
        if step >= warmup:
            stage = stages[num_stages - 1 - (step - warmup) // in_round % num_stages]
            yield backwards.next(stage)
            order.append(stage)
            if lag is not None and step - warmup >= lag:
                yield weights.next(order.pop(0))
    if lag is not None:
        yield from (weights.next(stage) for stage in order)


def _interleaved_1f1b(shape: Shape, stages: Sequence[int]) -> Iterator[Pass]:
    return _interleaved(shape, stages, hop=2, backward=_B, lag=None)


def _interleaved_zero_bubble(shape: Shape, stages: Sequence[int]) -> Iterator[Pass]:
    return _interleaved(shape, stages, hop=1, backward=_I, lag=shape.rank)


def _zbv(shape: Shape, stages: Sequence[int]) -> Iterator[Pass]:
    """``ScheduleZBVZeroBubble``: planned for a full pipeline, of which fewer micro-batches leave some out."""
    passes = _full_zbv(shape, stages)
    return (each for each in passes if each.micro_batch < shape.num_micro_batches)


def _full_zbv(shape: Shape, stages: Sequence[int]) -> Iterator[Pass]:
    near, far = stages
    rank, num_ranks = shape.rank, shape.num_ranks
    count = max(2 * num_ranks - 1, shape.num_micro_batches)
    forwards, inputs, weights = _Counter(_F), _Counter(_I), _Counter(_W)
    for _ in range(2 * (num_ranks - rank) - 1):
        yield forwards.next(near)
    for _ in range(rank):
        yield forwards.next(far)
        yield forwards.next(near)
    for _ in range(num_ranks - rank):
        yield from (forwards.next(far), inputs.next(far), weights.next(far))
    while forwards.counts.get(far, 0) < forwards.counts[near] or forwards.counts[near] < count:
        if forwards.counts[near] < count:
            yield forwards.next(near)
        yield from (inputs.next(near), weights.next(near))
        yield from (forwards.next(far), inputs.next(far), weights.next(far))
    for _ in range(rank):
        yield from (inputs.next(near), inputs.next(far))
    for _ in range(num_ranks - rank):
        yield from (inputs.next(near), weights.next(near))
    for stage in (far, near):
        while weights.counts.get(stage, 0) < inputs.counts.get(stage, 0):
            yield weights.next(stage)


def _dualpipev(shape: Shape, stages: Sequence[int]) -> Iterator[Pass]:
    """``ScheduleDualPipeV``; what it overlaps runs here as torch's runtime runs it, forward first."""
    near, far = stages
    behind = shape.num_ranks - shape.rank - 1
    plan = _DualPlan()
    for _ in range(2 * behind):
        yield plan.forwards.next(near)
    for _ in range(shape.rank + 1):
        yield from (plan.forwards.next(near), plan.forwards.next(far))
    for _ in range(behind):
        yield plan.backward(far, split=True)
        yield from plan.pending()
        yield plan.forwards.next(far)
    for _ in range(shape.num_micro_batches - 2 * shape.num_ranks + shape.rank + 1):
        for one, other in ((near, far), (far, near)):
            yield from (plan.forwards.next(one), plan.backward(other))
    for _ in range(behind):
        yield plan.backward(far)
        yield from (plan.forwards.next(far), plan.backward(near))
    split = False
    half, is_odd = (shape.rank + 1) // 2, shape.rank % 2 == 1
    for number in range(shape.rank + 1):
        split |= number == half and is_odd
        yield plan.backward(far, split=split)
        split |= number == half
        yield plan.backward(near, split=split)
    for _ in range(behind):
        yield from plan.pending()
        yield plan.backward(near, split=split)
    for _ in range(shape.rank + 1):
        yield from plan.pending()


class _DualPlan:
    """Counts of a DualPipeV, and its passes for weights that wait."""

    def __init__(self) -> None:
        self.forwards = _Counter(_F)
        self.backwards = _Counter(_B)
        self.waiting: list[Pass] = []

    def backward(self, stage: int, *, split: bool = False) -> Pass:
        made = self.backwards.next(stage)
        if split:
            self.waiting.append(made._replace(kind=_W))
            made = made._replace(kind=_I)
        return made

    def pending(self) -> Iterator[Pass]:
        if self.waiting:
            yield self.waiting.pop(0)


_ORDERS: dict[PipelineSchedule, Callable[[Shape, Sequence[int]], Iterator[Pass]]] = {
    PipelineSchedule.GPIPE: _gpipe,
    PipelineSchedule.ONE_F_ONE_B: _one_f_one_b,
    PipelineSchedule.INTERLEAVED_ONE_F_ONE_B: _interleaved_1f1b,
    PipelineSchedule.LOOPED_BFS: _looped_bfs,
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE: _interleaved_zero_bubble,
    PipelineSchedule.ZBV: _zbv,
    PipelineSchedule.DUALPIPEV: _dualpipev,
}


MAX_ACTIVE_STAGES = 3
"""Stages of a rank whose weights are gathered ahead (``_add_unshard_reshard``)."""


def wanted_stages(passes: Sequence[Pass]) -> Iterator[tuple[int, ...]]:
    """Before each pass, the stages that run next: those whose weights are to be gathered by then.

    >>> passes = [Pass(PassKind.FORWARD, stage, 0) for stage in (0, 4, 8, 12)]
    >>> list(wanted_stages(passes))
    [(0, 4, 8), (4, 8, 12), (8, 12), (12,)]
    """
    found: list[tuple[int, ...]] = []
    behind: tuple[int, ...] = ()
    for each in reversed(passes):
        others = tuple(stage for stage in behind if stage != each.stage)
        behind = (each.stage, *others)
        found.append(behind[:MAX_ACTIVE_STAGES])
    return reversed(found)


class InFlight(NamedTuple):
    """The most that a rank holds at a time, in micro-batches of one stage."""

    until_input: int
    """Until the gradient of the stage's input is there."""
    until_weight: int
    """Until the gradients of its weights are."""
    waiting: int
    """Passes for weights that are still to come when the input's gradient is there."""
    by_stage: tuple[tuple[int, int], ...]
    """Stages, and what they hold until the gradients of their weights are there."""


def most_in_flight(passes: Sequence[Pass]) -> InFlight:
    """How much of a rank's passes is in flight at a time.

    >>> passes = rank_passes(
    ...     PipelineSchedule.GPIPE, num_ranks=2, num_virtual=1, num_micro_batches=3, rank=0
    ... )
    >>> most_in_flight(passes).until_weight
    3
    """
    inputs = weights = waiting = most_inputs = most_weights = most_waiting = 0
    stages: dict[int, int] = {}
    most: dict[int, int] = {}
    for kind, stage, _ in passes:
        if kind is _F:
            inputs += 1
            weights += 1
            stages[stage] = stages.get(stage, 0) + 1
            most[stage] = max(most.get(stage, 0), stages[stage])
        if kind in (_B, _I):
            inputs -= 1
        if kind in (_B, _W):
            weights -= 1
            stages[stage] -= 1
        waiting += (kind is _I) - (kind is _W)
        most_inputs, most_weights = max(most_inputs, inputs), max(most_weights, weights)
        most_waiting = max(most_waiting, waiting)
    return InFlight(most_inputs, most_weights, most_waiting, tuple(sorted(most.items())))
