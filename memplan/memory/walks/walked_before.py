"""Walks over segments that tapes of several cards share: what one card finds of them holds on others, too.

A card's tape has segments of its own where it sorts otherwise; all others are the same objects.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.graph.operations.reduction import Multiprocessors, column_sum_scratch
from memplan.memory.walks.backward_profile import BackwardProfile, SharedGradient
from memplan.memory.walks.walk import ForwardProfile, ForwardWalk, Level


class Back(NamedTuple):
    """What a walk backward found, and how it left what segments share."""

    profile: BackwardProfile
    change: Level
    finished: dict[Parameter, bool]
    shared: dict[Tensor, SharedGradient]
    sums: Mapping[tuple[int, int, int], Sequence[Sequence[int]]]
    """What its sums over rows asked for."""

    def holds_on(self, device: Multiprocessors | None) -> bool:
        """Whether sums over rows are split there as here."""
        return device is None or all(
            column_sum_scratch(*asked, device) == found for asked, found in self.sums.items()
        )


class WalkedBefore:
    """What was found of a tape's segments."""

    def __init__(self, tape: Tape, device: Multiprocessors | None) -> None:
        self._found = tape.walked
        self._device = device

    def forward(
        self, segment: Segment, released: frozenset[Storage]
    ) -> tuple[ForwardWalk, ForwardProfile]:
        """The walk forward."""
        key: Hashable = (segment, released) if released else segment
        found: tuple[ForwardWalk, ForwardProfile] | None = self._found.get(key)
        if found is None:
            walk = ForwardWalk(segment, keep=not segment.checkpointed, released=released)
            found = self._found[key] = walk, walk.run()
        return found

    def back(
        self, key: Hashable, finished: dict[Parameter, bool], shared: dict[Tensor, SharedGradient]
    ) -> tuple[BackwardProfile, Level] | None:
        """A walk backward that began so; None: there has been none on such a card."""
        found: Back | None = self._found.get(key)
        if found is None or not found.holds_on(self._device):
            return None
        finished.update(found.finished)
        shared.clear()
        shared.update(found.shared)
        return found.profile, found.change

    def keep(self, key: Hashable, found: Back) -> None:
        """For other cards."""
        self._found[key] = found
