"""Linear layers whose weights are packed: what their products hold, forward and backward.

Every function takes the tape first and records what the format's own layer does on CUDA
(bitsandbytes 0.50.2: nn/modules.py, autograd/_functions.py, backends/cuda/ops.py; GPTQModel 7:
nn_modules/qlinear), with blocks in the order in which it asks for them.
"""

from collections.abc import Callable, Mapping

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.overlay import BASE_LAYER
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import (
    ALLOCATION_ROUNDING,
    PackedMatrix,
    Parameter,
    Tensor,
    allocated_bytes,
)
from memplan.graph.operations.products import matmul_weight
from memplan.graph.replacing.adapters import beside_linear_dora, dropped_input
from memplan.training.adapters import Lora
from memplan.training.quantization import Quantization, QuantizedProduct
from memplan.units import ceil_div

KEPT_MODULES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), ("wo",)),
}
"""Families of which transformers 5.23 leaves some linear layers alone (``_keep_in_fp32_modules``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBase:
    """A model's linear layers, quantized (``Quantizer``)."""

    how: Quantization
    loaded: DType
    """What they were quantized from."""
    kept: tuple[str, ...]
    """Names of modules that stay."""

    @classmethod
    def of(cls, how: Quantization, loaded: DType, family: str) -> "PackedBase":
        """Those of a class, which may keep some as they are."""
        kept = (*how.skip_modules, *KEPT_MODULES.get(family, ()))
        return cls(how=how, loaded=loaded, kept=kept)

    def pack(self, t: Tape, whole: Parameter) -> Parameter:
        """Codes, and beside them what unpacking needs."""
        full_name = f"{t.segment.name}.{whole.module.removesuffix(BASE_LAYER)}"
        if any(_names(name, full_name) for name in self.kept):
            return whole
        out_features, in_features = whole.shape
        shape, dtype = self.how.format.codes(out_features, in_features, self.how)
        codes = Parameter(
            whole.name, shape, dtype, module=whole.module, trainable=False,
            packed=PackedMatrix(whole.shape, self.how, self.loaded),
        )  # fmt: skip
        t.segment.parameters[-1] = codes
        for state in self.how.format.states(out_features, in_features, self.how):
            t.hold_buffer(state.numel, state.dtype, self.how.scale_words)
        return codes

    def product(self, t: Tape, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        """What the format's layer records."""
        assert weight.packed is not None
        return _PRODUCTS[self.how.format.product](t, x, weight, weight.packed, bias)


def _names(name: str, full: str) -> bool:
    """Whether a name means a module: from its beginning to the end of a part of it, or at its end.

    (transformers 5.23, quantizers/quantizers_utils.py, ``should_convert_module``)
    """
    return full.endswith(name) or full.startswith(f"{name}.")


def check_skipped(tape: Tape, how: Quantization, model: str) -> None:
    """Refuse modules to leave alone that the model does not have, and a base of which nothing is packed.

    Those that a checkpoint's own config names are the checkpoint's business.
    """
    parameters = [each for segment in tape.segments for each in segment.parameters]
    if not any(each.packed is not None for each in parameters):
        msg = (
            f"quantize: transformers quantizes no layer of {model}: all of its matrices are of classes "
            "of its own, or named to stay"
        )
        raise SetupError(msg)
    if how.prequantized:
        return
    modules = {
        f"{segment.name}.{parameter.module.removesuffix(BASE_LAYER)}"
        for segment in tape.segments
        for parameter in segment.parameters
    }
    for name in how.skip_modules:
        if not any(_names(name, module) for module in modules):
            known = sorted({module.rpartition(".")[2] for module in modules})
            hint = did_you_mean(name, known) or f" It has {', '.join(known)}"
            msg = f"quantize: skip_modules: {model} has no module {name!r}.{hint}"
            raise SetupError(msg)


FUSED_ROWS = 64
"""Up to so many rows bitsandbytes' kernel multiplies with the codes themselves on an H100
(``_gemm_4bit_use_custom_cuda``). Other cards go further: there this is an upper bound."""
EMULATED_FUSED_ROWS = 1536
"""The same in records of fake tensors, whose product was written after the kernel's upper limit
(``_gemm_4bit_custom_max_m``)."""


def _bnb_4bit(
    t: Tape, x: Tensor, weight: Parameter, packed: PackedMatrix, bias: Parameter | None
) -> Tensor:
    """``Linear4bit``: input and output are cast, the weight unpacked for each product."""
    compute = packed.quantization.compute_dtype
    assert compute is not None
    given, (out_features, in_features) = x, packed.shape
    x = t.cast(x, compute)
    rows = x.numel // in_features
    is_fused = rows <= (EMULATED_FUSED_ROWS if t.decomposed else FUSED_ROWS)
    made = compute if is_fused else t.autocast or compute
    out = t.tensor(rows * out_features, made)
    gradient: int = Gradient.FRESH
    if made is not compute:
        gradient = allocated_bytes(x.numel, made)
    t.record(
        OperationKind.LINEAR_4BIT, (x, weight, *_given(bias)), (out,),
        pins=(x,) if packed.quantization.keeps_inputs else (),
        gradients=(gradient, Gradient.NONE, *(Gradient.SUMMED,) * (bias is not None)),
        forward_scratch_bytes=() if is_fused else _forward_4bit(packed, x, compute, made),
        backward_scratch_bytes=_backward_4bit(packed, made),
        flops=2 * rows * in_features * out_features, in_python=True,
    )  # fmt: skip
    result = t.cast(out, given.dtype)
    t.touch(x, given)
    return result


def _given(bias: Parameter | None) -> tuple[Tensor, ...]:
    return () if bias is None else (bias,)


def _scales_bytes(packed: PackedMatrix) -> int:
    """The scales of 4-bit blocks, unpacked themselves; 0 where they are not packed [bytes]."""
    how = packed.quantization
    if not how.double_quant:
        return 0
    return allocated_bytes(ceil_div(packed.numel, how.block_size), DType.FP32)


def _forward_4bit(packed: PackedMatrix, x: Tensor, compute: DType, made: DType) -> tuple[int, ...]:
    """``_dequant_linear_fallback``: scales in two steps, the weight, and what autocast copies."""
    scales = _scales_bytes(packed)
    unpacked = allocated_bytes(packed.numel, compute)
    cast: tuple[int, ...] = ()
    if made is not compute:
        cast = (allocated_bytes(packed.numel, made), allocated_bytes(x.numel, made))
    if not scales:
        return (unpacked, *cast, RESULT)
    return (scales, scales, unpacked, *cast, RESULT)


def _backward_4bit(packed: PackedMatrix, made: DType) -> tuple[int, ...]:
    """``dequantize_4bit`` to what was loaded, and a copy in the gradient's format if that differs."""
    scales = _scales_bytes(packed)
    steps: tuple[int, ...] = (scales,) if scales else ()
    steps += (allocated_bytes(packed.numel, packed.loaded),)
    if scales:
        steps += (~0,)
    if made is not packed.loaded:
        steps += (allocated_bytes(packed.numel, made), ~(1 if scales else 0))
    return (*steps, RESULT)


def _bnb_int8(
    t: Tape, x: Tensor, weight: Parameter, packed: PackedMatrix, bias: Parameter | None
) -> Tensor:
    """``Linear8bitLt``: the input in integers, the product in int32; its context holds the input.

    Which columns of the input are outliers depends on values: none are counted.
    """
    out_features, in_features = packed.shape
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, x.dtype)
    columns = () if bias is None else (Gradient.SUMMED,)
    t.record(
        OperationKind.LINEAR_8BIT, (x, weight, *_given(bias)), (out,), pins=(x,),
        gradients=(Gradient.VIEW, Gradient.NONE, *columns),
        forward_scratch_bytes=_forward_int8(x, rows, out),
        backward_scratch_bytes=(
            allocated_bytes(packed.numel, x.dtype), allocated_bytes(out_features, DType.FP32), ~1,
            RESULT,
        ),
        flops=2 * rows * in_features * out_features, in_python=True,
    )  # fmt: skip
    t.touch(x)
    return out


