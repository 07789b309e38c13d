"""An explanation on one screen: a bar for each component at the moment that decides, and one's arithmetic."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind
from memplan.report.estimates.answer import needed_text, print_answer
from memplan.report.estimates.assumed import model_lines
from memplan.report.estimates.columns import plain_gib
from memplan.report.explained.explanation import Explanation, explain_estimate
from memplan.report.explained.nodes import LayerKind, Node
from memplan.report.pages.palette import COMPONENTS
from memplan.report.terminal.blocks import hanging
from memplan.units import GIB, format_count

if TYPE_CHECKING:
    from memplan.report.terminal.console import Console, Text
    from memplan.search.advice import Hints

BAR_WIDTH = 14
"""Columns of the longest bar."""
FIGURES_WIDTH = 15
"""Of bytes and share, with the spaces between."""
WIDE_BAR = 30
"""The same on a terminal of more than this and 80 columns."""
SCREEN_COLUMNS = 80
KEPT = {ComponentKind.ACTIVATIONS: False, ComponentKind.LOGITS_AND_LOSS: True}
"""Components that layers keep, and whether it is the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A component at the moment that decides."""

    kind: ComponentKind | None
    """None: what lies beside what PyTorch hands out."""
    name: str
    num_bytes: int
    words: str
    """Its formula, or where it comes from."""


def bars_of(found: Estimate, explained: Explanation) -> list[Bar]:
    """The components of the phase that decides, the largest first, and what is needed beside them."""
    phase = next(each for each in explained.phases if each.name == found.deciding_phase)
    nodes = [node for lifetime in phase.children for node in lifetime.children]
    bars = []
    for kind in ComponentKind:
        own = [node for node in nodes if node.name == words_of(kind)]
        if own:
            total = sum(node.num_bytes for node in own)
            bars.append(Bar(kind=kind, name=words_of(kind), num_bytes=total, words=_words(own)))
    bars = _with_small_ones_together(sorted(bars, key=lambda each: -each.num_bytes))
    if found.gpu is None:
        return bars
    if found.certain_bytes is not None:
        return bars
    rest = found.required_bytes - found.worst_bytes
    return [*bars, Bar(kind=None, name="allocator's rest", num_bytes=rest, words=REST_WORDS)]


def _with_small_ones_together(bars: Sequence[Bar]) -> list[Bar]:
    """Those that two decimals of a GiB show as nothing in one, where there are several."""
    small = [bar for bar in bars if bar.num_bytes < HUNDREDTH]
    if len(small) < 2:
        return list(bars)
    total, names = sum(bar.num_bytes for bar in small), ", ".join(bar.name for bar in small)
    return [*bars[: -len(small)], Bar(kind=None, name="others", num_bytes=total, words=names)]


HUNDREDTH = GIB // 200
"""Bytes below which two decimals of a GiB are nothing."""
REST_WORDS = "held in segments, not handed out"


def words_of(kind: ComponentKind) -> str:
    """``logits and loss``."""
    return kind.label.replace("_", " ")


def _words(nodes: Sequence[Node]) -> str:
    """The formula of the largest part, its counts as people say them, or its source."""
    largest = max(nodes, key=lambda node: node.num_bytes)
    formula = COUNT.sub(lambda match: format_count(int(match[0].replace(",", ""))), largest.formula)
    source = f"  ({largest.source})" if largest.formula and largest.source else largest.source
    return f"{formula}{source}"


COUNT = re.compile(r"\d{1,3}(,\d{3})+")


def print_overview(
    console: "Console", found: Estimate, explained: Explanation, hints: "Hints"
) -> None:
    """Print the verdict, a bar for each component, the phases, and what shows more."""
    from memplan.report.terminal.console import Text

    print_answer(console, [[found]], hints)
    console.print()
    for line in bar_lines(found, explained, console.width):
        console.print(line, soft_wrap=True)
    console.print()
    for text in (*model_lines(found), phases_line(found), *closing_lines(found)):
        for each in hanging(text, console.width):
            console.print(Text(each, style="dim"))


def bar_lines(found: Estimate, explained: Explanation, width: int) -> "list[Text]":
    """A line for each component: bytes, share, bar, formula; what has no room is cut behind a word."""
    from memplan.report.terminal.console import Text

    bars = bars_of(found, explained)
    whole = sum(bar.num_bytes for bar in bars)
    most = max(bar.num_bytes for bar in bars)
    names = max(len(bar.name) for bar in bars)
    wanted = WIDE_BAR if width >= SCREEN_COLUMNS + WIDE_BAR else BAR_WIDTH
    bar_width = max(0, min(wanted, width - names - FIGURES_WIDTH))
    lines = [Text(f" GiB at the peak of {found.deciding_phase}", style="bold")]
    for bar in bars:
        share = bar.num_bytes / whole if whole else 0
        drawn = "█" * round(bar_width * bar.num_bytes / most) or "▏"[:bar_width]
        line = Text(f" {bar.name:<{names}} {plain_gib(bar.num_bytes):>7} {share:4.0%} ")
        line.append(f"{drawn:<{bar_width}}", style=_colour(bar.kind))
        room = width - len(line.plain) - 1
        line.append(f" {shortened(bar.words, room)}".rstrip(), style="dim")
        line.rstrip()
        lines.append(line)
    sums = (each for text in sum_lines(found, names) for each in hanging(f" {text}", width))
    return [*lines, *(Text(text, style="bold") for text in sums)]


def _colour(kind: ComponentKind | None) -> str:
    return COMPONENTS[kind][0] if kind in COMPONENTS else "dim"


def sum_lines(found: Estimate, names: int) -> list[str]:
    """What that comes to, and with what lies beside the allocator, as the verdict has it."""
    if found.gpu is None:
        return [f"{'allocated':<{names}} {plain_gib(found.worst_bytes):>7}"]
    if found.certain_bytes is not None:
        low = "kept between steps" if found.gpu.manager.rules.compiles else "allocated at once"
        ends = f"{low}, to what CUDA's allocator reserves, its context and NCCL"
        return [f"{'needs':<{names}} {needed_text(found.total_bytes)} GiB: {ends}"]
    beside = f"{needed_text(found.context_bytes)} CUDA context"
    if found.nccl_bytes.high:
        beside += f" + {needed_text(found.nccl_bytes)} NCCL"
    total = f"{plain_gib(found.required_bytes)} + {beside}"
    return [f"{'needs':<{names}} {needed_text(found.total_bytes)} GiB = {total}"]


def shortened(text: str, room: int) -> str:
    """As many whole words as there is room for.

    >>> shortened("one two three", 9), shortened("one two", 9)
    ('one ...', 'one two')
    """
    if len(text) <= room:
        return text
    kept = text[: max(0, room - 3)].rpartition(" ")[0].rstrip(" (=x+,")
    return f"{kept} ..." if kept else ""


def phases_line(found: Estimate) -> str:
    """``load 9.4, forward 32.6, backward 33.1 GiB``."""
    told = [
        f"{name} {phase.peak_bytes / GIB:,.1f}{'*' if name == found.deciding_phase else ''}"
        for name, phase in found.phases.items()
    ]
    return f"By phase: {', '.join(told)} GiB (* decides)"


def closing_lines(found: Estimate) -> list[str]:
    """Notes, and what shows more."""
    return [
        *found.all_notes,
        *found.left_out_notes,
        "More: --component activations, --timeline, --full",
    ]


# -- the arithmetic of some components -----------------------------------------------------------


def component_kinds(texts: Sequence[str]) -> list[ComponentKind]:
    """Components by their names or a part that one of them has alone, several behind commas, with spaces, dashes or underscores.

    Raises ``UsageError`` for what is none, with the nearest name.

    >>> [kind.label for kind in component_kinds(["gradients,logits-and-loss", "optimizer"])]
    ['gradients', 'logits_and_loss', 'optimizer_states']
    """
    from memplan.errors import UsageError, did_you_mean

    known = {kind.label: kind for kind in ComponentKind}
    found = []
    for text in (part for each in texts for part in each.split(",")):
        name = text.strip().lower().replace("-", "_").replace(" ", "_")
        parts = [label for label in known if name and name in label]
        if name not in known and len(parts) == 1:
            name = parts[0]
        if name not in known:
            names = ", ".join(known)
            hint = did_you_mean(name, tuple(known)) or f" There are: {names}"
            msg = f"--component: there is no component {text.strip()!r}.{hint}"
            raise UsageError(msg)
        found.append(known[name])
    return list(dict.fromkeys(found))


def print_components(
    console: "Console", found: Estimate, kinds: Sequence[ComponentKind], hints: "Hints"
) -> None:
    """Print the verdict, and of each component its bytes in every phase and how they come about."""
    from memplan.report.explain import component_tree, kind_table
    from memplan.report.terminal.console import Text
    from memplan.report.terminal.narrow import print_table

    explained = explain_estimate(found)
    print_answer(console, [[found]], hints)
    for kind in kinds:
        console.print()
        for text in hanging(component_line(found, kind), console.width):
            console.print(Text(text, style="bold"))
        for node in fullest_nodes(explained, kind):
            console.print(component_tree(node))
        for each in kept_layers(explained, kind):
            print_table(console, kind_table(each), num_labels=2)


def component_line(found: Estimate, kind: ComponentKind) -> str:
    """``activations: 12.32 GiB in backward; load 0.00, forward 12.32, ...``."""
    sizes = {name: phase.components.get(kind.label, 0) for name, phase in found.phases.items()}
    if not any(sizes.values()):
        return f"{words_of(kind)}: none in this setup"
    told = ", ".join(f"{name} {plain_gib(size)}" for name, size in sizes.items() if size)
    now = sizes[found.deciding_phase]
    share = now / found.worst_bytes
    return (
        f"{words_of(kind)}: {plain_gib(now)} GiB, {share:.0%} of what is allocated at the peak of "
        f"{found.deciding_phase}; by phase: {told} GiB"
    )


def fullest_nodes(explained: Explanation, kind: ComponentKind) -> list[Node]:
    """The component's parts in the phase where it is largest."""
    by_phase = [
        [node for part in phase.children for node in part.children if node.name == words_of(kind)]
        for phase in explained.phases
    ]
    return max(by_phase, key=lambda nodes: sum(node.num_bytes for node in nodes))


def kept_layers(explained: Explanation, kind: ComponentKind) -> list[LayerKind]:
    """What layers keep of it, where it is what they keep; equal ones once."""
    if kind not in KEPT:
        return []
    return [each for each in explained.layers if each.in_head is KEPT[kind]]
