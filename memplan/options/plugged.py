"""An engine that a plug-in names: options that it stands for, filled in where none was given."""

from collections.abc import Callable, Mapping

from memplan.fast_dataclass import replace
from memplan.options.asked import Asked
from memplan.training.precision import Engine

_KNOWN = frozenset(each.value for each in Engine)


def with_engine_plugin(asked: Asked, read: Callable[[Mapping[str, object]], Asked]) -> Asked:
    """The question with what a plug-in's engine stands for; itself where its engine is memplan's own.

    ``read`` takes its options as keywords.

    Raises ``UsageError`` for options of the plug-in that there are not.
    """
    name = asked.values.get("engine")
    if not isinstance(name, str) or name in _KNOWN or "," in name:
        return asked
    from memplan.sources.plugins import plugged

    options = plugged("engines", name)
    if options is None:
        return asked
    told = read(options)
    filled = {
        key: told.values[key]
        for key in told.given
        if key in asked.values and (key == "engine" or key not in asked.given)
    }
    return replace(asked, values={**asked.values, **filled}, given=asked.given | filled.keys())
