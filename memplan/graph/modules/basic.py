"""Modules of ``torch.nn`` on handles."""

from functools import partial
from itertools import islice
from math import prod

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.splits import Split
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layouts import Straightened, in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.strides import Shape, dense_strides, is_contiguous
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import (
    add_in_place,
    clamp,
    drop,
    dropout_probability,
)
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.norms import copy_gradient_first, native_layer_norm, rms_norm_fused
from memplan.graph.operations.products import (
    base_product,
    copy_gradient_of_product,
    linear,
    matmul_weight,
)
from memplan.graph.splitting.tensor_parallel import (
    add_up,
    note_parts_of_sums,
    split_product,
    token_table,
)
from memplan.model.networks import Activation
from memplan.model.norms import NormKind
from memplan.model.parameters import WeightRole
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.units import ceil_div


class Linear(Module):
    """``torch.nn.Linear``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        role: WeightRole = WeightRole.MATRIX,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = Weight(out_features, in_features, role=role, of_linear=True)
        if bias:
            self.bias = Weight(out_features, role=WeightRole.OTHER)

    def forward(self, x: Handle) -> Handle:
        """``x @ weight.T + bias``."""
        if self._adds_apart(x):
            made = self._apart(x)
        elif self.weight.owner is not self:
            made = self._tied(flattened(x))
        else:
            x = flattened(x)
            made = self._again(x) if self.is_here(self.weight) else self._own(x)
        return multiplied(x, made, self._shape(x, made))

    def _shape(self, x: Handle, made: Tensor) -> Shape:
        """The shape of what it gives: of as many tokens as are there then."""
        width = self._width()
        if len(x.shape) == 2:
            return made.numel // width, width
        if len(x.shape) > 3:
            return *x.shape[:-1], width
        batch = x.shape[0]
        length = made.numel // (batch * width) if batch else x.shape[1]
        return batch, length, width

    def _own(self, x: Handle) -> Tensor:
        run, split = self.run, self.split
        group = run.options.tensor_parallel
        degree = 1 if group is None else group.degree
        before = len(run.segment.parameters)
        made = linear(
            run, x.laid(), self.within,
            self.in_features // (degree if split in (Split.ROW, Split.ROW_PARTIAL) else 1),
            self.out_features // (degree if split is Split.COLUMN else 1),
            bias="bias" in self.weights, split=split, role=self.weight.role,
        )  # fmt: skip
        if group is not None and group.sequence:
            note_parts_of_sums(run, before)
        made_here = run.segment.parameters[before:]
        if made_here:
            self.declared(self.weight, made_here[0])
        if "bias" in self.weights:
            found = (each for each in made_here if each.name.endswith(".bias"))
            for each in islice(found, 1):
                run.parameters[self.bias] = each
                run.place(self.bias, each)
        return made

    def _adds_apart(self, x: Handle) -> bool:
        """Whether the bias is added to the product, as of sequences that do not lie in rows."""
        options = self.run.options
        whole = self.split is Split.WHOLE and options.fp8 is Fp8Recipe.NONE
        whole = whole and not options.python_linear
        return whole and "bias" in self.weights and len(x.shape) > 2 and not x.is_contiguous

    def _apart(self, x: Handle) -> Tensor:
        """``matmul(x, weight.T).add_(bias)`` (torch 2.13, aten/src/ATen/native/Linear.cpp, ``linear``)."""
        addend = self.run.cast_weight(self.parameter(self.weights["bias"]))
        return add_in_place(self.run, self.product(x), addend)

    def product(self, x: Handle) -> Tensor:
        """The same without a bias, nor an adapter."""
        run, weight = self.run, self.parameter(self.weight)
        run.cast_weight(weight)
        given = x if run.autocast is None else x.to(run.autocast)
        return matmul_weight(run, (given if given.is_rows else given.contiguous()).laid(), weight)

    def _again(self, x: Handle) -> Tensor:
        """Through a matrix that a call before has declared in the same segment."""
        bias = f"{self.within}.bias"
        addend = next((each for each in self.run.segment.parameters if each.name == bias), None)
        return matmul_weight(self.run, x.laid(), self.parameter(self.weight), addend)

    def _tied(self, x: Handle) -> Tensor:
        """Through a matrix that another module owns, with a bias of its own or of another's."""
        run, group = self.run, self.run.options.tensor_parallel
        table = self.parameter(self.weight)
        addend = self._addend(table)
        if group is None or self.split is Split.WHOLE:
            return matmul_weight(run, x.laid(), table, addend, module=self.within)

        adapts = group.splits_adapters and self.within in run.adapted

        def product(given: Tensor, _: int) -> Tensor:
            if not adapts or run.adaptation is None:
                return matmul_weight(run, given, table, addend, module=self.within)
            made = base_product(run, given, table, addend)
            return run.adaptation.beside_share(
                run, group, given, made, table, self.within, split=self.split
            )

        return split_product(run, group, x.laid(), self.split, self.out_features, product)

    def _addend(self, table: Parameter) -> Parameter | None:
        """The bias beside a matrix of another module's, which then is this module's too."""
        bias = self.weights.get("bias")
        if bias is None:
            return None
        found = self.parameter(bias)
        self.run.tie(table, self.within)
        if bias.owner is not self:
            self.run.tie(found, self.within)
        return found

    def _width(self) -> int:
        """Columns of the result that this rank has."""
        group, width = self.run.options.tensor_parallel, self.out_features
        if group is None:
            return width
        if self.split is Split.COLUMN:
            return width // group.degree
        if self.split is Split.VOCABULARY and group.loss:
            return ceil_div(width, group.degree)
        return width


