"""Linear layers that multiply in fewer than 16 bits: what they make on their way, and what they keep.

The recipes and their sources: ``memplan.training.choices_of_kernels.fp8``.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.temporaries import Temporaries
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.model.parameters import ModelPart
from memplan.training.choices_of_kernels.fp8 import (
    FP8_RECIPES,
    SIZE_MULTIPLE,
    Fp8Formats,
    Fp8Package,
    Fp8Recipe,
)
from memplan.training.compilation import Compilation
from memplan.units import ceil_div, round_up

SCALE_BYTES = DType.FP32.num_bytes


def fp8_formats(t: Tape, in_features: int, out_features: int) -> Fp8Formats | None:
    """The recipe of a linear layer of the present segment; None where it multiplies as ever."""
    if t.options.fp8 is Fp8Recipe.NONE:
        return None
    formats = FP8_RECIPES[t.options.fp8]
    if in_features % SIZE_MULTIPLE or out_features % SIZE_MULTIPLE:
        return None
    if t.segment.part is ModelPart.HEAD and not formats.converts_head:
        return None
    return formats


def linear_fp8(
    t: Tape, x: Tensor, weight: Parameter, bias: Parameter | None, formats: Fp8Formats
) -> Tensor:
    """``x @ weight.T + bias`` with narrow copies of both."""
    given = x
    if t.autocast is not None:
        x = t.cast(x, t.autocast)
    if formats.package is Fp8Package.TORCHAO and is_compiled(t):
        out = _compiled_product(t, x, weight)
    elif formats.package is Fp8Package.TORCHAO:
        out = _torchao_product(t, x, weight, formats)
    else:
        out = _transformer_engine_product(t, x, weight, formats)
    if bias is not None:
        out = t.add(out, t.cast(bias, out.dtype))
    t.touch(given)
    return out


# -- torchao -------------------------------------------------------------------------------------


def _torchao_product(t: Tape, x: Tensor, weight: Parameter, formats: Fp8Formats) -> Tensor:
    """``matmul_with_hp_or_float8_args``: keeps x and the weight as they are."""
    rows = x.numel // weight.shape[-1]
    out = t.tensor(rows * weight.shape[-2], x.dtype)
    if t.options.gathers_codes:
        weight.gathered_as = DType.FP8
    forward = Temporaries()
    narrow_x = () if is_narrow(x) else _cast_to_codes(forward, x.numel, x.dtype)
    narrow_weight = _weight_to_codes(t, forward, weight)
    forward.result()
    forward.drop(*narrow_x, *narrow_weight)
    t.record(
        OperationKind.LINEAR, (x, weight), (out,), saves=(x, weight),
        gradients=(Gradient.VIEW, Gradient.VIEW), in_python=True,
        flops=2 * rows * weight.numel,
        forward_scratch_bytes=forward.blocks,
        backward_scratch_bytes=_torchao_backward(t, x, weight, out, formats),
    )  # fmt: skip
    return out


def _torchao_backward(
    t: Tape, x: Tensor, weight: Parameter, out: Tensor, formats: Fp8Formats
) -> tuple[int, ...]:
    """The formula's two products, each of operands that are cast for it alone."""
    made = Temporaries()
    scaled_after = t.options.fp8 is not Fp8Recipe.TENSORWISE
    narrow_gradient = _cast_to_codes(made, out.numel, out.dtype)
    narrow_weight = _weight_to_codes(t, made, weight)
    # ``_scaled_mm`` wants its second operand by column, and the weight lies by row.
    by_column = made.take(weight.numel)
    product = [made.take(DType.FP32.num_bytes * x.numel)] if scaled_after else []
    made.result()
    made.drop(*product, by_column)
    if formats.high_precision_weight_gradient:
        made.result()
        return made.blocks
    # Where ranks share the layer its result's gradient is cast once, behind it (``NoopFwToFloat8BwDynamic``).
    shared = t.options.tensor_parallel is not None
    gradient_again = () if shared else _cast_to_codes(made, out.numel, out.dtype)
    narrow_x = () if is_narrow(x) else _cast_to_codes(made, x.numel, x.dtype)
    gradient_by_row, x_by_column = made.take(out.numel), made.take(x.numel)
    product = [made.take(DType.FP32.num_bytes * weight.numel)] if scaled_after else []
    made.result()
    made.drop(*product, x_by_column, gradient_by_row)
    made.drop(*narrow_x, *gradient_again, *narrow_weight, *narrow_gradient)
    return made.blocks


