"""StarCoder 2 and Nemotron: torch's layer norms, and networks without a gate.

(transformers 5.23: models/starcoder2, models/nemotron)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    MLP,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    PlainMLP,
    layer_windows,
    rotated_width,
)
from memplan.families.llama import read_activation
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear, Norm, dropout
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.rotary import Tables, Turn, concatenate, cut, rotate_half
from memplan.graph.operations.norms import layer_norm_kernel
from memplan.model.config import ConfigReader
from memplan.model.norms import NormKind


class Starcoder2Attention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.residual_dropout = config.number("residual_dropout")

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        bias = config.flag("use_bias")
        return bias, bias

    def dropped(self, out: Handle) -> Handle:
        return dropout(out, self.residual_dropout)


class Starcoder2MLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        bias = config.flag("use_bias")
        self.c_fc = Linear(hidden, inner, bias=bias)
        self.c_proj = Linear(inner, hidden, bias=bias)
        self.act = ActivationModule(read_activation(config, "hidden_act"))
        self.residual_dropout = config.number("residual_dropout")

    @property
    def last(self) -> Linear:
        return self.c_proj

    def forward(self, x: Handle) -> Handle:
        x = self.c_fc(x)
        x = self.act(x)
        x = self.c_proj(x)
        x = dropout(x, self.residual_dropout)
        return x


class Starcoder2DecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = Starcoder2Attention
    mlp_class: Callable[[ConfigReader], MLP] = Starcoder2MLP
    norm_class: Callable[[int], Norm] = LayerNorm

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.residual_dropout = config.number("residual_dropout")


class Starcoder2Model(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = Starcoder2DecoderLayer
    norm_class: Callable[[int], Norm] = LayerNorm

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.embedding_dropout = config.number("embedding_dropout")

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        window = config.optional_integer("sliding_window")
        return list(map(LayerKind, layer_windows(config, window)))

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        positions = position_ids(self.run, batch, length)
        masks = self.masks(batch, length)
        x = embeds
        if received is None:
            x = dropout(x, self.embedding_dropout)
        tables = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, tables, masks[layer.kind.window], unread=positions)
        x = self.norm(x)
        return x


class NemotronLayerNorm1P(LayerNorm):
    kind = NormKind.LAYER_ONE_PLUS

    def forward(self, x: Handle) -> Handle:
        run = self.run
        weight = self.operand(self.weight) + 1.0
        bias = self.operand(self.bias)
        given = x
        if run.autocast is not None:
            given = x.to(run.autocast)
            weight = weight.to(run.autocast)
            bias = bias.to(run.autocast)
        weights = weight.record, bias.record
        made = layer_norm_kernel(run, given.laid(), x.shape[-1], weights)
        return given.leads_to(Handle(run, made, x.shape), in_rows(x.shape))


def apply_rotary_nemotron(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """Parts of heads; both are turned before the first is joined with the rest."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    query, query_rest = cut(query, cos)
    key, key_rest = cut(key, cos)
    turned_query = (query * cos) + (rotate_half(query) * sin)
    turned_key = (key * cos) + (rotate_half(key) * sin)
    return concatenate(turned_query, query_rest), concatenate(turned_key, key_rest)


class NemotronAttention(LlamaAttention):
    turn: Turn = staticmethod(apply_rotary_nemotron)


class NemotronDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = NemotronAttention
    mlp_class: Callable[[ConfigReader], MLP] = PlainMLP
    norm_class: Callable[[int], Norm] = NemotronLayerNorm1P


class NemotronModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = NemotronDecoderLayer
    norm_class: Callable[[int], Norm] = NemotronLayerNorm1P

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config, 0.5)
