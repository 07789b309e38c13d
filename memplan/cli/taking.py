"""Commands: rows of ``memplan.options`` that they take, and a row for the words that stand alone.

A command's options are handed over in its parameter ``values``, by name.
"""

from collections.abc import Callable
from typing import Any, Protocol

from memplan.fast_dataclass import dataclass
from memplan.options.table import Option, Values

NO_VALUES: Values = {}
"""What stands for the options in a command's signature."""


class Context(Protocol):
    """What is known of a command line that was read, whoever read it."""

    command: Any
    info_name: Any
    parent: Any
    params: dict[str, Any]
    """Values by their parameters' names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """What is typed without an option's name."""

    parameter: str = "model"
    """The name of the command's parameter."""
    metavar: str = "MODEL"
    help_text: str
    kind: Any = str
    """What it is; with ``| None`` where it may be left out."""
    completes: str = "models"
    """What a shell completes it with: ``models`` or ``gpus``; nothing: nothing."""

    @property
    def is_required(self) -> bool:
        """Whether it may not be left out."""
        return self.kind is str


MODEL_HELP = (
    "A built-in name (t5-3b), a Hugging Face id or page, a config.json or its folder, or a YAML "
    "spec."
)
MODEL_ARGUMENT = Argument(help_text=MODEL_HELP)
OPTIONAL_MODEL = Argument(help_text=MODEL_HELP, kind=str | None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Command:
    """A command, and what it takes."""

    body: Callable[..., int | None]
    argument: Argument | None
    options: tuple[Option, ...]
    """In the order of its help."""

    @property
    def wants_context(self) -> bool:
        """Whether it looks at more than its values: at what was typed."""
        return "ctx" in self.body.__code__.co_varnames[: self.body.__code__.co_argcount]

    def run(self, ctx: Context | None, found: dict[str, Any]) -> int:
        """Run it with the values of its parameters, and return the exit code."""
        values = {option.parameter: found[option.parameter] for option in self.options}
        words = [] if self.argument is None else [found[self.argument.parameter]]
        contexts = [ctx] if self.wants_context else []
        return self.body(*contexts, *words, values=values) or 0


def takes(
    *options: Option, argument: Argument | None = None
) -> Callable[[Callable[..., int | None]], Command]:
    """Make a function a command with these options."""
    return lambda body: Command(body=body, argument=argument, options=options)
