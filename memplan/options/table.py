"""What an option that sets a field of the training setup is: a row of a table, alone or in a group."""

from collections.abc import Callable, Mapping
from typing import Any

from memplan.fast_dataclass import dataclass
from memplan.options.panels import TRAINING_PANEL

Values = Mapping[str, Any]
"""The command's parameters, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingOption:
    """One option."""

    flag: str
    """As it is typed; a pair with a slash where it can be denied."""
    field: str
    """Of ``TrainingSetup``; nothing where it sets none."""
    help_text: str
    also: tuple[str, ...] = ()
    """Other names that it is typed by."""
    metavar: str | None = "NAME"
    kind: Any = str
    """What one value is; with ``| None`` where there is a default to look for elsewhere."""
    default: object = None
    axis_help: str | None = None
    """How several values are asked for; None: a sweep takes none."""
    parser: Callable[[str], Any] | None = None
    panel: str = TRAINING_PANEL
    """The heading that it stands under in the help."""
    show_default: bool = True
    """Whether the help says it."""

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self.flag.partition("/")[0].lstrip("-").replace("-", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionGroup:
    """Options that make one field's value together."""

    field: str
    """Of ``TrainingSetup``."""
    options: tuple[SettingOption, ...]
    make: Callable[[Values], object]
    """The value, of the command's parameters; None where none of them is given."""

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the command's parameters."""
        return frozenset(option.parameter for option in self.options)
