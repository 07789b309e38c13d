"""A step as lanes: computing, links between GPUs, the link to the host, each one thing after another.

The host asks for kernels in order and ahead of the GPU, which drains what was asked for: a stage ends when the GPU has done
its work, or when the last of its kernels was asked for, whichever is later. What the GPU is behind at the end of one stage
hides what the host needs longer in the next, until something makes the host wait for the GPU.

A run of equal layers is a body and a count here too. What a layer needs is asked for while the one before
it computes, and holds it up where it is not there; what it makes for others goes out behind it, and holds
up nothing but the end of the pass. Both wait in one queue for the same link.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Lane(StrEnum):
    """What is busy; the value is what people read."""

    COMPUTE = "compute"
    LINK = "communication"
    HOST = "host"
    ASKED = "launches"
    """The CPU, asking for kernels."""
    STAGES = "other stages"
    """Of a pipeline."""


class Interval(NamedTuple):
    """A stretch of a lane."""

    lane: Lane
    start_s: float
    stop_s: float
    words: str
    busy_s: float
    """Exchanges of one layer after another leave the link idle between them."""


class Stage(NamedTuple):
    """Equal repetitions of a segment in one pass; times are of one repetition [s]."""

    words: str
    repeats: int
    compute_s: float
    """On the GPU, what it waits for among its own operations included."""
    host_s: float = 0.0
    """Asking for its kernels."""
    blocking_s: float = 0.0
    """Exchanges that computing waits for, all repetitions together."""
    ahead_s: float = 0.0
    """Exchanges asked for one repetition ahead, all together; as the next ones."""
    behind_s: float = 0.0
    """Exchanges that nothing waits for before the pass is over."""
    fetched_s: float = 0.0
    """From the host, asked for ahead."""
    stored_s: float = 0.0
    """To the host, waited for at the end of the pass."""
    waited_s: float = 0.0
    """To or from the host, while computing waits."""


class Clock:
    """Runs stages one after another."""

    def __init__(self, *, interference: float, draws: bool = True) -> None:
        self.now_s = 0.0
        self.draws = draws
        """It notes intervals."""
        self.free_s = dict.fromkeys(Lane, 0.0)
        self.asked_s = 0.0
        """Until when the host is busy asking for what has run so far."""
        self.intervals: list[Interval] = []
        """Without what is skipped."""
        self.path: list[Interval] = []
        """What the step waits for, stretch by stretch, without gaps; without what is skipped too."""
        self.skipped_s = 0.0
        self.lookahead_s = 0.0
        """What the stage before computes while this one's first exchange is on its way."""
        self.interference = interference
        """Of the time of an exchange beside it, by which computing takes longer: kernels of NCCL take
        multiprocessors."""
        self.slowed_s = 0.0
        """By which computing took longer for exchanges beside it."""
        self.host_bound_s = 0.0
        """For which the GPU waits for kernels to be asked for."""
        self.exposed_s = dict.fromkeys(Lane, 0.0)
        """For which computing waits for another lane."""

    def run(self, stages: Iterable[Stage]) -> None:
        """One pass; then what is behind it has ended too."""
        for stage in stages:
            self._run(stage)
        for lane in (Lane.LINK, Lane.HOST):
            self._wait_for(lane, self.free_s[lane])

    def compute(self, stages: Iterable[tuple[float, float]], words: str) -> None:
        """A pass in which nothing is exchanged: what each of its stages takes the GPU and the host."""
        start = self.now_s
        for device, asked in stages:
            self.now_s = self._computed(device, asked, words)
        if self.draws:
            self._note(Lane.COMPUTE, start, self.now_s, words)
        self.lookahead_s = 0.0

    def _computed(self, device: float, asked: float, words: str) -> float:
        """When the GPU has done so much that it takes the host so long to ask for."""
        done = self.now_s + device
        self.asked_s += asked
        self._go(Lane.COMPUTE, self.now_s, done, words)
        late = self.asked_s - done
        if late <= 0:
            return done
        self.host_bound_s += late
        self._go(Lane.ASKED, done, done + late, words)
        return done + late

    def synchronize(self) -> None:
        """The host waits until the GPU has done everything."""
        self.asked_s = max(self.asked_s, self.now_s)

    def wait_for_launches(self, words: str) -> None:
        """Until the host has asked for everything."""
        late = self.asked_s - self.now_s
        if late > 0:
            self.host_bound_s += late
            if self.draws:
                self._note(Lane.ASKED, self.now_s, self.asked_s, words)
            self._go(Lane.ASKED, self.now_s, self.asked_s, words)
            self.now_s = self.asked_s
        self.synchronize()

    def skip(self, seconds: float) -> None:
        """So much time passes with what is not told again."""
        self.now_s += seconds
        self.asked_s += seconds
        self.skipped_s += seconds
        self.free_s = dict.fromkeys(Lane, self.now_s)

    def idle(self, seconds: float, words: str) -> None:
        """Everything waits for what no lane does."""
        if self.draws:
            self._note(Lane.HOST, self.now_s, self.now_s + seconds, words)
        self._go(Lane.HOST, self.now_s, self.now_s + seconds, words)
        self.now_s += seconds
        self.synchronize()

    def wait(self, lane: Lane, seconds: float, words: str) -> None:
        """Something that nothing hides."""
        if seconds <= 0:
            return
        if self.draws:
            self._note(lane, self.now_s, self.now_s + seconds, words)
        if lane is not Lane.COMPUTE:
            self.exposed_s[lane] += seconds
        self._go(lane, self.now_s, self.now_s + seconds, words)
        self.now_s += seconds
        self.free_s[lane] = max(self.free_s[lane], self.now_s)
        if lane is Lane.HOST:
            self.synchronize()

    def _wait_for(self, lane: Lane, until_s: float) -> None:
        if until_s > self.now_s:
            self.exposed_s[lane] += until_s - self.now_s
            self._go(lane, self.now_s, until_s, "")
            self.now_s = until_s

    def _run(self, stage: Stage) -> None:
        start, count = self.now_s, stage.repeats
        ahead, behind, fetched, stored = (
            stage.ahead_s, stage.behind_s, stage.fetched_s, stage.stored_s
        )  # fmt: skip
        slowed = self.interference * (ahead + behind)
        self.slowed_s += slowed
        device = count * stage.compute_s + slowed
        end = self._computed(device, count * stage.host_s, stage.words)
        each = (end - start) / count
        if ahead or behind:
            end = self._exchange(Lane.LINK, stage, ahead, behind, each, end)
        if fetched or stored:
            end = self._exchange(Lane.HOST, stage, fetched, stored, each, end)
        if self.draws:
            self._note(Lane.COMPUTE, start, end, stage.words)
        self.now_s = end
        self.lookahead_s = each
        if stage.blocking_s > 0:
            self.wait(Lane.LINK, stage.blocking_s, stage.words)
        if stage.waited_s > 0:
            self.wait(Lane.HOST, stage.waited_s, stage.words)

    def _exchange(
        self, lane: Lane, stage: Stage, ahead: float, behind: float, each: float, end: float
    ) -> float:
        """What runs beside a stage on another lane; when the stage ends then."""
        start = self.now_s
        begin = max(self.free_s[lane], start - self.lookahead_s if ahead else start)
        last = behind / stage.repeats
        if ahead:
            arrived = begin + ahead + behind - last
            late = arrived + each - end
            if late > 0:
                self.exposed_s[lane] += late
                self._go(lane, end, end + late, stage.words)
                end += late
        done = max(begin + ahead + behind, end + last if behind else 0.0)
        if self.draws:
            self._note(lane, begin, done, stage.words, ahead + behind)
        self.free_s[lane] = done
        return end

    def _go(self, lane: Lane, start_s: float, stop_s: float, words: str) -> None:
        """The longest way goes there."""
        if self.draws and stop_s > start_s:
            shift = self.skipped_s
            self.path.append(
                Interval(lane, start_s - shift, stop_s - shift, words, stop_s - start_s)
            )

    def _note(
        self, lane: Lane, start_s: float, stop_s: float, words: str, busy_s: float | None = None
    ) -> None:
        if stop_s > start_s:
            shift, busy = self.skipped_s, stop_s - start_s if busy_s is None else busy_s
            self.intervals.append(Interval(lane, start_s - shift, stop_s - shift, words, busy))
