"""A training setup: everything beside the model and the GPU that decides how much memory is held."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, TypeVar

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.text import shown
from memplan.training.activation_offload import OFFLOAD_RULES, ActivationOffload
from memplan.training.compilation import Compilation
from memplan.training.context_parallel import ContextParallel, ContextParallelKind, RotateMethod
from memplan.training.expert_parallel import ExpertParallel
from memplan.training.fp8 import Fp8Recipe
from memplan.training.freezing import FrozenParts
from memplan.training.jobs import PLAIN, Job
from memplan.training.kernels import (
    KERNEL_PRESETS,
    AttentionKernel,
    FeedForwardKernel,
    KernelPreset,
    Kernels,
    LossKernel,
    NormKernel,
    Packing,
    RotaryKernel,
    SelectivePolicy,
)
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.optimizers import Optimizer
from memplan.training.parallelism import (
    PipelineParallel,
    PipelineRuntime,
    PipelineSchedule,
    TensorParallel,
    TensorParallelKind,
)
from memplan.training.precision import (
    PRECISIONS,
    Engine,
    Precision,
    engine_precision,
    engines_with,
)

if TYPE_CHECKING:
    from memplan.training.adapters import Adapter
    from memplan.training.averaging import Ema
    from memplan.training.lengths import Lengths
    from memplan.training.quantization import Quantization

GPUS_PER_NODE = 8
"""GPUs of a node where the number of nodes is not given: every HGX board since 2017."""
MAX_GPUS = 1_000_000
MAX_TOKENS = 2**31
MAX_IMBALANCE = 1024
QUANTIZATION_OPTIONS = (
    "double_quant", "prepare_for_kbit", "compute_dtype", "quant_storage", "quant_block_size",
    "quant_bits", "skip_modules", "quant_keeps_inputs",
)  # fmt: skip
"""Names under ``engine_options`` that say how the base is quantized, whatever the engine."""
PIPELINE_OPTIONS = ("return_outputs",)
"""Names under ``engine_options`` that are of torch's pipelines, whatever engine is beside them."""
DEFAULT_SEQ_LEN_CAP = 2048
"""Without ``seq_len`` the model's context length is taken, but no more than this [tokens]."""


class ZeroStage(IntEnum):
    """What DeepSpeed shards over the data-parallel ranks."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class FsdpStrategy(Enum):
    """What FSDP shards."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    HYBRID = "hybrid"
    NO_SHARD = "no_shard"


class Offload(Enum):
    """Where optimizer states or parameters are kept."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class AllocatorKind(Enum):
    """How torch's caching allocator has memory (``PYTORCH_CUDA_ALLOC_CONF``)."""

    DEFAULT = "default"
    """In segments, which are stranded where no block fits them any more."""
    EXPANDABLE = "expandable"
    """``expandable_segments:True``: in pages, mapped where they are needed."""


