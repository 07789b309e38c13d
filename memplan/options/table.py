"""What an option is: a row of a table, alone or in a group that makes one value."""

from collections.abc import Callable, Mapping
from typing import Any

from memplan.fast_dataclass import dataclass, replace
from memplan.options.panels import TRAINING_PANEL

Values = Mapping[str, Any]
"""The command's parameters, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option."""

    flag: str
    """As it is typed; a pair with a slash where it can be denied."""
    field: str = ""
    """Of ``TrainingSetup``; nothing where it sets none by itself."""
    help_text: str
    also: tuple[str, ...] = ()
    """Other names that it is typed by."""
    metavar: str | None = "NAME"
    kind: Any = str
    """What one value is; with ``| None`` where there is a default to look for elsewhere."""
    default: object = None
    axis_help: str | None = None
    """How several values are asked for; None: a sweep takes none."""
    axis_metavar: str | None = None
    """What stands for several; None: LIST for numbers, else NAMES."""
    parser: Callable[[str], Any] | None = None
    panel: str = TRAINING_PANEL
    """The heading that it stands under in the help."""
    show_default: bool = True
    """Whether the help says it."""
    minimum: int | None = None
    maximum: int | None = None
    completes: str = ""
    """What a shell completes its value with: ``models`` or ``gpus``; nothing: nothing."""

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self.flag.partition("/")[0].lstrip("-").replace("-", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionGroup:
    """Options that make one field's value together."""

    field: str
    """Of ``TrainingSetup``."""
    options: tuple[Option, ...]
    make: Callable[[Values], object]
    """The value, of the command's parameters; None where none of them is given."""

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the command's parameters."""
        return frozenset(option.parameter for option in self.options)


def as_axis(option: Option) -> Option:
    """The same where it may have several values: a list or a range, as text.

    >>> as_axis(Option(flag="--zero", help_text="The stage.", axis_help="Stages: 0-3.")).metavar
    'NAMES'
    """
    return replace(
        option, kind=str | None, default=None, parser=None, minimum=None, show_default=False,
        help_text=option.axis_help or option.help_text,
        metavar=option.axis_metavar or ("LIST" if option.metavar == "N" else "NAMES"),
    )  # fmt: skip