def narrows(t: Tape) -> bool:
    """Whether ranks that share layers and sequences cast what a layer reads once, before they gather it.

    (torchao 0.18, float8/float8_tensor_parallel.py, which torchtitan takes for scales of whole tensors)
    """
    group = t.options.tensor_parallel
    return group is not None and group.sequence and t.options.fp8 is Fp8Recipe.TENSORWISE


def is_narrow(x: Tensor) -> bool:
    """Whether it is there as codes alone."""
    return x.storage.num_bytes < x.numel * x.dtype.num_bytes


def narrowed(t: Tape, x: Tensor) -> Tensor:
    """``Float8TrainingTensor``: codes that count as what they were made of, in whose format their gradient is."""
    if is_narrow(x):
        return x
    codes = t.tensor(x.numel, DType.FP8)
    codes.dtype = x.dtype
    made = Temporaries()
    _cast_to_codes(made, x.numel, x.dtype, is_result=True)
    t.record(
        OperationKind.TO, (x,), (codes,), gradients=(Gradient.ALIAS,), in_python=True,
        forward_scratch_bytes=made.blocks,
    )  # fmt: skip
    return codes


def _weight_to_codes(t: Tape, made: Temporaries, weight: Parameter) -> tuple[int, ...]:
    """A weight that was gathered as codes is used as it is (``tensor_already_casted_to_fp8``)."""
    if t.options.gathers_codes:
        return ()
    return _cast_to_codes(made, weight.numel, weight.dtype)


def _cast_to_codes(
    made: Temporaries, numel: int, dtype: DType, *, is_result: bool = False
) -> tuple[int, ...]:
    """``hp_tensor_to_float8_dynamic``: the largest magnitude, then a scaled and clamped fp32 copy.

    Returns the codes and their scale.
    """
    full = DType.FP32.num_bytes * numel
    magnitudes = made.take(dtype.num_bytes * numel)
    largest = made.take(dtype.num_bytes)
    made.drop(magnitudes)
    scale = made.take(SCALE_BYTES)
    made.drop(largest)
    widened = [made.take(full)] if dtype is not DType.FP32 else []
    scaled = made.take(full)
    made.drop(*widened)
    clamped = made.take(full)
    if is_result:
        made.result()
        made.drop(clamped, scaled, scale)
        return ()
    codes = made.take(numel)
    made.drop(clamped, scaled)
    return codes, scale


def is_compiled(t: Tape) -> bool:
    """Whether torch.compile sees the present segment."""
    scope = t.options.compile
    return scope is Compilation.MODEL or (scope is Compilation.LAYER and t.segment.is_layer)


