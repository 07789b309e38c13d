"""Megatron's own settings, read from a setup.

Sources: Megatron-core 0.16.1, core/distributed/distributed_data_parallel_config.py and
core/optimizer/optimizer_config.py; Megatron-LM's ``megatron/training/arguments.py``.
"""

from typing import Any

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass, fields, replace
from memplan.memory.engine_options import OptionReader, option_names
from memplan.text import shown
from memplan.training.choices import Recomputation
from memplan.training.coercion import coerce_enum
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.megatron import (
    MegatronLayers,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    TransformerImpl,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronStates:
    """Megatron's data parallelism and optimizer; the field names are the option names."""

    use_distributed_optimizer: bool = False
    """Optimizer states and fp32 weights are sharded over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced bucket by bucket while backward runs; without it there is one bucket."""
    overlap_param_gather: bool = False
    """Weights are gathered, where they lie, while the next forward pass runs."""
    ddp_bucket_size: int | None = None
    """Parameters of a bucket; None: 40 million, or a million for each data-parallel rank if that is more."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """Buckets are padded to a multiple of 65536 parameters."""
    grad_reduce_in_bf16: bool = False
    """Main gradients are in the weights' format, and the optimizer makes fp32 copies of its shard."""
    use_precision_aware_optimizer: bool = False
    """TransformerEngine's FusedAdam holds the fp32 weights, and states in formats of their own."""
    main_grads_dtype: DType = DType.FP32
    """Of gradients as that optimizer reads them."""
    main_params_dtype: DType = DType.FP32
    """Of its weights."""
    exp_avg_dtype: DType = DType.FP32
    """Of its first moment."""
    exp_avg_sq_dtype: DType = DType.FP32
    """Of its second moment."""
    store_param_remainders: bool = True
    """Of its fp32 weights it keeps the 16 bits that bf16 weights lack."""

    @classmethod
    def of(cls, setup: TrainingSetup) -> "MegatronStates":
        """Read them from a setup.

        Raises ``SetupError`` for options that do not exist or cannot be.
        """
        read = _reader(setup)
        asked: dict[str, Any] = {}
        for each in fields(cls):
            if read.values.get(each.name) is None:
                continue
            if isinstance(each.default, bool):
                asked[each.name] = read.boolean(each.name, each.default)
            elif isinstance(each.default, DType):
                asked[each.name] = read.dtype(each.name, each.default)
            else:
                asked[each.name] = read.positive(each.name, LEAST_BUCKET)
        made = cls(**asked)
        made._check(setup, read)
        return made

    def _check(self, setup: TrainingSetup, read: OptionReader) -> None:
        if self.use_precision_aware_optimizer and not self.use_distributed_optimizer:
            msg = "engine_options: use_precision_aware_optimizer: needs use_distributed_optimizer=true"
            raise SetupError(msg)
        for name in _FORMATS:
            if read.values.get(name) is not None and not self.use_precision_aware_optimizer:
                msg = f"engine_options: {name}: needs use_precision_aware_optimizer=true"
                raise SetupError(msg)
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            msg = "engine_options: overlap_param_gather: needs use_distributed_optimizer=true"
            raise SetupError(msg)
        weights = PRECISIONS[setup.chosen_precision].weights
        if self.grad_reduce_in_bf16 and weights is not DType.BF16:
            msg = (
                "engine_options: grad_reduce_in_bf16: is for weights in bf16, and the precision is "
                f"{setup.chosen_precision.value}"
            )
            raise SetupError(msg)

    def bucket_size(self, data_parallel: int) -> int | None:
        """Parameters of a bucket; None: all are in one."""
        if not self.overlap_grad_reduce:
            return None
        return self.ddp_bucket_size or max(LEAST_BUCKET, BUCKET_OF_EACH_RANK * data_parallel)

    def main_gradients(self, weights: DType) -> DType:
        """What gradients are added up in: fp32 for bf16, unless asked otherwise; fp16 as it is.

        (Megatron-LM sets ``accumulate_allreduce_grads_in_fp32`` with bf16.)
        """
        keeps = self.grad_reduce_in_bf16 or weights is DType.FP16
        return weights if keeps else DType.FP32


_FORMATS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
LEAST_BUCKET = 40_000_000
"""Parameters (core/distributed/distributed_data_parallel.py)."""
BUCKET_OF_EACH_RANK = 1_000_000


def layers_of(setup: TrainingSetup) -> MegatronLayers:
    """How Megatron's layers are written down, ``checkpointing`` among it.

    Raises ``SetupError`` for options that do not exist or contradict each other.
    """
    read = _reader(setup)
    plain = MegatronLayers()
    asked: dict[str, Any] = {}
    for each in fields(MegatronLayers):
        name, default = each.name, getattr(plain, each.name)
        if read.values.get(name) is None:
            continue
        if isinstance(default, bool):
            asked[name] = read.boolean(name, default)
        elif isinstance(default, int) or default is None:
            asked[name] = read.positive(name, default or 1)
        elif isinstance(default, tuple):
            asked[name] = _modules(read.values[name])
        else:
            asked[name] = read.member(name, default)
    made = replace(plain, **asked)
    if setup.checkpointing is not Recomputation.NONE:
        if "recompute_granularity" in asked:
            msg = (
                "engine_options: recompute_granularity: checkpointing says what is recomputed too: say it "
                "once"
            )
            raise SetupError(msg)
        made = replace(made, **_recomputed(setup.checkpointing))
    _check_layers(made, asked)
    return made


def _recomputed(checkpointing: object) -> dict[str, Any]:
    """``checkpointing`` in Megatron's words."""
    if checkpointing is Recomputation.SELECTIVE:
        return {"recompute_granularity": RecomputeGranularity.SELECTIVE}
    full = {"recompute_granularity": RecomputeGranularity.FULL}
    if checkpointing is Recomputation.FULL:
        return full
    if isinstance(checkpointing, CheckpointedLayers):
        first = checkpointing.last + 1
        if checkpointing == CheckpointedLayers.first(first):
            return {
                **full,
                "recompute_method": RecomputeMethod.BLOCK,
                "recompute_num_layers": first,
            }
    msg = (
        f"checkpointing: {checkpointing}: Megatron recomputes all layers or the first of them: say full, "
        "selective, or a number of layers"
    )
    raise SetupError(msg)


def _check_layers(settings: MegatronLayers, asked: dict[str, Any]) -> None:
    granularity = settings.recompute_granularity
    needs = {
        "recompute_method": RecomputeGranularity.FULL,
        "recompute_num_layers": RecomputeGranularity.FULL,
        "recompute_modules": RecomputeGranularity.SELECTIVE,
        "distribute_saved_activations": RecomputeGranularity.FULL,
    }
    for name, needed in needs.items():
        if asked.get(name) and granularity is not needed:
            msg = (
                f"engine_options: {name}: needs recompute_granularity={needed.value}, and it is "
                f"{granularity.value}"
            )
            raise SetupError(msg)
    for name, why in _UNMODELLED.items():
        if asked.get(name):
            msg = f"engine_options: {name}: is not modelled; {why}"
            raise SetupError(msg)
    for inner in (RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS):
        if settings.recomputes(RecomputeModule.MOE) and settings.recomputes(inner):
            msg = (
                f"engine_options: recompute_modules: moe computes {inner.value} again too: say one"
            )
            raise SetupError(msg)
    for module, impls in _MODULES_OF.items():
        if settings.recomputes(module) and settings.transformer_impl not in impls:
            known = " or ".join(each.value for each in impls)
            msg = (
                f"engine_options: recompute_modules: {module.value}: needs transformer_impl={known}"
            )
            raise SetupError(msg)


_ENGINE = (TransformerImpl.TRANSFORMER_ENGINE,)
_MODULES_OF = {
    RecomputeModule.CORE_ATTN: (TransformerImpl.TRANSFORMER_ENGINE, TransformerImpl.LOCAL),
    RecomputeModule.MLP: (TransformerImpl.TRANSFORMER_ENGINE, TransformerImpl.LOCAL),
    RecomputeModule.MLP_ACT: (TransformerImpl.KWAI,),
    RecomputeModule.MLA_UP_PROJ: _ENGINE,
    RecomputeModule.MOE: _ENGINE,
    RecomputeModule.MOE_ACT: _ENGINE,
    RecomputeModule.SHARED_EXPERTS: _ENGINE,
}
"""Whose layers can compute a part again on its own, where not all can."""
_UNMODELLED = {"distribute_saved_activations": "sequence_parallel shares them out too"}


def _modules(value: object) -> tuple[RecomputeModule, ...]:
    """A list of modules, or their names in a string."""
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        msg = f"engine_options: recompute_modules: expected a list of modules, got {shown(value)}"
        raise SetupError(msg)
    name = "engine_options: recompute_modules"
    return tuple(dict.fromkeys(coerce_enum(name, each, RecomputeModule) for each in names))


def _reader(setup: TrainingSetup) -> OptionReader:
    return OptionReader(setup, (*option_names(MegatronStates), *option_names(MegatronLayers)))
