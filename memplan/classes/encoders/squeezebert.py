"""SqueezeBERT: every linear layer is a grouped convolution of length 1 over the channels.

(transformers 5.23: models/squeezebert)

Tokens lie behind one another in each channel, so that heads are views of what the convolutions give; norms see
them turned.
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import LAYER_NORM, EncoderLayer
from memplan.classes.encoders.bert import BertModel
from memplan.classes.encoders.layers import Heads, Stack
from memplan.classes.encoders.tables import NarrowEmbeddings, TypesLast
from memplan.classes.encoders.tasks import PooledMultipleChoice, Tasks
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import matmul
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import softmax
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import FeedForwardSpec


class SqueezeBertEmbeddings(TypesLast, NarrowEmbeddings):
    num_buffers = 1


def convolution(config: ConfigReader, inputs: str, outputs: str, groups: str) -> Conv1d:
    """Of length 1, whose channels are in so many groups."""
    count = config.integer(groups)
    given, made = config.integer(inputs), config.integer(outputs)
    for size in (given, made):
        config.divide(groups, size, groups, count)
    return Conv1d(given, made, 1, groups=count)


class SqueezeBertLayerNorm(LayerNorm):
    """Of the channels, which are the second dimension."""

    def forward(self, x: Handle) -> Handle:
        x = x.seen_as(*x.shape).permute(0, 2, 1)
        x = super().forward(x)
        return x.permute(0, 2, 1)


class ConvDropoutLayerNorm(Module):
    def __init__(self, config: ConfigReader, inputs: str, groups: str) -> None:
        self.conv1d = convolution(config, inputs, "hidden_size", groups)
        self.layernorm = SqueezeBertLayerNorm(config.integer("hidden_size"))
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def forward(self, x: Handle, input_tensor: Handle) -> Handle:
        x = self.conv1d(x)
        x = self.dropout(x)
        x = x + input_tensor
        x = self.layernorm(x)
        return x


class ConvActivation(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.conv1d = convolution(config, "hidden_size", "intermediate_size", "intermediate_groups")
        self.act = ActivationModule(read_activation(config, "hidden_act"))

    def forward(self, x: Handle) -> Handle:
        output = self.conv1d(x)
        return self.act(output)


class SqueezeBertSelfAttention(Heads):
    def __init__(self, config: ConfigReader) -> None:
        self.read_sizes(config)
        for name in self.names:
            groups = f"{name[0]}_groups"
            setattr(self, name, convolution(config, "hidden_size", "hidden_size", groups))
        self.add_dropout(config.number(self.dropout_key))

    def columns(self, x: Handle) -> Handle:
        """Heads whose tokens are the last dimension."""
        return x.view(x.shape[0], self.num_heads, self.head_dim, x.shape[-1])

    def forward(self, x: Handle, mask: Handle) -> Handle:
        mixed_query_layer = self.query(x)
        mixed_key_layer = self.key(x)
        mixed_value_layer = self.value(x)
        query_layer = self.columns(mixed_query_layer).permute(0, 1, 3, 2)
        key_layer = self.columns(mixed_key_layer)
        value_layer = self.columns(mixed_value_layer).permute(0, 1, 3, 2)
        attention_score = matmul(query_layer, key_layer)
        attention_score = attention_score / self.head_dim**0.5
        attention_score = attention_score + mask
        attention_probs = softmax(attention_score)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 1, 3, 2).contiguous()
        context_layer = context_layer.view(*x.shape)
        return context_layer


class SqueezeBertModule(EncoderLayer):
    def __init__(self, config: ConfigReader) -> None:
        self.attention = SqueezeBertSelfAttention(config)
        self.post_attention = ConvDropoutLayerNorm(config, "hidden_size", "post_attention_groups")
        self.intermediate = ConvActivation(config)
        self.output = ConvDropoutLayerNorm(config, "intermediate_size", "output_groups")

    def facts(self) -> LayerSpec:
        network = FeedForwardSpec(
            intermediate_size=self.intermediate.conv1d.out_channels,
            activation=self.intermediate.act.kind, bias=True,
        )  # fmt: skip
        return LayerSpec(
            attention=self.attention.facts(), feed_forward=network, norm=LAYER_NORM,
            placement=NormPlacement.POST, dropout=self.output.dropout.probability,
        )  # fmt: skip

    def forward(self, x: Handle, mask: Handle) -> Handle:
        attention_output = self.attention(x, mask)
        post_attention_output = self.post_attention(attention_output, x)
        intermediate_output = self.intermediate(post_attention_output)
        layer_output = self.output(intermediate_output, post_attention_output)
        return layer_output


class SqueezeBertEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = SqueezeBertModule
    list_name = "layers"

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Handle:
        x = x.permute(0, 2, 1)
        x = super().forward(x, *beside)
        return x.permute(0, 2, 1)


class SqueezeBertModel(BertModel):
    prefix = "transformer"
    tasks: ClassVar[Tasks] = {**BertModel.tasks, Task.MULTIPLE_CHOICE: PooledMultipleChoice}
    recomputes = False
    eager_only = True
    always_pools = True
    makes_mask = True
    makes_types = True
    classifier_dropout_key = "hidden_dropout_prob"
    embeddings_class: Callable[[ConfigReader], Module] = SqueezeBertEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = SqueezeBertEncoder

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        hidden, key = config.integer("hidden_size"), "embedding_size"
        if config.integer(key) != hidden:
            error = config.fail(key, f"must be the hidden_size ({hidden}) in this class")
            raise error
        super().__init__(config, pooled=pooled)