class Recomputation(Enum):
    """Which activations are dropped in forward and computed again in backward."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


Checkpointing = Recomputation | float | CheckpointedLayers
"""Which layers are checkpointed, and how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """How a model is trained.

    Enums accept their string values. ``None`` means the engine's or the model's default, which
    ``resolve`` fills in. Raises ``SetupError`` for settings that cannot be or contradict each other.

    >>> setup = TrainingSetup(num_gpus=8, engine="deepspeed", zero_stage=2, micro_batch_size=4)
    >>> setup.zero_stage, setup.resolve().precision.value
    (<ZeroStage.GRADIENTS: 2>, 'bf16-master')
    """

    num_gpus: int = 1
    """All GPUs of the job."""
    num_nodes: int | None = None
    """Machines; divides ``num_gpus``. None: one for every 8 GPUs."""
    engine: Engine | None = None
    """None: ddp on one GPU and where one model is spread over all of them, fsdp where tensor or pipeline
    parallelism leaves ranks of data, else deepspeed."""
    zero_stage: ZeroStage | None = None
    """DeepSpeed's stage. None: 2."""
    fsdp_strategy: FsdpStrategy | None = None
    """None: full_shard."""
    micro_batch_size: int = 1
    """Sequences of one forward pass on one data-parallel rank."""
    gradient_accumulation_steps: int = 1
    """Forward and backward passes for each optimizer step."""
    seq_len: int | None = None
    """Tokens of a sequence. None: the model's context length, at most 2048."""
    target_seq_len: int | None = None
    """Tokens of a target sequence in an encoder-decoder. None: as ``seq_len``."""
    precision: Precision | None = None
    """None: the engine's usual one, in fp16 on a card without bf16; ``fp16``: the engine's form."""
    fp8: Fp8Recipe = Fp8Recipe.NONE
    """What linear layers multiply in, where it is less than 16 bits."""
    optimizer: Optimizer = Optimizer.ADAMW_FUSED
    """Also by the names that transformers' ``TrainingArguments`` has for it."""
    optimizer_options: Mapping[str, object] | tuple[tuple[str, object], ...] = ()
    """The optimizer's own settings, as far as they move memory: ``rank``, ``momentum``, ``block_size``."""
    optimizer_in_backward: bool = False
    """Each gradient is stepped and let go as soon as it is there."""
    checkpointing: Checkpointing = Recomputation.NONE
    """A ``Recomputation``, or the layers that are recomputed in full: a share of them up to 1, a number
    of the first ones from 2 on, or their numbers (``0-7,12``)."""
    kernels: KernelPreset | Kernels = KernelPreset.HF
    """A code base's kernels, or a choice of one's own."""
    attention: AttentionKernel | None = None
    """Overrides the kernels' attention."""
    norm: NormKernel | None = None
    """Overrides the kernels' norm."""
    mlp: FeedForwardKernel | None = None
    """Overrides the kernels' feed-forward network."""
    rotary: RotaryKernel | None = None
    """Overrides the kernels' rotary embeddings."""
    loss: LossKernel | None = None
    """Overrides the kernels' loss."""
    packing: Packing = Packing.NONE
    """How the sequences of a micro-batch lie in its rows."""
    dropout: float | None = None
    """Every dropout probability; None: the config's own, in train mode."""
    tensor_parallel: int = 1
    """GPUs over which heads, feed-forward networks and the vocabulary are split: by Megatron under its
    engine, else by DTensor."""
    sequence_parallel: bool = False
    """Between the split blocks each of them has a share of every sequence."""
    loss_parallel: bool = False
    """The logits stay split over the vocabulary, and the loss is computed so."""
    pipeline_parallel: int = 1
    """GPUs over which the layers are spread, in stages; the micro-batches of a step are
    ``gradient_accumulation_steps``."""
    pipeline_schedule: PipelineSchedule | None = None
    """None: 1f1b, where there is a pipeline."""
    virtual_stages: int = 1
    """Stages of each of these GPUs; where the schedule is one of several, 1 stands for 2."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage, the first one's first. None: as many in each, or, where they do not divide,
    torchtitan's rule, by which embedding and head count as a layer each."""
    context_parallel: int = 1
    """GPUs that share each sequence: every tensor of tokens is cut by it."""
    context_parallel_kind: ContextParallelKind | None = None
    """How attention sees the others' tokens. None: all-to-all under deepspeed, else ring."""
    expert_parallel: int = 1
    """GPUs of which each has other experts of every mixture; they are among those of the data."""
    expert_imbalance: float = 1.0
    """Tokens that the experts of the fullest GPU are given, over an even share: an assumption, since
    routers decide it."""
    offload_optimizer: Offload = Offload.NONE
    offload_param: Offload = Offload.NONE
    offload_activations: ActivationOffload = ActivationOffload.NONE
    """What is kept for the backward pass and goes to CPU RAM in between, and how."""
    offload_activations_ratio: float = 1.0
    """Which share of a pass's activations goes, where they go in chunks."""
    freeze: FrozenParts = FrozenParts()
    """Parameters that are not trained."""
    adapter: "Adapter | None" = None
    """What is trained in place of the model's own weights, which are frozen."""
    job: Job = PLAIN
    """What is trained for, and which other models take part: ``dpo``, ``grpo:rollout=vllm``, …"""
    ema: "Ema | None" = None
    """An exponential average of the weights beside them: ``weights``, ``fp32``, ``bf16@cpu``."""
    lengths: "Lengths | None" = None
    """Sequences of unequal lengths: the figures are those of the worst batch. ``seq_len`` is then what
    longer ones are cut to, or the length of a packed row."""
    quantize: "Quantization | str | None" = None
    """How the frozen base is quantized: ``nf4``, ``fp4``, ``int8``, ``gptq``, ``awq``, or a
    ``Quantization``; ``none``: not at all. None: as the model's own config says."""
    outputs_held: bool = False
    """The training loop keeps the model's outputs (the logits) until after backward."""
    upcast_outputs: bool = False
    """accelerate's mixed precision copies the outputs to fp32 (HF Trainer with ``bf16=True``)."""
    compile: Compilation = Compilation.NONE
    """What torch.compile is given: nothing, each layer, or the whole model with its loss."""
    allocator: AllocatorKind = AllocatorKind.DEFAULT
    left_out: tuple[str, ...] | str = ()
    """What the job holds beside what is counted, such as a reference model, in words: the figures
    are lower bounds then, and no verdict says fits."""
    engine_options: Mapping[str, object] | tuple[tuple[str, object], ...] = ()
    """The engine's own settings by their own names."""
    kernel_scratch: bool = True
    """Count cuBLAS workspaces and scratch inside kernels, and CUDA's fused backward kernels; False
    compares with records of fake tensors, which have neither."""

    def __post_init__(self) -> None:
        _spell_optimizer(self)
        for name, kind in _ENUM_FIELDS.items():
            object.__setattr__(self, name, _coerce(name, getattr(self, name), kind))
        object.__setattr__(self, "checkpointing", _checkpointing(self.checkpointing))
        object.__setattr__(self, "kernels", _kernels(self.kernels))
        if self.freeze is None:
            object.__setattr__(self, "freeze", FrozenParts())
        if isinstance(self.freeze, str):
            object.__setattr__(self, "freeze", FrozenParts.parse(self.freeze))
        elif not isinstance(self.freeze, FrozenParts):
            msg = f"freeze: expected parts such as embeddings,layers.0-7, got {shown(self.freeze)}"
            raise SetupError(msg)
        if self.adapter is not None:
            from memplan.training.adapters import read_adapter  # only for adapters

            object.__setattr__(self, "adapter", read_adapter(self.adapter))
        if self.job != PLAIN:
            object.__setattr__(self, "job", _job(self.job))
        if self.ema is not None:
            from memplan.training.averaging import Ema  # only where weights are averaged

            object.__setattr__(self, "ema", Ema.read(self.ema))
        if self.lengths is not None:
            from memplan.training.lengths import Lengths  # only where they are unequal

            object.__setattr__(self, "lengths", Lengths.read(self.lengths))
        if self.quantize is not None:
            object.__setattr__(self, "quantize", _quantization(self.quantize))
        if self.engine_options:
            object.__setattr__(self, "engine_options", _options(self.engine_options))
        elif self.engine_options != ():
            object.__setattr__(self, "engine_options", ())
        if self.layers_per_stage is not None:
            from memplan.training.stages import read_layers_per_stage  # only for pipelines

            counts = read_layers_per_stage(self.layers_per_stage)
            object.__setattr__(self, "layers_per_stage", counts)
        object.__setattr__(self, "left_out", _words(self.left_out))
        if self.optimizer_options:
            options = _options(self.optimizer_options, "optimizer_options")
            object.__setattr__(self, "optimizer_options", options)
        elif self.optimizer_options != ():
            object.__setattr__(self, "optimizer_options", ())
        _check_sizes(self)
        _check_engine(self)
        if (
            self.optimizer not in PLAIN_OPTIMIZERS
            or self.optimizer_options
            or self.optimizer_in_backward
        ):
            from memplan.training.optimizers.engines import check_optimizer

            check_optimizer(self)
        if self.quantize is not None:
            _ = self.chosen_quantization

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
        chosen = (self.attention, self.norm, self.mlp, self.rotary, self.loss)
        if chosen == (None,) * len(chosen):
            return base
        return replace(
            base,
            attention=self.attention or base.attention,
            norm=self.norm or base.norm,
            feed_forward=self.mlp or base.feed_forward,
            rotary=self.rotary or base.rotary,
            loss=self.loss or base.loss,
        )

    @property
    def chosen_quantization(self) -> "Quantization | None":
        """How the base is quantized, with what ``engine_options`` say of it and its formats filled in."""
        if self.quantize is None or isinstance(self.quantize, str):
            return None
        from memplan.training.quantization import filled_in  # only where something is quantized

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
        method = dict(self.engine_options).get(ROTATION)
        sends = self.chosen_engine is Engine.MEGATRON
        usual = RotateMethod.ALLTOALL if sends else RotateMethod.ALLGATHER
        rotation = usual if method is None else _rotate_method(method)
        return ContextParallel(degree=self.context_parallel, kind=kind, rotate_method=rotation)

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
        return PipelineParallel(
            degree=self.pipeline_parallel,
            schedule=schedule,
            num_virtual=max(self.virtual_stages, schedule.usual_virtual_stages),
            num_micro_batches=self.gradient_accumulation_steps,
            layers_per_stage=self.layers_per_stage,
            runtime=_RUNTIMES.get(self.chosen_engine, PipelineRuntime.TORCH),
            returns_outputs=dict(self.engine_options).get("return_outputs") is True,
        )

    @property
    def experts_spread(self) -> ExpertParallel | None:
        """How experts are spread over ranks; None: they are not."""
        if self.expert_parallel == 1:
            return None
        return ExpertParallel(degree=self.expert_parallel, imbalance=self.expert_imbalance)

    @property
    def data_parallel(self) -> int:
        """Ranks that each see other sequences."""
        return self.gradient_ranks // self.context_parallel

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are added up, and what is sharded is spread: those that see other
        sequences, and those that share one."""
        return self.num_gpus // (self.tensor_parallel * self.pipeline_parallel)

    def resolve(
        self,
        context_length: int | None = None,
        *,
        has_bf16: bool = True,
        family: str | None = None,
    ) -> "TrainingSetup":
        """Fill in every default; ``context_length`` is the model's [tokens].

        ``has_bf16``: the card multiplies bf16; on one that does not the default is fp16, but with fp8,
        whose cards all do.
        ``family``: the model's type, by which Liger has kernels for some operations or none.
        """
        engine = self.chosen_engine
        has_bf16 = has_bf16 or self.fp8 is not Fp8Recipe.NONE
        seq_len = self.seq_len
        if self.lengths is not None:
            seq_len = self._worst_length(seq_len)
        if seq_len is None and context_length is not None:
            seq_len = min(context_length, DEFAULT_SEQ_LEN_CAP)
        return replace(
            self,
            num_nodes=self.nodes,
            engine=engine,
            zero_stage=self._default_stage(engine),
            fsdp_strategy=self._default_strategy(engine),
            precision=engine_precision(
                self.precision, engine, has_bf16=has_bf16, is_frozen=self.adapter is not None
            ),
            seq_len=seq_len,
            target_seq_len=self.target_seq_len or seq_len,
            **self._pipeline_choices(),  # type: ignore[arg-type]
            **self._liger_choices(family),  # type: ignore[arg-type]
        )

    def _pipeline_choices(self) -> dict[str, object]:
        """The schedule's defaults, where there is one."""
        pipeline = self.pipeline
        if pipeline is None:
            return {}
        return {"pipeline_schedule": pipeline.schedule, "virtual_stages": pipeline.num_virtual}

    def _liger_choices(self, family: str | None) -> dict[str, Enum]:
        """What Liger leaves as the model's class has it, as overrides of the preset."""
        if family is None or self.kernels is not KernelPreset.LIGER:
            return {}
        from memplan.training.liger import liger_overrides  # only where Liger is asked for

        choices = liger_overrides(family)
        return {name: each for name, each in choices.items() if getattr(self, name) is None}

    def _worst_length(self, seq_len: int | None) -> int | None:
        """Of a batch of unequal lengths; a packed row is full whatever they are."""
        from memplan.training.lengths import Batching  # only where they are unequal

        assert self.lengths is not None
        if self.lengths.batching is Batching.PACKED:
            return seq_len
        longest = self.lengths.longest
        return self.lengths.padded(longest if seq_len is None else min(longest, seq_len))

    def _default_stage(self, engine: Engine) -> ZeroStage | None:
        if engine is Engine.DEEPSPEED and self.zero_stage is None:
            return ZeroStage.GRADIENTS
        return self.zero_stage

    def _default_strategy(self, engine: Engine) -> FsdpStrategy | None:
        if engine in (Engine.FSDP, Engine.FSDP1) and self.fsdp_strategy is None:
            return FsdpStrategy.FULL_SHARD
        return self.fsdp_strategy


