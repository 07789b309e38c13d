"""What is held, part by part: as a card's allocator counts it, or as storages come and go."""

import time
from typing import Any

import torch

from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.replaying.part_peaks import PartPeaks, part_peaks
from memplan.units import round_up
from memplan.verify.on_torch.storages import StorageRecorder

LOAD = "load"


class CardMeter:
    """The counters of torch's caching allocator, set back where a part begins."""

    def __init__(self) -> None:
        self.part = LOAD
        self.parts: dict[str, PartPeaks] = {}
        self.held_bytes = 0
        self.step_seconds: list[float] = []
        self._began_s = 0.0
        self._fresh: set[str] = set()
        torch.cuda.reset_peak_memory_stats()

    def enter(self, part: str) -> None:
        """What was reached is of the part before."""
        if self.part:
            self.note()
        self.part = part
        torch.cuda.reset_peak_memory_stats()

    def note(self) -> None:
        """Keep what the part has reached, the most of a step's micro-batches."""
        stats = torch.cuda.memory_stats()
        found = PartPeaks(
            requested_bytes=int(stats["requested_bytes.all.peak"]),
            allocated_bytes=int(stats["allocated_bytes.all.peak"]),
            reserved_bytes=int(stats["reserved_bytes.all.peak"]),
        )
        before = self.parts.get(self.part)
        if before is not None and self.part in self._fresh:
            found = PartPeaks(
                requested_bytes=max(found.requested_bytes, before.requested_bytes),
                allocated_bytes=max(found.allocated_bytes, before.allocated_bytes),
                reserved_bytes=max(found.reserved_bytes, before.reserved_bytes),
            )
        self.parts[self.part] = found
        self._fresh.add(self.part)

    def held(self) -> None:
        """A new step begins, whose parts take the place of the last one's."""
        if self.part:
            self.note()
        self.part = ""
        self._fresh.clear()
        self.held_bytes = int(torch.cuda.memory_stats()["requested_bytes.all.current"])
        torch.cuda.synchronize()
        self._began_s = time.perf_counter()

    def ended(self) -> None:
        """A step is over once the GPU has done it."""
        torch.cuda.synchronize()
        self.step_seconds.append(time.perf_counter() - self._began_s)


class StorageMeter:
    """The events of a recorder, and where in them each part begins."""

    def __init__(self, recorder: StorageRecorder) -> None:
        self.recorder = recorder
        self.marks: list[tuple[int, str]] = [(0, LOAD)]
        self.held_bytes = 0
        self._step = 0

    def enter(self, part: str) -> None:
        """A part begins with the next storage."""
        self.marks.append((len(self.recorder.events), f"{part} {self._step}"))

    def held(self) -> None:
        """A new step begins."""
        self._step += 1
        self.marks.append((len(self.recorder.events), ""))
        events = self.recorder.events
        live = [events[made] for made in self.recorder.live.values() if made >= 0]
        self.held_bytes = sum(round_up(each, ALLOCATION_ROUNDING) for each in live)

    def ended(self) -> None:
        """Nothing was computed, so nothing took its time."""

    def peaks(self, *, expandable: bool) -> dict[str, PartPeaks]:
        """Those of the last step, and of loading."""
        found = part_peaks(self.recorder.events, {}, self.marks, expandable=expandable)
        last = next(name for _, name in reversed(self.marks) if name).rpartition(" ")[2]
        kept: dict[str, Any] = {LOAD: found[LOAD]}
        for name, peaks in found.items():
            part, _, step = name.rpartition(" ")
            if part and step == last:
                kept[part] = peaks
        return kept
