"""Clamps, dropout, softmax, and what is written into a part of a tensor."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes


def clamp(t: Tape, x: Tensor) -> Tensor:
    """``x.clamp_()``: in place, so that backward needs a copy of what was there before."""
    before = t.tensor(x.numel, x.dtype)
    after = t.view(x, x.numel)
    t.record(
        OperationKind.CLAMP_IN_PLACE, (x,), (after, before), saves=(before,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(*(allocated_bytes(x.numel, DType.BOOL),) * 2, RESULT),
    )  # fmt: skip
    return after


def clamped(t: Tape, x: Tensor, *, bounds: int) -> Tensor:
    """``x.clamp(...)`` by one number or two: keeps x; in backward a mask for each stands beside the
    gradient (torch's FunctionsManual.cpp, ``clamp_backward``)."""
    out = t.tensor(x.numel, x.dtype)
    masks = (allocated_bytes(x.numel, DType.BOOL),) * bounds
    t.record(
        OperationKind.CLAMP, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=() if t.decomposed else (*masks, RESULT),
    )  # fmt: skip
    return out


def clamp_between(t: Tape, x: Tensor) -> Tensor:
    """``torch.clamp(x, low, high)`` with tensors: keeps x; masks stand beside its gradient."""
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.CLAMP, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(*(allocated_bytes(x.numel, DType.BOOL),) * 2, RESULT),
    )  # fmt: skip
    return out


def dropout_probability(t: Tape, probability: float) -> float:
    """The config's probability, or what replaces all of them."""
    return probability if t.options.dropout is None else t.options.dropout


def dropout(t: Tape, x: Tensor, probability: float, *, module: str = "") -> Tensor:
    """Keep a one-byte mask per element; nothing happens at probability 0.

    ``module`` names it where it is one of its own, which is called even then.
    """
    if module:
        t.enter(module)
    out = x
    if dropout_probability(t, probability) != 0.0:
        out = drop(t, x)
    if module:
        t.leave(module)
    return out


def drop(t: Tape, x: Tensor) -> Tensor:
    """``torch.nn.functional.dropout`` at a probability above 0."""
    mask, out = t.tensor(x.numel, DType.BOOL), t.tensor(x.numel, x.dtype)
    out.by_channel = x.by_channel
    t.record(OperationKind.DROPOUT, (x,), (mask, out), saves=(mask,), gradients=(Gradient.FRESH,))
    return out


def softmax(
    t: Tape,
    x: Tensor,
    *,
    dtype: DType | None = None,
    in_own_dtype: bool = False,
    strided: bool = False,
) -> Tensor:
    """Softmax over the last dimension, in fp32 under autocast: keeps its result.

    A dtype that the call names itself, here ``x``'s own, is left alone by autocast (torch's
    aten/src/ATen/autocast_mode.h, ``fp32_set_opt_dtype``).

    fp16 is widened inside the kernel, bf16 in a copy of its own (torch's
    aten/src/ATen/native/SoftMax.cpp, ``softmax``). Its backward pass first makes the gradient times
    the result (cuda/SoftMax.cu, ``softmax_backward_cuda_out``). What is ``strided`` is copied into rows behind it
    (``host_softmax``).
    """
    target = DType.FP32 if t.autocast is not None else dtype or x.dtype
    if in_own_dtype:
        target = x.dtype
    if x.dtype is not DType.FP16:
        x = t.cast(x, target)
    out = t.tensor(x.numel, target)
    rows = allocated_bytes(x.numel, x.dtype)
    t.record(
        OperationKind.SOFTMAX, (x,), (out,), saves=(out,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=(RESULT, rows) if strided and not t.decomposed else (),
        backward_scratch_bytes=0 if t.decomposed else out.storage.num_bytes,
    )  # fmt: skip
    return out


def written(t: Tape, whole: Tensor, part: Tensor) -> Tensor:
    """``whole[...] = part``: in place; backward copies the whole gradient, and the part's."""
    after = t.view(whole, whole.numel)
    after.by_head = whole.by_head
    rows = allocated_bytes(part.numel, whole.dtype)
    # The whole gradient, the part's as rows, which are its own unless it is cast, and zeros for the part
    # where the whole has a gradient.
    cast = part.dtype is not whole.dtype
    gradient = Gradient.FRESH if whole.requires_grad else Gradient.NONE
    scratch: tuple[int, ...] = (whole.storage.num_bytes, *((rows,) * cast), RESULT)
    if whole.requires_grad:
        scratch = (RESULT, rows, rows, RESULT) if cast else (RESULT, RESULT, rows)
    t.record(
        OperationKind.COPY_SLICE, (whole, part), (after,), gradients=(gradient, Gradient.FRESH),
        backward_scratch_bytes=scratch,
    )  # fmt: skip
    return after


def add_in_place(t: Tape, x: Tensor, added: Tensor) -> Tensor:
    """``x += added``."""
    out = t.view(x, x.numel)
    gradient = Gradient.ALIAS if added.dtype is x.dtype else Gradient.FRESH
    if added.numel != x.numel:
        gradient = Gradient.SUMMED
    t.record(OperationKind.ADD_IN_PLACE, (x, added), (out,), gradients=(Gradient.ALIAS, gradient))
    return out