_RUNTIMES = {
    Engine.DEEPSPEED: PipelineRuntime.DEEPSPEED,
    Engine.MEGATRON: PipelineRuntime.MEGATRON,
}
"""Engines that run pipelines with code of their own; the others' is torch's."""


def _job(value: object) -> Job:
    """A job; of one that is null, the model's own task."""
    return PLAIN if value is None else Job.read(value)


ROTATION = "context_parallel_rotate_method"
"""The engine's option that says how keys and values of a ring get about."""


def _rotate_method(value: object) -> RotateMethod:
    return coerce_enum(f"engine_options: {ROTATION}", value, RotateMethod)


def usual_engine(num_gpus: int, split: int = 1, sharing: int = 1) -> Engine:
    """The engine where none is named; ``split``: GPUs over which one copy of the model is spread;
    ``sharing``: those that share each sequence, or the experts.

    >>> usual_engine(8).value, usual_engine(8, 8).value, usual_engine(64, 8).value
    ('deepspeed', 'ddp', 'fsdp')
    """
    if num_gpus == split:
        return Engine.DDP
    return Engine.DEEPSPEED if split == sharing == 1 else Engine.FSDP


_KINDS_OF_SPLIT = {
    Engine.DEEPSPEED: TensorParallelKind.AUTOTP,
    Engine.MEGATRON: TensorParallelKind.MEGATRON,
}
PLAIN_OPTIMIZERS = (
    Optimizer.ADAMW_FUSED,
    Optimizer.ADAMW_FOREACH,
    Optimizer.SGD,
    Optimizer.SGD_MOMENTUM,
)
"""Optimizers that run under every engine, as long as nothing else is said of them."""


