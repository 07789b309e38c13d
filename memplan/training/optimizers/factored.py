"""Optimizers whose second moment is a row and a column: Adafactor of torch and transformers, CAME.

A vector's is whole, and so is that of a flat shard.
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import Made, OptimizerRow, Script, Stepped

TORCH_SOURCE = "torch 2.13, torch/optim/_adafactor.py"


# -- torch -------------------------------------------------------------------------------------------


def torch_states(script: Script, tensor: Stepped) -> None:
    """``row_var`` and ``col_var``, or ``variance``, in the tensor's format."""
    if tensor.is_factored:
        script.state("row_var", tensor.num_rows, tensor.dtype)
        script.state("col_var", tensor.num_columns, tensor.dtype)
    else:
        script.state("variance", tensor.numel, tensor.dtype)


def torch_loop(script: Script, tensor: Stepped) -> None:
    """``update`` is ``var_estimate``, changed in place: the last one goes when both names are new."""
    if tensor.is_factored:
        script.let("row_mean", tensor.num_rows, tensor.dtype)
        script.let("norm", tensor.num_columns, tensor.dtype)
        script.column_mean(tensor, tensor.dtype)
        script.rename("norm", "col_mean")
    else:
        script.let("grad_squared", tensor.numel, tensor.dtype)
    script.let("update", tensor.numel, tensor.dtype)


def torch_foreach(script: Script, tensors: Sequence[Stepped]) -> None:
    """Matrices, then vectors; the matrices' updates are there until the vectors' are."""
    matrices = [tensor for tensor in tensors if tensor.is_factored]
    vectors = [tensor for tensor in tensors if not tensor.is_factored]
    for name, count in (("row_mean", "num_rows"), ("col_mean", "num_columns")):
        names = [f"{name} {number}" for number in range(len(matrices))]
        for each, tensor in zip(names, matrices, strict=True):
            script.let(each, getattr(tensor, count), tensor.dtype)
            if name == "col_mean":
                script.column_mean(tensor, tensor.dtype)
        script.drop(*reversed(names))
    for number, tensor in enumerate(matrices):
        script.let(f"update {number}", tensor.numel, tensor.dtype)
    names = [f"grad_squared {number}" for number in range(len(vectors))]
    for each, tensor in zip(names, vectors, strict=True):
        script.let(each, tensor.numel, tensor.dtype)
    script.drop(*reversed(names))
    for number, tensor in enumerate(vectors):
        script.let(f"vector {number}", tensor.numel, tensor.dtype)


# -- transformers ------------------------------------------------------------------------------------


def fp32_of_half(script: Script, name: str, tensor: Stepped) -> None:
    """``x.float()``, which is x itself where that is fp32 already; what the name held goes before."""
    script.drop(name)
    if tensor.dtype is not DType.FP32:
        script.let(name, tensor.numel, DType.FP32)


def factored_moment(script: Script, tensor: Stepped, name: str = "exp_avg_sq") -> None:
    """A row and a column in fp32, or a vector's whole."""
    if tensor.is_factored:
        script.state(f"{name}_row", tensor.num_rows, DType.FP32)
        script.state(f"{name}_col", tensor.num_columns, DType.FP32)
    else:
        script.state(name, tensor.numel, DType.FP32)


def mean_of_squares(script: Script, tensor: Stepped) -> None:
    """``update = (grad**2) + eps``, and what comes of it."""
    script.let("square", tensor.numel, DType.FP32)
    script.let("update", tensor.numel, DType.FP32)
    script.drop("square")
    if tensor.is_factored:
        product_of_means(script, tensor, "update")
    else:
        script.let("update", tensor.numel, DType.FP32)


def product_of_means(script: Script, tensor: Stepped, name: str) -> None:
    """Means over columns and rows, and the product of what comes of them: ``_approx_sq_grad``."""
    script.let("mean", tensor.num_rows, DType.FP32)
    script.drop("mean")
    script.let("mean", tensor.num_columns, DType.FP32)
    script.column_mean(tensor, DType.FP32)
    script.drop("mean")
    script.let("r_factor", tensor.num_rows, DType.FP32)
    script.let("c_factor", tensor.num_columns, DType.FP32)
    script.let(name, tensor.numel, DType.FP32)
    script.drop("r_factor", "c_factor")


def adafactor(script: Script, tensor: Stepped) -> None:
    """``Adafactor.step`` of one parameter: everything in fp32, casts of a half parameter included."""
    fp32_of_half(script, "grad", tensor)
    if script.first:
        if script.flag("beta1"):
            script.state("exp_avg", tensor.numel, DType.FP32)
        factored_moment(script, tensor)
    fp32_of_half(script, "p_data_fp32", tensor)
    if script.first:
        script.state("RMS", 1, DType.FP32)
    mean_of_squares(script, tensor)
    if script.flag("beta1"):
        script.drop("update")
    script.let("negative", tensor.numel, DType.FP32)
    script.drop("negative")


def came(script: Script, tensor: Stepped) -> None:
    """``CAME.step`` of one parameter: as Adafactor, with a second factored moment of the residual."""
    fp32_of_half(script, "grad", tensor)
    if script.first:
        script.state("exp_avg", tensor.numel, DType.FP32)
        factored_moment(script, tensor)
        if tensor.is_factored:
            factored_moment(script, tensor, "exp_avg_res")
        script.state("RMS", 1, tensor.dtype)
    mean_of_squares(script, tensor)
    script.let("difference", tensor.numel, DType.FP32)
    script.let("square", tensor.numel, DType.FP32)
    script.drop("difference")
    script.let("res", tensor.numel, DType.FP32)
    script.drop("square")
    if tensor.is_factored:
        # ``update = res_approx.mul_(exp_avg)``: one tensor with two names, of which a vector, whose
        # update is a clone, only takes one over.
        product_of_means(script, tensor, "res_approx")
        script.drop("update")
    else:
        script.let("update", tensor.numel, DType.FP32)
    script.let("negative", tensor.numel, DType.FP32)
    script.drop("negative")


ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.ADAFACTOR: OptimizerRow(
        update=adafactor, made=Made.EACH, options={"beta1": 0.0},
        words="a row and a column in fp32",
        source="transformers 5.23, transformers/optimization.py, Adafactor",
    ),
    Optimizer.ADAFACTOR_FOREACH: OptimizerRow(
        init=torch_states, update_all=torch_foreach, words="a row and a column in {dtype}",
        source=f"{TORCH_SOURCE}, _multi_tensor_adafactor",
    ),
    Optimizer.ADAFACTOR_LOOP: OptimizerRow(
        init=torch_states, update=torch_loop, words="a row and a column in {dtype}",
        source=f"{TORCH_SOURCE}, _single_tensor_adafactor",
    ),
    Optimizer.CAME: OptimizerRow(
        update=came, made=Made.EACH, words="fp32, and two rows and columns in fp32",
        source="came_pytorch, came_pytorch/CAME.py",
    ),
}  # fmt: skip
