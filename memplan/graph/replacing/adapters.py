"""What an adapter records on the tape, beside the module that it stands on (peft 0.21.2)."""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.operations.elementwise import drop
from memplan.graph.operations.lookups import embedding_backward_scratch
from memplan.graph.operations.products import matmul_weight
from memplan.training.adapters import Lora

DICTIONARIES = ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector")
"""What holds the modules of each adapter by its name."""


def low_rank(
    t: Tape,
    lora: Lora,
    dtype: DType,
    module: str,
    weight: Parameter,
    rank: int,
    *,
    up_rank: int | None = None,
) -> tuple[Parameter, tuple[Parameter, ...]]:
    """A, and B with the bias it may have; ``up_rank`` is B's where ranks have other shares of the two."""
    out_features, in_features = weight.matrix_shape[-2:]
    down = t.parameter(
        f"{module}.lora_A.default.weight", rank, in_features, dtype=dtype, of_adapter=True
    )
    name = f"{module}.lora_B.default"
    # Dictionaries of modules are not called.
    t.segment.unmade |= {f"{module}.{each}" for each in DICTIONARIES}
    up = [
        t.parameter(f"{name}.weight", out_features, up_rank or rank, dtype=dtype, of_adapter=True)
    ]
    if lora.lora_bias:
        up.append(t.parameter(f"{name}.bias", out_features, dtype=dtype, of_adapter=True))
    return down, tuple(up)


