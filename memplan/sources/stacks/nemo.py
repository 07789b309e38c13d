"""NeMo AutoModel's YAML: Hugging Face models under FSDP2, components by their import paths.

NeMo's older files, of models written for Megatron, are another program's and are refused.
"""

from collections.abc import Mapping

from memplan.sources.stacks.found import Found
from memplan.sources.stacks.keys import Keys
from memplan.sources.stacks.optimizer import add_named_optimizer
from memplan.sources.stacks.wording import lora

NAME = "NeMo AutoModel"

_STRATEGIES = {"fsdp2": "fsdp", "ddp": "ddp"}
_LOSSES = {
    "MaskedCrossEntropy": None, "FusedLinearCrossEntropy": "fused_linear",
    "ChunkedCrossEntropy": "chunked", "TEParallelCrossEntropy": None,
}  # fmt: skip
_DEGREES = {
    "distributed.tp_size": "tensor_parallel", "distributed.cp_size": "context_parallel",
    "distributed.pp_size": "pipeline_parallel", "distributed.ep_size": "expert_parallel",
}  # fmt: skip
_ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash3",
}  # fmt: skip
_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "auto": "bf16", "float32": "fp32", "fp32": "fp32",
    "torch.bfloat16": "bf16", "torch.float32": "fp32",
}  # fmt: skip


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether its recipe's sections are there, or an older NeMo's."""
    trainer, model = values.get("trainer"), values.get("model")
    is_older = isinstance(trainer, Mapping) and isinstance(model, Mapping) and (
        "micro_batch_size" in model or "megatron_amp_O2" in model
    )  # fmt: skip
    return "step_scheduler" in values or is_older


def preset_for(_values: Mapping[str, object]) -> str:
    """It has one set of defaults."""
    return "nemo"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    if keys.has("trainer"):
        keys.refuse("trainer", "NeMo's Megatron models are not modelled; AutoModel's files are")
    named = keys.text("model.config.pretrained_model_name_or_path")
    named = named or keys.text("model.config.name_or_path") or keys.text("model.config")
    found.model = keys.text("model.pretrained_model_name_or_path") or named
    found.fields["engine"] = keys.choice("distributed.strategy", _STRATEGIES)
    for key, field in _DEGREES.items():
        degree = keys.take(key)
        if isinstance(degree, int) and degree > 1:
            found.fields[field] = degree
    if keys.flag("distributed.sequence_parallel") and "tensor_parallel" in found.fields:
        found.fields["sequence_parallel"] = True
    _read_sizes(keys, found, given)
    dtype = keys.choice("model.torch_dtype", _DTYPES)
    is_sharded = found.fields["engine"] == "fsdp"
    wide = "bf16-mixed" if is_sharded else "bf16-amp"
    found.fields["precision"] = "bf16" if dtype == "bf16" else wide
    found.fields["checkpointing"] = (
        "full" if keys.flag("distributed.activation_checkpointing") else "none"
    )
    found.fields["attention"] = keys.choice("model.attn_implementation", _ATTENTION)
    found.fields["compile"] = "model" if keys.flag("compile.enabled") else "none"
    loss = (keys.text("loss_fn._target_") or "").rpartition(".")[2]
    if _LOSSES.get(loss):
        found.fields["loss"] = _LOSSES[loss]
    form = "fused" if keys.flag("optimizer.fused") else "foreach"
    add_named_optimizer(keys, "optimizer._target_", found, given, form=form)
    _read_adapter(keys, found)
    if keys.flag("fp8.enabled"):
        recipe = keys.text("fp8.recipe_name") or "tensorwise"
        found.fields["fp8"] = f"torchao-{recipe.replace('_', '-')}"
    if is_sharded and keys.take("distributed.reshard_after_forward") is False:
        found.options["reshard_after_forward"] = False
    replicas = keys.take("distributed.dp_replicate_size")
    if isinstance(replicas, int) and replicas > 1:
        found.options["data_parallel_replicate_degree"] = replicas


def _read_sizes(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    micro = keys.count("step_scheduler.local_batch_size") or 1
    whole = keys.count("step_scheduler.global_batch_size")
    found.fields["micro_batch_size"] = micro
    gpus = given.get("num_gpus", 1)
    assert isinstance(gpus, int)
    for field in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        degree = found.fields.get(field, 1)
        assert isinstance(degree, int)
        gpus = max(1, gpus // degree)
    if whole is not None:
        found.fields["gradient_accumulation_steps"] = max(1, whole // (micro * gpus))
    packed = keys.take("packed_sequence.packed_sequence_size")
    length = keys.count("dataset.seq_length") or keys.count("dataset.seq_len")
    if isinstance(packed, int) and packed > 0:
        found.fields["packing"] = "documents"
        length = packed
    found.fields["seq_len"] = length
    if length is None and "seq_len" not in given:
        found.notes.append("dataset.seq_length is not set: sequences are not cut; give a length")


def _read_adapter(keys: Keys, found: Found) -> None:
    rank, alpha = keys.count("peft.dim"), keys.number("peft.alpha")
    dropout, names = keys.number("peft.dropout"), keys.names("peft.target_modules")
    linear = keys.flag("peft.match_all_linear")
    dora = keys.flag("peft.use_dora")
    if keys.has("peft"):
        found.fields["adapter"] = lora(
            rank=rank or 8, alpha=alpha, dropout=dropout, dora=dora, dtype="bf16",
            targets="all-linear" if linear or not names else _pattern(names),
        )  # fmt: skip
    else:
        keys.taken -= {each for each in keys.taken if each.startswith("peft.")}
    if keys.has("quantization"):
        if keys.flag("quantization.load_in_4bit"):
            found.fields["quantize"] = keys.text("quantization.bnb_4bit_quant_type") or "nf4"
            found.quantization["double_quant"] = keys.flag("quantization.bnb_4bit_use_double_quant")
        elif keys.flag("quantization.load_in_8bit"):
            found.fields["quantize"] = "int8"


def _pattern(names: tuple[str, ...]) -> tuple[str, ...] | str:
    """Names of modules; with wildcards one pattern for all.

    >>> _pattern(("*.q_proj", "*mlp*"))
    '(.*[.]q_proj)|(.*mlp.*)'
    """
    if not any("*" in name for name in names):
        return names
    parts = (name.replace(".", "[.]").replace("*", ".*") for name in names)
    return "|".join(f"({part})" for part in parts)
