"""FSDP2 on a pipeline's stage (torchtitan: ``fully_shard`` of each layer and of the stage).

Weights stay gathered from the first forward pass of a step to its last backward one: the policy does not
reshard behind a forward pass, and torch's stage switches it off behind all backward passes but the last,
with the reduction (torch 2.13, torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``,
``perform_reduce_grad``). Until then gradients are whole, in the format they are reduced in.
"""

from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.programs.fully_sharded.holding import UnitUse
from memplan.memory.programs.fully_sharded.program import Fsdp2Program
from memplan.memory.programs.weights import is_trained
from memplan.training.splitting.schedules import PassKind


class Fsdp2StageProgram(Fsdp2Program):
    """One rank's stage."""

    computes_weights = False
    """A pass for the weights alone runs, which no hook sees."""

    def prepare_backward(self, *, last: bool) -> None:  # noqa: ARG002
        """No backward pass reduces: what comes behind the last one does."""
        self._wait()
        self.reduces = False

    def pass_over(self, kind: PassKind) -> None:
        """Gradients of the weights' pass wait as they are for the next one with hooks."""
        if kind is PassKind.WEIGHT:
            for weight in self.weights:
                if is_trained(weight[0]) and weight[0] not in self._use_of(weight).gradients:
                    size = allocated_bytes(
                        weight[0].gradient_numel, self.formats.compute_of(weight[0])
                    )
                    block = self.ledger.allocate(size, 0, ComponentKind.GRADIENTS, weight)
                    self.gradient_ready(weight, block)
            return
        for use in self._uses():
            self._add_to_whole(use)
            self._make_whole(use)

    def unshard(self) -> None:
        """All units are gathered at once; they are copied out where the stage runs (``UNSHARD``)."""
        if self.formats.degree == 1:
            return
        for use in self._uses():
            if not use.gathered and use.all_gather is None:
                self._copy_in(use)

    def reshard(self) -> None:
        """The stage is not among those that run next (``RESHARD``)."""
        for use in self._uses():
            self._reshard(use)

    def _wait(self) -> None:
        """Copy out what was gathered ahead (``_assert_unsharded``)."""
        for use in self._uses():
            if use.all_gather is not None:
                self._copy_out(use)
                self.ledger.free(use.all_gather)
                use.all_gather = None

    def prepare_forward(self) -> None:
        """What was gathered ahead is wanted now."""
        self._wait()

    def _post_forward(self, use: UnitUse) -> None:
        """Nothing is resharded, and nothing prefetched in the order of this pass."""

    def _pre_backward(self, use: UnitUse) -> None:
        """Weights are there."""
        self._unshard_forward(use)

    def inputs_pass(self) -> None:
        """Its end looks after units whose hooks no gradient came by
        (``_root_post_backward_final_callback``)."""
        super().inputs_pass()
        self.end_backward()

    def weights_pass(self) -> None:
        """``torch.autograd.grad`` computes weights' gradients; they are added where they are."""
        self.computes_weights = True
        super().weights_pass()
        self.computes_weights = False

    def before_backward(self, segment: Segment, repetition: int) -> None:
        """Weights are there."""

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """Gradients so far are added to those of earlier micro-batches."""
        if not self.computes_weights:
            super().after_backward(segment, repetition)

    def begin_backward(self) -> None:
        """Weights are there."""

    def end_backward(self) -> None:
        """Units whose hooks no gradient came by are looked after."""
        for use in self._uses():
            if not use.done and not self.computes_weights:
                self._post_backward(use)
            use.done = False
        self.in_tail = False
        self._drop_kept()

    def _post_backward(self, use: UnitUse) -> None:
        """Gradients in the format they are reduced in; nothing is resharded."""
        if self.reduces:
            super()._post_backward(use)
            return
        use.done = True
        self._add_to_whole(use)
        self._make_whole(use)

    def reduce_gradients(self) -> None:
        """Each unit is resharded and reduced, the stage's own first (``perform_reduce_grad``)."""
        self.reduces = True
        for use in self._uses():
            self._post_backward(use)
        super().end_backward()
        self.reduces = False
