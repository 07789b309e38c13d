"""What follows from the fields of a training setup: defaults filled in, and how ranks are grouped."""

from functools import lru_cache
from typing import TYPE_CHECKING

from memplan.fast_dataclass import replace
from memplan.training.choices import ZeroStage
from memplan.training.choices_of_kernels.kernels import (
    FITTING_TILES,
    KERNEL_PRESETS,
    WHOLE,
    Kernels,
)
from memplan.training.coercion import coerce_enum
from memplan.training.jobs import PLAIN
from memplan.training.precision import PRECISIONS, Engine, Precision, engine_precision
from memplan.training.setup_fields import SetupFields
from memplan.training.splitting.context_parallel import (
    ContextParallel,
    ContextParallelKind,
    RotateMethod,
)
from memplan.training.splitting.expert_parallel import USUAL_IMBALANCE, ExpertParallel
from memplan.training.splitting.parallelism import (
    PipelineParallel,
    PipelineRuntime,
    PipelineSchedule,
    TensorParallel,
    TensorParallelKind,
)

if TYPE_CHECKING:
    from memplan.training.quantization import Quantization

GPUS_PER_NODE = 8
"""GPUs of a node where the number of nodes is not given: every HGX board since 2017."""
ROTATION = "context_parallel_rotate_method"
LEAVES_MIXERS = "tensor_parallel_leaves_mixers"
IN_CLASSES = "context_parallel_in_classes"
"""The engine's option that says how keys and values of a ring get about."""

_KINDS_OF_SPLIT = {
    Engine.DEEPSPEED: TensorParallelKind.AUTOTP,
    Engine.MEGATRON: TensorParallelKind.MEGATRON,
}

_RUNTIMES = {
    Engine.DEEPSPEED: PipelineRuntime.DEEPSPEED,
    Engine.MEGATRON: PipelineRuntime.MEGATRON,
}
"""Engines that run pipelines with code of their own; the others' is torch's."""


