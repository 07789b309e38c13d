"""Types that are counted whole and whose classes are named after other tasks than a text's."""

from collections.abc import Callable, Mapping

from memplan.errors import ConfigError
from memplan.families.counted import counted_model
from memplan.families.request import ReadRequest, task_named
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

BARE = "Model"
"""The ending of a class that only makes hidden states."""

DeclareClass = Callable[[ParameterTable, str], None]
"""Declares everything that the class with an ending owns."""


def whole_model(
    reader: ConfigReader,
    request: ReadRequest,
    endings: tuple[str, ...],
    declare: DeclareClass,
    *,
    hidden_size: int,
    context_length: int,
    vocab_size: int = 0,
    tied: bool = False,
) -> ModelSpec:
    """A model of tables: those of the class that is meant, and those of ``AutoModel``'s.

    ``endings`` are those of the classes that the type has, the usual one first; ``context_length``
    counts what the layers see of one sample: patches, or positions.
    """
    ending = chosen_ending(reader, request.model_type, request.task, endings)

    def declare_task(table: ParameterTable, task: Task) -> None:
        declare(table, BARE if task is Task.BASE else ending)

    return counted_model(
        reader, request, declare_task,
        task=_task(ending, request), vocab_size=vocab_size, hidden_size=hidden_size,
        context_length=context_length, tied=tied,
    )  # fmt: skip


def _task(ending: str, request: ReadRequest) -> Task:
    if ending == BARE:
        return Task.BASE
    return task_named(ending, request.model_type) or Task.OTHER


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


def dispatch(
    readers: Mapping[str, Callable[[ConfigReader, ReadRequest], ModelSpec]],
    reader: ConfigReader,
    request: ReadRequest,
) -> ModelSpec:
    """Let the function for the model type read the config."""
    return readers[request.model_type](reader, request)
