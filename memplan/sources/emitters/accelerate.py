"""An accelerate (1.15) configuration with FSDP, for ``accelerate launch --config_file``.

accelerate knows one way to wrap a model, reduces gradients in the format they are computed in, and
syncs at the last micro-batch only: the result's ``setup`` says what it will run. Micro-batch,
accumulation and sequence length are the training script's.
"""

from collections.abc import Mapping
from dataclasses import replace

from memplan.memory.fsdp1.options import Fsdp1Options
from memplan.memory.fsdp2.options import Fsdp2Options, InitDevice
from memplan.sources.accelerate_config import accelerate_fields
from memplan.sources.emitters.emitted import Emitted, refuse
from memplan.sources.trainer.fsdp import accelerate_values
from memplan.training.choices import FsdpStrategy, Offload, Recomputation, checkpointing_text
from memplan.training.compilation import Compilation
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup

_MIXED = {
    Precision.BF16_MIXED: "bf16", Precision.FP16_MIXED: "fp16", Precision.FP32: "no",
    Precision.BF16_AMP: "bf16", Precision.FP16_AMP: "fp16",
}  # fmt: skip
_STRATEGIES = {
    FsdpStrategy.FULL_SHARD: "FULL_SHARD", FsdpStrategy.SHARD_GRAD_OP: "SHARD_GRAD_OP",
    FsdpStrategy.HYBRID: "HYBRID_SHARD", FsdpStrategy.NO_SHARD: "NO_SHARD",
}  # fmt: skip


def emit(setup: TrainingSetup) -> Emitted:
    """Write the configuration of a setup that accelerate runs with FSDP, with DDP or on one GPU."""
    is_sharded = setup.chosen_engine is not Engine.DDP
    values: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _distributed_type(setup),
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": _mixed_precision(setup),
        "num_machines": setup.nodes,
        "num_processes": setup.num_gpus,
        **(_parallelism(setup) if is_sharded else {}),
        **_compilation(setup),
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if is_sharded:
        values["fsdp_config"] = {f"fsdp_{key}": value for key, value in _fsdp_config(setup).items()}
    elif setup.tensor_parallel * setup.context_parallel * setup.pipeline_parallel > 1:
        msg = "accelerate splits and shares with FSDP2 alone: name the engine fsdp"
        raise refuse(msg)
    return Emitted(values=values, setup=setup, notes=_own_ways(setup, values))


def _distributed_type(setup: TrainingSetup) -> str:
    engine = setup.chosen_engine
    if engine not in (Engine.DDP, Engine.FSDP, Engine.FSDP1):
        msg = f"an accelerate file is for the engines ddp, fsdp and fsdp1, not {engine.value}"
        raise refuse(msg)
    if engine is Engine.DDP:
        return "MULTI_GPU" if setup.num_gpus > 1 else "NO"
    return "FSDP"


def _own_ways(setup: TrainingSetup, values: Mapping[str, object]) -> tuple[str, ...]:
    """What accelerate does its own way, whatever the script asks."""
    if setup.chosen_engine is Engine.DDP:
        return ()
    found = dict(as_run(setup, values).engine_options)
    own = ", ".join(
        f"{name} {getattr(found[name], 'value', found[name])}" for name in _RUN_SO if name in found
    )
    return (f"accelerate runs it its own way, whatever is given beside the file: {own}",)


_RUN_SO = ("wrapping", "autocast", "sync_each_batch")


def _compilation(setup: TrainingSetup) -> dict[str, object]:
    """What torch.compile is given, where it is used."""
    if setup.compile is Compilation.NONE:
        return {}
    section: dict[str, object] = {
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": "default",
        "dynamo_use_regional_compilation": setup.compile is Compilation.LAYER,
    }
    return {"dynamo_config": section}


def fsdp_arguments(setup: TrainingSetup) -> Emitted:
    """The same as the training arguments ``fsdp`` and ``fsdp_config`` (transformers 5.23)."""
    if _parallelism(setup):
        msg = "training arguments cannot say how often a sharded model is replicated or split"
        raise refuse(msg)
    config = _fsdp_config(setup)
    strategy = config.pop("sharding_strategy", None)
    if strategy is not None:
        config["reshard_after_forward"] = str(strategy).lower()
    if config.pop("offload_params"):
        config["cpu_offload"] = True
    values: dict[str, object] = {
        "gradient_checkpointing": False,
        "fsdp": True,
        "fsdp_config": config,
    }
    described = accelerate_values(values, _mixed_precision(setup))
    return Emitted(values=values, setup=as_run(setup, described))


