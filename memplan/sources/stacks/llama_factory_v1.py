"""LLaMA-Factory's second version (``src/llamafactory/v1``): other keys, and plugins that are named in sections.

The model is loaded in its checkpoint's dtype (``core/model_engine.py``, ``dtype="auto"``), which is bf16, and no autocast
runs: FSDP2's policy casts (``plugins/trainer_plugins/distributed/fsdp2.py``).
"""

from collections.abc import Mapping

from memplan.sources.stacks.common.found import DeviceMap, Found, micro_batches, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import num_layers
from memplan.sources.stacks.common.trained_layers import trained_layers
from memplan.sources.stacks.common.wording import lora
from memplan.sources.stacks.shipped import point_at_shipped
from memplan.training.adapters import LINEAR_NAMES

NAME = "LLaMA-Factory v1"

_MARKS = frozenset({
    "train_dataset", "dist_config", "peft_config", "kernel_config", "micro_batch_size", "optim_config",
})  # fmt: skip
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash"}
_KERNELS = {"auto": None, "liger_kernel": "liger"}
_ENGINES = {"fsdp2": "fsdp", "deepspeed": "deepspeed"}
_BATCHES = {
    "normal": None, "padding_free": "padding_free", "dynamic_batching": None,
    "dynamic_padding_free": "padding_free",
}  # fmt: skip
_JOBS = {"sigmoid": "dpo", "orpo": "orpo", "simpo": "simpo"}


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether a model's name stands beside its sections."""
    named = isinstance(values.get("model"), str)
    return named and ("model_class" in values or len(values.keys() & _MARKS) > 1)


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "llama-factory-v1"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    found.model = keys.model("model")
    # core/model_engine.py, ``_init_model``
    found.device_map = DeviceMap.WHOLE
    _read_sizes(keys, found, given)
    _read_engine(keys, found, given)
    _read_tuning(keys, found)
    kernel = keys.choice("flash_attn", _ATTENTION)
    if kernel == "flash" and found.fields.get("precision") == "fp32":
        kernel = "sdpa"
        found.notes.append("flash attention takes 16 bits, cast there and back: counted as sdpa")
    if kernel is not None:
        found.fields["attention"] = kernel
    kernels = keys.choice("kernel_config.name", _KERNELS)
    if kernels is not None:
        found.fields["kernels"] = kernels
    name = (keys.text("optim_config.name") or "adamw").lower()
    if name not in ("adamw", "muon"):
        keys.refuse("optim_config.name", f"{name!r:.40} is not modelled; muon is")
    found.fields["optimizer"] = "muon" if name == "muon" else "adamw-foreach"
    if keys.has("pref_loss"):
        found.fields["job"] = keys.choice("pref_loss", _JOBS)
    elif given.get("job") is None:
        found.notes.append(
            "its command says what is trained for (llamafactory-cli sft, dpo or rm): counted as sft; give job"
        )


