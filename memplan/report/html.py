"""One self-contained page about one setup: opens anywhere, prints, and asks the network for nothing.

No script runs in it; both colour schemes are in its style sheet; every drawing is inline.

The page and its style sheet are templates of the standard library's ``string.Template``, in which CSS
keeps its braces, and what repeats is written by functions: there is no loop in the frame that a template
engine such as jinja2, one more dependency, would make simpler.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from memplan.compute.flops import StepFlops
from memplan.errors import SetupError, UnsupportedOperationError
from memplan.estimator import Estimate, Verdict, estimate
from memplan.fast_dataclass import dataclass
from memplan.report.estimates.answer import needed_text
from memplan.report.estimates.changes import advice_text, setup_label
from memplan.report.estimates.printed import footnotes
from memplan.report.explained.explanation import Explanation, explain_estimate
from memplan.report.explained.nodes import LayerKind, Node
from memplan.report.formulas.case import MethodRow, numbers_of
from memplan.report.formulas.methods import compare_methods
from memplan.report.formulas.written import assumed_bytes_line
from memplan.report.lookups.flops import TERA, flops_footnotes
from memplan.report.pages.frame import PAGE, STYLE, VERDICT_CLASSES, VERDICT_MARKS
from memplan.report.pages.palette import variables
from memplan.report.pages.step_layout import gib
from memplan.report.pages.tables import scroll_area, table
from memplan.report.pictures.bars import phases_picture, ranks_picture
from memplan.report.pictures.steps import step_picture
from memplan.search.advice import advise
from memplan.training.setup import DEFAULT_SEQ_LEN_CAP
from memplan.units import GIB, format_count, size_text

BATCHES = (1, 2, 4, 8, 16, 32)
"""Micro-batches of the heat map."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Sequence lengths of the heat map, as far as the model reads."""


@dataclass(frozen=True, slots=True)
class HeatCell:
    """One setup of the heat map."""

    batch: int
    length: int
    found: Estimate | None
    """None where the model cannot be trained so."""


def html_report(found: Sequence[Estimate], *, version: str) -> str:
    """The page about one setup on one or more GPUs; the first one is drawn.

    ``version`` is memplan's, for the page's last line.
    """
    first = found[0]
    explained = explain_estimate(first)
    rows, refused = compare_methods(first.model, [first.setup])
    sections = (
        _section(
            "The step", step_picture(first)._repr_html_(), phases_picture(first)._repr_html_()
        ),
        _section("On the GPU", _verdicts(found)),
        _time(first),
        _pipeline(first),
        _section("Another batch or sequence", _heat_map(first)),
        _section("The account", _tree(explained), *_kinds(explained)),
        _section("FLOPs", _flops(first)),
        _section("What other methods say", _methods(first, rows, refused)),
        _section("Assumptions", _assumptions(found, version)),
    )
    title = f"{first.model.name}: {gib(first.peak_bytes)}"
    style = STYLE.substitute(light=variables(scheme=0), dark=variables(scheme=1))
    return PAGE.substitute(
        title=escape(title), style=style, head=_head(first), sections="".join(sections)
    )


def heat_cells(found: Estimate) -> list[HeatCell]:
    """The setup with other micro-batches and sequence lengths, its own among them."""
    setup, model = found.setup, found.model
    longest = max(model.context_length, setup.seq_len or DEFAULT_SEQ_LEN_CAP)
    lengths = sorted({*(each for each in LENGTHS if each <= longest), setup.seq_len or 1})
    batches = sorted({*BATCHES, setup.micro_batch_size})
    cells = []
    for batch in batches:
        for length in lengths:
            target = length if setup.target_seq_len == setup.seq_len else setup.target_seq_len
            changed = replace(setup, micro_batch_size=batch, seq_len=length, target_seq_len=target)
            try:
                answer: Estimate | None = estimate(model, changed, found.gpu)
            except SetupError:
                answer = None
            cells.append(HeatCell(batch, length, answer))
    return cells


# -- sections ------------------------------------------------------------------------------------


def _section(title: str, *parts: str) -> str:
    name = title.lower().replace(" ", "-")
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{"".join(parts)}</section>\n'