def as_run(setup: TrainingSetup, values: Mapping[str, object]) -> TrainingSetup:
    """The setup that accelerate runs when it is given the values."""
    found = accelerate_fields(values, {}, source="emit").fields
    return replace(setup, **{"upcast_outputs": False, **found})  # type: ignore[arg-type]


def _fsdp_config(setup: TrainingSetup) -> dict[str, object]:
    engine = setup.chosen_engine
    if engine not in (Engine.FSDP, Engine.FSDP1):
        msg = f"an accelerate FSDP file is for the engines fsdp and fsdp1, not {engine.value}"
        raise refuse(msg)
    config: dict[str, object] = {"version": 1 if engine is Engine.FSDP1 else 2}
    strategy = _strategy(setup)
    if engine is Engine.FSDP1:
        config["sharding_strategy"] = _STRATEGIES[strategy]
        own = Fsdp1Options.of(setup)
        config["backward_prefetch"] = own.backward_prefetch.value.upper()
        config["forward_prefetch"] = own.forward_prefetch
        config["use_orig_params"] = own.use_orig_params
        state_dict, device = own.state_dict_type, own.init_device
    else:
        settings = Fsdp2Options.of(setup)
        if settings.reshard_after_forward is not None:
            config["reshard_after_forward"] = settings.reshard_after_forward
        state_dict, device = settings.state_dict_type, settings.init_device
    config["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    config["activation_checkpointing"] = _checkpointing(setup)
    config["offload_params"] = Offload.CPU in (setup.offload_param, setup.offload_optimizer)
    if device in (InitDevice.META, InitDevice.CPU):
        config["cpu_ram_efficient_loading"] = device is InitDevice.META
    config["state_dict_type"] = state_dict.value.upper()
    return config


def _strategy(setup: TrainingSetup) -> FsdpStrategy:
    return setup.fsdp_strategy or FsdpStrategy.FULL_SHARD


def _checkpointing(setup: TrainingSetup) -> bool:
    value = setup.checkpointing
    if value in (Recomputation.NONE, Recomputation.FULL):
        return value is Recomputation.FULL
    shown = checkpointing_text(value)
    msg = f"accelerate checkpoints all layers or none, not {shown}"
    raise refuse(msg)


def _mixed_precision(setup: TrainingSetup) -> str:
    name = _MIXED.get(setup.chosen_precision)
    if name is None:
        known = ", ".join(each.value for each in _MIXED)
        msg = (
            f"accelerate has no precision {setup.chosen_precision.value} with FSDP; it has {known}"
        )
        raise refuse(msg)
    return name


def _parallelism(setup: TrainingSetup) -> dict[str, object]:
    """The section of degrees, where any is above 1."""
    if setup.pipeline_parallel > 1 or setup.expert_parallel > 1:
        msg = "accelerate has no pipeline or expert parallelism"
        raise refuse(msg)
    if setup.sequence_parallel or setup.loss_parallel:
        msg = "accelerate splits layers without sequence_parallel and loss_parallel: leave them out"
        raise refuse(msg)
    replicas = dict(setup.engine_options).get("data_parallel_replicate_degree", 1)
    if setup.fsdp_strategy is FsdpStrategy.HYBRID and setup.chosen_engine is Engine.FSDP:
        replicas = setup.nodes if replicas == 1 else replicas
    degrees = {
        "dp_replicate_size": replicas, "tp_size": setup.tensor_parallel,
        "cp_size": setup.context_parallel,
    }  # fmt: skip
    if all(degree == 1 for degree in degrees.values()):
        return {}
    shards = setup.data_parallel // replicas if isinstance(replicas, int) else 1
    sizes = {**degrees, "dp_shard_size": shards}
    prefix = "parallelism_config_"
    return {"parallelism_config": {f"{prefix}{name}": size for name, size in sizes.items()}}
