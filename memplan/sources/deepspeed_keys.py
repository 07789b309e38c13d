"""The keys of a ``ds_config.json`` at every depth, and what their values may be (DeepSpeed 0.19.8).

Sources: ``runtime/config.py``, ``runtime/constants.py``, ``runtime/zero/config.py``,
``runtime/zero/offload_config.py``, ``runtime/precision_config.py``, ``monitor/config.py``. Values are
read as pydantic does in its lax mode, which is what DeepSpeed's own classes use: ``1``, ``"yes"`` and
``"true"`` are true, ``"2"`` and ``2.0`` are two.
"""

import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeAlias

from memplan.fast_dataclass import dataclass


class Kind(Enum):
    """What a value may be."""

    FLAG = "true or false"
    COUNT = "a whole number"
    NUMBER = "a number"
    TEXT = "text"
    FREE = "anything"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key that holds a value."""

    kind: Kind
    at_least: int | None = None
    """The least value that DeepSpeed takes."""
    at_most: int | None = None
    """The greatest."""
    nullable: bool = False
    """Whether DeepSpeed takes null for "not given"."""


Section: TypeAlias = Mapping[str, "Key | Section"]
"""Keys by their names; a mapping is a section of its own."""

FLAG = Key(kind=Kind.FLAG)
MAYBE_FLAG = Key(kind=Kind.FLAG, nullable=True)
COUNT = Key(kind=Kind.COUNT)
SIZE = Key(kind=Kind.COUNT, at_least=0)
BATCH = Key(kind=Kind.COUNT, at_least=1, nullable=True)
NUMBER = Key(kind=Kind.NUMBER)
SHARE = Key(kind=Kind.NUMBER, at_least=0, at_most=1)
TEXT = Key(kind=Kind.TEXT)
MAYBE_TEXT = Key(kind=Kind.TEXT, nullable=True)
FREE = Key(kind=Kind.FREE, nullable=True)

_OFFLOAD: Section = {
    "device": TEXT, "nvme_path": MAYBE_TEXT, "buffer_count": SIZE, "pin_memory": FLAG,
}  # fmt: skip

_LEAF_MODULE: Section = {"classes": FREE, "names": FREE, "name_suffixes": FREE}

_ZENFLOW: Section = {
    "topk_ratio": SHARE, "select_strategy": TEXT, "select_interval": FREE, "update_interval": FREE,
    "overlap_step": FLAG, "offload": FLAG, "auto_ratio": SHARE, "full_warm_up_rounds": COUNT,
    "pt_reserved_cores_perc": SHARE, "steps_per_epoch": FREE,
}  # fmt: skip

ZERO: Section = {
    "stage": COUNT,
    "contiguous_gradients": FLAG,
    "reduce_scatter": FLAG,
    "reduce_bucket_size": Key(kind=Kind.COUNT, at_least=1),
    "use_multi_rank_bucket_allreduce": FLAG,
    "allgather_partitions": FLAG,
    "allgather_bucket_size": SIZE,
    "overlap_comm": MAYBE_FLAG,
    "compute_grad_norm": FLAG,
    "load_from_fp32_weights": FLAG,
    "elastic_checkpoint": FLAG,
    "offload_param": {**_OFFLOAD, "buffer_size": SIZE, "max_in_cpu": SIZE},
    "offload_optimizer": {
        **_OFFLOAD, "pipeline_read": FLAG, "pipeline_write": FLAG, "fast_init": FLAG,
        "ratio": SHARE, "super_offload": FLAG, "cpuadam_cores_perc": SHARE,
    },
    "zenflow": _ZENFLOW,
    "sub_group_size": SIZE,
    "cpu_offload_param": MAYBE_FLAG,
    "cpu_offload_use_pin_memory": MAYBE_FLAG,
    "cpu_offload": MAYBE_FLAG,
    "prefetch_bucket_size": SIZE,
    "stage3_prefetch_bucket_size": SIZE,
    "param_persistence_threshold": SIZE,
    "stage3_param_persistence_threshold": SIZE,
    "model_persistence_threshold": SIZE,
    "stage3_model_persistence_threshold": SIZE,
    "max_live_parameters": SIZE,
    "stage3_max_live_parameters": SIZE,
    "max_reuse_distance": SIZE,
    "stage3_max_reuse_distance": SIZE,
    "gather_16bit_weights_on_model_save": FLAG,
    "stage3_gather_16bit_weights_on_model_save": FLAG,
    "stage3_gather_fp16_weights_on_model_save": FLAG,
    "module_granularity_threshold": COUNT,
    "stage3_module_granularity_threshold": COUNT,
    "use_all_reduce_for_fetch_params": FLAG,
    "stage3_use_all_reduce_for_fetch_params": FLAG,
    "allgather_sequential": FLAG,
    "stage3_allgather_sequential": FLAG,
    "ignore_unused_parameters": FLAG,
    "legacy_stage1": FLAG,
    "round_robin_gradients": FLAG,
    "parameter_alignment": FLAG,
    "zero_hpz_partition_size": SIZE,
    "zero_quantized_weights": FLAG,
    "zero_quantized_nontrainable_weights": FLAG,
    "zero_quantized_gradients": FLAG,
    "memory_efficient_linear": FLAG,
    "pipeline_loading_checkpoint": FLAG,
    "override_module_apply": FLAG,
    "log_trace_cache_warnings": FLAG,
    "enable_sanity_checks": FLAG,
    "save_muon_momentum_buffer_in_memory": FLAG,
    "leaf_module": _LEAF_MODULE,
}  # fmt: skip
"""``zero_optimization``."""

REMOVED_FROM_ZERO: tuple[str, ...] = (
    "mics_shard_size",
    "mics_hierarchical_params_gather",
    "zeropp_loco_param",
)
"""Keys of ``zero_optimization`` that DeepSpeed once had and now stops at."""

RENAMED_IN_ZERO: Mapping[str, str] = {
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
}
"""Older and shorter names that DeepSpeed takes too."""

_BF16: Section = {
    "enabled": FLAG, "immediate_grad_update": FLAG, "check_grad_overflow": FLAG,
    "bf16_master_weights_and_grads": FLAG, "bf16_optimizer_states": FLAG,
}  # fmt: skip
_FP16: Section = {
    "enabled": FLAG, "auto_cast": FLAG, "loss_scale": NUMBER, "initial_scale_power": COUNT,
    "loss_scale_window": COUNT, "hysteresis": COUNT, "consecutive_hysteresis": FLAG,
    "min_loss_scale": COUNT, "fp16_master_weights_and_grads": FLAG,
}  # fmt: skip

OPTIMIZER_PARAMS: Section = {
    "lr": FREE, "betas": FREE, "eps": FREE, "weight_decay": FREE, "bias_correction": FREE,
    "adam_w_mode": FREE, "torch_adam": FLAG, "amsgrad": FLAG, "set_grad_none": FREE,
    "fp32_optimizer_states": FLAG, "max_grad_norm": FREE, "momentum": NUMBER, "dampening": FREE,
    "nesterov": FREE, "maximize": FREE, "foreach": MAYBE_FLAG, "fused": MAYBE_FLAG,
    "capturable": FREE, "differentiable": FREE, "max_coeff": FREE, "min_coeff": FREE,
    "eps_inside_sqrt": FREE, "adamw_mode": FREE,
}  # fmt: skip
"""``optimizer.params`` of the optimizers that are modelled: Adam, AdamW (FusedAdam,
DeepSpeedCPUAdam, torch's), LAMB (its trust ratio's bounds move no memory) and torch's SGD."""

