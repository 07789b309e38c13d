"""Lightning's YAML (``LightningCLI``): the arguments of its ``Trainer``; the model is the user's own class."""

from collections.abc import Mapping

from memplan.sources.stacks.common.found import Found, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.optimizer import add_named_optimizer

NAME = "Lightning"
"""Forward, ``zero_grad`` and backward are one closure of the optimizer's (lightning 2.6, ``loops/optimization/automatic.py``, ``Closure.closure``)."""

_HALF = {"ddp": "amp", "fsdp": "mixed", "fsdp1": "mixed", "deepspeed": "master"}
_ENGINES = {
    "auto": "ddp", "ddp": "ddp", "ddp_spawn": "ddp", "ddp_fork": "ddp", "ddp_notebook": "ddp",
    "ddp_find_unused_parameters_true": "ddp", "ddp_find_unused_parameters_false": "ddp",
    "fsdp": "fsdp1", "fsdp_cpu_offload": "fsdp1", "deepspeed": "deepspeed",
    "deepspeed_stage_1": "deepspeed", "deepspeed_stage_1_offload": "deepspeed",
    "deepspeed_stage_2": "deepspeed", "deepspeed_stage_2_offload": "deepspeed",
    "deepspeed_stage_3": "deepspeed", "deepspeed_stage_3_offload": "deepspeed",
    "deepspeed_stage_3_offload_nvme": "deepspeed", "single_device": "ddp",
    "SingleDeviceStrategy": "ddp", "ModelParallelStrategy": "fsdp", "FSDPStrategy": "fsdp1",
    "DDPStrategy": "ddp", "DeepSpeedStrategy": "deepspeed",
}  # fmt: skip
_SHARDING = {
    "full_shard": "full_shard", "shard_grad_op": "shard_grad_op", "no_shard": "no_shard",
    "hybrid_shard": "hybrid",
}  # fmt: skip
_STATE_DICTS = {"full": "full_state_dict", "sharded": "sharded_state_dict"}
_FSDP_FLAGS = (
    "trainer.strategy.init_args.use_orig_params", "trainer.strategy.init_args.forward_prefetch",
    "trainer.strategy.init_args.limit_all_gathers", "trainer.strategy.init_args.sync_module_states",
)  # fmt: skip
"""Torch's own arguments, which ``FSDPStrategy`` hands on."""
_BUCKETS = (
    "trainer.strategy.init_args.allgather_bucket_size",
    "trainer.strategy.init_args.reduce_bucket_size", "trainer.strategy.init_args.sub_group_size",
)  # fmt: skip
"""What ``DeepSpeedStrategy`` writes into the configuration that it makes."""
_SWITCHES = (
    "trainer.strategy.init_args.overlap_comm", "trainer.strategy.init_args.contiguous_gradients",
)  # fmt: skip
ARGS = "trainer.strategy.init_args"


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether a trainer stands beside a model or data that are classes."""
    trainer, model = values.get("trainer"), values.get("model")
    return isinstance(trainer, Mapping) and (
        "seed_everything" in values
        or (isinstance(model, Mapping) and bool({"class_path", "init_args"} & model.keys()))
    )


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "lightning"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    _read_strategy(keys, found, given)
    if "precision" not in found.fields:
        _read_precision(keys, found)
    else:
        keys.text("trainer.precision")
    _read_gpus(keys, found)
    if found.fields["engine"] in ("ddp", "fsdp"):
        found.fields["gradients_held"] = True
    found.fields["gradient_accumulation_steps"] = keys.count("trainer.accumulate_grad_batches") or 1
    size = keys.count("data.init_args.batch_size")
    found.fields["micro_batch_size"] = size or found.fields.get("micro_batch_size", 1)
    for key in ("model.init_args.model_name_or_path", "model.init_args.model_name"):
        found.model = found.model or keys.text(key)
    length = keys.count("data.init_args.max_length") or keys.count("data.init_args.max_seq_length")
    found.fields["seq_len"] = length
    _read_validation(keys, found)
    add_named_optimizer(keys, "optimizer.class_path", found, given)


def _read_validation(keys: Keys, found: Found) -> None:
    """Batches between epochs where the data have a size for them (Lightning's own ``GLUEDataModule``).

    ``limit_val_batches: 0`` runs none. Whether the user's own class has a ``validation_step``, no file says.
    """
    size = keys.count("data.init_args.eval_batch_size")
    if keys.take("trainer.limit_val_batches") in (0, "0"):
        return
    if size is not None:
        found.fields["evaluation"] = size
    else:
        found.notes.append(
            "validation runs in the model's own class, and no key says its batch: it is not counted"
        )


def _read_strategy(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    whole = keys.text("trainer.strategy.class_path") or keys.text("trainer.strategy") or "auto"
    word = whole.rpartition(".")[2]
    if word not in _ENGINES:
        keys.refuse(
            "trainer.strategy", f"{whole!r:.50} is not modelled; ddp, fsdp and deepspeed are"
        )
    engine = of_given(given, "engine") or _ENGINES[word]
    found.fields["engine"] = engine
    if engine == "deepspeed":
        _read_deepspeed(keys, found, given, word)
    elif engine == "fsdp1":
        _read_fsdp(keys, found, word)
    elif engine == "fsdp":
        degree = keys.take(f"{ARGS}.tensor_parallel_size")
        if isinstance(degree, int) and degree > 1:
            found.fields["tensor_parallel"] = degree
        keys.take(f"{ARGS}.data_parallel_size")


def _read_fsdp(keys: Keys, found: Found, word: str) -> None:
    """Gradients are reduced at every micro-batch: ``block_backward_sync`` is DDP's."""
    if word == "fsdp_cpu_offload" or keys.on(f"{ARGS}.cpu_offload"):
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    sharding = (keys.text(f"{ARGS}.sharding_strategy") or "full_shard").lower().rpartition(".")[2]
    if sharding not in _SHARDING:
        keys.refuse(f"{ARGS}.sharding_strategy", f"{sharding!r:.40} is not modelled")
    found.fields["fsdp_strategy"] = _SHARDING[sharding]
    asked = [
        keys.on(f"{ARGS}.activation_checkpointing"),
        keys.on(f"{ARGS}.activation_checkpointing_policy"),
    ]
    if any(asked):
        found.fields["checkpointing"] = "full"
    found.options["sync_each_batch"] = True
    found.options["use_orig_params"] = True
    for key in _FSDP_FLAGS:
        if key in keys.values:
            found.options[key.rpartition(".")[2]] = keys.flag(key)
    kind = keys.choice(f"{ARGS}.state_dict_type", _STATE_DICTS)
    if kind is not None:
        found.options["state_dict_type"] = kind
    if not keys.on(f"{ARGS}.auto_wrap_policy"):
        found.notes.append(
            "no auto_wrap_policy: counted with a unit for each layer, as configure_model would wrap them"
        )


def _read_deepspeed(keys: Keys, found: Found, given: Mapping[str, object], word: str) -> None:
    """What ``DeepSpeedStrategy`` makes of its arguments, or the file that it is told."""
    named = keys.values.get(f"{ARGS}.config")
    if isinstance(named, str):
        _read_config(keys, found, given)
        return
    stage = keys.take(f"{ARGS}.stage")
    digits = [int(part) for part in word.split("_") if part.isdecimal()]
    found.fields["zero_stage"] = stage if isinstance(stage, int) else (digits or [2])[0]
    place = "nvme" if word.endswith("nvme") else "cpu"
    device = keys.text(f"{ARGS}.offload_optimizer_device") or place
    if "offload" in word or keys.flag(f"{ARGS}.offload_optimizer"):
        found.fields["offload_optimizer"] = device
    device = keys.text(f"{ARGS}.offload_params_device") or place
    if "stage_3_offload" in word or keys.flag(f"{ARGS}.offload_parameters"):
        found.fields["offload_param"] = device
    if found.fields["zero_stage"]:
        for key in _BUCKETS:
            size = keys.count(key)
            if size is not None and (key != _BUCKETS[2] or found.fields["zero_stage"] == ZERO_3):
                found.options[key.rpartition(".")[2]] = size
        for key in _SWITCHES:
            found.options[key.rpartition(".")[2]] = keys.flag(key)


ZERO_3 = 3


def _read_config(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    from memplan.sources.deepspeed_config import deepspeed_fields
    from memplan.sources.files import read_mapping

    path = keys.folder / (keys.text(f"{ARGS}.config") or "")
    fields = dict(deepspeed_fields(read_mapping(path), given, source=str(path)).fields)
    found.options.update(dict(fields.pop("engine_options", {})))  # type: ignore[call-overload]
    found.fields |= fields


def _read_precision(keys: Keys, found: Found) -> None:
    word = (keys.text("trainer.precision") or "32-true").lower()
    half = word.removesuffix("-mixed").removesuffix("-true")
    engine = str(found.fields["engine"])
    if half in ("32", "64"):
        found.fields["precision"] = "fp32"
        if half == "64":
            keys.refuse("trainer.precision", "64 bits are not modelled; use 32-true")
    elif half in ("bf16", "16"):
        name = "bf16" if half == "bf16" else "fp16"
        is_pure = word.endswith("-true") and name == "bf16" and engine != "deepspeed"
        found.fields["precision"] = name if is_pure else f"{name}-{_HALF[engine]}"
    else:
        keys.refuse(
            "trainer.precision", f"{word!r:.40} is not modelled; 32-true, bf16-mixed, ... are"
        )


def _read_gpus(keys: Keys, found: Found) -> None:
    devices, nodes = keys.take("trainer.devices"), keys.count("trainer.num_nodes") or 1
    each = len(devices) if isinstance(devices, list) else devices
    if isinstance(each, str) and each.isdecimal():
        each = int(each)
    if isinstance(each, int) and not isinstance(each, bool) and each > 0:
        found.fields["num_gpus"] = each * nodes
        found.fields["num_nodes"] = nodes
