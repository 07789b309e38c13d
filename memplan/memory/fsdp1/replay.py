"""One micro-batch under FSDP1, event by event.

Sources (torch 2.13, torch/distributed/fsdp): ``_runtime_utils.py``: ``_post_forward_reshard`` (the root
stays gathered), ``_post_backward_hook``, ``_reduce_grad``, ``_reduce_grad_no_shard``;
``_flat_param.py``: ``_use_low_precision_shard``, ``post_unshard``. Traces of real runs gave the order in
which each buffer comes and goes.
"""

from memplan.memory.fsdp1.options import Prefetch
from memplan.memory.fsdp1.units import FlatUnit
from memplan.memory.fsdp2.replay import Gradients, MicroBatch, Use
from memplan.memory.fsdp2.units import UnitFormats, Units
from memplan.memory.step import Height, StepPasses
from memplan.memory.walk import Level

_NOTHING = Level()


class FlatMicroBatch(MicroBatch):
    """Forward and backward of one micro-batch over flat parameters."""

    def __init__(
        self,
        units: Units,
        formats: UnitFormats,
        passes: StepPasses,
        *,
        gradients: Gradients,
        backward_prefetch: Prefetch,
        forward_prefetch: bool,
        keeps_whole: bool,
    ) -> None:
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.keeps_whole = keeps_whole
        self.late: Use | None = None
        """A layer whose backward is over, but whose gradients are not joined yet."""
        super().__init__(
            units,
            formats,
            passes,
            gradients=gradients,
            replicated=False,
            max_reduce_inputs=1,
        )

    @property
    def _piles_up(self) -> bool:
        """Gradients of a unit's views are always new; their flat sum comes when all are there."""
        return True

    def _gradients_before(self) -> int:
        if self.formats.degree == 1 and self.gradients is not Gradients.NONE_REDUCED:
            return self._whole_before()
        return super()._gradients_before()

    def _whole_before(self) -> int:
        """Without sharding, what a reduction leaves is whole as well."""
        units = self.units.all()
        if self.gradients is Gradients.NONE_KEPT:
            return 0
        reduced = self.gradients is Gradients.SHARDS_REDUCED
        name = "gradient_shard_bytes" if reduced else "whole_gradient_bytes"
        return sum(int(getattr(unit, name)) * unit.num_copies for unit in units)

    # -- gathering -------------------------------------------------------------------------------

    def _gather(self, use: Use, height: Height, moved: Level, *, loss: bool) -> None:
        """A shard in the compute format, the padded whole; then the shard's copy goes."""
        use.unsharded = True
        unit, held = use.unit, self.held
        if unit.upload_bytes:
            held.buffers_bytes += unit.copy_in_bytes + unit.upload_bytes
            self.moments.see(height, moved, loss=loss)
            held.buffers_bytes -= unit.copy_in_bytes + unit.upload_bytes
        held.buffers_bytes += unit.copy_in_bytes
        held.gathered_bytes += unit.gathered_bytes
        self.moments.see(height, moved, loss=loss)
        held.buffers_bytes -= unit.copy_in_bytes

    def _unshard_forward(
        self, use: Use, height: Height, moved: Level = _NOTHING, *, loss: bool = False
    ) -> None:
        if not use.unsharded:
            self._gather(use, height, moved, loss=loss)
        if not self.forward_prefetch:
            return
        chain = self._layer_chain()
        following = chain[chain.index(use) + 1 :] if use in chain else chain
        if following and not following[0].unsharded:
            self._gather(following[0], height, moved, loss=loss)

    def _layer_chain(self) -> list[Use]:
        """The layers in the order in which they run."""
        segments = [each.segment for each in self.passes.forward]
        return [
            use
            for segment in segments
            if segment.index in self.units.layers
            for use in self._uses_of(segment)
        ]

    def _pre_backward(
        self, use: Use, position: int, height: Height, moved: Level = _NOTHING, *, loss: bool
    ) -> None:
        if not use.unsharded:
            self._gather(use, height, moved, loss=loss)
        if self.backward_prefetch is Prefetch.PRE:
            self._prefetch_before(position, height, moved, loss=loss)

    def _prefetch_before(self, position: int, height: Height, moved: Level, *, loss: bool) -> None:
        if position > 0 and not self.order[position - 1].unsharded:
            self._gather(self.order[position - 1], height, moved, loss=loss)

    # -- reducing --------------------------------------------------------------------------------

    def _post_backward(self, use: Use, height: Height, moved: Level) -> None:
        """Reduce, but one layer late where forward gathered ahead.

        Then a layer's views were made before the layer below it ran, and autograd, which goes back in
        the order of making, joins their gradients after that layer's.
        """
        use.done = True
        if not self.forward_prefetch or use.unit is self.units.root:
            self._join_and_reduce(use, height, moved)
            return
        late, self.late = self.late, use
        if late is not None:
            self._join_and_reduce(late, height, moved)

    def _final_callback(self) -> None:
        if self.late is not None:
            self._join_and_reduce(self.late, self.passes.after_backward, _NOTHING)
            self.late = None
        super()._final_callback()

    def _join_and_reduce(self, use: Use, height: Height, moved: Level) -> None:
        unit, held, moments = use.unit, self.held, self.moments
        assert isinstance(unit, FlatUnit)
        own, use.own_gradient_bytes = use.own_gradient_bytes, 0
        if not unit.flat_gradient_bytes:
            self._reshard(use)
            return
        held.gradients_bytes += unit.flat_gradient_bytes
        moments.see(height, moved)
        held.gradients_bytes -= own
        # Added to the flat gradient that is there, but the hook's argument until it returns.
        added = unit.flat_gradient_bytes if self._accumulates else 0
        if self.gradients.reduced or not self.keeps_whole:
            self._reshard(use)
        if self.backward_prefetch is Prefetch.POST:
            position = max(index for index, each in enumerate(self.order) if each is use)
            self._prefetch_before(position, height, moved, loss=False)
        if self.gradients.reduced and unit.sharded:
            self._reduce(unit, height, moved)
        elif self.gradients.reduced:
            self._reduce_whole(unit, height, moved)
        held.gradients_bytes -= added

    @property
    def _accumulates(self) -> bool:
        unit_is_whole = self.formats.degree == 1
        return self.gradients.whole_before or (
            unit_is_whole and self.gradients is Gradients.SHARDS_REDUCED
        )

    def _reduce(self, unit: FlatUnit, height: Height, moved: Level) -> None:
        """Cast, pad and scatter; then the shard is cast to the format it is kept in."""
        held, moments = self.held, self.moments
        copies = unit.cast_gradient_bytes + unit.padded_gradient_bytes
        held.buffers_bytes += copies + unit.reduce_output_bytes
        moments.see(height, moved)
        if self.casts_gradients:
            held.gradients_bytes += unit.gradient_shard_bytes
            moments.see(height, moved)
        else:
            held.buffers_bytes -= unit.reduce_output_bytes
            held.gradients_bytes += unit.gradient_shard_bytes
        held.buffers_bytes -= copies
        if self.casts_gradients:
            held.buffers_bytes -= unit.reduce_output_bytes
        held.gradients_bytes -= unit.flat_gradient_bytes
        # Offloaded shards too stay on the GPU until backward is over (``prepare_gradient_for_optim``).
        if self.gradients is Gradients.SHARDS_REDUCED and not self.formats.offloaded:
            held.gradients_bytes -= unit.gradient_shard_bytes

    def _reduce_whole(self, unit: FlatUnit, height: Height, moved: Level) -> None:
        """All-reduce in place; the result is cast to the format it is kept in."""
        held, moments = self.held, self.moments
        if self.gradients is Gradients.SHARDS_REDUCED:
            self._reduce_sum(unit, height, moved)
            return
        held.buffers_bytes += unit.cast_gradient_bytes
        moments.see(height, moved)
        held.buffers_bytes -= unit.cast_gradient_bytes
        if self.formats.compute is self.formats.kept:
            return
        held.gradients_bytes += unit.gradient_shard_bytes
        moments.see(height, moved)
        held.gradients_bytes -= unit.flat_gradient_bytes

    def _reduce_sum(self, unit: FlatUnit, height: Height, moved: Level) -> None:
        """The sum with what is there is cast, reduced and cast back; the old one is still there."""
        if not self.casts_gradients:
            return
        cast = unit.cast_gradient_bytes or unit.flat_gradient_bytes
        self.held.buffers_bytes += cast + unit.gradient_shard_bytes
        self.moments.see(height, moved)
        self.held.buffers_bytes -= cast + unit.gradient_shard_bytes
