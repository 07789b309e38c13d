"""One training step on one rank: the walks of all segments put together, phase by phase.

Segments are walked once each; a run of equal layers is repeated by arithmetic. What a segment leaves
alive moves the level for the next one, and the height of a run's peak is a straight line in the
layer's number, so its highest point is at one end of the run.

``StepWalk`` gives the passes, which leave parameters' gradients out: what becomes of them is the
engine's business, as its program says it.
"""

from collections.abc import Collection
from functools import partial
from typing import TypeVar

from memplan.graph.core.segments import Segment, SegmentComponent
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage, Tensor, allocated_bytes
from memplan.graph.operations.reduction import Multiprocessors
from memplan.memory.ends import (
    behind_weights,
    hand_back,
    is_lent,
    kept_by,
    lets_go,
    pinned_away_bytes,
    seed_of,
)
from memplan.memory.passes import BackwardPass, ForwardPass, Height, StepPasses
from memplan.memory.walks.backward_profile import BackwardProfile, SharedGradient
from memplan.memory.walks.backward_walk import BackwardWalk
from memplan.memory.walks.walk import ForwardWalk, Level
from memplan.memory.walks.walked_before import Back, WalkedBefore
from memplan.training.activation_offload import OFFLOAD_RULES

WalkT = TypeVar("WalkT", bound=BackwardWalk)


