"""Operations made of several steps: what each code base's implementation really runs.

Every function takes the tape first and records what transformers 5.23 (or the kernel named by
``Kernels``) does on CUDA, with what torch 2.13's derivatives.yaml keeps for backward. What is kept
was compared with real runs; see ``tests/graph``.
"""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.overlay import BASE_LAYER
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.sorting import sort_scratch_bytes
from memplan.graph.splits import Split
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Parameter, Storage, Tensor, allocated_bytes
from memplan.model.networks import Activation
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import WeightRole
from memplan.training.fp8 import Fp8Recipe
from memplan.training.kernels import FeedForwardKernel, LossKernel, NormKernel
from memplan.training.parallelism import TensorParallelKind


def linear(
    t: Tape,
    x: Tensor,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    split: Split = Split.WHOLE,
    role: WeightRole = WeightRole.MATRIX,
) -> Tensor:
    """``torch.nn.Linear``: keeps its input and its weight as the product used them.

    ``split`` is what a rank has of it where the model is split over several.
    """
    group = t.options.tensor_parallel
    if group is not None and split is not Split.WHOLE:
        own = in_features // group.degree if split is Split.ROW_CUT else in_features

        def product(given: Tensor, width: int) -> Tensor:
            return linear(t, given, name, own, width, bias=bias and not adds_apart, role=role)

        adds_apart = group.kind is TensorParallelKind.AUTOTP
        if adds_apart:
            from memplan.graph.autotp import autotp_product  # only then

            def add_bias(made: Tensor, width: int) -> Tensor:
                if not bias:
                    return made
                addend = t.parameter(f"{name}.bias", width, role=WeightRole.OTHER)
                return t.add(made, t.cast_weight(addend))

            return autotp_product(t, group, x, split, out_features, product, add_bias)
        if t.adaptation is not None and name in t.adapted:
            return _adapted_columns(t, x, name, in_features, out_features, bias, split, role)
        from memplan.graph.tensor_parallel import split_product  # only then

        return split_product(t, group, x, split, out_features, product)
    weight = t.matrix(f"{name}.weight", out_features, in_features, role=role)
    bias_parameter = t.bias(f"{name}.bias", weight) if bias else None
    if t.options.fp8 is not Fp8Recipe.NONE and weight.packed is None:
        from memplan.graph.fp8 import fp8_formats, linear_fp8

        formats = fp8_formats(t, in_features, out_features)
        if formats is not None:
            return linear_fp8(t, x, weight, bias_parameter, formats)
    return matmul_weight(t, x, weight, bias_parameter)


def _adapted_columns(
    t: Tape,
    x: Tensor,
    name: str,
    in_features: int,
    out_features: int,
    bias: bool,
    split: Split,
    role: WeightRole,
) -> Tensor:
    """A layer whose columns ranks share, and the adapter beside what each rank has of its result."""
    group, adaptation = t.options.tensor_parallel, t.adaptation
    assert group is not None
    assert adaptation is not None
    if split is not Split.COLUMN:
        msg = (
            f"adapter: peft 0.21.2 does not run on {name} beside transformers' tp_plan, only on layers "
            "whose columns are split; leave it out of the targets, or tensor_parallel"
        )
        raise SetupError(msg)
    from memplan.graph.tensor_parallel import split_product  # only then

    weights: list[Parameter] = []

    def product(given: Tensor, width: int) -> Tensor:
        weight = t.matrix(f"{name}.weight", width, in_features, role=role)
        weights.append(weight)
        return base_product(t, given, weight, t.bias(f"{name}.bias", weight) if bias else None)

    out = split_product(t, group, x, split, out_features, product)
    return adaptation.beside_columns(t, group, x, out, weights[0], name)


def matmul_weight(
    t: Tape, x: Tensor, weight: Parameter, bias: Parameter | None = None, *, module: str = ""
) -> Tensor:
    """``x @ weight.T + bias`` for a weight of ``(out_features, in_features)``.

    ``module`` is called so where it is not the weight's own: a tied output matrix.
    """
    if t.adaptation is None:
        return base_product(t, x, weight, bias)
    adapted = module or weight.module.removesuffix(BASE_LAYER)
    if adapted not in t.adapted:
        factor = trained_weight(t, weight)
        if factor is weight:
            return base_product(t, x, weight, bias)
        out = matmul_tensor(t, x, factor, weight.shape[-1], bias)
        t.touch(factor)
        return out
    x = t.adaptation.before_linear(t, x, weight.matrix_shape[-1], adapted)
    out = base_product(t, x, weight, bias)
    return t.adaptation.beside_linear(t, x, out, weight, bias, adapted)


