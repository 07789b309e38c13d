"""Linear layers and products of two tensors, with their adapters, codes and splits."""

from collections.abc import Sequence

from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.overlay import BASE_LAYER
from memplan.graph.core.segments import Gradient, Operation
from memplan.graph.core.splits import Split
from memplan.graph.core.tape import Tape
from memplan.graph.core.temporaries import Temporaries
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.model.parameters import WeightRole
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.splitting.parallelism import TensorParallelKind


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
    if t.options.tensor_parallel is not None and split is not Split.WHOLE:
        return _own_part(t, x, name, in_features, out_features, bias, split, role)
    weight = t.matrix(f"{name}.weight", out_features, in_features, role=role)
    bias_parameter = t.bias(f"{name}.bias", weight) if bias else None
    if t.options.fp8 is not Fp8Recipe.NONE and weight.packed is None:
        from memplan.graph.fp8 import fp8_formats, linear_fp8

        formats = fp8_formats(t, in_features, out_features)
        if formats is not None:
            return linear_fp8(t, _in_rows(t, x), weight, bias_parameter, formats)
    return matmul_weight(t, x, weight, bias_parameter)


def _own_part(
    t: Tape,
    x: Tensor,
    name: str,
    in_features: int,
    out_features: int,
    bias: bool,
    split: Split,
    role: WeightRole,
) -> Tensor:
    """A tensor-parallel rank's columns or rows of it."""
    group = t.options.tensor_parallel
    assert group is not None
    own = in_features // group.degree if split is Split.ROW_CUT else in_features
    adds_apart = group.kind is TensorParallelKind.AUTOTP

    def product(given: Tensor, width: int) -> Tensor:
        return linear(t, given, name, own, width, bias=bias and not adds_apart, role=role)

    def add_bias(made: Tensor, width: int) -> Tensor:
        if not bias:
            return made
        addend = t.parameter(f"{name}.bias", width, role=WeightRole.OTHER)
        return t.add(made, t.cast_weight(addend))

    if adds_apart:
        from memplan.graph.splitting.autotp import autotp_product  # only then

        return autotp_product(t, group, x, split, out_features, product, add_bias)
    if t.adaptation is not None and name in t.adapted:
        return _adapted_part(t, x, name, in_features, out_features, bias, split, role)
    from memplan.graph.splitting.tensor_parallel import split_product  # only then

    return split_product(t, group, x, split, out_features, product)


def _adapted_part(
    t: Tape,
    x: Tensor,
    name: str,
    in_features: int,
    out_features: int,
    bias: bool,
    split: Split,
    role: WeightRole,
) -> Tensor:
    """A layer of which ranks have shares, and the adapter beside what each rank has of its result."""
    group, adaptation = t.options.tensor_parallel, t.adaptation
    assert group is not None
    assert adaptation is not None
    if split is not Split.COLUMN and not group.splits_adapters:
        msg = (
            f"adapter: peft 0.21.2 does not run on {name} beside transformers' tp_plan, only on layers "
            "whose columns are split; leave it out of the targets, or tensor_parallel"
        )
        raise SetupError(msg)
    from memplan.graph.splitting.tensor_parallel import split_product  # only then

    own = in_features // group.degree if split is Split.ROW_CUT else in_features
    weights: list[Parameter] = []

    def product(given: Tensor, width: int) -> Tensor:
        weight = t.matrix(f"{name}.weight", width, own, role=role)
        weights.append(weight)
        made = base_product(t, given, weight, t.bias(f"{name}.bias", weight) if bias else None)
        if not group.splits_adapters:
            return made
        return adaptation.beside_share(t, group, given, made, weight, name, split=split)

    out = split_product(t, group, x, split, out_features, product)
    if group.splits_adapters:
        return out
    return adaptation.beside_share(t, group, x, out, weights[0], name, split=split)


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
        return t.options.quantizer.product(t, _in_rows(t, x), weight, bias)
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
    forward, backward = _rows_copied(inputs, x) if x.is_scattered else ((), ())
    t.record(
        OperationKind.LINEAR, inputs, (out,), saves=saves, gradients=gradients,
        forward_scratch_bytes=forward, backward_scratch_bytes=backward,
        flops=2 * rows * in_features * out_features, in_python=t.options.python_linear,
    )  # fmt: skip
    t.touch(given)
    return out


def _in_rows(t: Tape, x: Tensor) -> Tensor:
    """What a kernel reads that takes nothing else than rows."""
    return t.contiguous(x) if x.is_scattered else x


def _rows_copied(
    inputs: Sequence[Tensor], *scattered: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a function that keeps a tensor as it lies takes to see it in rows: a copy for each product with it.

    ``scattered`` are its input, its result's gradient, or both. (DeepSpeed 0.19.8, runtime/zero/linear.py,
    ``LinearFunctionForZeroStage3``: ``input.matmul``, ``grad_output.matmul`` and, for the weight's gradient,
    ``grad_output.reshape`` and ``input.reshape``)
    """
    x, factor, *_ = inputs
    sizes = [each.numel * each.dtype.num_bytes for each in scattered]
    given = [size for each, size in zip(scattered, sizes, strict=True) if each is x]
    arriving = [size for each, size in zip(scattered, sizes, strict=True) if each is not x]
    forward, backward = Temporaries(), Temporaries()
    _between(forward, given)
    for each in inputs:
        if each.requires_grad:
            _between(
                backward,
                arriving if each is x else arriving + given if each is factor else [],
            )
    return forward.blocks, backward.blocks


def _between(script: Temporaries, copies: list[int]) -> None:
    """Copies are made, then what is computed of them, and they go."""
    taken = [script.take(size) for size in copies]
    script.result()
    script.drop(*taken)


def copy_gradient_of_product(operation: Operation) -> None:
    """Note that what arrives in backward is no view of rows, and is copied for each product with it."""
    x, *_ = operation.inputs
    scattered = (x, *operation.outputs) if operation.forward_scratch else operation.outputs
    _, operation.backward_scratch = _rows_copied(operation.inputs, *scattered)


def matmul_tensor(
    t: Tape, x: Tensor, factor: Tensor, in_features: int, bias: Tensor | None = None
) -> Tensor:
    """``x @ factor.T + bias`` for a factor that was computed."""
    addend = t.cast_weight(bias) if isinstance(bias, Parameter) else bias
    if addend is not None and t.autocast is not None:
        addend = t.cast(addend, t.autocast)
    if t.autocast is not None:
        factor, x = t.cast(factor, t.autocast), t.cast(x, t.autocast)
    x = _in_rows(t, x)
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