def _forward_int8(x: Tensor, rows: int, out: Tensor) -> tuple[int, ...]:
    """``int8_vectorwise_quant`` of an fp16 copy, with its outliers' mask; ``int8_scaled_mm``."""
    half, flags = allocated_bytes(x.numel, DType.FP16), allocated_bytes(x.numel, DType.BOOL)
    steps: tuple[int, ...] = () if x.dtype is DType.FP16 else (half,)
    first = len(steps)
    steps += (
        allocated_bytes(rows, DType.FP32), allocated_bytes(x.numel, DType.INT8), half, flags,
        ~(first + 2), ALLOCATION_ROUNDING, ~(first + 5), ~(first + 3),
    )  # fmt: skip
    if first:
        steps += (~0,)
    integers = len(steps)
    steps += (allocated_bytes(out.numel, DType.INT32),)
    if out.dtype is DType.FP16:
        return (*steps, RESULT, ~integers)
    made = allocated_bytes(out.numel, DType.FP16)
    return (*steps, made, RESULT, ~(integers + 1), ~integers)


def unpacked(t: Tape, weight: Parameter) -> Tensor:
    """A packed weight in full, as a tensor of its own: what 4-bit layers unpack to in backward."""
    packed = weight.packed
    assert packed is not None
    out = t.tensor(packed.numel, packed.loaded)
    scales = _scales_bytes(packed)
    t.record(
        OperationKind.UNPACK,
        (weight,),
        (out,),
        forward_scratch_bytes=(scales, RESULT) if scales else (),
    )
    return out


