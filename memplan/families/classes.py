"""Types whose classes are named after other tasks than a text's."""

from memplan.errors import ConfigError
from memplan.families.request import task_named
from memplan.model.config import ConfigReader
from memplan.model.spec import Task

BARE = "Model"
"""The ending of a class that only makes hidden states."""


def chosen_ending(
    reader: ConfigReader, family: str, asked: Task | None, endings: tuple[str, ...]
) -> str:
    """The ending of the class that a task asks for, or ``architectures`` name, or the usual one.

    Raises ``ConfigError`` for a task that the type has no class for.
    """
    if asked is Task.BASE:
        return BARE
    longest_first = sorted(endings, key=len, reverse=True)
    architectures = reader.texts("architectures")
    for architecture in architectures:
        for ending in longest_first:
            own = task_named(architecture, family)
            if architecture.endswith(ending) and asked in {None, Task.OTHER, own}:
                return ending
    for ending in endings:
        if asked is not None and task_named(ending, family) is asked:
            return ending
    if asked in {None, Task.OTHER} and not any("For" in each for each in architectures):
        return endings[0]
    wanted = f"task {asked.value!r}" if asked else ", ".join(architectures)
    msg = (
        f"{reader.source}: {family}: no class is known for {wanted}; "
        f"those known end in {', '.join(endings)}"
    )
    raise ConfigError(msg)