_PLOT: Section = {"enabled": FLAG, "output_path": TEXT, "job_name": TEXT}

TOP: Section = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": BATCH,
    "managed_gradient_accumulation": FREE,
    "steps_per_print": FREE,
    "dump_state": FREE,
    "disable_python_gc": FREE,
    "disable_allgather": FREE,
    "communication_data_type": MAYBE_TEXT,
    "seq_parallel_communication_data_type": MAYBE_TEXT,
    "prescale_gradients": FREE,
    "gradient_predivide_factor": FREE,
    "gradient_allreduce_op": FREE,
    "gradient_clipping": FREE,
    "zero_optimization": ZERO,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "fp16": _FP16,
    "torch_autocast": {"enabled": FLAG, "dtype": FREE, "lower_precision_safe_modules": FREE},
    "data_types": {
        "grad_accum_dtype": MAYBE_TEXT, "param_dtype": MAYBE_TEXT, "buffer_dtype": MAYBE_TEXT,
        "keep_in_fp32_modules": FREE,
    },
    "optimizer": {"type": MAYBE_TEXT, "params": FREE, "legacy_fusion": FREE},
    "zero_allow_untested_optimizer": FREE,
    "zero_force_ds_cpu_optimizer": FREE,
    "scheduler": {"type": MAYBE_TEXT, "params": FREE},
    "activation_checkpointing": {
        "partition_activations": FREE, "number_checkpoints": FREE,
        "contiguous_memory_optimization": FREE, "synchronize_checkpoint_boundary": FREE,
        "profile": FREE, "cpu_checkpointing": FREE,
    },
    "aio": {
        "block_size": FREE, "queue_depth": FREE, "intra_op_parallelism": FREE,
        "single_submit": FREE, "overlap_events": FREE, "use_gds": FREE, "thread_count": FREE,
    },
    "checkpoint": {
        "tag_validation": FREE, "load_universal": FREE, "use_node_local_storage": FREE,
        "parallel_write": FREE, "checkpoint_serialization": FREE, "writer": FREE,
    },
    "datastates_ckpt": FREE,
    "comms_logger": {
        "enabled": FLAG, "prof_all": FLAG, "prof_ops": FREE, "verbose": FLAG, "debug": FLAG,
    },
    "tensorboard": _PLOT,
    "csv_monitor": _PLOT,
    "wandb": {
        "enabled": FLAG, "group": MAYBE_TEXT, "team": MAYBE_TEXT, "project": TEXT,
    },
    "comet": {
        "enabled": FLAG, "samples_log_interval": COUNT, "project": MAYBE_TEXT,
        "workspace": MAYBE_TEXT, "api_key": MAYBE_TEXT, "experiment_name": MAYBE_TEXT,
        "experiment_key": MAYBE_TEXT, "online": MAYBE_FLAG, "mode": MAYBE_TEXT,
    },
    "flops_profiler": {
        "enabled": FREE, "recompute_fwd_factor": FREE, "profile_step": FREE, "module_depth": FREE,
        "top_modules": FREE, "detailed": FREE, "output_file": FREE,
    },
    "timers": {"throughput": {"enabled": FLAG, "synchronized": FLAG}},
    "wall_clock_breakdown": FREE,
    "memory_breakdown": FREE,
    "dataloader_drop_last": FREE,
    "log_level": FREE,
    "vocabulary_size": FREE,
    "seed": FREE,
    "use_data_before_expert_parallelism": FREE,
    "autotuning": FREE,
    "data_efficiency": FREE,
    "compile": {
        "deepcompile": FLAG, "autoep_non_moe": FLAG, "free_activation": FLAG,
        "free_activation_threshold": COUNT, "offload_activation": FLAG,
        "offload_activation_pin_memory": FLAG, "offload_opt_states": FLAG, "double_buffer": FLAG,
        "symmetric_memory": FLAG, "debug_log": FLAG, "offload_parameters": FLAG,
        "sync_before_reduce": FLAG, "sync_after_reduce": FLAG, "sync_before_allgather": FLAG,
        "sync_after_allgather": FLAG, "keep_int_input_tensors": FLAG,
        "keep_all_input_tensors": FLAG, "passes": FREE,
    },
    "hybrid_engine": {
        "enabled": FLAG, "max_out_tokens": COUNT, "inference_tp_size": COUNT,
        "release_inference_cache": FLAG, "pin_parameters": FLAG, "tp_gather_partition_size": COUNT,
        "enable_cuda_graph": FLAG,
    },
    "tensor_parallel": {
        "dtype": FREE, "autotp_size": SIZE, "tp_overlap_comm": FLAG,
        "vocab_parallel_lm_head": MAYBE_FLAG, "vocab_parallel_ce_backend": TEXT,
        "tensor_parallel": FREE, "tp": FREE, "injection_policy_tuple": FREE,
        "partition_config": FREE, "preset_model": MAYBE_TEXT, "keep_module_on_host": FLAG,
        "replace_with_kernel_inject": FLAG, "kernel_inject": FLAG,
    },
    "expert_parallel": FREE,
    "sequence_parallel_size": BATCH,
    "pipeline": FREE,
    "weight_quantization": FREE,
    "msamp": FREE,
    # Of scripts and launchers, which DeepSpeed passes over: it looks for single keys.
    "cuda_visible_devices": FREE, "comms_config": FREE, "monitor_config": FREE, "local_rank": FREE,
}  # fmt: skip
"""The whole file."""

