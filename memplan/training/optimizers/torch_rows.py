"""AdamW and SGD of torch 2.13 (torch/optim/adam.py, sgd.py): what most setups ask for."""

from collections.abc import Mapping, Sequence

from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import OptimizerRow, Script, Stepped

ADAM_SOURCE = "torch 2.13, torch/optim/adam.py"
SGD_SOURCE = "torch 2.13, torch/optim/sgd.py"


def moments(script: Script, tensor: Stepped) -> None:
    """``exp_avg`` and ``exp_avg_sq`` in the tensor's own format; with ``amsgrad`` a third."""
    script.state("exp_avg", tensor.numel, tensor.dtype)
    script.state("exp_avg_sq", tensor.numel, tensor.dtype)
    if script.options.get("amsgrad"):
        script.state("max_exp_avg_sq", tensor.numel, tensor.dtype)


def counted_moments(script: Script, tensor: Stepped) -> None:
    """The same behind a step counter on the GPU, as the fused form keeps one."""
    script.counter()
    moments(script, tensor)


def adamw_loop(script: Script, tensor: Stepped) -> None:
    """``denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)``"""
    script.let("sqrt", tensor.numel, tensor.dtype)
    script.let("denom", tensor.numel, tensor.dtype)
    script.drop("sqrt")


def a_copy_of_each(script: Script, tensors: Sequence[Stepped]) -> None:
    """``torch._foreach_sqrt(exp_avg_sqs)``: a copy of every second moment at once."""
    for number, tensor in enumerate(tensors):
        script.let(f"copy {number}", tensor.numel, tensor.dtype)


def momentum_buffer(script: Script, tensor: Stepped) -> None:
    """A clone of the first gradient."""
    if script.options["momentum"]:
        script.state("momentum_buffer", tensor.numel, tensor.dtype)


def sgd_foreach(script: Script, tensors: Sequence[Stepped]) -> None:
    """All in place, but for weight decay: gradients with it are new tensors."""
    if script.options["weight_decay"]:
        a_copy_of_each(script, tensors)


FOREACH_ADAM_PASSES = 20
"""Reads and writes of ``_multi_tensor_adam`` with weight decay, each of all tensors: weights 2 (``mul_``),
first moments 3 (``lerp_``), second moments 2 and 3 (``mul_``, ``addcmul_``), their root 2, 2 and 2
(``sqrt``, ``div_``, ``add_``), weights 4 (``addcdiv_``)."""
FOREACH_MOMENTUM_PASSES = 8
"""Of ``_multi_tensor_sgd``: ``mul_`` 2, ``add_`` 3, ``add_`` 3."""
_SGD: Mapping[str, float | bool] = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
_COPIES = "copies the optimizer makes of a state"

ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.ADAMW_FUSED: OptimizerRow(
        init=counted_moments, options={"amsgrad": False}, zero_offload=True,
        source=f"{ADAM_SOURCE}, _fused_adam",
    ),
    Optimizer.ADAMW_FOREACH: OptimizerRow(
        init=moments, update_all=a_copy_of_each, temporaries=_COPIES, options={"amsgrad": False},
        zero_offload=True, passes=FOREACH_ADAM_PASSES, source=f"{ADAM_SOURCE}, _multi_tensor_adam",
    ),
    Optimizer.SGD: OptimizerRow(
        init=momentum_buffer, update_all=sgd_foreach, words="0 x {dtype}", options=_SGD,
        source=f"{SGD_SOURCE}, _multi_tensor_sgd",
    ),
    Optimizer.SGD_MOMENTUM: OptimizerRow(
        init=momentum_buffer, update_all=sgd_foreach, words="1 x {dtype}",
        options={**_SGD, "momentum": 0.9}, passes=FOREACH_MOMENTUM_PASSES, source=f"{SGD_SOURCE}, _multi_tensor_sgd",
    ),
}  # fmt: skip
"""Step counters are on the CPU except in the fused form."""