def spare(module: Module) -> None:
    """Declare what is never called: nothing is made of its weights, nor of adapters beside them."""
    for each in (module, *(inner for _, inner in module.modules())):
        spare_alone(each)


def spare_alone(module: Module) -> None:
    """The same of a module without those in it."""
    from memplan.graph.counted import idle_linear  # only for such parts

    for weight in module.weights.values():
        if weight.owner is module:
            module.parameter(weight).unused = True
    if isinstance(module, Linear) and module.weight.owner is module:
        idle_linear(module.run, module.parameter(module.weight))


class Conv1D(Linear):
    """``transformers.pytorch_utils.Conv1D``: a linear layer whose weight lies transposed."""

    def __init__(
        self, out_features: int, in_features: int, *, role: WeightRole = WeightRole.MATRIX
    ) -> None:
        super().__init__(in_features, out_features, bias=True, role=role)

    def forward(self, x: Handle) -> Handle:
        """Of rows of one dimension, whatever autocast makes of them then."""
        made = super().forward(x.seen_as(-1, x.shape[-1]))
        return Handle(self.run, made.record, (*x.shape[:-1], made.shape[-1]), flat=True)

    def declared(self, weight: Weight, parameter: Parameter) -> None:
        """Optimizers see that its rows are columns."""
        super().declared(weight, parameter)
        parameter.in_conv1d = weight is self.weight


def multiplied(x: Handle, made: Tensor, shape: Shape) -> Handle:
    """What a product with a weight gave: its gradient is seen as rows, or copied into them.

    Once, before anything is computed of it, or by a function in Python for each product.
    """
    run = x.run
    if not run.options.python_linear:
        return Handle(run, made, shape, flat=True)
    operation = run.segment.operations[-1]
    found = Handle(run, made, shape)
    if operation.kind is not OperationKind.LINEAR or operation.outputs[0] is not made:
        return found
    rows = prod(shape[:-1]), shape[-1]
    copies = partial(copy_gradient_of_product, operation)
    return x.leads_to(found, in_rows(x.shape), Straightened(copies, rows))


def flattened(x: Handle) -> Handle:
    """What a linear layer reads as rows: a copy where that is no view, of what autocast casts.

    One that is a function in Python copies it itself.
    """
    if x.is_rows or x.run.options.python_linear:
        return x
    return (x if x.run.autocast is None else x.to(x.run.autocast)).contiguous()


class Embedding(Module):
    """``torch.nn.Embedding``."""

    def __init__(self, num_rows: int, width: int, *, role: WeightRole = WeightRole.TABLE) -> None:
        self.width = width
        self.weight = Weight(num_rows, width, role=role)

    tied = False
    """Another module reads its table too."""
    turned = False
    """What is found is turned: its gradient comes the other way round, and is copied first."""
    copies_ids = False
    """The batch's ids are copied for it, with others in the place of those that stand for pictures."""

    def forward(self, shape: Shape, ids: Handle | None = None) -> Handle:
        """Rows of the table, for ids of a shape; those of the batch itself take nothing here."""
        run, group = self.run, self.run.options.tensor_parallel
        table = self.table()
        if ids is None and self.copies_ids:
            ids = Handle(run, run.tensor(prod(shape), DType.INT64), shape)
            run.record(OperationKind.CLONE, (), (ids.record,))
        given = None if ids is None else ids.record
        # ``indices.reshape(-1)`` of a row that was expanded (aten/src/ATen/native/Embedding.cpp).
        spread = (
            None
            if ids is None or ids.numel >= prod(shape)
            else ids.apart(OperationKind.CLONE, shape=shape)
        )
        record = embedding_lookup(run, table, prod(shape), given, turned=self.turned)
        del spread
        if group is not None and table.ranks > 1:
            record = add_up(run, group, record)
            shape = shape[0], record.numel // (shape[0] * self.width)
        return Handle(run, record, (*shape, self.width))

    def table(self) -> Parameter:
        """The table, or a rank's rows of it."""
        run, group = self.run, self.run.options.tensor_parallel
        if group is None or self.split is Split.WHOLE:
            return self.parameter(self.weight)
        table = token_table(run, group, *self.weight.shape, tied=self.tied)
        self.declared(self.weight, table)
        return table


