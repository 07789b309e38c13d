"""Writes down the blocks that a function of several kernels asks for, by who still holds them."""

from collections.abc import Sequence

from memplan.graph.core.segments import RESULT


class Held:
    """A block, and how many variables hold it."""

    __slots__ = ("holders", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.holders = 1


class BlockScript:
    """Steps of an operation's temporaries, as ``Operation.forward_scratch`` has them.

    >>> script = BlockScript()
    >>> left, right = script.take(1024), script.take(512)
    >>> script.drop(left)
    >>> script.result()
    >>> script.steps
    [1024, 512, -1, 0]
    """

    def __init__(self) -> None:
        self.steps: list[int] = []

    def take(self, num_bytes: int) -> Held:
        """Ask for a block, already rounded up."""
        self.steps.append(num_bytes)
        return Held(len(self.steps) - 1)

    def hold(self, block: Held) -> Held:
        """One more variable holds it."""
        block.holders += 1
        return block

    def drop(self, *blocks: Held | None) -> None:
        """A variable of each goes; the last one frees it."""
        for block in blocks:
            if block is None:
                continue
            block.holders -= 1
            if not block.holders:
                self.steps.append(~block.step)

    def result(self) -> None:
        """The operation makes its results here, or the next of them."""
        self.steps.append(RESULT)

    def kernel(self, results: Sequence[int], scratch: Sequence[int]) -> list[Held]:
        """What a kernel makes, with its own temporaries around it; these are gone when it returns."""
        coming, marks = [*results], scratch.count(RESULT)
        made: list[Held] = []
        own: dict[int, Held] = {}
        if not marks:
            made = [self.take(size) for size in results]
        for position, step in enumerate(scratch):
            if step == RESULT:
                marks -= 1
                now = 1 if marks else len(coming)
                made += [self.take(size) for size in coming[:now]]
                coming = coming[now:]
            elif step > 0:
                own[position] = self.take(step)
            else:
                self.drop(own.pop(~step))
        self.drop(*reversed(own.values()))
        return made