def _compiled_product(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """The same as inductor runs it: casts are kernels of the region, and made again in backward.

    Codes lie by row where they are made and by column where backward multiplies them, and the copy
    can be fused with what makes them: nothing narrow is kept (the graphs that torch 2.13 cuts for a
    Llama layer keep neither codes nor what they are made of). Where ranks share the layer a scale is
    all ranks' together, and codes are kept with it, of weights too: they are made behind a collective.
    """
    shared = t.options.tensor_parallel is not None
    rows = x.numel // weight.shape[-1]
    narrow_x = x if is_narrow(x) else t.cast(x, DType.FP8)
    narrow_weight = t.cast(weight, DType.FP8)
    out = t.tensor(rows * weight.shape[-2], x.dtype)
    backward = Temporaries()
    gradient, by_column = backward.take(out.numel), backward.take(weight.numel)
    backward.result()
    backward.drop(by_column)
    operands = backward.take(out.numel), backward.take(x.numel)
    backward.result()
    backward.drop(*operands, gradient)
    t.record(
        OperationKind.LINEAR, (x, weight, narrow_x, narrow_weight), (out,),
        saves=(narrow_x, narrow_weight if shared else weight),
        gradients=(Gradient.FRESH, Gradient.FRESH, Gradient.NONE, Gradient.NONE), in_python=True,
        flops=2 * rows * weight.numel,
        backward_scratch_bytes=backward.blocks,
    )  # fmt: skip
    return out


# -- TransformerEngine ---------------------------------------------------------------------------


def _transformer_engine_product(
    t: Tape, x: Tensor, weight: Parameter, formats: Fp8Formats
) -> Tensor:
    """``_Linear``: keeps a narrow copy of x by column, and of the weight both by row and by column.

    FSDP2's weights are cast again in backward (``is_fsdp2``).
    """
    width, out_features = weight.shape[-1], weight.shape[-2]
    rows = x.numel // width
    dtype = t.autocast or x.dtype
    by_column = _has_two_copies(t, formats)
    kept_x = t.tensor(code_bytes(formats, rows, width, by_column=by_column), DType.FP8)
    kept_weight = t.tensor(_weight_bytes(t, formats, weight), DType.FP8)
    out = t.tensor(rows * out_features, dtype)
    forward = Temporaries()
    if by_column:
        forward.take(code_bytes(formats, rows, width))
    if t.options.casts_weights_again:
        forward.take(code_bytes(formats, out_features, width))
    forward.result()
    backward = Temporaries()
    for copied in (False, True)[: 1 + by_column]:
        backward.take(code_bytes(formats, rows, out_features, by_column=copied))
    if t.options.casts_weights_again:
        for copied in (False, True)[: 1 + by_column]:
            backward.take(code_bytes(formats, out_features, width, by_column=copied))
    saves = [kept_weight] if not t.options.casts_weights_again else []
    if weight.requires_grad:
        saves.insert(0, kept_x)
    t.record(
        OperationKind.LINEAR, (x, weight), (kept_x, kept_weight, out),
        saves=(*saves, weight), gradients=(Gradient.FRESH, Gradient.FRESH), in_python=True,
        flops=2 * rows * weight.numel,
        forward_scratch_bytes=forward.blocks,
        backward_scratch_bytes=backward.blocks,
    )  # fmt: skip
    return out


def _has_two_copies(t: Tape, formats: Fp8Formats) -> bool:
    return formats.by_direction or t.options.fp8_transposes


def _weight_bytes(t: Tape, formats: Fp8Formats, weight: Parameter) -> int:
    """A weight's narrow copies, which its backward pass reads too [bytes]."""
    rows, width = weight.shape[-2:]
    copies = (False, True) if _has_two_copies(t, formats) else (False,)
    return sum(code_bytes(formats, rows, width, by_column=each) for each in copies)


def code_bytes(
    formats: Fp8Formats, rows: int, width: int, *, by_column: bool = False, is_weight: bool = False
) -> int:
    """Codes and scales of a matrix [bytes].

    Scales of blocks in one byte are padded to 128 by 4 as cuBLAS wants them (``get_scale_shape`` of mxfp8_tensor.py); those in fp32 to 4
    along the rows, and a weight has one for a square (of float8_blockwise_tensor.py).

    >>> nvfp4, squares = FP8_RECIPES[Fp8Recipe.NVFP4], FP8_RECIPES[Fp8Recipe.BLOCKWISE]
    >>> [code_bytes(nvfp4, 320, 1040, by_column=each) - 320 * 1040 // 2 for each in (False, True)]
    [26112, 23040]
    >>> [code_bytes(squares, 320, 1042, by_column=each) - 320 * 1042 for each in (False, True)]
    [11520, 12528]
    >>> code_bytes(squares, 320, 1042, is_weight=True) - 320 * 1042
    144
    """
    codes = ceil_div(rows * width * formats.code_bits, 8)
    if formats.block is None:
        return codes
    along, across = (rows, width) if by_column else (width, rows)
    blocks = ceil_div(along, formats.block)
    if formats.scale_bytes == SCALE_BYTES:
        across = ceil_div(across, formats.block) if is_weight else across
        return codes + SCALE_BYTES * blocks * round_up(across, 4)
    return codes + round_up(across, 128) * round_up(blocks, 4)
