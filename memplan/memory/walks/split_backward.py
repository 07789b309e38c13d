"""The two halves of a pipeline's backward pass: the input's gradient first, the weights' apart.

Zero-bubble schedules run them at different times (torch/distributed/pipelining/_backward.py): between
them the graph stays, and with it the gradients that those of weights will come from.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from memplan.graph.core.segments import NOT_HANDED, Operation, Segment
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.graph.declaration import registered
from memplan.memory.walks.backward_profile import BackwardProfile, GradientBuffer
from memplan.memory.walks.backward_walk import BackwardWalk, Made, Products
from memplan.memory.walks.walk import WORKSPACE, ForwardWalk


class InputsWalk(BackwardWalk):
    """Backward for the gradient of the stage's input alone: the graph stays (``stage_backward_input``)."""

    @cached_property
    def on_way(self) -> set[Tensor]:
        """What is computed from what the segment was given."""
        return on_way(self.segment)

    @cached_property
    def captured(self) -> dict[Operation, GradientBuffer]:
        """Gradients of what weights' operations made, for the pass of the weights."""
        return {}

    def _let_go(self, operation: Operation) -> None:
        """``retain_graph=True``: but what was recomputed is none of the graph's."""
        if self.segment.checkpointed:
            super()._let_go(operation)

    def _let_go_of_given(self, operation: Operation) -> None:
        """The segment's input stays for the weights' pass."""

    def _wanted(self, pairs: Iterable[tuple[Tensor, int]]) -> Iterable[tuple[Tensor, int]]:
        return [each for each in pairs if each[0] in self.on_way]

    def _formula(self, operation: Operation, incoming: GradientBuffer) -> tuple[Made, Products]:
        if self._has_weights(operation):
            incoming.references += 1
            self.captured[operation] = incoming
        return super()._formula(operation, incoming)

    def _has_weights(self, operation: Operation) -> bool:
        """Whether gradients of weights come out of it too."""
        return any(
            tensor.requires_grad and kind not in NOT_HANDED and tensor not in self.on_way
            for tensor, kind in zip(operation.inputs, operation.gradients, strict=False)
        )


class WeightsWalk(BackwardWalk):
    """The gradients of the weights, from what ``InputsWalk`` has left (``stage_backward_weight``)."""

    calls = 0
    """Of weights, in which a checkpointed segment was run again."""

    @cached_property
    def on_way(self) -> set[Tensor]:
        """What is computed from what the segment was given."""
        return on_way(self.segment)

    @cached_property
    def gone(self) -> set[Operation]:
        """Whose nodes have let go of what they kept, which they do once."""
        return set()

    def _wanted(self, pairs: Iterable[tuple[Tensor, int]]) -> Iterable[tuple[Tensor, int]]:
        return [each for each in pairs if each[0] not in self.on_way]

    def _let_go(self, operation: Operation) -> None:
        if operation not in self.gone:
            self.gone.add(operation)
            super()._let_go(operation)

    def _free_kept(self, storage: Storage, *, is_own: bool) -> None:
        """What each call has made of it, the segment's input aside, which is none of them."""
        if not self.calls:
            super()._free_kept(storage, is_own=is_own)
            return
        if is_own:
            for call in range(self.calls):
                self.saved -= storage.num_bytes
                self._free((call, storage), storage.num_bytes)

    def _finish(
        self, parameter: Parameter, gradient_bytes: int, gradient: GradientBuffer | None
    ) -> None:
        """It is handed over when another call returns."""
        self.finished.append((parameter, gradient_bytes, gradient))

    def run_weights(
        self, captured: "dict[Operation, GradientBuffer]", *, is_last: bool
    ) -> BackwardProfile:
        """The gradients of the weights, from what the pass of the inputs has left.

        Each weight's operation is a call of ``torch.autograd.grad`` of its own, in the order of the
        parameters; what it returned stays until the next one has. What is checkpointed is run again in
        each of these calls, and what that keeps stays as long as the graph does, for nothing but this
        weight's operation takes it up (``torch.utils.checkpoint``: one recomputation for each graph
        task, in ``frame.recomputed``). The graph of the ``is_last`` segment goes as its weights do; that
        of others is held by what stands behind them.
        """
        segment = self.segment
        order = {
            parameter: number for number, parameter in enumerate(registered(segment.parameters))
        }
        aside = [each for each in segment.operations if not self.on_way.intersection(each.outputs)]
        owners = _owners(segment, aside)
        groups = sorted(captured, key=lambda each: min(order[one] for one in owners(each)))
        for number, operation in enumerate(groups):
            before, self.finished = self.finished, []
            if segment.checkpointed:
                self._recompute_for(number)
            self.buffers[operation.outputs[0]] = captured[operation]
            self._step(operation)
            for each in reversed(aside):
                if any(out in self.buffers for out in each.outputs):
                    self._step(each)
            for parameter, gradient_bytes, gradient in before:
                self._close(parameter, gradient_bytes, gradient)
            if is_last:
                self._let_go_behind(groups[number + 1 :])
        for parameter, gradient_bytes, gradient in self.finished:
            self._close(parameter, gradient_bytes, gradient)
        self._close(None, 0)
        return BackwardProfile(intervals=self.intervals, end=self._level(), given={}, left={})

    def _recompute_for(self, number: int) -> None:
        """Run a checkpointed segment again for one call alone: its blocks are none of the other calls'."""
        walk = ForwardWalk(self.segment, keep=True)
        walk.saves = {each: count for each, count in self.saves.items() if count}
        again = walk.recompute()
        self._rise(again.peak)
        self.events += [
            (key if key is WORKSPACE else (number, key), size) for key, size in again.events
        ]
        self.calls = number + 1
        self.live += again.end.total_bytes
        self.saved += again.end.total_bytes

    def _let_go_behind(self, groups: Sequence[Operation]) -> None:
        """What no weight is behind that is still to come: its node goes, and what that kept."""
        needed: set[Tensor] = set()
        for operation in reversed(self.segment.operations):
            if operation in groups or not needed.isdisjoint(operation.outputs):
                needed.update(operation.inputs)
            elif operation.gradients:
                self._let_go(operation)


def on_way(segment: Segment) -> set[Tensor]:
    """What a segment computes from its input, that with it, as far as gradients go back to it."""
    found = {*segment.further_inputs}
    if segment.input is not None:
        found.add(segment.input)
    for operation in segment.operations:
        if operation.gradients and not found.isdisjoint(operation.inputs):
            found.update(operation.outputs)
    return found


def _owners(segment: Segment, aside: Sequence[Operation]) -> Callable[[Operation], list[Parameter]]:
    """Which weights' gradients come out of an operation, casts of weights looked through."""
    weights: dict[Tensor, list[Parameter]] = {each: [each] for each in segment.parameters}
    for operation in aside:
        found = [one for tensor in operation.inputs for one in weights.get(tensor, ())]
        for tensor in operation.outputs if found else ():
            weights[tensor] = found

    def owners(operation: Operation) -> list[Parameter]:
        return [one for tensor in operation.inputs for one in weights.get(tensor, ())]

    return owners
