"""What was asked of a config, part by part, and what a class's default answered instead.

A ``ConfigReader`` writes it as it reads, and hands it on to the readers of nested configs. From it
follows what no reader can know by itself: which keys of a file were never looked at, and which
sizes of the answer are not the file's.
"""

from collections.abc import Mapping

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultRead:
    """A size that the config leaves to its class."""

    path: str
    """Keys that lead to the part, each with a full stop behind it; empty for the outermost."""
    key: str
    """The class's own name for it."""
    value: object
    model_type: str
    """Whose class."""
    absent_part: str = ""
    """The nested config that is left out as a whole, and this with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retyped:
    """A nested config whose own ``model_type`` does not decide its class."""

    path: str
    given: str
    model_type: str
    """What the outer class makes of it."""


class PartLog:
    """One config, nested or not: what it holds, and what was asked of it."""

    def __init__(self, path: str, config: Mapping[str, object], *, is_absent: bool) -> None:
        self.path = path
        self.is_absent = is_absent
        """The file has no such part: what it holds is what the outer class gives it."""
        self.config = config
        """As the file has it."""
        self.model_types: set[str] = set()
        """The types that it was read as; mostly one."""
        self.spellings: dict[str, frozenset[str]] = {}
        """For each key asked for, all names of the same thing, its own among them."""


class ReadLog:
    """Everything that was asked of one model's config."""

    def __init__(self) -> None:
        self.parts: dict[str, PartLog] = {}
        """By path."""
        self.defaults: dict[tuple[str, str, str], DefaultRead] = {}
        """By path, absent part and key."""
        self.retyped: list[Retyped] = []
        self.overruled: dict[str, str] = {}
        """By a class's own name for a key, the common one, which says something else and decides; with their paths."""

    def part(
        self, path: str, config: Mapping[str, object], model_type: str, absent_part: str
    ) -> PartLog:
        """The log of the part at a path, begun where there is none yet."""
        place = f"{path}{absent_part}"
        part = self.parts.get(place)
        if part is None:
            part = PartLog(path, config, is_absent=bool(absent_part))
            self.parts[place] = part
        part.model_types.add(model_type)
        return part

    def add_default(self, read: DefaultRead) -> None:
        """Note a size that is not the file's."""
        self.defaults[read.path, read.absent_part, read.key] = read