def trained_weight(t: Tape, weight: Parameter) -> Tensor:
    """What is multiplied by in a weight's place: its sum with an adapter that stands on it alone."""
    return weight if t.adaptation is None else t.adaptation.in_place_of(t, weight)


def base_product(t: Tape, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """The same without what an adapter adds; a packed weight is multiplied as its format is."""
    if t.options.quantizer is not None and weight.packed is not None:
        return t.options.quantizer.product(t, x, weight, bias)
    out_features, in_features = weight.shape[-2:]
    # C++ evaluates the arguments of autocast's wrapper from the last to the first.
    addend = t.cast_weight(bias) if bias is not None else None
    factor = t.cast_weight(weight)
    given = x
    if t.autocast is not None:
        x = t.cast(x, t.autocast)
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, x.dtype)
    saves = []
    if weight.requires_grad:
        saves.append(x)
    if x.requires_grad:
        # Kept tensors go by their arguments' names: mat2 before self, but mat1 before mat2.
        saves.insert(len(saves) if bias is not None else 0, factor)
    inputs: tuple[Tensor, ...] = (x, factor)
    gradients: tuple[int, ...] = (Gradient.VIEW, Gradient.VIEW)
    if t.options.python_linear:
        gradients = (Gradient.FRESH, Gradient.FRESH)
    elif x.is_flat:
        gradients = (Gradient.FRESH, Gradient.VIEW)
    if addend is not None:
        inputs += (addend,)
        gradients += (Gradient.SUMMED,)
    t.record(
        OperationKind.LINEAR, inputs, (out,), saves=saves, gradients=gradients,
        flops=2 * rows * in_features * out_features, in_python=t.options.python_linear,
    )  # fmt: skip
    t.touch(given)
    return out


