"""PatchTST: a transformer over patches of series.

(transformers 5.23: models/patchtst)
"""

from typing import Any, ClassVar

from memplan.classes.pictures.base import PictureTask, begin
from memplan.classes.pictures.parts import InOrder
from memplan.classes.sensed.counted import Parts
from memplan.classes.series.base import (
    PREDICTION,
    PRETRAINING,
    REGRESSION,
    ForPrediction,
    SeriesAttention,
    SeriesModel,
    SeriesTask,
    dropped,
    norm_of,
    positions,
    projection,
)
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.functional import expanded
from memplan.graph.modules.grids import mean_along
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart


class PatchTSTPositionalEncoding(Module):
    def __init__(self, config: ConfigReader, rows: int, size: int) -> None:
        self.channels, self.token = (
            config.integer("num_input_channels"),
            config.flag("use_cls_token"),
        )
        if self.token:
            self.cls_token = Weight(1, 1, 1, size)
        self.position_enc = positions(config, rows + self.token, size)
        self.positional_dropout = dropped(config, "positional_dropout")

    def forward(self, patch_input: Handle) -> Handle:
        enc = self.operand(self.position_enc)
        if not self.token:
            return self.positional_dropout(patch_input + enc)
        patch_input = self.positional_dropout(patch_input + enc.narrow(enc.shape[0] - 1, 0))
        cls_token = self.operand(self.cls_token) + enc.narrow(1, 0)
        batch, _, _, size = patch_input.shape
        cls_tokens = expanded(cls_token, (batch, self.channels, 1, size))
        return concatenate(cls_tokens, patch_input, dim=2)


class PatchTSTEncoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, inner = config.integer("d_model"), config.integer("ffn_dim")
        kind = config.text("norm_type", default="batchnorm")
        batch = config.choice("norm_type", kind, ("batchnorm", "layernorm")) == "batchnorm"
        self.channel_attention = config.flag("channel_attention")
        self.pre_norm, bias = (config.flag(key) for key in ("pre_norm", "bias"))
        rate = config.number("attention_dropout", default=0.0)
        self.self_attn = SeriesAttention(config, "num_attention_heads", rate)
        self.norm_sublayer1 = norm_of(size, batch=batch)
        if self.channel_attention:
            self.norm_sublayer2 = norm_of(size, batch=batch)
        activation = ActivationModule(tower_activation(config, "activation_function"))
        self.ff = InOrder(
            _0=Linear(size, inner, bias=bias), _1=activation, _2=dropped(config, "ff_dropout"),
            _3=Linear(inner, size, bias=bias),
        )  # fmt: skip
        self.norm_sublayer3 = norm_of(size, batch=batch)
        self.dropout_path = dropped(config, "path_dropout")

    def attended(self, x: Handle, norm: Module) -> tuple[Handle, tuple[Handle, Handle | None]]:
        """Attention and the sum; what attention returned the layer names until it returns."""
        if self.pre_norm:
            attn_output, attn_weights = self.self_attn(norm(x))
            return x + self.dropout_path(attn_output), (attn_output, attn_weights)
        attn_output, attn_weights = self.self_attn(x)
        made: Handle = norm(x + self.dropout_path(attn_output))
        return made, (attn_output, attn_weights)

    def forward(self, x: Handle) -> Handle:
        batch, channels, length, size = x.shape
        x = x.view(batch * channels, length, size)
        x, (attn_output, attn_weights) = self.attended(x, self.norm_sublayer1)
        x = x.reshape(batch, channels, length, size)
        channel_attn_weights = None
        if self.channel_attention:
            x = x.transpose(2, 1).contiguous()
            x = x.view(batch * length, channels, size)
            x, (attn_output, channel_attn_weights) = self.attended(x, self.norm_sublayer2)
            x = x.reshape(batch, length, channels, size)
            x = x.transpose(1, 2).contiguous()
        x = x.view(batch * channels, length, size)
        if self.pre_norm:
            x = x + self.dropout_path(self.ff(self.norm_sublayer3(x)))
        else:
            x = self.norm_sublayer3(x + self.dropout_path(self.ff(x)))
        x = x.reshape(batch, channels, length, size)
        del attn_output, attn_weights, channel_attn_weights
        return x


