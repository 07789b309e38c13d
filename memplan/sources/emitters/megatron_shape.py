"""A model's shape as Megatron-LM's arguments: decoders of equal layers, dense ones and mixtures."""

from collections.abc import Mapping
from itertools import groupby

from memplan.model.attention import AttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, NormPlacement, StackSpec
from memplan.model.mixtures import MixtureSpec, RouterScore
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task
from memplan.sources.emitters.emitted import refuse
from memplan.training.setup import TrainingSetup

_NORMS: Mapping[NormKind, str] = {
    NormKind.LAYER: "LayerNorm",
    **dict.fromkeys(
        (NormKind.RMS, NormKind.RMS_T5, NormKind.RMS_GEMMA, NormKind.RMS_UPCAST), "RMSNorm"
    ),
}
_ACTIVATIONS: Mapping[tuple[Activation, bool], dict[str, object]] = {
    (Activation.SILU, True): {"swiglu": True},
    (Activation.QUICK_GELU, True): {"quick-geglu": True},
    (Activation.RELU_SQUARED, False): {"squared-relu": True},
    (Activation.GELU, False): {}, (Activation.GELU_NEW, False): {},
    (Activation.GELU_TANH, False): {}, (Activation.GELU_FAST, False): {},
    (Activation.BLOOM_GELU, False): {},
}  # fmt: skip
"""What a network's kind needs; its own is GELU without a gate."""
_SCORES = {RouterScore.SOFTMAX: "softmax", RouterScore.SOFTMAX_SELECTED: "softmax",
           RouterScore.SIGMOID: "sigmoid"}  # fmt: skip


def shape_arguments(model: ModelSpec, setup: TrainingSetup) -> dict[str, object]:
    """What of the model's shape its arguments say.

    Raises ``SetupError`` for a model that its GPT is none of.
    """
    stack = _only_stack(model)
    layers = [run.layer for run in stack.runs for _ in range(run.count)]
    first = layers[0]
    values: dict[str, object] = {
        "num-layers": len(layers),
        "hidden-size": model.hidden_size,
        **_attention(first, model),
        **_networks(layers, model),
        **_norm(first.norm, model),
        **_positions(stack, first),
    }
    if not any(_has_bias(each.feed_forward) for each in layers):
        values["disable-bias-linear"] = True
    if not model.head.tied:
        values["untie-embeddings-and-output-weights"] = True
    weights = 0.0 if isinstance(first.attention, LatentAttentionSpec) else _dropout_of(first)
    of_layer = first.dropout if setup.dropout is None else setup.dropout
    values["attention-dropout"] = weights if setup.dropout is None else setup.dropout
    values["hidden-dropout"] = of_layer
    values["vocab-size"] = model.vocab_size
    values["max-position-embeddings"] = max(model.context_length, setup.seq_len or 1)
    return values


def _only_stack(model: ModelSpec) -> StackSpec:
    if len(model.stacks) != 1 or model.task is not Task.CAUSAL_LM:
        raise _not_gpt(model, f"{len(model.stacks)} stacks for {model.task.value}")
    stack = model.stacks[0]
    for run in stack.runs:
        layer = run.layer
        if run.shared or layer.placement is not NormPlacement.PRE:
            raise _not_gpt(model, f"norms placed {layer.placement.value}")
        if layer.cross_attention is not None:
            raise _not_gpt(model, "cross attention")
        if type(layer.attention) is not type(stack.runs[0].layer.attention):
            raise _not_gpt(model, "layers of unlike attention")
    return stack


def _not_gpt(model: ModelSpec, why: str) -> Exception:
    return refuse(
        f"pretrain_gpt.py's model is a decoder of equal layers with norms before them, and {model.name} "
        f"({model.family}) has {why}"
    )


