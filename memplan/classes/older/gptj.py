"""GPT-J, CodeGen and GPT-Neo: scores in fp32, whatever the model's format; weights are handed to the caller.

(transformers 5.23: models/gptj, models/codegen, models/gpt_neo)
"""

from collections.abc import Callable

from memplan.classes.llama import MLP, DecoderLayer, LayerKind
from memplan.classes.older.gpt2 import (
    GPT2Model,
    GPTBigCodeMLP,
    GPTBlock,
    OlderAttention,
    hidden_size,
    inner_size,
    older_activation,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, matmul
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import made_from, softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import counted_positions, position_ids
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate, rotate_half
from memplan.model.attention import AttentionForm, Projection
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

Returned = tuple[Handle, Handle]
"""What a layer gives its caller: hidden states and the weights of its attention."""


class GPTJAttention(OlderAttention):
    output = "out_proj"
    form = AttentionForm.OWN

    def add_projections(self, config: ConfigReader) -> None:
        hidden, role = self.embed_dim, WeightRole.ATTENTION_OUTPUT
        self.max_positions = config.integer("max_position_embeddings")
        self.rotary_dim = paired_width(config, self.head_dim)
        self.attn_dropout = Dropout(config.number("attn_pdrop"))
        self.resid_dropout = Dropout(config.number("resid_pdrop"))
        self.k_proj = Linear(hidden, hidden, role=WeightRole.QUERY_KEY)
        self.v_proj = Linear(hidden, hidden)
        self.q_proj = Linear(hidden, hidden, role=WeightRole.QUERY_KEY)
        self.out_proj = Linear(hidden, hidden, role=role)

    def _attn(self, query: Handle, key: Handle, value: Handle, mask: Handle | None) -> Attended:
        query = query.float()
        key = key.float()
        weights = matmul(query, key.transpose(2, 3))
        weights = divided(weights)
        if mask is not None:
            weights = weights + mask
        weights = softmax(weights)
        weights = weights.to(value.dtype)
        weights = self.attn_dropout(weights)
        out = matmul(weights, value)
        return out, weights

    def hold_positions(self) -> None:
        """``embed_positions``: sines and cosines of all positions."""
        self.run.buffer(self.max_positions * self.rotary_dim, DType.FP32, before="attn")

    def turned_heads(self, query: Handle, key: Handle, sin: Handle, cos: Handle) -> list[Handle]:
        """What has a name in the caller: keys, queries, and those of their parts that are turned."""
        width, rest = self.rotary_dim, self.head_dim - self.rotary_dim
        k_rot, k_pass = key.narrow(width), key.narrow(rest)
        q_rot, q_pass = query.narrow(width), query.narrow(rest)
        k_rot = turned_in_pairs(k_rot, sin, cos)
        q_rot = turned_in_pairs(q_rot, sin, cos)
        key = concatenate(k_rot, k_pass)
        query = concatenate(q_rot, q_pass)
        return [key, query, k_rot, q_rot, k_pass, q_pass]

    def forward(self, x: Handle, mask: Handle | None, positions: Handle) -> Attended:
        batch, length, _ = x.shape
        query = self.q_proj(x)
        key = self.k_proj(x)
        value = self.v_proj(x)
        query = query.view(batch, length, -1, self.head_dim)
        key = key.view(batch, length, -1, self.head_dim)
        value = self.split_heads(value)
        self.hold_positions()
        shape = positions.shape[0], self.max_positions, self.rotary_dim
        embed_positions = made_by(self.run, OperationKind.REPEAT, shape, DType.FP32)
        rows = *positions.shape, self.rotary_dim
        repeated_position_ids = made_by(self.run, OperationKind.REPEAT, rows, DType.INT64)
        sincos = looked_up(embed_positions, repeated_position_ids).to(key.dtype)
        sin, cos = halved(sincos), halved(sincos)
        key, query, *turned = self.turned_heads(query, key, sin, cos)
        key = key.permute(0, 2, 1, 3)
        query = query.permute(0, 2, 1, 3)
        out, weights = self._attn(query, key, value, mask)
        out = merged(out)
        out = self.out_proj(out)
        out = self.resid_dropout(out)
        del turned
        return out, weights


def divided(weights: Handle) -> Handle:
    """Scores over the root of a head's width."""
    return weights.like(weights.run.scale(weights.record, OperationKind.DIV))


def merged(x: Handle) -> Handle:
    """``_merge_heads``."""
    batch, _, length, _ = x.shape
    return x.permute(0, 2, 1, 3).contiguous().view(batch, length, -1)


def halved(table: Handle) -> Handle:
    """One half of the columns of a table, with a dimension for heads."""
    shape = table.shape[0], table.shape[1], 1, table.shape[-1] // 2
    return Handle(table.run, table.record, shape)


def looked_up(table: Handle, ids: Handle) -> Handle:
    """``torch.gather`` of rows, which no gradient passes."""
    return made_from(OperationKind.GATHER, ids.shape, table.dtype, table, ids)


def turned_in_pairs(x: Handle, sin: Handle, cos: Handle) -> Handle:
    """``apply_rotary_pos_emb``, by tables that it repeats for itself."""
    sin = twice(sin)
    cos = twice(cos)
    return (x * cos) + (rotate_half(x) * sin)


def twice(table: Handle) -> Handle:
    """Every number of a half two times."""
    shape = *table.shape[:-1], 2 * table.shape[-1]
    return made_from(OperationKind.REPEAT_INTERLEAVE, shape, table.dtype, table)


def paired_width(config: ConfigReader, head_dim: int) -> int:
    """How many columns of a head are turned, two and two."""
    width = config.integer("rotary_dim")
    if width > head_dim or width % 2:
        error = config.fail("rotary_dim", f"must be even and at most {head_dim}, got {width}")
        raise error
    return width


class GPTJMLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = hidden_size(config), inner_size(config)
        self.fc_in = Linear(hidden, inner, bias=True)
        self.fc_out = Linear(inner, hidden, bias=True)
        self.act = ActivationModule(older_activation(config))
        self.dropout = Dropout(config.number("resid_pdrop"))

    @property
    def last(self) -> Linear:
        return self.fc_out

    def forward(self, x: Handle) -> Handle:
        x = self.fc_in(x)
        x = self.act(x)
        x = self.fc_out(x)
        x = self.dropout(x)
        return x


class GPTJBlock(DecoderLayer):
    placement = NormPlacement.PARALLEL_SHARED
    attention_class: type[OlderAttention] = GPTJAttention

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.residual_dropout = config.number("resid_pdrop")
        self.ln_1 = LayerNorm(hidden_size(config))
        self.attn = self.attention_class(config, kind)
        self.mlp = GPTJMLP(config)

    def forward(self, x: Handle, mask: Handle | None, positions: Handle) -> Returned:
        residual = x
        x = self.ln_1(x)
        attn_outputs, attn_weights = self.attn(x, mask, positions)
        feed_forward_hidden_states = self.mlp(x)
        x = attn_outputs + feed_forward_hidden_states + residual
        return x, attn_weights


class GPTJModel(GPT2Model):
    positions = ""
    unnamed_loss = False
    eager_only = True
    head_bias = True
    layer_class: type[DecoderLayer] = GPTJBlock

    def __init__(self, config: ConfigReader) -> None:
        hidden = hidden_size(config)
        self.wte = Embedding(config.integer("vocab_size"), hidden, role=WeightRole.TOKEN_TABLE)
        self.drop = Dropout(config.number("embd_pdrop"))
        self.h = LayerList(
            "decoder.layers", self.kinds(config), lambda kind: self.layer_class(config, kind)
        )
        self.ln_f = LayerNorm(hidden)
        self.ln_f.segment = "decoder.norm", ModelPart.NORM

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        positions = position_ids(self.run, batch, length)
        mask = self.masks(batch, length)[None]
        x = embeds
        if received is None:
            x = self.drop(x)
        for layer in self.h:
            outputs = layer(x, mask, positions)
            x = outputs[0]
        x = self.ln_f(x)
        return x


class CodeGenAttention(GPTJAttention):
    projection = Projection.FUSED_COPIED
    slices = 4
    """Shares of the heads, each with queries, values and keys of its own."""

    def add_projections(self, config: ConfigReader) -> None:
        hidden, role = self.embed_dim, WeightRole.ATTENTION_OUTPUT
        self.max_positions = config.integer("max_position_embeddings")
        self.rotary_dim = paired_width(config, self.head_dim)
        self.attn_dropout = Dropout(config.number("attn_pdrop"))
        self.resid_dropout = Dropout(config.number("resid_pdrop"))
        self.qkv_proj = Linear(hidden, 3 * hidden)
        self.out_proj = Linear(hidden, hidden, role=role)

    def _attn(self, query: Handle, key: Handle, value: Handle, mask: Handle | None) -> Attended:
        query = query.float()
        key = key.float()
        weights = matmul(query, key.transpose(2, 3))
        if mask is not None:
            weights = weights + mask
        weights = divided(weights)
        weights = softmax(weights)
        weights = weights.to(value.dtype)
        weights = self.attn_dropout(weights)
        out = matmul(weights, value)
        return out, weights

    def own_heads(self, x: Handle) -> Handle:
        """``_split_heads``: a copy, since shares of heads lie apart."""
        batch, length, *_ = x.shape
        return x.reshape(batch, length, -1, self.head_dim)

    def forward(self, x: Handle, mask: Handle | None, positions: Handle) -> Attended:
        batch, length, width = x.shape
        qkv = self.qkv_proj(x)
        qkv_split = qkv.reshape(batch, length, self.slices, -1)
        query, value, key = qkv_split.split(*[width // self.slices] * 3)
        query = self.own_heads(query)
        key = self.own_heads(key)
        value = self.own_heads(value)
        value = value.permute(0, 2, 1, 3)
        self.hold_positions()
        rows = *positions.shape, self.rotary_dim
        sincos = made_by(self.run, OperationKind.INDEX, rows, DType.FP32)
        sin, cos = halved(sincos), halved(sincos)
        key, query, *turned = self.turned_heads(query, key, sin, cos)
        key = key.permute(0, 2, 1, 3)
        query = query.permute(0, 2, 1, 3)
        out, weights = self._attn(query, key, value, mask)
        out = merged(out)
        out = self.out_proj(out)
        out = self.resid_dropout(out)
        del turned
        return out, weights


class CodeGenBlock(GPTJBlock):
    attention_class: type[OlderAttention] = CodeGenAttention


class CodeGenModel(GPTJModel):
    classifies = False
    layer_class: type[DecoderLayer] = CodeGenBlock


class GPTNeoSelfAttention(OlderAttention):
    output = "out_proj"
    form = AttentionForm.OWN
    dropout_key = "attention_dropout"

    def add_projections(self, config: ConfigReader) -> None:
        hidden, role = self.embed_dim, WeightRole.ATTENTION_OUTPUT
        self.max_positions = config.integer("max_position_embeddings")
        self.attn_dropout = Dropout(config.number("attention_dropout"))
        self.resid_dropout = Dropout(config.number("resid_dropout"))
        self.k_proj = Linear(hidden, hidden, role=WeightRole.QUERY_KEY)
        self.v_proj = Linear(hidden, hidden)
        self.q_proj = Linear(hidden, hidden, role=WeightRole.QUERY_KEY)
        self.out_proj = Linear(hidden, hidden, bias=True, role=role)

    def _attn(self, query: Handle, key: Handle, value: Handle, mask: Handle | None) -> Attended:
        query = query.float()
        key = key.float()
        weights = matmul(query, key.transpose(2, 3))
        self.run.buffer(self.max_positions**2, DType.BOOL, before="attn")
        _mask_value = made_by(self.run, OperationKind.ZEROS, (1,), weights.dtype)
        weights = weights.like(self.run.scale(weights.record, OperationKind.WHERE))
        if mask is not None:
            weights = weights + mask
        weights = softmax(weights)
        weights = weights.to(value.dtype)
        weights = self.attn_dropout(weights)
        out = matmul(weights, value)
        return out, weights

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        query = self.q_proj(x)
        # The class does so behind the values' projection; its gradient comes transposed, and is
        # copied when the projection's turn has come.
        key = self.split_heads(self.k_proj(x))
        value = self.v_proj(x)
        query = self.split_heads(query)
        value = self.split_heads(value)
        out, weights = self._attn(query, key, value, mask)
        out = merged(out)
        out = self.out_proj(out)
        out = self.resid_dropout(out)
        return out, weights


class GPTNeoAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.attention = GPTNeoSelfAttention(config, kind)

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        made: Attended = self.attention(x, mask)
        return made


class GPTNeoMLP(GPTBigCodeMLP):
    dropout_key = "resid_dropout"


class GPTNeoBlock(GPTBlock):
    dropout_key = "resid_dropout"
    attention_class = GPTNeoAttention
    mlp_class: Callable[[ConfigReader], MLP] = GPTNeoMLP

    def forward(self, x: Handle, mask: Handle | None) -> Returned:
        residual = x
        x = self.ln_1(x)
        attn_output, attn_weights = self.attn(x, mask)
        x = attn_output + residual
        residual = x
        x = self.ln_2(x)
        feed_forward_hidden_states = self.mlp(x)
        x = residual + feed_forward_hidden_states
        return x, attn_weights


class GPTNeoModel(GPT2Model):
    eager_only = True
    unnamed_loss = False
    dropout_key = "embed_dropout"
    layer_class: type[DecoderLayer] = GPTNeoBlock

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        ids = counted_positions(self.run, length) + 0
        mask = self.masks(batch, length)[None]
        x = embeds
        if received is None:
            position_embeds = self.wpe((1, length), ids)
            x = embeds + position_embeds
            x = self.drop(x)
        for layer in self.h:
            outputs = layer(x, mask)
            x = outputs[0]
        x = self.ln_f(x)
        return x

    def kinds(self, config: ConfigReader) -> list[LayerKind]:
        """Layers that see all and those that see some take the same memory; their list has to fit."""
        count, total = config.layers("num_hidden_layers"), 0
        for item in config.sequence("attention_types"):
            if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)):
                error = config.fail("attention_types", "expected pairs of names and a repetition")
                raise error
            total += len(item[0]) * (item[1] if isinstance(item[1], int) else 0)
        if (total or 24) != count:
            error = config.fail("attention_types", f"names {total or 24} layers of {count}")
            raise error
        return [LayerKind()] * count
