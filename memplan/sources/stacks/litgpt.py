"""LitGPT's YAML: the parameters of one of its commands, ``finetune_full``, ``finetune_lora``, ... or ``pretrain``.

The command itself is not in the file: its keys tell. One device runs plain; more are FSDP1 in the full fine-tuning and in
pretraining, FSDP2 for adapters (``litgpt/finetune/*.py``, ``litgpt/pretrain.py``).
"""

from collections.abc import Mapping

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.common.found import Found, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import (
    litgpt_config,
    litgpt_model,
    model_type,
    with_own_head,
)
from memplan.sources.stacks.common.optimizer import add_named_optimizer
from memplan.sources.stacks.common.wording import lora

NAME = "LitGPT"

_MARKS = frozenset({"checkpoint_dir", "model_name"})
_OWN = frozenset({
    "train", "eval", "out_dir", "lora_r", "tokenizer_dir", "initial_checkpoint_dir", "model_config",
})  # fmt: skip
_PRECISIONS = {
    "bf16-true": ("bf16", "bf16"), "bf16-mixed": ("bf16-amp", "bf16-mixed"),
    "16-mixed": ("fp16-amp", "fp16-mixed"), "32-true": ("fp32", "fp32"),
}  # fmt: skip
"""Without FSDP, and under it."""
_QUANTIZED = {"nf4": "nf4", "nf4-dq": "nf4", "fp4": "fp4", "fp4-dq": "fp4", "int8-training": "int8"}
_TARGETS = (
    ("lora_query", ("q_proj", "query_key_value")), ("lora_key", ("k_proj", "query_key_value")),
    ("lora_value", ("v_proj", "query_key_value")), ("lora_projection", ("o_proj", "dense")),
    (
        "lora_mlp",
        ("gate_proj", "up_proj", "down_proj", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    ("lora_head", ("lm_head",)),
)  # fmt: skip
"""As classes of several families call them: each has some of a switch's names."""


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether a checkpoint or a model's name stands beside keys of its commands."""
    return bool(values.keys() & _MARKS) and bool(values.keys() & _OWN)


def preset_for(values: Mapping[str, object], _source: str) -> str:
    """Of its commands, the one that has the keys."""
    if "model_name" in values:
        return "litgpt-pretrain"
    adapted = any(key.startswith("lora_") for key in values) or "quantize" in values
    return "litgpt-lora" if adapted else "litgpt-full"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    command = keys.preset.name
    _read_model(keys, found)
    ranks = _read_gpus(keys, found, given)
    _read_sizes(keys, found, given, ranks)
    _read_engine(keys, found, given, command, ranks)
    packed = _read_quantization(keys, found)
    _read_adapter(keys, found, command)
    _read_optimizer(keys, found, given, packed=packed)


def _read_model(keys: Keys, found: Found) -> None:
    """A checkpoint's folder ends in its hub id; a model's sizes go over its name."""
    sizes, name = keys.section("model_config"), keys.text("model_name")
    tied = keys.take("train.tie_embeddings") is True
    if sizes:
        config, problem = litgpt_config(sizes, tied=tied)
        if config is None:
            keys.refuse("model_config", problem)
        found.model = config
        return
    folder = keys.text("checkpoint_dir")
    if folder is not None:
        name = "/".join(folder.strip("/").split("/")[-2:])
    if name is None:
        return
    found.model = litgpt_model(name)
    if tied:
        found.notes.append("train.tie_embeddings: the built-in model's own head is counted")
        return
    untied = with_own_head(found.model)
    if untied is not None:
        found.model = untied
        found.notes.append(f"{name}: with an output matrix of its own, as LitGPT builds each model")


def _read_gpus(keys: Keys, found: Found, given: Mapping[str, object]) -> int:
    """How many GPUs there are; ``auto`` is all there are."""
    devices, nodes = keys.take("devices"), keys.count("num_nodes") or 1
    count = given.get("num_gpus")
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    if isinstance(devices, int) and not isinstance(devices, bool) and devices > 0:
        found.fields["num_gpus"] = devices * nodes
        if nodes > 1:
            found.fields["num_nodes"] = nodes
    elif count is None:
        found.notes.append(f"devices {devices}: counted as one GPU; say how many there are")
    ranks = count if isinstance(count, int) else found.fields.get("num_gpus", 1)
    assert isinstance(ranks, int)
    return ranks


def _read_sizes(keys: Keys, found: Found, given: Mapping[str, object], ranks: int) -> None:
    micro = keys.count("train.micro_batch_size") or 1
    whole = keys.count("train.global_batch_size") or micro
    found.fields["micro_batch_size"] = micro
    found.fields["gradient_accumulation_steps"] = max(1, whole // ranks // micro)
    length = keys.count("train.max_seq_length")
    found.fields["seq_len"] = length
    if "seq_len" in given:
        return
    if length is None:
        found.notes.append("train.max_seq_length is not set: sequences are not cut; give seq_len")
    else:
        found.notes.append(
            f"train.max_seq_length {length} is taken for the length of every sequence"
        )


def _read_engine(
    keys: Keys, found: Found, given: Mapping[str, object], command: str, ranks: int
) -> None:
    sharded = "fsdp" if command == "litgpt-lora" else "fsdp1"
    engine = of_given(given, "engine") or (sharded if ranks > 1 else "ddp")
    found.fields["engine"] = engine
    word = keys.text("precision") or "bf16-true"
    if word not in _PRECISIONS:
        known = ", ".join(_PRECISIONS)
        keys.refuse("precision", f"{word!r:.40} is not modelled; there are {known}")
    plain, under_fsdp = _PRECISIONS[word]
    found.fields["precision"] = under_fsdp if engine.startswith("fsdp") else plain
    if command == "litgpt-pretrain":
        found.fields["compile"] = "model"
        if engine == "fsdp1":
            found.fields["fsdp_strategy"] = "hybrid"
        return
    found.fields["checkpointing"] = "full" if engine.startswith("fsdp") else "none"


def _read_quantization(keys: Keys, found: Found) -> bool:
    """bitsandbytes through Lightning's plugin; the optimizer is a paged one then."""
    word = keys.text("quantize")
    if word is None:
        return False
    kind = _QUANTIZED.get(word.removeprefix("bnb."))
    if kind is None:
        keys.refuse("quantize", f"{word!r:.40} is not modelled; bnb.nf4, bnb.nf4-dq, ... are")
    found.fields["quantize"] = kind
    found.notes.append(
        "quantize packs the output matrix too, which is counted in 16 bits: the figures are upper bounds"
    )
    found.quantization["device_map"] = False
    if kind != "int8":
        found.quantization["double_quant"] = word.endswith("-dq")
    return True


def _read_adapter(keys: Keys, found: Found, command: str) -> None:
    rank, alpha = keys.count("lora_r"), keys.number("lora_alpha")
    dropout = keys.number("lora_dropout")
    asked = [name for key, names in _TARGETS if keys.flag(key) for name in names]
    targets = tuple(name for name in dict.fromkeys(asked) if _is_of(found, name))
    if "query_key_value" in targets:
        found.notes.append(
            "lora_query, lora_key, lora_value: one adapter of all of query_key_value is counted"
        )
    if command != "litgpt-lora":
        return
    if not targets:
        keys.refuse("lora_query", "and the others are all false: nothing is adapted")
    half = found.fields["precision"] == "bf16"
    found.fields["adapter"] = lora(
        rank=rank or 8, alpha=alpha, dropout=dropout, targets=targets,
        dtype="bf16" if half else "fp32",
    )  # fmt: skip


_IN_ONE = frozenset({"falcon", "gpt_neox"})
"""Types with one matrix for query, key and value."""


def _is_of(found: Found, name: str) -> bool:
    """Whether a model's class may have a module of this name: no other has falcon's and GPT-NeoX's."""
    of_them = name.startswith(("query_", "dense_"))
    return not of_them or model_type(found.model) in _IN_ONE


def _read_optimizer(keys: Keys, found: Found, given: Mapping[str, object], *, packed: bool) -> None:
    """By its class, torch's where no module is named; only pretraining asks for the fused form."""
    if packed:
        keys.take("optimizer")
        keys.used |= {key for key in keys.values if key.startswith("optimizer.")}
        found.fields["optimizer"] = "bnb-paged-adamw"
        return
    key = "optimizer.class_path" if keys.has("optimizer.class_path") else "optimizer"
    named = keys.take(key)
    if isinstance(named, str) and "." not in named and named not in OFF:
        keys.values[key] = f"torch.optim.{named}"
    form = "fused" if keys.preset.name == "litgpt-pretrain" else "foreach"
    add_named_optimizer(keys, key, found, given, form=form)