def _spell_optimizer(setup: TrainingSetup) -> None:
    """A name of transformers' may say more than which optimizer it is."""
    name = setup.optimizer
    if not isinstance(name, str) or name in _OPTIMIZER_NAMES:
        return
    from memplan.training.optimizers.spellings import UNMODELLED, spelled

    refused = UNMODELLED.get(name.lower().replace("-", "_"))
    if refused is not None:
        msg = f"optimizer: {name}: {refused}"
        raise SetupError(msg)
    found = spelled(name)
    if found is None:
        return
    object.__setattr__(setup, "optimizer", found.optimizer)
    if found.in_backward:
        object.__setattr__(setup, "optimizer_in_backward", True)
    if found.options:
        given = setup.optimizer_options
        pairs = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(setup, "optimizer_options", {**dict(found.options), **dict(pairs)})


_OPTIMIZER_NAMES = frozenset(each.value for each in Optimizer)


def _quantization(value: object) -> "Quantization | str | None":
    from memplan.training.quantization import read_quantization  # only where something is quantized

    return read_quantization(value)


def _words(value: object) -> tuple[str, ...]:
    """``left_out``, of which one may be given as it is."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, tuple) or not all(isinstance(each, str) and each for each in texts):
        msg = f"left_out: expected what is not counted, in words, got {shown(value)}"
        raise SetupError(msg)
    return texts


_ENUM_FIELDS: dict[str, type[Enum]] = {
    "engine": Engine, "zero_stage": ZeroStage, "fsdp_strategy": FsdpStrategy,
    "precision": Precision, "fp8": Fp8Recipe, "optimizer": Optimizer, "attention": AttentionKernel,
    "norm": NormKernel, "mlp": FeedForwardKernel, "rotary": RotaryKernel, "loss": LossKernel,
    "packing": Packing,
    "offload_optimizer": Offload, "offload_param": Offload, "offload_activations": ActivationOffload,
    "pipeline_schedule": PipelineSchedule, "context_parallel_kind": ContextParallelKind, "allocator": AllocatorKind, "compile": Compilation,
}  # fmt: skip

_ALWAYS_NAMED = (ActivationOffload, Optimizer, AllocatorKind, Compilation, Fp8Recipe, Packing)
"""What no engine or model fills in where it is null."""

SETUP_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(TrainingSetup))
"""Names of all fields, in order."""

_Kind = TypeVar("_Kind", bound=Enum)


def coerce_enum(name: str, value: object, kind: type[_Kind]) -> _Kind:
    """The member with this value, or a ``SetupError`` that names those there are.

    >>> coerce_enum("engine", "fsdp", Engine).name
    'FSDP'
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, bool):
        try:
            return kind(value)
        except (ValueError, TypeError):  # the latter for what cannot be compared
            pass
    known = [str(member.value) for member in kind]
    meant = _MEANT.get(kind, {}).get(str(value).lower().replace("-", "_"))
    hint = f" Did you mean {meant}?" if meant else did_you_mean(str(value), known)
    listed = ", ".join(known)
    if len(known) > MOST_LISTED:
        listed = f"{len(known)} that there are ({', '.join(known[:MOST_LISTED])}, ...)"
    msg = f"{name}: {shown(value)} is not one of {listed}.{hint}"
    raise SetupError(msg)