def _attention(layer: LayerSpec, model: ModelSpec) -> dict[str, object]:
    spec = layer.attention
    if isinstance(spec, LatentAttentionSpec):
        values: dict[str, object] = {
            "num-attention-heads": spec.num_heads, "multi-latent-attention": True,
        }  # fmt: skip
        if spec.query_rank is not None:
            values["q-lora-rank"] = spec.query_rank
        return {
            **values,
            "kv-lora-rank": spec.key_value_rank,
            "qk-head-dim": spec.plain_head_dim,
            "qk-pos-emb-head-dim": spec.rotary.dim,
            "v-head-dim": spec.value_head_dim,
            "qk-layernorm": True,
        }
    if not isinstance(spec, AttentionSpec):
        raise _not_gpt(model, "layers without attention")
    if not spec.causal or spec.sinks or spec.softcap:
        raise _not_gpt(model, "attention of another kind")
    values = {"num-attention-heads": spec.num_heads, "kv-channels": spec.head_dim}
    if spec.num_kv_heads != spec.num_heads:
        values |= {"group-query-attention": True, "num-query-groups": spec.num_kv_heads}
    if spec.query_bias and not spec.output_bias:
        values["add-qkv-bias"] = True
    if spec.query_key_norm is not None:
        values["qk-layernorm"] = True
    return values


def _dropout_of(layer: LayerSpec) -> float:
    spec = layer.attention
    return spec.dropout if isinstance(spec, AttentionSpec) else 0.0


def _networks(layers: list[LayerSpec], model: ModelSpec) -> dict[str, object]:
    """Feed-forward networks; where some layers have experts and some have not, which."""
    dense = {each for layer in layers if isinstance(each := layer.feed_forward, FeedForwardSpec)}
    mixtures = {each for layer in layers if isinstance(each := layer.feed_forward, MixtureSpec)}
    if len(dense) > 1 or len(mixtures) > 1 or not dense | mixtures:
        raise _not_gpt(model, "feed-forward networks of unlike widths")
    mixture = next(iter(mixtures), None)
    network = next(iter(dense), mixture.expert if mixture is not None else None)
    assert network is not None
    values = {"ffn-hidden-size": network.intermediate_size, **_activation(network, model)}
    if mixture is None:
        return values
    return {**values, **_experts(mixture), **_which_have_experts(layers)}


def _activation(network: FeedForwardSpec, model: ModelSpec) -> dict[str, object]:
    found = _ACTIVATIONS.get((network.activation, network.gated))
    if found is None:
        raise _not_gpt(model, f"{'gated ' * network.gated}{network.activation.value}")
    return found


def _experts(mixture: MixtureSpec) -> dict[str, object]:
    values: dict[str, object] = {
        "num-experts": mixture.num_experts,
        "moe-router-topk": mixture.num_experts_per_token,
        "moe-ffn-hidden-size": mixture.expert.intermediate_size,
        "moe-grouped-gemm": True,
        "moe-token-dispatcher-type": "alltoall",
    }
    score = _SCORES.get(mixture.router.score)
    if score is not None:
        values["moe-router-score-function"] = score
    if mixture.router.correction:
        values["moe-router-enable-expert-bias"] = True
    if mixture.shared is not None:
        values["moe-shared-expert-intermediate-size"] = mixture.shared.intermediate_size
    return values


def _which_have_experts(layers: list[LayerSpec]) -> dict[str, object]:
    """A Python list of ones and zeros, as its argument takes it; nothing where all have."""
    flags = [int(isinstance(each.feed_forward, MixtureSpec)) for each in layers]
    if all(flags):
        return {}
    runs = [(flag, len(list(group))) for flag, group in groupby(flags)]
    return {"moe-layer-freq": f'"({"+".join(f"[{flag}]*{count}" for flag, count in runs)})"'}


def _norm(norm: NormSpec, model: ModelSpec) -> dict[str, object]:
    name = _NORMS.get(norm.kind)
    if name is None:
        raise _not_gpt(model, f"norms of the kind {norm.kind.value}")
    return {"normalization": name}


def _positions(stack: StackSpec, layer: LayerSpec) -> dict[str, object]:
    embedding: EmbeddingSpec | None = stack.embedding
    if embedding is not None and embedding.num_positions:
        return {"position-embedding-type": "learned_absolute"}
    spec = layer.attention
    rotary = getattr(spec, "rotary", None)
    if rotary is None:
        return {"position-embedding-type": "none"}
    values: dict[str, object] = {"position-embedding-type": "rope"}
    if isinstance(spec, AttentionSpec) and rotary.dim != spec.head_dim:
        values["rotary-percent"] = rotary.dim / spec.head_dim
    return values


def _has_bias(network: object) -> bool:
    if isinstance(network, MixtureSpec):
        return network.expert.bias
    return isinstance(network, FeedForwardSpec) and network.bias
