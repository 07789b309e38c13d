"""An explanation as people read it in a terminal: the tree, what layers keep, the timeline."""

from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.report.estimates.account import host_formulas
from memplan.report.estimates.answer import print_answer
from memplan.report.estimates.assumed import print_assumptions
from memplan.report.explained.explanation import Explanation, states_line
from memplan.report.explained.nodes import LayerKind, Node
from memplan.report.terminal.narrow import print_table
from memplan.report.timeline import timeline_lines
from memplan.units import size_text

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    from memplan.report.terminal.console import Console
    from memplan.search.advice import Hints

DETAIL_SHARE = 0.005
"""Parts below this share of their component are summed up in one line of the tree."""
LIST_SHARE = 0.0005
"""Tensors below this share of what their layer keeps are summed up in one line."""


def print_explanation(
    console: "Console", found: Estimate, explained: Explanation, hints: "Hints"
) -> None:
    """Print the verdict and what would change it, the timeline, the peak phase in full, the others
    by component, and what layers keep.
    """
    from rich.text import Text

    print_answer(console, [[found]], hints)
    print_assumptions(console, found.model.assumptions, found.assumptions)
    console.print(Text(f"Held as: {states_line(found)}", style="dim"))
    console.print()
    if found.setup.pipeline is not None:
        from memplan.report.stages import print_stages  # only where there are any

        print_stages(console, found)
        console.print()
    for line in timeline_lines(found, width=console.width):
        console.print(Text(line, no_wrap=True), soft_wrap=True)
    console.print()
    for phase in explained.phases:
        console.print(_phase_tree(phase, full=phase.name == explained.peak))
        console.print()
    for kind in explained.layers:
        print_table(console, kind_table(kind), num_labels=2)
    for line in host_formulas(found):
        console.print(Text(line))
    for line in footnotes(found, explained):
        console.print(Text(line, style="dim"))


def footnotes(found: Estimate, explained: Explanation) -> tuple[str, ...]:
    """How the parts add up, and what is missing."""
    kept = sum(kind.count * kind.kept_bytes for kind in explained.layers)
    beside = explained.kept_bytes - kept
    summed = (
        f"After the forward pass{_of_all_stages(found)} {size_text(explained.kept_bytes)} stay: what the lists above hold, "
        f"and {size_text(beside)} that variables hold, the loss or outputs among them. Every tensor "
        f"is rounded up to {ALLOCATION_ROUNDING} bytes."
    )
    return (
        summed,
        "What an operation keeps, and why: memplan explain --operation NAME.",
        *found.all_notes,
        *found.left_out_notes,
    )


def _of_all_stages(found: Estimate) -> str:
    return " of one micro-batch through all stages" if found.setup.pipeline is not None else ""


def _phase_tree(phase: Node, *, full: bool) -> "Tree":
    from rich.text import Text
    from rich.tree import Tree

    mark = ", the peak of the step" if full else ""
    tree = Tree(
        Text.assemble((phase.name, "bold"), f"  {size_text(phase.num_bytes)}{mark}"),
        guide_style="dim",
    )
    for lifetime in phase.children:
        branch = tree.add(Text(f"{lifetime.name}  {size_text(lifetime.num_bytes)}"))
        for component in lifetime.children:
            leaf = branch.add(_line(component))
            if full:
                _add_parts(leaf, component)
    return tree


def component_tree(node: Node) -> "Tree":
    """One component with all that it is made of."""
    from rich.tree import Tree

    tree = Tree(_line(node), guide_style="dim")
    _add_parts(tree, node)
    return tree


def print_timeline(console: "Console", found: Estimate, hints: "Hints") -> None:
    """Print the verdict and the step, drawn."""
    from rich.text import Text

    print_answer(console, [[found]], hints)
    console.print()
    if found.setup.pipeline is not None:
        from memplan.report.stages import print_stages  # only where there are any

        print_stages(console, found)
        console.print()
    for line in timeline_lines(found, width=console.width):
        console.print(Text(line, no_wrap=True), soft_wrap=True)


def _add_parts(tree: "Tree", node: Node) -> None:
    from rich.text import Text

    small = [
        child
        for child in node.children
        if child.num_bytes < DETAIL_SHARE * node.num_bytes and not child.stands_out
    ]
    for child in node.children:
        if child not in small:
            _add_parts(tree.add(_line(child)), child)
    if small:
        total = size_text(sum(child.num_bytes for child in small))
        names = ", ".join(dict.fromkeys(child.name for child in small))
        tree.add(Text(f"{total}  {names}", style="dim"))


def _line(node: Node) -> "Text":
    from rich.text import Text

    text = Text.assemble((size_text(node.num_bytes), "cyan"), f"  {node.name}")
    if node.formula:
        text.append(f" = {node.formula}")
    if node.source:
        text.append(f"  ({node.source})", style="dim")
    return text


def kind_table(kind: LayerKind) -> "Table":
    """What one of some layers keeps, tensor by tensor."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    times = (
        f", x {kind.count} = {size_text(kind.count * kind.kept_bytes)}" if kind.count > 1 else ""
    )
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left",
        title=f"{kind.name} keeps {size_text(kind.kept_bytes)} for backward{times}",
        title_style="bold",
    )  # fmt: skip
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("tensor", overflow="fold")
    table.add_column("size", overflow="fold")
    table.add_column("because", overflow="fold")
    shown = [each for each in kind.tensors if each.num_bytes >= LIST_SHARE * kind.kept_bytes]
    for tensor in shown:
        table.add_row(size_text(tensor.num_bytes), tensor.name, tensor.formula, tensor.source)
    small = kind.tensors[len(shown) :]
    if small:
        total = sum(tensor.num_bytes for tensor in small)
        names = ", ".join(dict.fromkeys(tensor.name for tensor in small))
        table.add_row(size_text(total), f"{names}: together", "", "", style="dim")
    if kind.modules:
        table.add_section()
    for name, num_bytes in sorted(kind.modules, key=lambda each: -each[1]):
        share = f"{num_bytes / kind.kept_bytes:.1%} of the layer's"
        table.add_row(size_text(num_bytes), f"{name}, together", share, "", style="bold")
    return table