MOST_LISTED = 12
"""Of the values that a message lists; docs/optimizers.md has the longer list."""

_MEANT: Mapping[type[Enum], Mapping[str, str]] = {
    Recomputation: {
        **dict.fromkeys(("true", "yes", "on", "gradient", "activation"), "'full'"),
        **dict.fromkeys(("false", "no", "off"), "'none'"),
    },
    Optimizer: {
        **dict.fromkeys(("adam", "adamw", "adamw_torch_fused", "fused"), "'adamw-fused'"),
        **dict.fromkeys(("adamw_torch", "foreach"), "'adamw-foreach'"),
    },
    Compilation: {
        **dict.fromkeys(("true", "yes", "on", "inductor", "whole", "full"), "'model'"),
        **dict.fromkeys(("layers", "block", "blocks", "regional"), "'layer'"),
        **dict.fromkeys(("false", "no", "off"), "'none'"),
    },
    AttentionKernel: {
        **dict.fromkeys(("flash_attention_2", "flash_attn", "flash2", "fa2"), "'flash'"),
        **dict.fromkeys(("flash_attention_3", "fa3"), "'flash3'"),
        "flex_attention": "'sdpa', the nearest that is modelled",
    },
    LossKernel: {
        **dict.fromkeys(("cce", "cut_cross_entropy", "cut_ce"), "'cut'"),
        **dict.fromkeys(("fused_linear_cross_entropy", "flce", "lce"),
                        "'fused_linear'"),
        **dict.fromkeys(("liger_cross_entropy", "cross_entropy"), "'liger'"),
        **dict.fromkeys(("fused_crossentropy", "flash", "inplace_backward", "in_place"),
                        "'flash_attn'"),
        **dict.fromkeys(("torchtitan", "chunkedceloss", "chunked_ce"), "'chunked'"),
        **dict.fromkeys(("cewithchunkedoutputloss", "chunked_output"), "'torchtune'"),
        **dict.fromkeys(("fast_ce", "fast_cross_entropy"), "'foak' or 'unsloth'"),
        "megatron": "'fused'",
    },
    NormKernel: {"unsloth": "'liger', which does the same"},
    FeedForwardKernel: dict.fromkeys(("liger", "swiglu", "geglu"), "'fused'"),
    Packing: {
        **dict.fromkeys(("true", "bfd", "bfd_split", "flatten", "flat", "flattening"),
                        "'padding_free'"),
        **dict.fromkeys(("false", "no", "off", "wrapped"), "'none'"),
        **dict.fromkeys(("packed", "sample_packing", "block_mask"), "'documents'"),
    },
    Offload: dict.fromkeys(("true", "yes", "on"), "'cpu'"),
    ActivationOffload: {
        **dict.fromkeys(("true", "yes", "on", "trl"), "'streamed'"),
        **dict.fromkeys(("cpu", "save_on_cpu"), "'save-on-cpu'"),
        **dict.fromkeys(("unsloth", "offload", "cpu_checkpointing"), "'checkpoints'"),
        **dict.fromkeys(("false", "no", "off"), "'none'"),
    },
    ContextParallelKind: {
        **dict.fromkeys(("ulysses", "alst", "alltoall", "all_to_all", "deepspeed"), "'all-to-all'"),
        **dict.fromkeys(("allgather", "torch", "ring_attention", "zigzag"), "'ring'"),
    },
    Engine: {
        **dict.fromkeys(("zero", "zero1", "zero2", "zero3", "zero_1", "zero_2", "zero_3"),
                        "'deepspeed', with the stage beside it"),
        "accelerate": "'fsdp' or 'deepspeed', which it starts",
        "trainer": "'ddp', 'fsdp' or 'deepspeed', which it starts",
    },
    Fp8Recipe: {
        **dict.fromkeys(
            ("true", "yes", "on", "fp8", "torchao", "ao", "tensorwise"), "'torchao-tensorwise'"
        ),
        "rowwise": "'torchao-rowwise'", "rowwise_with_gw_hp": "'torchao-rowwise-with-gw-hp'",
        **dict.fromkeys(("te", "transformer_engine", "delayed", "hybrid"), "'te-delayed'"),
        "mxfp8": "'te-mxfp8'", "nvfp4": "'te-nvfp4'",
    },
    PipelineSchedule: {
        "interleaved1f1b": "'interleaved-1f1b'", "interleaved": "'interleaved-1f1b'",
        **dict.fromkeys(("loopedbfs", "bfs"), "'looped-bfs'"),
        **dict.fromkeys(("interleavedzerobubble", "interleaved_zb", "zb1p", "zero_bubble"),
                        "'interleaved-zero-bubble'"),
        **dict.fromkeys(("zbvzerobubble", "zb_v"), "'zbv'"),
        **dict.fromkeys(("dualpipe", "dual_pipe_v"), "'dualpipev'"),
    },
    Precision: {
        **dict.fromkeys(("float16", "half"), "'fp16'"), "float32": "'fp32'", "bfloat16": "'bf16'",
        **dict.fromkeys(("fp8", "float8", "mxfp8", "nvfp4"), "'bf16', with a recipe of fp8 beside it"),
    },
}  # fmt: skip
"""What people call members elsewhere -> what to write."""