def _time(found: Estimate) -> str:
    """The step as lanes with its critical path, and its parts; nothing where it is not known how long it takes."""
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.report.estimates.times import time_lines, timed
    from memplan.report.pictures.lanes import lanes_picture

    time = timed(found, TimeQuestion()).time if found.gpu is not None else None
    if time is None:
        return ""
    lines = "".join(f"<p>{escape(each)}</p>" for each in time_lines(found, TimeQuestion()))
    return _section("Its time", lines, lanes_picture(found, time)._repr_html_())


def _pipeline(found: Estimate) -> str:
    """The ranks of a pipeline, drawn and as a table; nothing where there is none."""
    if found.setup.pipeline is None:
        return ""
    from memplan.report.html_stages import stage_table  # only for pipelines

    return _section("The pipeline", ranks_picture(found)._repr_html_(), stage_table(found))


def _head(found: Estimate) -> str:
    setup = found.setup
    gpus = f" on {setup.num_gpus} GPUs" if setup.num_gpus > 1 else ""
    gpu = f", {found.gpu.short_name}" if found.gpu is not None else ""
    total = found.total_bytes
    cards = [
        ("peak of a step", gib(found.peak_bytes), f"in {found.peak_phase}"),
        ("needs", f"{needed_text(total)} GiB",
         "with context and fragmentation"),
        ("between steps", gib(found.held_bytes), "held"),
        ("parameters", format_count(found.num_params), f"{format_count(found.trainable_params)} trained"),
    ]  # fmt: skip
    flops = known_flops(found)
    if flops is not None:
        compute = f"{flops.total / TERA:,.1f} TFLOP"
        cards.append(("compute", compute, "a micro-batch, forward and backward"))
    if found.host_bytes:
        cards.append(("CPU memory", gib(found.host_bytes), "of a node"))
    boxes = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
        for name, value, note in cards
    )
    return (
        f"<header><h1>{escape(found.model.name)}</h1>{_badge(found)}"
        f"<p>{escape(setup_label(setup))}{gpus}{escape(gpu)}; "
        f"{escape(', '.join(found.assumptions))}</p>{_fix(found)}"
        f'<div class="cards">{boxes}</div></header>'
    )


def _fix(found: Estimate) -> str:
    """What would make it fit, where it does not."""
    if found.job_verdict is not Verdict.OOM:
        return ""
    return f'<p class="fix">{escape(advice_text(advise(found.model, found)))}</p>'


def _badge(found: Estimate) -> str:
    if found.verdict is None:
        return ""
    name = VERDICT_CLASSES[found.verdict]
    return f'<span class="badge {name}">{VERDICT_MARKS[name]} {escape(found.verdict.value)}</span>'


def _verdicts(found: Sequence[Estimate]) -> str:
    rows = []
    for each in found:
        if each.gpu is None:
            continue
        needed = f"{needed_text(each.total_bytes)} GiB"
        capacity = ("~" if each.gpu.is_capacity_derived else "") + gib(each.gpu.capacity_bytes)
        rows.append([escape(each.gpu.short_name), capacity, needed, _badge(each)])
    if not rows:
        return "<p>No GPU was named, so there is no verdict.</p>"
    head = ["GPU", "usable", "needed", "verdict"]
    return table(head, rows, caption="What each GPU says", markup=True)


def _heat_map(found: Estimate) -> str:
    cells = heat_cells(found)
    lengths = sorted({cell.length for cell in cells})
    body = []
    for batch in sorted({cell.batch for cell in cells}):
        row = "".join(_heat_cell(cell, found) for cell in cells if cell.batch == batch)
        body.append(f'<tr><th scope="row">{batch}</th>{row}</tr>')
    head = "".join(f'<th scope="col">{length:,}</th>' for length in lengths)
    states = ", ? what is counted fits" if found.unmodelled else ""
    judge = f", judged by {found.gpu.short_name}" if found.gpu is not None else ""
    return (
        f"<p>Peak in GiB by micro-batch (down) and tokens (across){escape(judge)}: "
        f"✓ fits, ~ tight, ✗ out of memory{states}; this setup is framed.</p>"
        f'{scroll_area("Peak by micro-batch and tokens")}<table class="heat"><caption>Peak by '
        'micro-batch and tokens</caption><thead><tr><th scope="col">batch</th>'
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>\n"
    )