def beside_linear(
    t: Tape,
    lora: Lora,
    x: Tensor,
    out: Tensor,
    down: Parameter,
    up: tuple[Parameter, ...],
    *,
    between: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``result + lora_B(lora_A(dropout(x))) * scaling`` (``peft.tuners.lora.layer.Linear``).

    x is cast to the adapter's format first, and the sum back to the result's. ``between`` is what
    happens to what A gave, where ranks share B.
    """
    given = t.cast(x, t.options.adapter_input)
    dropped = dropped_input(t, lora, given, down)
    narrow = matmul_weight(t, dropped, down)
    scaled = t.scale(matmul_weight(t, narrow if between is None else between(narrow), *up))
    total = t.cast(t.add(out, scaled), out.dtype)
    t.touch(given, x)
    return total


def beside_linear_dora(
    t: Tape,
    lora: Lora,
    x: Tensor,
    out: Tensor,
    weight: Parameter,
    bias: Parameter | None,
    down: Parameter,
    up: tuple[Parameter, ...],
    *,
    unpack: Callable[[Tape, Parameter], Tensor] | None = None,
) -> Tensor:
    """``result + ((m - 1) · base + m · lora_B(lora_A(x)) · scaling)``, m a trained magnitude over a norm.

    The norm is that of the weight with the adapter added to it, made anew in every pass by sending an
    identity matrix through the adapter; it hands no gradient on (``peft.tuners.lora.dora``). A weight
    that is packed is had in full from ``unpack``; its layers cast nothing under autocast.
    """
    is_bare = unpack is not None and t.autocast is not None
    magnitude = t.parameter(
        f"{down.module.removesuffix('.lora_A.default')}.lora_magnitude_vector.default.weight",
        weight.matrix_shape[-2], dtype=down.dtype, of_adapter=True,
    )  # fmt: skip
    given = x if is_bare else t.cast(x, t.options.adapter_input)
    dropped = dropped_input(t, lora, given, down)
    held = _adapter_weight(t, dropped.dtype, down, up)
    whole = _detached(weight) if unpack is None else unpack(t, weight)
    base_weight = t.cast(whole, dropped.dtype)
    norm = _norm_of_sum(t, base_weight, held[-1], magnitude.numel)
    scale = t.tensor(magnitude.numel, magnitude.dtype)
    t.record(
        OperationKind.DIV, (magnitude, norm), (scale,), saves=(norm,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    scale.by_column = True
    adapted = matmul_weight(t, matmul_weight(t, dropped, down), *up)
    if lora.dropout:
        base = _product(t, dropped, weight, base_weight)
    else:
        base = out if bias is None else t.add(out, bias)
    turned = t.mul(t.shift(scale), base)
    added = t.add(turned, t.scale(t.mul(scale, adapted)))
    t.touch(dropped, *held, base_weight, norm, scale, adapted, base)
    total = t.add(out, added)
    if not is_bare:
        total = t.cast(total, out.dtype)
    t.touch(given, x)
    return total


def dropped_input(t: Tape, lora: Lora, x: Tensor, down: Parameter) -> Tensor:
    """What A is given; without dropout a module hands it on as it is."""
    module = f"{down.module.removesuffix('.lora_A.default')}.lora_dropout.default"
    t.enter(module)
    out = drop(t, x) if lora.dropout else x
    if x.requires_grad:
        t.leave(module)
    return out


def weight_factors(
    t: Tape, dtype: DType, weight: Parameter, rank: int, module: str
) -> tuple[Parameter, Parameter]:
    """A and B of an adapter on a weight: of all experts', one below the other, and side by side."""
    *stacked, out_features, in_features = weight.shape
    width = rank * (stacked[0] if stacked else 1)
    down = t.parameter(
        f"{module}.lora_A.default.weight", width, in_features, dtype=dtype, of_adapter=True
    )
    # Nobody calls them: their weights are read where they are.
    t.segment.unmade |= {f"{module}.{each}" for each in DICTIONARIES}
    up = t.parameter(
        f"{module}.lora_B.default.weight", out_features, width, dtype=dtype, of_adapter=True
    )
    return down, up


def summed_experts(t: Tape, weight: Parameter, down: Parameter, up: Parameter) -> Tensor:
    """``torch.baddbmm(W, B, A, alpha=scaling)`` in the weight's format (``peft``, ``_LoraFactorsProxy``).

    It is made once for nothing when the parametrization is registered. B's matrices do not lie as
    cuBLAS wants them, so it copies them; the scale makes a copy of each factor's gradient.
    """
    left, right = t.cast(up, weight.dtype), t.cast(down, weight.dtype)
    copied = allocated_bytes(up.numel, weight.dtype)
    t.record(
        OperationKind.BADDBMM, (left, right, weight), (),
        forward_scratch_bytes=(weight.storage.num_bytes, copied),
    )  # fmt: skip
    total = t.tensor(weight.numel, weight.dtype)
    total.by_column = True
    t.record(
        OperationKind.BADDBMM, (left, right, weight), (total,), saves=(left, right),
        gradients=(Gradient.FRESH, Gradient.FRESH, Gradient.NONE), forward_scratch_bytes=copied,
        backward_scratch_bytes=copied, flops=2 * weight.numel * down.shape[0] // weight.shape[0],
    )  # fmt: skip
    return total


def summed_matrix(t: Tape, weight: Parameter, down: Parameter, up: Parameter) -> Tensor:
    """``W + B @ A * scaling`` (``peft``, ``_LoraParameterProxy``)."""
    low, high = t.cast_weight(down), t.cast_weight(up)
    product = t.tensor(weight.numel, high.dtype)
    t.record(
        OperationKind.LINEAR, (high, low), (product,), saves=(high, low),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * weight.numel * down.shape[0],
    )  # fmt: skip
    total = t.add(weight, t.cast(t.scale(product), weight.dtype))
    total.by_column = True
    return total


def _detached(tensor: Tensor) -> Tensor:
    """The same storage, through which no gradient goes."""
    return Tensor(tensor.numel, tensor.dtype, tensor.storage)


def _adapter_weight(
    t: Tape, dtype: DType, down: Parameter, up: tuple[Parameter, ...]
) -> tuple[Tensor, ...]:
    """``B @ A`` in a format, behind what its graph keeps for a gradient that nobody asks for."""
    rank, in_features = down.shape
    eye = t.tensor(in_features * in_features, down.dtype)
    t.record(OperationKind.EYE, (), (eye,))
    factors = [_detached(t.cast_weight(each)) for each in (down, up[0])]
    kept = t.cast(eye, t.autocast) if t.autocast is not None else eye
    low = t.tensor(in_features * rank, kept.dtype)
    flops = 2 * in_features * in_features * rank
    t.record(OperationKind.LINEAR, (kept, factors[0]), (low,), flops=flops)
    high = t.tensor(in_features * up[0].shape[0], kept.dtype)
    t.record(OperationKind.LINEAR, (low, factors[1]), (high,), flops=2 * rank * high.numel)
    t.touch(eye)
    return kept, low, t.cast(high, dtype)


def _norm_of_sum(t: Tape, weight: Tensor, added: Tensor, num_outputs: int) -> Tensor:
    """The norm of each output's weights with the adapter's added to them.

    Autocast has a rule for ``torch.norm``, and none for ``torch.linalg.norm``, which peft calls.
    """
    total = t.add(weight, t.scale(added))
    norm = t.tensor(num_outputs, total.dtype)
    t.record(OperationKind.VECTOR_NORM, (total,), (norm,))
    t.touch(total)
    return norm


def _product(t: Tape, x: Tensor, weight: Parameter, factor: Tensor) -> Tensor:
    """``x @ weight.T`` with a copy of a frozen weight, which it keeps for the gradient of x."""
    out_features, in_features = weight.matrix_shape[-2:]
    if t.autocast is not None:
        x, factor = t.cast(x, t.autocast), t.cast(factor, t.autocast)
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, x.dtype)
    t.record(
        OperationKind.LINEAR, (x, factor), (out,), saves=(factor,),
        gradients=(Gradient.VIEW, Gradient.VIEW), flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    return out


def beside_embedding(
    t: Tape,
    dtype: DType,
    out: Tensor,
    weight: Parameter,
    ids: Tensor | None,
    *,
    module: str,
    rank: int,
) -> Tensor:
    """``result + embedding(x, A.T) @ B.T * scaling`` (``peft.tuners.lora.layer.Embedding``)."""
    rows, width = weight.shape[-2:]
    table = t.parameter(
        f"{module}.lora_embedding_A.default", rank, rows, dtype=dtype, of_adapter=True
    )
    up = t.parameter(
        f"{module}.lora_embedding_B.default", width, rank, dtype=dtype, of_adapter=True
    )
    num_ids = out.numel // width
    low = t.tensor(num_ids * rank, dtype)
    inputs: tuple[Tensor, ...] = (table,) if ids is None else (table, ids)
    gradients: tuple[int, ...] = (Gradient.FRESH, Gradient.NONE)[: len(inputs)]
    t.record(
        OperationKind.EMBEDDING, inputs, (low,), saves=inputs[1:], gradients=gradients,
        backward_scratch_bytes=embedding_backward_scratch(t, num_ids, rows * rank, rank, dtype),
    )  # fmt: skip
    scaled = t.scale(matmul_weight(t, low, up))
    return t.cast(t.add(out, scaled), out.dtype)


def scaled_by(t: Tape, x: Tensor, dtype: DType, module: str, width: int) -> Tensor:
    """A trained factor for each feature, in its own format and cast back (``peft.tuners.ia3.layer``)."""
    factor = t.parameter(
        f"{module}.ia3_l.default", width, dtype=dtype, module=module, of_adapter=True
    )
    given = t.cast(x, dtype)
    return t.cast(t.mul(given, factor), x.dtype)


def multiplied_by(t: Tape, out: Tensor, dtype: DType, module: str, width: int) -> Tensor:
    """The same of a result, which is promoted and cast back."""
    factor = t.parameter(
        f"{module}.ia3_l.default", width, dtype=dtype, module=module, of_adapter=True
    )
    return t.cast(t.mul(out, factor), out.dtype)
