"""CvT: queries, keys and values pass a convolution of every channel before they are projected.

(transformers 5.23, models/cvt/modeling_cvt.py)
"""

from typing import ClassVar

from memplan.classes.pictures.base import (
    IMAGES,
    PICTURE,
    ImageClassification,
    PictureModel,
    PictureTask,
    begin,
)
from memplan.classes.pictures.parts import (
    InOrder,
    Projected,
    as_picture,
    as_tokens,
    mixed_by_scores,
)
from memplan.families.towers.sizes import at_least_one, each_stage, stage_flags, stage_ratios
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import expanded, mean_of_tokens
from memplan.graph.modules.grids import BatchNorm, Conv2d, DropPath
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

CONVOLVED = "dw_bn"
"""The method of projection that the class has operations for."""


class Stage:
    """What the config says of a stage."""

    def __init__(self, config: ConfigReader, index: int, count: int) -> None:
        def whole(key: str, minimum: int = 1) -> int:
            return each_stage(config, key, count, minimum=minimum)[index]

        def share(key: str) -> float:
            return stage_ratios(config, key, count)[index]

        self.index, self.is_last = index, index + 1 == count
        sizes = each_stage(config, "embed_dim", count)
        self.size, self.last_size = sizes[index], sizes[-1]
        self.channels = sizes[index - 1] if index else config.integer("num_channels")
        self.patch = whole("patch_sizes"), whole("patch_stride"), whole("patch_padding", 0)
        self.heads = whole("num_heads")
        config.divide("embed_dim", self.size, "num_heads", self.heads)
        self.kernel = whole("kernel_qkv")
        self.of_queries = whole("stride_q"), whole("padding_q", 0)
        self.of_keys = whole("stride_kv"), whole("padding_kv", 0)
        methods = config.texts("qkv_projection_method")
        if len(methods) < count:
            error = config.fail("qkv_projection_method", f"must name {count} methods")
            raise error
        self.convolves = methods[index] == CONVOLVED
        self.bias = stage_flags(config, "qkv_bias", count)[index]
        self.has_token = stage_flags(config, "cls_token", count)[index]
        self.dropout, self.attention_dropout = share("drop_rate"), share("attention_drop_rate")
        self.inner = int(self.size * share("mlp_ratio"))
        self.depth = whole("depth")
        if self.depth <= index:
            # ``drop_path_rates[self.stage]``.
            said = f"{self.depth}: the class asks stage {index} for layer {index}"
            error = config.fail("depth", said)
            raise error
        self.drop_path = share("drop_path_rate") * index


class CvtConvEmbeddings(Module):
    def __init__(self, stage: Stage) -> None:
        kernel, stride, padding = stage.patch
        self.projection = Conv2d(stage.channels, stage.size, kernel, stride=stride, padding=padding)
        self.normalization = LayerNorm(stage.size)

    def forward(self, pixel_values: Handle) -> Handle:
        pixel_values = self.projection(pixel_values)
        _, _, height, width = pixel_values.shape
        pixel_values = as_tokens(pixel_values)
        pixel_values = self.normalization(pixel_values)
        pixel_values = as_picture(pixel_values, height, width)
        return pixel_values


class CvtSelfAttentionProjection(Module):
    def __init__(self, stage: Stage, stride: int, padding: int) -> None:
        if stage.convolves:
            size = stage.size
            convolution = Conv2d(
                size, size, stage.kernel, stride=stride, padding=padding, groups=size, bias=False
            )
            self.convolution_projection = InOrder(
                convolution=convolution, normalization=BatchNorm(size)
            )

    def forward(self, hidden_state: Handle) -> Handle:
        hidden_state = self.convolution_projection(hidden_state)
        hidden_state = as_tokens(hidden_state)
        return hidden_state