def _heat_cell(cell: HeatCell, found: Estimate) -> str:
    if cell.found is None:
        return "<td></td>"
    verdict = cell.found.verdict
    name = VERDICT_CLASSES[verdict] if verdict is not None else ""
    own = cell.batch == found.setup.micro_batch_size and cell.length == found.setup.seq_len
    figure = cell.found.peak_bytes / GIB
    text = f"{figure:,.1f}" if figure < 1000 else f"{figure:,.0f}"
    classes = f"{name} own" if own else name
    return f'<td class="{classes}">{text}&nbsp;{VERDICT_MARKS[name]}</td>'


def _tree(explained: Explanation) -> str:
    """Every phase; weights and what layers keep are listed in the fullest one only."""
    return "".join(
        _details(phase, is_open=True, depth=0)
        if phase.name == explained.peak
        else _details(_by_component(phase), is_open=False, depth=0)
        for phase in explained.phases
    )


def _by_component(phase: Node) -> Node:
    lifetimes = tuple(
        replace(each, children=tuple(replace(child, children=()) for child in each.children))
        for each in phase.children
    )
    return replace(phase, children=lifetimes)


def _details(node: Node, *, is_open: bool, depth: int) -> str:
    text = f"<b>{size_text(node.num_bytes)}</b> {escape(node.name)}"
    if node.formula:
        text += f" = {escape(node.formula)}"
    if node.source:
        text += f" <small>{escape(node.source)}</small>"
    if not node.children:
        return f'<div class="leaf">{text}</div>'
    inner = "".join(
        _details(child, is_open=is_open and depth < 1, depth=depth + 1) for child in node.children
    )
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{text}</summary>{inner}</details>"


def _kinds(explained: Explanation) -> list[str]:
    return [_kind(kind) for kind in explained.layers]


def _kind(kind: LayerKind) -> str:
    times = ""
    if kind.count > 1:
        times = f", x {kind.count} = {size_text(kind.count * kind.kept_bytes)}"
    rows = [
        [size_text(each.num_bytes), each.name, each.formula, each.source] for each in kind.tensors
    ]
    head = ["bytes", "tensor", "size", "because"]
    kept = table(head, rows, caption=f"What {kind.name} keeps for backward")
    return (
        f"<details><summary>{escape(kind.name)} keeps <b>{size_text(kind.kept_bytes)}</b> for "
        f"backward{escape(times)}</summary>{kept}</details>"
    )


def known_flops(found: Estimate) -> StepFlops | None:
    """FLOPs of a step; None for a model whose operations are not written down."""
    try:
        return found.flops
    except UnsupportedOperationError:
        return None


def _flops(found: Estimate) -> str:
    flops = known_flops(found)
    if flops is None:
        return "<p>The operations of this model are not written down yet.</p>"
    rows = [
        [each.component.value, *(_tera(figure) for figure in
         (each.forward, each.backward, each.recomputation, each.total))]
        for each in flops.components
    ]  # fmt: skip
    figures = (flops.forward, flops.backward, flops.recomputation, flops.total)
    rows.append(["total", *(_tera(figure) for figure in figures)])
    head = ["TFLOP of a micro-batch", "forward", "backward", "recomputed", "total"]
    notes = flops_footnotes(found.model, found.setup, flops)
    return table(head, rows, caption="FLOPs by component", last_bold=True) + _notes(notes)


def _tera(figure: int) -> str:
    return f"{figure / TERA:,.3f}" if figure else ""


def _methods(found: Estimate, rows: Sequence[MethodRow], refused: Sequence[str]) -> str:
    body = [
        [
            f"{row.method}, {row.setting}",
            *("-" if size is None else f"{size / GIB:,.2f}"
              for size in (row.states_bytes, row.activations_bytes, row.total_bytes)),
            row.formula, f"{row.source}; without {row.leaves_out}",
        ]
        for row in rows
    ]  # fmt: skip
    head = [
        "method",
        "states",
        "activations",
        "GiB in all",
        "formula",
        "source, and what is left out",
    ]
    assumed = assumed_bytes_line(found.setup)
    notes = (numbers_of(found.model, found.setup), *((assumed,) if assumed else ()), *refused)
    return table(head, body, caption="Methods side by side") + _notes(notes)


def _assumptions(found: Sequence[Estimate], version: str) -> str:
    lines = [
        *found[0].assumptions,
        *footnotes([found]),
        f"Made by memplan {version}.",
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>"


def _notes(lines: Iterable[str]) -> str:
    return "".join(f'<p class="note">{escape(line)}</p>' for line in lines)
