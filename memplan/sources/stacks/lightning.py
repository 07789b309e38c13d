"""Lightning's YAML (``LightningCLI``): the arguments of its ``Trainer``; the model is the user's own class."""

from collections.abc import Mapping

from memplan.sources.stacks.found import Found, of_given
from memplan.sources.stacks.keys import Keys
from memplan.sources.stacks.optimizer import add_named_optimizer

NAME = "Lightning"

_HALF = {"ddp": "amp", "fsdp": "mixed", "fsdp1": "mixed", "deepspeed": "master"}
_ENGINES = {
    "auto": "ddp", "ddp": "ddp", "ddp_find_unused_parameters_true": "ddp", "fsdp": "fsdp1",
    "fsdp_cpu_offload": "fsdp1", "deepspeed": "deepspeed", "deepspeed_stage_1": "deepspeed",
    "deepspeed_stage_2": "deepspeed", "deepspeed_stage_3": "deepspeed",
    "deepspeed_stage_2_offload": "deepspeed", "deepspeed_stage_3_offload": "deepspeed",
    "ModelParallelStrategy": "fsdp", "FSDPStrategy": "fsdp1", "DDPStrategy": "ddp",
    "DeepSpeedStrategy": "deepspeed",
}  # fmt: skip


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether a trainer stands beside a model or data that are classes."""
    trainer, model = values.get("trainer"), values.get("model")
    return isinstance(trainer, Mapping) and (
        "seed_everything" in values
        or (isinstance(model, Mapping) and bool({"class_path", "init_args"} & model.keys()))
    )


def preset_for(_values: Mapping[str, object]) -> str:
    """It has one set of defaults."""
    return "lightning"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    _read_strategy(keys, found, given)
    _read_precision(keys, found)
    _read_gpus(keys, found)
    found.fields["gradient_accumulation_steps"] = keys.count("trainer.accumulate_grad_batches") or 1
    found.fields["micro_batch_size"] = keys.count("data.init_args.batch_size") or 1
    for key in ("model.init_args.model_name_or_path", "model.init_args.model_name"):
        found.model = found.model or keys.text(key)
    length = keys.count("data.init_args.max_length") or keys.count("data.init_args.max_seq_length")
    found.fields["seq_len"] = length
    add_named_optimizer(keys, "optimizer.class_path", found, given)


def _read_strategy(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    whole = keys.text("trainer.strategy.class_path") or keys.text("trainer.strategy") or "auto"
    word = whole.rpartition(".")[2]
    if word not in _ENGINES:
        keys.refuse(
            "trainer.strategy", f"{whole!r:.50} is not modelled; ddp, fsdp and deepspeed are"
        )
    engine = of_given(given, "engine") or _ENGINES[word]
    found.fields["engine"] = engine
    if engine != "deepspeed":
        if word == "fsdp_cpu_offload":
            found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
        return
    stage = keys.take("trainer.strategy.init_args.stage")
    digits = [int(part) for part in word.split("_") if part.isdecimal()]
    found.fields["zero_stage"] = stage if isinstance(stage, int) else (digits or [2])[0]
    if word.endswith("offload"):
        found.fields["offload_optimizer"] = "cpu"


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
