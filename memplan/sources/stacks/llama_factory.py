"""LLaMA-Factory's YAML: transformers' training arguments, and its own of four kinds.

Trained parameters are cast to fp32 (``model/adapter.py``) unless ``pure_bf16`` says otherwise; what is
frozen stays in the compute dtype. Checkpointing is on (``model/model_utils/checkpointing.py``).
"""

from collections.abc import Mapping

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.arguments import pass_arguments
from memplan.sources.stacks.found import Found
from memplan.sources.stacks.keys import Keys
from memplan.sources.stacks.shipped import point_at_shipped
from memplan.sources.stacks.wording import lora
from memplan.sources.training_arguments import Loading
from memplan.training.adapters import LINEAR_NAMES

NAME = "LLaMA-Factory"

_MARKS = frozenset({"finetuning_type", "cutoff_len", "template", "stage", "lora_target"})
_JOBS = {
    "pt": None, "sft": None, "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo",
}  # fmt: skip
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash", "fa3": "flash3"}
_OPTIMIZERS = {
    "use_galore": "galore_adamw", "use_apollo": "apollo_adamw", "use_badam": "badam",
    "use_adam_mini": "adam_mini", "use_muon": "muon",
}  # fmt: skip

_FP8 = {"auto": "torchao-tensorwise", "torchao": "torchao-tensorwise", "te": "te-delayed"}
_LOW_RANK = (
    ("use_galore", "galore_rank", "galore_layerwise", "galore_target"),
    ("use_apollo", "apollo_rank", "apollo_layerwise", "apollo_target"),
)


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether its own keys are there beside a model."""
    return "model_name_or_path" in values and bool(values.keys() & _MARKS)


def preset_for(_values: Mapping[str, object]) -> str:
    """It has one set of defaults."""
    return "llama-factory"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    if keys.take("do_train") is False or (keys.has("do_predict") and not keys.has("do_train")):
        keys.refuse("do_train", "this file trains nothing")
    found.model = keys.text("model_name_or_path")
    _read_job(keys, found)
    half = keys.flag("pure_bf16")
    found.arguments["gradient_checkpointing"] = not keys.flag("disable_gradient_checkpointing")
    keys.used |= {"gradient_checkpointing", "template", "dataset", "infer_dtype"}
    _read_tuning(keys, found, half=half)
    _read_kernels(keys, found)
    _read_optimizer(keys, found)
    _read_lengths(keys, found, given)
    if keys.flag("upcast_layernorm"):
        found.notes.append("upcast_layernorm: norms are counted in the compute dtype")
    if keys.flag("upcast_lmhead_output"):
        found.left_out.append("upcast_lmhead_output (the logits in fp32)")
    if keys.on("fp8"):
        found.fields["fp8"] = keys.choice("fp8_backend", _FP8)
    point_at_shipped(keys, "deepspeed", "llama_factory")
    pass_arguments(keys, found, given)
    if half:
        found.arguments["bf16"] = False


def _read_job(keys: Keys, found: Found) -> None:
    """``stage``, and for ``dpo`` the loss: ORPO and SimPO have no reference model."""
    job = keys.choice("stage", _JOBS)
    loss = keys.text("pref_loss")
    if job == "dpo" and loss in ("orpo", "simpo"):
        job = loss
    if job is not None:
        found.fields["job"] = job
    for key in ("ref_model", "reward_model"):
        if keys.on(key):
            found.notes.append(f"{key} is taken to be as large as the model")


def _read_tuning(keys: Keys, found: Found, *, half: bool) -> None:
    """What is trained: everything, some layers, or adapters on a base in the compute dtype."""
    kind = keys.text("finetuning_type") or "lora"
    is_half = keys.take("bf16") is True or half
    if kind == "full":
        found.loading = Loading(half_weights=half)
    elif kind == "freeze":
        _read_frozen(keys, found)
        found.loading = Loading(half_weights=half)
    elif kind == "lora":
        found.loading = Loading(half_weights=is_half)
        found.fields["adapter"] = lora(
            rank=keys.count("lora_rank") or 8,
            alpha=keys.number("lora_alpha") or 2 * (keys.count("lora_rank") or 8),
            dropout=keys.number("lora_dropout"),
            targets=_targets(keys),
            modules_to_save=keys.names("additional_target"),
            rslora=keys.flag("use_rslora"),
            dora=keys.flag("use_dora"),
            dtype="bf16" if half else "fp32",
        )
    else:
        keys.refuse("finetuning_type", f"{kind!r:.40} is not modelled; the nearest that is: lora")
    _read_quantization(keys, found)


def _targets(keys: Keys) -> tuple[str, ...] | str:
    names = keys.names("lora_target")
    return LINEAR_NAMES if names in (("all",), ()) else names


def _read_frozen(keys: Keys, found: Found) -> None:
    """The first or last layers are trained; the embeddings and the head are not."""
    layers = keys.take("freeze_trainable_layers")
    modules = keys.names("freeze_trainable_modules")
    keys.names("freeze_extra_modules")
    keys.flag("use_llama_pro")
    layers = 2 if layers is None else layers
    found.notes.append(
        f"freeze_trainable_layers {layers} of modules {', '.join(modules) or 'all'}: counted as if all "
        "were trained, an upper bound; freeze says which parts are not"
    )


def _read_quantization(keys: Keys, found: Found) -> None:
    bits = keys.count("quantization_bit")
    keys.take("quantization_method")
    if bits is None:
        return
    if bits == 4:
        found.fields["quantize"] = keys.text("quantization_type") or "nf4"
        found.quantization["double_quant"] = keys.flag("double_quantization")
    elif bits == 8:
        found.fields["quantize"] = "int8"
    else:
        keys.refuse("quantization_bit", f"{bits} is not modelled; 4 and 8 are")


def _read_kernels(keys: Keys, found: Found) -> None:
    if keys.flag("enable_liger_kernel"):
        found.arguments["use_liger_kernel"] = True
    kernel = keys.choice("flash_attn", _ATTENTION)
    if kernel is not None:
        found.fields["attention"] = kernel
    if keys.flag("use_unsloth"):
        found.notes.append("use_unsloth is not modelled: the figures are upper bounds")
    if keys.flag("use_unsloth_gc"):
        found.fields["offload_activations"] = "checkpoints"


def _read_optimizer(keys: Keys, found: Found) -> None:
    """Optimizers that have switches of their own; TrainingArguments name the others."""
    for key, name in _OPTIMIZERS.items():
        if keys.flag(key):
            keys.values["optim"] = name
    for switch, rank, layerwise, target in _LOW_RANK:
        chosen, is_layerwise = keys.take(rank), keys.take(layerwise) not in OFF
        keys.names(target)
        if keys.flag(switch):
            found.fields["optimizer_options"] = {"rank": chosen or 16}
            if is_layerwise:
                found.fields["optimizer_in_backward"] = True


def _read_lengths(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    length = keys.count("cutoff_len")
    told_apart = keys.flag("neat_packing")
    packed = keys.flag("packing") or told_apart or keys.text("stage") == "pt"
    if told_apart:
        found.fields["packing"] = "documents"
    found.fields["seq_len"] = length
    bound = "as packing makes it" if packed else "an upper bound"
    if "seq_len" not in given:
        found.notes.append(
            f"cutoff_len {length} is taken for the length of every sequence, {bound}"
        )
