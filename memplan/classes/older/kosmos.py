"""Kosmos-2.5's text: XGLM's layers with one more norm inside the network, and a table that tells text from pictures.

(transformers 5.23, models/kosmos2_5/modeling_kosmos2_5.py)
"""

from memplan.classes.llama import MLP, Decoder, DecoderLayer, LayerKind
from memplan.classes.older.gpt2 import older_activation
from memplan.classes.older.opt import OFFSET, OPTAttention
from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, Embedding, LayerNorm, Linear, dropout
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import ModelPart, WeightRole


class Kosmos25TextAttention(OPTAttention):
    bias_key = ""

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        key_states = self.split_heads(self.k_proj(x))
        value_states = self.split_heads(self.v_proj(x))
        query_states = self.split_heads(self.q_proj(x))
        query_states = query_states * 0.125
        attend = attention_function(self.run)
        out, weights = attend(query_states, key_states, value_states, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.out_proj(out)
        return out, weights


class Kosmos25TextFFN(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("ffn_dim")
        self.dropout = config.number("dropout")
        self.activation_dropout = config.number("activation_dropout")
        self.activation_fn = ActivationModule(older_activation(config))
        self.fc1 = Linear(hidden, inner, bias=True)
        self.fc2 = Linear(inner, hidden, bias=True)
        self.ffn_layernorm = LayerNorm(inner)

    @property
    def last(self) -> Linear:
        return self.fc2

    def facts(self) -> FeedForwardSpec:
        return replace(super().facts(), normed_inside=True)

    def forward(self, x: Handle) -> Handle:
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.ffn_layernorm(x)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        return x


class Kosmos25TextBlock(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = Kosmos25TextAttention(config, kind)
        self.residual_dropout = config.number("dropout")
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.ffn = Kosmos25TextFFN(config)
        self.final_layer_norm = LayerNorm(hidden)

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, mask)
        x = dropout(x, self.residual_dropout)
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = self.ffn(x)
        x = residual + x
        return x


class Kosmos25Positions(Module):
    """Rows of a buffer by numbers that are counted up over the ids that are no padding."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.rows, self.hidden = rows, hidden

    def forward(self, batch: int, length: int) -> Handle:
        """Those of every token."""
        run = self.run
        run.buffer(self.rows * self.hidden, run.buffer_dtype)
        mask = made_by(run, OperationKind.EQ, (batch, length), DType.BOOL)
        mask = mask.apart(OperationKind.TO, dtype=DType.INT32)
        ids = mask.apart(OperationKind.CUMSUM, dtype=DType.INT64).apart(
            OperationKind.TO, dtype=DType.INT32
        )
        ids = ids.apart(OperationKind.ADD_SCALAR).apart(OperationKind.MUL, mask)
        ids = ids.apart(OperationKind.TO, dtype=DType.INT64).apart(OperationKind.ADD_SCALAR)
        shape = batch, length, self.hidden
        return made_from(OperationKind.INDEX_SELECT, shape, run.buffer_dtype, ids)


class Kosmos25TextTransformer(Decoder):
    last = "layer_norm"
    embeds_more = True

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.embedding_dropout = config.number("dropout")
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.embed_tokens = Embedding(rows, hidden, role=role)
        self.embed_positions = Kosmos25Positions(
            config.integer("max_position_embeddings") + OFFSET, hidden
        )
        self.segment_emb = Embedding(2, hidden)
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.layers = LayerList(
            "decoder.layers", kinds, lambda kind: Kosmos25TextBlock(config, kind)
        )
        self.layer_norm = LayerNorm(hidden)
        self.layer_norm.segment = "decoder.norm", ModelPart.NORM

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        run = self.run
        inputs_embeds = self.embedded(batch, length) if received is None else received
        inputs_embeds = inputs_embeds * 39.2
        positions = self.embed_positions(batch, length)
        zeros = made_by(run, OperationKind.ZEROS, (batch, 1), DType.INT64)
        zero_emb = self.segment_emb((batch, 1), zeros)
        del zeros
        positions = added_to_all(positions, zero_emb)
        x = inputs_embeds + positions
        x = dropout(x, self.embedding_dropout)
        mask = self.masks(batch, length)[None]
        x = dropout(x, self.embedding_dropout)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.layer_norm(x)
        return x


def added_to_all(positions: Handle, one: Handle) -> Handle:
    """``positions += zero_emb``: one row of each sequence, added to all of its tokens."""
    run, made = positions.run, positions.run.view(positions.record, positions.numel)
    run.record(
        OperationKind.ADD_IN_PLACE, (positions.record, one.record), (made,),
        gradients=(Gradient.NONE, Gradient.SUMMED),
    )  # fmt: skip
    return Handle(run, made, positions.shape)
