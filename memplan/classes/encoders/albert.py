"""ALBERT: groups of layers that share their weights, behind a projection.

(transformers 5.23: models/albert)
"""

from typing import ClassVar

from memplan.classes.encoders.base import LAYER_NORM, Encoded, Encoder, EncoderLayer, first_token
from memplan.classes.encoders.bert import BertModel
from memplan.classes.encoders.layers import Heads
from memplan.classes.encoders.tables import NarrowEmbeddings
from memplan.classes.encoders.tasks import EncoderTask, LMHead, MaskedLM, Tasks
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole


class AlbertAttention(Heads):
    """Heads, the output, and the norm of the sum in one module."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        hidden, role = config.integer("hidden_size"), WeightRole.ATTENTION_OUTPUT
        self.output_dropout = Dropout(config.number("hidden_dropout_prob"))
        self.dense = Linear(hidden, hidden, bias=True, role=role)
        self.LayerNorm = LayerNorm(hidden)

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        query_layer, key_layer, value_layer = self.heads(x)
        out, weights = self.attend(query_layer, key_layer, value_layer, mask)
        out = out.reshape(*x.shape[:2], -1)
        out = self.dense(out)
        out = self.output_dropout(out)
        out = self.LayerNorm(x + out)
        return out, weights


class AlbertLayer(Module):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.full_layer_layer_norm = LayerNorm(hidden)
        self.attention = AlbertAttention(config)
        self.ffn = Linear(hidden, inner, bias=True)
        self.ffn_output = Linear(inner, hidden, bias=True)
        self.activation = ActivationModule(read_activation(config, "hidden_act"))

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        attention_output, _ = self.attention(x, mask)
        ffn_output = self.ff_chunk(attention_output)
        x = self.full_layer_layer_norm(ffn_output + attention_output)
        return x

    def ff_chunk(self, attention_output: Handle) -> Handle:
        ffn_output = self.ffn(attention_output)
        ffn_output = self.activation(ffn_output)
        ffn_output = self.ffn_output(ffn_output)
        return ffn_output


class AlbertLayers(Module):
    """``torch.nn.ModuleList`` of one."""

    def __init__(self, config: ConfigReader) -> None:
        setattr(self, "0", AlbertLayer(config))

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        made: Handle = self.children["0"](x, mask)
        return made


class AlbertLayerGroup(EncoderLayer):
    def __init__(self, config: ConfigReader) -> None:
        key = "inner_group_num"
        if config.integer(key) != 1:
            error = config.fail(key, "only 1 layer a group is supported")
            raise error
        self.albert_layers = AlbertLayers(config)

    def facts(self) -> LayerSpec:
        layer = self.albert_layers.children["0"]
        assert isinstance(layer, AlbertLayer)
        inner, kind = layer.ffn.out_features, layer.activation.kind
        return LayerSpec(
            attention=layer.attention.facts(),
            feed_forward=FeedForwardSpec(intermediate_size=inner, activation=kind, bias=True),
            norm=LAYER_NORM, placement=NormPlacement.POST,
            dropout=layer.attention.output_dropout.probability, attention_dropout_only=True,
        )  # fmt: skip

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        for albert_layer in self.albert_layers.children.values():
            x = albert_layer(x, mask)
        return x


class AlbertTransformer(Module):
    def __init__(self, config: ConfigReader) -> None:
        width, hidden = config.integer("embedding_size"), config.integer("hidden_size")
        count = config.layers("num_hidden_layers")
        groups = config.integer("num_hidden_groups", maximum=count)
        self.embedding_hidden_mapping_in = Linear(width, hidden, bias=True)
        self.albert_layer_groups = LayerList(
            "encoder.layers", [int(each / (count / groups)) for each in range(count)],
            lambda _: AlbertLayerGroup(config), shared=True,
        )  # fmt: skip

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        x = self.embedding_hidden_mapping_in(x)
        for group in self.albert_layer_groups:
            x = group(x, mask)
        return x


class AlbertMLMHead(LMHead):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        width = config.integer("embedding_size")
        self.LayerNorm = LayerNorm(width)
        self.bias = Weight(task.spec.num_outputs)
        self.dense = Linear(config.integer("hidden_size"), width, bias=True)
        self.add_decoder(task, width)
        self.activation = ActivationModule(read_activation(config, "hidden_act"))


class AlbertForMaskedLM(MaskedLM):
    named_head = "predictions", AlbertMLMHead


class AlbertModel(Encoder):
    prefix = "albert"
    recomputes = False
    classifier_dropout_key = "classifier_dropout_prob"
    tasks: ClassVar[Tasks] = {**BertModel.tasks, Task.MASKED_LM: AlbertForMaskedLM}

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        hidden = config.integer("hidden_size")
        self.embeddings = NarrowEmbeddings(config)
        self.encoder = AlbertTransformer(config)
        self.pooler: Linear | None = None
        if pooled:
            self.pooler = Linear(hidden, hidden, bias=True)
            self.pooler.segment = "head", ModelPart.HEAD
            self.pooler_activation = ActivationModule(Activation.TANH)

    def forward(self, batch: int, length: int) -> Encoded:
        run = self.run
        embedding_output = self.embeddings(batch, length)
        sequence_output = self.encoder(embedding_output, None)
        pooled_output: Handle | None = None
        if self.pooler is not None:
            frozen = self.is_frozen(ModelPart.HEAD)
            run.start("head", sequence_output.record, part=ModelPart.HEAD, frozen=frozen)
            pooled_output = self.pooler_activation(self.pooler(first_token(sequence_output)))
        return Encoded(sequence_output, pooled_output)