def _coerce(name: str, value: object, kind: type[Enum]) -> Enum | None:
    """A field's member; what is not to be offloaded may be null, as what has a default."""
    if value is None and kind is Offload:
        return Offload.NONE
    return None if value is None and kind not in _ALWAYS_NAMED else coerce_enum(name, value, kind)


def _checkpointing(value: object) -> Checkpointing:
    if isinstance(value, Recomputation | CheckpointedLayers):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value > 1 and value == int(value):
            return CheckpointedLayers.first(int(value))
        if not 0 <= value <= 1:
            msg = (
                "checkpointing: a share of layers must be from 0 to 1, and a number of them whole, "
                f"got {value}"
            )
            raise SetupError(msg)
        return float(value)
    if isinstance(value, str) and value[:1].isdecimal():
        try:
            return _checkpointing(float(value))
        except ValueError as error:
            if isinstance(error, SetupError):
                raise
    if isinstance(value, str) and (value[:1].isdecimal() or value.startswith("layers.")):
        return CheckpointedLayers.parse(value)
    return coerce_enum("checkpointing", value, Recomputation)


def checkpointing_text(value: Checkpointing) -> str:
    """``none``, ``full``, ``selective``, a share of layers, or their numbers.

    >>> checkpointing_text(0.5), checkpointing_text(CheckpointedLayers.parse("0-7,12"))
    ('50%', 'layers.0-7+12')
    """
    if isinstance(value, Recomputation):
        return value.value
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def _kernels(value: object) -> KernelPreset | Kernels:
    return value if isinstance(value, Kernels) else coerce_enum("kernels", value, KernelPreset)


MAX_OPTION = 2**63 - 1
"""Largest number that an engine's option takes: what a C integer holds."""
MAX_OPTION_DEPTH = 10
"""How deeply the value of an engine's option may be nested."""


def _options(options: object, field: str = "engine_options") -> tuple[tuple[str, object], ...]:
    """A part's options as pairs in order, their values such that equal setups are found equal."""
    owner = field.partition("_")[0]
    pairs = options.items() if isinstance(options, Mapping) else options
    found: dict[str, object] = {}
    for pair in pairs if isinstance(pairs, Iterable) else (pairs,):
        if not isinstance(pair, tuple) or len(pair) != 2:
            msg = f"{field}: expected a mapping of the {owner}'s own names, got {shown(options)}"
            raise SetupError(msg)
        name, value = pair
        if not isinstance(name, str):
            msg = f"{field}: the key {shown(name)} is not text: put it in quotes"
            raise SetupError(msg)
        found[name] = _frozen(value, name=name, depth=0)
    return tuple(sorted(found.items()))


