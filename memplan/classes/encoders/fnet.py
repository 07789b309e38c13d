"""FNet: a Fourier transform over tokens and channels in the place of attention.

(transformers 5.23: models/fnet)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import LAYER_NORM, EncoderLayer
from memplan.classes.encoders.bert import BertForPreTraining, BertModel
from memplan.classes.encoders.layers import Intermediate, LayerParts, Output, Stack
from memplan.classes.encoders.tables import Embeddings
from memplan.classes.encoders.tasks import PooledMultipleChoice, Tasks
from memplan.graph.modules.basic import LayerNorm, Linear
from memplan.graph.modules.functional import fourier_transform
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec
from memplan.model.parameters import LayerBlock


class FNetEmbeddings(Embeddings):
    adds_in_place = True

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        hidden = config.integer("hidden_size")
        self.projection = Linear(hidden, hidden, bias=True)


class FNetBasicFourierTransform(Module):
    def forward(self, x: Handle) -> tuple[Handle]:
        return (fourier_transform(x),)


class FNetBasicOutput(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.LayerNorm = LayerNorm(config.integer("hidden_size"))

    def forward(self, x: Handle, input_tensor: Handle) -> Handle:
        return self.LayerNorm(input_tensor + x)


class FNetFourierTransform(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader) -> None:
        self.self = FNetBasicFourierTransform()
        self.output = FNetBasicOutput(config)

    def forward(self, x: Handle) -> Handle:
        self_outputs = self.self(x)
        fourier_output = self.output(self_outputs[0], x)
        return fourier_output


class FNetLayer(LayerParts):
    output: Output

    def __init__(self, config: ConfigReader) -> None:
        self.fourier = FNetFourierTransform(config)
        self.intermediate = Intermediate(config)
        self.output = Output(config)
        self.hidden_size = config.integer("hidden_size")

    def facts(self) -> LayerSpec:
        return LayerSpec(
            attention=AttentionSpec(
                num_heads=1, num_kv_heads=1, head_dim=self.hidden_size, causal=False
            ),
            feed_forward=self.intermediate.facts(), norm=LAYER_NORM, placement=self.placement,
            dropout=self.output.dropout.probability, feed_forward_dropout_only=True,
        )  # fmt: skip

    def forward(self, x: Handle, *_: Handle | Tables | None) -> Handle:
        fourier_output = self.fourier(x)
        layer_output = self.feed_forward_chunk(fourier_output)
        return layer_output


class FNetEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = FNetLayer


class FNetModel(BertModel):
    prefix = "fnet"
    tasks: ClassVar[Tasks] = {
        **BertModel.tasks,
        Task.MULTIPLE_CHOICE: PooledMultipleChoice,
        Task.PRETRAINING: BertForPreTraining,
    }
    classifier_dropout_key = "hidden_dropout_prob"
    embeddings_class: Callable[[ConfigReader], Module] = FNetEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = FNetEncoder
    always_pools = True