def greatest(x: Handle, dim: int) -> Handle:
    """``x.max(dim).values``: keeps where they are."""
    shape = *x.shape[:dim], *x.shape[dim + 1 :]
    values, places = empty(x.run, shape, x.dtype), empty(x.run, shape, DType.INT64)
    x.run.record(
        OperationKind.MAX, (x.record,), (values.record, places.record), saves=(places.record,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return values


class PatchTSTForPrediction(ForPrediction):
    def add_head(self, config: ConfigReader) -> None:
        """A projection of what is pooled; each channel may have its own."""
        base, self.shared = self.model, config.flag("share_projection")
        self.token, self.pooling = config.flag("use_cls_token"), config.text("pooling_type")
        if self.pooling:
            config.choice("pooling_type", self.pooling, ("mean", "max"))
        pooled = bool(self.pooling) or self.token
        features = base.width * (1 if pooled else base.context)
        out = config.integer("prediction_length")
        self.dropout = dropped(config, "head_dropout")
        if self.shared:
            self.head = Parts(projection=projection(config, features, out))
            return
        count = config.integer("num_input_channels")
        apart = {str(index): projection(config, features, out) for index in range(count)}
        self.head = Parts(projections=Parts(**apart))

    def forecast(self, embedding: Handle) -> Handle:
        pooled_embedding = embedding
        if self.token:
            pooled_embedding = embedding.select(2)
        elif self.pooling:
            pooled_embedding = (mean_along if self.pooling == "mean" else greatest)(embedding, 2)
        pooled_embedding = pooled_embedding.view(*embedding.shape[:2], -1)
        pooled_embedding = self.dropout(pooled_embedding)
        made: Handle = self.head.children["projection"](pooled_embedding)
        return made


class PatchTSTForPretraining(SeriesTask):
    def sizes(self, config: ConfigReader) -> tuple[Any, ...]:
        return "linear", self.model.width, config.integer("patch_length")


class PatchTSTForClassification(SeriesTask):
    def sizes(self, config: ConfigReader) -> tuple[Any, ...]:
        features = config.integer("num_input_channels") * self.model.width
        return "linear", features, config.integer("num_targets")


class PatchTSTForRegression(SeriesTask):
    def add_head(self, config: ConfigReader) -> None:
        features = config.integer("num_input_channels") * self.model.width
        self.head = Parts(projection=projection(config, features, config.integer("num_targets")))


class PatchTSTModel(SeriesModel):
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        PREDICTION: PatchTSTForPrediction,
        PRETRAINING: PatchTSTForPretraining,
        "ForClassification": PatchTSTForClassification,
        REGRESSION: PatchTSTForRegression,
    }

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        size, patch = self.width, self.patch
        if config.flag("share_embedding"):
            embedding: Module = Linear(patch, size, bias=True)
        else:
            apart = {str(index): Linear(patch, size, bias=True) for index in range(self.channels)}
            embedding = Parts(**apart)
        self.is_shared = isinstance(embedding, Linear) and config.flag(
            "share_projection", default=True
        )
        self.embeds = isinstance(embedding, Linear)
        kinds = [None] * config.layers("num_hidden_layers")
        self.encoder = Parts(
            embedder=Parts(input_embedding=embedding),
            positional_encoder=PatchTSTPositionalEncoding(config, self.context, size),
            layers=LayerList("layers", kinds, lambda _: PatchTSTEncoderLayer(config)),
        )
        self.picture = self.described(0, channels=0)

    def left_out(self, ending: str) -> bool:
        """Series with matrices of their own, and losses of distributions."""
        if ending != PREDICTION:
            return not self.embeds
        return not (self.is_shared and self.forecasts)

    def forward(self, past_values: Handle) -> tuple[Handle, ...]:
        encoder = self.encoder.children
        past_observed_mask = self.observed(past_values)
        scaled_past_values, loc, scale = self.scaled(past_values, past_observed_mask)
        patched_values = self.patches(scaled_past_values)
        patch_input = encoder["embedder"].children["input_embedding"](patched_values)
        begin(self, "positions", ModelPart.OTHER, patch_input)
        hidden_state = encoder["positional_encoder"](patch_input)
        layers = encoder["layers"]
        assert isinstance(layers, LayerList)
        for encoder_layer in layers:
            hidden_state = encoder_layer(hidden_state)
        return patched_values, loc, scale, hidden_state