class CvtSelfAttention(Module):
    def __init__(self, stage: Stage) -> None:
        self.num_heads, self.with_cls_token = stage.heads, stage.has_token
        self.convolution_projection_query = CvtSelfAttentionProjection(stage, *stage.of_queries)
        self.convolution_projection_key = CvtSelfAttentionProjection(stage, *stage.of_keys)
        self.convolution_projection_value = CvtSelfAttentionProjection(stage, *stage.of_keys)
        for name in ("query", "key", "value"):
            setattr(self, f"projection_{name}", Linear(stage.size, stage.size, bias=stage.bias))
        self.dropout = Dropout(stage.attention_dropout)

    def in_heads(self, name: str, x: Handle) -> Handle:
        """``rearrange_for_multi_head_attention`` of a projection."""
        x = self.children[f"projection_{name}"](x)
        batch, tokens, size = x.shape
        return x.view(batch, tokens, self.num_heads, size // self.num_heads).permute(0, 2, 1, 3)

    def forward(self, hidden_state: Handle, height: int, width: int) -> Handle:
        cls_token: Handle | None = None
        if self.with_cls_token:
            cls_token, hidden_state = hidden_state.split(1, height * width, dim=1)
        hidden_state = as_picture(hidden_state, height, width)
        key = self.convolution_projection_key(hidden_state)
        query = self.convolution_projection_query(hidden_state)
        value = self.convolution_projection_value(hidden_state)
        if cls_token is not None:
            query = concatenate(cls_token, query, dim=1)
            key = concatenate(cls_token, key, dim=1)
            value = concatenate(cls_token, value, dim=1)
        query = self.in_heads("query", query)
        key = self.in_heads("key", key)
        value = self.in_heads("value", value)
        context = mixed_by_scores(query, key, value, self.dropout)
        return context


class CvtOutput(Module):
    def __init__(self, stage: Stage) -> None:
        self.dense = Linear(stage.inner, stage.size, bias=True)
        self.dropout = Dropout(stage.dropout)

    def forward(self, hidden_state: Handle, input_tensor: Handle) -> Handle:
        hidden_state = self.dense(hidden_state)
        hidden_state = self.dropout(hidden_state)
        hidden_state = hidden_state + input_tensor
        return hidden_state


class CvtLayer(Module):
    """The second sum is itself dropped by samples."""

    def __init__(self, stage: Stage) -> None:
        inner = CvtSelfAttention(stage)
        self.attention = Projected("attention", inner, stage.size, stage.dropout)
        self.intermediate = InOrder(
            dense=Linear(stage.size, stage.inner, bias=True),
            activation=ActivationModule(Activation.GELU),
        )
        self.output = CvtOutput(stage)
        self.drop_path = DropPath(stage.drop_path)
        self.layernorm_before = LayerNorm(stage.size)
        self.layernorm_after = LayerNorm(stage.size)

    def forward(self, hidden_state: Handle, height: int, width: int) -> Handle:
        self_attention_output = self.attention(self.layernorm_before(hidden_state), height, width)
        attention_output = self_attention_output
        attention_output = self.drop_path(attention_output)
        hidden_state = attention_output + hidden_state
        layer_output = self.layernorm_after(hidden_state)
        layer_output = self.intermediate(layer_output)
        layer_output = self.output(layer_output, hidden_state)
        layer_output = self.drop_path(layer_output)
        return layer_output


class CvtStage(Module):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        if stage.has_token:
            self.cls_token = Weight(1, 1, stage.last_size)
        embeddings = CvtConvEmbeddings(stage)
        self.embedding = InOrder(convolution_embeddings=embeddings, dropout=Dropout(stage.dropout))
        self.layers = LayerList(
            f"stages.{stage.index}.layers", [None] * stage.depth, lambda _: CvtLayer(stage)
        )

    def forward(self, named: list[Handle]) -> tuple[Handle, Handle | None]:
        """What it is given comes in a list, so that no other frame has a name for it: the encoder's names what this
        returns before anything of the next stage is there."""
        cls_token: Handle | None = None
        hidden_state = self.embedding(named[0])
        batch, size, height, width = hidden_state.shape
        hidden_state = as_tokens(hidden_state)
        if self.stage.has_token:
            cls_token = expanded(self.operand(self.cls_token), (batch, 1, size))
            hidden_state = concatenate(cls_token, hidden_state, dim=1)
        for layer in self.layers:
            layer_outputs = layer(hidden_state, height, width)
            hidden_state = layer_outputs
        named.clear()
        self.begin_next(hidden_state)
        if self.stage.has_token:
            cls_token, hidden_state = hidden_state.split(1, height * width, dim=1)
        hidden_state = as_picture(hidden_state, height, width)
        return hidden_state, cls_token

    def begin_next(self, hidden_state: Handle) -> None:
        """The segment behind the layers begins: the next stage's, or the task's."""
        if self.stage.is_last:
            begin(self, "head", ModelPart.HEAD, hidden_state)
        else:
            name = f"stages.{self.stage.index + 1}.embed"
            begin(self, name, ModelPart.EMBEDDING, hidden_state)


class CvtEncoder(Module):
    def __init__(self, stages: list[Stage]) -> None:
        for stage in stages:
            setattr(self, f"stages.{stage.index}", CvtStage(stage))

    def forward(self, pixel_values: Handle) -> tuple[Handle, Handle | None]:
        hidden_state = pixel_values
        cls_token: Handle | None = None
        for stage_module in self.children.values():
            named = [hidden_state]
            del hidden_state
            hidden_state, cls_token = stage_module(named)
        return hidden_state, cls_token


class CvtForImageClassification(ImageClassification):
    def add_head(self, config: ConfigReader) -> None:
        """A norm, and the classifier.

        Raises ``ConfigError`` where the last stage has no class token.
        """
        assert isinstance(self.model, CvtModel)
        if not self.model.stages[-1].has_token:
            error = config.fail("cls_token", "the last stage has none, which the class reads")
            raise error
        self.layernorm = LayerNorm(self.model.width)
        super().add_head(config)

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The last stage's class token."""
        del last_hidden_state
        (cls_token,) = others
        sequence_output = self.layernorm(cls_token)
        return mean_of_tokens(sequence_output)


class CvtModel(PictureModel):
    prefix = "cvt"
    endings: ClassVar[dict[str, type[PictureTask]]] = {IMAGES: CvtForImageClassification}

    def __init__(self, config: ConfigReader) -> None:
        depths = at_least_one(config, "depth")
        self.stages = [Stage(config, index, len(depths)) for index in range(len(depths))]
        self.width = self.stages[-1].size
        self.encoder = CvtEncoder(self.stages)
        self.picture = self.described(PICTURE, channels=config.integer("num_channels"))

    def left_out(self, ending: str) -> bool:
        """The class has no operations for another projection, nor for a token that is not the last stage's."""
        del ending
        tokens = (each.has_token for each in self.stages[:-1])
        return any(tokens) or not all(each.convolves for each in self.stages)

    def forward(self, pixel_values: Handle) -> tuple[Handle, Handle | None]:
        hidden_state, cls_token = self.encoder(pixel_values)
        return hidden_state, cls_token
