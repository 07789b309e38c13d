"""A pipeline's ranks: the stages that each has, what is in flight there, and the bytes it takes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.estimator.pipelines import layer_counts, stages_of_rank
from memplan.fast_dataclass import dataclass
from memplan.memory.account import Lifetime, Phase, RankAccount
from memplan.report.terminal.narrow import print_table
from memplan.report.timeline import FILLS, LIFETIME_WORDS, by_lifetime
from memplan.training.splitting.schedules import most_in_flight, passes_of
from memplan.units import GIB

if TYPE_CHECKING:
    from memplan.report.terminal.console import Console

BAR_WIDTH = 24
"""Characters of the fullest rank's bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The ranks of one place in a pipeline."""

    ranks: range
    account: RankAccount
    """Of the fullest of them."""
    stages: tuple["Held", ...]

    @property
    def in_flight(self) -> int:
        """Micro-batches in flight at most, those of each of its stages counted."""
        return sum(stage.in_flight for stage in self.stages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One stage of a rank."""

    number: int
    layers: range
    with_embedding: bool
    with_head: bool
    in_flight: int
    """Micro-batches whose activations it holds at most."""

    @property
    def words(self) -> str:
        """Its parts.

        >>> Held(number=0, layers=range(8), with_embedding=True, with_head=False, in_flight=4).words
        'embedding + 0-7'
        """
        first, last = self.layers.start, self.layers.stop - 1
        parts = ["embedding"] if self.with_embedding else []
        if self.layers:
            parts.append(str(first) if first == last else f"{first}-{last}")
        if self.with_head:
            parts.append("head")
        return " + ".join(parts)


def pipeline_places(found: Estimate) -> tuple[Place, ...]:
    """Every place of a pipeline, the first stage's first; none where there is no pipeline."""
    setup, pipeline = found.setup, found.setup.pipeline
    if pipeline is None:
        return ()
    accounts = found.ranks  # the fullest first
    counts = layer_counts(found.model, pipeline)
    width = setup.num_gpus // pipeline.degree
    places = []
    for place in range(pipeline.degree):
        ranks = range(place * width, (place + 1) * width)
        account = next(each for each in accounts if _has_any(each, ranks))
        flight = dict(most_in_flight(passes_of(pipeline, place)).by_stage)
        stages = tuple(
            _held(number, counts, flight.get(number, 0))
            for number in stages_of_rank(setup, ranks.start)
        )
        places.append(Place(ranks=ranks, account=account, stages=stages))
    return tuple(places)


def _has_any(account: RankAccount, ranks: range) -> bool:
    return any(run.start < ranks.stop and ranks.start < run.stop for run in account.ranks)


def _held(number: int, counts: Sequence[int], in_flight: int) -> Held:
    start = sum(counts[:number])
    return Held(
        number=number,
        layers=range(start, start + counts[number]),
        with_embedding=number == 0,
        with_head=number == len(counts) - 1,
        in_flight=in_flight,
    )


def print_stages(console: "Console", found: Estimate) -> None:
    """Print a line for each place of a pipeline; nothing where there is none."""
    places = pipeline_places(found)
    if not places:
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    top = max(each.account.peak.peak_bytes for each in places)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("ranks", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("layers", overflow="fold")
    table.add_column("in\nflight", justify="right", no_wrap=True)
    table.add_column("GiB at\nits peak", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in places:
        table.add_row(
            ranks_words(each.ranks),
            "\n".join(str(stage.number) for stage in each.stages),
            "\n".join(stage.words for stage in each.stages),
            "\n".join(str(stage.in_flight) for stage in each.stages),
            f"{each.account.peak.peak_bytes / GIB:,.2f}",
            Text(bar(each.account.peak, top)),
        )
    print_table(console, table, num_labels=3)
    legend = ", ".join(f"{FILLS[each]} {LIFETIME_WORDS[each]}" for each in Lifetime)
    note = f"In flight: micro-batches whose activations a stage holds at most. {legend}."
    console.print(Text(note, style="dim"))


def ranks_words(ranks: range) -> str:
    """``0-7``, or one number.

    >>> ranks_words(range(8)), ranks_words(range(3, 4))
    ('0-7', '3')
    """
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"


def bar(phase: Phase, top_bytes: int) -> str:
    """A phase's bytes by lifetime, as long as they are beside the fullest rank's."""
    drawn, total, length = "", 0, 0
    for lifetime, num_bytes in by_lifetime(phase).items():
        total += num_bytes
        end = round(BAR_WIDTH * total / max(1, top_bytes))
        drawn += FILLS[lifetime] * (end - length)
        length = end
    return drawn


def stage_rows(found: Estimate) -> list[dict[str, object]]:
    """Rows of an explanation: each stage's ranks, layers and micro-batches, and the bytes of its ranks."""
    return [
        {
            "section": "stage",
            "path": f"ranks {ranks_words(place.ranks)}/stage {stage.number}",
            "bytes": place.account.peak.peak_bytes,
            "formula": f"{stage.words}; {stage.in_flight} micro-batches in flight",
            "source": f"the peak of these ranks, {place.account.peak.name}",
        }
        for place in pipeline_places(found)
        for stage in place.stages
    ]
