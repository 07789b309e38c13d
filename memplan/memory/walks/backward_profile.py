"""What a walk backward through a segment finds: gradients, and what is alive between two of them.

A profile is relative to the bytes alive when it begins.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memplan.fast_dataclass import dataclass, field
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.memory.walks.walk import Event, Level


class GradientBuffer:
    """A gradient on its way: what autograd's input buffers hold."""

    __slots__ = ("in_columns", "is_turned", "is_view", "num_bytes", "parts", "references")

    def __init__(self, num_bytes: int, *, is_view: bool = False) -> None:
        self.num_bytes = num_bytes
        self.references = 1
        self.is_view = is_view
        """It is a view of what a formula returned, so that nothing is added to it in place."""
        self.in_columns = False
        """Its columns lie one after another."""
        self.is_turned = False
        """It does not lie as its parameter does, which takes a copy."""
        self.parts: tuple[GradientBuffer, ...] = ()
        """In a compiled region: gradients that the kernel that reads them adds up."""


class SharedGradient(NamedTuple):
    """What one segment leaves of another's gradient, to be added to by a third."""

    num_bytes: int
    is_view: bool
    """Nothing is added to it in place."""


@dataclass(slots=True)
class Interval:
    """Backward between two parameters' gradients, and the gradient that ends it.

    What happens to a finished gradient is the engine's business: a plain loop keeps it, DDP copies
    it into a bucket, ZeRO reduces it and frees it.
    """

    peak: Level
    """The highest level, finished gradients of parameters left out."""
    parameter: Parameter | None
    """Whose gradient is finished; None after the last one."""
    gradient_bytes: int
    """Size of that gradient; 0 where it was added to one that was there."""
    end: Level
    """What is alive when it ends, the gradient just finished left out too."""
    events: list[Event]
    """Allocations and frees, in torch's order; the finished gradient stays."""
    marks: list[tuple[int, int]]
    """How many of them come before an operation, and its position: that of its backward pass, or
    ``~position`` for its forward pass, run again."""
    gradient: object = None
    """The finished gradient's key in the events; None where it was added to another."""


@dataclass(slots=True)
class BackwardProfile:
    """A segment's backward pass; its output's gradient is alive when it begins."""

    intervals: list[Interval]
    end: Level
    """What is left: the gradient of the input, less what was kept before."""
    given: dict[Tensor, GradientBuffer]
    """Gradients that are there when it begins."""
    left: dict[Tensor, GradientBuffer]
    """Gradients of earlier segments' tensors that are there when it ends."""
    arriving: Sequence[object] = ()
    """Keys of what had come back from CPU RAM when it began."""
    leaving: Sequence[object] = ()
    """Keys of what has when it ends."""
    streams: Mapping[object, int] = field(default_factory=dict)
    """Of the blocks that are not of the main stream's memory."""
    first_sum: tuple[GradientBuffer, GradientBuffer] | None = None
    """The gradient that it begins with, and the first one that is added to it in place: in a tensor of
    its own where what was handed over is a view."""
    sum_bytes: int | None = None
    """A number that stands for that tensor's size (``memplan.memory.shapes``)."""
    handed: Mapping[object, GradientBuffer] = field(default_factory=dict)
    """What was kept and became a gradient as it lay: its end and the gradient's beginning, which stand
    among the events, are one block's."""
