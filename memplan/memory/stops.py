"""Where an engine takes part in a pass: around each segment, and at stops within it.

The playback of a pass calls it there, whatever ledger the pass is played into.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Protocol

from memplan.fast_dataclass import dataclass, field
from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import Parameter
from memplan.memory.passes import BackwardPass, ForwardPass
from memplan.memory.replaying.ledger import Block
from memplan.memory.walks.walk import Event

Act = tuple[int, int]
"""What an engine does at a stop; the playback hands it over as it is."""
Acts = Sequence[Act]
Cut = tuple[int, Acts]
"""How many events come before a stop, and what is done there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """Where an engine takes part within a segment, by the number of an operation."""

    forward: Mapping[int, Acts] = field(default_factory=dict)
    """Before it runs; the number of operations: when all have run."""
    again: Mapping[int, Acts] = field(default_factory=dict)
    """The same where a checkpointed segment is run again."""
    before_backward: Mapping[int, Acts] = field(default_factory=dict)
    """Before its backward pass."""
    after_backward: Mapping[int, Acts] = field(default_factory=dict)
    """After it, its weights' gradients handed over."""
    end: Acts = ()
    """When the segment's backward pass is over."""


class Engine(Protocol):
    """What takes part in a step beside the model."""

    is_even: bool
    """It does the same in each of a run of equal layers, but for the first and the last two, and does
    nothing within them but take gradients."""
    takes_all_at_once: bool
    """The gradients of the whole model come when one compiled graph has made them all."""
    sum_stream: int
    """Where autograd adds up a weight's gradients: the stream of the node that waits for them."""

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """A segment's forward pass begins."""

    def renew(self, segment: Segment) -> bool:
        """Its operations have run: tables that they make anew are there. Whether there were any."""

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """It has ended."""

    def before_backward(self, segment: Segment, repetition: int) -> None:
        """A segment's backward pass begins."""

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """It has ended."""

    def gradient_ready(self, weight: tuple[Parameter, int], block: Block) -> None:
        """A gradient is finished, and the engine's."""

    def end_forward(self) -> None:
        """The model has returned."""

    def run_joined(self) -> None:
        """Passes of other models run whose results the loss takes."""

    def stops(self, segment: Segment) -> Stops | None:
        """Where it takes part within a segment; None: nowhere."""

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:
        """The pass is at one of these stops."""


class TurningEngine(Engine, Protocol):
    """One that says when it begins to do the same again."""

    def standing_at(self, segment: Segment, copy: int) -> Hashable:
        """All that decides, beside the walk, what it does in a repetition and those behind it, as seen from there; None:
        that is not told. Where it stands as it did at another, it has come round: one turn later."""

    def skip_turns(self, segment: Segment, copy: int, turn: int, times: int) -> int:
        """It stands at a copy as it did ``turn`` copies before (less than 0 in a backward pass): stand as it will after so
        many more turns, or as many of them as are all alike; returned is how many."""


def pieces(events: list[Event], cuts: Sequence[Cut]) -> Iterator[tuple[list[Event], Acts | None]]:
    """Events up to each cut with what is done there, then the rest."""
    done = 0
    for position, acts in cuts:
        yield events[done:position], acts
        done = position
    yield (events[done:] if done else events), None


def forward_cuts(each: ForwardPass, stops: Stops) -> list[Cut]:
    """Where its events are cut."""
    starts = each.profile.starts
    return [(starts[number], stops.forward[number]) for number in sorted(stops.forward)]


def forward_acts(stops: Stops) -> Acts:
    """All that an engine does in a forward pass, in order."""
    return [act for number in sorted(stops.forward) for act in stops.forward[number]]


def backward_acts(each: BackwardPass, stops: Stops) -> Acts:
    """All that it does in a backward pass, in order."""
    return [act for cuts in backward_cuts(each, stops) for _, acts in cuts for act in acts]


def backward_cuts(each: BackwardPass, stops: Stops) -> list[list[Cut]]:
    """For each interval, where its events are cut."""
    made: list[list[Cut]] = []
    done: Acts = ()
    for interval in each.intervals:
        cuts: list[Cut] = []
        for position, number in interval.marks:
            if number < 0:
                acts = stops.again.get(~number, ())
            else:
                acts = [*done, *stops.before_backward.get(number, ())]
                done = stops.after_backward.get(number, ())
            if acts:
                cuts.append((position, acts))
        made.append(cuts)
    last = each.intervals[-1]
    made[-1].append((len(last.events), [*done, *stops.end]))
    return made
