"""One training step on one GPU: the walks of all segments put together, phase by phase.

Segments are walked once each; a run of equal layers is repeated by arithmetic. What a segment leaves
alive moves the level for the next one, and the height of a run's peak is a straight line in the
layer's number, so its highest point is at one end of the run.
"""

from dataclasses import dataclass, field

from memplan.graph.tape import Parameter, Segment, Storage, Tape, Tensor
from memplan.memory.walk import BackwardWalk, ForwardWalk, recomputation_stop


@dataclass(slots=True)
class Height:
    """Bytes alive at one moment of the step, without what is there between steps."""

    activations_bytes: int = 0
    """Kept for backward by the layers and the embedding."""
    loss_bytes: int = 0
    """Kept or made by the head: logits, log-probabilities, their gradients."""
    gradients_bytes: int = 0
    """Gradients of parameters."""
    temporaries_bytes: int = 0
    """Alive inside an operation or between two."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.activations_bytes
            + self.loss_bytes
            + self.gradients_bytes
            + self.temporaries_bytes
        )


@dataclass(slots=True)
class StepProfile:
    """The forward and the backward pass."""

    forward_peak: Height = field(default_factory=Height)
    after_forward: Height = field(default_factory=Height)
    backward_peak: Height = field(default_factory=Height)
    after_backward: Height = field(default_factory=Height)


class StepWalk:
    """Walks the whole tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.level = Height()
        self.cached_casts_bytes = 0
        self.profile = StepProfile()
        self.keepers: dict[Storage, int] = {}
        """For each shared storage, how many segments after its own keep it."""
        for segment in tape.segments:
            kept = segment.external_reads if segment.checkpointed else segment.external_saves
            for storage in kept:
                self.keepers[storage] = self.keepers.get(storage, 0) + 1

    def run(self) -> StepProfile:
        """Forward, then backward."""
        for segment in self.tape.segments:
            self._forward(segment)
        self.level.temporaries_bytes -= self.cached_casts_bytes
        self.profile.after_forward = _copy(self.level)
        self.profile.backward_peak = _copy(self.level)
        self._backward()
        self.profile.after_backward = _copy(self.level)
        return self.profile

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self, segment: Segment) -> None:
        walk = ForwardWalk(segment, keep=not segment.checkpointed)
        profile = walk.run()
        peak, end, level = profile.peak, profile.end, self.level
        loss = segment.component != "activations"
        given = segment.input.storage if segment.input is not None else None
        freed = 0
        if given is not None and profile.input_freed and not segment.checkpointed:
            freed = given.num_bytes
        per_layer = end.total_bytes - freed - profile.cached_cast_bytes
        casts = profile.cached_cast_bytes
        last = segment.repeat - 1
        # The first layer's input may be held by an outer variable, and then outlives the layer.
        kept_first = freed if given is not None and self._outlives(given, segment) else 0
        for repetition in {0, last}:
            offset = repetition * (per_layer + casts) + (kept_first if repetition else 0)
            self._raise_forward(level, offset, peak.total_bytes, loss=loss)
        stays = per_layer * segment.repeat + kept_first
        if loss:
            level.loss_bytes += stays
        else:
            level.activations_bytes += stays
        level.temporaries_bytes += casts * segment.repeat
        self.cached_casts_bytes += casts * segment.repeat
        for storage in segment.releases:
            if self._kept_after_release(storage):
                continue
            level.activations_bytes -= storage.num_bytes

    def _outlives(self, storage: Storage, segment: Segment) -> bool:
        del segment
        return storage.held or self.keepers.get(storage, 0) > 0

    def _kept_after_release(self, storage: Storage) -> bool:
        if self.keepers.get(storage, 0):
            return True
        for segment in self.tape.segments:
            own = storage.segment == segment.index
            reads = segment.input is not None and segment.input.storage is storage
            if not own and not reads:
                continue
            if reads and segment.checkpointed:
                return True
            if any(storage in operation.saved for operation in segment.operations):
                return True
        return False

    def _raise_forward(self, level: Height, offset: int, peak: int, *, loss: bool) -> None:
        height = level.total_bytes + offset + peak
        if height > self.profile.forward_peak.total_bytes:
            made = _copy(level)
            made.activations_bytes += offset
            if loss:
                made.loss_bytes += peak
            else:
                made.temporaries_bytes += peak
            self.profile.forward_peak = made

    # -- backward --------------------------------------------------------------------------------

    def _backward(self) -> None:
        accumulated: set[Parameter] = set()
        shared: dict[Tensor, int] = {}
        for segment in reversed(self.tape.segments):
            remaining = segment.repeat
            while remaining:
                before = len(shared)
                accumulated_before = len(accumulated)
                own = set(accumulated)
                rise, delta = self._walk_back(segment, own, shared)
                repeats = remaining
                if len(shared) != before and remaining > 1:
                    repeats = 1
                del accumulated_before
                self._raise_backward(segment, rise, delta, repeats)
                remaining -= repeats
                if not remaining:
                    accumulated |= own
            self._free_shared(segment)

    def _walk_back(
        self, segment: Segment, accumulated: set[Parameter], shared: dict[Tensor, int]
    ) -> tuple[list[Height], Height]:
        walk = ForwardWalk(segment, keep=True)
        heights: list[Height] = []
        base = Height()
        if segment.checkpointed:
            again = walk.run(stop=recomputation_stop(segment))
            heights.append(
                Height(
                    activations_bytes=again.peak.saved_bytes,
                    temporaries_bytes=again.peak.other_bytes,
                )
            )
            base.activations_bytes = again.end.total_bytes
        back = BackwardWalk(
            segment,
            walk.saves,
            in_place_sums=not self.tape.decomposed,
            accumulated=accumulated,
            shared=shared,
        ).run()
        heights.append(_added(base, back.peak.saved_bytes, back.peak.gradient_bytes,
                              back.peak.other_bytes))  # fmt: skip
        end = _added(base, back.end.saved_bytes, back.end.gradient_bytes, back.end.other_bytes)
        given = segment.input.storage if segment.input is not None else None
        if segment.checkpointed and given is not None and given not in walk.saves:
            end.activations_bytes -= given.num_bytes
        return heights, end

    def _raise_backward(
        self, segment: Segment, rises: list[Height], delta: Height, repeats: int
    ) -> None:
        loss = segment.component != "activations"
        for repetition in {0, repeats - 1}:
            for rise in rises:
                made = _copy(self.level)
                for _ in range(1):
                    made.activations_bytes += repetition * delta.activations_bytes
                    made.gradients_bytes += repetition * delta.gradients_bytes
                    made.temporaries_bytes += repetition * delta.temporaries_bytes
                _include(made, rise, loss=loss)
                if made.total_bytes > self.profile.backward_peak.total_bytes:
                    self.profile.backward_peak = made
        for _ in range(repeats):
            _include(self.level, delta, loss=loss)

    def _free_shared(self, segment: Segment) -> None:
        kept = segment.external_reads if segment.checkpointed else segment.external_saves
        for storage in kept:
            self.keepers[storage] -= 1
            if not self.keepers[storage] and not self._kept_after_release(storage):
                self.level.activations_bytes -= storage.num_bytes


def _include(level: Height, change: Height, *, loss: bool) -> None:
    if loss:
        level.loss_bytes += change.activations_bytes + change.temporaries_bytes
    else:
        level.activations_bytes += change.activations_bytes
        level.temporaries_bytes += change.temporaries_bytes
    level.gradients_bytes += change.gradients_bytes


def _added(base: Height, saved: int, gradient: int, other: int) -> Height:
    return Height(
        activations_bytes=base.activations_bytes + saved,
        gradients_bytes=gradient,
        temporaries_bytes=base.temporaries_bytes + other,
    )


def _copy(height: Height) -> Height:
    return Height(
        activations_bytes=height.activations_bytes,
        loss_bytes=height.loss_bytes,
        gradients_bytes=height.gradients_bytes,
        temporaries_bytes=height.temporaries_bytes,
    )
