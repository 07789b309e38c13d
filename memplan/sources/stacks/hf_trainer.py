"""transformers' Trainer and TRL's trainers: ``TrainingArguments`` alone, or the YAML of TRL's commands.

TRL's ``TrlParser`` reads one file for several classes: a trainer's config, ``ModelConfig``, which says what
is loaded and with which adapter, and ``ScriptArguments``, which say on what it is trained.
"""

from collections.abc import Mapping
from pathlib import Path

from memplan.sources.stacks.arguments import pass_arguments
from memplan.sources.stacks.common.found import DeviceMap, Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.wording import adapter_dtype, lora
from memplan.sources.trainer.keys import trainer_names, trl_config
from memplan.sources.trainer.launch import Loading
from memplan.training.choices_of_kernels.kernels import ATTENTION_NAMES
from memplan.training.freezing import ALL_BUT

NAME = "transformers and TRL"

_MARKS = frozenset({"per_device_train_batch_size", "model_name_or_path", "gradient_checkpointing"})
_CONFIGS = {
    "trl-sft": "SFTConfig", "trl-dpo": "DPOConfig", "trl-grpo": "GRPOConfig", "trl-kto": "KTOConfig",
    "trl-orpo": "ORPOConfig", "trl-reward": "RewardConfig", "trl-rloo": "RLOOConfig", "trl-distillation": "DistillationConfig",
    "hf-trainer": None,
}  # fmt: skip
"""Preset -> the class of arguments."""
_LOADED = (
    "weights are counted as loaded in fp32; from_pretrained of transformers 5 takes the checkpoint's "
    "dtype unless it is told one: the precisions bf16-autocast and bf16 are weights in bf16"
)


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether a trainer's arguments are among the keys; what converts a model has these two alone as well."""
    return bool(values.keys() & _MARKS) and values.keys() != {"model_name_or_path", "output_dir"}


def preset_for(values: Mapping[str, object], source: str) -> str:
    """Of the trainers, the one that the keys belong to; ``trl sft`` where they name a model alone.

    Several trainers have the same keys: recipes lie in a folder that is called as their trainer
    (alignment-handbook's ``recipes/MODEL/orpo``).
    """
    own = _own(values)
    config = trl_config(own, source="")
    if config is None:
        return "trl-sft" if "model_name_or_path" in values else "hf-trainer"
    names = {each: name for name, each in _CONFIGS.items() if each is not None}
    folders = Path(source).parts[-4:-1]
    for each, name in names.items():
        if each.removesuffix("Config").lower() in folders and _fits(each, own):
            return name
    return names.get(config, "trl-sft")


def _fits(config: str, values: Mapping[str, object]) -> bool:
    """Whether a trainer's class has every key of the trainers' that the file has."""
    return _own(values).keys() <= {*trainer_names()["configs"].get(config, ())}


def _own(values: Mapping[str, object]) -> dict[str, object]:
    own = {name for names in trainer_names()["configs"].values() for name in names}
    return {key: value for key, value in values.items() if key in own}


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    trainer = _CONFIGS[keys.preset.name]
    found.model = keys.model("model_name_or_path")
    if trainer == "DPOConfig" and _fits("ORPOConfig", keys.values):
        found.notes.append("counted as DPO, whose keys ORPO has too: the preset trl-orpo")
    if trainer is None and "precision" not in given:
        found.notes.append(_LOADED)
    found.loading = Loading(trainer=trainer, half_weights=_is_half(keys))
    if trainer is not None:
        # TRL 1.10, trainer/utils.py, ``create_model_from_path``: "auto", but for several GPUs and DeepSpeed.
        found.device_map = DeviceMap.ALONE
    kernel = keys.choice("attn_implementation", ATTENTION_NAMES)
    if kernel is not None:
        found.fields["attention"] = kernel
    quantized = _read_quantization(keys, found)
    if keys.flag("use_peft"):
        found.fields["adapter"] = lora(
            rank=keys.count("lora_r") or 16,
            alpha=keys.number("lora_alpha"),
            dropout=keys.number("lora_dropout"),
            targets=_targets(keys),
            parameters=keys.names("lora_target_parameters"),
            modules_to_save=keys.names("lora_modules_to_save"),
            rslora=keys.flag("use_rslora"),
            dora=keys.flag("use_dora"),
            dtype=adapter_dtype(halves=quantized),
        )
    _read_spectrum(keys, found)
    pass_arguments(keys, found, given)


def _read_spectrum(keys: Keys, found: Found) -> None:
    """Spectrum's file: beginnings of the names of those parameters that alone are trained (its ``run_sft.py``)."""
    path = keys.text("spectrum_config_path")
    if path is None:
        return
    from memplan.sources.files import read_mapping  # only for its file
    from memplan.sources.launched_from import launched_from

    place = launched_from(keys.folder, path)
    named = read_mapping(place).get("unfrozen_parameters")
    if not isinstance(named, list) or not named:
        keys.refuse("spectrum_config_path", f"{path} has no list of unfrozen_parameters")
    found.fields["freeze"] = ALL_BUT + " ".join(map(str, named))


def _is_half(keys: Keys) -> bool:
    """Whether the weights are loaded in bf16 (``ModelConfig.dtype``); null leaves it to ``from_pretrained``, which is "auto"."""
    is_null = "dtype" in keys.values and keys.values["dtype"] is None
    dtype = "auto" if is_null else (keys.text("dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16", "auto"):
        keys.refuse("dtype", f"{dtype!r} is not modelled; write float32 or bfloat16")
    return dtype in ("bfloat16", "auto")


def _read_quantization(keys: Keys, found: Found) -> bool:
    """``load_in_4bit`` and its like; TRL prepares nothing else for it."""
    if keys.flag("load_in_4bit"):
        found.fields["quantize"] = keys.text("bnb_4bit_quant_type") or "nf4"
        found.quantization["double_quant"] = keys.flag("use_bnb_nested_quant")
        found.quantization["compute_dtype"] = "bf16" if _is_half(keys) else "fp32"
    elif keys.flag("load_in_8bit"):
        found.fields["quantize"] = "int8"
    return "quantize" in found.fields


def _targets(keys: Keys) -> tuple[str, ...] | str | None:
    names = keys.names("lora_target_modules")
    return "all-linear" if names == ("all-linear",) else names or None