class StepWalk:
    """Walks the whole tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.level = Height()
        self.cached_casts_bytes = 0
        self.carried_bytes = 0
        """What the model's variable holds of the layer before."""
        self.passes = StepPasses()
        options = tape.options
        self.device = None
        """None: scratch inside kernels is left out."""
        if not tape.decomposed:
            self.device = Multiprocessors(
                options.multiprocessors, options.threads_per_multiprocessor
            )
        if options.is_tiled:
            from memplan.memory.walks.tiled_walk import play_tiles  # only then

            play_tiles(tape, self.device)
        self.transit = None
        if options.offload.hooks:
            from memplan.memory.walks.transit import Transit  # only then

            self.transit = Transit(OFFLOAD_RULES[options.offload])
        self.before = WalkedBefore(tape, self.device)
        self.leaves = {leaf.storage for leaf in tape.leaves}
        """They, and their gradients, go with the graph when backward is over."""
        self.keepers: dict[Storage, int] = {}
        """For each shared storage, how many segments after its own keep it."""
        self.kept_saves: dict[Segment, dict[Storage, int]] = {}
        """For each segment that is not run again, how many operations keep each storage."""
        self.held_by: dict[Segment, set[Storage]] = {}
        for segment in tape.segments:
            for storage in kept_by(segment):
                self.keepers[storage] = self.keepers.get(storage, 0) + 1

    def forward(self) -> StepPasses:
        """Forward alone."""
        for segment in self.tape.segments:
            if segment.index:
                self._release(self.tape.segments[segment.index - 1])
            self._forward(segment)
        self._let_go_of_carried()
        self.passes.at_return = self.level
        self._release(self.tape.segments[-1])
        self._lower(Level(saved_bytes=-self._sent_bytes()), loss=False)
        self._lower(Level(other_bytes=-self.cached_casts_bytes), loss=False)
        self.passes.after_forward = self.level
        return self.passes

    def run(self) -> StepPasses:
        """Forward, then backward."""
        self.forward()
        stage = self.tape.options.stage
        if stage is not None and stage.splits_backward and not stage.is_first:
            self._split_backward()
            self.level = self.passes.after_forward
        if self.transit is not None:
            self.passes.away_bytes = pinned_away_bytes(self.tape)
            self.transit.turn()
        if not self.tape.options.without_gradients:
            self._backward()
        self.passes.after_backward = self.level
        return self.passes

    def _sent_bytes(self) -> int:
        """What a stage has sent and lets go, its graph aside [bytes]."""
        sent = lets_go(self.tape)
        return 0 if sent is None else sent.num_bytes

    def _lower(self, change: Level, *, loss: bool) -> None:
        self.level = self.level.plus(change, loss=loss)

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self, segment: Segment) -> None:
        first = 0
        while first < segment.repeat:
            first += self._forward_from(segment, first)

    def _forward_from(self, segment: Segment, begun: int) -> int:
        """From a repetition on, as many as do the same; their number."""
        repeats = segment.repeat - begun
        given = segment.input.storage if segment.input is not None else None
        outlives = not begun and given is not None and self._outlives(given)
        if self.transit is None:
            walk, profile = self.before.forward(segment, self._let_go_amid(segment))
            if not segment.checkpointed:
                self.kept_saves[segment] = walk.saves
        else:
            walk, profile, is_steady = self.transit.forward(segment, drops_input=not outlives)
            repeats = repeats if is_steady else 1
        freed = 0
        if given is not None and profile.input_freed and not segment.keeps_input:
            freed = given.num_bytes
        end = profile.end.total_bytes
        kept = {
            before.storage
            for before, after in segment.streams
            if after.storage in walk.saves and not segment.checkpointed
        }
        later = end - freed - _total(profile.further_freed, kept)
        # The first layer's input may be held by an outer variable, and then outlives the layer.
        first = later
        if not begun:
            held = {each for each in profile.further_freed if self._outlives(each)}
            first = end - (0 if outlives else freed) - _total(profile.further_freed, held)
        if segment.component is SegmentComponent.LOGITS_AND_LOSS:
            self._let_go_of_carried()
        carried = sum(each.num_bytes for each in segment.carried if each not in walk.saves)
        first += carried - self.carried_bytes
        self.carried_bytes = carried
        made = ForwardPass(
            segment=segment,
            first=begun,
            repeats=repeats,
            start=self.level,
            peak=profile.peak,
            first_bytes=first,
            later_bytes=later,
            profile=profile,
        )
        self.passes.forward.append(made)
        casts = profile.cached_cast_bytes * repeats
        stays = first + later * (repeats - 1) - casts
        spent = freed if given is not None and not begun and not outlives else 0
        if given is not None and self._is_loss(given):
            spent = 0  # It counted as the head's all along.
        spent -= profile.end.earlier_bytes * repeats
        self._lower(Level(saved_bytes=stays + spent, earlier_bytes=-spent), loss=made.loss)
        self._lower(Level(other_bytes=casts), loss=False)
        self.cached_casts_bytes += casts
        return repeats

    def _let_go_amid(self, segment: Segment) -> frozenset[Storage]:
        """What earlier segments made and nothing holds before it ends."""
        if not segment.released:
            return _NOTHING
        return frozenset(each for each in segment.released if not self._kept_after_release(each))

    def _release(self, segment: Segment) -> None:
        """Let go of what variables held until here."""
        cached = self.tape.cached_once
        for storage in segment.releases:
            if storage in cached or not self._kept_after_release(storage):
                loss = self._is_loss(storage)
                self._lower(Level(saved_bytes=-storage.num_bytes), loss=loss)

    def _is_loss(self, storage: Storage) -> bool:
        """Whether the head made it."""
        if storage.segment < 0:
            return False
        maker = self.tape.segments[storage.segment]
        return maker.component is SegmentComponent.LOGITS_AND_LOSS

    def _let_go_of_carried(self) -> None:
        """The model's variable goes when the base model has returned."""
        self._lower(Level(saved_bytes=-self.carried_bytes), loss=False)
        self.carried_bytes = 0

    def _outlives(self, storage: Storage) -> bool:
        """Whether what an earlier segment returned stays when the first of its readers has run."""
        if storage.held or self.keepers.get(storage, 0) > 0:
            return True
        maker = self.tape.segments[storage.segment] if storage.segment >= 0 else None
        return maker is not None and storage in self._held_by(maker)

    def _held_by(self, segment: Segment) -> set[Storage]:
        """All that a segment's operations keep."""
        found = self.held_by.get(segment)
        if found is None:
            found = {storage for each in segment.operations for storage in each.held}
            self.held_by[segment] = found
        return found

    def _kept_after_release(self, storage: Storage) -> bool:
        return bool(self.keepers.get(storage, 0)) or self._kept_nearby(storage)

    def _kept_nearby(self, storage: Storage) -> bool:
        """Whether the storage's own segment, or the one it is the input of, keeps it."""
        for segment in self.tape.segments:
            own = storage.segment == segment.index
            reads = storage in segment.given
            if reads and segment.checkpointed:
                if segment.keeps_input:
                    return True
                continue
            if own and segment.checkpointed:
                # Its operations keep what they make again.
                if storage in segment.kept_outputs | segment.handed_in | segment.pinned:
                    return True
                continue
            if (own or reads) and storage in self._held_by(segment):
                return True
        return False

    # -- backward --------------------------------------------------------------------------------

    def _backward(self) -> None:
        accumulated: dict[Parameter, bool] = {}
        shared: dict[Tensor, SharedGradient] = {}
        self._begin_backward()
        for segment in reversed(self.tape.segments):
            remaining = segment.repeat
            own = frozenset(segment.parameters)
            last_kept = self._last_kept(segment)
            dying = _NOTHING
            while remaining:
                known = [each.is_view for each in shared.values()]
                finished = dict(accumulated)
                waiting = None if self.transit is None else self.transit.waiting_back
                # What is run again holds all that it is given to its end.
                dying = last_kept if remaining == 1 and not segment.checkpointed else _NOTHING
                profile, change = self._walk_back(segment, finished, shared, dying)
                is_steady = self.transit is None or self.transit.waiting_back == waiting
                # The first repetition makes the gradients of shared tensors, the rest add to them.
                outer = {each: kind for each, kind in finished.items() if each not in own}
                views = [each.is_view for each in shared.values()]
                if outer != accumulated or views != known or not is_steady:
                    repeats = 1
                else:
                    # The last one may let go of what they share.
                    repeats = remaining - 1 if last_kept and remaining > 1 else remaining
                accumulated = outer
                made = BackwardPass(segment, repeats, self.level, profile, change)
                self.passes.backward.append(made)
                self.level = made.start_of(repeats)
                remaining -= repeats
                if not remaining:
                    accumulated = finished
                else:
                    hand_back(segment, shared)
            released = self._free_shared(segment, dying)
            if segment.keeps_input:
                self.passes.backward[-1].released_bytes = released
        if self.transit is not None:
            self._lower(Level(earlier_bytes=-sum(self.transit.waiting_back)), loss=False)

    def _begin_backward(self) -> None:
        """The gradient that comes first, where it is of its own: of the logits, the loss or what stands for it."""
        seed = seed_of(self.tape)
        if seed is not None:
            is_loss = self.tape.segments[-1].component is SegmentComponent.LOGITS_AND_LOSS
            self._lower(Level(other_bytes=seed.num_bytes), loss=is_loss)

    def _split_backward(self) -> None:
        """The passes for the input and for the weights, which keep the graph between them."""
        self._begin_backward()
        from memplan.memory.walks.split_backward import InputsWalk, WeightsWalk  # only for them

        walks: dict[Segment, InputsWalk] = {}
        shared: dict[Tensor, SharedGradient] = {}
        for segment in reversed(self.tape.segments):
            walks[segment] = walk = self._walk_of(segment, {}, shared, InputsWalk)
            profile, change = self._walked(segment, walk.run())
            made = BackwardPass(segment, segment.repeat, self.level, profile, change)
            self.passes.inputs.append(made)
            self.level = made.start_of(segment.repeat)
        self.passes.dropped = behind_weights(self.tape, walks[self.tape.segments[-1]].captured)
        for storage in self.passes.dropped:
            self._lower(Level(saved_bytes=-storage.num_bytes), loss=self._is_loss(storage))
        for leaf in self.tape.leaves:
            size = allocated_bytes(leaf.numel, leaf.dtype)
            self._lower(Level(passed_bytes=-size), loss=False)
        self.passes.after_inputs = self.level
        for segment in self.tape.segments:
            if not walks[segment].captured:
                continue
            behind = self._walk_of(segment, {}, {}, WeightsWalk, runs_again=False)
            is_last = segment is self.tape.segments[-1] and segment.repeat == 1
            profile = behind.run_weights(walks[segment].captured, is_last=is_last)
            made = BackwardPass(segment, segment.repeat, self.level, profile, profile.end)
            self.passes.weights.append(made)
            self.level = made.start_of(segment.repeat)
        self.passes.after_weights = self.level

    def _last_kept(self, segment: Segment) -> frozenset[Storage]:
        """What earlier segments made and this one is the last to keep."""
        if self.transit is not None:
            return _NOTHING
        return frozenset(
            storage
            for storage in kept_by(segment)
            if self.keepers[storage] == 1
            and storage not in self.leaves
            and not self._kept_nearby(storage)
        )

    def _walk_back(
        self,
        segment: Segment,
        finished: dict[Parameter, bool],
        shared: dict[Tensor, SharedGradient],
        dying: frozenset[Storage],
    ) -> tuple[BackwardProfile, Level]:
        key = segment, tuple(finished.items()), tuple(shared.items()), dying
        before = None if self.transit else self.before.back(key, finished, shared)
        if before is not None:
            return before
        walk = self._walk_of(segment, finished, shared, BackwardWalk, dying=dying)
        found = self._walked(segment, walk.run())
        if self.transit is not None:
            self.transit.went_back(walk)
        else:
            self.before.keep(key, Back(*found, dict(finished), dict(shared), walk.sums))
        return found

    def _walk_of(
        self,
        segment: Segment,
        finished: dict[Parameter, bool],
        shared: dict[Tensor, SharedGradient],
        kind: type[WalkT],
        *,
        runs_again: bool = True,
        dying: frozenset[Storage] = frozenset(),
    ) -> WalkT:
        """A walk of some kind; what is checkpointed ``runs_again`` in it."""
        saves, again = self.kept_saves.get(segment), None
        if saves is None:
            walk = ForwardWalk(segment, keep=True)
            saves = walk.saves
            if segment.checkpointed and runs_again:
                again = walk.recompute()
        made = (
            partial(kind, dying=dying)
            if self.transit is None
            else partial(self.transit.backward, kind)
        )
        found = made(
            segment,
            saves,
            in_place_sums=not self.tape.decomposed,
            hooked=self.tape.options.module_hooks,
            accumulated=finished,
            shared=shared,
            again=again,
            device=self.device,
            lent=segment is self.tape.segments[-1] and is_lent(self.tape),
        )
        assert isinstance(found, kind)
        return found

    def _walked(self, segment: Segment, back: BackwardProfile) -> tuple[BackwardProfile, Level]:
        end = back.end
        if segment.input is not None and self._is_loss(segment.input.storage):
            # From the loss to the head: it is the head's until that lets it go.
            end.other_bytes += end.passed_bytes
            end.passed_bytes = 0
        return back, end

    def _free_shared(self, segment: Segment, gone: Collection[Storage]) -> int:
        """Let go of what no other segment keeps and is not ``gone`` [bytes]."""
        released = 0
        for storage in kept_by(segment):
            self.keepers[storage] -= 1
            if storage in self.leaves or storage in gone:
                continue
            if not self.keepers[storage] and not self._kept_nearby(storage):
                released += storage.num_bytes
        self._lower(Level(saved_bytes=-released), loss=False)
        return released


_NOTHING: frozenset[Storage] = frozenset()


def _total(storages: Collection[Storage], but: Collection[Storage]) -> int:
    return sum(each.num_bytes for each in storages if each not in but)
