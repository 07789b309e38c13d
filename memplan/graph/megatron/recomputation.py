"""Parts of a layer that are computed again on their own.

Megatron-core 0.16.1, core/tensor_parallel/random.py: ``CheckpointFunction`` runs a part again with a backward
pass of its own; ``CheckpointWithoutOutput`` lets go of what a part has made, and fills it again before others
read it. Megatron-Kwai's products compute again what they are given before their own backward formulas.
"""

from collections.abc import Callable
from typing import Any

from memplan.fast_dataclass import replace
from memplan.graph.core.segments import Operation, Region
from memplan.graph.core.selective import region_since
from memplan.graph.core.tensors import Storage, Tensor
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.run import Run


def checkpoint(function: Callable[..., Any], *given: Handle, active: bool = True) -> Any:
    """Run a part whose backward pass runs it again: what it keeps goes, what it was given stays."""
    segment = given[0].run.segment
    start = len(segment.operations)
    made = function(*given)
    if not active:
        return made
    result = _records(made)[0]
    operations = segment.operations[start:]
    for each in operations:
        # What it keeps of its result is the second run's, which stays anyway.
        each.saved = [storage for storage in each.saved if storage is not result.storage]
    found = region_since(segment, start)
    stays = tuple(dict.fromkeys(each.record.storage for each in given))
    segment.regions.append(replace(found, given=stays, result=result))
    return made


class CheckpointWithoutOutput:
    """A part whose results are let go once they are read, and that runs again as soon as there is the gradient of what was
    recorded last; ``active``: it is one, and no call as any other."""

    def __init__(self, run: Run, *, active: bool) -> None:
        self._segment, self._run, self._active = run.segment, run, active

    def checkpoint(self, function: Callable[..., Any], *given: Handle) -> Any:
        """Run it."""
        segment, self._start = self._segment, len(self._segment.operations)
        made = function(*given)
        self._stop, self._made = len(segment.operations), _records(made)
        # What its operations keep themselves of it counts there.
        others = dict.fromkeys(each.record.storage for each in given).keys() - _kept(
            segment.operations[self._start :]
        )
        self._given = tuple(each for each in others if each.segment == segment.index)
        return made

    def discard_output_and_register_recompute(self) -> None:
        """Let its results go."""
        if not self._active:
            return
        self._run.empty(*self._made)
        operations = self._segment.operations
        part = operations[self._start : self._stop]
        made = {tensor.storage for operation in part for tensor in operation.outputs}
        self._segment.regions.append(
            Region(
                self._start, len(operations), frozenset(made & _kept(operations[self._start :])),
                given=self._given, copied=tuple(dict.fromkeys(each.storage for each in self._made)),
                rerun=self._stop,
            )
        )  # fmt: skip


def recompute_into_product(run: Run, start: int) -> None:
    """Drop what the product recorded last reads, and compute it again before its backward formula."""
    segment = run.segment
    found = region_since(segment, start)
    segment.regions.append(replace(found, rerun=len(segment.operations) - 1))


def _kept(operations: list[Operation]) -> set[Storage]:
    return {storage for each in operations for storage in each.saved}


def _records(made: Handle | tuple[Handle | None, ...]) -> list[Tensor]:
    handles = made if isinstance(made, tuple) else (made,)
    return [each.record for each in handles if each is not None]
