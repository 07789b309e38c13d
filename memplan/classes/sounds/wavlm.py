"""WavLM: a bias for every distance, which the first layer makes and each layer gates anew.

(transformers 5.23, models/wavlm/modeling_wavlm.py; torch 2.13, ``F.multi_head_attention_forward``)
"""

from memplan.classes.sounds.tasks import ENDINGS
from memplan.classes.sounds.wav2vec2 import (
    Wav2Vec2Encoder,
    Wav2Vec2EncoderLayer,
    Wav2Vec2EncoderLayerStableLayerNorm,
    Wav2Vec2EncoderStableLayerNorm,
    Wav2Vec2Model,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.experts.routing import sum_dtype
from memplan.graph.modules.basic import Embedding, Linear, dropout
from memplan.graph.modules.functional import (
    batched_product,
    in_rows_again,
    linear,
    repeated,
    softmax,
)
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.strides import row_strides
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, WeightRole

GATES = 2, 4
"""Outputs of a linear layer for the gates of a bias: of each gate the sum of so many."""


class WavLMAttention(Module):
    block = LayerBlock.ATTENTION
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear

    def __init__(self, config: ConfigReader, *, is_first: bool) -> None:
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        self.num_heads = heads
        self.head_dim = config.divide("hidden_size", hidden, "num_attention_heads", heads)
        self.dropout = config.number("attention_dropout", default=0.0)
        self.gru_rel_pos_const = Weight(1, heads, 1, 1)
        for name, role in _ROLES.items():
            setattr(self, name, Linear(hidden, hidden, bias=True, role=role))
        self.gru_rel_pos_linear = Linear(self.head_dim, GATES[0] * GATES[1], bias=True)
        if is_first:
            self.rel_attn_embed = Embedding(config.integer("num_buckets"), heads)
            self.rel_attn_embed.turned = True

    def forward(
        self, hidden_states: Handle, position_bias: Handle | None
    ) -> tuple[Handle, Handle, Handle]:
        batch, length, _ = hidden_states.shape
        rows = batch * self.num_heads
        if position_bias is None:
            position_bias = self.compute_bias(length)
            position_bias = repeated(position_bias, batch)
        gated_hidden_states = hidden_states.view(batch, length, self.num_heads, -1)
        gated_hidden_states = gated_hidden_states.permute(0, 2, 1, 3)
        relative_position_proj = self.gru_rel_pos_linear(gated_hidden_states)
        relative_position_proj = sum_of_each(relative_position_proj)
        gate_a, gate_b = relative_position_proj.unary(OperationKind.SIGMOID).split(1, 1)
        gate_output = gate_a * (gate_b * self.operand(self.gru_rel_pos_const) + -1.0) + 2.0
        gated_position_bias = gate_output.view(rows, length, 1) * position_bias
        attn_output, attn_weights = self.attend(hidden_states, gated_position_bias)
        return attn_output, attn_weights, position_bias

    def compute_bias(self, length: int) -> Handle:
        shape = length, length
        relative_position = made_by(self.run, OperationKind.SUB, shape, DType.INT64)
        relative_position_bucket = bucket(relative_position)
        values = self.rel_attn_embed(shape, relative_position_bucket)
        values = values.permute(2, 0, 1)
        return values

    def attend(self, x: Handle, attn_mask: Handle) -> tuple[Handle, Handle]:
        """``F.multi_head_attention_forward``, and the mean of all heads' weights."""
        batch, length, size = x.shape
        query = x.transpose(0, 1)
        layers = self.q_proj, self.k_proj, self.v_proj
        in_proj_bias = concatenate(*(each.operand(each.bias) for each in layers))
        b_q, b_k, b_v = in_proj_bias.split(size, size, size)
        q = self.projected(self.q_proj, query, b_q)
        k = self.projected(self.k_proj, query, b_k)
        v = self.projected(self.v_proj, query, b_v)
        q, k, v = self.in_rows(q), self.in_rows(k), self.in_rows(v)
        q_scaled = q * 1.0
        attn_output_weights = added_scores(attn_mask, q_scaled, k.transpose(1, 2))
        del q_scaled, k
        attn_output_weights = softmax(attn_output_weights)
        attn_output_weights = dropout(attn_output_weights, self.dropout)
        attn_output = batched_product(attn_output_weights, v)
        del v
        attn_output = attn_output.transpose(0, 1).contiguous().view(length, batch, size)
        out = self.out_proj
        attn_output = linear(attn_output, out, out.weight, out.bias)
        attn_output_weights = mean_of_heads(attn_output_weights, batch)
        return attn_output.transpose(0, 1), attn_output_weights

    def projected(self, layer: Linear, x: Handle, bias: Handle) -> Handle:
        """What lies across is copied into rows and multiplied; its bias is added to that."""
        bias.record.by_column = True
        if x.run.autocast is not None:
            bias = bias.to(x.run.autocast)
        made = in_rows_again(Handle(x.run, layer.product(x), x.shape, flat=True))
        made += bias
        return made

    def in_rows(self, x: Handle) -> Handle:
        """``x.view(tokens, batch * heads, head_dim).transpose(0, 1)``."""
        shape = x.shape[0], x.shape[1] * self.num_heads, self.head_dim
        return x.viewed(shape, row_strides(shape)).transpose(0, 1)


_ROLES = {
    "k_proj": WeightRole.QUERY_KEY, "v_proj": WeightRole.MATRIX, "q_proj": WeightRole.QUERY_KEY,
    "out_proj": WeightRole.ATTENTION_OUTPUT,
}  # fmt: skip


def bucket(relative_positions: Handle) -> Handle:
    """``WavLMAttention._relative_positions_bucket``: distances both ways, near ones of their own."""
    kinds = OperationKind
    relative_buckets = relative_positions.apart(kinds.GT, dtype=DType.BOOL)
    relative_buckets = relative_buckets.apart(kinds.TO, dtype=DType.INT64)
    relative_buckets = relative_buckets.apart(kinds.MUL_SCALAR)
    relative_positions = relative_positions.apart(kinds.ABS)
    is_small = relative_positions.apart(kinds.LT, dtype=DType.BOOL)
    large = relative_positions.apart(kinds.TO, dtype=DType.FP32).apart(kinds.DIV).apart(kinds.LOG)
    large = large.apart(kinds.DIV)
    large = large.apart(kinds.MUL_SCALAR)
    position_if_large = large.apart(kinds.ADD).apart(kinds.TO, dtype=DType.INT64)
    position_if_large = position_if_large.apart(kinds.MINIMUM, position_if_large.apart(kinds.ONES))
    relative_buckets += relative_positions.apart(kinds.WHERE, is_small, position_if_large)
    return relative_buckets


def sum_of_each(proj: Handle) -> Handle:
    """``proj.view(batch, heads, tokens, *GATES).sum(-1)``."""
    run, (batch, heads, rows, _) = proj.run, proj.shape
    shape = batch, heads, rows, GATES[0]
    made = empty(run, shape, sum_dtype(run, proj.dtype))
    run.record(OperationKind.SUM, (proj.record,), (made.record,), gradients=(Gradient.FRESH,))
    return made


def added_scores(added: Handle, query: Handle, key: Handle) -> Handle:
    """``torch.baddbmm``: products and what is added to them in one."""
    run = query.run
    if run.autocast is not None:
        added = added.to(run.autocast)
    made = empty(run, added.shape, query.dtype)
    run.record(
        OperationKind.BADDBMM, (added.record, query.record, key.record), (made.record,),
        saves=(query.record, key.record),
        gradients=(Gradient.ALIAS, Gradient.FRESH, Gradient.FRESH),
        flops=2 * made.numel * query.shape[-1],
    )  # fmt: skip
    for each in (query, key):
        each.leads_to(made, in_rows(each.shape))
    return made


def mean_of_heads(weights: Handle, batch: int) -> Handle:
    """``weights.view(batch, heads, tokens, tokens).mean(dim=1)``."""
    rows, tokens, keys = weights.shape
    made = weights.run.mean(weights.record, rows // batch)
    return Handle(weights.run, made, (batch, tokens, keys))


class WavLMEncoderLayer(Wav2Vec2EncoderLayer):
    attention_class = WavLMAttention
    hands_on = 1


class WavLMEncoderLayerStableLayerNorm(Wav2Vec2EncoderLayerStableLayerNorm):
    attention_class = WavLMAttention
    hands_on = 1


class WavLMEncoder(Wav2Vec2Encoder):
    layer_class = WavLMEncoderLayer
    first_differs = True


class WavLMEncoderStableLayerNorm(Wav2Vec2EncoderStableLayerNorm):
    layer_class = WavLMEncoderLayerStableLayerNorm
    first_differs = True


class WavLMModel(Wav2Vec2Model):
    prefix = "wavlm"
    endings = ENDINGS
    encoder_class = WavLMEncoder
    stable_class = WavLMEncoderStableLayerNorm
