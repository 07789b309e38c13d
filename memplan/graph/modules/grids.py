"""Modules of ``torch.nn`` that read pictures, of (batch, channels, height, width).

cuDNN's workspaces are left out: which algorithm it takes, and what that asks for, only the library
itself knows, on the card.
"""

from math import prod

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.basic import fp32_under_autocast
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layouts import Settled, always, in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.strides import Shape, is_channels_last, is_contiguous, row_strides
from memplan.graph.operations.convolutions import convolve, copy_gradient
from memplan.graph.operations.norms import beside_sum
from memplan.model.parameters import WeightRole


class Conv2d(Module):
    """``torch.nn.Conv2d``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *kernel: int,
        stride: int | tuple[int, int] = 1,
        padding: int = 0,
        groups: int = 1,
        dilation: int = 1,
        bias: bool = True,
    ) -> None:
        sides = kernel if len(kernel) == 2 else kernel * 2
        self.stride = stride if isinstance(stride, tuple) else (stride, stride)
        self.padding, self.dilation = padding, dilation
        self.weight = Weight(out_channels, in_channels // groups, *sides)
        if bias:
            self.bias = Weight(out_channels, role=WeightRole.OTHER)

    def forward(self, x: Handle) -> Handle:
        """One kernel; what lies channels last is given so (ATen/native/Convolution.cpp,
        ``determine_backend_memory_format``)."""
        batch, _, *sides = x.shape
        out_channels, height, width = self.sides_of(*sides)
        weight = self.parameter(self.weight)
        bias = self.parameter(self.weights["bias"]) if "bias" in self.weights else None
        last = is_channels_last(x.shape, x.strides)
        made = convolve(
            x.run, x.record, weight, bias, batch * height * width, out_channels,
            channels_last=last and not is_of_both(self.weight.shape),
            reads_rows=not last and not is_contiguous(x.shape, x.strides), gives_last=last,
        )  # fmt: skip
        shape = batch, out_channels, height, width
        if last:
            given, strides = channels_last(x.shape), channels_last(shape)
        else:
            given, strides = row_strides(x.shape), row_strides(shape)
        operation, settles = x.run.segment.operations[-1], None
        if not x.run.decomposed:
            settles = Settled(operation, Gradient.FRESH, expects=strides, otherwise=copy_gradient)
        return x.leads_to(Handle(x.run, made, shape, strides), always(given), settles)

    def sides_of(self, height: int, width: int) -> tuple[int, int, int]:
        """Channels, rows and columns of what it gives."""
        out_channels, _, *kernel = self.weight.shape
        return out_channels, *self.fewer(height, width, *kernel)

    def fewer(self, height: int, width: int, *kernel: int) -> tuple[int, int]:
        """Positions behind windows of a size.

        Raises ``SetupError`` where a picture is too small for them.
        """
        found = tuple(
            (side + 2 * self.padding - self.dilation * (window - 1) - 1) // step + 1
            for side, window, step in zip((height, width), kernel, self.stride, strict=True)
        )
        if min(found) < 1:
            msg = (
                f"image_size: pictures are too small for this model, whose windows of {max(kernel)} "
                "pixels find none"
            )
            raise SetupError(msg)
        return found[0], found[1]


class ConvTranspose2d(Conv2d):
    """``torch.nn.ConvTranspose2d`` whose windows lie side by side; its weight has its inputs first."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=kernel)
        self.weight = Weight(in_channels, out_channels, kernel, kernel)

    def sides_of(self, height: int, width: int) -> tuple[int, int, int]:
        """A whole window of each position."""
        _, channels, *kernel = self.weight.shape
        return channels, kernel[0] * height, kernel[1] * width

    def forward(self, x: Handle) -> Handle:
        """Each window is read once, not each result."""
        made = super().forward(x)
        operation = x.run.segment.operations[-1]
        operation.flops //= prod(self.weight.shape[2:])
        return made


