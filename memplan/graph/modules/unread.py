"""Graphs of results that no loss reaches: they keep what they keep until the result's last name goes."""

from types import TracebackType
from typing import Self

from memplan.graph.core.tensors import Parameter, Tensor
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
        segment = self._run.segment
        for operation in segment.operations[self._start :]:
            if not segment.checkpointed:
                own = [each for each in operation.saved if each.segment == segment.index]
                for storage in own:
                    dtype = operation.outputs[0].dtype
                    self._held.append(Handle(self._run, Tensor(0, dtype, storage), ()))
            operation.forget()


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
