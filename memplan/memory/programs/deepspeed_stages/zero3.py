"""Stage 3 of ZeRO (DeepSpeed 0.19.8, runtime/zero/stage3.py).

Three streams take part where ``overlap_comm`` is on: the main one, that of the all-gathers, whose
gathered parameters are made on it too, and that of the reduction. The first micro-batch has no trace
yet: each module gathers its own parameters and lets them go at once, the small ones that are to stay
included (``partitioned_param_coordinator.py``). A block that another stream uses is free when that
stream has come past it (``record_stream``); here at once, as in a run whose streams keep up.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import islice

from memplan.graph.core.segments import Segment
from memplan.memory.account import ComponentKind
from memplan.memory.deepspeed.coordinator import Visited
from memplan.memory.deepspeed.job import Job, rounded
from memplan.memory.deepspeed.layers import Layers
from memplan.memory.deepspeed.modules import Act, Module, find_stops
from memplan.memory.deepspeed.reduction import NORM_BYTES
from memplan.memory.deepspeed.shards import (
    FLAG_BYTES,
    NORM_CHUNK,
    module_numbers,
    paddings,
    scatter_settings,
)
from memplan.memory.engine_options import looks_for_overflow
from memplan.memory.programs.deepspeed_stages.gathering import MOST_COMPARED
from memplan.memory.programs.deepspeed_stages.holding import REDUCE_STREAM, SHARDS, HoldingShards
from memplan.memory.programs.deepspeed_stages.steps_again import StepsAgain, Stood
from memplan.memory.programs.weights import Weight
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.memory.stops import Acts, Stops, backward_acts, forward_acts
from memplan.training.choices_of_kernels.kernels import TILED_LOSSES
from memplan.training.splitting.exchange import ExchangeKind

_BUFFERS, _GATHERED = ComponentKind.COMMUNICATION_BUFFERS, ComponentKind.GATHERED_PARAMETERS
_GRADIENTS, _TEMPORARIES = ComponentKind.GRADIENTS, ComponentKind.TEMPORARIES
_FETCH, _DETACH, _HAND_OVER = Act.FETCH, Act.DETACH, Act.HAND_OVER
_READ, _PASS_BY = Act.READ, Act.PASS_BY
_NORM = "a gradient in fp32, for its norm"
_NORM_KEPT = -1
"""Stands among the numbers of parameters for the norm that is kept."""
BESIDE_NORM = 7
"""Numbers that are there when a sub-group's norm is: the sum, its root, whether that is finite in four parts, its cast."""
_OVERFLOW = "flags that look for overflow"