def _read_sizes(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    micro = keys.count("micro_batch_size") or 1
    whole = keys.count("global_batch_size")
    found.fields["micro_batch_size"] = micro
    contexts = keys.count("cp_size") or 1
    gpus = given.get("num_gpus")
    ranks = max(1, (gpus if isinstance(gpus, int) else 1) // contexts)
    if whole is not None:
        found.fields["gradient_accumulation_steps"] = micro_batches(
            found, batch=whole, micro=micro, ranks=ranks, stack=NAME
        )
    mode = keys.text("cp_mode") or "ulysses"
    if contexts > 1:
        if mode != "ulysses":
            keys.refuse("cp_mode", f"{mode!r:.40} is not modelled; ulysses is")
        found.fields |= {"context_parallel": contexts, "context_parallel_kind": "all-to-all"}
    length = keys.count("cutoff_len")
    found.fields["seq_len"] = length
    packing = keys.choice("batching_strategy", _BATCHES)
    if packing is not None:
        found.fields["packing"] = packing
    if "seq_len" not in given:
        found.notes.append(
            f"cutoff_len {length} is taken for the length of every sequence, an upper bound"
        )


def _read_engine(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Without ``dist_config`` several GPUs are DDP's."""
    word = keys.text("dist_config.name")
    config = "dist_config.config_file"
    halves = keys.flag("bf16")
    reshard, offload = (
        keys.take("dist_config.reshard_after_forward"),
        keys.flag("dist_config.offload_params"),
    )
    checkpointed = keys.flag("enable_activation_checkpointing")
    replicas = keys.count("mp_replicate_size")
    # core/base_trainer.py, ``compute_log_probs``: logits in fp32, and a copy without the last, under every engine.
    found.fields["loss"] = "shifted"
    if word == "deepspeed":
        point_at_shipped(keys, config, "llama_factory")
        found.arguments |= {
            "deepspeed": keys.section(config) or keys.take(config), "bf16": halves,
            "per_device_train_batch_size": found.fields["micro_batch_size"],
            "gradient_accumulation_steps": found.fields.get("gradient_accumulation_steps", 1),
            "gradient_checkpointing": checkpointed,
        }  # fmt: skip
        return
    if word not in (None, "fsdp2"):
        keys.refuse("dist_config.name", f"{word!r:.40} is not modelled; fsdp2 and deepspeed are")
    engine = of_given(given, "engine") or ("fsdp" if word == "fsdp2" else "ddp")
    found.fields |= {
        "engine": engine, "precision": "bf16", "checkpointing": "full" if checkpointed else "none",
    }  # fmt: skip
    if engine != "fsdp":
        return
    if not halves:
        found.fields["precision"] = "fp32"
        found.notes.append("bf16 false: FSDP2 computes in fp32; its shards are counted in fp32 too")
    # core/base_trainer.py, ``fit``: FSDP2's own way, which reduces each micro-batch's gradients
    found.options["sync_each_batch"] = True
    if reshard is False:
        found.options["reshard_after_forward"] = False
    if offload:
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    if replicas not in (None, 1):
        found.options["data_parallel_replicate_degree"] = replicas


def _read_tuning(keys: Keys, found: Found) -> None:
    kind = keys.text("peft_config.name")
    rank, alpha = keys.count("peft_config.r"), keys.number("peft_config.lora_alpha")
    dropout, targets = (
        keys.number("peft_config.lora_dropout"),
        keys.names("peft_config.target_modules"),
    )
    saved = keys.names("peft_config.modules_to_save")
    rslora, dora = keys.flag("peft_config.use_rslora"), keys.flag("peft_config.use_dora")
    bits = keys.take("quant_config.quantization_bit")
    packed = keys.text("quant_config.name")
    kind_of_four = keys.text("quant_config.quantization_type") or "nf4"
    double = keys.flag("quant_config.double_quantization")
    if packed is not None and (bits is not None or packed == "bnb"):
        found.fields["quantize"] = "int8" if bits == 8 else kind_of_four
        if bits != 8:
            found.quantization["double_quant"] = double
    if kind == "freeze":
        _read_frozen(keys, found)
    elif kind == "lora":
        found.fields["adapter"] = lora(
            rank=rank or 8, alpha=alpha, dropout=dropout, modules_to_save=saved, rslora=rslora,
            dora=dora, targets=LINEAR_NAMES if targets in (("all",), ()) else targets,
        )  # fmt: skip
    elif kind is not None:
        keys.refuse("peft_config.name", f"{kind!r:.40} is not modelled; lora and freeze are")


def _read_frozen(keys: Keys, found: Found) -> None:
    """Some layers are trained, cast to fp32 before they are sharded unless it says otherwise."""
    layers = keys.take("peft_config.freeze_trainable_layers")
    modules = keys.names("peft_config.freeze_trainable_modules")
    more = keys.names("peft_config.freeze_extra_modules")
    count = None if found.model is None else num_layers(found.model)
    if not isinstance(layers, int) or isinstance(layers, bool) or layers == 0:
        keys.refuse("peft_config.freeze_trainable_layers", f"write a number, not {layers!r:.40}")
    if count is None:
        found.notes.append(
            f"peft_config.freeze_trainable_layers {layers}: counted as if all were trained, an upper bound; "
            "freeze says which parts are not"
        )
        return
    found.fields["freeze"] = trained_layers(count, layers, modules=modules, extra=more)
    if keys.take("peft_config.cast_trainable_params_to_fp32") is not False:
        found.left_out.append(
            "peft_config.cast_trainable_params_to_fp32 (trained weights and their states in fp32)"
        )
