"""DeepSpeed files that stacks bring along, which configurations name by a path of the stack's own."""

from functools import cache
from pathlib import Path

from memplan.sources.stacks.common.keys import Keys

_FILE = Path(__file__).parent.parent.parent / "data" / "stacks" / "deepspeed_files.yaml"


@cache
def shipped_files() -> dict[str, dict[str, object]]:
    """What memory goes by in each file, by stack and name.

    >>> shipped_files()["axolotl"]["zero2.json"]["zero_optimization"]["stage"]
    2
    """
    from memplan.sources.files import read_mapping

    found: dict[str, dict[str, object]] = read_mapping(_FILE)  # type: ignore[assignment]
    return found


def point_at_shipped(keys: Keys, key: str, stack: str) -> None:
    """Where a key names a file that is not there and that the stack brings along, put what it holds."""
    named = keys.values.get(key)
    if not isinstance(named, str) or not named or (keys.folder / named).exists():
        return
    known = shipped_files()[stack].get(Path(named).name)
    if known is not None:
        keys.values[key] = known
