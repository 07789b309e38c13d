"""How answers look where they are shown as values: with ``rich.print``, and in a notebook.

The tables are those of the command line, printed to a console of their own.
"""

from functools import singledispatch
from io import StringIO
from itertools import islice

from rich.console import Console
from rich.text import Text

from memplan.estimator import Estimate
from memplan.model.spec import ModelSpec
from memplan.search.planning.goal import Plan
from memplan.search.sweep import Sweep

NOTEBOOK_COLUMNS = 110
"""Width of what a notebook shows, in characters."""
MOST_SHOWN_SETUPS = 50
"""Setups of a sweep that are computed to show it; ``Sweep.rows`` has all of them."""
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.35;'
    'font-family:Menlo,Consolas,DejaVu Sans Mono,monospace">{code}</pre>'
)


def rendered(value: object, width: int) -> Text:
    """A value as rich shows it in so many columns."""
    file = StringIO()
    console = Console(
        file=file, width=width, force_terminal=True, color_system="truecolor", highlight=False
    )
    print_value(value, console)
    return Text.from_ansi(file.getvalue().rstrip("\n"))


def as_html(value: object) -> str:
    """A value as a notebook shows it; text out of files is escaped."""
    console = Console(file=StringIO(), width=NOTEBOOK_COLUMNS, record=True, highlight=False)
    print_value(value, console)
    return console.export_html(inline_styles=True, code_format=_HTML)


@singledispatch
def print_value(value: object, console: Console) -> None:  # noqa: ARG001
    """Print a value of one of the kinds below."""
    raise AssertionError(type(value))


@print_value.register
def _(value: Estimate, console: Console) -> None:
    from memplan.report.estimates.printed import print_account

    print_account(console, [value])


@print_value.register
def _(value: Sweep, console: Console) -> None:
    from memplan.report.sweep import print_sweep

    print_sweep(console, value, list(islice(value, MOST_SHOWN_SETUPS)))
    if value.num_tried < value.num_combinations:
        line = f"The first {value.num_tried} of {value.num_combinations}: rows() has all"
        console.print(Text(line, style="dim"))


@print_value.register
def _(value: Plan, console: Console) -> None:
    from memplan.report.plans.printed import print_plan

    print_plan(console, value)


@print_value.register
def _(value: ModelSpec, console: Console) -> None:
    from memplan.graph.counts import count_parameters
    from memplan.report.lookups.models import print_model

    print_model(console, value, count_parameters(value))
