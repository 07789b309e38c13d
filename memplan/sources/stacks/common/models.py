"""Models that stacks have names of their own for."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.units import ceil_div

if TYPE_CHECKING:
    from memplan.sources.stacks.common.found import Found

_PHI_3: dict[str, object] = {
    "name": "phi-3-mini-4k", "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 8192, "vocab_size": 32064, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
_PHI_4: dict[str, object] = {
    "name": "phi-4", "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
    "intermediate_size": 17920, "vocab_size": 100352, "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Phi as torchtune and LitGPT build it: with matrices of their own for q, k and v, gate and up, as Llama's."""

_TORCHTUNE: dict[str, str | dict[str, object]] = {
    "llama2_7b": "llama-2-7b", "llama2_13b": "llama-2-13b", "llama2_70b": "llama-2-70b",
    "code_llama2_7b": "codellama-7b", "code_llama2_13b": "codellama-13b",
    "code_llama2_70b": "codellama-70b",
    "llama3_8b": "llama-3-8b", "llama3_70b": "llama-3-70b", "llama3_1_8b": "llama-3.1-8b",
    "llama3_1_70b": "llama-3.1-70b", "llama3_1_405b": "llama-3.1-405b",
    "llama3_2_1b": "llama-3.2-1b", "llama3_2_3b": "llama-3.2-3b", "llama3_3_70b": "llama-3.3-70b",
    "llama3_2_vision_11b": "llama-3.2-11b-vision", "llama3_2_vision_90b": "llama-3.2-90b-vision",
    "llama4_scout_17b_16e": "llama-4-scout",
    "llama4_maverick_17b_128e": "llama-4-maverick",
    "mistral_7b": "mistral-7b", "gemma_2b": "gemma-2b", "gemma_7b": "gemma-7b",
    "gemma2_2b": "gemma-2-2b", "gemma2_9b": "gemma-2-9b", "gemma2_27b": "gemma-2-27b",
    "phi3_mini": _PHI_3, "phi4_14b": _PHI_4,
    "qwen2_0_5b": "qwen2-0.5b", "qwen2_1_5b": "qwen2-1.5b", "qwen2_7b": "qwen2-7b",
    "qwen2_5_0_5b": "qwen2.5-0.5b", "qwen2_5_1_5b": "qwen2.5-1.5b", "qwen2_5_3b": "qwen2.5-3b",
    "qwen2_5_7b": "qwen2.5-7b", "qwen2_5_14b": "qwen2.5-14b", "qwen2_5_32b": "qwen2.5-32b",
    "qwen2_5_72b": "qwen2.5-72b",
    "qwen3_0_6b": "qwen3-0.6b", "qwen3_1_7b": "qwen3-1.7b", "qwen3_4b": "qwen3-4b",
    "qwen3_8b": "qwen3-8b", "qwen3_14b": "qwen3-14b", "qwen3_32b": "qwen3-32b",
}  # fmt: skip
"""Builders of ``torchtune.models``, without their prefixes and suffixes."""

_TORCHTITAN = {
    ("llama3", "1B"): "llama-3.2-1b", ("llama3", "3B"): "llama-3.2-3b",
    ("llama3", "8B"): "llama-3.1-8b", ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b", ("llama3_ft", "8B"): "llama-3.1-8b",
    ("llama4", "17bx16e"): "llama-4-scout", ("llama4", "17bx128e"): "llama-4-maverick",
    ("qwen3", "0.6B"): "qwen3-0.6b", ("qwen3", "1.7B"): "qwen3-1.7b", ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b", ("qwen3", "14B"): "qwen3-14b", ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b", ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite", ("deepseek_v3", "671B"): "deepseek-v3",
    ("flux", "flux-dev"): "flux.1-dev", ("flux", "flux-schnell"): "flux.1-schnell",
    ("gpt_oss", "20b"): "gpt-oss-20b", ("gpt_oss", "120b"): "gpt-oss-120b",
}  # fmt: skip
"""``torchtitan.models``: a name and a flavor."""