def _gptq(
    t: Tape, x: Tensor, weight: Parameter, packed: PackedMatrix, bias: Parameter | None
) -> Tensor:
    """``TorchLinear`` in training: the weight unpacked in fp16, cast, and kept by the product."""
    given, (out_features, in_features) = x, packed.shape
    whole = t.tensor(packed.numel, DType.FP16)
    t.record(OperationKind.UNPACK, (weight,), (whole,))
    factor = t.cast(whole, x.dtype)
    if t.autocast is not None:
        multiplied = t.cast(factor, t.autocast)
        x = t.cast(x, t.autocast)
    else:
        multiplied = factor
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, x.dtype)
    t.record(
        OperationKind.LINEAR, (x, multiplied), (out,), saves=(multiplied,),
        gradients=(Gradient.FRESH, Gradient.NONE), flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    if bias is not None:
        t.record(
            OperationKind.ADD_IN_PLACE, (out, bias), (t.view(out, out.numel),),
            gradients=(Gradient.ALIAS, Gradient.SUMMED),
        )  # fmt: skip
    t.touch(factor, given)
    return out


def _awq(
    t: Tape, x: Tensor, weight: Parameter, packed: PackedMatrix, bias: Parameter | None
) -> Tensor:
    """``AwqGemmFn``: 16 bits in and out; in backward a copy of the weight for each sequence."""
    given, (out_features, in_features) = x, packed.shape
    x = t.cast(x, x.dtype if x.dtype.is_half else DType.FP16)
    made = t.autocast or x.dtype
    rows = x.numel // in_features
    whole = allocated_bytes(packed.numel, DType.FP16)
    cast: tuple[int, ...] = () if x.dtype is DType.FP16 else (whole,)
    if made is not x.dtype:
        cast += (whole, allocated_bytes(x.numel, made))
    out = t.tensor(rows * out_features, made)
    copies = allocated_bytes(t.options.batch_size * packed.numel, made)
    t.record(
        OperationKind.LINEAR_AWQ, (x, weight, *_given(bias)), (out,), saves=(x,),
        gradients=(Gradient.FRESH, Gradient.NONE, *(Gradient.NONE,) * (bias is not None)),
        forward_scratch_bytes=(whole, *cast, RESULT),
        backward_scratch_bytes=(whole, *((whole,) if made is not DType.FP16 else ()), copies, RESULT),
        flops=2 * rows * in_features * out_features, in_python=True,
    )  # fmt: skip
    result = t.cast(out, given.dtype)
    t.touch(x, given)
    return result


def beside_packed(
    t: Tape,
    lora: Lora,
    x: Tensor,
    out: Tensor,
    weight: Parameter,
    bias: Parameter | None,
    weights: tuple[Parameter, tuple[Parameter, ...]],
) -> Tensor:
    """What peft's layers for packed weights add to a product (``peft/tuners/lora/bnb.py``, ``gptq.py``).

    Under autocast those of bitsandbytes and AWQ cast nothing themselves; without it the adapter's
    product is cast before it is added, where a plain layer casts the sum.
    """
    assert weight.packed is not None
    row = weight.packed.quantization.format
    down, up = weights
    result = t.contiguous(out) if row.cloned_by_adapter else out
    if lora.dora:
        return beside_linear_dora(t, lora, x, result, weight, bias, down, up, unpack=unpacked)
    casts_sum = row.product is QuantizedProduct.GPTQ_TORCH
    casts = casts_sum or t.autocast is None
    given = t.cast(x, t.options.adapter_input) if casts else x
    dropped = dropped_input(t, lora, given, down)
    added = t.scale(matmul_weight(t, matmul_weight(t, dropped, down), *up))
    if casts and not casts_sum:
        added = t.cast(added, out.dtype)
    total = t.add(result, added)
    if casts_sum:
        total = t.cast(total, out.dtype)
    else:
        t.touch(added)
    t.touch(given, x)
    return total


_Product = Callable[[Tape, Tensor, Parameter, PackedMatrix, Parameter | None], Tensor]
_PRODUCTS: Mapping[QuantizedProduct, _Product] = {
    QuantizedProduct.BNB_4BIT: _bnb_4bit,
    QuantizedProduct.BNB_INT8: _bnb_int8,
    QuantizedProduct.GPTQ_TORCH: _gptq,
    QuantizedProduct.AWQ_GEMM: _awq,
}