class Conv3d(Module):
    """``torch.nn.Conv3d`` whose windows lie side by side; what does not lie in rows is copied for it."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: tuple[int, int, int],
        *,
        bias: bool = True,
    ) -> None:
        self.weight = Weight(out_channels, in_channels, *window)
        if bias:
            self.bias = Weight(out_channels, role=WeightRole.OTHER)

    def forward(self, x: Handle) -> Handle:
        """One kernel."""
        batch, _, *sides = x.shape
        out_channels, _, *window = self.weight.shape
        shape = batch, out_channels, *(a // b for a, b in zip(sides, window, strict=True))
        weight = self.parameter(self.weight)
        bias = self.parameter(self.weights["bias"]) if "bias" in self.weights else None
        made = convolve(
            x.run, x.record, weight, bias,
            prod(shape) // out_channels, out_channels,
            reads_rows=not is_contiguous(x.shape, x.strides),
        )  # fmt: skip
        settles = Settled(
            x.run.segment.operations[-1], Gradient.FRESH, expects=row_strides(shape),
            otherwise=copy_gradient,
        )  # fmt: skip
        return x.leads_to(Handle(x.run, made, shape), in_rows(x.shape), settles)


def is_of_both(weight: Shape) -> bool:
    """Whether a weight lies in rows and channels last: of one channel, or of windows of one number."""
    _, channels, height, width = weight
    return channels == 1 or height * width == 1


def channels_last(shape: Shape) -> Shape:
    """Strides of a picture whose channels lie side by side.

    >>> channels_last((2, 3, 4, 5))
    (60, 1, 15, 3)
    """
    _, channels, height, width = shape
    return height * width * channels, 1, width * channels, channels


class BatchNorm(Module):
    """``torch.nn.BatchNorm1d`` and ``2d``: autocast leaves it its input's dtype; statistics are fp32."""

    def __init__(self, channels: int) -> None:
        self.weight = Weight(channels, role=WeightRole.NORM)
        self.bias = Weight(channels, role=WeightRole.NORM)

    def forward(self, x: Handle) -> Handle:
        """One kernel; what it goes by when it is not trained are buffers of its own."""
        run, (channels,) = x.run, self.weight.shape
        weight, bias = self.parameter(self.weight), self.parameter(self.bias)
        for _ in range(2):
            run.hold_buffer(channels, run.options.weights, module=self.within)
        run.hold_buffer(1, DType.INT64, module=self.within)
        made = run.tensor(x.numel, x.dtype)
        statistics = [run.tensor(channels, DType.FP32) for _ in range(2)]
        run.record(
            OperationKind.BATCH_NORM, (x.record, weight, bias), (made, *statistics),
            saves=(x.record, *statistics, weight), gradients=(Gradient.FRESH,) * 3,
        )  # fmt: skip
        return x.like(made)


class GroupNorm(Module):
    """``torch.nn.GroupNorm``: in fp32 under autocast, which casts the last of its arguments first; keeps its input and two
    numbers a group. Its kernel makes a factor and a summand of each channel (ATen/native/cuda/group_norm_kernel.cu)."""

    def __init__(self, groups: int, channels: int) -> None:
        self.groups = groups
        self.weight = Weight(channels, role=WeightRole.NORM)
        self.bias = Weight(channels, role=WeightRole.NORM)

    def forward(self, x: Handle) -> Handle:
        """One kernel."""
        run, (batch, channels, *_) = x.run, x.shape
        weights = [self.operand(self.bias), self.operand(self.weight)]
        bias, weight = (fp32_under_autocast(each).record for each in weights)
        x = fp32_under_autocast(x)
        made = run.tensor(x.numel, x.dtype)
        statistics = [run.tensor(batch * self.groups, x.dtype) for _ in range(2)]
        each = () if run.decomposed else (allocated_bytes(batch * channels, DType.FP32),)
        run.record(
            OperationKind.LAYER_NORM, (x.record, weight, bias), (made, *statistics),
            saves=(x.record, *statistics, weight), gradients=(Gradient.FRESH,) * 3,
            forward_scratch_bytes=(*(RESULT,) * 3, *each, *each) if each else (),
        )  # fmt: skip
        return x.like(made)


