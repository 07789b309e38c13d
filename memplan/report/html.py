"""One self-contained page about one setup: opens anywhere, prints, and asks the network for nothing.

No script runs in it; both colour schemes are in its style sheet; every drawing is inline.

The page and its style sheet are templates of the standard library's ``string.Template``, in which CSS
keeps its braces, and what repeats is written by functions: there is no loop in the frame that a template
engine such as jinja2, one more dependency, would make simpler.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from string import Template

from memplan.compute.flops import StepFlops
from memplan.errors import SetupError, UnsupportedOperationError
from memplan.estimator import Estimate, Verdict, estimate
from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Phase
from memplan.report.changes import advice_text, setup_label
from memplan.report.compare import (
    MethodRow,
    assumed_bytes_line,
    compare_methods,
    numbers_of,
)
from memplan.report.estimate import footnotes
from memplan.report.explain import size_text
from memplan.report.explanation import Explanation, LayerKind, Node, explain_estimate
from memplan.report.flops import TERA, flops_footnotes
from memplan.report.html_tables import scroll_area, table
from memplan.report.palette import variables
from memplan.report.svg import RESERVED_WORDS, gib, in_words, lay_out, shapes
from memplan.report.timeline import LIFETIME_WORDS, added_words
from memplan.search.advice import advise
from memplan.training.setup import DEFAULT_SEQ_LEN_CAP
from memplan.units import GIB, format_count

BATCHES = (1, 2, 4, 8, 16, 32)
"""Micro-batches of the heat map."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Sequence lengths of the heat map, as far as the model reads."""
VERDICT_CLASSES = {
    Verdict.FITS: "fits", Verdict.TIGHT: "tight", Verdict.OOM: "oom",
    Verdict.STATES_FIT: "states",
}  # fmt: skip
VERDICT_MARKS = {"fits": "✓", "tight": "~", "oom": "✗", "states": "?", "": ""}
"""A verdict without its colour, for print."""


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
        _section("The step", _timeline(first), _bars(first), _component_table(first)),
        _section("On the GPU", _verdicts(found)),
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


def _pipeline(found: Estimate) -> str:
    """The ranks of a pipeline; nothing where there is none."""
    if found.setup.pipeline is None:
        return ""
    from memplan.report.html_stages import stage_table  # only for pipelines

    return _section("The pipeline", stage_table(found))


