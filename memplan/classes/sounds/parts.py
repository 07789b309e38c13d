"""What classes of sound write out alike: convolutions of a signal, norms of their weights, what masks time."""

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.classes.sounds.base import begin
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import at_least_one, each_stage
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import made_from, read_in_rows
from memplan.graph.modules.grids import GroupNorm
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList, LayerRun
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.masks import positions_past_padding
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, ModelPart

MASK_PROBABILITY, MASK_LENGTH, FEWEST_MASKS = 0.05, 10, 2
"""Of a stretch of time, in every class of the family; a model that masks owns a mask embedding."""


def gated_halves(x: Handle, dim: int = 1) -> Handle:
    """``torch.nn.functional.glu``: half of the channels times the sigmoid of the other half; keeps all."""
    shape = list(x.shape)
    shape[dim] //= 2
    made = empty(x.run, tuple(shape), x.dtype)
    x.run.record(
        OperationKind.GLU, (x.record,), (made.record,), saves=(x.record,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


class Sines(Module):
    """``Speech2TextSinusoidalPositionalEmbedding``: rows of a buffer, by how many tokens came before that are no padding."""

    offset = 2

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width = rows + self.offset, width

    def forward(self, input_ids: Handle) -> Handle:
        """Of each sequence."""
        run, shape = self.run, input_ids.shape
        position_ids = positions_past_padding(run, shape)
        run.hold_buffer(self.rows * self.width, run.options.weights)
        return made_from(
            OperationKind.INDEX_SELECT, (*shape, self.width), run.buffer_dtype, position_ids
        )


class GLU(Module):
    """``torch.nn.GLU(dim=1)``."""

    def forward(self, x: Handle) -> Handle:
        return gated_halves(x)


class FeedForward(Module):
    """``Wav2Vec2FeedForward``."""

    block = LayerBlock.NETWORK

    def __init__(
        self, size: int, inner: int, kind: Activation, inner_dropout: float, dropout: float
    ) -> None:
        self.intermediate_dropout = Dropout(inner_dropout)
        self.intermediate_dense = Linear(size, inner, bias=True)
        self.intermediate_act_fn = ActivationModule(kind)
        self.output_dense = Linear(inner, size, bias=True)
        self.output_dropout = Dropout(dropout)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.intermediate_dense(hidden_states)
        hidden_states = self.intermediate_act_fn(hidden_states)
        hidden_states = self.intermediate_dropout(hidden_states)
        hidden_states = self.output_dense(hidden_states)
        hidden_states = self.output_dropout(hidden_states)
        return hidden_states


class SignalConvolution(Module):
    """``Wav2Vec2NoLayerNormConvLayer``, or that with a norm of each channel, or of all channels."""

    def __init__(self, config: ConfigReader, *sizes: int, stride: int, norm: str) -> None:
        self.norm, channels = norm, sizes[1]
        self.conv = Conv1d(*sizes, stride=stride, bias=config.flag("conv_bias"))
        if norm == "layer":
            self.layer_norm: Module = LayerNorm(channels)
        self.activation = ActivationModule(tower_activation(config, "feat_extract_activation"))
        if norm == "group":
            self.layer_norm = GroupNorm(channels, channels)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.conv(hidden_states)
        if self.norm == "group":
            hidden_states = self.layer_norm(hidden_states)
        elif self.norm:
            hidden_states = hidden_states.transpose(-2, -1)
            hidden_states = self.layer_norm(hidden_states)
            hidden_states = hidden_states.transpose(-2, -1)
        hidden_states = self.activation(hidden_states)
        return hidden_states


class FeatureEncoder(Module):
    """``Wav2Vec2FeatureEncoder``: convolutions of a signal, each of which checkpointing recomputes."""

    def __init__(self, config: ConfigReader, *, norms_all: bool = False, stack: str = "") -> None:
        channels = at_least_one(config, "conv_dim")
        kernels = each_stage(config, "conv_kernel", len(channels))
        strides = each_stage(config, "conv_stride", len(channels))
        norm = "layer" if norms_all else config.text("feat_extract_norm", default="group")
        config.choice("feat_extract_norm", norm, ("group", "layer"))
        self.stack = stack
        before, self.channels, self.count = 1, channels[-1], len(channels)
        for index, sizes in enumerate(zip(channels, kernels, strict=True)):
            own = "" if index and norm == "group" else norm
            made = SignalConvolution(config, before, *sizes, stride=strides[index], norm=own)
            setattr(self, f"conv_layers.{index}", made)
            before = channels[index]

    def begin(self, index: int, x: Handle | None) -> None:
        """The segment of a convolution begins."""
        again = self.run.options.checkpointed_layers == 1.0
        name = f"{self.stack}feature_extractor.{index}"
        begin(self, name, ModelPart.OTHER, x, checkpointed=again)

    def forward(self, hidden_states: Handle) -> Handle:
        run = self.run
        if not (run.options.without_gradients or run.frozen):
            hidden_states.record.requires_grad = True
        for index, conv_layer in enumerate(self.children.values()):
            if index:
                self.begin(index, hidden_states)
            hidden_states = conv_layer(hidden_states)
            if index < self.count - 1:
                hidden_states = read_in_rows(hidden_states)
        return hidden_states


class WeightNorm(Module):
    """``torch.nn.utils.parametrizations.weight_norm`` over taps: a direction times a length for each."""

    def __init__(self, *shape: int) -> None:
        self.original0, self.original1 = Weight(1, 1, shape[-1]), Weight(*shape)

    def forward(self) -> Handle:
        run = self.run
        length, direction = self.parameter(self.original0), self.parameter(self.original1)
        made = empty(run, self.original1.shape, direction.dtype)
        norms = run.tensor(length.numel, DType.FP32)
        run.record(
            OperationKind.DIV, (direction, length), (made.record, norms),
            saves=(direction, length, norms), gradients=(Gradient.FRESH, Gradient.FRESH),
        )  # fmt: skip
        return made


class WeightNormConv1d(Conv1d):
    """``torch.nn.Conv1d`` with a weight of a norm and a direction."""

    def add_weight(self, *shape: int) -> None:
        """Declare both."""
        self.weight_norm = WeightNorm(*shape)
        self.children["parametrizations.weight"] = self.children.pop("weight_norm")

    def forward(self, x: Handle) -> Handle:
        """One kernel, behind what its weight is made by."""
        weight = self.weight_norm()
        return self.convolved(x, weight.record)


@dataclass(frozen=True, slots=True)
class MaskedStretches:
    """How much of the time SpecAugment overwrites (``_compute_mask_indices``): stretches of one length, as many as their
    share gives, rounded up or down by chance, and no fewer than asked for; two may lie over one another."""

    share: float
    length: int
    fewest: int
    of_view: bool
    """No dropout copies what is overwritten, which are the rows of a product."""

    def in_all(self, batch: int, frames: int) -> int:
        """Frames that are overwritten at most."""
        num = max(int(self.share * frames / self.length + 1), self.fewest)
        return batch * min(num, frames // self.length) * self.length


def overwrite_masked(
    module: Module, vector: Weight, x: Handle, stretches: MaskedStretches
) -> Handle:
    """``x[mask] = vector``: keeps the mask.

    Zeros are put over a copy of the gradient; the masked rows of it are taken out, and summed. Where ``x`` is a view,
    its gradient and that view's are copied first (torch 2.13,
    csrc/autograd/functions/tensor.cpp, ``CopySlices``).
    """
    run, weight = x.run, module.parameter(vector)
    mask = made_by(run, OperationKind.MASK, x.shape[:2], DType.BOOL)
    made = run.view(x.record, x.numel)
    size, width = x.record.storage.num_bytes, x.shape[-1]
    rows = allocated_bytes(stretches.in_all(*x.shape[:2]) * width, x.dtype)
    zeros = allocated_bytes(width, x.dtype)
    own = (zeros, RESULT, ~0, rows, RESULT)
    of_slice = (RESULT, size, zeros, size, ~2, rows, ~1, ~3, RESULT)
    run.record(
        OperationKind.MASKED_FILL_IN_PLACE, (x.record, weight), (made,), saves=(mask.record,),
        gradients=(Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=() if run.decomposed else of_slice if stretches.of_view else own,
    )  # fmt: skip
    # What reads it then sees the product's rows anew (``as_strided``).
    seen = run.slice(made, made.numel) if stretches.of_view and not run.decomposed else made
    return Handle(run, seen, x.shape)


class OutsideCheckpoints(LayerList):
    """Layers that checkpointing does not reach."""

    def runs(self) -> Iterator[LayerRun]:
        """As the list is frozen alone."""
        for each in super().runs():
            yield replace(each, checkpointed=False)


def masks(config: ConfigReader) -> bool:
    """Whether the model owns an embedding for masked stretches."""
    in_time = config.number("mask_time_prob", default=MASK_PROBABILITY)
    return in_time > 0 or config.number("mask_feature_prob") > 0


def masked_time(config: ConfigReader) -> MaskedStretches | None:
    """The stretches of time that are masked in training."""
    share = config.number("mask_time_prob", default=MASK_PROBABILITY)
    if not config.flag("apply_spec_augment", default=True) or share <= 0:
        return None
    length = config.integer("mask_time_length", default=MASK_LENGTH)
    fewest = config.integer("mask_time_min_masks", default=FEWEST_MASKS, minimum=0)
    of_view = config.number("feat_proj_dropout", default=0.0) == 0
    return MaskedStretches(share, length, fewest, of_view)
