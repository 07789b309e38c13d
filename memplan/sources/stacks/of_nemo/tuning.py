"""What is trained in NeMo AutoModel's files, by which optimizer, and the adapters."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import HEARING, has_experts, model_type
from memplan.sources.stacks.common.optimizer import add_named_optimizer
from memplan.sources.stacks.common.wording import EVERY_LINEAR, lora

DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "auto": "bf16", "float32": "fp32", "fp32": "fp32",
    "torch.bfloat16": "bf16", "torch.float32": "fp32",
}  # fmt: skip
_FREEZABLE = {
    "freeze_config.freeze_vision_tower": ("vision_tower",),
    "freeze_config.freeze_audio_tower": ("audio_tower",),
    "freeze_config.freeze_language_model": ("embeddings", "layers", "norm"),
    "freeze_config.freeze_embeddings": ("embeddings",),
}  # fmt: skip
"""What is frozen by each (``apply_parameter_freezing``: modules by words in their names)."""
_EXPERTS = "model.layers.0.mlp.experts"
"""What a mixture's experts are called, all of a layer (``apply_lora_to_linear_modules``)."""


def read_frozen(keys: Keys, found: Found) -> None:
    """The section's own default freezes what sees (``freeze_vision_tower``, true)."""
    parts: list[str] = []
    is_there = keys.has("freeze_config")
    for key, names in _FREEZABLE.items():
        if is_there and keys.flag(key) and (names != ("audio_tower",) or _hears(found)):
            parts += names
    if is_there and keys.flag("freeze_config.freeze_embeddings"):
        # ``apply_parameter_freezing`` lost it with 73cd446e9.
        found.notes.append(
            "freeze_config.freeze_embeddings: AutoModel has not read it since February 2026 and trains embeddings "
            "then; they are counted as frozen, as the file says"
        )
    if parts and not keys.has("peft"):
        found.fields["freeze"] = ",".join(dict.fromkeys(parts))


def _hears(found: Found) -> bool:
    """Whether the model is known to have an audio tower: of one that has none there is none to freeze."""
    return model_type(found.model) in HEARING


def read_optimizer(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """The optimizer and its form."""
    form = "fused" if keys.flag("optimizer.fused") else "foreach"
    if keys.values.get("optimizer.foreach") is False and form != "fused":
        form = "loop"
    keys.used.add("optimizer.foreach")
    add_named_optimizer(keys, "optimizer._target_", found, given, form=form)
    if found.fields.get("optimizer") is not None and keys.has("optimizer.master_weights"):
        _read_masters(keys, found)


def _read_masters(keys: Keys, found: Found) -> None:
    """Transformer Engine's own: weights in fp32 beside the model's, or the bits that those lack."""
    options: dict[str, object] = {"master_weights": keys.flag("optimizer.master_weights")}
    if keys.flag("optimizer.store_param_remainders"):
        options["store_param_remainders"] = True
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = keys.choice(f"optimizer.{name}", DTYPES)
        if dtype is not None:
            options[name] = dtype
    if str(getattr(found.fields["optimizer"], "value", "")) == "te-adamw":
        found.fields["optimizer_options"] = options


def read_adapter(keys: Keys, found: Found) -> None:
    """The adapter, and the format that its base is quantized to."""
    rank, alpha = keys.count("peft.dim"), keys.number("peft.alpha")
    dropout, names = keys.number("peft.dropout"), keys.names("peft.target_modules")
    excluded = keys.names("peft.exclude_modules")
    linear = keys.flag("peft.match_all_linear")
    dtype = keys.choice("peft.lora_dtype", DTYPES)
    dora = keys.flag("peft.use_dora")
    if keys.has("peft"):
        found.fields["adapter"] = lora(
            rank=rank or 8, alpha=alpha, dropout=dropout, dora=dora,
            dtype=str(dtype or found.fields["precision"])[:4],
            targets=_targets(names, excluded=excluded, linear=linear),
            exclude=_pattern(excluded) if excluded else (),
        )  # fmt: skip
        if any(fnmatchcase(_EXPERTS, name) for name in names) and has_experts(found.model):
            found.left_out.append(
                "peft.target_modules (adapters of experts, which AutoModel's own classes of mixtures have)"
            )
    else:
        keys.taken -= {each for each in keys.taken if each.startswith("peft.")}
    if keys.has("quantization"):
        if keys.flag("quantization.load_in_4bit"):
            found.fields["quantize"] = keys.text("quantization.bnb_4bit_quant_type") or "nf4"
            found.quantization["double_quant"] = keys.flag("quantization.bnb_4bit_use_double_quant")
        elif keys.flag("quantization.load_in_8bit"):
            found.fields["quantize"] = "int8"


def _targets(
    names: tuple[str, ...], *, excluded: tuple[str, ...], linear: bool
) -> tuple[str, ...] | str:
    """What ``ModuleMatcher`` takes: every linear layer; all but some; or those named."""
    if linear or "*" in names or (excluded and not names):
        return EVERY_LINEAR
    return _pattern(names or ("*_proj",))


def _pattern(names: tuple[str, ...]) -> tuple[str, ...] | str:
    """Names of modules; with wildcards one pattern for all.

    >>> _pattern(("*.q_proj", "*mlp*"))
    '(.*[.]q_proj)|(.*mlp.*)'
    """
    if not any("*" in name for name in names):
        return names
    parts = (name.replace(".", "[.]").replace("*", ".*") for name in names)
    return "|".join(f"({part})" for part in parts)
