"""What a value offers and a layer above its own makes, found by name when it is asked for.

Imports go down only. What people expect of a value is in part made above it all the same: the
parameters of a ``ModelSpec`` are counted on the tape, what its class calls its modules stands in a data
file, what would make an estimate fit is searched for, and how an answer looks, in a terminal, a
notebook or a file, is the report's to say. Every such look upward is a line of ``PROVIDERS``; nothing is
imported before one of them is asked for.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol

PROVIDERS = {
    "class_types": ("memplan.classes.registry", "model_types"),
    "class_facts": ("memplan.classes.reading", "read_class"),
    "advice_text": ("memplan.options.python", "advice_in_python"),
    "data_frame": ("memplan.report.rows.documents", "data_frame"),
    "explanation": ("memplan.report.explained.explanation", "explain_estimate"),
    "estimate_picture": ("memplan.report.pictures.of", "estimate_picture"),
    "gpu_row": ("memplan.report.lookups.gpus", "gpu_row"),
    "hint_row": ("memplan.report.rows.documents", "hint_row"),
    "hints": ("memplan.search.advice", "hints_of"),
    "largest_batch": ("memplan.search.advice", "largest_batch_of"),
    "num_params": ("memplan.graph.counts", "num_parameters"),
    "plan_document": ("memplan.report.rows.documents", "plan_document"),
    "plan_picture": ("memplan.report.pictures.of", "plan_picture"),
    "plan_rows": ("memplan.report.rows.documents", "plan_row_list"),
    "sweep_document": ("memplan.report.rows.documents", "sweep_document"),
    "sweep_picture": ("memplan.report.pictures.of", "sweep_picture"),
    "timed_row": ("memplan.report.rows.documents", "timed_row"),
    "rendered": ("memplan.report.display", "rendered"),
    "as_html": ("memplan.report.display", "as_html"),
    "plugged": ("memplan.sources.plugins", "plugged"),
    "told": ("memplan.cli.output.terminal", "told"),
    "waiting": ("memplan.cli.output.progress", "waiting"),
}
"""What is offered -> the module and the function of one argument (the value) that make it."""


def provided(name: str, value: object, *details: object) -> Any:
    """Have the layer that can make it make what ``value`` offers.

    >>> from memplan.sources.models import load_model
    >>> provided("num_params", load_model("gpt2"))
    124439808
    """
    module, function = PROVIDERS[name]
    return getattr(import_module(module), function)(value, *details)


class Document(Protocol):
    """Rows for scripts, that a layer above makes."""

    def rows(self) -> list[dict[str, object]]:
        """Flat rows."""

    def to_dict(self) -> dict[str, object]:
        """What ``--format json`` writes."""


class Hint(Protocol):
    """A change that would make a setup fit, that a layer above finds."""

    @property
    def text(self) -> str:
        """What to change, and what that saves, in a line."""

    def to_dict(self) -> dict[str, object]:
        """One of the ``hints`` of ``--format json``."""


class Drawn(Protocol):
    """A picture that a layer above draws, shown as it is in a notebook."""

    @property
    def svg(self) -> str:
        """The drawing as a file of its own."""

    def save(self, path: str) -> None:
        """Write it to a file that ends in ``.svg`` or ``.html``."""

    def to_figure(self) -> Any:
        """The same as a figure of matplotlib's, where that is installed."""


class Displayed:
    """A value that rich and notebooks show as memplan's own command line would."""

    __slots__ = ()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """For ``rich.print``: the table of the command line."""
        yield provided("rendered", self, options.max_width)

    def _repr_html_(self) -> str:
        """For notebooks: the same table."""
        html: str = provided("as_html", self)
        return html
