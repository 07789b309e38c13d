"""LongT5: T5 with an encoder whose tokens see their neighbours, and maybe summaries of all blocks.

Each block of tokens attends to itself and to both neighbours: keys and values are padded by a block on either
side and joined out of three slices; the bias, in which the mask is, is added to the scores in place. The class
ties whatever the file says, as T5's does. (transformers 5.23, models/longt5/modeling_longt5.py)
"""

from memplan.classes.translating.t5 import (
    BlockKind,
    BlockParts,
    DenseActDense,
    RelativeBias,
    T5Attention,
    T5LayerCrossAttention,
    T5LayerFF,
    T5LayerNorm,
    T5LayerSelfAttention,
    T5Model,
    T5Stack,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.basic import Dropout, dropout
from memplan.graph.modules.contractions import einsum
from memplan.graph.modules.functional import made_from, padded, softmax
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.masks import padded_mask
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.run import Run
from memplan.model.config import ConfigReader
from memplan.units import ceil_div

LOCAL = "local"
TRANSIENT_GLOBAL = "transient-global"


def split_into_blocks(x: Handle, block_len: int, dim: int = 1) -> Handle:
    """``_split_into_blocks``, the last of them filled up."""
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    num_blocks = ceil_div(size, block_len)
    if size % block_len:
        x = padded(x, (*before, num_blocks * block_len, *after))
    return x.reshape(*before, num_blocks, block_len, *after)


def concatenate_3_blocks(x: Handle) -> Handle:
    """``_concatenate_3_blocks``: each block between its neighbours."""
    batch, num_blocks, *rest = x.shape
    x = padded(x, (batch, num_blocks + 2, *rest))
    blocks_list = [x.narrow(num_blocks, dim=1) for _ in range(3)]
    return concatenate(*blocks_list, dim=2)


def local_attention_mask(run: Run, batch: int, length: int, block_len: int) -> Handle:
    """``_get_local_attention_mask``: which neighbours are there, and near enough."""
    shape = batch, ceil_div(length, block_len), block_len, 3 * block_len
    mask = made_by(run, OperationKind.BITWISE_AND, shape, DType.BOOL)
    mask = mask.apart(OperationKind.BITWISE_AND)
    return mask.unsqueeze(1)


def penalty(seen: Handle) -> Handle:
    """``torch.where(seen > 0, 0.0, -1e10)``, in fp32."""
    return seen.apart(OperationKind.GT, dtype=DType.BOOL).apart(
        OperationKind.WHERE, dtype=DType.FP32
    )


def with_mask(bias: Handle, mask: Handle, shape: tuple[int, ...]) -> Handle:
    """Their sum in fp32: what the bias is spread to is summed up in its gradient, which then is cast."""
    run, made = bias.run, empty(bias.run, shape, DType.FP32)
    sums = bias.dtype is not DType.FP32 and made.numel > bias.numel
    run.record(
        OperationKind.ADD, (bias.record, mask.record), (made.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=(allocated_bytes(bias.numel, DType.FP32), RESULT) if sums else (),
    )  # fmt: skip
    return made


def add_bias(scores: Handle, bias: Handle) -> Handle:
    """``scores += bias`` on a view: backward copies the gradient, lets it go, and copies the copy twice,
    one of them cast for the bias (torch 2.13, ``CopySlices``)."""
    run, made = scores.run, scores.run.view(scores.record, scores.numel)
    copy = allocated_bytes(scores.numel, scores.dtype)
    run.record(
        OperationKind.ADD_IN_PLACE, (scores.record, bias.record), (made,),
        gradients=(Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=() if bias.dtype is scores.dtype else (RESULT, copy, RESULT),
    )  # fmt: skip
    seen = run.view(made, scores.numel)
    run.record(OperationKind.VIEW, (made,), (seen,), gradients=(Gradient.FRESH,))
    return scores.leads_to(Handle(run, seen, scores.shape, scores.strides))


class LongT5LocalAttention(T5Attention):
    def __init__(self, config: ConfigReader, *, biased: bool) -> None:
        super().__init__(config, causal=False, biased=biased)
        self.block_len = config.integer("local_radius") + 1

    def shape(self, states: Handle) -> Handle:
        """By heads."""
        return states.view(states.shape[0], -1, self.num_heads, self.head_dim)

    def bias_shape(self, batch: int, length: int) -> tuple[int, ...]:
        """Of each block, for each head."""
        return (
            batch, ceil_div(length, self.block_len), self.num_heads, self.block_len,
            3 * self.block_len,
        )  # fmt: skip

    def compute_bias(self, query_length: int, key_length: int) -> Handle:
        """Where ``self.relative_attention_bias.weight.device`` says."""
        self.read_apart(self.relative_attention_bias, called=True)
        return super().compute_bias(query_length, key_length)

    def forward(
        self, x: Handle, mask: Handle, position_bias: Handle | None
    ) -> tuple[Handle, Handle]:
        batch, seq_length, _ = x.shape
        query_states = self.shape(self.q(x))
        key_states = self.shape(self.k(x))
        value_states = self.shape(self.v(x))
        query_states = split_into_blocks(query_states, self.block_len)
        key_states = split_into_blocks(key_states, self.block_len)
        value_states = split_into_blocks(value_states, self.block_len)
        key_states = concatenate_3_blocks(key_states)
        value_states = concatenate_3_blocks(value_states)
        scores = einsum("bnqhd,bnkhd->bnhqk", query_states, key_states)
        if position_bias is None:
            position_bias = self.compute_bias(self.block_len, 3 * self.block_len)
            mask = penalty(mask)
            position_bias = with_mask(position_bias, mask, self.bias_shape(batch, seq_length))
        scores = add_bias(scores, position_bias)
        attn_weights = softmax(scores.float()).to(scores.dtype)
        attn_weights = dropout(attn_weights, self.dropout)
        attn_weights = attn_weights.to(value_states.dtype)
        attn_output = self.unshape(einsum("bnhqk,bnkhd->bnqhd", attn_weights, value_states))
        attn_output = attn_output.narrow(seq_length, dim=1)
        attn_output = self.o(attn_output)
        return attn_output, position_bias

    def unshape(self, states: Handle) -> Handle:
        """By tokens."""
        return states.contiguous().view(states.shape[0], -1, self.num_heads * self.head_dim)


class LongT5TransientGlobalAttention(LongT5LocalAttention):
    """Each token sees a summary of every block too."""

    def __init__(self, config: ConfigReader, *, biased: bool) -> None:
        super().__init__(config, biased=biased)
        self.global_block_size = config.integer("global_block_size")
        if biased:
            buckets = config.integer("relative_attention_num_buckets")
            self.global_relative_attention_bias = RelativeBias(buckets, self.num_heads)
        self.global_input_layer_norm = T5LayerNorm(config.integer("d_model"))

    def forward(
        self, x: Handle, mask: Handle, position_bias: Handle | None
    ) -> tuple[Handle, Handle]:
        batch, seq_length, _ = x.shape
        num_globals = seq_length // self.global_block_size
        block_ids, global_segment_ids = global_fixed_block_ids(mask, num_globals)
        global_inputs = global_aggregates(x, block_ids, num_globals)
        global_inputs = self.global_input_layer_norm(global_inputs)
        query_states = self.shape(self.q(x))
        key_states = self.shape(self.k(x))
        value_states = self.shape(self.v(x))
        side_key_states = self.shape(self.k(global_inputs))
        side_value_states = self.shape(self.v(global_inputs))
        query_states = split_into_blocks(query_states, self.block_len)
        key_states = split_into_blocks(key_states, self.block_len)
        value_states = split_into_blocks(value_states, self.block_len)
        key_states = concatenate_3_blocks(key_states)
        value_states = concatenate_3_blocks(value_states)
        side_key_states = repeated(side_key_states, key_states.shape[1])
        side_value_states = repeated(side_value_states, key_states.shape[1])
        key_states = concatenate(key_states, side_key_states, dim=2)
        value_states = concatenate(value_states, side_value_states, dim=2)
        scores = einsum("bnqhd,bnkhd->bnhqk", query_states, key_states)
        local_mask = local_attention_mask(self.run, batch, seq_length, self.block_len)
        local_mask = penalty(local_mask)
        if position_bias is None:
            position_bias = self.compute_bias(self.block_len, 3 * self.block_len)
            position_bias = with_mask(position_bias, local_mask, self.bias_shape(batch, seq_length))
            position_bias = position_bias.to(scores.dtype)
            side_position_bias = self.compute_side_bias(mask, global_segment_ids)
            side_position_bias = split_into_blocks(side_position_bias, self.block_len, dim=2)
            side_position_bias = side_position_bias.transpose(1, 2).to(scores.dtype)
            position_bias = concatenate(position_bias, side_position_bias)
        scores = add_bias(scores, position_bias)
        attn_weights = softmax(scores.float()).to(scores.dtype)
        attn_weights = dropout(attn_weights, self.dropout)
        attn_weights = attn_weights.to(value_states.dtype)
        attn_output = self.unshape(einsum("bnhqk,bnkhd->bnqhd", attn_weights, value_states))
        attn_output = attn_output.narrow(seq_length, dim=1)
        attn_output = self.o(attn_output)
        return attn_output, position_bias

    def compute_side_bias(self, mask: Handle, global_segment_ids: Handle) -> Handle:
        shape = *mask.shape, global_segment_ids.shape[-1]
        side_attention_mask = made_from(
            OperationKind.EQ, shape, DType.BOOL, mask, global_segment_ids
        )
        attention_side_bias = penalty(side_attention_mask)
        side_relative_position = made_by(self.run, OperationKind.SUB, shape, DType.INT64)
        side_relative_position_bucket = self.bucket(side_relative_position)
        side_bias = self.global_relative_attention_bias(shape, side_relative_position_bucket)
        side_bias = side_bias.permute(0, 3, 1, 2)
        attention_side_bias = with_mask(side_bias, attention_side_bias, side_bias.shape)
        return attention_side_bias


def global_fixed_block_ids(mask: Handle, num_globals: int) -> tuple[Handle, Handle]:
    """``_make_global_fixed_block_ids``: each token's block, and which blocks there are."""
    block_ids = mask.apart(OperationKind.CUMSUM, dtype=DType.INT32)
    shape = mask.shape[0], num_globals
    return block_ids, made_from(OperationKind.CUMSUM, shape, DType.INT32, block_ids)


def global_aggregates(x: Handle, block_ids: Handle, num_globals: int) -> Handle:
    """``_create_global_aggregates``: tokens summed up by a product with marks of their blocks."""
    block_ids = block_ids.apart(OperationKind.WHERE)
    shape = *block_ids.shape, num_globals
    one_hot_block_ids = made_from(
        OperationKind.SCATTER, (*shape[:2], num_globals + 1), DType.INT64, block_ids
    )
    marks = made_from(OperationKind.TO, shape, x.dtype, one_hot_block_ids)
    return einsum("bnd,bng->bgd", x, marks)


def repeated(x: Handle, num_blocks: int) -> Handle:
    """``x.unsqueeze(1).repeat(...)``: the summaries of a sequence, once for each of its blocks."""
    batch, *rest = x.shape
    made = empty(x.run, (batch, num_blocks, *rest), x.dtype)
    x.run.record(OperationKind.REPEAT, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return x.leads_to(made, in_rows(x.shape))


Returned = tuple[Handle, Handle | None, Handle | None, Handle | None, Handle | None]
"""Hidden states, both biases, both attentions' weights."""


class LongT5LayerLocalSelfAttention(Module):
    def __init__(self, config: ConfigReader, *, biased: bool, has_globals: bool) -> None:
        if has_globals:
            self.TransientGlobalSelfAttention = LongT5TransientGlobalAttention(
                config, biased=biased
            )
        else:
            self.LocalSelfAttention = LongT5LocalAttention(config, biased=biased)
        self.layer_norm = T5LayerNorm(config.integer("d_model"))
        self.dropout = Dropout(config.number("dropout_rate"))

    def forward(
        self, x: Handle, mask: Handle, position_bias: Handle | None
    ) -> tuple[Handle, Handle, None]:
        attend = next(iter(self.children.values()))
        normed_hidden_states = self.layer_norm(x)
        attention_output = attend(normed_hidden_states, mask, position_bias)
        x = x + self.dropout(attention_output[0])
        return x, attention_output[1], None


class LongT5DenseActDense(DenseActDense):
    reads_gated = False


class LongT5LayerFF(T5LayerFF):
    network_class = LongT5DenseActDense


class LongT5Block(BlockParts):
    """Tuples of what its parts returned have names to its end."""

    hands_on = 2

    def network(self, config: ConfigReader, kind: BlockKind) -> Module:
        del kind
        return LongT5LayerFF(config)

    def parts(self, config: ConfigReader, kind: BlockKind, *, decoder: bool) -> list[Module]:
        """Its modules."""
        network = self.network(config, kind)
        if decoder:
            own = T5LayerSelfAttention(config, decoder=True, biased=kind.biased)
            return [own, T5LayerCrossAttention(config), network]
        key = "encoder_attention_type"
        form = config.choice(key, config.text(key), (LOCAL, TRANSIENT_GLOBAL))
        local = LongT5LayerLocalSelfAttention(
            config, biased=kind.biased, has_globals=form == TRANSIENT_GLOBAL
        )
        return [local, network]

    def forward(
        self,
        x: Handle,
        mask: Handle | None,
        bias: Handle | None,
        memory: Handle | None,
        cross_bias: Handle | None,
    ) -> Returned:
        memory = None if memory is None else self.behind_hook(memory)
        self_attention_outputs = self.layer[0](x, mask, bias)
        x = looked_at(self_attention_outputs[0])
        cross_attention_outputs: tuple[Handle | None, ...] = None, None, None
        if memory is not None:
            cross_attention_outputs = self.layer[1](x, memory, cross_bias)
            found = cross_attention_outputs[0]
            assert found is not None
            x = looked_at(found)
            del found
        x = looked_at(self.layer[-1](x))
        own, cross = self_attention_outputs[1:], cross_attention_outputs[1:]
        return x, own[0], cross[0], own[1], cross[1]


def looked_at(x: Handle) -> Handle:
    """What fp16 hidden states are clamped for, ``torch.isinf(x).any()``: nothing is, usually."""
    if x.dtype is DType.FP16:
        infinite = x.apart(OperationKind.ABS).apart(OperationKind.EQ, dtype=DType.BOOL)
        made_from(OperationKind.MAX, (1,), DType.BOOL, infinite)
    return x


class LongT5Stack(T5Stack):
    block_class = LongT5Block

    def mask(self, batch: int, length: int, memory: Handle | None) -> Handle | None:
        """Of tokens that are no padding: whichever its layers read."""
        if memory is not None:
            return padded_mask(self.run, batch, length)
        layer = self.layer_list.made[BlockKind(biased=True)]
        attentions = (e for _, e in layer.modules() if isinstance(e, LongT5LocalAttention))
        attention = next(attentions)
        ones = made_by(self.run, OperationKind.ONES, (batch, length), DType.FP32)
        if isinstance(attention, LongT5TransientGlobalAttention):
            return ones
        return local_attention_mask(self.run, batch, length, attention.block_len)

    def forward(
        self, batch: int, length: int, ids: Handle | None = None, memory: Handle | None = None
    ) -> Handle:
        inputs_embeds = self.embedded(batch, length, ids)
        causal_mask = self.mask(batch, length, memory)
        position_bias = None
        encoder_decoder_position_bias = None
        x = self.dropout(inputs_embeds)
        for layer_module in self.layer_list:
            layer_outputs = layer_module(
                x, causal_mask, position_bias, memory, encoder_decoder_position_bias
            )
            x, position_bias = layer_outputs[:2]
            if memory is not None:
                encoder_decoder_position_bias = layer_outputs[2]
        x = self.final_layer_norm(x)
        x = self.dropout(x)
        self.returned()
        return x


class LongT5Model(T5Model):
    eager_only = True
    stack_class = LongT5Stack
