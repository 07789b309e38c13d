"""LOMO and AdaLomo (lomo_optim 0.1): the update is within backward, and a gradient goes with it.

Their hook runs before the gradient it is called for is in its place, so each call steps the gradient
before it; the last one is stepped when backward is over.
"""

from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.factored import factored_moment, fp32_of_half, mean_of_squares
from memplan.training.optimizers.script import Made, OptimizerRow, Script, Stepped


def take_gradient(script: Script, tensor: Stepped) -> None:
    """``grad_fp32 = p.grad.to(torch.float32); p.grad = None``: where it is fp32 it stays to the end."""
    fp32_of_half(script, "grad_fp32", tensor)
    if tensor.dtype.is_half:
        script.free_gradient()


def lomo(script: Script, tensor: Stepped) -> None:
    """``Lomo.fuse_update``."""
    take_gradient(script, tensor)
    fp32_of_half(script, "p_fp32", tensor)


def adalomo(script: Script, tensor: Stepped) -> None:
    """``AdaLomo.fuse_update``."""
    take_gradient(script, tensor)
    mean_of_squares(script, tensor)
    fp32_of_half(script, "p_fp32", tensor)


ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.LOMO: OptimizerRow(
        update=lomo, words="0 x {dtype}", in_backward=True, lags=True, single_gpu=True,
        source="lomo_optim 0.1, lomo_optim/lomo.py",
    ),
    Optimizer.ADALOMO: OptimizerRow(
        init=factored_moment, update=adalomo, made=Made.CONSTRUCTION,
        words="a row and a column in fp32", in_backward=True, lags=True, single_gpu=True,
        source="lomo_optim 0.1, lomo_optim/adalomo.py",
    ),
}  # fmt: skip
