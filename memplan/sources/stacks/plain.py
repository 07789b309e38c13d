"""Programs that have no configuration file which says what they train: their presets are all there is."""

from collections.abc import Mapping

from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys

NAME = "a program without files"


def looks_like(_values: Mapping[str, object]) -> bool:
    """It has no files."""
    return False


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """Any of those without files."""
    return "nanogpt"


def read(_keys: Keys, _found: Found, _given: Mapping[str, object]) -> None:
    """There is nothing to read: the presets set fields alone."""
