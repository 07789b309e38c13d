"""GLPN: the Mix Transformer, and a decoder that puts the depth of all stages together.

(transformers 5.23, models/glpn/modeling_glpn.py)
"""

from math import prod
from typing import ClassVar

from memplan.classes.pictures.base import PICTURE, PictureModel, PictureTask, begin
from memplan.classes.pictures.parts import InOrder, as_picture, as_tokens, laid_as_picture
from memplan.classes.pictures.reduced import EfficientSelfAttention, Encoder, Layer, Stage
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.basic import (
    ActivationModule,
    Dropout,
    LayerNorm,
    Linear,
    fp32_under_autocast,
)
from memplan.graph.modules.grids import BatchNorm, Conv2d, interpolate
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, ModelPart


class GLPNStage(Stage):
    reductions = "sr_ratios"

    def __init__(self, config: ConfigReader, index: int) -> None:
        super().__init__(config, index)
        if not self.inner:
            error = config.fail("mlp_ratios", "leaves a feed-forward network no width")
            raise error


class GLPNOverlapPatchEmbeddings(Module):
    def __init__(self, stage: Stage) -> None:
        self.proj = Conv2d(
            stage.channels, stage.size, stage.patch_size, stride=stage.stride,
            padding=stage.patch_size // 2,
        )  # fmt: skip
        self.layer_norm = LayerNorm(stage.size)

    def forward(self, pixel_values: Handle) -> tuple[Handle, int, int]:
        embeddings = self.proj(pixel_values)
        _, _, height, width = embeddings.shape
        embeddings = as_tokens(embeddings)
        embeddings = self.layer_norm(embeddings)
        return embeddings, height, width


class GLPNEfficientSelfAttention(EfficientSelfAttention):
    reduces = "sr"


class GLPNDepthWiseConv(Module):
    def __init__(self, size: int) -> None:
        self.dwconv = Conv2d(size, size, 3, padding=1, groups=size)

    def forward(self, hidden_states: Handle, height: int, width: int) -> Handle:
        hidden_states = as_picture(hidden_states, height, width)
        hidden_states = self.dwconv(hidden_states)
        hidden_states = as_tokens(hidden_states)
        return hidden_states