def _frozen(value: object, *, name: str, depth: int) -> object:
    """A value that can be hashed: lists as tuples, mappings as sorted pairs."""
    if depth > MAX_OPTION_DEPTH:
        msg = f"engine_options: {name}: is nested more than {MAX_OPTION_DEPTH} levels deep"
        raise SetupError(msg)
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return tuple((str(key), _frozen(each, name=name, depth=depth + 1)) for key, each in items)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_frozen(each, name=name, depth=depth + 1) for each in value)
    if isinstance(value, int | float) and not -MAX_OPTION <= value <= MAX_OPTION:
        msg = f"engine_options: {name}: must be a number below 2^63, got {shown(value)}"
        raise SetupError(msg)
    return value


_OPTIONAL_SIZES = frozenset({"num_nodes", "seq_len", "target_seq_len"})
"""Sizes for which None stands for a default."""


def _check_sizes(setup: TrainingSetup) -> None:
    limits = {
        "num_gpus": MAX_GPUS, "num_nodes": MAX_GPUS, "micro_batch_size": MAX_TOKENS,
        "gradient_accumulation_steps": MAX_TOKENS, "seq_len": MAX_TOKENS,
        "target_seq_len": MAX_TOKENS, "tensor_parallel": MAX_GPUS, "pipeline_parallel": MAX_GPUS,
        "virtual_stages": MAX_GPUS, "context_parallel": MAX_GPUS, "expert_parallel": MAX_GPUS,
    }  # fmt: skip
    for name, limit in limits.items():
        value = getattr(setup, name)
        if value is None and name in _OPTIONAL_SIZES:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            msg = f"{name}: expected a whole number, got {shown(value)}"
            raise SetupError(msg)
        if not 1 <= value <= limit:
            msg = f"{name}: must be from 1 to {limit}, got {shown(value)}"
            raise SetupError(msg)
    for name in _FLAGS:
        if not isinstance(getattr(setup, name), bool):
            msg = f"{name}: expected true or false, got {shown(getattr(setup, name))}"
            raise SetupError(msg)
    numbers = (int, float)
    imbalance = setup.expert_imbalance
    if type(imbalance) not in numbers or not 1 <= imbalance <= MAX_IMBALANCE:
        msg = (
            f"expert_imbalance: must be from 1 (balanced) to {MAX_IMBALANCE} times an even share of the "
            f"tokens, got {shown(imbalance)}"
        )
        raise SetupError(msg)
    dropout = setup.dropout
    is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    if dropout is not None and not (is_number and 0 <= dropout < 1):
        msg = f"dropout: must be from 0 to below 1, got {shown(dropout)}"
        raise SetupError(msg)
    if setup.num_gpus % setup.nodes:
        msg = (
            f"num_nodes: {setup.num_gpus} GPUs cannot be spread evenly over {setup.nodes} nodes; "
            "give a number of nodes that divides them"
        )
        raise SetupError(msg)


_FLAGS = (
    "sequence_parallel", "loss_parallel", "outputs_held", "upcast_outputs", "kernel_scratch",
    "optimizer_in_backward",
)  # fmt: skip


def _check_engine(setup: TrainingSetup) -> None:
    engine, precision = setup.chosen_engine, setup.chosen_precision
    if engine not in engines_with(precision):
        known = [each.value for each, row in PRECISIONS.items() if engine in row.engines]
        msg = (
            f"precision: {precision.value} does not exist with the engine {engine.value}; "
            f"it has {', '.join(known)}"
        )
        raise SetupError(msg)
    if setup.zero_stage is not None and engine is not Engine.DEEPSPEED:
        msg = (
            f"zero_stage: only deepspeed has ZeRO stages, and the engine is {engine.value}: leave it "
            "out, or name the engine deepspeed"
        )
        raise SetupError(msg)
    if setup.fsdp_strategy is not None and engine not in (Engine.FSDP, Engine.FSDP1):
        msg = f"fsdp_strategy: only fsdp and fsdp1 have it, and the engine is {engine.value}"
        raise SetupError(msg)
    _check_fp8(setup, engine)
    _check_offload(setup, engine)
    _check_parallel(setup)


def _check_fp8(setup: TrainingSetup, engine: Engine) -> None:
    if setup.fp8 is not Fp8Recipe.NONE and setup.adapter is not None:
        msg = "fp8: adapters beside linear layers in fp8 are not modelled: leave one of the two out"
        raise SetupError(msg)
    if setup.fp8 is Fp8Recipe.NONE:
        return
    formats = PRECISIONS[setup.chosen_precision]
    half = formats.autocast or formats.compute
    if half is not DType.BF16:
        msg = (
            f"fp8: {setup.fp8.value} narrows products that are in bf16, and the precision "
            f"{setup.chosen_precision.value} has none: take bf16 or one of its forms"
        )
        raise SetupError(msg)
    if engine is Engine.DEEPSPEED and setup.zero_stage is ZeroStage.PARAMETERS:
        msg = (
            "fp8: DeepSpeed's stage 3 replaces linear layers itself, and how that goes with "
            f"{setup.fp8.value} is not modelled; stages 0 to 2, ddp and fsdp are"
        )
        raise SetupError(msg)