class Dropout(Module):
    """``torch.nn.Dropout``."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def forward(self, x: Handle) -> Handle:
        """A byte a number is kept, where anything is dropped."""
        return dropout(x, self.probability)


def dropout(x: Handle, probability: float) -> Handle:
    """``torch.nn.functional.dropout``, whose gradient lies in rows (ATen/native/cuda/Dropout.cu, ``empty_like``)."""
    if dropout_probability(x.run, probability) == 0.0:
        return x
    made = Handle(x.run, drop(x.run, x.record), x.shape, x.strides)
    return x.leads_to(made, in_rows(x.shape))


def clamp_(x: Handle) -> Handle:
    """``x.clamp_()``: in place, so that backward needs a copy of what was there before."""
    return x.like(clamp(x.run, x.laid()))


class ActivationModule(Module):
    """A nonlinearity that is a module (transformers' ``ACT2FN``)."""

    def __init__(self, kind: Activation) -> None:
        self.kind = kind

    def forward(self, x: Handle) -> Handle:
        """In the steps that its implementation takes."""
        return x.like(activation(x.run, x.record, self.kind))


class Norm(Module):
    """A normalization over the last dimension."""

    kind: NormKind
    """How it is computed."""

    def __init__(self, *shape: int) -> None:
        self.weight = Weight(*shape, role=WeightRole.NORM)


class RMSNorm(Norm):
    """Llama's: an fp32 copy over the root of its mean square, cast back, times the weight.

    (transformers 5.23, models/llama/modeling_llama.py, ``LlamaRMSNorm``)
    """

    kind = NormKind.RMS

    def forward(self, x: Handle) -> Handle:
        """Over the last dimension."""
        dtype = x.dtype
        x = self.behind_hook(x).float()
        variance = x.pow(2).mean()
        x = x * (variance + 1e-6).rsqrt()
        return scaled(self, self.weight, x.to(dtype))


class UpcastRMSNorm(RMSNorm):
    """OLMo 2's: the weight's product is in fp32 too; cast back last.

    (transformers 5.23, models/olmo2/modeling_olmo2.py, ``Olmo2RMSNorm``)
    """

    kind = NormKind.RMS_UPCAST

    def forward(self, x: Handle) -> Handle:
        """Over the last dimension."""
        dtype = x.dtype
        x = self.behind_hook(x).float()
        variance = x.pow(2).mean()
        x = x * (variance + 1e-6).rsqrt()
        return scaled(self, self.weight, x).to(dtype)


class LayerNorm(Norm):
    """``torch.nn.LayerNorm``."""

    kind = NormKind.LAYER

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__(width)
        if bias:
            self.bias = Weight(width, role=WeightRole.NORM)

    def forward(self, x: Handle) -> Handle:
        """One kernel: it keeps its input and two numbers a row."""
        weights = tuple(self.parameter(each) for each in self.weights.values())
        return layer_norm(x, x.shape[-1], weights)


def layer_norm(x: Handle, width: int, weights: tuple[Tensor, ...] = ()) -> Handle:
    """``torch.nn.functional.layer_norm``."""
    run, lies = x.run, x.strides
    if run.autocast is not None and x.dtype is not DType.FP32:
        lies = dense_strides(x.shape, lies)  # the cast leaves no holes
    strided = not is_contiguous(x.shape, lies)
    made = Handle(run, native_layer_norm(run, x.laid(), width, weights, strided=strided), x.shape)
    if run.decomposed:
        return x.leads_to(made, in_rows(x.shape))
    copies = partial(copy_gradient_first, run, run.segment.operations[-1])
    return x.leads_to(made, in_rows(x.shape), Straightened(copies))


def scaled(module: Module, weight: Weight, x: Handle) -> Handle:
    """A weight times a tensor, which it is broadcast to."""
    return x.like(x.run.mul(module.parameter(weight), x.record))


class FusedRMSNorm(RMSNorm):
    """The same as one kernel: ``torch.nn.RMSNorm``, Liger's or Unsloth's."""

    def forward(self, x: Handle) -> Handle:
        """It keeps its input and a number for each row."""
        made = rms_norm_fused(self.run, x.laid(), self.parameter(self.weight))
        return x.like(made)


def fp32_under_autocast(x: Handle) -> Handle:
    """What autocast runs in fp32: a copy."""
    return x if x.run.autocast is None else x.to(DType.FP32)
