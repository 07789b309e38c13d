"""Models that stacks have names of their own for."""

import re
from collections.abc import Mapping

_TORCHTUNE = {
    "llama2_7b": "llama-2-7b", "llama2_13b": "llama-2-13b", "llama2_70b": "llama-2-70b",
    "code_llama2_7b": "codellama-7b", "code_llama2_13b": "codellama-13b",
    "code_llama2_70b": "codellama-70b",
    "llama3_8b": "llama-3-8b", "llama3_70b": "llama-3-70b", "llama3_1_8b": "llama-3.1-8b",
    "llama3_1_70b": "llama-3.1-70b", "llama3_1_405b": "llama-3.1-405b",
    "llama3_2_1b": "llama-3.2-1b", "llama3_2_3b": "llama-3.2-3b", "llama3_3_70b": "llama-3.3-70b",
    "llama3_2_vision_11b": "llama-3.2-11b-vision", "llama4_scout_17b_16e": "llama-4-scout",
    "llama4_maverick_17b_128e": "llama-4-maverick",
    "mistral_7b": "mistral-7b", "gemma_2b": "gemma-2b", "gemma_7b": "gemma-7b",
    "gemma2_2b": "gemma-2-2b", "gemma2_9b": "gemma-2-9b", "gemma2_27b": "gemma-2-27b",
    "phi3_mini": "phi-3-mini-4k", "phi4_14b": "phi-4",
    "qwen2_0_5b": "qwen2-0.5b", "qwen2_1_5b": "qwen2-1.5b", "qwen2_7b": "qwen2-7b",
    "qwen2_5_0_5b": "qwen2.5-0.5b", "qwen2_5_1_5b": "qwen2.5-1.5b", "qwen2_5_3b": "qwen2.5-3b",
    "qwen2_5_7b": "qwen2.5-7b", "qwen2_5_14b": "qwen2.5-14b", "qwen2_5_32b": "qwen2.5-32b",
    "qwen2_5_72b": "qwen2.5-72b",
    "qwen3_0_6b": "qwen3-0.6b", "qwen3_1_7b": "qwen3-1.7b", "qwen3_4b": "qwen3-4b",
    "qwen3_8b": "qwen3-8b", "qwen3_14b": "qwen3-14b", "qwen3_32b": "qwen3-32b",
}  # fmt: skip
"""Builders of ``torchtune.models``, without their prefixes and suffixes."""

_TORCHTITAN = {
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


def torchtune_model(builder: str) -> str | None:
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


def num_layers(model: str) -> int | None:
    """Layers of a built-in; None for other models.

    >>> num_layers("llama-3.1-8b")
    32
    """
    from memplan.sources.registry import find_builtin

    builtin = find_builtin(model)
    if builtin is None:
        return None
    config = builtin.config()
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        count = place.get("num_hidden_layers")
        if isinstance(count, int):
            return count
    return None


def model_type(model: str | None) -> str | None:
    """The type of a built-in; None for other models.

    >>> model_type("gpt-oss-20b")
    'gpt_oss'
    """
    from memplan.sources.registry import find_builtin

    builtin = None if model is None else find_builtin(model)
    return None if builtin is None else str(builtin.config().get("model_type"))
