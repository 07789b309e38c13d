"""What is to be measured, and whether it can be here."""

from collections.abc import Mapping

from memplan.errors import UsageError
from memplan.fast_dataclass import dataclass
from memplan.model.spec import ModelSpec
from memplan.training.setup import TrainingSetup

PACKAGES = ("torch", "transformers")
"""What the extra ``verify`` installs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A model, and how it is trained."""

    config: Mapping[str, object]
    """As a ``config.json`` holds one."""
    name: str
    model: ModelSpec
    """What memplan makes of the config."""
    setup: TrainingSetup
    """With every default filled in."""
    num_steps: int | None
    """Of the optimizer; None: as many as show what is asked where it runs."""


def require_packages() -> None:
    """Raise ``UsageError`` where torch or transformers is not installed."""
    from importlib.util import find_spec

    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        msg = f"verify trains with {' and '.join(missing)}, which {verb} not installed: pip install memplan[verify]"
        raise UsageError(msg)
