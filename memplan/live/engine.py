"""The engine that a model in memory is wrapped by, as fields of a setup: DDP, FSDP, FSDP2, DeepSpeed, accelerate's autocast.

What each wrapper was told is read off itself (torch 2.13: ``nn/parallel/distributed.py``, ``distributed/fsdp/fully_sharded_data_parallel.py``,
``distributed/fsdp/_fully_shard/_fsdp_state.py`` and ``_fsdp_param_group.py``; DeepSpeed 0.19.8: ``runtime/config.py``, whose ``_param_dict`` is the file;
accelerate 1.15: ``accelerator.py``, ``prepare_model``). Nothing is imported for it.
"""

import sys
from collections.abc import Mapping
from typing import Any

from memplan.live.model import wrappers
from memplan.sources.about_models.plain import plain
from memplan.sources.deepspeed_config import deepspeed_fields
from memplan.training.precision import Precision

SOURCE = "the engine's configuration"
_HALVES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}


def engine_fields(model: Any, *, num_gpus: int, given: Mapping[str, object]) -> dict[str, Any]:
    """The fields that the wrappers say; ``given`` are those that are known besides.

    Raises ``ConfigError`` for settings of DeepSpeed's that are not modelled.
    """
    found: dict[str, Any] = {}
    for each in wrappers(model):
        name = type(each).__name__
        if name == "DistributedDataParallel":
            found |= _ddp(each)
        elif name == "DeepSpeedEngine":
            found |= _deepspeed(each, {**given, "num_gpus": num_gpus})
        elif name == "FullyShardedDataParallel":
            found |= _fsdp1(each)
        elif hasattr(each, "_get_fsdp_state"):
            found |= _fsdp2(each)
        if hasattr(each, "_original_forward") and "precision" not in found:
            found |= _autocast()
    return found or ({"engine": "ddp"} if num_gpus > 1 else {})


def _ddp(wrapper: Any) -> dict[str, Any]:
    """torch's DDP; buckets of another size than the usual one are named in MiB."""
    options: dict[str, Any] = {}
    if getattr(wrapper, "gradient_as_bucket_view", False):
        options["gradient_as_bucket_view"] = True
    cap = getattr(wrapper, "bucket_bytes_cap", None)
    if cap is not None and not getattr(wrapper, "bucket_bytes_cap_default", True):
        options["bucket_cap_mb"] = cap / 2**20
    return {"engine": "ddp", **_options(options)}


def _options(options: dict[str, Any]) -> dict[str, Any]:
    return {"engine_options": options} if options else {}


def _fsdp2(model: Any) -> dict[str, Any]:
    """``fully_shard``: mesh, formats and what stays gathered are those of the layers' groups."""
    units = {
        name: each
        for name, each in model.named_modules()
        if getattr(_state(each), "_fsdp_param_groups", None)
    }
    inner = next((each for name, each in units.items() if name), model)
    group = _state(inner)._fsdp_param_groups[0]
    policy, mesh = group.mp_policy, group.mesh_info
    replicas = int(mesh.replicate_mesh_size) if hasattr(mesh, "replicate_mesh_size") else 1
    keeps = group.post_forward_mesh_info is None
    options: dict[str, Any] = {"reduce_dtype": _format(policy.reduce_dtype)}
    if replicas > 1:
        options["data_parallel_replicate_degree"] = replicas
    if any(name.endswith(("embed_tokens", "wte")) for name in units):
        options["wrapping"] = "accelerate"
    if not keeps and _state(model)._auto_reshard_after_forward:
        options["reshard_after_forward"] = "auto"
    on_host = type(group.offload_policy).__name__ == "CPUOffloadPolicy"
    strategy = "hybrid" if replicas > 1 else "shard_grad_op" if keeps else "full_shard"
    if replicas > 1 and keeps:
        options["reshard_after_forward"] = False
    return {
        "engine": "fsdp", "fsdp_strategy": strategy, "precision": _sharded_precision(policy.param_dtype, model),
        **({"offload_optimizer": "cpu", "offload_param": "cpu"} if on_host else {}),
        **_options({key: each for key, each in options.items() if each is not None}),
    }  # fmt: skip


def _state(module: Any) -> Any:
    return module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None


def _format(dtype: Any) -> str | None:
    return (
        None
        if dtype is None
        else {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(
            str(dtype).removeprefix("torch.")
        )
    )


def _sharded_precision(compute: Any, model: Any) -> str:
    """How it trains: in the shards' own format, or in another that they are cast to when they are gathered."""
    held = str(next(iter(model.parameters())).dtype)
    cast = _HALVES.get(str(compute))
    if cast is not None and str(compute) != held:
        return f"{cast}-mixed"
    return _HALVES.get(held, Precision.FP32.value)


def _fsdp1(wrapper: Any) -> dict[str, Any]:
    """torch's first FSDP."""
    strategy = str(wrapper.sharding_strategy.name).lower()
    mixed = wrapper.mixed_precision
    options: dict[str, Any] = {"use_orig_params": bool(wrapper._use_orig_params)}
    if mixed.reduce_dtype is not None:
        options["reduce_dtype"] = _format(mixed.reduce_dtype)
    if getattr(wrapper.cpu_offload, "offload_params", False):
        return {
            "engine": "fsdp1",
            "offload_optimizer": "cpu",
            "offload_param": "cpu",
            **_options(options),
        }
    name = "hybrid" if strategy.startswith(("hybrid", "_hybrid")) else strategy
    return {
        "engine": "fsdp1", "fsdp_strategy": name, "precision": _sharded_precision(mixed.param_dtype, wrapper),
        **_options(options),
    }  # fmt: skip


def _deepspeed(engine: Any, given: Mapping[str, object]) -> dict[str, Any]:
    """DeepSpeed's engine: the file that it was given, and whether weights were made in their parts."""
    config = plain(engine._config._param_dict)
    client = "optimizer" in config
    known = {
        key: value
        for key, value in given.items()
        if key != "precision" and not (client and key == "optimizer")
    }
    fields: dict[str, Any] = dict(deepspeed_fields(config, known, source=SOURCE).fields)
    if str(fields.get("zero_stage")) in ("3", "ZeroStage.PARAMETERS"):
        made = sys.modules.get("transformers.integrations.deepspeed")
        in_parts = made is not None and bool(made.is_deepspeed_zero3_enabled())
        options = dict(fields.get("engine_options") or {})
        fields["engine_options"] = {"zero_init": in_parts, **options}
    return {"engine": "deepspeed", **fields}


def _autocast() -> dict[str, Any]:
    """accelerate's: the forward pass under autocast, and outputs cast to fp32."""
    module = sys.modules.get("accelerate.state")
    shared = getattr(getattr(module, "AcceleratorState", None), "_shared_state", None) or {}
    half = str(shared.get("_mixed_precision", "no"))
    return {"precision": f"{half}-amp", "upcast_outputs": True} if half in ("bf16", "fp16") else {}