def _check_offload(setup: TrainingSetup, engine: Engine) -> None:
    _check_ratio(setup)
    if setup.offload_activations.sends:
        _check_activation_offload(setup)
    parts = {"offload_optimizer": setup.offload_optimizer, "offload_param": setup.offload_param}
    for name, place in parts.items():
        if place is not Offload.NONE and engine in (Engine.DDP, Engine.MEGATRON):
            msg = f"{name}: {engine.value} cannot offload; deepspeed, fsdp and fsdp1 can"
            raise SetupError(msg)
    if setup.offload_param is not Offload.NONE and engine is Engine.DEEPSPEED:
        stage = setup.zero_stage if setup.zero_stage is not None else ZeroStage.GRADIENTS
        if stage is not ZeroStage.PARAMETERS:
            msg = f"offload_param: DeepSpeed offloads parameters in stage 3 only, not {stage.value}"
            raise SetupError(msg)
    if setup.offload_optimizer is not Offload.NONE and setup.zero_stage is ZeroStage.NONE:
        msg = "offload_optimizer: DeepSpeed offloads from stage 1 on, not 0"
        raise SetupError(msg)


def _check_ratio(setup: TrainingSetup) -> None:
    ratio: object = setup.offload_activations_ratio
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        msg = f"offload_activations_ratio: must be from 0 to 1, got {shown(ratio)}"
        raise SetupError(msg)
    if ratio != 1 and setup.offload_activations is not ActivationOffload.CHUNKS:
        how = setup.offload_activations.value
        msg = f"offload_activations_ratio: chunks take a share, not {how}; say chunks"
        raise SetupError(msg)


def _check_activation_offload(setup: TrainingSetup) -> None:
    how = setup.offload_activations.value
    msg = ""
    chunks = setup.offload_activations is ActivationOffload.CHUNKS
    in_flight = OFFLOAD_RULES[setup.offload_activations].in_flight if not chunks else 0
    if chunks and setup.pipeline_parallel == 1:
        msg = "passes that others follow are those of a pipeline: give pipeline_parallel"
    elif in_flight and setup.pipeline_parallel > 1:
        msg = "in a pipeline it is not modelled: chunks, save-on-cpu and checkpoints are"
    elif setup.chosen_engine is Engine.MEGATRON and not chunks:
        msg = "under Megatron it is not modelled: chunks are"
    elif setup.compile is not Compilation.NONE:
        msg = "what a compiled graph keeps is not followed to CPU RAM: leave torch.compile out"
    elif setup.fp8 is not Fp8Recipe.NONE:
        msg = f"what {setup.fp8.value} keeps is not followed to CPU RAM: leave fp8 out"
    elif (
        setup.checkpointing is Recomputation.SELECTIVE
        and setup.chosen_kernels.selective is not SelectivePolicy.EVERY_OTHER_MATMUL
    ):
        msg = "beside recomputed attention it is not modelled: take checkpointing none or full"
    elif setup.offload_activations is ActivationOffload.CHECKPOINTS and setup.checkpointing in (
        Recomputation.NONE,
        0.0,
    ):
        msg = "no layer is checkpointed: say checkpointing full, or streamed"
    if msg:
        msg = f"offload_activations: {how}: {msg}"
        raise SetupError(msg)


def _check_parallel(setup: TrainingSetup) -> None:
    product = setup.tensor_parallel * setup.pipeline_parallel * setup.context_parallel
    if setup.num_gpus % product:
        msg = (
            f"num_gpus: {setup.num_gpus} is not divisible by tensor_parallel x pipeline_parallel x "
            f"context_parallel = {setup.tensor_parallel} x {setup.pipeline_parallel} x "
            f"{setup.context_parallel} = {product}"
        )
        raise SetupError(msg)
    if setup.is_pipelined:
        _check_pipeline(setup)


def _check_pipeline(setup: TrainingSetup) -> None:
    """Refuse what says how stages are run where there are none, and counts that no schedule takes."""
    pipeline = setup.pipeline
    if pipeline is None:
        for name in ("pipeline_schedule", "virtual_stages", "layers_per_stage"):
            if getattr(setup, name) not in (None, 1):
                msg = f"{name}: is of the stages that pipeline_parallel makes, and that is 1: give it too"
                raise SetupError(msg)
        return
    from memplan.training.schedules import check_schedule  # only for pipelines

    check_schedule(
        pipeline.schedule,
        num_ranks=pipeline.degree,
        num_virtual=pipeline.num_virtual,
        num_micro_batches=pipeline.num_micro_batches,
    )


def unknown_field(name: str, known: Iterable[str] = SETUP_FIELDS) -> SetupError:
    """The error for a setting that does not exist."""
    names = list(known)
    return SetupError(f"{name}: no such setting.{did_you_mean(name, names)}")
