"""A model that one of torchtune's builders makes out of sizes: the config of transformers' that says the same."""

from collections.abc import Mapping

from memplan.units import ceil_div

_TYPES = {
    "llama2": ("llama", "LlamaForCausalLM", False), "llama3": ("llama", "LlamaForCausalLM", False),
    "llama3_1": ("llama", "LlamaForCausalLM", False), "llama3_2": ("llama", "LlamaForCausalLM", True),
    "mistral": ("mistral", "MistralForCausalLM", False), "qwen2": ("qwen2", "Qwen2ForCausalLM", False),
}  # fmt: skip
"""Builders, and whether each ties the output matrix where nothing is said (torchtune 0.6.1, ``models/*/_component_builders.py``)."""
_SIZES = {
    "vocab_size": "vocab_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "embed_dim": "hidden_size", "max_seq_len": "max_position_embeddings",
}  # fmt: skip
_ROUNDED = 256
"""What a network's width is rounded up to (``scale_hidden_dim_for_mlp``)."""


def torchtune_config(builder: str, sizes: Mapping[str, object]) -> dict[str, object] | str:
    """The config, or the key that is missing of it; empty where the builder is not known.

    >>> sizes = {"vocab_size": 32000, "num_layers": 22, "num_heads": 32, "num_kv_heads": 4, "embed_dim": 2048, "max_seq_len": 2048}
    >>> config = torchtune_config("llama2", sizes)
    >>> config["intermediate_size"], config["num_hidden_layers"]
    (5632, 22)
    >>> torchtune_config("qwen2", sizes)
    'intermediate_dim'
    """
    plain = builder.removeprefix("q").removeprefix("lora_") if "lora_" in builder else builder
    if plain not in _TYPES:
        return ""
    family, model_class, is_tied = _TYPES[plain]
    config: dict[str, object] = {}
    for key, name in _SIZES.items():
        if not isinstance(sizes.get(key), int):
            return key
        config[name] = sizes[key]
    width, size = sizes.get("intermediate_dim"), config["hidden_size"]
    assert isinstance(size, int)
    if not isinstance(width, int):
        if family != "llama":
            return "intermediate_dim"
        width = ceil_div(4 * int(2 * size / 3), _ROUNDED) * _ROUNDED
    return {
        "name": plain, "model_type": family, "architectures": [model_class], **config, "intermediate_size": width,
        "tie_word_embeddings": sizes.get("tie_word_embeddings", is_tied),
        "attention_dropout": sizes.get("attn_dropout", 0.0), "sliding_window": None,
    }  # fmt: skip