class ShardedParametersProgram(HoldingShards):
    """One rank that holds shards of everything."""

    is_even = False

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job, ledger, workspace_bytes=workspace_bytes)
        self.settings = scatter_settings(job)
        self.reduce_stream = REDUCE_STREAM if job.options.overlap_comm else 0
        self.traces = job.given.tape.kernels.loss not in TILED_LOSSES
        """Steps begin with the model's own forward pass, which tells the coordinator so; ALST's recipes
        call what is below the head, then the head for each tile."""
        self.found = find_stops(job.given.tape)
        self.viewed = frozenset(
            job.weights.number(each, copy)
            for segment in job.given.tape.segments
            if not segment.checkpointed
            for each in segment.parameters
            if each.viewed
            for copy in range(segment.num_copies)
        )
        """Parameters of which the graph keeps a view, and with it what a forward pass gathered."""
        self.members: dict[tuple[int, int], list[Visited]] = {}
        """The parameters of each module of a segment's repetition."""
        self.waiting: list[tuple[int, Block | None]] = []
        """Parameters to be reduced next, and their gradients that lie outside the bucket."""
        self.filled = 0
        """Their elements."""
        self.delayed: dict[int, Block] = {}
        """Gradients that wait for others of their module."""
        self.unreleased: dict[int, None] = {}
        """Parameters that no hook lets go of in this backward pass."""
        self.in_backward = False
        self.begun: object = None
        """What stood when the present micro-batch began, or the one before it."""
        self.again = StepsAgain(ledger)

    # -- modules ---------------------------------------------------------------------------------

    def stops(self, segment: Segment) -> Stops | None:
        """Where modules begin and end."""
        return self.found[segment.index].stops

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:
        """Fetch and release, in the order of the hooks."""
        modules, gathers = self._modules(segment, repetition), self.gathers
        for act, number in acts:
            if act is _FETCH and gathers:
                self.coordinator.visit(modules[number])
            elif act is _HAND_OVER:
                for index in sorted(self.delayed):
                    self._take(index, self.delayed.pop(index))
            elif not gathers:
                continue
            elif act is _READ:
                first, stride = self.found[segment.index].reads[number]
                self.coordinator.read(first + stride * repetition)
            elif act is _DETACH:
                self.coordinator.returned(modules[number])
                self.coordinator.detach(modules[number])
            elif modules[number]:
                module = self.found[segment.index].modules[number]
                hooked = module.has_gradient and act is not _PASS_BY
                self._release(modules[number], hooked=hooked)

    def _release(self, members: Visited, *, hooked: bool) -> None:
        """A module has run; ``hooked`` says whether one behind its backward pass is told."""
        self.coordinator.returned(members)
        if not self.in_backward:
            self.coordinator.detach([each for each in members if each in self.viewed])
            self.coordinator.leave([each for each in members if each not in self.viewed])
            return
        if hooked:
            self.coordinator.leave(members)
        else:
            self.unreleased.update(dict.fromkeys(members))
        # Of a frozen weight no gradient says when its product is through, of one that is read several times the last does.
        for each in members:
            self.coordinator.free_newest(each)

    def _modules(self, segment: Segment, repetition: int) -> list[Visited]:
        """What each module needs."""
        key = (segment.index, repetition)
        found = self.members.get(key)
        if found is None:
            modules = self.found[segment.index].modules
            found = [self._visited(each, repetition) for each in modules]
            self.members[key] = found
        return found

    def _visited(self, module: Module, repetition: int) -> Visited:
        own = module_numbers(module.weights, repetition)
        inside = self._inside(module, repetition)
        if not module.external:
            return Visited(own, inside)
        external = module_numbers(module.external, repetition)
        return Visited(sorted({*own, *external}), inside, external)

    def _inside(self, module: Module, repetition: int) -> Collection[int]:
        """What is asked of modules where some are sealed."""
        if not self.found.delayed:
            return ()
        if module.inside is None:
            return range(len(self.numels))
        return frozenset(first + stride * repetition for first, stride in module.inside)

    # -- layers that are alike -------------------------------------------------------------------

    def standing_at(self, segment: Segment, copy: int) -> Hashable:
        """What is gathered and what waits, by where it is from here."""
        if not self.traces or self.company is not None or self.coordinator.second_shard:
            return None
        if len(self.waiting) > MOST_COMPARED:
            return None
        layers = self._layers(segment, copy)
        place, gathering = layers.place, self.coordinator.standing_at(layers)
        if gathering is None:
            return None
        waiting = tuple((place(number), block) for number, block in self.waiting)
        delayed = tuple((place(number), block) for number, block in self.delayed.items())
        return gathering, self.filled, waiting, delayed, tuple(self.unreleased)

    def skip_turns(self, segment: Segment, copy: int, turn: int, times: int) -> int:
        """As many as the coordinator's look ahead finds alike."""
        layers = self._layers(segment, copy)
        times = self.coordinator.skip_turns(layers, turn, times)
        moved = layers.moved
        copies = turn * times
        self.waiting = [(moved(number, copies), block) for number, block in self.waiting]
        self.delayed = {moved(number, copies): block for number, block in self.delayed.items()}
        return times

    def _layers(self, segment: Segment, copy: int) -> Layers:
        weights = self.job.weights
        own, copies = weights.segments[segment.index], weights.copies[segment.index]
        stride = own.stride if copies > 1 else 0
        return Layers(own.first, stride, copies, copy)

    # -- a step that is as the one before --------------------------------------------------------

    def run_step(self, step: int) -> None:
        """One step. The third finds the trace that the second found, and what stays gathered; it is that one again."""
        left = self.again.step(self._stands())
        if left is None:
            super().run_step(step)
        else:
            self._stand_further(left)

    def _stand_further(self, left: dict[int, Block]) -> None:
        """Go on where what was written again left off."""
        self.norm = left.pop(_NORM_KEPT, None)
        self.coordinator.blocks = left

    def _stands(self) -> Stood | None:
        """All that a step depends on from the second one on; None where something else may take part."""
        coordinator = self.coordinator
        is_idle = not (coordinator.handles or coordinator.detached or coordinator.second)
        is_told = self.gathers and self.traces and self.company is None and self.ledger.repeats
        if self.ledger.standing() is not None or not (is_told and is_idle and coordinator.recorded):
            return None
        if any(self.playback.workspaces.values()):
            return None
        blocks = dict(coordinator.blocks)
        if self.norm is not None:
            blocks[_NORM_KEPT] = self.norm
        return Stood(dict(coordinator.sizes), blocks, len(coordinator.recorded))

    # -- a micro-batch ---------------------------------------------------------------------------

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:
        """What begins as the one before did is not played out again."""
        standing = self._standing()
        if not first and standing is not None and standing == self.begun:
            return
        self.begun = standing
        # With offloaded gradients the last one of a step does more.
        does_more = first or (last and self.settings.offloads)
        left = self.again.micro_batch(self._stands(), step, does_more=does_more)
        if left is None:
            super().micro_batch(step, first=first, last=last)
        else:
            self._stand_further(left)

    def backward_pass(self) -> None:
        """Where it begins is noted."""
        self.again.turn()
        super().backward_pass()

    def forward_pass(self) -> None:
        """The model's first hook tells the coordinator so."""
        if self.gathers and self.traces:
            self.coordinator.restart()
        super().forward_pass()

    def _standing(self) -> object:
        """All that a micro-batch depends on, to be compared; None where it is not to be.

        With offloaded gradients the last one of a step does more than others.
        """
        held = self.ledger.standing()
        if held is None or self.settings.offloads or self.company is not None:
            return None
        return held, self.coordinator.standing()

    def begin_backward(self) -> None:
        """Hooks of forward passes, run again, let go as in any other."""
        self.in_backward = True

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """Into the bucket, or after all others of a module that is taken as a whole."""
        number = self.number(weight)
        self.coordinator.free_detached(number)
        if number in self.found.delayed:
            self.delayed[number] = block
        else:
            self._take(number, block)

    def _take(self, number: int, block: Block) -> None:
        numel, limit = self.numels[number], self.settings.bucket_numel
        if self.filled and self.filled + numel > limit:
            self._reduce()
        if self.settings.is_contiguous and self.filled + numel <= limit:
            self.ledger.free(block)
            self.waiting.append((number, None))
        else:
            self.waiting.append((number, block))
        self.filled += numel

    def _reduce(self) -> None:
        """Reduce-scatter what waits, through casts and a flat copy; then the shards are taken."""
        if not self.waiting:
            return
        ledger = self.ledger
        copies = self._communicate()
        for number, block in self.waiting:
            self._take_shard(number)
            if block is not None:
                ledger.free(block)
        for block in copies:
            ledger.free(block)
        self.waiting = []
        self.filled = 0

    def _communicate(self) -> list[Block]:
        """The copies that are left when this rank's shards have come."""
        settings, stream, ledger = self.settings, self.reduce_stream, self.ledger
        width, ranks = settings.communication_bytes, settings.num_ranks
        numels = [self.numels[number] for number, _ in self.waiting]
        kind = ExchangeKind.REDUCE_SCATTER if settings.scatters else ExchangeKind.ALL_REDUCE
        ledger.exchange(kind, width * sum(numels), self.ranks, self.hiding)
        ledger.exchange(ExchangeKind.COPY, 4 * width * sum(numels))
        outside = [self.numels[number] for number, block in self.waiting if block is not None]
        flat_name = "the flat copy of gradients to reduce"
        cast_name, recast_name = "gradients cast to be reduced", "reduced gradients cast to be kept"
        casts: list[Block] = []
        flat: Block | None = None
        reduced = [self.shards[number] for number, _ in self.waiting]
        if settings.is_contiguous and not settings.scatters and not outside:
            reduced = [sum(numels)]
            if ranks > 1:
                flat = self.allocate(width * sum(numels), _BUFFERS, flat_name, stream=stream)
        else:
            if width != settings.weight_bytes:
                casts = [
                    self.allocate(width * numel, _BUFFERS, cast_name, stream=stream)
                    for numel in outside
                ]
            if len(numels) > 1 or numels[0] % ranks:
                flat = self._joined(numels, sum(reduced), flat_name)
        if width == settings.accumulated_bytes:
            return [*([] if flat is None else [flat]), *casts]
        recast = [
            self.allocate(
                settings.accumulated_bytes * numel, _GRADIENTS, recast_name, stream=stream
            )
            for numel in reduced
        ]
        for block in ([] if flat is None else [flat]) + casts:
            ledger.free(block)
        return recast

    def _joined(self, numels: Sequence[int], shard: int, name: str) -> Block:
        """All ranks' parts in one tensor, filled up where they are uneven."""
        width, stream = self.settings.communication_bytes, self.reduce_stream
        filling = "what fills up gradients that ranks share unevenly"
        made = [
            self.allocate(width * each, _BUFFERS, filling, stream=stream)
            for each in paddings(numels, self.settings.num_ranks)
        ]
        flat = self.allocate(width * shard * self.settings.num_ranks, _BUFFERS, name, stream=stream)
        for block in made:
            self.ledger.free(block)
        return flat

    def _take_shard(self, number: int) -> None:
        """Into its place; with offload it comes back from the CPU to be added to and measured, and the last one goes there
        once more in the masters' format (``_offload_grad_partition_at_boundary``).

        Before 0.15.4 (#6670) that copy cast on the CPU: a backward pass of 25.6 s in place of 1.2 with 3 billion parameters."""
        if not self.settings.offloads:
            return
        stream, shard = self.reduce_stream, self.shards[number]
        sent = self.settings.accumulated_bytes * shard
        self.ledger.exchange(ExchangeKind.TO_HOST, sent, hiding=self.hiding)
        self.ledger.exchange(ExchangeKind.TO_GPU, sent, hiding=self.hiding)
        if self.last:
            sent = self.job.master_bytes * shard
            self.ledger.exchange(ExchangeKind.TO_HOST, sent, hiding=self.hiding)
        size, name = self.settings.accumulated_bytes * shard, "gradient shards from the CPU"
        arrived = self.allocate(size, _GRADIENTS, name, stream=stream)
        if self.last:
            size = NORM_BYTES * min(shard, NORM_CHUNK)
            self.use(size, kind=_TEMPORARIES, name=_NORM, stream=stream)
            if self.settings.accumulated_bytes != self.job.master_bytes:
                size, name = self.job.master_bytes * shard, "gradient shards cast for the optimizer"
                self.use(size, kind=_TEMPORARIES, name=name, stream=stream)
        self.ledger.free(arrived)

    def end_backward(self) -> None:
        """What waits is reduced; then what no hook let go of goes, but for what stays."""
        self._reduce()
        stays = self.coordinator.persistent
        self.coordinator.let_go([each for each in self.unreleased if each not in stays])
        for number in list(self.coordinator.detached):
            self.coordinator.free_detached(number)
        self.unreleased.clear()
        self.in_backward = False

    def settle(self, *, num_micro_batches: int) -> None:
        """A first micro-batch records in which order modules run, and lets go of each at once: where
        modules run again their graph holds what is then gathered once more, and it is played out; so it is
        where other passes than its own may be what is recorded."""
        holds = bool(self.viewed) or any(each.stops.again for each in self.found)
        if self.gathers and (self.company or holds):
            self.train(0, num_micro_batches=min(num_micro_batches, 2))
            return
        if self.gathers and self.traces:
            order = list(self._order_of_modules())
            self.coordinator.recorded = [*order]
            for needed in order:
                self.coordinator.registered.update(dict.fromkeys(needed.external))
        super().settle(num_micro_batches=num_micro_batches)

    def _order_of_modules(self) -> Iterator[Visited]:
        """What each module needs, as forward and backward pass run them."""
        passes = self.given.passes
        for forward in passes.forward:
            acts = forward_acts(self.found[forward.segment.index].stops)
            for repetition in forward.repetitions:
                yield from self._fetched(forward.segment, acts, repetition)
        remaining = {segment.index: segment.repeat for segment in self.given.tape.segments}
        for backward in passes.backward:
            index = backward.segment.index
            acts = backward_acts(backward, self.found[index].stops)
            for _ in range(backward.repeats):
                remaining[index] -= 1
                yield from self._fetched(backward.segment, acts, remaining[index])

    def _fetched(self, segment: Segment, acts: Acts, repetition: int) -> list[Visited]:
        modules = self._modules(segment, repetition)
        return [modules[number] for act, number in acts if act is _FETCH]

    # -- the update ------------------------------------------------------------------------------

    def optimizer_step(self, *, first: bool) -> None:
        """All is let go; norms one by one, sub-group by sub-group; then what stays is gathered."""
        ledger = self.ledger
        if self.gathers:
            self.coordinator.let_go(range(len(self.numels)))
        total, norms = self.plan.total, list[Block]()
        if self.job.offloads_optimizer:
            self.step_on_host(total)
            if not self.job.offloads_param:
                # ``copy_`` between devices and formats that blocks casts on the CPU, into a new tensor that nobody pinned
                # (``copy_requires_temporaries``, aten/src/ATen/native/cuda/Copy.cu).
                ledger.exchange(ExchangeKind.TO_GPU_PAGEABLE, self.job.weight_bytes * total)
            elif swapped := self.job.swapped_share(total):
                written = int(swapped * self.job.weight_bytes * total)
                ledger.exchange(ExchangeKind.TO_STORAGE, written)
        else:
            moved = self.job.gradient_bytes + 2 * self.job.master_bytes + self.job.weight_bytes
            ledger.exchange(ExchangeKind.COPY, total * moved)
            if looks_for_overflow(self.given.setup) or ledger.shares_formats:
                ledger.begin_aside(Part.OVERFLOW)
                self._look_for_overflow()
                ledger.end_aside()
            counts = self._group_counts()
            shards = iter(self.plan.trained)
            norms = [self._group_norm([*islice(shards, count)]) for count in counts]
            norms += [self.norm_of_all(name=_NORM), *self.keep_norm()]
            for count, group in zip(counts, self.plan.groups, strict=True):
                self._step_group(group, is_alone=count == 1, first=first)
        if self.gathers:
            self.coordinator.keep(self.persistent)
            self.coordinator.let_second_go()
        self.free_all(norms)

    def _group_norm(self, shards: Sequence[int]) -> Block:
        """A sub-group's, which the step holds to its end."""
        return self.norm_of(shards, name=_NORM, beside=BESIDE_NORM)

    def _look_for_overflow(self) -> None:
        """``isinf`` over all gradients takes their absolute values first, ``isnan`` does not; whether ``any`` is one
        fills a segment of small blocks on that stream, which may have no other."""
        ledger, numel, stream = self.ledger, self.plan.total, self.reduce_stream
        size, name = self.job.gradient_bytes * numel, "absolute values of all gradients"
        absolute = self.allocate(size, _TEMPORARIES, name, stream=stream)
        found = self.allocate(FLAG_BYTES * numel, _TEMPORARIES, _OVERFLOW, stream=stream)
        ledger.free(absolute)
        self.use(FLAG_BYTES, kind=_TEMPORARIES, name=_OVERFLOW, stream=stream)
        ledger.free(found)
        self.use(FLAG_BYTES * numel, FLAG_BYTES, kind=_TEMPORARIES, name=_OVERFLOW, stream=stream)

    def _group_counts(self) -> list[int]:
        """Parameters of each sub-group."""
        counts: list[int] = []
        shards = iter(self.plan.trained)
        for group in self.plan.groups:
            filled = count = 0
            while filled < group:
                filled += next(shards)
                count += 1
            counts.append(count)
        return counts

    def _step_group(self, group: int, *, is_alone: bool, first: bool) -> None:
        """Flatten, cast, step: a single tensor is flat, and fp32 needs no cast."""
        job, ledger = self.job, self.ledger
        size = rounded(job.master_bytes * group)
        gradient = None
        if not is_alone:
            flat_bytes, name = job.gradient_bytes * group, "a sub-group's gradients, flattened"
            gradient = self.allocate(flat_bytes, _TEMPORARIES, name)
        if job.gradient_bytes != job.master_bytes:
            name = f"a sub-group's gradients, cast to {job.master_name}"
            flat, gradient = gradient, ledger.allocate(size, 0, _TEMPORARIES, name)
            if flat is not None:
                ledger.free(flat)
        self.step_masters([group], of=SHARDS, first=first)
        if gradient is not None:
            ledger.free(gradient)
