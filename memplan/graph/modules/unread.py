"""Graphs of results that no loss reaches: they keep what they keep until the result's last name goes."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from memplan.dtypes import DType
from memplan.graph.core.pruning import prune
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.run import Run


class UnreadGraph:
    """What is recorded while it is open has no backward; what it keeps lives as long as this object has a name.

    A layer that is run again in backward has no graph the first time, and none to keep.
    """

    __slots__ = ("_held", "_run", "_start")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._held: list[Handle] = []

    def __enter__(self) -> Self:
        self._start = len(self._run.segment.operations)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held += forget_graph(self._run, self._start)


def forget_graph(run: Run, start: int = 0) -> list[Handle]:
    """Of the open segment, from an operation on; returns names for what it keeps."""
    segment, held = run.segment, []
    trained = {read for each in segment.operations[:start] for read in each.inputs}
    for operation in segment.operations[start:]:
        if not segment.checkpointed:
            held += _names_of(run, operation.saved)
        operation.forget()
        for read in operation.inputs:
            if isinstance(read, Parameter) and read not in trained:
                read.unused = True
    return held


class UnreadSegments:
    """The same of whole segments, as they end, from when it is made to when the tape is given none."""

    __slots__ = ("_held", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._held: list[Handle] = []

    def forget(self) -> None:
        """Hold what the open segment's graph keeps."""
        self._held += forget_graph(self._run)


def unread_graph(run: Run) -> list[Handle]:
    """What the last layer's graph keeps of streams beside the hidden states, which nothing reads behind it.

    It lives as long as the list has a name.
    """
    segment = run.segment
    kept = prune(segment)
    segment.further_outputs = ()
    return [] if segment.checkpointed else _names_of(run, kept)


def _names_of(run: Run, storages: Iterable[Storage]) -> list[Handle]:
    """A name for each of them that the open segment has made."""
    own = (each for each in storages if each.segment == run.segment.index and not each.weight_cast)
    return [Handle(run, Tensor(1, DType.BF16, each), (1,)) for each in own]


class NoGradient:
    """``torch.no_grad()``: what is recorded while it is open keeps nothing, and weights that it reads get no gradient."""

    __slots__ = ("_run", "_start")

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> Self:
        self._start = len(self._run.segment.operations)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for operation in self._run.segment.operations[self._start :]:
            operation.forget()
            for made in operation.outputs:
                made.requires_grad = False
            for read in operation.inputs:
                if isinstance(read, Parameter):
                    read.unused = True
