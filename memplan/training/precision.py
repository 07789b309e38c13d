"""In which number format each part of a training step is held.

The table of ``PRECISIONS`` is the whole truth about a precision: adding one is adding a row.
"""

from enum import Enum

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass


class Engine(Enum):
    """What runs the training step over the GPUs."""

    DDP = "ddp"
    """torch's DistributedDataParallel; on one GPU, the plain training loop."""
    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"
    """FSDP2, ``fully_shard``; also called ``fsdp2``."""
    FSDP1 = "fsdp1"
    MEGATRON = "megatron"
    """Megatron-core: its own layers, its own tensor parallelism, its distributed optimizer."""

    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> "Engine | None":
        return cls.FSDP if value == "fsdp2" else None


class Precision(Enum):
    """Named combinations of formats; see ``PRECISIONS`` for what each one holds."""

    FP32 = "fp32"
    BF16 = "bf16"
    BF16_AUTOCAST = "bf16-autocast"
    BF16_AMP = "bf16-amp"
    BF16_MIXED = "bf16-mixed"
    BF16_MASTER = "bf16-master"
    FP16 = "fp16"
    """Whatever fp16 is called with the engine: ``FP16_FORM``."""
    FP16_AMP = "fp16-amp"
    FP16_MIXED = "fp16-mixed"
    FP16_MASTER = "fp16-master"

    __hash__ = object.__hash__


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionFormats:
    """The formats of one precision."""

    weights: DType
    """Parameters, or their shards, as they are kept."""
    compute: DType
    """Weights as the layers use them when no autocast is on."""
    autocast: DType | None
    """What autocast turns matrix products into; None without autocast."""
    gradients: DType
    """Gradients as the optimizer, or the engine's reduction, reads them."""
    optimizer_states: DType
    """Each of the optimizer's states."""
    master_weights: bool
    """Whether an fp32 copy of the weights is kept beside them."""
    engines: frozenset[Engine]
    """Engines that train this way."""

    @property
    def activations(self) -> DType:
        """The format that the residual stream starts in."""
        return self.compute


_ALL = frozenset(Engine)
_PLAIN = frozenset({Engine.DDP, Engine.FSDP, Engine.FSDP1})
_PURE = _PLAIN | {Engine.MEGATRON}
"""Megatron's layers in a loop of one's own are trained so too (``wrap_with_ddp`` false)."""
_DDP = frozenset({Engine.DDP})
_SHARDED = frozenset({Engine.FSDP, Engine.FSDP1})
_MASTER = frozenset({Engine.DEEPSPEED, Engine.MEGATRON})


def _amp(half: DType) -> PrecisionFormats:
    return PrecisionFormats(
        weights=DType.FP32, compute=DType.FP32, autocast=half, gradients=DType.FP32,
        optimizer_states=DType.FP32, master_weights=False, engines=_DDP,
    )  # fmt: skip


def _mixed(half: DType) -> PrecisionFormats:
    return PrecisionFormats(
        weights=DType.FP32, compute=half, autocast=None, gradients=DType.FP32,
        optimizer_states=DType.FP32, master_weights=False, engines=_SHARDED,
    )  # fmt: skip


def _master(half: DType) -> PrecisionFormats:
    return PrecisionFormats(
        weights=half, compute=half, autocast=None, gradients=half,
        optimizer_states=DType.FP32, master_weights=True, engines=_MASTER,
    )  # fmt: skip


def _pure(dtype: DType, autocast: DType | None, engines: frozenset[Engine]) -> PrecisionFormats:
    return PrecisionFormats(
        weights=dtype, compute=dtype, autocast=autocast, gradients=dtype,
        optimizer_states=dtype, master_weights=False, engines=engines,
    )  # fmt: skip


PRECISIONS: dict[Precision, PrecisionFormats] = {
    Precision.FP32: _pure(DType.FP32, None, _ALL),
    Precision.BF16: _pure(DType.BF16, None, _PURE),
    Precision.BF16_AUTOCAST: _pure(DType.BF16, DType.BF16, _PLAIN),
    Precision.BF16_AMP: _amp(DType.BF16),
    Precision.BF16_MIXED: _mixed(DType.BF16),
    Precision.BF16_MASTER: _master(DType.BF16),
    Precision.FP16_AMP: _amp(DType.FP16),
    Precision.FP16_MIXED: _mixed(DType.FP16),
    Precision.FP16_MASTER: _master(DType.FP16),
}
"""Every precision, as the frameworks hold it (torch 2.13, DeepSpeed 0.19, transformers 5.23)."""

FP16_FORM: dict[Engine, Precision] = {
    Engine.DDP: Precision.FP16_AMP,
    Engine.DEEPSPEED: Precision.FP16_MASTER,
    Engine.FSDP: Precision.FP16_MIXED,
    Engine.FSDP1: Precision.FP16_MIXED,
    Engine.MEGATRON: Precision.FP16_MASTER,
}
"""How each engine trains in fp16: all have one way."""

DEFAULT_PRECISION: dict[Engine, Precision] = {
    Engine.DDP: Precision.BF16_AMP,
    Engine.DEEPSPEED: Precision.BF16_MASTER,
    Engine.FSDP: Precision.BF16_MIXED,
    Engine.FSDP1: Precision.BF16_MIXED,
    Engine.MEGATRON: Precision.BF16_MASTER,
}
"""What each engine's users mostly train with."""

FROZEN_PRECISION: dict[Engine, Precision] = {Engine.DDP: Precision.BF16_AUTOCAST}
"""The same where only adapters are trained: a frozen weight needs no more than its published format,
in which transformers loads it (``dtype="auto"``), and HF Trainer's ``bf16=True`` is autocast."""


def engine_precision(
    asked: Precision | None, engine: Engine, *, has_bf16: bool = True, is_frozen: bool = False
) -> Precision:
    """The precision that an engine trains in: asked for, or its usual one on such a card.

    ``is_frozen``: the model's own weights are not trained, and are kept as they are loaded.

    >>> engine_precision(None, Engine.FSDP, has_bf16=False).value
    'fp16-mixed'
    """
    if asked is Precision.FP16 or (asked is None and not has_bf16):
        return FP16_FORM[engine]
    if asked is None:
        return (
            FROZEN_PRECISION.get(engine, DEFAULT_PRECISION[engine])
            if is_frozen
            else DEFAULT_PRECISION[engine]
        )
    return asked


def engines_with(precision: Precision) -> frozenset[Engine]:
    """The engines that train in a precision."""
    return _ALL if precision is Precision.FP16 else PRECISIONS[precision].engines


def carried_precision(precision: Precision, engine: Engine) -> Precision:
    """The nearest to a precision that another engine has: the same 16-bit format, fp32 kept.

    >>> carried_precision(Precision.FP16_AMP, Engine.DEEPSPEED).value
    'fp16-master'
    """
    if engine in engines_with(precision):
        return precision
    half = PRECISIONS[precision].autocast or PRECISIONS[precision].compute
    return FP16_FORM[engine] if half is DType.FP16 else DEFAULT_PRECISION[engine]
