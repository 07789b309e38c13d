"""What transformers' config classes fill in when a config leaves a key out."""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import cast

from memplan.sources.about_models.entry_file import EntryFile

_FILE = EntryFile(file_name="config_defaults.json", section="types", indent=2)


class _ClassDefaults(Mapping[str, Mapping[str, object]]):
    """The rows by ``model_type``, each parsed when it is first asked for."""

    def __init__(self) -> None:
        self._rows: dict[str, Mapping[str, object] | None] = {}

    def __getitem__(self, model_type: str) -> Mapping[str, object]:
        if model_type not in self._rows:
            self._rows[model_type] = _FILE.entry(model_type)
        row = self._rows[model_type]
        if row is None:
            raise KeyError(model_type)
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(_FILE.names())

    def __len__(self) -> int:
        return len(_FILE.names())


@cache
def class_defaults() -> Mapping[str, Mapping[str, object]]:
    """Return, for each ``model_type``, what its class fills in and calls its keys.

    A row holds the name of the ``class``; its ``defaults``; ``optional``, the keys without one; ``renamed``, the class's own name
    for a common one; and ``parts``, the type of each nested config, null where that may vary.

    >>> class_defaults()["gpt2"]["renamed"]["hidden_size"]
    'n_embd'
    """
    return _ClassDefaults()


def with_default(
    defaults: Mapping[str, Mapping[str, object]], model_type: str, key: str, value: object
) -> Mapping[str, Mapping[str, object]]:
    """Return the same defaults but for one key of one type."""
    row = defaults.get(model_type, {})
    own = row.get("defaults")
    changed = {**row, "defaults": {**(own if isinstance(own, Mapping) else {}), key: value}}
    return ChainMap({model_type: changed}, cast("dict[str, Mapping[str, object]]", defaults))


def class_name(model_type: str) -> str:
    """Return the name of a type's config class; empty where there is no such type.

    >>> class_name("llama")
    'LlamaConfig'
    """
    return str(class_defaults().get(model_type, {}).get("class", ""))


def named_elsewhere(key: str) -> frozenset[str]:
    """Return the common names of what some class calls by this key of its own.

    >>> sorted(named_elsewhere("n_layer"))
    ['num_hidden_layers']
    """
    return frozenset(common for common, own in _own_names() if own == key)


@cache
def _own_names() -> frozenset[tuple[str, str]]:
    rows = _FILE.entries().values()
    return frozenset(pair for row in rows for pair in row.get("renamed", {}).items())


def known_keys(model_type: str) -> frozenset[str]:
    """Return the keys that a config of this type may hold; empty for a type without defaults.

    >>> "num_hidden_layers" in known_keys("t5"), "num_hidden_layer" in known_keys("t5")
    (True, False)
    """
    row = class_defaults().get(model_type)
    if row is None:
        return frozenset()
    keys = {*_COMMON_KEYS, *_OTHER_KEYS.get(model_type, ())}
    for group in ("defaults", "optional", "parts", "renamed"):
        named = row.get(group)
        if isinstance(named, Mapping | list):
            keys.update(named)
    renamed = row.get("renamed")
    if isinstance(renamed, Mapping):
        keys.update(renamed.values())
    return frozenset(keys)


_COMMON_KEYS = frozenset({
    "model_type", "architectures", "dtype", "torch_dtype", "tie_word_embeddings", "num_labels",
    "id2label", "label2id", "bos_token_id", "eos_token_id", "pad_token_id",
    "decoder_start_token_id", "initializer_factor", "initializer_range", "init_std",
    "is_encoder_decoder", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "router_aux_loss_coef", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys that any config may hold; most of them change no size."""

_WINDOW_KEYS = frozenset({"head_dim", "layer_types", "sliding_window"})
_T5_KEYS = frozenset({"dense_act_fn", "is_gated_act", "n_positions"})
_BERT_KEYS = frozenset({"position_embedding_type"})
_FLAT_TEXT_KEYS = frozenset({
    "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size",
})  # fmt: skip
"""The language model's, in configs from before its part was nested."""

_OTHER_KEYS: dict[str, frozenset[str]] = {
    "aya_vision": frozenset({"alignment_intermediate_size"}),
    "bart": frozenset({"classif_dropout"}),
    "bert": _BERT_KEYS,
    "bloom": frozenset({"n_embed", "seq_length"}),
    "cohere2": frozenset({"head_dim"}),
    "deberta": frozenset({"position_buckets", "share_att_key"}),
    "deberta-v2": frozenset({
        "conv_act", "conv_kernel_size", "norm_rel_ebd", "position_buckets", "share_att_key",
    }),
    "deepseek_v4": frozenset({"compress_ratios"}),
    "exaone4": frozenset({"head_dim"}),
    "fuyu": _FLAT_TEXT_KEYS,
    "gemma": _WINDOW_KEYS,
    "gemma2": frozenset({"hidden_act"}),
    "glm4_moe": frozenset({"head_dim"}),
    "gpt2": frozenset({"n_ctx"}),
    "gpt_neox": frozenset({"partial_rotary_factor", "rotary_emb_base", "rotary_pct"}),
    "hunyuan_v1_dense": frozenset({"use_qk_norm"}),
    "longt5": _T5_KEYS,
    "minimax_m2": frozenset({"rotary_dim"}),
    "mistral": _WINDOW_KEYS,
    "mixtral": _WINDOW_KEYS | {"mlp_only_layers"},
    "mt5": _T5_KEYS,
    "nemotron_h": frozenset({"hybrid_override_pattern", "num_hidden_layers"}),
    "opt": frozenset({"activation_dropout"}),
    "phi": frozenset({"partial_rotary_factor"}),
    "phi3": _WINDOW_KEYS | {"attention_bias", "mlp_bias", "partial_rotary_factor"},
    "qwen2": frozenset({"head_dim"}),
    "qwen2_5_vl": _FLAT_TEXT_KEYS,
    "qwen2_moe": frozenset({"head_dim"}),
    "qwen2_vl": _FLAT_TEXT_KEYS,
    "qwen3_moe": _WINDOW_KEYS | {"max_window_layers"},
    "roberta": _BERT_KEYS,
    "t5": _T5_KEYS,
    "xlm-roberta": _BERT_KEYS,
    "xlm-roberta-xl": _BERT_KEYS,
}  # fmt: skip
"""Keys of published configs that the class's signature does not name."""
