"""The ranks of a pipeline in the report as a page: stages, layers, what is in flight, and the bytes of each."""

from collections.abc import Iterable
from html import escape

from memplan.estimator import Estimate
from memplan.memory.account import Lifetime
from memplan.report.pages.tables import table
from memplan.report.stages import Place, pipeline_places, ranks_words
from memplan.report.timeline import LIFETIME_WORDS, by_lifetime
from memplan.units import GIB

HEAD = ("ranks", "stage", "layers", "in flight", "GiB at its peak", "in", "by lifetime")


def stage_table(found: Estimate) -> str:
    """A row for each place of a pipeline, the first stage's first; its bar is as long as its bytes are beside
    the fullest rank's."""
    places = pipeline_places(found)
    top = max(each.account.peak.peak_bytes for each in places)
    rows = [
        [
            escape(ranks_words(each.ranks)),
            _lines(str(stage.number) for stage in each.stages),
            _lines(escape(stage.words) for stage in each.stages),
            _lines(str(stage.in_flight) for stage in each.stages),
            f"{each.account.peak.peak_bytes / GIB:,.2f}",
            escape(each.account.peak.name),
            _bar(each, top),
        ]
        for each in places
    ]  # fmt: skip
    legend = "".join(
        f'<span><i class="swatch {each.value}"></i>{escape(LIFETIME_WORDS[each])}</span>'
        for each in Lifetime
    )
    return (
        table(HEAD, rows, caption="Each rank's stages and its bytes", markup=True)
        + f'<div class="legend">{legend}<span>in flight: micro-batches whose activations a stage holds at most'
        "</span></div>\n"
    )


def _lines(parts: Iterable[str]) -> str:
    return "<br>".join(parts)


def _bar(each: Place, top_bytes: int) -> str:
    parts = "".join(
        f'<i class="{lifetime.value}" style="width:{100 * size / max(1, top_bytes):.2f}%" '
        f'title="{escape(LIFETIME_WORDS[lifetime])} {size / GIB:,.2f} GiB"></i>'
        for lifetime, size in by_lifetime(each.account.peak).items()
        if size
    )
    return f'<div class="stage">{parts}</div>'