class GLPNMixFFN(Module):
    block = LayerBlock.NETWORK

    def __init__(self, stage: Stage) -> None:
        self.dense1 = Linear(stage.size, stage.inner, bias=True)
        self.dwconv = GLPNDepthWiseConv(stage.inner)
        self.intermediate_act_fn = ActivationModule(tower_activation(stage.config, "hidden_act"))
        self.dense2 = Linear(stage.inner, stage.size, bias=True)
        self.dropout = Dropout(stage.dropout)

    def forward(self, hidden_states: Handle, height: int, width: int) -> Handle:
        hidden_states = self.dense1(hidden_states)
        hidden_states = self.dwconv(hidden_states, height, width)
        hidden_states = self.intermediate_act_fn(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.dense2(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states


class GLPNLayer(Layer):
    attention_class = GLPNEfficientSelfAttention

    def network(self, stage: Stage) -> Module:
        """A convolution of every channel by itself stands in it."""
        return GLPNMixFFN(stage)

    def fed(self, hidden_states: Handle, height: int, width: int) -> Handle:
        """It sees tokens as a picture."""
        found: Handle = self.mlp(hidden_states, height, width)
        return found


class GLPNEncoder(Encoder):
    stage_class = GLPNStage
    layer_class = GLPNLayer
    begins = "encoder."

    def embeddings(self, stage: Stage) -> Module:
        """Convolutions whose windows overlap."""
        return GLPNOverlapPatchEmbeddings(stage)

    def add_norms(self, stages: list[Stage]) -> None:
        """One behind each stage."""
        for stage in stages:
            norm = LayerNorm(stage.size)
            norm.segment = f"{self.begins}stages.{stage.index}.norm", ModelPart.NORM
            setattr(self, f"layer_norm.{stage.index}", norm)

    def forward(self, pixel_values: Handle, output_hidden_states: bool) -> list[Handle]:
        all_hidden_states: list[Handle] = []
        hidden_states = layer_outputs = pixel_values
        for stage in self.stages:
            embed, layers, norm = (
                self.children[f"{name}.{stage.index}"]
                for name in ("patch_embeddings", "block", "layer_norm")
            )
            self.begin_stage(stage, hidden_states)
            hidden_states, height, width = embed(hidden_states)
            assert isinstance(layers, LayerList)
            for block in layers:
                layer_outputs = block(hidden_states, height, width)
                hidden_states = layer_outputs
            hidden_states = norm(hidden_states)
            self.run.outlive(layer_outputs.record.storage)  # named until another layer returns
            hidden_states = laid_as_picture(hidden_states, height, width)
            if output_hidden_states or stage.is_last:
                all_hidden_states.append(hidden_states)
        return all_hidden_states


class GLPNSelectiveFeatureFusion(Module):
    def __init__(self, size: int) -> None:
        half = size // 2
        for number, before, after in ((1, 2 * size, size), (2, size, half)):
            layer = InOrder(
                _0=Conv2d(before, after, 3, padding=1), _1=BatchNorm(after),
                _2=ActivationModule(Activation.RELU),
            )  # fmt: skip
            setattr(self, f"convolutional_layer{number}", layer)
        self.convolutional_layer3 = Conv2d(half, 2, 3, padding=1)

    def forward(self, local_features: Handle, global_features: Handle) -> Handle:
        features = concatenate(local_features, global_features, dim=1)
        for each in self.children.values():
            features = each(features)
        attn = features.unary(OperationKind.SIGMOID)
        hybrid_features = local_features * attn.select(1).unsqueeze(
            1
        ) + global_features * attn.select(1).unsqueeze(1)
        return hybrid_features


class GLPNDecoderStage(Module):
    """The narrowest stage has nothing to be fused with."""

    def __init__(self, size: int, width: int, *, first: bool) -> None:
        if size != width:
            self.convolution = Conv2d(size, width, 1)
        if not first:
            self.fusion = GLPNSelectiveFeatureFusion(width)

    def forward(self, hidden_state: Handle, residual: Handle | None) -> Handle:
        if "convolution" in self.children:
            hidden_state = self.convolution(hidden_state)
        if residual is not None:
            hidden_state = self.fusion(hidden_state, residual)
        hidden_state = twice(hidden_state)
        return hidden_state


def twice(x: Handle) -> Handle:
    """``torch.nn.Upsample(scale_factor=2, mode="bilinear")``."""
    return interpolate(x, 2 * x.shape[2], 2 * x.shape[3])


class GLPNDecoder(Module):
    def __init__(self, sizes: list[int], width: int) -> None:
        for index, size in enumerate(reversed(sizes)):
            setattr(self, f"stages.{index}", GLPNDecoderStage(size, width, first=not index))

    def forward(self, hidden_states: list[Handle]) -> list[Handle]:
        begin(self, "decoder.stages", ModelPart.OTHER, hidden_states[-1])
        stage_hidden_states: list[Handle] = []
        stage_hidden_state: Handle | None = None
        for hidden_state, stage in zip(hidden_states[::-1], self.children.values(), strict=True):
            stage_hidden_state = stage(hidden_state, stage_hidden_state)
            assert stage_hidden_state is not None
            stage_hidden_states.append(stage_hidden_state)
        assert stage_hidden_state is not None
        stage_hidden_states[-1] = twice(stage_hidden_state)
        return stage_hidden_states


class GLPNForDepthEstimation(PictureTask):
    begins_head = False

    def add_head(self, config: ConfigReader) -> None:
        """The decoder, and what makes a number of each pixel."""
        width = config.integer("decoder_hidden_size")
        assert isinstance(self.model, GLPNModel)
        self.decoder = GLPNDecoder([each.size for each in self.model.encoder.stages], width)
        self.head = InOrder(
            head=InOrder(
                _0=Conv2d(width, width, 3, padding=1), _1=ActivationModule(Activation.RELU),
                _2=Conv2d(width, 1, 3, padding=1),
            )
        )  # fmt: skip

    def loss_of(self, *hidden_states: Handle) -> Tensor:
        """The loss of every pixel's depth."""
        run = self.run
        out = self.decoder(list(hidden_states))
        self.begin_head(out[-1])
        predicted_depth = self.head(out[-1]).unary(OperationKind.SIGMOID) * 10.0
        batch, _, *sides = predicted_depth.shape
        predicted_depth = predicted_depth.view(batch, *sides)
        shape = predicted_depth.shape
        dtype = run.compute if run.autocast is None else DType.FP32
        labels = Handle(run, from_batch(run, prod(shape), dtype), shape)
        loss = scale_invariant_loss(predicted_depth, labels)
        hand_out(run, predicted_depth.record)
        return loss.record


def scale_invariant_loss(pred: Handle, target: Handle) -> Handle:
    """``SiLogLoss``."""
    valid_mask = target.apart(OperationKind.GT, dtype=DType.BOOL)
    diff_log = _logarithm(target, valid_mask) - _logarithm(pred, valid_mask)
    loss = diff_log.pow(2).mean() - 0.5 * diff_log.mean().pow(2)
    return loss.unary(OperationKind.SQRT)


def _logarithm(x: Handle, mask: Handle) -> Handle:
    """``torch.log(x[mask])``, which autocast runs in fp32; where the numbers lie is made of the mask each time."""
    run, made = x.run, empty(x.run, (x.numel,), x.dtype)
    places = 3 * allocated_bytes(x.numel, DType.INT64)
    run.record(
        OperationKind.INDEX, (x.record, mask.record), (made.record,), saves=(mask.record,),
        gradients=(Gradient.FRESH, Gradient.NONE), forward_scratch_bytes=(places, RESULT),
        backward_scratch_bytes=(RESULT, places),
    )  # fmt: skip
    return fp32_under_autocast(made).unary(OperationKind.LOG)


class GLPNModel(PictureModel):
    prefix = "glpn"
    endings: ClassVar[dict[str, type[PictureTask]]] = {"ForDepthEstimation": GLPNForDepthEstimation}

    def __init__(self, config: ConfigReader) -> None:
        self.encoder = GLPNEncoder(config)
        self.width = self.encoder.stages[-1].size
        self.picture = self.described(PICTURE, channels=config.integer("num_channels"))

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        return tuple(self.encoder(pixel_values, not self.reads_pooled))
