"""LLaMA-Factory's YAML: transformers' training arguments, and its own of four kinds.

Trained parameters are cast to fp32 (``model/adapter.py``) unless ``pure_bf16`` says otherwise; what is
frozen stays in the compute dtype. Checkpointing is on (``model/model_utils/checkpointing.py``).
"""

from collections.abc import Mapping
from math import isqrt

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.arguments import pass_arguments
from memplan.sources.stacks.common.found import DeviceMap, Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import (
    ANY_SIZE,
    HEARING,
    MERGING,
    may_read_text_alone,
    model_type,
    num_layers,
)
from memplan.sources.stacks.common.trained_layers import trained_layers
from memplan.sources.stacks.common.wording import lora
from memplan.sources.stacks.llama_factory_megatron import is_megatron, read_megatron
from memplan.sources.stacks.shipped import point_at_shipped
from memplan.sources.trainer.launch import Loading
from memplan.training.adapters import LINEAR_NAMES

NAME = "LLaMA-Factory"

_MARKS = frozenset({"finetuning_type", "cutoff_len", "template", "stage", "lora_target"})
_JOBS = {
    "pt": None, "sft": None, "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo",
}  # fmt: skip
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash", "fa3": "flash3"}
_OPTIMIZERS = {
    "use_galore": "galore_adamw", "use_apollo": "apollo_adamw", "use_adam_mini": "adam_mini", "use_muon": "muon",
}  # fmt: skip

