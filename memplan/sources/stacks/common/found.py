"""What the file of a training stack says, in memplan's words."""

from collections.abc import Mapping
from dataclasses import field
from enum import Enum

from memplan.fast_dataclass import dataclass
from memplan.sources.trainer.launch import Launch, Loading
from memplan.training.choices import ZeroStage
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSetup:
    """A setup read from a stack's own file, or from its defaults alone."""

    setup: TrainingSetup
    model: str | Mapping[str, object] | None = None
    """The model that it names, or its config: what ``load_model`` takes."""
    notes: tuple[str, ...] = ()
    """What the answer should say of it."""
    is_launched: bool = False
    """The files that the job is launched with are in it."""


@dataclass(slots=True)
class Found:
    """What a reader has found so far."""

    fields: dict[str, object] = field(default_factory=dict)
    """Fields of ``TrainingSetup``."""
    options: dict[str, object] = field(default_factory=dict)
    """``engine_options`` among them."""
    quantization: dict[str, object] = field(default_factory=dict)
    """``engine_options`` that a quantized base has."""
    device_map: "DeviceMap" = field(default_factory=lambda: DeviceMap.NEVER)
    """Where transformers loads the model right onto its GPUs."""
    left_out: list[str] = field(default_factory=list)
    quiet: list[str] = field(default_factory=list)
    """Keys that change no memory."""
    notes: list[str] = field(default_factory=list)
    file_model: str | Mapping[str, object] | None = None
    """What the file names, or says the sizes of."""
    given_model: str | None = None
    """A model that was named beside the file, which goes first: what a file leaves to it depends on its layers, experts and type."""
    arguments: dict[str, object] = field(default_factory=dict)
    """transformers' training arguments that the stack makes of its file."""
    launch: Launch = field(default_factory=Launch)
    """The engine's own file, given beside the stack's."""
    loading: Loading = field(default_factory=Loading)
    """What the Trainer is handed beside them."""

    @property
    def model(self) -> str | Mapping[str, object] | None:
        """The model that the file's words are about."""
        return self.given_model or self.file_model

    @model.setter
    def model(self, named: str | Mapping[str, object] | None) -> None:
        self.file_model = named


class DeviceMap(Enum):
    """Where a stack has transformers load a model right onto its GPUs (``from_pretrained(device_map=...)``)."""

    NEVER = "never"
    ALONE = "alone"
    """On one GPU, without an engine."""
    REPLICAS = "replicas"
    """There, and where each GPU is a replica under DDP."""
    WHOLE = "whole"
    """Wherever each GPU keeps all weights: there, and under DeepSpeed up to stage 2."""

    def holds_for(self, setup: TrainingSetup) -> bool:
        """Whether a setup's weights come so."""
        engine, parts = setup.chosen_engine, setup.tensor_parallel * setup.pipeline_parallel
        if self is DeviceMap.NEVER or parts * setup.context_parallel * setup.expert_parallel > 1:
            return False
        if engine is Engine.DEEPSPEED:
            return self is DeviceMap.WHOLE and setup.zero_stage is not ZeroStage.PARAMETERS
        return engine is Engine.DDP and (setup.num_gpus == 1 or self is not DeviceMap.ALONE)


def of_given(given: Mapping[str, object], name: str) -> str | None:
    """The text of a field that was given beside a file.

    >>> of_given({"engine": "fsdp"}, "engine")
    'fsdp'
    """
    value = given.get(name)
    return None if value is None else str(getattr(value, "value", value))


def micro_batches(found: Found, *, batch: int, micro: int, ranks: int, stack: str) -> int:
    """Micro-batches of a step, whose sequences all ranks share; that a stack stops where they share unevenly is named."""
    count, rest = divmod(batch, micro * ranks)
    if rest:
        found.notes.append(
            f"the {batch} sequences of a step are no whole number of micro-batches of {micro} on {ranks} ranks: "
            f"{stack} stops at it"
        )
    return max(1, count)
