"""A training setup: everything beside the model and the GPU that decides how much memory is held."""

from collections.abc import Iterable, Mapping
from enum import Enum

from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass, fields, replace
from memplan.text import shown
from memplan.training.choices import FsdpStrategy, Recomputation, ZeroStage
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.freezing import FrozenParts
from memplan.training.jobs import PLAIN
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, engine_precision
from memplan.training.setup_checks import check_engine, check_sizes
from memplan.training.setup_derived import DerivedSetup
from memplan.training.setup_values import (
    read_checkpointing,
    read_choices,
    read_job,
    read_kernels,
    read_options,
    read_words,
)
from memplan.training.splitting.expert_parallel import Imbalance

QUANTIZATION_OPTIONS = (
    "double_quant", "prepare_for_kbit", "compute_dtype", "quant_storage", "quant_block_size",
    "quant_bits", "skip_modules", "quant_keeps_inputs",
)  # fmt: skip
"""Names under ``engine_options`` that say how the base is quantized, whatever the engine."""
LOADING_OPTION = "device_map"
"""The name under ``engine_options`` that says how weights come to the GPU, where they come whole."""
PIPELINE_OPTIONS = ("return_outputs",)
"""Names under ``engine_options`` that are of torch's pipelines, whatever engine is beside them."""
DEFAULT_SEQ_LEN_CAP = 2048
"""Without ``seq_len`` the model's context length is taken, but no more than this [tokens]."""
PLAIN_OPTIMIZERS = (
    Optimizer.ADAMW_FUSED,
    Optimizer.ADAMW_FOREACH,
    Optimizer.SGD,
    Optimizer.SGD_MOMENTUM,
)
"""Optimizers that run under every engine, as long as nothing else is said of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup(DerivedSetup):
    """How a model is trained.

    Enums accept their string values. ``None`` means the engine's or the model's default, which
    ``resolve`` fills in. Raises ``SetupError`` for settings that cannot be or contradict each other.

    >>> setup = TrainingSetup(num_gpus=8, engine="deepspeed", zero_stage=2, micro_batch_size=4)
    >>> setup.zero_stage, setup.resolve().precision.value
    (<ZeroStage.GRADIENTS: 2>, 'bf16-master')
    """

    def __post_init__(self) -> None:
        _spell_optimizer(self)
        for name, found in read_choices(self):
            object.__setattr__(self, name, found)
        if self.checkpointing.__class__ is not Recomputation:
            object.__setattr__(self, "checkpointing", read_checkpointing(self.checkpointing))
        if self.kernels.__class__ is not KernelPreset:
            object.__setattr__(self, "kernels", read_kernels(self.kernels))
        if self.freeze is None:
            object.__setattr__(self, "freeze", FrozenParts())
        if isinstance(self.freeze, str):
            object.__setattr__(self, "freeze", FrozenParts.parse(self.freeze))
        elif not isinstance(self.freeze, FrozenParts):
            msg = f"freeze: expected parts such as embeddings,layers.0-7, got {shown(self.freeze)}"
            raise SetupError(msg)
        self._read_rare()
        self._read_options()
        check_sizes(self)
        check_engine(self)
        if (
            self.optimizer not in PLAIN_OPTIMIZERS
            or self.optimizer_options
            or self.optimizer_in_backward
        ):
            from memplan.training.optimizers.engines import check_optimizer

            check_optimizer(self)
        if self.quantize is not None:
            _ = self.chosen_quantization

    def _read_rare(self) -> None:
        """What few setups say."""
        if self.adapter is not None:
            from memplan.training.adapters import read_adapter  # only for adapters

            object.__setattr__(self, "adapter", read_adapter(self.adapter))
        if self.job is not PLAIN:
            object.__setattr__(self, "job", read_job(self.job))
        if self.ema is not None:
            from memplan.training.averaging import Ema  # only where weights are averaged

            object.__setattr__(self, "ema", Ema.read(self.ema))
        if self.evaluation is not None:
            from memplan.training.evaluation import Evaluation  # only where there is one

            object.__setattr__(self, "evaluation", Evaluation.read(self.evaluation))
        if self.lengths is not None:
            from memplan.training.lengths import Lengths  # only where they are unequal

            object.__setattr__(self, "lengths", Lengths.read(self.lengths))
        if self.quantize is not None:
            from memplan.training.quantize_setting import (
                read_quantization,  # only for quantized bases
            )

            object.__setattr__(self, "quantize", read_quantization(self.quantize))
        if self.expert_imbalance is not None:
            object.__setattr__(self, "expert_imbalance", Imbalance.read(self.expert_imbalance))
        if self.layers_per_stage is not None:
            from memplan.training.splitting.stages import (
                read_layers_per_stage,  # only for pipelines
            )

            counts = read_layers_per_stage(self.layers_per_stage)
            object.__setattr__(self, "layers_per_stage", counts)
        if self.left_out != ():
            object.__setattr__(self, "left_out", read_words(self.left_out))

    def _read_options(self) -> None:
        """Options of the engine and of the optimizer."""
        if self.engine_options:
            object.__setattr__(self, "engine_options", read_options(self.engine_options))
        elif self.engine_options != ():
            object.__setattr__(self, "engine_options", ())
        if self.optimizer_options:
            options = read_options(self.optimizer_options, "optimizer_options")
            object.__setattr__(self, "optimizer_options", options)
        elif self.optimizer_options != ():
            object.__setattr__(self, "optimizer_options", ())

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
        filled = {
            "num_nodes": self.nodes,
            "engine": engine,
            "zero_stage": self._default_stage(engine),
            "fsdp_strategy": self._default_strategy(engine),
            "precision": engine_precision(
                self.precision, engine, has_bf16=has_bf16, is_frozen=self.adapter is not None
            ),
            "seq_len": seq_len,
            "target_seq_len": self.target_seq_len or seq_len,
            **self._pipeline_choices(),
            **self._liger_choices(family),
        }
        if all(getattr(self, name) == value for name, value in filled.items()):
            return self
        return replace(self, **filled)  # type: ignore[arg-type]

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
        from memplan.training.choices_of_kernels.liger import (
            liger_overrides,  # only where Liger is asked for
        )

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
            # A pipeline's passes leave whole gradients behind: it takes no more than stage 1.
            return ZeroStage.GRADIENTS if self.pipeline_parallel == 1 else ZeroStage.OPTIMIZER
        return self.zero_stage

    def _default_strategy(self, engine: Engine) -> FsdpStrategy | None:
        if engine in (Engine.FSDP, Engine.FSDP1) and self.fsdp_strategy is None:
            return FsdpStrategy.FULL_SHARD
        return self.fsdp_strategy


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

SETUP_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(TrainingSetup))
"""Names of all fields, in order."""


def unknown_field(name: str, known: Iterable[str] = SETUP_FIELDS) -> SetupError:
    """The error for a setting that does not exist."""
    names = list(known)
    return SetupError(f"{name}: no such setting.{did_you_mean(name, names)}")
