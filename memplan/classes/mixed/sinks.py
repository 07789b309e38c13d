"""Attention with sinks: a learned score of each head joins its softmax as one more key (gpt-oss, MiMo-V2).

(transformers 5.23: models/gpt_oss, models/mimo_v2_flash)
"""

from collections.abc import Callable, Mapping

from memplan.classes.llama import (
    FULL,
    SLIDING,
    BothMasksModel,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LocalTablesModel,
    Window,
    halves,
    head_width,
)
from memplan.classes.mixed.deepseek import DeepseekV3MoE
from memplan.classes.mixed.experts import NarrowExperts
from memplan.classes.mixed.mixtures import (
    MixtureBlock,
    MixtureLayer,
    MixtureModel,
    typed_sparse,
    typed_window,
)
from memplan.classes.mixed.routers import Routed, Router
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.selective import recomputes_core_attention, region_since
from memplan.graph.modules.attention import Attended, attention_function, matmul
from memplan.graph.modules.basic import Norm, UpcastRMSNorm, dropout
from memplan.graph.modules.functional import (
    clamped,
    expanded,
    less_largest,
    linear,
    softmax,
    topk,
)
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import (
    RotaryEmbedding,
    Tables,
    Turn,
    apply_rotary_to_part,
    concatenate,
)
from memplan.graph.modules.run import Run
from memplan.model.attention import AttentionForm
from memplan.model.config import ConfigReader
from memplan.model.mixtures import RouterScore
from memplan.model.parameters import WeightRole


