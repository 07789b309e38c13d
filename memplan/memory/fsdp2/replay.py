"""One training step under FSDP2, event by event: what is gathered, prefetched and reduced when.

Sources (torch 2.13, torch/distributed/fsdp/_fully_shard): ``_fsdp_param_group.py``: ``unshard``,
``wait_for_unshard``, ``post_backward``, ``_backward_prefetch``; ``_fsdp_collectives.py``:
``foreach_all_gather``, ``foreach_reduce``; ``_fsdp_state.py``: ``_root_post_backward_final_callback``.
Traces of real runs gave the order in which each buffer comes and goes.
"""

from enum import Enum

from memplan.fast_dataclass import dataclass
from memplan.graph.segments import Segment
from memplan.graph.tensors import Parameter
from memplan.memory.fsdp2.units import Unit, UnitFormats, Units
from memplan.memory.moments import Held, Moments, crest_of, moved_backward, moved_forward
from memplan.memory.step import BackwardPass, ForwardPass, Height, StepPasses
from memplan.memory.walk import Interval, Level

_NOTHING = Level()


class Gradients(Enum):
    """What a micro-batch finds of earlier ones' gradients, and what it does with its own."""

    NONE_REDUCED = "none before, reduced"
    SHARDS_REDUCED = "shards before, reduced"
    NONE_KEPT = "none before, kept whole"
    WHOLE_KEPT = "whole before, kept whole"
    WHOLE_REDUCED = "whole before, reduced"

    @property
    def whole_before(self) -> bool:
        """Whether earlier micro-batches left whole gradients."""
        return self in (Gradients.WHOLE_KEPT, Gradients.WHOLE_REDUCED)

    @property
    def reduced(self) -> bool:
        """Whether this micro-batch reduces."""
        return self not in (Gradients.NONE_KEPT, Gradients.WHOLE_KEPT)


@dataclass(slots=True, eq=False)
class Use:
    """One unit's parameters, of which a run of layers has as many as layers."""

    unit: Unit
    unsharded: bool = False
    pending: bool = False
    """All-gathered ahead of time, not yet copied out."""
    own_gradient_bytes: int = 0
    """Whole gradients made in this backward pass."""
    done: bool = False
    """Its backward pass is over."""


