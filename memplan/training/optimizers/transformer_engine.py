"""Transformer Engine's FusedAdam (transformer_engine/pytorch/optimizers/fused_adam.py, 2.x).

States are fp32 unless other formats are asked for; those are widened for the kernel, all tensors' at once.
With master weights each tensor that is not fp32 has an fp32 one beside it, or just the 16 bits that a
bf16 one lacks.
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import Made, OptimizerRow, Script, Stepped

_DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _dtype(script: Script, name: str) -> DType:
    return _DTYPES.get(script.text(f"{name}_dtype"), DType.FP32)


def states(script: Script, tensor: Stepped) -> None:
    """``initialize_state``: both moments, and the master weight."""
    for name in _MOMENTS:
        script.state(name, tensor.numel, _dtype(script, name))
    if not script.flag("master_weights") or tensor.dtype is DType.FP32:
        return
    halves = script.flag("store_param_remainders") and tensor.dtype is DType.BF16
    script.state("master_param", tensor.numel, DType.BF16 if halves else DType.FP32)


def widened(script: Script, tensors: Sequence[Stepped]) -> None:
    """``get_unscaled_state``: an fp32 copy of every state that is none, until the step's end."""
    for number, tensor in enumerate(tensors):
        for name in _MOMENTS:
            if _dtype(script, name) is not DType.FP32:
                script.let(f"{name} {number}", tensor.numel, DType.FP32)


ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.TE_ADAMW: OptimizerRow(
        init=states, update_all=widened, made=Made.FIRST,
        words="2 x fp32 and master weights,",
        temporaries="fp32 copies of states that are held in less",
        options={
            "master_weights": False, "store_param_remainders": False,
            "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32",
        },
        source="Transformer Engine 2, pytorch/optimizers/fused_adam.py",
    ),
}  # fmt: skip