_LITGPT: dict[str, str | dict[str, object]] = {
    "phi-3-mini-4k-instruct": _PHI_3, "phi-4": _PHI_4,
    "tiny-llama-1.1b": "tinyllama-1.1b", "tiny-llama-1.1b-chat": "tinyllama-1.1b",
    "micro-llama-300m": {
        "name": "micro-llama-300M", "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Names of ``litgpt/config.py`` that are no hub id's last part, in lower case."""
_LITGPT_SIZES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "intermediate_size": "intermediate_size", "block_size": "max_position_embeddings",
    "head_size": "head_dim",
}  # fmt: skip
_LITGPT_VOCABULARY = 50254
_LITGPT_PADDING = 512
"""``vocab_size`` and ``padding_multiple`` of ``litgpt.Config``."""


def litgpt_model(name: str) -> str | dict[str, object]:
    """The model of a name of LitGPT's; most are the last part of a hub id.

    >>> litgpt_model("tiny-llama-1.1b"), litgpt_model("pythia-14m")
    ('tinyllama-1.1b', 'pythia-14m')
    """
    return _LITGPT.get(name.rpartition("/")[2].lower(), name)


def with_own_head(model: str | Mapping[str, object]) -> dict[str, object] | None:
    """A known text model's config with an output matrix beside the token table; None where it has one, or is not known.

    LitGPT's ``GPT`` always makes both (``litgpt/model.py``), and a checkpoint without the second gets a copy.

    >>> with_own_head("gemma-7b")["tie_word_embeddings"], with_own_head("pythia-14m")
    (False, None)
    """
    from memplan.sources.about_models.defaults import class_defaults

    config = _config_of(model)
    usual = class_defaults().get(str(config.get("model_type")), {}).get("defaults")
    tied = config.get("tie_word_embeddings")
    if tied is None and isinstance(usual, Mapping):
        tied = usual.get("tie_word_embeddings")
    if tied is not True or "text_config" in config:
        return None
    return {"name": model, **config, "tie_word_embeddings": False}


def litgpt_config(
    sizes: Mapping[str, object], *, tied: bool
) -> tuple[dict[str, object] | None, str]:
    """A config that says the same as LitGPT's sizes of a model, or what is missing in it.

    Models of Llama's layers alone are read: its MLP, RMSNorm, no biases and rotary embeddings of whole heads.
    """
    if sizes.get("mlp_class_name") != "LLaMAMLP" or sizes.get("norm_class_name") != "RMSNorm":
        return (
            None,
            "is read where mlp_class_name is LLaMAMLP and norm_class_name RMSNorm: name a MODEL beside it",
        )
    config = {ours: sizes[key] for key, ours in _LITGPT_SIZES.items() if sizes.get(key)}
    for key in ("n_embd", "n_layer", "n_head", "intermediate_size"):
        if not sizes.get(key):
            return None, f"has no {key}: name a MODEL beside it"
    vocabulary = sizes.get("padded_vocab_size")
    if not isinstance(vocabulary, int):
        plain = sizes.get("vocab_size", _LITGPT_VOCABULARY)
        multiple = sizes.get("padding_multiple", _LITGPT_PADDING)
        if not isinstance(plain, int) or not isinstance(multiple, int):
            return None, "vocab_size: write a whole number"
        vocabulary = ceil_div(plain, multiple) * multiple
    return {
        "name": str(sizes.get("name") or "model_config"), "model_type": "llama",
        "architectures": ["LlamaForCausalLM"], **config, "vocab_size": vocabulary,
        "num_key_value_heads": sizes.get("n_query_groups") or sizes["n_head"],
        "tie_word_embeddings": tied, "attention_bias": sizes.get("bias", True) is True,
        "mlp_bias": sizes.get("bias", True) is True,
    }, ""  # fmt: skip


_NANOTRON = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "max_position_embeddings", "tie_word_embeddings", "vocab_size", "attention_bias",
)  # fmt: skip


