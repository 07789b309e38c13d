"""Gradients on their way backward: when their blocks come, are added up, are handed over and go.

As autograd's input buffers hold them (torch/csrc/autograd/input_buffer.cpp) and its nodes for parameters
take them (torch/csrc/autograd/functions/accumulate_grad.h). Every block of a segment's backward pass is
counted here, in torch's order.
"""

from collections.abc import Sequence

from memplan.graph.core.segments import Change
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter, Tensor
from memplan.memory.walks.backward_profile import GradientBuffer, Interval
from memplan.memory.walks.walk import Event, Level


class GradientFlow:
    """Gradients of one segment, and all that is alive beside them."""

    def __init__(
        self, *, in_place_sums: bool, accumulated: dict[Parameter, bool], is_compiled: bool
    ) -> None:
        self.in_place_sums = in_place_sums
        self.accumulated = accumulated
        """Parameters that have a gradient already, to which a second one is added; and whether it is
        a view, so that the sum is a new tensor."""
        self.is_compiled = is_compiled
        """Gradients of parameters are handed over when the region returns, in which several of one
        tensor are added up by the kernel that reads them."""
        self.live = 0
        """Bytes alive, finished gradients of parameters left out."""
        self.saved = 0
        self.earlier = 0
        """What earlier segments made of it."""
        self.highest = self.highest_saved = self.highest_earlier = 0
        """The same at the highest level in the present interval."""
        self.intervals: list[Interval] = []
        self.events: list[Event] = []
        self.marks: list[tuple[int, int]] = []
        self.buffers: dict[Tensor, GradientBuffer] = {}
        self.first: GradientBuffer | None = None
        """The gradient of what the segment returns."""
        self.first_sum: tuple[GradientBuffer, GradientBuffer] | None = None
        """It, and the first one that was added to it in place."""
        self.finished: list[tuple[Parameter, int, GradientBuffer | None]] = []
        """Gradients that a compiled region hands over when it returns."""

    # -- blocks ----------------------------------------------------------------------------------

    def _level(self) -> Level:
        """What is alive now; ``saved`` counts what earlier segments made too."""
        return _level(self.live, self.saved, self.earlier)

    def _allocate(self, key: object, num_bytes: int) -> None:
        self.live = live = self.live + num_bytes
        self.events.append((key, num_bytes))
        if live > self.highest:
            self.highest, self.highest_saved = live, self.saved
            self.highest_earlier = self.earlier

    def _free(self, key: object, num_bytes: int) -> None:
        self.live -= num_bytes
        self.events.append((key, 0))

    def _play(self, changes: Sequence[Change]) -> None:
        for key, size in changes:
            if size > 0:
                self._allocate(key, size)
            else:
                self._free(key, -size)

    def _rise(self, peak: Level) -> None:
        """Something else runs here, and rises so far above what is alive."""
        highest = self.live + peak.total_bytes
        if highest > self.highest:
            self.highest, self.highest_earlier = highest, self.earlier
            self.highest_saved = self.saved + peak.saved_bytes

    def _close(
        self, parameter: Parameter | None, gradient_bytes: int, gradient: object = None
    ) -> None:
        """An interval ends, with a parameter's gradient or without one."""
        self.live -= gradient_bytes
        self.intervals.append(
            Interval(
                peak=_level(self.highest, self.highest_saved, self.highest_earlier),
                parameter=parameter,
                gradient_bytes=gradient_bytes,
                end=self._level(),
                events=self.events,
                marks=self.marks,
                gradient=gradient,
            )
        )
        self.events = []
        self.marks = []
        self.highest, self.highest_saved = self.live, self.saved
        self.highest_earlier = self.earlier

    # -- gradients -------------------------------------------------------------------------------

    def _release(self, buffer: GradientBuffer) -> None:
        buffer.references -= 1
        if buffer.references == 0:
            self.live -= buffer.num_bytes
            self.events.append((buffer, 0))
            for part in buffer.parts:
                self._release(part)

    def _deliver(self, tensor: Tensor, buffer: GradientBuffer) -> None:
        if isinstance(tensor, Parameter):
            self._accumulate(tensor, buffer)
            return
        present = self.buffers.get(tensor)
        if present is None:
            self.buffers[tensor] = buffer
            return
        if self.is_compiled:
            both = GradientBuffer(0)
            both.parts = (present, buffer)
            self.buffers[tensor] = both
            return
        if self.in_place_sums and present.references == 1 and not present.is_view:
            if present is self.first and self.first_sum is None:
                self.first_sum = (present, buffer)
            self._release(buffer)
        else:
            total = GradientBuffer(gradient_bytes_of(tensor))
            self._allocate(total, total.num_bytes)
            self._release(present)
            self._release(buffer)
            self.buffers[tensor] = total

    def _accumulate(self, parameter: Parameter, buffer: GradientBuffer) -> None:
        if parameter in self.accumulated:
            own = None
            if buffer.num_bytes > gradient_bytes_of(parameter):
                # Of what is made whole a rank's own part is copied out for the sum.
                own = GradientBuffer(gradient_bytes_of(parameter))
                self._allocate(own, own.num_bytes)
            total = None
            if self.accumulated[parameter] or not self.in_place_sums:
                # The sum takes the place of the gradient that is there.
                total = GradientBuffer(gradient_bytes_of(parameter))
                self._allocate(total, total.num_bytes)
                self.live -= total.num_bytes
            if own is not None:
                self._release(own)
            self._release(buffer)
            self.accumulated[parameter] = False
            self._finish(parameter, 0, total)
            return
        self.accumulated[parameter] = buffer.is_view
        if buffer.references > 1 or (buffer.is_turned and not self.is_compiled):
            copy = GradientBuffer(gradient_bytes_of(parameter))
            self._allocate(copy, copy.num_bytes)
            self._release(buffer)
            buffer = copy
        self._finish(parameter, buffer.num_bytes, buffer)

    def _finish(
        self, parameter: Parameter, gradient_bytes: int, gradient: GradientBuffer | None
    ) -> None:
        """Hand a gradient over: at once, or when the compiled region returns."""
        if self.is_compiled:
            self.finished.append((parameter, gradient_bytes, gradient))
        else:
            self._close(parameter, gradient_bytes, gradient)

    def _return(self) -> None:
        """A compiled region returns: the gradients of what it was given, each in one tensor, and those
        of its parameters (torch/_functorch/_aot_autograd, one ``autograd.Function`` a graph)."""
        for tensor, buffer in self.buffers.items():
            if buffer.parts:
                whole = GradientBuffer(gradient_bytes_of(tensor))
                self._allocate(whole, whole.num_bytes)
                self._release(buffer)
                self.buffers[tensor] = whole
        for parameter, gradient_bytes, gradient in self.finished:
            self._close(parameter, gradient_bytes, gradient)


def _level(live: int, saved: int, earlier: int) -> Level:
    return Level(saved_bytes=saved - earlier, other_bytes=live - saved, earlier_bytes=earlier)


def gradient_bytes_of(tensor: Tensor) -> int:
    """As large as a gradient of it is, as the allocator rounds it up [bytes]."""
    return -(-tensor.numel * tensor.dtype.num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING
