"""A layer of BERT's kind: heads, what leads back to the hidden size, a network; and the pooler.

(transformers 5.23: models/bert/modeling_bert.py, which most encoders copy)
"""

from collections.abc import Callable

from memplan.classes.encoders.base import LAYER_NORM, EncoderLayer, first_token
from memplan.classes.llama import Network
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import (
    Attend,
    Attended,
    attention_function,
    in_heads,
    matmul,
    unwidened_attention,
)
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear, Norm
from memplan.graph.modules.functional import softmax
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole


class Heads(Module):
    """Queries, keys and values of all heads, which see all tokens."""

    block = LayerBlock.ATTENTION
    names = "query", "key", "value"
    query: Linear
    key: Linear
    value: Linear
    bias = True
    dropout_key = "attention_probs_dropout_prob"
    eager: Attend | None = staticmethod(unwidened_attention)
    """Attention written out; None: that of Llama."""

    def __init__(self, config: ConfigReader) -> None:
        hidden = self.read_sizes(config)
        for name in self.names:
            role = WeightRole.MATRIX if name == self.names[-1] else WeightRole.QUERY_KEY
            setattr(self, name, Linear(hidden, hidden, bias=self.bias, role=role))
        self.add_dropout(config.number(self.dropout_key))

    def read_sizes(self, config: ConfigReader) -> int:
        """How many heads there are and how wide; returns the hidden size."""
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        self.num_heads = heads
        self.head_dim = config.divide("hidden_size", hidden, "num_attention_heads", heads)
        return hidden

    def add_dropout(self, probability: float) -> None:
        """A module of its own, whose probability the attention function takes."""
        self.dropout = Dropout(probability)

    @property
    def probability(self) -> float:
        """Of dropping a weight."""
        return self.dropout.probability

    def facts(self) -> AttentionSpec:
        """Of attention to all tokens."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            query_bias=self.bias, key_bias=self.bias, value_bias=self.bias, output_bias=self.bias,
            causal=False, dropout=self.probability,
        )  # fmt: skip

    def heads(self, x: Handle) -> list[Handle]:
        """Queries, keys and values, in this order."""
        return [in_heads(self.children[name](x), self.head_dim) for name in self.names]

    def attend(self, query: Handle, key: Handle, value: Handle, mask: Handle | None) -> Attended:
        """The attention function of the kernels that are asked for."""
        attend = attention_function(self.run, self.eager, causal=False)
        return attend(query, key, value, mask, self.probability)


class SelfAttention(Heads):
    """BERT's."""

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        x = self.behind_hook(x)
        query_layer, key_layer, value_layer = self.heads(x)
        out, weights = self.attend(query_layer, key_layer, value_layer, mask)
        out = out.reshape(*x.shape[:2], -1)
        return out, weights


class PlainScores(Heads):
    """Attention that the class writes out itself, whatever kernel is asked for."""

    output = ""
    """The matrix behind it, where this module has it."""
    hands_on_weights = True

    def forward(self, x: Handle, mask: Handle | None, *beside: Handle) -> Attended:
        (position_bias,) = beside or (None,)
        query_layer, key_layer, value_layer = self.heads(x)
        attention_scores = matmul(query_layer, key_layer.transpose(2, 3))
        attention_scores = attention_scores / self.head_dim**0.5
        if position_bias is not None:
            attention_scores += position_bias
        if mask is not None:
            attention_scores = attention_scores + mask
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*x.shape[:2], -1)
        if self.output:
            context_layer = self.children[self.output](context_layer)
        return context_layer, attention_probs if self.hands_on_weights else None


class SelfOutput(Module):
    """A dense layer, dropout, and the norm of the sum."""

    role = WeightRole.ATTENTION_OUTPUT
    inner = "hidden_size"
    normed = True
    norm_class: Callable[[int], Norm] = LayerNorm

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = self.linear(config)
        if self.normed:
            self.LayerNorm = self.norm_class(hidden)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def linear(self, config: ConfigReader) -> Module:
        """To the hidden size."""
        inner, hidden = config.integer(self.inner), config.integer("hidden_size")
        return Linear(inner, hidden, bias=True, role=self.role)

    def forward(self, x: Handle, input_tensor: Handle) -> Handle:
        x = self.dense(x)
        x = self.dropout(x)
        return self.LayerNorm(x + input_tensor) if self.normed else x + input_tensor


class Output(SelfOutput):
    """The same behind the network."""

    block = LayerBlock.NETWORK
    role = WeightRole.MATRIX
    inner = "intermediate_size"


class SummedSelfOutput(SelfOutput):
    """The sum alone: norms stand before each part."""

    normed = False


class SummedOutput(Output):
    """The same behind the network."""

    normed = False


class AttentionParts(Module):
    """Heads, and what leads back to the hidden size."""

    block = LayerBlock.ATTENTION
    self_class: Callable[[ConfigReader], Heads] = SelfAttention
    output_class: Callable[[ConfigReader], SelfOutput] = SelfOutput
    norm = ""
    """The norm before the heads, where there is one."""

    def __init__(self, config: ConfigReader) -> None:
        self.self = self.self_class(config)
        self.output = self.output_class(config)
        if self.norm:
            setattr(self, self.norm, LayerNorm(config.integer("hidden_size")))

    def facts(self) -> AttentionSpec:
        """Of the heads."""
        return self.self.facts()

    @property
    def probability(self) -> float:
        """Of dropping a number behind the output."""
        return self.output.dropout.probability


class Attention(AttentionParts):
    """BERT's."""

    hands_on_weights = True
    """Weights are returned, which the layer then holds to its end."""

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Attended:
        normed = self.children[self.norm](x) if self.norm else x
        attention_output, attn_weights = self.self(normed, *beside)
        attention_output = self.output(attention_output, x)
        return attention_output, attn_weights if self.hands_on_weights else None


class Intermediate(Network):
    """A dense layer and its activation."""

    block = LayerBlock.NETWORK
    normed = False
    """It has a norm of its own before them."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        if self.normed:
            self.LayerNorm = LayerNorm(hidden)
        self.inner = inner
        self.dense = self.linear(config)
        self.intermediate_act_fn = ActivationModule(read_activation(config, "hidden_act"))

    def facts(self) -> FeedForwardSpec:
        """Of a network without a gate."""
        return FeedForwardSpec(
            intermediate_size=self.inner, activation=self.intermediate_act_fn.kind, bias=True
        )

    def linear(self, config: ConfigReader) -> Module:
        """From the hidden size."""
        return Linear(config.integer("hidden_size"), self.inner, bias=True)

    def forward(self, x: Handle) -> Handle:
        if self.normed:
            x = self.LayerNorm(x)
        x = self.dense(x)
        x = self.intermediate_act_fn(x)
        return x


class LayerParts(EncoderLayer):
    """Attention and network."""

    placement = NormPlacement.POST
    attention_class: Callable[[ConfigReader], AttentionParts] = Attention
    intermediate_class: Callable[[ConfigReader], Network] = Intermediate
    output_class: Callable[[ConfigReader], Module] = Output
    normed = False
    """A norm of its own stands before the network."""

    def __init__(self, config: ConfigReader) -> None:
        self.attention = self.attention_class(config)
        self.intermediate = self.intermediate_class(config)
        self.output = self.output_class(config)
        if self.normed:
            self.LayerNorm = LayerNorm(config.integer("hidden_size"))

    def facts(self) -> LayerSpec:
        """Of what others read of heads, network, norms and dropouts."""
        return LayerSpec(
            attention=self.attention.facts(), feed_forward=self.intermediate.facts(),
            norm=LAYER_NORM, placement=self.placement, dropout=self.attention.probability,
        )  # fmt: skip

    def feed_forward_chunk(self, attention_output: Handle) -> Handle:
        """What follows the attention."""
        normed = self.LayerNorm(attention_output) if self.normed else attention_output
        intermediate_output = self.intermediate(normed)
        layer_output = self.output(intermediate_output, attention_output)
        return layer_output


class Layer(LayerParts):
    """BERT's."""

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Handle:
        attention_output, _ = self.attention(x, *beside)
        layer_output = self.feed_forward_chunk(attention_output)
        return layer_output


class StackParts(Module):
    """All layers, and the norm behind them where there is one."""

    layer_class: Callable[[ConfigReader], EncoderLayer] = Layer
    norm = ""
    list_name = "layer"
    """What the class calls its list of layers."""
    streams = False
    """Each layer hands the next one more than the hidden states."""

    def __init__(self, config: ConfigReader) -> None:
        kinds = [None] * config.layers("num_hidden_layers")
        made = LayerList(
            "encoder.layers", kinds, lambda _: self.layer_class(config), streams=self.streams
        )
        setattr(self, self.list_name, made)
        if self.norm:
            setattr(self, self.norm, last_norm(config.integer("hidden_size")))

    @property
    def stacked(self) -> LayerList:
        """The list of layers, whatever the class calls it."""
        found = self.children[self.list_name]
        assert isinstance(found, LayerList)
        return found


class Stack(StackParts):
    """BERT's."""

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Handle:
        for layer in self.stacked:
            x = layer(x, *beside)
        if self.norm:
            x = self.children[self.norm](x)
        return x


def last_norm(hidden: int) -> LayerNorm:
    """The norm behind all layers, in a segment of its own."""
    made = LayerNorm(hidden)
    made.segment = "encoder.norm", ModelPart.NORM
    return made


class Pooler(Module):
    """A dense layer and a tanh on the first token."""

    segment = "head", ModelPart.HEAD

    is_read = True
    """A loss reads what it gives."""

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(hidden, hidden, bias=True)
        self.activation = ActivationModule(Activation.TANH)

    def forward(self, x: Handle) -> Handle:
        first_token_tensor = first_token(x)
        pooled_output = self.dense(first_token_tensor)
        pooled_output = self.activation(pooled_output)
        return pooled_output