def nanotron_config(
    sizes: Mapping[str, object], *, padded_to: int
) -> tuple[dict[str, object] | None, str]:
    """A config that says the same as ``model.model_config`` of nanotron's, or what is wrong with it.

    ``padded_to`` is what the vocabulary is padded to a multiple of. Qwen 2's class is Llama's unless
    ``attention_bias`` is on.
    """
    biased = sizes.get("is_qwen2_config") is True and sizes.get("attention_bias") is True
    if sizes.get("moe_config"):
        return None, "moe_config: its mixture of experts is not modelled"
    if sizes.get("is_starcoder2_config") is True or "grouped_query" in sizes:
        return None, "is read for is_llama_config and is_qwen2_config: name a MODEL beside it"
    config = {key: sizes[key] for key in _NANOTRON if sizes.get(key) is not None}
    if biased:
        config.pop("attention_bias")
    vocabulary = config.get("vocab_size")
    if not isinstance(vocabulary, int):
        return None, "vocab_size: write a whole number"
    config["vocab_size"] = ceil_div(vocabulary, padded_to) * padded_to
    family, model_class = ("qwen2", "Qwen2ForCausalLM") if biased else ("llama", "LlamaForCausalLM")
    return {
        "name": "model_config", "model_type": family, "architectures": [model_class],
        "tie_word_embeddings": False, **config,
    }, ""  # fmt: skip


def torchtune_model(builder: str) -> str | dict[str, object] | None:
    """The model that one of torchtune's builders makes; None where it is not known.

    >>> torchtune_model("qlora_llama3_1_8b"), torchtune_model("lora_qwen2_5_7b_instruct")
    ('llama-3.1-8b', 'qwen2.5-7b')
    """
    plain = re.sub(r"^q?lora_|_(instruct|base)$", "", builder)
    return _TORCHTUNE.get(plain) or _TORCHTUNE.get(re.sub(r"_(instruct|base)$", "", plain))


def torchtune_builder(model: str) -> str | None:
    """torchtune's builder of a model; None where it has none.

    >>> torchtune_builder("llama-3.1-8b")
    'llama3_1_8b'
    """
    return next((name for name, each in _TORCHTUNE.items() if each == model), None)


def torchtitan_model(name: str, flavor: str) -> str | None:
    """The model of a name and a flavor of torchtitan's; None where it is not known.

    >>> torchtitan_model("llama3", "8B")
    'llama-3.1-8b'
    """
    plain = re.sub(r"_(flex|flex_attn|varlen|varlen_attn)$", "", flavor)
    return _TORCHTITAN.get((name, plain))


MERGING = frozenset({
    "gemma4", "glm4v", "glm4v_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
    "qwen3_5_moe",
})  # fmt: skip
"""Types whose projector is a part of the tower, and frozen with it."""
_ATTENDING = frozenset({"mllama", "florence2"})
"""Types whose layers attend to pictures, which text alone skips: that is not modelled."""
HEARING = frozenset(
    {"qwen2_audio", "qwen2_5_omni", "qwen3_omni_moe", "gemma3n", "voxtral", "granite_speech"}
)
"""Types with an audio tower."""
ANY_SIZE = (MERGING - {"gemma4"}) | {"mistral3"}
"""Types that take pictures of any size, whose number of pixels a processor bounds."""


def num_layers(model: str | Mapping[str, object]) -> int | None:
    """Layers of a built-in, a copy of one or a config; None for other models.

    >>> num_layers("llama-3.1-8b")
    32
    """
    from memplan.sources.about_models.defaults import class_defaults

    config = _config_of(model)
    inner = config.get("text_config")
    usual = class_defaults().get(str(config.get("model_type")), {}).get("defaults")
    for place in (config, inner, usual):
        count = place.get("num_hidden_layers") if isinstance(place, Mapping) else None
        if isinstance(count, int):
            return count
    return None