def matmul_tensor(
    t: Tape, x: Tensor, factor: Tensor, in_features: int, bias: Parameter | None = None
) -> Tensor:
    """``x @ factor.T + bias`` for a factor that was computed."""
    addend = t.cast_weight(bias) if bias is not None else None
    if t.autocast is not None:
        factor, x = t.cast(factor, t.autocast), t.cast(x, t.autocast)
    rows = x.numel // in_features
    out_features = factor.numel // in_features
    out = t.tensor(rows * out_features, x.dtype)
    saves = [x] if factor.requires_grad else []
    if x.requires_grad:
        saves.insert(len(saves) if bias is not None else 0, factor)
    inputs: tuple[Tensor, ...] = (x, factor)
    gradients: tuple[int, ...] = (Gradient.VIEW, Gradient.VIEW)
    if addend is not None:
        inputs += (addend,)
        gradients += (Gradient.SUMMED,)
    t.record(
        OperationKind.LINEAR, inputs, (out,), saves=saves, gradients=gradients,
        flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    return out


def norm(t: Tape, x: Tensor, spec: NormSpec, name: str, width: int, *, groups: int = 1) -> Tensor:
    """Normalize the last ``width`` elements as ``spec`` and the chosen kernel do.

    ``groups`` is how many different weights stand side by side in a row. The caller's variable holds
    ``x`` until the norm returns. A rank that has a share of the sequences has one of the weight's
    gradient too.
    """
    declared = len(t.segment.parameters)
    out = _norm(t, x, spec, name, width, groups)
    group = t.options.tensor_parallel
    if group is not None and group.sequence:
        for weight in t.segment.parameters[declared:]:
            weight.added_up = weight.is_distributed = True
    t.touch(x)
    return out


def _norm(t: Tape, x: Tensor, spec: NormSpec, name: str, width: int, groups: int) -> Tensor:
    kind = spec.kind
    if kind is NormKind.LAYER and not spec.weight:
        return native_layer_norm(t, x, width, ())
    if kind is NormKind.LAYER and groups > 1:
        return layer_norm_per_head(t, x, name, width, groups)
    if kind is NormKind.LAYER:
        return layer_norm(t, x, name, width, bias=spec.bias)
    if kind is NormKind.LAYER_ONE_PLUS:
        return layer_norm_one_plus(t, x, name, width)
    if kind is NormKind.LAYER_PLAIN:
        return layer_norm_plain(t, x, width)
    if kind is NormKind.LAYER_UPCAST:
        return layer_norm_upcast(t, x, name, width, groups)
    if kind is NormKind.LAYER_DIVIDED:
        return layer_norm_divided(t, x, name, width)
    if not spec.weight:
        return t.cast(_normalized(t, x, width, kind)[0], x.dtype)
    weight = t.parameter(f"{name}.weight", width, role=WeightRole.NORM)
    if t.kernels.norm is not NormKernel.EAGER:
        return rms_norm_fused(t, x, weight)
    if kind is NormKind.RMS:
        return rms_norm(t, x, weight)
    if kind is NormKind.RMS_T5:
        return rms_norm_t5(t, x, weight)
    if kind is NormKind.RMS_GEMMA:
        return rms_norm_gemma(t, x, weight)
    if kind is NormKind.RMS_POWER:
        return rms_norm_power(t, x, weight)
    return rms_norm_upcast(t, x, weight)


def norm_weightless(t: Tape, x: Tensor, width: int) -> Tensor:
    """``torch.nn.RMSNorm`` without a weight: one kernel on CUDA, which keeps x and a number per row."""
    if t.decomposed:
        return t.cast(_normalized(t, x, width)[0], x.dtype)
    out, statistic = t.tensor(x.numel, x.dtype), t.tensor(x.numel // width, DType.FP32)
    t.record(
        OperationKind.RMS_NORM, (x,), (out, statistic), saves=(x, statistic),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return out


def norm_unweighted(t: Tape, x: Tensor, width: int) -> Tensor:
    """DeepSeek-V4's without a weight: x times the root, which is cast to x's dtype."""
    variance = t.mean(t.square(t.cast(x, DType.FP32)), width)
    out = t.mul(x, t.cast(_reciprocal_root(t, variance), x.dtype))
    t.touch(x)
    return out


def layer_norm(t: Tape, x: Tensor, name: str, width: int, *, bias: bool = True) -> Tensor:
    """``torch.nn.LayerNorm``: keeps its input and two fp32 statistics per row."""
    weight = t.parameter(f"{name}.weight", width, role=WeightRole.NORM)
    inputs: tuple[Tensor, ...] = (weight,)
    if bias:
        inputs += (t.parameter(f"{name}.bias", width, role=WeightRole.NORM),)
    return native_layer_norm(t, x, width, inputs)


def native_layer_norm(t: Tape, x: Tensor, width: int, weights: tuple[Tensor, ...]) -> Tensor:
    """``torch.nn.functional.layer_norm``: in fp32 under autocast."""
    full = t.cast(x, DType.FP32) if t.autocast is not None else x
    out = _layer_norm_kernel(t, full, width, weights)
    t.touch(x)
    return out


def _layer_norm_kernel(t: Tape, x: Tensor, width: int, weights: tuple[Tensor, ...]) -> Tensor:
    rows = x.numel // width
    out = t.tensor(x.numel, x.dtype)
    mean, deviation = t.tensor(rows, DType.FP32), t.tensor(rows, DType.FP32)
    t.record(
        OperationKind.LAYER_NORM, (x, *weights), (out, mean, deviation), saves=(x, mean, deviation, *weights),
        gradients=(Gradient.FRESH,) * (1 + len(weights)),
    )  # fmt: skip
    return out


def layer_norm_per_head(t: Tape, x: Tensor, name: str, width: int, heads: int) -> Tensor:
    """StableLM's: heads are split, normalized one by one without a bias, and joined again."""
    size = x.numel // heads
    parts = [
        layer_norm(t, part, f"{name}.norms.{index}", width, bias=False)
        for index, part in enumerate(t.split(x, *(size,) * heads))
    ]
    out = t.concatenate(*parts)
    out.by_head = True
    t.touch(*parts)
    return out


def layer_norm_one_plus(t: Tape, x: Tensor, name: str, width: int) -> Tensor:
    """Nemotron's: one is added to the weight; input, sum and bias are cast to autocast's dtype."""
    weight = t.shift(t.parameter(f"{name}.weight", width, role=WeightRole.NORM))
    bias: Tensor = t.parameter(f"{name}.bias", width, role=WeightRole.NORM)
    if t.autocast is None:
        return _layer_norm_kernel(t, x, width, (weight, bias))
    x, weight, bias = (t.cast(each, t.autocast) for each in (x, weight, bias))
    return _layer_norm_kernel(t, x, width, (weight, bias))


def layer_norm_plain(t: Tape, x: Tensor, width: int) -> Tensor:
    """OLMo's: an fp32 layer norm without parameters, cast back."""
    dtype = x.dtype
    return t.cast(native_layer_norm(t, t.cast(x, DType.FP32), width, ()), dtype)


def layer_norm_upcast(t: Tape, x: Tensor, name: str, width: int, groups: int = 1) -> Tensor:
    """Cohere's: mean and variance written out in fp32, times an fp32 weight, cast back."""
    shape = (width,) if groups == 1 else (groups, width)
    weight = t.parameter(f"{name}.weight", *shape, role=WeightRole.NORM)
    full = t.cast(x, DType.FP32)
    mean = t.mean(full, width)
    variance = t.mean(t.square(t.add(full, mean)), width)
    scaled = t.mul(t.add(full, mean), _reciprocal_root(t, variance))
    t.touch(full)
    product = t.mul(t.cast(weight, DType.FP32), scaled)
    out = t.cast(product, x.dtype)
    t.touch(mean, variance, product)
    return out


def layer_norm_divided(t: Tape, x: Tensor, name: str, width: int) -> Tensor:
    """DeBERTa's: centred twice in fp32, divided by the root of the variance, cast back."""
    full = t.cast(x, DType.FP32)
    mean = t.mean(full, width)
    variance = t.mean(t.square(t.add(full, mean)), width)
    centred = t.add(full, mean)
    root = t.elementwise(OperationKind.SQRT, t.shift(variance), saves_output=True)
    quotient = t.tensor(centred.numel, DType.FP32)
    t.record(
        OperationKind.DIV, (centred, root), (quotient,), saves=(centred, root),
        gradients=(Gradient.FRESH, 3 * quotient.storage.num_bytes),
    )  # fmt: skip
    t.touch(full)
    normalized = t.cast(quotient, x.dtype)
    weighted = t.mul(t.parameter(f"{name}.weight", width, role=WeightRole.NORM), normalized)
    out = t.add(weighted, t.parameter(f"{name}.bias", width, role=WeightRole.NORM))
    t.touch(normalized, mean, variance)
    return out


def _reciprocal_root(t: Tape, variance: Tensor) -> Tensor:
    shifted = t.shift(variance)
    return t.elementwise(OperationKind.RSQRT, shifted, saves_output=True)


def rms_norm(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Llama's RMSNorm: an fp32 copy, normalized, cast back, times the weight."""
    normalized, variance = _normalized(t, x, weight.numel)
    out = t.mul(weight, t.cast(normalized, x.dtype))
    t.touch(normalized, variance)
    return out


def _normalized(
    t: Tape, x: Tensor, width: int, kind: NormKind = NormKind.RMS
) -> tuple[Tensor, Tensor]:
    """An fp32 copy over the root of its mean square, and that mean."""
    full = t.cast(x, DType.FP32)
    variance = t.mean(t.square(full), width)
    if kind is NormKind.RMS_POWER:
        return t.mul(full, t.square(t.shift(variance))), variance
    return t.mul(full, _reciprocal_root(t, variance)), variance


def rms_norm_power(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Gemma 4's: all of it in fp32, the root as a power, times the weight's copy, then cast back."""
    normalized, _ = _normalized(t, x, weight.numel, NormKind.RMS_POWER)
    return t.cast(t.mul(normalized, t.cast(weight, DType.FP32)), x.dtype)


def rms_norm_t5(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """T5's: the variance of an fp32 copy; x itself is scaled, then cast to a 16-bit weight's dtype."""
    variance = t.mean(t.square(t.cast(x, DType.FP32)), weight.numel)
    normalized = t.mul(x, _reciprocal_root(t, variance))
    if weight.dtype.is_half:
        normalized = t.cast(normalized, weight.dtype)
    return t.mul(weight, normalized)


def rms_norm_gemma(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Gemma's: all of it in fp32, times one plus the weight, then cast back."""
    normalized, _ = _normalized(t, x, weight.numel)
    product = t.mul(normalized, t.shift(t.cast(weight, DType.FP32)))
    return t.cast(product, x.dtype)


def rms_norm_upcast(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """OLMo 2's: the weight's product is in fp32 too; cast back last."""
    normalized, variance = _normalized(t, x, weight.numel)
    out = t.cast(t.mul(weight, normalized), x.dtype)
    t.touch(normalized, variance)
    return out


def rms_norm_fused(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """One kernel: keeps its input and an fp32 statistic per row.

    Liger's copies into rows what does not lie so, and in backward has a row of fp32 sums for each
    multiprocessor; it makes the gradient over the one it is given, unless it was told not to
    (liger_kernel 0.8.5, ops/rms_norm.py, ``rms_norm_backward``).
    """
    kernel = t.kernels.norm
    liger = kernel is not NormKernel.FUSED
    given = x
    if liger and x.by_head:
        given = t.tensor(x.numel, x.dtype)
        t.record(OperationKind.CONTIGUOUS, (x,), (given,), gradients=(Gradient.ALIAS,))
    out = t.tensor(x.numel, x.dtype)
    statistic = t.tensor(x.numel // weight.numel, DType.FP32)
    sums: tuple[int, ...] = ()
    if liger and not t.decomposed and weight.requires_grad:
        size = allocated_bytes(t.options.multiprocessors * weight.numel, DType.FP32)
        sums = (size, RESULT)
    overwritten = kernel is NormKernel.LIGER and not given.by_head
    t.record(
        OperationKind.RMS_NORM, (given, weight), (out, statistic), saves=(given, statistic),
        gradients=(Gradient.ALIAS if overwritten else Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=sums, in_python=liger,
    )  # fmt: skip
    return out


def embedding(
    t: Tape, name: str, num_rows: int, width: int, num_ids: int, ids: Tensor | None = None
) -> Tensor:
    """Look ids up in a table: keeps the ids; the table's gradient is dense."""
    weight = t.parameter(f"{name}.weight", num_rows, width, role=WeightRole.TABLE)
    return embedding_lookup(t, weight, num_ids, ids)


def embedding_lookup(t: Tape, weight: Parameter, num_ids: int, ids: Tensor | None = None) -> Tensor:
    """Look ids up in a table that is already declared."""
    out = t.tensor(num_ids * weight.shape[-1], weight.dtype)
    inputs: tuple[Tensor, ...] = (weight,) if ids is None else (weight, ids)
    own = Gradient.FRESH if weight.ranks == 1 else Gradient.WHOLE
    gradients: tuple[int, ...] = (own, Gradient.NONE)[: len(inputs)]
    width = weight.shape[-1]
    rows = weight.num_weights // width
    scratch = () if t.decomposed else embedding_backward_scratch(num_ids, rows, width)
    t.record(
        OperationKind.EMBEDDING, inputs, (out,), saves=inputs[1:], gradients=gradients,
        backward_scratch_bytes=scratch,
    )  # fmt: skip
    if t.adaptation is not None:
        adapted = weight.module.removesuffix(BASE_LAYER)
        if adapted in t.adapted:
            return t.adaptation.beside_embedding(t, out, weight, ids, adapted)
    return out


UNSORTED_IDS = 3072
"""Up to so many ids the kernel adds rows where they belong, one by one."""
ROWS_PER_THREAD = 10


def embedding_backward_scratch(num_ids: int, num_rows: int, width: int) -> tuple[int, ...]:
    """What the gradient of a table takes on its way.

    Ids are sorted, and rows of equal ids summed in pieces in fp32, of which there are at most
    ``n / 10 + min(n, V)`` (aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu).

    >>> max(embedding_backward_scratch(4096, 152064, 3584))
    64583680
    """
    if num_ids <= UNSORTED_IDS:
        return ()
    pieces = num_ids // ROWS_PER_THREAD + min(num_ids, num_rows)
    ids = allocated_bytes(num_ids, DType.INT64)
    sorting = sort_scratch_bytes(num_ids, largest_key=num_rows)
    small = ALLOCATION_ROUNDING
    return (
        ids, ids, ids, sorting, ~3, ~2, RESULT, ids, small, ids, 3 * small, ~10, ~9,
        ids, ids, 3 * small, ~15, small, allocated_bytes(pieces, DType.INT64),
        allocated_bytes(pieces * width, DType.FP32),
    )  # fmt: skip


def clamp(t: Tape, x: Tensor) -> Tensor:
    """``x.clamp_()``: in place, so that backward needs a copy of what was there before."""
    before = t.tensor(x.numel, x.dtype)
    after = t.view(x, x.numel)
    t.record(
        OperationKind.CLAMP_IN_PLACE, (x,), (after, before), saves=(before,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(*(allocated_bytes(x.numel, DType.BOOL),) * 2, RESULT),
    )  # fmt: skip
    return after


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
    t.record(OperationKind.DROPOUT, (x,), (mask, out), saves=(mask,), gradients=(Gradient.FRESH,))
    return out


def softmax(t: Tape, x: Tensor, *, dtype: DType | None = None) -> Tensor:
    """Softmax over the last dimension, in fp32 under autocast: keeps its result.

    fp16 is widened inside the kernel, bf16 in a copy of its own (torch's
    aten/src/ATen/native/SoftMax.cpp, ``softmax``). Its backward pass first makes the gradient times
    the result (cuda/SoftMax.cu, ``softmax_backward_cuda_out``).
    """
    target = DType.FP32 if t.autocast is not None else dtype or x.dtype
    if x.dtype is not DType.FP16:
        x = t.cast(x, target)
    out = t.tensor(x.numel, target)
    t.record(
        OperationKind.SOFTMAX, (x,), (out,), saves=(out,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=0 if t.decomposed else out.storage.num_bytes,
    )  # fmt: skip
    return out


def activation_module(t: Tape, x: Tensor, kind: Activation, name: str) -> Tensor:
    """A nonlinearity that is a module of its own, as transformers' ``ACT2FN`` makes them."""
    t.enter(name)
    out = activation(t, x, kind)
    t.leave(name)
    return out


def activation(t: Tape, x: Tensor, kind: Activation) -> Tensor:
    """A nonlinearity, in the steps its implementation takes."""
    if t.kernels.fused_elementwise:
        return t.elementwise(OperationKind(kind.value), x, saves_input=True)
    if kind is Activation.SILU:
        return t.elementwise(OperationKind.SILU, x, saves_input=True, decomposed_copies=5)
    if kind is Activation.RELU:
        return t.elementwise(OperationKind.RELU, x, saves_output=True)
    if kind in {Activation.GELU, Activation.GELU_TANH}:
        return t.elementwise(OperationKind.GELU, x, saves_input=True)
    if kind is Activation.TANH:
        return t.elementwise(OperationKind.TANH, x, saves_output=True)
    if kind is Activation.GELU_PYTHON:
        return gelu_python(t, x)
    if kind is Activation.GELU_NEW:
        return gelu_new(t, x)
    if kind is Activation.GELU_FAST:
        return gelu_fast(t, x)
    if kind is Activation.QUICK_GELU:
        return t.mul(x, t.elementwise(OperationKind.SIGMOID, t.scale(x), saves_output=True))
    if kind is Activation.RELU_SQUARED and t.kernels.feed_forward is FeedForwardKernel.FUSED:
        # liger_kernel 0.8.5, ops/relu_squared.py
        return t.elementwise(OperationKind.RELU2, x, saves_input=True)
    if kind is Activation.RELU_SQUARED:
        rectified = t.elementwise(OperationKind.RELU, x, saves_output=True)
        out = t.square(rectified if t.autocast is None else t.cast(rectified, DType.FP32))
        t.touch(rectified)
        return out
    return bloom_gelu(t, x)


def gelu_python(t: Tape, x: Tensor) -> Tensor:
    """The exact GELU written out: a half of x, times one plus an error function.

    The error function's derivative is an expression of four intermediate tensors
    (tools/autograd/derivatives.yaml, ``erf``).
    """
    half, inner = t.scale(x), t.scale(x)
    curve = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.ERF, (inner,), (curve,), saves=(inner,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=4 * curve.storage.num_bytes,
    )  # fmt: skip
    return t.mul(half, t.shift(curve))


def gelu_new(t: Tape, x: Tensor) -> Tensor:
    """GPT-2's tanh GELU: eight elementwise operations, of which four keep something."""
    half = t.scale(x)
    cube = t.square(x if t.autocast is None else t.cast(x, DType.FP32))
    inner = t.scale(t.add(x, t.scale(cube)))
    curve = t.shift(t.elementwise(OperationKind.TANH, inner, saves_output=True))
    return t.mul(half, curve)


def gelu_fast(t: Tape, x: Tensor) -> Tensor:
    """The tanh GELU written with products only."""
    half = t.scale(x)
    inner = t.mul(t.scale(x), t.shift(t.mul(t.scale(x), x)))
    curve = t.shift(t.elementwise(OperationKind.TANH, inner, saves_output=True))
    return t.mul(half, curve)


def bloom_gelu(t: Tape, x: Tensor) -> Tensor:
    """BLOOM's autograd function: keeps its input only.

    Its formulas are written out in Python: each product and sum is a tensor that goes when the next
    one has read it (``bloom_gelu_forward``, ``bloom_gelu_back``).
    """
    out = t.tensor(x.numel, x.dtype)
    size = out.storage.num_bytes
    # 0.5 x · (1 + tanh(0.797 x · (1 + 0.0447 x x))): half, scaled, a cube in three steps, the tanh.
    curve = (size, size, size, ~1, size, ~2, size, ~0, ~4, size, ~6)
    forward = (size, *_later(curve, 1), size, ~10, RESULT, ~0)
    # The derivative: half of x · ((1 - tanh²)(0.797 + 0.107 x x)) + half of (1 + tanh).
    backward = (
        *curve, size, size, size, ~12, size, size, ~15, size, ~16, size, ~13, ~18, size, ~11, ~20,
        size, size, ~26, size, ~23, ~27, RESULT, ~9,
    )  # fmt: skip
    t.record(
        OperationKind.BLOOM_GELU, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=forward, backward_scratch_bytes=backward,
    )  # fmt: skip
    return out


def _later(scratch: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The same temporaries behind others."""
    return tuple(step if step >= 0 else step - steps for step in scratch)


def causal_lm_loss(t: Tape, logits: Tensor, vocab_size: int) -> Tensor:
    """``ForCausalLMLoss``: fp32 logits, log-softmax, negative log-likelihood."""
    tokens = logits.numel // vocab_size
    if t.kernels.loss is LossKernel.SHIFTED_UNCAST:
        return shifted_loss(t, logits, vocab_size)
    full = t.cast(logits, DType.FP32)
    if t.kernels.loss in (LossKernel.SHIFTED, LossKernel.SHIFTED_APART):
        return shifted_loss(t, full, vocab_size)
    labels, padded = next_token_labels(t, tokens, padded=True)
    loss = cross_entropy(t, full, labels)
    t.touch(padded)
    return loss


def next_token_labels(t: Tape, tokens: int, *, padded: bool) -> tuple[Tensor, Tensor]:
    """Labels moved by one token, and what they were copied from: themselves, or padded by one.

    Where ranks share sequences they are moved before, and come with the batch.
    """
    if t.options.context_parallel is not None:
        given = Tensor(tokens, DType.INT64, Storage(allocated_bytes(tokens, DType.INT64), -1, 0))
        return given, given
    labels = t.tensor(tokens, DType.INT64)
    if not padded:
        t.record(OperationKind.SHIFT_LABELS, (), (labels,))
        return labels, labels
    longer = t.tensor(tokens + t.options.batch_size, DType.INT64)
    t.record(OperationKind.PAD, (), (longer,))
    labels = t.tensor(tokens, DType.INT64)
    t.record(OperationKind.CONTIGUOUS, (longer,), (labels,))
    return labels, longer


def shifted_loss(t: Tape, full: Tensor, vocab_size: int) -> Tensor:
    """transformers before 4.49: all logits but the last of each sequence, copied.

    The class held on to the uncut logits meanwhile, in fp32 where it had cast them; in backward
    the cut's gradient is a zero-filled tensor of the whole.
    """
    rows = full.numel // vocab_size - t.options.batch_size
    cut = t.contiguous(t.slice(full, max(rows, 1) * vocab_size))
    labels, _ = next_token_labels(t, max(rows, 1), padded=False)
    loss = cross_entropy(t, cut, labels)
    t.touch(full, cut)
    return loss


def cross_entropy(t: Tape, logits: Tensor, labels: Tensor | None = None) -> Tensor:
    """Log-softmax and its mean over the labels.

    ``cross_entropy_loss`` asks for the log-softmax in the logits' own dtype, which autocast
    respects; only the negative log-likelihood is widened (aten/src/ATen/native/LossNLL.cpp).
    """
    group = t.options.tensor_parallel
    if group is not None and group.loss:
        from memplan.graph.tensor_parallel import parallel_cross_entropy  # only then

        return parallel_cross_entropy(t, logits, labels)
    log_probabilities = t.tensor(logits.numel, logits.dtype)
    t.record(
        OperationKind.LOG_SOFTMAX, (logits,), (log_probabilities,), saves=(log_probabilities,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    if t.autocast is not None:
        log_probabilities = t.cast(log_probabilities, DType.FP32)
    dtype = log_probabilities.dtype
    loss, total_weight = t.tensor(1, dtype), t.tensor(1, dtype)
    inputs: tuple[Tensor, ...] = (log_probabilities,)
    gradients: tuple[int, ...] = (Gradient.FRESH,)
    if labels is not None:
        inputs += (labels,)
        gradients += (Gradient.NONE,)
    t.record(
        OperationKind.NLL_LOSS, inputs, (loss, total_weight), saves=(*inputs, total_weight),
        gradients=gradients,
    )  # fmt: skip
    t.touch(logits)
    return loss


def rotary(t: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin``: keeps the tables only."""
    straight = t.mul(x, cos)
    first, second = t.slice(x, x.numel // 2), t.slice(x, x.numel - x.numel // 2)
    turned = t.concatenate(t.scale(second, OperationKind.NEG), first)
    t.touch(turned)
    return t.add(straight, t.mul(turned, sin))


def rotary_in_place(t: Tape, x: Tensor, cos: Tensor, sin: Tensor, *, by_row: bool) -> Tensor:
    """Liger's: one kernel turns ``x`` where it lies, and its gradient in backward; keeps the tables.

    What does not lie row after row is copied first, and so is its gradient (``by_row`` says whether it
    does): liger_kernel 0.8.5, ops/rope.py, ``rope_forward``.
    """
    whole = allocated_bytes(x.numel, x.dtype) == x.storage.num_bytes
    out = t.view(x, x.numel) if whole and not x.by_head else t.tensor(x.numel, x.dtype)
    gradient = Gradient.ALIAS if by_row else Gradient.FRESH
    t.record(
        OperationKind.ROTARY, (x, cos, sin), (out,), saves=(cos, sin),
        gradients=(gradient, Gradient.NONE, Gradient.NONE), in_python=True,
    )  # fmt: skip
    return out


def rotary_as_complex(t: Tape, query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 copies times a table of complex numbers, cast back: torchtitan's and DeepSeek-V2's.

    torchtitan 0.3.0, models/common/rope.py, ``ComplexRoPE``; transformers 5.23,
    models/deepseek_v2, ``apply_rotary_emb``.
    """
    full = t.cast(query, DType.FP32), t.cast(key, DType.FP32)
    results: list[Tensor] = []
    for original, x in zip((query, key), full, strict=True):
        product = t.mul(x, table)
        flat = t.view(product, product.numel)
        t.record(OperationKind.VIEW_AS_REAL, (product,), (flat,), gradients=(Gradient.FRESH,))
        results.append(t.cast(flat, original.dtype))
    t.touch(*full)
    return results[0], results[1]


def rotary_tables(t: Tape, positions: int, dim: int, dtype: DType) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, computed in fp32 and cast; held by the stack."""
    frequencies = t.tensor(positions * ((dim + 1) // 2), DType.FP32)
    t.record(OperationKind.MUL, (), (frequencies,))
    angles = t.tensor(positions * dim, DType.FP32)
    t.record(OperationKind.CAT, (frequencies,), (angles,))
    cosines, sines = t.tensor(positions * dim, DType.FP32), t.tensor(positions * dim, DType.FP32)
    # Each is made and then scaled: the product is what stays.
    unscaled = (cosines.storage.num_bytes, RESULT)
    t.record(OperationKind.COS, (angles,), (cosines,), forward_scratch_bytes=unscaled)
    t.record(OperationKind.SIN, (angles,), (sines,), forward_scratch_bytes=unscaled)
    tables = t.cast(cosines, dtype), t.cast(sines, dtype)
    t.touch(frequencies, angles, cosines, sines)
    for table in tables:
        t.hold(table)
    return tables


def complex_tables(t: Tape, positions: int, dim: int, dtype: DType) -> tuple[Tensor, Tensor]:
    """Cosines and sines as one table of complex numbers, two fp32 each, whatever the dtype."""
    del dtype
    angles = t.tensor(positions * (dim // 2), DType.FP32)
    t.record(OperationKind.MUL, (), (angles,))
    table = t.tensor(positions * dim, DType.FP32)
    scratch = angles.storage.num_bytes + table.storage.num_bytes
    t.record(OperationKind.POLAR, (angles,), (table,), forward_scratch_bytes=scratch)
    t.touch(angles)
    t.hold(table)
    return table, table