REMOVED: Mapping[str, str] = {
    "compression_training": "trains a compressed model",
    "amp": "mixes precisions as Apex does",
    "quantize_training": "quantizes while it trains",
    "sparse_attention": "has kernels of its own",
    "progressive_layer_drop": "skips layers",
    "elasticity": "sets the batch sizes at start-up",
    "graph_harvesting": "captures CUDA graphs",
    "sparse_gradients": "keeps the embeddings' gradients sparse",
    "eigenvalue": "",
    "nebula": "",
    "curriculum_learning": "",
}
"""Top-level keys that DeepSpeed once had and 0.19.8 stops at; and what one that moves memory did."""


def is_comment(key: object) -> bool:
    """Say whether a key is there for the reader alone.

    >>> is_comment("_comment"), is_comment("comment"), is_comment("stage")
    (True, True, False)
    """
    return isinstance(key, str) and (key.startswith("_") or key.lower() in ("comment", "comments"))


_TRUE = ("1", "true", "t", "yes", "y", "on")
_FALSE = ("0", "false", "f", "no", "n", "off")


def coerce(key: Key, value: object) -> object:
    """The value as DeepSpeed would hold it.

    Raises ``ValueError``, whose text is what has to be written, for one that DeepSpeed refuses.

    >>> coerce(FLAG, "yes"), coerce(COUNT, 5e8), coerce(SIZE, "7")
    (True, 500000000, 7)
    """
    if value is None:
        if key.nullable:
            return None
        msg = f"{key.kind.value}, or leave the key out"
        raise ValueError(msg)
    found = _COERCED[key.kind](value)
    number = found if isinstance(found, int | float) else 0
    if key.at_most is not None and number > key.at_most:
        msg = f"{key.kind.value} up to {key.at_most}"
        raise ValueError(msg)
    if key.at_least is not None and number < key.at_least:
        msg = f"{key.kind.value} from {key.at_least} up"
        raise ValueError(msg)
    return found


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(int(value)) if isinstance(value, float) and value in (0, 1) else str(value).lower()
    if isinstance(value, str | int | float) and text in (*_TRUE, *_FALSE):
        return text in _TRUE
    raise ValueError(Kind.FLAG.value)


_WHOLE = re.compile(r"[+-]?\d+(?:_\d+)*(?:\.0*)?")
"""Text that pydantic takes for a whole number; ``"5e8"`` is none."""


def _count(value: object) -> int:
    if isinstance(value, int):
        return int(value)
    is_whole = isinstance(value, float) and value.is_integer()
    if is_whole or (isinstance(value, str) and _WHOLE.fullmatch(value.strip())):
        return (
            int(str(value).strip().split(".")[0]) if isinstance(value, str) else int(_number(value))
        )
    raise ValueError(Kind.COUNT.value)


def _number(value: object) -> float:
    if isinstance(value, str | int | float):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise ValueError(Kind.NUMBER.value) from None
        if math.isfinite(number):
            return number
    raise ValueError(Kind.NUMBER.value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(Kind.TEXT.value)  # noqa: TRY004 -- one kind of error for all kinds
    return value


_COERCED: Mapping[Kind, Callable[[object], object]] = {
    Kind.FLAG: _flag,
    Kind.COUNT: _count,
    Kind.NUMBER: _number,
    Kind.TEXT: _text,
    Kind.FREE: lambda value: value,
}
