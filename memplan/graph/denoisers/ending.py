"""The last norm and projection of a denoiser, and its loss (diffusers' training scripts)."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Storage, Tensor, allocated_bytes
from memplan.graph.denoisers.joint import cut_row
from memplan.graph.denoisers.modulation import (
    affine_norm,
    full_norm,
    modulated,
    modulations,
    plain_norm,
    vectors,
)
from memplan.graph.denoisers.state import Denoising, batch_dtype
from memplan.graph.operations.products import linear
from memplan.model.denoisers import DenoisedBody, Modulation


def denoised(t: Tape, x: Tensor, body: DenoisedBody, d: Denoising) -> Tensor:
    """What the model gives, laid out as its latents are, and the loss."""
    size = body.size
    if body.cropped:
        _, x = cut_row(t, x, size, d)
    if body.first_norm:
        x = affine_norm(t, x, body.first_norm, size)
        t.let_input_go()
    if body.modulation is Modulation.TABLE:
        x = _by_table(t, x, body, d)
    elif body.modulation is Modulation.PLAIN_TABLE:
        x = _by_plain_table(t, x, body, d)
    else:
        x = _by_linear(t, x, body, d)
    if not (body.first_norm or body.cropped):
        t.let_input_go()
    made = linear(t, x, "proj_out", size, body.outputs, bias=True)
    t.touch(x)
    given = t.contiguous(made)
    t.touch(made)
    if body.halved:
        t.linger(given)
        given, _ = t.split(given, given.numel // 2, given.numel // 2)
    return mean_square(t, given, d)


def _by_linear(t: Tape, x: Tensor, body: DenoisedBody, d: Denoising) -> Tensor:
    """``AdaLayerNormContinuous`` and, of CogVideoX, ``AdaLayerNorm``."""
    first, second = modulations(t, d, "norm_out", body.size, 2)
    if body.affine:
        return modulated(t, affine_norm(t, x, "norm_out.norm", body.size), second, first)
    return modulated(t, plain_norm(t, x, body.size), first, second)


def _by_table(t: Tape, x: Tensor, body: DenoisedBody, d: Denoising) -> Tensor:
    by = t.add(t.parameter("model.scale_shift_table", 1, 2, body.size), _twice(t, d.condition_of()))
    shift, scale = vectors(t, by, 2)
    full = t.cast(x, DType.FP32)
    return t.cast(modulated(t, full_norm(t, full, body.size), scale, shift), x.dtype)


def _by_plain_table(t: Tape, x: Tensor, body: DenoisedBody, d: Denoising) -> Tensor:
    by = t.add(t.parameter("model.scale_shift_table", 2, body.size), _twice(t, d.condition_of()))
    shift, scale = vectors(t, by, 2)
    return modulated(t, plain_norm(t, x, body.size), scale, shift)


def _twice(t: Tape, x: Tensor) -> Tensor:
    """Seen by both rows of the table; a view, whose gradient is summed over them."""
    out = Tensor(2 * x.numel, x.dtype, x.storage, requires_grad=x.requires_grad)
    t.record(OperationKind.EXPAND, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def mean_square(t: Tape, given: Tensor, d: Denoising) -> Tensor:
    """The weighted mean square of what the model gave less the flow's direction, in fp32."""
    full = t.cast(given, DType.FP32)
    target = _of_loop(given.numel, batch_dtype(t))
    wanted = t.cast(target, DType.FP32)
    error = t.tensor(full.numel, DType.FP32)
    t.record(OperationKind.SUB, (full, wanted), (error,), gradients=(Gradient.ALIAS, Gradient.NONE))
    weights = t.cast(_of_loop(d.batch, batch_dtype(t)), DType.FP32)
    weighted = t.mul(weights, t.square(error))
    each = t.mean(weighted, weighted.numel // d.batch)
    return t.mean(each, each.numel)


def _of_loop(numel: int, dtype: DType) -> Tensor:
    """A variable of the training loop, counted with the batch."""
    return Tensor(numel, dtype, Storage(allocated_bytes(numel, dtype), -1, 0))
