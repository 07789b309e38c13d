"""GPT-NeoX, Phi and StableLM: layer norms, a part of each head is turned, attention and network side by side.

(transformers 5.23: models/gpt_neox, models/phi, models/stablelm)
"""

from collections.abc import Callable

from memplan.classes.llama import (
    MLP,
    GatedMLP,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    rotated_width,
)
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear, Norm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import (
    Tables,
    Turn,
    apply_rotary,
    apply_rotary_to_part,
    concatenate,
    cut,
    turn_function,
)
from memplan.model.attention import Projection
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.parameters import WeightRole


class GPTNeoXAttention(LlamaAttention):
    projection = Projection.FUSED_INTERLEAVED
    output = "dense"
    turn: Turn = staticmethod(apply_rotary_to_part)

    def add_projections(self, config: ConfigReader) -> None:
        hidden, bias = config.integer("hidden_size"), config.flag("attention_bias")
        role = WeightRole.ATTENTION_OUTPUT
        self.query_key_value = Linear(hidden, 3 * hidden, bias=bias)
        self.dense = Linear(hidden, hidden, bias=bias, role=role)

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        width = self.head_dim
        qkv = self.query_key_value(x).view(batch, length, -1, 3 * width).transpose(1, 2)
        query, key, value = qkv.split(width, width, width)
        return query, key, value


class GPTNeoXMLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        inner = config.integer("n_inner", "intermediate_size")
        self.dense_h_to_4h = Linear(hidden, inner, bias=True)
        self.dense_4h_to_h = Linear(inner, hidden, bias=True)
        self.act = ActivationModule(read_activation(config, "hidden_act"))

    @property
    def last(self) -> Linear:
        return self.dense_4h_to_h

    def forward(self, x: Handle) -> Handle:
        x = self.dense_h_to_4h(x)
        x = self.act(x)
        x = self.dense_4h_to_h(x)
        return x


class GPTNeoXLayer(LlamaDecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.residual_dropout = config.number("hidden_dropout")
        self.use_parallel_residual = config.flag("use_parallel_residual")
        if self.use_parallel_residual:
            self.placement = NormPlacement.PARALLEL
        self.input_layernorm = LayerNorm(hidden)
        self.post_attention_layernorm = LayerNorm(hidden)
        self.post_attention_dropout = Dropout(self.residual_dropout)
        self.post_mlp_dropout = Dropout(self.residual_dropout)
        self.attention = GPTNeoXAttention(config, kind)
        self.mlp = GPTNeoXMLP(config)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        attn_output, _ = self.attention(self.input_layernorm(x), tables, mask)
        attn_output = self.post_attention_dropout(attn_output)
        if self.use_parallel_residual:
            mlp_output = self.mlp(self.post_attention_layernorm(x))
            mlp_output = self.post_mlp_dropout(mlp_output)
            x = mlp_output + attn_output + x
        else:
            attn_output = attn_output + x
            mlp_output = self.mlp(self.post_attention_layernorm(attn_output))
            mlp_output = self.post_mlp_dropout(mlp_output)
            x = mlp_output + attn_output
        return x


class GPTNeoXModel(LlamaModel):
    prefix = "gpt_neox"
    table = "embed_in"
    last = "final_layer_norm"
    final_layer_norm: Norm
    layer_class: type[LlamaDecoderLayer] = GPTNeoXLayer
    norm_class: Callable[[int], Norm] = LayerNorm
    classifies_tokens = False

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.emb_dropout = Dropout(config.number("hidden_dropout"))

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config, config.number("rotary_pct", default=0.25))

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        positions = position_ids(self.run, batch, length)
        masks = self.masks(batch, length)
        x = self.emb_dropout(embeds) if received is None else embeds
        tables = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, tables, masks[layer.kind.window], unread=positions)
        x = self.final_layer_norm(x)
        return x


class PartlyTurnedAttention(LlamaAttention):
    """Columns that are turned, and those that pass, have names until attention returns."""

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        fused_qkv = self.fused(x)
        query, key, value = self.projected(x if fused_qkv is None else fused_qkv)
        cos, sin = tables
        query_rot, query_pass = cut(query, cos)
        key_rot, key_pass = cut(key, cos)
        turn = turn_function(self.run.kernels.rotary, self.turn)
        query_rot, key_rot = turn(query_rot, key_rot, cos, sin)
        query = concatenate(query_rot, query_pass)
        key = concatenate(key_rot, key_pass)
        key, value = self.remembered(key, value)
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.project_out(out)
        return out, weights

    def fused(self, x: Handle) -> Handle | None:  # noqa: ARG002
        """One product for all three, which has a name until attention returns."""
        return None

    def remembered(self, key: Handle, value: Handle) -> tuple[Handle, Handle]:
        """What attention is given of keys and values."""
        return key, value


class PhiAttention(PartlyTurnedAttention):
    output = "dense"
    turn: Turn = staticmethod(apply_rotary)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.qk_layernorm = config.flag("qk_layernorm")
        if self.qk_layernorm:
            self.q_layernorm = LayerNorm(self.head_dim)
            self.k_layernorm = LayerNorm(self.head_dim)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return True, True

    def projected(self, x: Handle) -> Heads:
        query, key, value = super().projected(x)
        if self.qk_layernorm:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        return query, key, value


class PhiMLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        inner = config.integer("n_inner", "intermediate_size")
        self.activation_fn = ActivationModule(read_activation(config, "hidden_act"))
        self.fc1 = Linear(hidden, inner, bias=True)
        self.fc2 = Linear(inner, hidden, bias=True)

    @property
    def last(self) -> Linear:
        return self.fc2

    def forward(self, x: Handle) -> Handle:
        x = self.fc1(x)
        x = self.activation_fn(x)
        x = self.fc2(x)
        return x


class PhiDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = PhiAttention
    mlp_class: Callable[[ConfigReader], MLP] = PhiMLP
    placement = NormPlacement.PARALLEL_SHARED

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.residual_dropout = config.number("resid_pdrop")
        self.resid_dropout = Dropout(self.residual_dropout)

    def add_norms(self, hidden: int) -> None:
        self.input_layernorm = LayerNorm(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        attn_outputs, _ = self.self_attn(x, tables, mask)
        attn_outputs = self.resid_dropout(attn_outputs)
        feed_forward_hidden_states = self.resid_dropout(self.mlp(x))
        x = attn_outputs + feed_forward_hidden_states + residual
        return x


class PhiModel(LlamaModel):
    last = "final_layernorm"
    final_layernorm: Norm
    layer_class: type[LlamaDecoderLayer] = PhiDecoderLayer
    norm_class: Callable[[int], Norm] = LayerNorm
    head_bias = True

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.embed_dropout = Dropout(config.number("embd_pdrop"))

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config, 0.5)

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        positions = position_ids(self.run, batch, length)
        masks = self.masks(batch, length)
        if received is None:
            embeds = self.embed_dropout(embeds)
        x = embeds
        tables = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, tables, masks[layer.kind.window], unread=positions)
        x = self.final_layernorm(x)
        return x


class StableLmLayerNormPerHead(Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        self.norms = NormList(dim, num_heads)

    def forward(self, hidden_states: Handle) -> Handle:
        states_per_heads = hidden_states.split(*[1] * hidden_states.shape[1], dim=1)
        norms = self.norms.children.values()
        normed = [norm(each) for norm, each in zip(norms, states_per_heads, strict=True)]
        return concatenate(*normed, dim=1)


class NormList(Module):
    """A norm without bias for each head."""

    def __init__(self, dim: int, num_heads: int) -> None:
        for number in range(num_heads):
            setattr(self, str(number), LayerNorm(dim, bias=False))


class StableLmAttention(PartlyTurnedAttention):
    norms_by_head = True
    turn: Turn = staticmethod(apply_rotary)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.qk_layernorm = config.flag("qk_layernorm")
        if self.qk_layernorm:
            self.q_layernorm = StableLmLayerNormPerHead(self.head_dim, self.num_heads)
            self.k_layernorm = StableLmLayerNormPerHead(self.head_dim, self.num_kv_heads)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("use_qkv_bias"), False

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query = self.q_proj(x)
        key = self.k_proj(x)
        value = self.v_proj(x)
        query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = key.view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = value.view(batch, length, -1, self.head_dim).transpose(1, 2)
        if self.qk_layernorm:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        return query, key, value


class StableLmDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = StableLmAttention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.use_parallel_residual = config.flag("use_parallel_residual")
        super().__init__(config, kind)
        self.residual_dropout = config.number("hidden_dropout")
        self.dropout = Dropout(self.residual_dropout)

    def add_norms(self, hidden: int) -> None:
        self.input_layernorm = LayerNorm(hidden)
        if self.use_parallel_residual:
            self.placement = NormPlacement.PARALLEL_SHARED
        else:
            self.post_attention_layernorm = LayerNorm(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        self_attn_output, _ = self.self_attn(x, tables, mask)
        if self.use_parallel_residual:
            mlp_output = self.mlp(x)
            mlp_output = self.dropout(mlp_output)
            x = residual + self_attn_output + mlp_output
        else:
            residual = residual + self_attn_output
            mlp_output = self.mlp(self.post_attention_layernorm(residual))
            mlp_output = self.dropout(mlp_output)
            x = residual + mlp_output
        return x


class StableLmModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = StableLmDecoderLayer
    norm_class: Callable[[int], Norm] = LayerNorm

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config, 0.25)


class PersimmonAttention(PartlyTurnedAttention):
    output = "dense"
    projection = Projection.FUSED_SELECTED
    turn: Turn = staticmethod(apply_rotary)

    def add_projections(self, config: ConfigReader) -> None:
        hidden, role = config.integer("hidden_size"), WeightRole.ATTENTION_OUTPUT
        self.query_key_value = Linear(hidden, 3 * hidden, bias=True)
        self.dense = Linear(hidden, hidden, bias=True, role=role)
        self.qk_layernorm = config.flag("qk_layernorm")
        if self.qk_layernorm:
            self.q_layernorm = LayerNorm(self.head_dim)
            self.k_layernorm = LayerNorm(self.head_dim)

    def fused(self, x: Handle) -> Handle | None:
        return self.query_key_value(x)

    def projected(self, x: Handle) -> Heads:
        """Of the fused product."""
        batch, length, _ = x.shape
        x = x.view(batch, length, -1, 3, self.head_dim)
        query, key, value = (x.select(-2) for _ in range(3))
        if self.qk_layernorm:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        query = query.transpose(1, 2)
        value = value.transpose(1, 2)
        key = key.transpose(1, 2)
        return query, key, value


class PersimmonDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = PersimmonAttention
    mlp_class: Callable[[ConfigReader], MLP] = GPTNeoXMLP
    norm_class: Callable[[int], Norm] = LayerNorm

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.residual_dropout = config.number("hidden_dropout")
        self.dropout = Dropout(self.residual_dropout)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = self.dropout(x)
        x = x + residual
        return x


class PersimmonModel(LlamaModel):
    last = "final_layernorm"
    classifies_tokens = False
    layer_class: type[LlamaDecoderLayer] = PersimmonDecoderLayer
    norm_class: Callable[[int], Norm] = LayerNorm

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config, 0.5)
