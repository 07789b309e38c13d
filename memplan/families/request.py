"""What a family's reader is asked for, and how task and type are found out."""

from collections.abc import Iterable, Mapping

from memplan.dtypes import DType
from memplan.errors import ConfigError
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.spec import Task

_DTYPES = {
    "float32": DType.FP32, "float": DType.FP32, "float16": DType.FP16, "half": DType.FP16,
    "bfloat16": DType.BF16,
}  # fmt: skip

DIFFUSERS_CLASS = "_class_name"
"""The key under which a diffusers config names its class."""

_OWN_PRETRAINING = frozenset(
    {"electra", "big_bird", "fnet", "flava", "funnel", "lxmert", "visual_bert"}
)
"""Types whose ``ForPreTraining`` is no masked LM."""

_TASK_SUFFIXES: tuple[tuple[str, Task], ...] = (
    ("ForSequenceClassification", Task.SEQUENCE_CLASSIFICATION),
    ("ForTokenClassification", Task.TOKEN_CLASSIFICATION),
    ("ForQuestionAnswering", Task.QUESTION_ANSWERING),
    ("ForMultipleChoice", Task.MULTIPLE_CHOICE),
    ("ForMaskedLM", Task.MASKED_LM),
    ("ForPreTraining", Task.MASKED_LM),
    ("WithLMHeadModel", Task.CAUSAL_LM),
    ("LMHeadModel", Task.CAUSAL_LM),
    ("ForCausalLM", Task.CAUSAL_LM),
    ("ForConditionalGeneration", Task.SEQ2SEQ_LM),
    ("ForSpeechToText", Task.SEQ2SEQ_LM),
    ("ForTextToText", Task.SEQ2SEQ_LM),
    ("ForTextToSpeech", Task.OTHER),
    ("ForSpeechToSpeech", Task.OTHER),
    ("ForVisualReasoning", Task.OTHER),
)
"""What an architecture's name says. A bare ``...Model`` has no loss to train with, so it says
nothing, and the family's usual task is meant; ``base`` has to be asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest:
    """What is wanted beside the config itself."""

    name: str
    model_type: str
    task: Task | None
    """As asked for, or as ``architectures`` says; None where neither does."""
    num_labels: int | None
    all_defaults: Mapping[str, Mapping[str, object]]
    """Class defaults of every type, for families that nest another's config."""

    def task_or(self, default: Task) -> Task:
        """The task, or the family's usual one."""
        return self.task or default

    def labels(self, reader: ConfigReader) -> int:
        """Classes of a classification head: asked for, in the config, or transformers' 2."""
        if self.num_labels is not None:
            return self.num_labels
        named = reader.config.get("id2label")
        if isinstance(named, Mapping) and named:
            return len(named)
        return reader.integer("num_labels", default=2)


def deduce_model_type(
    config: Mapping[str, object], *, source: str, known: Iterable[str] = ()
) -> str:
    """The config's ``model_type``, or which of the ``known`` ones its ``architectures`` imply.

    Raises ``ConfigError`` where neither is there.

    >>> deduce_model_type({"architectures": ["T5Model"]}, source="a file", known=["t5"])
    't5'
    """
    model_type = config.get("model_type", config.get(DIFFUSERS_CLASS))
    if isinstance(model_type, str) and model_type:
        return model_type
    if model_type is not None:
        problem = "is empty" if model_type == "" else f"expected a name, got {model_type!r:.60}"
        msg = f"{source}: model_type: {problem}; write one such as llama, or give `family`"
        raise ConfigError(msg)
    plain = {each.replace("-", "").replace("_", ""): each for each in known}
    architectures = config.get("architectures")
    for architecture in architectures if isinstance(architectures, list) else ():
        for ending in ("For", "LMHead", "WithLMHead", "Model"):
            stem = str(architecture).partition(ending)[0].lower().replace("_", "")
            found = plain.get(stem)
            if found is not None:
                return found
    msg = (
        f"{source}: model_type: is missing, so the kind of model is unknown; "
        "add it to the file or name it with `family`"
    )
    raise ConfigError(msg)


def resolve_task(reader: ConfigReader, model_type: str, task: Task | None) -> Task | None:
    """The task asked for, or the one the config's first architecture names."""
    if task is not None:
        return task
    named = (task_named(each, model_type) for each in reader.texts("architectures"))
    return next((found for found in named if found is not None), None)


def task_named(architecture: str, model_type: str) -> Task | None:
    """The task that a class is named after; None for a bare model and for other tasks."""
    if architecture.endswith("ForPreTraining") and model_type in _OWN_PRETRAINING:
        return Task.PRETRAINING
    for suffix, found in _TASK_SUFFIXES:
        if architecture.endswith(suffix):
            return found
    return None


def checkpoint_dtype(reader: ConfigReader) -> DType:
    """What the config says its published weights are held in."""
    value = reader.raw("dtype", "torch_dtype")
    if isinstance(value, str):
        return _DTYPES.get(value.removeprefix("torch."), DType.FP32)
    return DType.FP32


def reject_task(reader: ConfigReader, request: ReadRequest, *supported: Task) -> Task:
    """The request's task (the first of ``supported`` by default), if the family has it."""
    task = request.task_or(supported[0])
    if task not in supported:
        known = ", ".join(each.value for each in supported)
        msg = (
            f"{reader.source}: {request.model_type} has no task {task.value!r}; "
            f"choose one with `task`: {known}"
        )
        raise ConfigError(msg)
    return task
