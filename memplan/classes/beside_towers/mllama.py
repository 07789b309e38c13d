"""Llama 3.2 Vision's text: Llama's layers, and some that attend to pictures alone.

(transformers 5.23, models/mllama/modeling_mllama.py)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    MLP,
    DecoderLayer,
    GatedMLP,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    SelfAttention,
    head_counts,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, attention_function, in_heads
from memplan.graph.modules.basic import Embedding, Linear, RMSNorm
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.module import Weight
from memplan.graph.modules.rotary import Tables
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.mixers import MixerSpec
from memplan.model.parameters import LayerBlock, WeightRole

CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
"""Where ``MllamaTextConfig`` has cross attention unless told otherwise."""
IMAGE_ROWS = 8
"""Rows for image tokens beside the vocabulary's (``MllamaTextModel``)."""

Seen = tuple[Handle, Handle, Handle]
"""What pictures became, which of it each token sees, and whether it sees any."""


class MllamaTextSelfAttention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.attention_dropout = config.number("dropout")

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return False, False

    def projected(self, x: Handle) -> tuple[Handle, Handle, Handle]:
        query_states = self.q_proj(x)
        key_states = self.k_proj(x)
        value_states = self.v_proj(x)
        query_states = in_heads(query_states, self.head_dim)
        key_states = in_heads(key_states, self.head_dim)
        value_states = in_heads(value_states, self.head_dim)
        return query_states, key_states, value_states


class MllamaTextCrossAttention(SelfAttention):
    block = LayerBlock.CROSS_ATTENTION

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.num_heads, self.num_kv_heads = head_counts(config)
        self.head_dim = config.divide("hidden_size", hidden, "num_attention_heads", self.num_heads)
        self.dropout = config.number("dropout")
        width, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(hidden, width, role=WeightRole.QUERY_KEY)
        self.k_proj = Linear(hidden, narrow, role=WeightRole.QUERY_KEY)
        self.v_proj = Linear(hidden, narrow)
        self.o_proj = Linear(width, hidden, role=WeightRole.ATTENTION_OUTPUT)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)

    def facts(self) -> MixerSpec:
        return MixerSpec()

    def forward(self, x: Handle, states: Handle, mask: Handle) -> Attended:
        batch, length, _ = x.shape
        query_states = self.q_proj(x)
        query_states = in_heads(query_states, self.head_dim)
        query_states = self.q_norm(query_states)
        key_states = self.k_proj(states)
        value_states = self.v_proj(states)
        key_states = in_heads(key_states, self.head_dim)
        value_states = in_heads(value_states, self.head_dim)
        key_states = self.k_norm(key_states)
        attend = attention_function(self.run, causal=False)
        out, weights = attend(query_states, key_states, value_states, mask, self.dropout)
        out = out.reshape(batch, length, -1)
        out = self.o_proj(out)
        return out, weights


class MllamaSelfAttentionDecoderLayer(LlamaDecoderLayer):
    attention_class = MllamaTextSelfAttention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = residual + x
        return x


class MllamaCrossAttentionDecoderLayer(DecoderLayer):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.cross_attn = MllamaTextCrossAttention(config)
        self.input_layernorm = RMSNorm(hidden)
        self.cross_attn_attn_gate = Weight(1, role=WeightRole.OTHER)
        self.mlp = GatedMLP(config)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.cross_attn_mlp_gate = Weight(1, role=WeightRole.OTHER)

    def forward(self, x: Handle, states: Handle, mask: Handle, rows: Handle) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.cross_attn(x, states, mask)
        x = residual + self.operand(self.cross_attn_attn_gate).tanh() * x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = rows * x
        x = residual + self.operand(self.cross_attn_mlp_gate).tanh() * x
        return x


def made_layer(config: ConfigReader, kind: LayerKind) -> DecoderLayer:
    """One of the two."""
    if not kind.attends:
        return MllamaCrossAttentionDecoderLayer(config)
    return MllamaSelfAttentionDecoderLayer(config, kind)


class ImageTokensEmbedding(Embedding):
    """A table with rows for image tokens behind the vocabulary's."""

    def __init__(
        self, num_rows: int, width: int, *, role: WeightRole = WeightRole.TOKEN_TABLE
    ) -> None:
        super().__init__(num_rows + IMAGE_ROWS, width, role=role)


class MllamaTextModel(LlamaModel):
    extra_rows = IMAGE_ROWS
    tied_by_default = False
    is_inside = False
    """It is a part of a model that sees, which leaves its logits as they are."""
    layer_class = staticmethod(made_layer)
    embedding_class = ImageTokensEmbedding
    seen: Handle | None = None
    """What the pictures of the next pass became."""
    tiles = 0
    """Of all pictures of a sample."""

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        crossing = set(config.integers("cross_attention_layers") or CROSS_LAYERS)
        count = config.layers("num_hidden_layers")
        turned = [number not in crossing for number in range(count)]
        return [LayerKind(turned=each, attends=each) for each in turned]

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        seen = self.looked_at(length)
        embeds = self.embedded(batch, length) if received is None else received
        positions = position_ids(self.run, batch, length)
        mask = self.masks(batch, length)[None]
        x = embeds
        tables = self.rotary_emb(x, positions)
        for layer in self.layers:
            if layer.kind.attends:
                x = layer(x, tables, mask, unread=positions)
            elif seen is None:
                layer.pass_over(x)
            else:
                x = layer(x, *seen, unread=positions)
        x = self.norm(x)
        return x

    def looked_at(self, length: int) -> Seen | None:
        """What pictures became, and which token sees what of it; None: it is shown none."""
        if self.seen is None:
            return None
        states, self.seen = self.seen, None
        return states, *prepared_mask(states, length, self.tiles)

    def adjusted(self, logits: Handle) -> Handle:
        return logits if self.is_inside else logits.float()


def prepared_mask(states: Handle, length: int, tiles: int) -> tuple[Handle, Handle]:
    """``_prepare_cross_attention_mask``: which of the pictures' ``tiles`` each token sees."""
    run, (batch, tokens, _) = states.run, states.shape
    given = from_batch(run, batch * length * tiles, DType.INT64)
    pairs = batch, 1, length, tokens
    mask = empty(run, pairs, DType.INT64)
    run.record(OperationKind.REPEAT_INTERLEAVE, (given,), (mask.record,))
    inverted = mask.apart(OperationKind.SUB, dtype=DType.FP32).apart(
        OperationKind.TO, dtype=run.compute
    )
    mask = masked(inverted)
    seen = mask.apart(OperationKind.EQ, dtype=DType.BOOL)
    rows = made_from(OperationKind.MAX, (batch, length, 1), run.compute, seen)
    return mask, rows


def masked(inverted: Handle) -> Handle:
    """``inverted.masked_fill(inverted.to(torch.bool), ...)``."""
    hidden = inverted.apart(OperationKind.TO, dtype=DType.BOOL)
    return inverted.apart(OperationKind.MASKED_FILL, hidden)