class DropPath(Module):
    """Whole samples are left out at random: what is left is divided by its share.

    (transformers 5.23, models/swin/modular_swin.py, ``SwinDropPath``; ``torch.nn.Identity`` at 0)
    """

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def forward(self, hidden_states: Handle) -> Handle:
        """A number for each sample is kept."""
        if not self.probability:
            return hidden_states
        run, shape = self.run, (hidden_states.shape[0], *(1,) * (len(hidden_states.shape) - 1))
        random_tensor = made_by(run, OperationKind.UNIFORM_IN_PLACE, shape, hidden_states.dtype)
        return hidden_states / 2.0 * random_tensor


def interpolate(x: Handle, height: int, width: int) -> Handle:
    """``F.interpolate``, which autocast runs in fp32: nothing is kept. Of a table of tokens, seen as a picture, the
    gradient comes as one."""
    x = fp32_under_autocast(x)
    made = empty(x.run, (*x.shape[:2], height, width), x.dtype)
    x.run.record(OperationKind.UPSAMPLE, (x.record,), (made.record,), gradients=(Gradient.TURNED,))
    return x.leads_to(made, in_rows(x.shape))


def mean_along(x: Handle, dim: int) -> Handle:
    """``x.mean(dim, keepdim=True)``."""
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return Handle(x.run, x.run.mean(x.record, x.shape[dim]), shape)


def mean_of_picture(x: Handle) -> Handle:
    """``torch.nn.AdaptiveAvgPool2d(1)``, which is a mean."""
    batch, channels, height, width = x.shape
    return Handle(x.run, x.run.mean(x.record, height * width), (batch, channels, 1, 1))


def greatest_of_picture(x: Handle) -> Handle:
    """``torch.nn.MaxPool2d`` of a window that is no smaller than the picture."""
    return _greatest(x, (*x.shape[:2], 1, 1))


def adaptive_mean(x: Handle, side: int) -> Handle:
    """``torch.nn.AdaptiveAvgPool2d(side)``, which of one number is a mean."""
    return mean_of_picture(x) if side == 1 else mean_of_windows(x, side)


def mean_of_windows(x: Handle, side: int = 1) -> Handle:
    """``torch.nn.AvgPool2d`` that gives so many rows and columns: keeps what it was given."""
    made = empty(x.run, (*x.shape[:2], side, side), x.dtype)
    x.run.record(
        OperationKind.MEAN, (x.record,), (made.record,), saves=(x.record,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


def norm_of_picture(x: Handle) -> Handle:
    """``torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)``, in fp32 under autocast: a sum over positions.

    Backward makes the quotient, and where the norm is 0, and has its result in the norm's format first (torch 2.13,
    ``linalg_vector_norm_backward``).
    """
    run, shape = x.run, (x.shape[0], 1, 1, x.shape[-1])
    made = empty(run, shape, x.dtype if run.autocast is None else DType.FP32)
    quotient, zeros = (
        allocated_bytes(x.numel, made.dtype), allocated_bytes(made.numel, DType.BOOL),
    )  # fmt: skip
    scratch = [RESULT]
    if not run.decomposed:
        scratch += beside_sum(scratch, made.numel, x.numel // made.numel, quotient, run)
    run.record(
        OperationKind.VECTOR_NORM, (x.record,), (made.record,), saves=(x.record, made.record),
        gradients=(Gradient.FRESH if x.dtype is made.dtype else quotient,), forward_scratch_bytes=scratch,
        backward_scratch_bytes=(quotient, zeros, RESULT),
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


def max_pool2d(x: Handle, kernel: int, stride: int, *, padding: int = 0) -> Handle:
    """``F.max_pool2d``: keeps what it was given, and the places of the greatest."""
    batch, channels, *sides = x.shape
    fewer = ((side + 2 * padding - kernel) // stride + 1 for side in sides)
    return _greatest(x, (batch, channels, *fewer))


def _greatest(x: Handle, shape: Shape) -> Handle:
    made, places = empty(x.run, shape, x.dtype), empty(x.run, shape, DType.INT64)
    x.run.record(
        OperationKind.MAX, (x.record,), (made.record, places.record),
        saves=(x.record, places.record), gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))
