"""ConvBERT: half of the heads attend, the other half convolve with kernels made for each token.

(transformers 5.23: models/convbert)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import EncoderLayer
from memplan.classes.encoders.bert import ElectraForMaskedLM, ElectraModel
from memplan.classes.encoders.layers import (
    Attention,
    AttentionParts,
    Heads,
    Intermediate,
    Layer,
    Output,
    Stack,
)
from memplan.classes.encoders.tables import NarrowEmbeddings, TypesLast
from memplan.classes.encoders.tasks import (
    ClassificationHead,
    EncoderTask,
    HeadClassification,
    Tasks,
)
from memplan.classes.llama import Network
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended, in_heads, matmul
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import grouped_product, softmax, unfold
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.parameters import WeightRole


class ConvBertEmbeddings(TypesLast, NarrowEmbeddings):
    pass


class SeparableConv1D(Module):
    """Along the tokens, across the channels, and a bias added in place."""

    def __init__(self, hidden: int, width: int, kernel: int) -> None:
        self.bias = Weight(width, 1)
        self.depthwise = Conv1d(
            hidden, hidden, kernel, padding=kernel // 2, groups=hidden, bias=False
        )
        self.pointwise = Conv1d(hidden, width, 1, bias=False)

    def forward(self, x: Handle) -> Handle:
        x = self.depthwise(x)
        x = self.pointwise(x)
        x += self.operand(self.bias)
        return x


class ConvBertSelfAttention(Heads):
    def __init__(self, config: ConfigReader) -> None:
        hidden, key = config.integer("hidden_size"), "hidden_size"
        ratio, self.kernel = config.integer("head_ratio"), config.integer("conv_kernel_size")
        self.num_heads = max(config.integer("num_attention_heads") // ratio, 1)
        self.head_dim = config.divide(key, hidden, "num_attention_heads", self.num_heads) // 2
        self.width = width = self.num_heads * self.head_dim
        if 2 * width != hidden:
            error = config.fail(key, f"{hidden} is odd, but its heads are halved")
            raise error
        role = WeightRole.QUERY_KEY
        self.query = Linear(hidden, width, bias=True, role=role)
        self.key = Linear(hidden, width, bias=True, role=role)
        self.value = Linear(hidden, width, bias=True)
        self.key_conv_attn_layer = SeparableConv1D(hidden, width, self.kernel)
        self.conv_kernel_layer = Linear(width, self.num_heads * self.kernel, bias=True)
        self.conv_out_layer = Linear(hidden, width, bias=True)
        self.add_dropout(config.number(self.dropout_key))

    def forward(self, x: Handle, mask: Handle) -> Attended:
        batch, length, _ = x.shape
        mixed_key_layer = self.key(x)
        mixed_value_layer = self.value(x)
        mixed_key_conv_attn_layer = self.key_conv_attn_layer(x.transpose(1, 2))
        mixed_key_conv_attn_layer = mixed_key_conv_attn_layer.transpose(1, 2)
        mixed_query_layer = self.query(x)
        query_layer = in_heads(mixed_query_layer, self.head_dim)
        key_layer = in_heads(mixed_key_layer, self.head_dim)
        value_layer = in_heads(mixed_value_layer, self.head_dim)
        conv_attn_layer = mixed_key_conv_attn_layer * mixed_query_layer
        conv_kernel_layer = self.conv_kernel_layer(conv_attn_layer)
        conv_kernel_layer = conv_kernel_layer.view(-1, self.num_heads, self.kernel, 1)
        conv_kernel_layer = softmax(conv_kernel_layer)
        conv_out_layer = self.conv_out_layer(x)
        conv_out_layer = conv_out_layer.transpose(1, 2).contiguous().unsqueeze(-1)
        conv_out_layer = unfold(conv_out_layer, self.kernel)
        conv_out_layer = conv_out_layer.transpose(1, 2).contiguous()
        conv_out_layer = conv_out_layer.view(-1, self.num_heads, self.head_dim, self.kernel)
        conv_out_layer = matmul(conv_out_layer, conv_kernel_layer)
        attention_scores = matmul(query_layer, key_layer.transpose(2, 3))
        attention_scores = attention_scores / self.head_dim**0.5
        attention_scores = attention_scores + mask
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        conv_out = conv_out_layer.view(batch, length, self.num_heads, self.head_dim)
        context_layer = concatenate(context_layer, conv_out, dim=2)
        context_layer = context_layer.view(batch, length, 2 * self.width)
        return context_layer, attention_probs


class ConvBertAttention(Attention):
    self_class: Callable[[ConfigReader], Heads] = ConvBertSelfAttention
    hands_on_weights = False


class GroupedLinearLayer(Module):
    """A batched product, turned back by a copy, and a bias."""

    def __init__(self, config: ConfigReader, inputs: str, outputs: str) -> None:
        groups = config.integer("num_groups")
        self.in_features, self.out_features = (config.integer(each) for each in (inputs, outputs))
        rows = config.divide(inputs, self.in_features, "num_groups", groups)
        columns = config.divide(outputs, self.out_features, "num_groups", groups)
        self.weight = Weight(groups, rows, columns)
        self.bias = Weight(self.out_features)

    def forward(self, x: Handle) -> Handle:
        batch, length, _ = x.shape
        groups, rows, _ = self.weight.shape
        x = x.view(batch * length, groups, rows)
        x = x.permute(1, 0, 2)
        x = grouped_product(x, self, self.weight)
        x = x.permute(1, 0, 2)
        x = x.view(batch, length, self.out_features)
        x = x + self.operand(self.bias)
        return x


class ConvBertIntermediate(Intermediate):
    def linear(self, config: ConfigReader) -> Module:
        if config.integer("num_groups") == 1:
            return super().linear(config)
        return GroupedLinearLayer(config, "hidden_size", "intermediate_size")


class ConvBertOutput(Output):
    def linear(self, config: ConfigReader) -> Module:
        if config.integer("num_groups") == 1:
            return super().linear(config)
        return GroupedLinearLayer(config, "intermediate_size", "hidden_size")


class ConvBertLayer(Layer):
    attention_class: Callable[[ConfigReader], AttentionParts] = ConvBertAttention
    intermediate_class: Callable[[ConfigReader], Network] = ConvBertIntermediate
    output_class: Callable[[ConfigReader], Module] = ConvBertOutput


class ConvBertEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = ConvBertLayer


class ConvBertClassificationHead(ClassificationHead):
    """Its activation is a function."""

    def add_activation(self, config: ConfigReader) -> None:
        self.activation = read_activation(config, "hidden_act")


class ConvBertForSequenceClassification(HeadClassification):
    head_class: Callable[[ConfigReader, EncoderTask], ClassificationHead] = (
        ConvBertClassificationHead
    )


class ConvBertModel(ElectraModel):
    prefix = "convbert"
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: ElectraForMaskedLM,
        Task.BASE: ElectraModel.tasks[Task.BASE],
        Task.SEQUENCE_CLASSIFICATION: ConvBertForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: ElectraModel.tasks[Task.TOKEN_CLASSIFICATION],
        Task.QUESTION_ANSWERING: ElectraModel.tasks[Task.QUESTION_ANSWERING],
    }
    eager_only = True
    makes_mask = True
    embeddings_class: Callable[[ConfigReader], Module] = ConvBertEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = ConvBertEncoder