class DerivedSetup(SetupFields):
    """A setup's fields, and what follows from them."""

    __slots__ = ()

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one machine."""
        return self.num_gpus // self.nodes

    @property
    def nodes(self) -> int:
        """Machines, the default filled in."""
        if self.num_nodes is not None:
            return self.num_nodes
        return -(-self.num_gpus // GPUS_PER_NODE)

    @property
    def chosen_engine(self) -> Engine:
        """The engine, the default filled in."""
        if self.engine is not None:
            return self.engine
        split = self.tensor_parallel * self.pipeline_parallel
        return usual_engine(self.num_gpus, split, self.context_parallel * self.expert_parallel)

    @property
    def chosen_precision(self) -> Precision:
        """The precision, the engine's default filled in."""
        return engine_precision(
            self.precision, self.chosen_engine, is_frozen=self.adapter is not None
        )

    @property
    def chosen_kernels(self) -> Kernels:
        """The kernels, with what overrides them."""
        preset = self.kernels
        base = preset if isinstance(preset, Kernels) else KERNEL_PRESETS[preset]
        chosen = (self.attention, self.norm, self.mlp, self.rotary, self.scan, self.loss)
        tiles = (self.mlp_tiles, self.loss_tiles)
        if chosen == (None,) * len(chosen) and tiles == (WHOLE, FITTING_TILES):
            return base
        return replace(
            base,
            attention=self.attention or base.attention,
            norm=self.norm or base.norm,
            feed_forward=self.mlp or base.feed_forward,
            rotary=self.rotary or base.rotary,
            scan=self.scan or base.scan,
            loss=self.loss or base.loss,
            mlp_tiles=base.mlp_tiles if self.mlp_tiles == WHOLE else self.mlp_tiles,
            loss_tiles=self.loss_tiles or base.loss_tiles,
        )

    @property
    def chosen_quantization(self) -> "Quantization | None":
        """How the base is quantized, with what ``engine_options`` say of it and its formats filled in."""
        if self.quantize is None or isinstance(self.quantize, str):
            return None
        from memplan.training.quantize_setting import filled_in  # only where something is quantized

        formats = PRECISIONS[self.chosen_precision]
        return filled_in(
            self.quantize,
            dict(self.engine_options),
            half=formats.autocast or formats.compute,
            sharded_by=self._sharded_by,
            cast_by="" if self.chosen_engine is Engine.DDP else self.chosen_engine.value,
        )

    @property
    def _sharded_by(self) -> str:
        """What keeps a part of the parameters alone on each rank; empty where nothing does."""
        engine = self.chosen_engine
        if engine is Engine.DEEPSPEED:
            return "ZeRO-3" if self.zero_stage is ZeroStage.PARAMETERS else ""
        return engine.value if engine in (Engine.FSDP, Engine.FSDP1) else ""

    @property
    def has_company(self) -> bool:
        """Whether anything is laid out beside the steps of the model that is trained."""
        return self.job != PLAIN or self.ema is not None or self.evaluation is not None

    @property
    def is_split(self) -> bool:
        """Whether anything is said of a model that is split over tensor-parallel ranks."""
        return self.tensor_parallel > 1 or self.sequence_parallel or self.loss_parallel

    @property
    def split_over(self) -> TensorParallel | None:
        """How each layer is split over ranks; None: it is not."""
        if self.tensor_parallel == 1:
            return None
        return TensorParallel(
            degree=self.tensor_parallel,
            sequence=self.sequence_parallel,
            loss=self.loss_parallel,
            kind=_KINDS_OF_SPLIT.get(self.chosen_engine, TensorParallelKind.DTENSOR),
            splits_adapters=self.adapter is not None and self.chosen_engine is Engine.FSDP,
            leaves_mixers=dict(self.engine_options).get(LEAVES_MIXERS) is True,
        )

    @property
    def sequences_shared(self) -> ContextParallel | None:
        """How ranks share each sequence; None: they do not."""
        if self.context_parallel == 1:
            return None
        kind = self.context_parallel_kind
        if kind is None:
            whole = self.chosen_engine is Engine.DEEPSPEED
            kind = ContextParallelKind.ALL_TO_ALL if whole else ContextParallelKind.RING
        options = dict(self.engine_options)
        method = options.get(ROTATION)
        sends = self.chosen_engine is Engine.MEGATRON
        usual = RotateMethod.ALLTOALL if sends else RotateMethod.ALLGATHER
        rotation = usual if method is None else _rotate_method(method)
        return ContextParallel(
            degree=self.context_parallel,
            kind=kind,
            rotate_method=rotation,
            in_classes=options.get(IN_CLASSES) is True,
        )

    @property
    def is_pipelined(self) -> bool:
        """Whether anything is said of a model that is spread over stages."""
        said = (self.pipeline_schedule, self.virtual_stages, self.layers_per_stage)
        return self.pipeline_parallel > 1 or said != (None, 1, None)

    @property
    def pipeline(self) -> PipelineParallel | None:
        """How the layers are spread over stages; None: they are not."""
        if self.pipeline_parallel == 1:
            return None
        schedule = self.pipeline_schedule or PipelineSchedule.ONE_F_ONE_B
        return _pipeline(
            degree=self.pipeline_parallel,
            schedule=schedule,
            num_virtual=max(self.virtual_stages, schedule.usual_virtual_stages),
            num_micro_batches=self.gradient_accumulation_steps,
            layers_per_stage=self.layers_per_stage,
            runtime=_RUNTIMES.get(self.chosen_engine, PipelineRuntime.TORCH),
            returns_outputs=dict(self.engine_options).get("return_outputs") is True,
            partition_method=self._partition_method,
        )

    @property
    def _partition_method(self) -> str:
        """How DeepSpeed deals layers to stages; empty under other engines."""
        if self.chosen_engine is not Engine.DEEPSPEED:
            return ""
        from memplan.training.splitting.partition import DEFAULT_METHOD, check_method  # only then

        return check_method(dict(self.engine_options).get("partition_method", DEFAULT_METHOD))

    @property
    def experts_spread(self) -> ExpertParallel | None:
        """How experts are spread over ranks; None: they are not."""
        if self.expert_parallel == 1:
            return None
        imbalance = self.expert_imbalance or USUAL_IMBALANCE
        return ExpertParallel(degree=self.expert_parallel, imbalance=imbalance)

    @property
    def data_parallel(self) -> int:
        """Ranks that each see other sequences."""
        return self.gradient_ranks // self.context_parallel

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are added up, and what is sharded is spread: those that see other
        sequences, and those that share one."""
        return self.num_gpus // (self.tensor_parallel * self.pipeline_parallel)


_pipeline = lru_cache(maxsize=64)(PipelineParallel)
"""A setup is asked for it again and again."""


def usual_engine(num_gpus: int, split: int = 1, sharing: int = 1) -> Engine:
    """The engine where none is named; ``split``: GPUs over which one copy of the model is spread;
    ``sharing``: those that share each sequence, or the experts.

    >>> usual_engine(8).value, usual_engine(8, 8).value, usual_engine(64, 8).value
    ('deepspeed', 'ddp', 'fsdp')
    """
    if num_gpus == split:
        return Engine.DDP
    return Engine.DEEPSPEED if split == sharing == 1 else Engine.FSDP


def _rotate_method(value: object) -> RotateMethod:
    return coerce_enum(f"engine_options: {ROTATION}", value, RotateMethod)
