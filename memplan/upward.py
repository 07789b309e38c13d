"""What a value offers and a layer above its own makes, found by name when it is asked for.

Imports go down only. Four things that people expect of a value are made above it all the same: the
parameters of a ``ModelSpec`` are counted on the tape, what its class calls its modules stands in a data
file, and how an answer looks, in a terminal or a notebook, is the report's to say. Every such look upward is a line of ``PROVIDERS``; nothing is
imported before one of them is asked for.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

PROVIDERS = {
    "module_names": ("memplan.sources.module_names", "module_names"),
    "num_params": ("memplan.graph.counts", "num_parameters"),
    "rendered": ("memplan.report.display", "rendered"),
    "as_html": ("memplan.report.display", "as_html"),
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
