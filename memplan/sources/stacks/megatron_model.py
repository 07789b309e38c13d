"""A model's sizes as Megatron-LM's arguments, and the class of transformers' that has the same layers."""

from memplan.sources.stacks.common.keys import Keys

_LLAMA = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
_GPT = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}
_OTHERWISE = (
    "multi_latent_attention", "squared_relu", "quick_geglu", "moe_layer_freq",
    "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias", "q_lora_rank",
    "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "hybrid_layer_pattern", "mtp_num_layers",
    "softmax_type", "window_size", "enable_gpt_oss",
)  # fmt: skip
"""What no class below has."""


def model_config(keys: Keys) -> dict[str, object] | None:
    """The config of a model with these layers; None where it has to be named, as without a vocabulary."""
    sizes = _sizes(keys)
    kinds = {key: keys.text(key) or usual for key, usual in _GPT.items()}
    others = [key for key in _OTHERWISE if keys.on(key)]
    if keys.text("moe_router_score_function") not in (None, "softmax") or keys.take(
        "rotary_percent"
    ) not in (None, 1, 1.0):
        return None
    plain = keys.flag("disable_bias_linear")
    gated, tied = keys.flag("swiglu"), not keys.flag("untie_embeddings_and_output_weights")
    biased, normed = keys.flag("add_qkv_bias"), keys.flag("qk_layernorm")
    experts, chosen = keys.count("num_experts"), keys.count("moe_router_topk") or 2
    inner = keys.count("moe_ffn_hidden_size")
    if others or sizes["vocab_size"] is None:
        return None
    if kinds == _GPT and not gated and tied and not plain and experts is None:
        return _gpt(keys, sizes)
    if kinds != _LLAMA or not gated or not plain:
        return None
    if experts is None:
        kind = "qwen3" if normed else "qwen2" if biased else "llama"
    elif biased:
        return None
    else:
        kind = "qwen3_moe" if normed else "mixtral"
        width = inner or sizes["intermediate_size"]
        names = (
            ("num_experts", "moe_intermediate_size")
            if normed
            else ("num_local_experts", "intermediate_size")
        )
        sizes |= {names[0]: experts, names[1]: width, "num_experts_per_tok": chosen}
    stem = {"qwen3_moe": "Qwen3Moe"}.get(kind, kind.capitalize())
    return {
        "name": "pretrain_gpt", "model_type": kind, "architectures": [f"{stem}ForCausalLM"],
        "tie_word_embeddings": tied, **sizes,
    }  # fmt: skip


def _sizes(keys: Keys) -> dict[str, object]:
    hidden, heads = keys.count("hidden_size") or 1, keys.count("num_attention_heads") or 1
    grouped, groups = keys.flag("group_query_attention"), keys.count("num_query_groups")
    usual = hidden * 8 // 3 // 64 * 64 if keys.flag("swiglu") else 4 * hidden
    return {
        "hidden_size": hidden, "num_attention_heads": heads,
        "num_hidden_layers": keys.count("num_layers") or 1,
        "num_key_value_heads": groups if grouped and groups is not None else heads,
        "head_dim": keys.count("kv_channels") or hidden // heads,
        "intermediate_size": keys.count("ffn_hidden_size") or usual,
        "vocab_size": keys.count("vocab_size"),
        "max_position_embeddings": keys.count("max_position_embeddings") or keys.count("seq_length"),
    }  # fmt: skip


def _gpt(keys: Keys, sizes: dict[str, object]) -> dict[str, object] | None:
    if sizes["num_key_value_heads"] != sizes["num_attention_heads"]:
        return None
    hidden = keys.number("hidden_dropout")
    return {
        "name": "pretrain_gpt", "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
        "n_embd": sizes["hidden_size"], "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"], "n_inner": sizes["intermediate_size"],
        "n_positions": sizes["max_position_embeddings"], "vocab_size": sizes["vocab_size"],
        "activation_function": "gelu", "attn_pdrop": keys.number("attention_dropout"),
        "resid_pdrop": hidden, "embd_pdrop": hidden,
    }  # fmt: skip