class MicroBatch:
    """Forward and backward of one micro-batch."""

    def __init__(
        self,
        units: Units,
        formats: UnitFormats,
        passes: StepPasses,
        *,
        gradients: Gradients,
        replicated: bool,
        max_reduce_inputs: int,
    ) -> None:
        self.units = units
        self.formats = formats
        self.passes = passes
        self.gradients = gradients
        self.replicated = replicated
        self.max_reduce_inputs = max_reduce_inputs
        self.held = Held(gradients_bytes=self._gradients_before())
        self.forward_moments = Moments(self.held)
        self.backward_moments = Moments(self.held)
        self.moments = self.forward_moments
        self.kept_all_gather_bytes = 0
        self.reduce_inputs: list[int] = []
        self.order: list[Use] = []
        """Uses in the order in which their forward pass ended."""
        self.singles = {id(unit): Use(unit) for unit in units.single()}
        self.layer_uses: dict[int, list[Use]] = {}

    @property
    def casts_gradients(self) -> bool:
        """Whether reduced shards are cast to the kept format."""
        return self.formats.reduce is not self.formats.kept

    @property
    def keeps_own_format(self) -> bool:
        """Whether whole gradients accumulate where autograd puts them."""
        return self.formats.reduce is self.formats.compute

    def _gradients_before(self) -> int:
        units = self.units.all()
        if self.gradients.whole_before:
            return sum(unit.whole_gradient_bytes * unit.num_copies for unit in units)
        if self.gradients is Gradients.SHARDS_REDUCED and not self.formats.offloaded:
            return sum(unit.gradient_shard_bytes * unit.num_copies for unit in units)
        return 0

    def run(self) -> None:
        """Forward, then backward."""
        self._forward()
        self.moments = self.backward_moments
        self._backward()

    # -- gathering -------------------------------------------------------------------------------

    def _copy_in(self, unit: Unit, height: Height, moved: Level, *, loss: bool) -> None:
        """Shards in the compute format, then the all-gather, whose result stays."""
        held, moments = self.held, self.moments
        if unit.upload_bytes:
            held.buffers_bytes += unit.copy_in_bytes + unit.upload_bytes
            moments.see(height, moved, loss=loss)
            held.buffers_bytes -= unit.copy_in_bytes + unit.upload_bytes
        held.buffers_bytes += unit.copy_in_bytes + unit.all_gather_bytes
        moments.see(height, moved, loss=loss)
        held.buffers_bytes -= unit.copy_in_bytes

    def _copy_out(self, unit: Unit, height: Height, moved: Level, *, loss: bool) -> None:
        self.held.gathered_bytes += unit.gathered_bytes
        self.moments.see(height, moved, loss=loss)

    def _copy_alone(self, unit: Unit, height: Height, moved: Level, *, loss: bool) -> None:
        """Copy shards into parameters, one by one, where there is a single rank."""
        held = self.held
        held.gathered_bytes += unit.gathered_bytes
        last = unit.parameters[-1].storage.num_bytes if unit.copy_in_bytes else 0
        held.buffers_bytes += last
        self.moments.see(height, moved, loss=loss)
        held.buffers_bytes -= last

    def _unshard_forward(
        self, use: Use, height: Height, moved: Level = _NOTHING, *, loss: bool = False
    ) -> None:
        """Gather; the unit before keeps its all-gather's result until this one is copied out."""
        if use.unsharded:
            return
        use.unsharded = True
        unit = use.unit
        if self.formats.degree == 1:
            self._copy_alone(unit, height, moved, loss=loss)
            return
        self._copy_in(unit, height, moved, loss=loss)
        self._copy_out(unit, height, moved, loss=loss)
        self.held.buffers_bytes -= self.kept_all_gather_bytes
        self.kept_all_gather_bytes = unit.all_gather_bytes

    def _reshard(self, use: Use) -> None:
        if use.unsharded:
            use.unsharded = False
            self.held.gathered_bytes -= use.unit.gathered_bytes

    def _post_forward(self, use: Use) -> None:
        if use.unit.reshard:
            self._reshard(use)
        self.order.append(use)

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self) -> None:
        passes = self.passes.forward
        root = self._single(self.units.root)
        tail_first = self._tail_segments()
        if root is not None:
            self._unshard_forward(root, passes[0].start)
        for each in passes:
            if each.segment.index in self.units.layers:
                self._forward_layers(each)
                continue
            self._forward_part(each, tail_first)
        last = passes[-1]
        tail = self._single(self.units.tail)
        if tail is not None:
            self._post_forward(tail)
        if root is not None:
            self._post_forward(root)
        self.moments.see(last.start)
        self.held.buffers_bytes -= self.kept_all_gather_bytes
        self.kept_all_gather_bytes = 0

    def _single(self, unit: Unit | None) -> Use | None:
        return None if unit is None else self.singles.get(id(unit))

    def _tail_segments(self) -> set[int]:
        """Segments at whose start the tail has to be there."""
        tail = self.units.tail
        return {
            segment.index
            for segment in (each.segment for each in self.passes.forward)
            if any(self.units.of_parameter[p] is tail for p in segment.parameters)
        }

    def _forward_part(self, each: ForwardPass, tail_first: set[int]) -> None:
        embedding = self._single(self.units.embedding)
        tail = self._single(self.units.tail)
        embeds = embedding is not None and any(
            self.units.of_parameter[p] is embedding.unit for p in each.segment.parameters
        )
        if embeds and embedding is not None:
            self._unshard_forward(embedding, each.start)
        if tail is not None and each.segment.index in tail_first:
            self._unshard_forward(tail, each.start, loss=each.loss)
        self.moments.see(each.start, level=each.peak, loss=each.loss)
        for repetition in range(1, each.segment.repeat):
            self.moments.see(each.start, moved_forward(each, repetition), each.peak, loss=each.loss)
        if embeds and embedding is not None:
            self._post_forward(embedding)

    def _forward_layers(self, each: ForwardPass) -> None:
        uses = self._uses_of(each.segment)
        for repetition, use in enumerate(uses):
            moved = moved_forward(each, repetition)
            self._unshard_forward(use, each.start, moved)
            self.moments.see(each.start, moved, each.peak)
            self._post_forward(use)

    def _uses_of(self, segment: Segment) -> list[Use]:
        uses = self.layer_uses.get(segment.index)
        if uses is None:
            unit = self.units.layers[segment.index]
            uses = [Use(unit) for _ in range(segment.num_copies)]
            uses *= segment.repeat // segment.num_copies
            self.layer_uses[segment.index] = uses
        return uses

    # -- backward --------------------------------------------------------------------------------

    def _pre_backward(
        self, use: Use, position: int, height: Height, moved: Level = _NOTHING, *, loss: bool
    ) -> None:
        """Gather unless it was prefetched, and prefetch the unit whose forward pass came before."""
        if not use.unsharded:
            use.unsharded = True
            if self.formats.degree == 1:
                self._copy_alone(use.unit, height, moved, loss=loss)
            else:
                if not use.pending:
                    self._copy_in(use.unit, height, moved, loss=loss)
                use.pending = False
                self._copy_out(use.unit, height, moved, loss=loss)
                self.held.buffers_bytes -= use.unit.all_gather_bytes
        if position > 0:
            self._prefetch(self.order[position - 1], height, moved, loss=loss)

    def _prefetch(self, use: Use, height: Height, moved: Level, *, loss: bool) -> None:
        if use.unsharded or use.pending or self.formats.degree == 1:
            return
        use.pending = True
        self._copy_in(use.unit, height, moved, loss=loss)

    def _backward(self) -> None:
        passes = self.passes
        position = len(self.order) - 1
        root = self._single(self.units.root)
        if root is not None:
            self._pre_backward(root, position, passes.after_forward, loss=False)
            position -= 1
        remaining = {each.segment.index: each.segment.repeat for each in passes.forward}
        for each in passes.backward:
            if each.segment.index in self.units.layers:
                position = self._backward_layers(each, remaining, position)
            else:
                position = self._backward_part(each, position)
        self._final_callback()

    def _backward_part(self, each: BackwardPass, position: int) -> int:
        """A part outside the layers: its gradients wait for the end of their unit's backward."""
        segment, tail = each.segment, self._single(self.units.tail)
        use = self.order[position] if position >= 0 else None
        if use is not None and use is self._single(self.units.embedding):
            self._pre_backward(use, position, each.start, loss=each.loss)
            position -= 1
        if use is not None and use is tail:
            self._backward_into(each, use, position)
            position -= 1
        else:
            self._see_intervals(each, each.intervals)
        self._collect(each)
        ends_tail = tail is not None and not tail.done and segment.name.endswith(".norm")
        if tail is not None and ends_tail and not self.units.tied:
            self._post_backward(tail, each.start, moved_backward(each, each.repeats))
        return position

    def _see_intervals(
        self, each: BackwardPass, intervals: list[Interval], finished: int = 0
    ) -> None:
        if not intervals:
            return
        crest = crest_of(intervals, pile_up=self._piles_up)
        for repetition in {0, each.repeats - 1}:
            self.moments.see(
                each.start,
                moved_backward(each, repetition),
                crest.level,
                loss=each.loss,
                gradients_bytes=crest.finished_bytes + finished,
            )

    def _backward_into(self, each: BackwardPass, use: Use, position: int) -> None:
        """Backward of the part whose output matrix is in the tail.

        The loss comes first; the tail's hook fires when the logits' gradient arrives.
        """
        product = self._tail_product(each)
        if product is None:
            self._pre_backward(use, position, each.start, loss=each.loss)
            self._see_intervals(each, each.intervals)
            return
        index, logits, made = product
        interval = each.intervals[index]
        self._see_intervals(each, each.intervals[: index + 1])
        other = interval.end.other_bytes + logits
        arrived = Level(saved_bytes=interval.end.saved_bytes, other_bytes=other - made)
        self._pre_backward(use, position, each.start, arrived, loss=each.loss)
        during = Level(saved_bytes=interval.end.saved_bytes, other_bytes=other)
        before = sum(passed.gradient_bytes for passed in each.intervals[:index])
        self.moments.see(
            each.start,
            level=during,
            loss=each.loss,
            gradients_bytes=before + interval.gradient_bytes,
        )
        finished = (before + interval.gradient_bytes) if self._piles_up else 0
        self._see_intervals(each, each.intervals[index + 1 :], finished)

    def _tail_product(self, each: BackwardPass) -> tuple[int, int, int] | None:
        """The interval of the output matrix, the bytes that end with it, the bytes it makes."""
        tail = self.units.tail
        for operation in reversed(each.segment.operations):
            for tensor in operation.inputs:
                if not isinstance(tensor, Parameter) or self.units.of_parameter[tensor] is not tail:
                    continue
                for index, interval in enumerate(each.intervals):
                    if interval.parameter is tensor:
                        freed = sum(storage.num_bytes for storage in operation.saved)
                        given = operation.inputs[0].storage.num_bytes
                        return index, operation.outputs[0].storage.num_bytes + freed, given
        return None

    @property
    def _piles_up(self) -> bool:
        return not (self.gradients.whole_before and self.keeps_own_format)

    def _collect(self, each: BackwardPass) -> None:
        """Book the whole gradients that a part leaves to its unit."""
        if not self._piles_up:
            return
        for interval in each.intervals:
            if interval.parameter is None or not interval.gradient_bytes:
                continue
            use = self.singles[id(self.units.of_parameter[interval.parameter])]
            use.own_gradient_bytes += interval.gradient_bytes * each.repeats
            self.held.gradients_bytes += interval.gradient_bytes * each.repeats

    def _backward_layers(self, each: BackwardPass, remaining: dict[int, int], position: int) -> int:
        uses = self._uses_of(each.segment)
        index = each.segment.index
        crest = crest_of(each.intervals, pile_up=self._piles_up)
        finished = each.gradient_bytes if self._piles_up else 0
        wanted = _wants_gradients(each.segment)
        for repetition in range(each.repeats):
            remaining[index] -= 1
            use = uses[remaining[index]]
            moved = moved_backward(each, repetition)
            if wanted:
                self._pre_backward(use, position, each.start, moved, loss=False)
            position -= 1
            self.moments.see(each.start, moved, crest.level, gradients_bytes=crest.finished_bytes)
            use.own_gradient_bytes += finished
            self.held.gradients_bytes += finished
            given = each.segment.input
            if wanted and given is not None and given.requires_grad:
                self._post_backward(use, each.start, moved_backward(each, repetition + 1))
        return position

    def _final_callback(self) -> None:
        """Units whose input needs no gradient, the root first, are reduced when all is over."""
        height = self.passes.after_backward
        layers = [use for uses in self.layer_uses.values() for use in uses]
        for use in [*self.singles.values(), *layers]:
            if not use.done:
                self._post_backward(use, height, _NOTHING)
        self.reduce_inputs.clear()

    def _post_backward(self, use: Use, height: Height, moved: Level) -> None:
        """Reshard, then reduce the unit's gradients, or keep them for the last micro-batch."""
        use.done = True
        unit, held, moments = use.unit, self.held, self.moments
        own, use.own_gradient_bytes = use.own_gradient_bytes, 0
        before = unit.whole_gradient_bytes if self.gradients.whole_before else 0
        if self.gradients.whole_before and not self.keeps_own_format:
            held.gradients_bytes -= own
            own = 0
        self._reshard(use)
        if not self.gradients.reduced:
            self._keep_whole(unit, own, height, moved)
            return
        while len(self.reduce_inputs) >= self.max_reduce_inputs:
            held.buffers_bytes -= self.reduce_inputs.pop(0)
        if not unit.num_trained:
            return
        held.buffers_bytes += unit.reduce_input_bytes
        moments.see(height, moved)
        self.reduce_inputs.append(unit.reduce_input_bytes)
        last = unit.last_gradient_bytes
        if before and not self.keeps_own_format:
            last = last // self.formats.compute.num_bytes * self.formats.reduce.num_bytes
        held.gradients_bytes -= own + before - last
        self._keep_shards(unit, height, moved)
        held.gradients_bytes -= last

    def _keep_whole(self, unit: Unit, own: int, height: Height, moved: Level) -> None:
        """Cast one gradient after the other to the format they are reduced in."""
        if self.gradients.whole_before or self.keeps_own_format:
            return
        held = self.held
        held.gradients_bytes += unit.whole_gradient_bytes - own
        self.moments.see(height, moved)

    def _keep_shards(self, unit: Unit, height: Height, moved: Level) -> None:
        held, moments = self.held, self.moments
        held.buffers_bytes += unit.reduce_output_bytes
        moments.see(height, moved)
        again = self.gradients is Gradients.SHARDS_REDUCED
        if self.casts_gradients:
            held.gradients_bytes += unit.gradient_shard_bytes
            moments.see(height, moved)
            if again or self.formats.offloaded:
                held.gradients_bytes -= unit.gradient_shard_bytes
            # With replicas the all-reduced tensor is held until the backward pass is over.
            if not self.replicated:
                held.buffers_bytes -= unit.reduce_output_bytes
            return
        held.buffers_bytes -= unit.reduce_output_bytes
        if not again and not self.formats.offloaded:
            held.gradients_bytes += unit.gradient_shard_bytes


def _wants_gradients(segment: Segment) -> bool:
    return segment.output is not None and segment.output.requires_grad