def model_type(model: str | Mapping[str, object] | None) -> str | None:
    """The type of a built-in, a copy of one or a config; None for other models.

    >>> model_type("gpt-oss-20b"), model_type("unsloth/gpt-oss-20b")
    ('gpt_oss', 'gpt_oss')
    """
    name = _config_of(model or {}).get("model_type")
    return None if name is None else str(name)


_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""How configurations of transformers' classes call the number of experts."""


def has_experts(model: str | Mapping[str, object] | None) -> bool:
    """Whether the type of a model is a mixture's, or the language model in it.

    >>> [has_experts(name) for name in ("qwen3-30b-a3b", "gemma-4-26b-a4b", "gemma-4-31b")]
    [True, True, False]
    """
    from memplan.sources.about_models.defaults import class_defaults

    rows = class_defaults()

    def holds(config: Mapping[str, object], kind: object) -> bool:
        """Whether a configuration says how many there are, or its class does."""
        row: Mapping[str, object] = rows.get(str(kind), {})
        said = {**_mapping(row.get("defaults")), **config}
        if any(said.get(name) for name in _EXPERTS):
            return True
        inner = _mapping(row.get("parts")).get("text_config")
        return inner is not None and holds(_mapping(config.get("text_config")), inner)

    found = _config_of(model or {})
    return holds(found, found.get("model_type"))


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def is_stored_wide(model: str | Mapping[str, object] | None) -> bool:
    """Whether a checkpoint is known to hold fp32 weights; a copy or a variant may hold others.

    >>> is_stored_wide("google-t5/t5-small"), is_stored_wide("llama-3.1-8b")
    (True, False)
    """
    from memplan.sources.about_models.registry import find_builtin

    builtin = find_builtin(model) if isinstance(model, str) else None
    return builtin is not None and builtin.dtype == "float32"


def may_read_text_alone(model: str | Mapping[str, object] | None) -> bool:
    """Whether a model that sees or hears can be given text alone; true of one that is not known here, too.

    >>> may_read_text_alone("gemma-3-4b"), may_read_text_alone("llama-3.1-8b")
    (True, False)
    """
    from memplan.classes.registry import is_joined

    kind = model_type(model)
    sees = kind is None or is_joined(kind)
    return model is not None and sees and kind not in _ATTENDING


def given_text_alone(found: "Found") -> None:
    """Count a recipe that hands its model no picture or sound.

    Where layers attend to what the model sees, such a pass is not modelled: it is counted with a picture, and said so.
    """
    if may_read_text_alone(found.model):
        found.fields["images_per_sample"] = 0
    elif model_type(found.model) in _ATTENDING:
        found.notes.append(
            "the data are texts alone, and the model's layers attend to pictures: counted with one of each "
            "sample, an upper bound"
        )


def classifying(
    model: str | Mapping[str, object] | None, *, head: str, num_labels: int
) -> dict[str, object] | None:
    """The config of a causal model's class with another head (``ForTokenClassification``); None where it is not known.

    >>> classifying("qwen2.5-3b", head="ForTokenClassification", num_labels=2)["architectures"]
    ['Qwen2ForTokenClassification']
    """
    config = dict(_config_of(model or {}))
    named = config.get("architectures")
    stem, causal, _ = (
        str(named[0]).partition("ForCausalLM") if isinstance(named, list) else ("",) * 3
    )
    if not causal:
        return None
    return {
        "name": model, **config, "architectures": [f"{stem}{head}"],
        "id2label": {str(number): f"LABEL_{number}" for number in range(num_labels)},
    }  # fmt: skip


def _config_of(model: str | Mapping[str, object]) -> Mapping[str, object]:
    """What is known here of a model; empty for one that is not."""
    if not isinstance(model, str):
        return model
    from memplan.sources.about_models.copied_models import copy_of
    from memplan.sources.about_models.registry import find_builtin

    builtin = find_builtin(model)
    if builtin is not None:
        return builtin.config()
    copy = copy_of(model)
    return {} if copy is None else copy.model.config()