class SinkAttention(LlamaAttention):
    form = AttentionForm.OWN
    sinks: Weight

    def attend(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        return attention_function(self.run, self.eager)(query, key, value, mask, probability)

    def eager(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        """The class's ``eager_attention_forward``, whose variables are named in its own way."""
        raise NotImplementedError


def sinks_of(module: Module, sinks: Weight, scores: Handle) -> Handle:
    """Each head's, for every row of the scores."""
    return expanded(module.operand(sinks), (*scores.shape[:-1], 1))


def recomputed(run: Run, start: int) -> None:
    """Selective checkpointing runs what was recorded since again."""
    if recomputes_core_attention(run.options):
        run.segment.regions.append(region_since(run.segment, start))


def sink_attention(
    module: Module,
    own: Weight,
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Handle | None,
    probability: float,
) -> Attended:
    """``eager_attention_forward`` of gpt-oss."""
    start, groups = len(query.run.segment.operations), query.shape[1] // key.shape[1]
    key_states = key.repeat_heads(groups)
    value_states = value.repeat_heads(groups)
    attn_weights = matmul(query, key_states.transpose(2, 3)) * 1.0
    if mask is not None:
        attn_weights = attn_weights + mask
    sinks = sinks_of(module, own, attn_weights)
    combined_logits = concatenate(attn_weights, sinks)
    combined_logits = less_largest(combined_logits)
    probs = softmax(combined_logits, in_own_dtype=True)
    scores = probs.narrow(attn_weights.shape[-1])
    attn_weights = dropout(scores, probability).to(value_states.dtype)
    attn_output = matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()
    recomputed(query.run, start)
    return attn_output, attn_weights


def turned_halves(x: Handle, cos: Handle, sin: Handle) -> Handle:
    """``_apply_rotary_emb``."""
    first_half, second_half = halves(x)
    first = first_half * cos - second_half * sin
    second = second_half * cos + first_half * sin
    return concatenate(first, second)


def apply_rotary_by_halves(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """gpt-oss's, by tables of half a head."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turned_query = turned_halves(query, cos, sin)
    turned_key = turned_halves(key, cos, sin)
    return turned_query, turned_key


class GptOssAttention(SinkAttention):
    turn: Turn = staticmethod(apply_rotary_by_halves)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.sinks = Weight(self.num_heads)

    def eager(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        return sink_attention(self, self.sinks, query, key, value, mask, probability)


class HalfRotaryEmbedding(RotaryEmbedding):
    def doubled(self, freqs: Handle, width: int) -> Handle:  # noqa: ARG002
        """Each angle stays once."""
        return freqs


class GptOssExperts(NarrowExperts):
    as_modules = False
    is_transposed = True

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        down_proj = self.weights.pop("down_proj")
        self.gate_up_proj_bias = Weight(self.num_experts, 2 * self.intermediate_dim)
        self.down_proj = down_proj
        self.down_proj_bias = Weight(self.num_experts, self.hidden_dim)

    def apply_gate(self, gate_up_out: Handle) -> Handle:
        """Gates and ups lie in turn; each is clamped."""
        width = gate_up_out.shape[-1] // 2
        gate, up = gate_up_out.narrow(width), gate_up_out.narrow(width)
        gate = clamped(gate, bounds=1)
        up = clamped(up, bounds=2)
        glu = gate * (gate * 1.702).unary(OperationKind.SIGMOID)
        gated_output = (up + 1) * glu
        return gated_output


class GptOssTopKRouter(Router):
    score = RouterScore.SOFTMAX_SELECTED

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.bias = Weight(self.num_experts, role=WeightRole.OTHER)

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = linear(hidden_states, self, self.weight, self.bias)
        router_top_value, router_indices = topk(router_logits, self.top_k)
        router_scores = softmax(router_top_value, in_own_dtype=True)
        return router_logits, router_scores, router_indices


class GptOssMLP(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.router = GptOssTopKRouter(config)
        self.experts = GptOssExperts(config)

    def forward(self, hidden_states: Handle) -> tuple[Handle, Handle]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, hidden_dim)
        _, router_scores, router_indices = self.router(hidden_states)
        hidden_states = self.experts(hidden_states, router_indices, router_scores)
        hidden_states = hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return hidden_states, router_scores


class GptOssDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = GptOssAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = GptOssMLP
    norm_class: Callable[[int], Norm] = UpcastRMSNorm

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x, _ = self.mlp(x)
        x = residual + x
        return x


class GptOssModel(BothMasksModel, MixtureModel):
    layer_class: type[LlamaDecoderLayer] = GptOssDecoderLayer
    norm_class: Callable[[int], Norm] = UpcastRMSNorm
    rotary_class = HalfRotaryEmbedding
    eager_only = True

    def window(self, config: ConfigReader, number: int) -> Window:
        return typed_window(config, number, local=not number % 2)


class MiMoV2FlashAttention(SinkAttention):
    turn: Turn = staticmethod(apply_rotary_to_part)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.is_swa = kind.window is not None
        super().__init__(config, kind)
        if self.is_swa:
            self.sinks = Weight(self.num_heads)

    def add_projections(self, config: ConfigReader) -> None:
        self.num_kv_heads *= 1 + self.is_swa
        self.v_head_dim = config.optional_integer("v_head_dim")
        super().add_projections(config)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("attention_bias"), False

    def projected(self, x: Handle) -> Heads:
        query, key, value = super().projected(x)
        return query, key, value * 0.707

    def eager(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        start, groups = len(self.run.segment.operations), query.shape[1] // key.shape[1]
        key_states = key.repeat_heads(groups)
        value_states = value.repeat_heads(groups)
        attn_weights = matmul(query, key_states.transpose(2, 3)) * 1.0
        if mask is not None:
            attn_weights = attn_weights + mask
        if self.is_swa:
            sinks = sinks_of(self, self.sinks, attn_weights)
            attn_weights = concatenate(attn_weights, sinks)
        attn_weights = less_largest(attn_weights)
        probs = softmax(attn_weights, in_own_dtype=True)
        if self.is_swa:
            probs = probs.narrow(probs.shape[-1] - 1)
        attn_weights = dropout(probs, probability).to(value_states.dtype)
        attn_output = matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).contiguous()
        recomputed(self.run, start)
        return attn_output, attn_weights


class MiMoV2FlashMoE(DeepseekV3MoE):
    def num_shared(self, _config: ConfigReader) -> int:
        return 0


class MiMoV2FlashDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = MiMoV2FlashAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = MiMoV2FlashMoE


class TypedRotaryEmbedding(RotaryEmbedding):
    """Layers with and without a window each turn a share of their own."""

    def __init__(self, width: int, local_width: int) -> None:
        super().__init__(width)
        self.local_width = local_width

    def width_of(self, window: Window) -> int:
        return self.width if window is None else self.local_width


def typed_rotary(
    config: ConfigReader, silent: tuple[float, float], unsaid: float = 1.0
) -> TypedRotaryEmbedding:
    """Of the shares in ``rope_parameters``; ``silent`` are those of a config without such, ``unsaid`` that of
    parameters that name none."""
    parameters = config.mapping("rope_parameters")
    shares = list(silent)
    for at, name in enumerate((FULL, SLIDING) if parameters is not None else ()):
        own = parameters.get(name) if parameters is not None else None
        share = own.get("partial_rotary_factor") if isinstance(own, Mapping) else None
        shares[at] = float(share) if isinstance(share, int | float) else unsaid
    width = head_width(config)
    return TypedRotaryEmbedding(*(int(width * share) for share in shares))


class MiMoV2FlashModel(LocalTablesModel, MixtureModel):
    layer_class: type[LlamaDecoderLayer] = MiMoV2FlashDecoderLayer
    eager_only = True
    adds_router_loss = False

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.rotary_emb = typed_rotary(config, (0.334, 0.334), 0.334)

    def window(self, config: ConfigReader, number: int) -> Window:
        return typed_window(config, number, local=number != 0 and (number + 1) % 6 != 0)

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        return typed_sparse(config, number)