def _head(found: Estimate) -> str:
    setup = found.setup
    gpus = f" on {setup.num_gpus} GPUs" if setup.num_gpus > 1 else ""
    gpu = f", {found.gpu.short_name}" if found.gpu is not None else ""
    total = found.total_bytes
    cards = [
        ("peak of a step", gib(found.peak_bytes), f"in {found.peak_phase}"),
        ("nvidia-smi would show", f"{total.low / GIB:,.1f} - {total.high / GIB:,.1f} GiB",
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


def _timeline(found: Estimate) -> str:
    drawing = lay_out(found)
    place = f" at {drawing.peak.place}" if drawing.peak.place else ""
    marks = [
        _mark("scale", 0, share, f"{drawing.top_bytes * share / GIB:,.1f}")
        for share in (0.25, 0.5, 0.75)
    ]
    if drawing.capacity_bytes and found.gpu is not None:
        height = drawing.capacity_bytes / drawing.top_bytes
        text = f"{found.gpu.short_name} {gib(drawing.capacity_bytes)}"
        marks.append(f'<i class="capacity" style="bottom:{100 * height:.1f}%">{escape(text)}</i>')
    words = f"{drawing.peak.phase}{place}, {gib(drawing.peak.total_bytes)}"
    # The words reach inwards from their mark, so that they stay on a narrow screen.
    side, where, text = "left", drawing.peak_position, f"▼ {words}"
    if drawing.peak_position > 0.5:
        side, where, text = "right", 1 - drawing.peak_position, f"{words} ▼"
    style = f"{side}:calc({100 * where:.1f}% - .45em)"
    peak = f'<div class="peak"><i style="{style}">{escape(text)}</i></div>'
    phases = "".join(
        f'<span style="width:{100 * share:.2f}%">{escape(name)}</span>'
        for name, _, share in drawing.phases
    )
    legend = "".join(
        f'<span><i class="swatch {each.value}"></i>{escape(words)}</span>'
        for each, words in LIFETIME_WORDS.items()
    )
    if drawing.added_bytes:
        legend += f'<span><i class="swatch reserved"></i>{escape(RESERVED_WORDS)}</span>'
        legend += f'<span><i class="swatch added"></i>{escape(added_words(found))}</span>'
    canvas = shapes(drawing, width=1000, height=300)
    return (
        f'<figure class="timeline" role="img" aria-label="{escape(in_words(found, drawing))}">'
        f'{peak}<div class="canvas"><svg viewBox="0 0 1000 300" preserveAspectRatio="none" '
        f'aria-hidden="true">{canvas}</svg>{"".join(marks)}</div>'
        f'<div class="phases">{phases}</div><figcaption class="legend">{legend}'
        "<span>GiB; events in order, not seconds</span></figcaption></figure>\n"
    )


def _mark(name: str, left: float, height: float, text: str) -> str:
    style = f"left:{100 * left:.1f}%;bottom:{100 * height:.1f}%"
    return f'<i class="{name}" style="{style}">{escape(text)}</i>'


def _bars(found: Estimate) -> str:
    widest = max(phase.peak_bytes for phase in found.account.phases)
    bars = "".join(_bar(phase, widest, found.peak_phase) for phase in found.account.phases)
    kinds = [kind for kind in ComponentKind if _held(found, kind)]
    legend = "".join(
        f'<span><i class="swatch" style="background:var(--{kind.label})"></i>'
        f"{escape(kind.label.replace('_', ' '))}</span>"
        for kind in kinds
    )
    return f'<div class="bars">{bars}</div><div class="legend">{legend}</div>\n'


def _held(found: Estimate, kind: ComponentKind) -> bool:
    return any(kind.label in phase.components for phase in found.account.phases)


def _bar(phase: Phase, widest: int, peak: str) -> str:
    parts = "".join(
        f'<i style="width:{100 * size / widest:.3f}%;background:var(--{kind.label})" '
        f'title="{escape(kind.label.replace("_", " "))} {gib(size)}"></i>'
        for kind in ComponentKind
        if (size := phase.components.get(kind.label, 0))
    )
    mark = " *" if phase.name == peak else ""
    return (
        f'<div class="bar"><span>{escape(phase.name)}{mark}</span><div>{parts}</div>'
        f"<b>{gib(phase.peak_bytes)}</b></div>"
    )


def _component_table(found: Estimate) -> str:
    phases = found.account.phases
    head = ["GiB", *(phase.name for phase in phases)]
    body = [
        [kind.label.replace("_", " "), *(_figure(phase.components.get(kind.label, 0)) for phase in phases)]
        for kind in ComponentKind
        if _held(found, kind)
    ]  # fmt: skip
    body.append(["peak", *(_figure(phase.peak_bytes) for phase in phases)])
    return table(head, body, caption="Components in each phase", last_bold=True)


def _figure(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}" if num_bytes else ""


def _verdicts(found: Sequence[Estimate]) -> str:
    rows = []
    for each in found:
        if each.gpu is None:
            continue
        total = each.total_bytes
        needed = f"{total.low / GIB:,.1f} - {total.high / GIB:,.1f} GiB"
        capacity = ("~" if each.gpu.capacity_note else "") + gib(each.gpu.capacity_bytes)
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
    head = "".join(f'<th scope="col">{length}</th>' for length in lengths)
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


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$head
$sections</main>
</body>
</html>
""")
STYLE = Template("""
:root{color-scheme:light dark;$light}
@media screen and (prefers-color-scheme:dark){:root{$dark}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:1.25rem}
h1{display:inline-block;font-size:1.7rem;margin:0 .7rem 0 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--edge);padding-bottom:.25rem}
header .fix{color:var(--ink);font-weight:600;overflow-wrap:anywhere}
header p,small,.note,figcaption{color:var(--soft)}
.note{font-size:.85rem;margin:.3rem 0;overflow-wrap:anywhere}
.badge{display:inline-block;padding:.05rem .6rem;border-radius:1rem;font-weight:600;white-space:nowrap}
.fits{background:var(--fits)}.tight{background:var(--tight)}.oom{background:var(--oom)}
.states{background:var(--states)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.6rem}
.card{background:var(--panel);border:1px solid var(--edge);border-radius:.5rem;padding:.5rem .7rem}
.card span,.card small{display:block;font-size:.8rem;color:var(--soft)}
.card b{font-size:1.15rem}
figure{margin:1.6rem 0 1rem}
.canvas{position:relative;height:300px;border:1px solid var(--edge);border-width:0 0 1px 1px}
.canvas svg{position:absolute;inset:0;width:100%;height:100%}
.canvas i{position:absolute;font:normal 12px system-ui,sans-serif;white-space:nowrap;z-index:1}
.canvas .scale,.canvas .capacity{padding:0 .25rem;border-radius:2px;line-height:1.15;background:var(--back)}
.canvas .scale{color:var(--ink)}
.canvas .capacity{color:var(--red);font-weight:600;right:.3rem}
.peak{position:relative;height:1.5em;font-size:12px}
.peak i{position:absolute;font-style:normal;font-weight:600;white-space:nowrap}
.long{fill:var(--long)}.medium{fill:var(--medium)}.short{fill:var(--short)}
.added{fill:var(--added)}.swatch.added{background:var(--added)}
.grid{stroke:var(--edge);stroke-width:1;vector-effect:non-scaling-stroke}
.line{stroke:var(--red);stroke-width:1.5;stroke-dasharray:6 4;vector-effect:non-scaling-stroke}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
.swatch.long{background:var(--long)}.swatch.medium{background:var(--medium)}
.reserved{stroke:var(--ink);stroke-width:1.5;fill:none;vector-effect:non-scaling-stroke}
.swatch.reserved{height:2px;background:var(--ink);vertical-align:middle}
.swatch.short{background:var(--short)}
.phases{display:flex;font-size:.8rem;color:var(--soft)}
.phases span{overflow:hidden;border-left:1px solid var(--edge);padding-left:.25rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.8rem;margin:.4rem 0}
.bar{display:grid;grid-template-columns:5.5rem 1fr 5.5rem;gap:.5rem;align-items:center;margin:.25rem 0}
.bar div{display:flex;height:1.2rem;background:var(--panel)}
.bar b{text-align:right;font-size:.85rem;white-space:nowrap}
.bar span{font-size:.85rem}
.stage{display:flex;width:14rem;height:1rem}.stage .long{background:var(--long)}
.stage .medium{background:var(--medium)}.stage .short{background:var(--short)}
.scroll{overflow-x:auto;margin:.6rem 0;background:linear-gradient(to right,var(--back),transparent)
0 0/2rem 100% no-repeat local,linear-gradient(to left,var(--back),transparent) 100% 0/2rem 100%
no-repeat local,linear-gradient(to right,var(--edge),transparent) 0 0/.7rem 100% no-repeat scroll,
linear-gradient(to left,var(--edge),transparent) 100% 0/.7rem 100% no-repeat scroll}
.scroll:focus-visible{outline:2px solid var(--long)}
caption{caption-side:top;text-align:left;color:var(--soft);padding-bottom:.2rem}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;min-width:50%}
th,td{padding:.25rem .9rem .25rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--edge)}
th{color:var(--soft);font-weight:600}
.figure{text-align:right;white-space:nowrap}
.total td{font-weight:700}
.heat th,.heat td{text-align:right;padding:.3rem .5rem;border:1px solid var(--edge)}
.heat .own{outline:2px solid var(--ink);outline-offset:-2px;font-weight:700}
details{margin:.15rem 0 .15rem .2rem}
details>*:not(summary){margin-left:1.1rem}
summary{cursor:pointer}
.leaf{padding-left:1.05rem;overflow-wrap:anywhere}
li{margin:.2rem 0}
@media (max-width:600px){main{padding:.8rem}.canvas{height:220px}
.bar{grid-template-columns:5.6rem 1fr 4.8rem}}
@media print{body{font-size:11px}main{max-width:none;padding:0}section{break-inside:auto}
figure,.bars,.heat,.cards,tr{break-inside:avoid}h2{break-after:avoid}
.canvas{height:220px}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.scroll{overflow:visible}details::details-content{content-visibility:visible;block-size:auto}}
""")