_FP8 = {"auto": "torchao-tensorwise", "torchao": "torchao-tensorwise", "te": "te-delayed"}
_LOW_RANK = (
    ("use_galore", "galore_rank", "galore_layerwise", "galore_target"),
    ("use_apollo", "apollo_rank", "apollo_layerwise", "apollo_target"),
)


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether its own keys are there beside a model."""
    return "model_name_or_path" in values and bool(values.keys() & _MARKS)


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "llama-factory"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    if keys.take("do_train") is False or (keys.has("do_predict") and not keys.has("do_train")):
        keys.refuse("do_train", "this file trains nothing")
    if keys.has("tokenized_path") and not keys.has("do_train"):
        keys.refuse(
            "tokenized_path", "this file prepares data, and trains nothing: it has no do_train"
        )
    if keys.on("infer_backend") and not keys.has("do_train"):
        keys.refuse("infer_backend", "this file generates, and trains nothing: it has no do_train")
    workers = keys.count("ray_num_workers")
    if workers is not None:
        found.fields["num_gpus"] = workers
    found.model = keys.model("model_name_or_path")
    _read_job(keys, found)
    if is_megatron(keys):
        _read_lengths(keys, found, given)
        read_megatron(keys, found, given)
        return
    # model/patcher.py, ``patch_config``: unless ZeRO-3 or FSDP shards it (``low_cpu_mem_usage``, its default).
    found.device_map = DeviceMap.WHOLE
    half = keys.flag("pure_bf16")
    found.arguments["gradient_checkpointing"] = not keys.flag("disable_gradient_checkpointing")
    keys.used |= {"gradient_checkpointing", "dataset"}
    _read_tuning(keys, found, half=half)
    _read_kernels(keys, found)
    _read_optimizer(keys, found)
    _read_towers(keys, found)
    _note_halves(keys, found, half=half)
    _read_lengths(keys, found, given)
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
    if job == "reward":
        # A value head stands beside the output matrix (trl's AutoModelForCausalLMWithValueHead).
        found.left_out.append("stage rm (the logits, which are computed before the scores)")
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


def _note_halves(keys: Keys, found: Found, *, half: bool) -> None:
    """``model/adapter.py`` casts to fp32 what is trained alone, where nothing shards it."""
    whole = not (keys.has("deepspeed") or keys.has("fsdp") or half)
    if (
        whole
        and keys.take("bf16") is True
        and found.fields.get("freeze")
        and "adapter" not in found.fields
    ):
        found.notes.append(
            "what is not trained stays in bf16, and is counted in fp32 as the rest is: the figures are upper "
            "bounds"
        )


def _targets(keys: Keys) -> tuple[str, ...] | str:
    names = keys.names("lora_target")
    return LINEAR_NAMES if names in (("all",), ()) else names


def _read_frozen(keys: Keys, found: Found) -> None:
    """Some layers are trained; the embeddings and the head are not, unless they are named."""
    layers = keys.take("freeze_trainable_layers")
    modules, more = keys.names("freeze_trainable_modules"), keys.names("freeze_extra_modules")
    expanded = keys.flag("use_llama_pro")
    count = None if found.model is None else num_layers(found.model)
    if not isinstance(layers, int) or isinstance(layers, bool) or layers == 0:
        keys.refuse("freeze_trainable_layers", f"write a number of layers, not {layers!r:.40}")
    if expanded and (layers < 0 or (count or 0) % layers):
        keys.refuse(
            "freeze_trainable_layers",
            f"use_llama_pro wants a divisor of the {count} layers, not {layers}",
        )
    by_name = expanded or more or modules not in ((), ("all",))
    if count is None or (by_name and model_type(found.model) in _SEEING | _HEARING):
        found.notes.append(
            f"freeze_trainable_layers {layers} of modules {', '.join(modules) or 'all'}: counted as if all "
            "were trained, an upper bound; freeze says which parts are not"
        )
        return
    found.fields["freeze"] = trained_layers(
        count, layers, modules=modules, extra=more, spread=expanded
    )


def _freeze(found: Found, *parts: str) -> None:
    """Add frozen parts to those there are."""
    before = str(found.fields.get("freeze") or "")
    found.fields["freeze"] = ",".join(dict.fromkeys((*filter(None, before.split(",")), *parts)))


_TOWERS = (
    ("freeze_vision_tower", ("vision_tower",)), ("freeze_multi_modal_projector", ("projector",)),
    ("freeze_language_model", ("embeddings", "norm", "head", "layers")),
)  # fmt: skip
_HEARING = HEARING - {"voxtral", "granite_speech"}
"""Types whose audio tower ``freeze_vision_tower`` freezes too."""
_SEEING = frozenset({
    "dots_ocr", "gemma3", "gemma3n", "gemma4", "glm4v", "glm4v_moe", "glm_ocr", "internvl", "kimi_vl", "llama4",
    "llava", "llava_next", "llava_next_video", "minicpmv4_6", "mistral3", "mllama", "paligemma",
    "qwen2_5_omni", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5",
    "qwen3_5_moe",
})  # fmt: skip
"""Types of ``model/model_utils/visual.py`` that see."""


def _read_towers(keys: Keys, found: Found) -> None:
    """Towers and projector are frozen unless it says otherwise, and never adapted (``visual.py``, ``misc.py``)."""
    family = model_type(found.model)
    if family not in _SEEING | _HEARING:
        if family is None and found.model is not None:
            found.notes.append(
                "where the model sees or hears, LLaMA-Factory freezes its towers unless freeze_vision_tower is "
                "false: say freeze and image_size, which are not known here"
            )
            keys.used |= {*(key for key, _ in _TOWERS), "image_max_pixels"}
        return
    frozen = [part for key, part in _TOWERS if keys.flag(key)]
    pixels = keys.count("image_max_pixels")
    if family in ANY_SIZE and pixels is not None:
        found.fields["image_size"] = isqrt(pixels)
        found.notes.append(f"image_max_pixels {pixels} is taken for the size of every picture")
    if may_read_text_alone(found.model) and _is_text(keys):
        found.fields["images_per_sample"] = 0
        found.notes.append("dataset: texts alone, by LLaMA-Factory's own data/dataset_info.json")
    adapter = found.fields.get("adapter")
    if isinstance(adapter, dict):
        left = ["merger", "projector", "embed_vision"]
        if ("vision_tower",) in frozen:
            left += ["visual", "vision_tower", "vision_model", "audio_tower"]
        adapter["lora"]["exclude"] = f".*({'|'.join(left)}).*"
        return
    for parts in frozen:
        if parts == ("vision_tower",):
            towers = (("vision_tower", _SEEING), ("audio_tower", _HEARING))
            _freeze(found, *(name for name, types in towers if family in types))
        elif parts != ("projector",) or family not in MERGING:
            _freeze(found, *parts)


_TEXTS = frozenset({
    "identity", "alpaca_en_demo", "alpaca_zh_demo", "glaive_toolcall_en_demo",
    "glaive_toolcall_zh_demo", "alpaca_en", "alpaca_zh", "alpaca_gpt4_en", "alpaca_gpt4_zh",
    "glaive_toolcall_en", "glaive_toolcall_zh", "lima", "guanaco", "open_platypus", "openorca",
    "slimorca", "ultrachat_200k", "magpie_ultra", "openo1_sft", "open_thoughts", "open_r1_math",
    "dpo_en_demo", "dpo_zh_demo", "dpo_mix_en", "dpo_mix_zh", "ultrafeedback", "kto_en_demo",
    "kto_mix_en", "ultrafeedback_kto", "wiki_demo", "c4_demo", "refinedweb", "fineweb",
    "fineweb_edu",
})  # fmt: skip
"""Data sets that it ships or names without a column of pictures or sounds (``data/dataset_info.json``)."""


def _is_text(keys: Keys) -> bool:
    """Whether all data sets that a file names are known to be texts."""
    names = keys.names("dataset")
    return bool(names) and all(name in _TEXTS for name in names)


def _read_badam(keys: Keys, found: Found) -> None:
    """One block is trained at a time; the first is the worst, since backward goes through all behind it.

    ``badam`` 1.2, ``BlockOptimizer``: fp32 copies of the block's weights and gradients.
    """
    if not keys.flag("use_badam"):
        return
    mode = keys.text("badam_mode")
    count = None if found.model is None else num_layers(found.model)
    found.loading = Loading(half_weights=True)
    if mode != "layer" or count is None:
        found.notes.append(
            f"use_badam with badam_mode {mode}: counted as AdamW of all weights, an upper bound"
        )
        return
    _freeze(found, "embeddings", "norm", "head", f"layers.1-{count - 1}")
    found.left_out.append("use_badam (fp32 copies of one layer's weights and gradients)")


def _read_quantization(keys: Keys, found: Found) -> None:
    bits = keys.count("quantization_bit")
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
    if keys.flag("use_unsloth_gc"):
        found.fields["offload_activations"] = "checkpoints"


def _read_optimizer(keys: Keys, found: Found) -> None:
    """Optimizers that have switches of their own; TrainingArguments name the others."""
    _read_badam(keys, found)
    for key, name in _OPTIMIZERS.items():
        if keys.flag(key):
            keys.values["optim"] = name
    for switch, rank, layerwise, target in _LOW_RANK:
        chosen, is_layerwise = keys.take(rank), keys.take(layerwise) not in OFF
        names = keys.names(target)
        if keys.flag(switch):
            whole = names in ((), ("all",))
            targets = "all-linear" if whole else ",".join(names)
            found.arguments["optim_target_modules"] = targets
            found.fields["optimizer_options"] = {"rank": chosen or 16, "target_modules": targets}
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
