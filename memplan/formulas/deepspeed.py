"""DeepSpeed's own estimators of model-state memory, digit for digit.

These are DeepSpeed's figures, not memplan's: they leave out activations, logits, communication
buckets, the parameters that ZeRO-3 keeps gathered and everything CUDA holds, and they assume Adam
with 16-bit training. People know these tables; memplan prints them so that the two can be compared.

Nomenclature: Φ is the number of parameters, Λ that of the largest layer (the module that owns most
parameters itself, its children's left out; mostly the token embedding), g the GPUs per node, n the
nodes, G = g·n, and k the additional buffer factor on CPU memory.

DeepSpeed computes in double precision and cuts each result to an integer. The order of its
operations is kept here, float for float, because another order rounds otherwise.

References
----------
.. [1] DeepSpeed 0.19.8, ``deepspeed/runtime/zero/stage_1_and_2.py`` line 4017,
   ``estimate_zero2_model_states_mem_needs``.
.. [2] DeepSpeed 0.19.8, ``deepspeed/runtime/zero/stage3.py`` line 4016,
   ``estimate_zero3_model_states_mem_needs``; the same in 0.14.2.
.. [3] DeepSpeed documentation, "Memory Requirements",
   https://deepspeed.readthedocs.io/en/latest/memory.html
.. [4] DeepSpeed pull request 5099, commit f4cb866c2 of 2024-06-04; first released in 0.14.3.
"""

from enum import Enum

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass

ADDITIONAL_BUFFER_FACTOR = 1.5
"""DeepSpeed's default for k, "to be conservative" about CPU memory ([1]_, [2]_)."""

LARGEST_LAYER_BYTES = 4
"""Bytes per parameter of a gathered layer: 2 of the parameter, 2 of its gradient ([3]_)."""

FP32_INIT_BYTES = 4
"""Bytes per parameter while torch builds the model in fp32, once per process ([3]_)."""

CPU_STATES_BYTES = 16
"""Bytes per parameter of offloaded states: fp32 parameter, gradient and Adam's two ([3]_)."""

CPU_STATES_AND_PARAM_BYTES = 18
"""``CPU_STATES_BYTES`` and the 16-bit parameter ([3]_)."""

MAX_COUNT = 10**18
"""Larger counts are refused: no model or cluster has them, and doubles would overflow."""

MAX_BUFFER_FACTOR = 1000.0
"""Larger factors are refused."""


class DeepSpeedFormula(Enum):
    """Which of DeepSpeed's two ZeRO-2 formulas is meant."""

    DOCUMENTED = "documented"
    """``4Φ + 16Φ/G`` per GPU: the documentation to this day, and releases up to 0.14.2."""
    CURRENT = "current"
    """``2Φ + 18Φ/G`` per GPU: releases from 0.14.3 (June 2024) on ([4]_)."""


class DeepSpeedOffload(Enum):
    """What is moved to the CPU, in the order in which DeepSpeed lists it.

    Parameters without the optimizer is a combination that DeepSpeed skips.
    """

    OPTIMIZER_AND_PARAM = "optimizer+param"
    OPTIMIZER = "optimizer"
    NONE = "none"

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer's states are on the CPU."""
        return self is not DeepSpeedOffload.NONE

    @property
    def param(self) -> bool:
        """Whether the 16-bit parameters are on the CPU."""
        return self is DeepSpeedOffload.OPTIMIZER_AND_PARAM


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedCase:
    """What DeepSpeed's estimators are asked about.

    Raises ``SetupError`` for a count below 1, or one so large that it cannot be meant.
    """

    total_params: int
    """Φ: parameters of the model, shared ones once."""
    largest_layer_params: int | None = None
    """Λ: parameters of the module that owns most of them itself; None: only ZeRO-2 is asked about."""
    num_gpus_per_node: int
    """g: GPUs of one node, not of all."""
    num_nodes: int = 1
    """n: nodes of the cluster."""
    additional_buffer_factor: float = ADDITIONAL_BUFFER_FACTOR
    """k: what CPU memory is multiplied by."""

    def __post_init__(self) -> None:
        """Refuse what no cluster or model can be."""
        _check_count("total_params", self.total_params)
        _check_count("num_gpus_per_node", self.num_gpus_per_node)
        _check_count("num_nodes", self.num_nodes)
        largest = self.largest_layer_params
        if largest is not None:
            _check_count("largest_layer_params", largest)
        if largest is not None and largest > self.total_params:
            msg = (
                f"largest_layer_params is {largest:,}, more than the "
                f"{self.total_params:,} of the whole model: give the largest layer's own count"
            )
            raise SetupError(msg)
        if not 0 < self.additional_buffer_factor <= MAX_BUFFER_FACTOR:
            msg = (
                f"additional_buffer_factor is {self.additional_buffer_factor}: "
                f"it must be above 0 and at most {MAX_BUFFER_FACTOR:g}; DeepSpeed's own is 1.5"
            )
            raise SetupError(msg)

    @property
    def num_gpus(self) -> int:
        """G: GPUs of all nodes."""
        return self.num_gpus_per_node * self.num_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedRow:
    """One row of DeepSpeed's table."""

    zero_stage: int
    """2 or 3: DeepSpeed has no estimator for the others."""
    offload: DeepSpeedOffload
    """What is on the CPU."""
    zero_init: bool | None
    """Whether the model is built inside ``zero.Init``; None for ZeRO-2, where it is no option."""
    per_cpu_bytes: int
    """RAM of one node, all its processes together."""
    documented_cpu_bytes: int | None = None
    """The same by the documentation, where that has another formula than the code."""
    per_gpu_bytes: int
    """Memory of one GPU."""

    @property
    def offload_optimizer(self) -> bool:
        """Whether the optimizer's states are on the CPU."""
        return self.offload.optimizer

    @property
    def offload_param(self) -> bool:
        """Whether the 16-bit parameters are on the CPU."""
        return self.offload.param


def largest_layer_bytes(largest_layer_params: int) -> int:
    """GPU memory that gathering the largest layer takes [bytes].

    Equation: ``4Λ``, 16-bit parameters and gradients ([2]_, [3]_).

    >>> largest_layer_bytes(32_899_072) // 2**20
    125
    """
    return LARGEST_LAYER_BYTES * largest_layer_params


def zero2_gpu_bytes(
    total_params: int, *, num_gpus: int, offload_optimizer: bool, formula: DeepSpeedFormula
) -> int:
    """Memory of one GPU under ZeRO-2 [bytes]; ``num_gpus`` counts all nodes.

    Equation: ``2Φ`` with the optimizer on the CPU; else ``4Φ + int(16Φ/G)`` as documented ([3]_,
    0.14.2) or ``2Φ + int(18Φ/G)`` as it is now ([1]_, [4]_).

    >>> documented = zero2_gpu_bytes(
    ...     2_851_598_336, num_gpus=8, offload_optimizer=False, formula=DeepSpeedFormula.DOCUMENTED
    ... )
    >>> f"{documented / 2**30:.2f}"
    '15.93'
    """
    if offload_optimizer:
        return 2 * total_params
    match formula:
        case DeepSpeedFormula.DOCUMENTED:
            return 4 * total_params + _share_bytes(total_params, num_bytes=16, num_gpus=num_gpus)
        case DeepSpeedFormula.CURRENT:
            return 2 * total_params + _share_bytes(total_params, num_bytes=18, num_gpus=num_gpus)


def zero2_cpu_bytes(
    total_params: int,
    *,
    num_gpus_per_node: int,
    num_nodes: int,
    offload_optimizer: bool,
    additional_buffer_factor: float = ADDITIONAL_BUFFER_FACTOR,
) -> int:
    """RAM of one node under ZeRO-2 [bytes].

    Equation: ``Φ·max(4G, 16)·k`` with the optimizer on the CPU, else ``4Φ·g·k`` ([1]_). The
    documentation writes ``4g`` for the first [3]_; the code has ``4G``, and so has this.
    ``zero2_documented_cpu_bytes`` is the other.

    >>> zero2_cpu_bytes(1000, num_gpus_per_node=8, num_nodes=2, offload_optimizer=True)
    96000
    """
    if offload_optimizer:
        processes = num_gpus_per_node * num_nodes
        per_param = max(FP32_INIT_BYTES * processes, CPU_STATES_BYTES)
        return int(total_params * per_param * additional_buffer_factor)
    return int(total_params * FP32_INIT_BYTES * num_gpus_per_node * additional_buffer_factor)


def zero2_documented_cpu_bytes(
    total_params: int,
    *,
    num_gpus_per_node: int,
    additional_buffer_factor: float = ADDITIONAL_BUFFER_FACTOR,
) -> int:
    """RAM of one node under ZeRO-2 with the optimizer on the CPU, as documented [bytes].

    Equation: ``Φ·max(4g, 16)·k`` ([3]_), which on one node is what the code has.

    >>> zero2_documented_cpu_bytes(1000, num_gpus_per_node=8)
    48000
    """
    per_param = max(FP32_INIT_BYTES * num_gpus_per_node, CPU_STATES_BYTES)
    return int(total_params * per_param * additional_buffer_factor)


def zero3_gpu_bytes(
    total_params: int, *, largest_layer_params: int, num_gpus: int, offload: DeepSpeedOffload
) -> int:
    """Memory of one GPU under ZeRO-3 [bytes]; ``num_gpus`` counts all nodes.

    Equation: ``4Λ`` with optimizer and parameters on the CPU, ``4Λ + int(2Φ/G)`` with the
    optimizer alone, ``4Λ + int(18Φ/G)`` with neither ([2]_; cases 2, 3 and 1 of [3]_).

    >>> zero3_gpu_bytes(
    ...     737_668_096,
    ...     largest_layer_params=32_899_072,
    ...     num_gpus=4,
    ...     offload=DeepSpeedOffload.NONE,
    ... ) // 2**20
    3291
    """
    layer_bytes = largest_layer_bytes(largest_layer_params)
    match offload:
        case DeepSpeedOffload.OPTIMIZER_AND_PARAM:
            return layer_bytes
        case DeepSpeedOffload.OPTIMIZER:
            return layer_bytes + _share_bytes(total_params, num_bytes=2, num_gpus=num_gpus)
        case DeepSpeedOffload.NONE:
            return layer_bytes + _share_bytes(total_params, num_bytes=18, num_gpus=num_gpus)


def zero3_cpu_bytes(
    total_params: int,
    *,
    largest_layer_params: int,
    num_gpus_per_node: int,
    num_nodes: int,
    offload: DeepSpeedOffload,
    zero_init: bool,
    additional_buffer_factor: float = ADDITIONAL_BUFFER_FACTOR,
) -> int:
    """RAM of one node under ZeRO-3 [bytes].

    Equation ([2]_): with c = 18 (optimizer and parameters on the CPU) or 16 (optimizer alone),
    ``cΦ/n·k`` inside ``zero.Init`` and ``Φ·max(4g, c/n)·k`` outside; with nothing on the CPU
    ``4Λ·g·k`` inside and ``4Φ·g·k`` outside, both needed only while the model is loaded.

    >>> inside = zero3_cpu_bytes(
    ...     2_851_598_336,
    ...     largest_layer_params=32_899_072,
    ...     num_gpus_per_node=8,
    ...     num_nodes=1,
    ...     offload=DeepSpeedOffload.OPTIMIZER_AND_PARAM,
    ...     zero_init=True,
    ... )
    >>> f"{inside / 2**30:.2f}"
    '71.71'
    """
    if offload is DeepSpeedOffload.NONE:
        loaded = largest_layer_params if zero_init else total_params
        return int(loaded * FP32_INIT_BYTES * num_gpus_per_node * additional_buffer_factor)
    states = CPU_STATES_AND_PARAM_BYTES if offload.param else CPU_STATES_BYTES
    node_share = 1 / num_nodes
    if zero_init:
        return int(total_params * states * node_share * additional_buffer_factor)
    per_param = max(FP32_INIT_BYTES * num_gpus_per_node, states * node_share)
    return int(total_params * per_param * additional_buffer_factor)


def zero3_pinned_bytes(
    total_params: int, *, offload: DeepSpeedOffload, gradient_accumulation: bool
) -> int:
    """Page-locked CPU memory under ZeRO-3 with ``pin_memory``, over all nodes [bytes].

    It is part of the CPU figure, not on top of it. Equation ([3]_, "Pinned Memory"): ``6Φ`` with
    the parameters on the CPU (2 of the 16-bit parameter, 4 of the fp32 gradient), ``2Φ`` more for
    16-bit gradients when they are accumulated; ``4Φ`` with the optimizer alone. ZeRO-2 has no
    figure: pinning cannot be controlled there, said [3]_ until 2026; now it names ``pin_memory`` of
    ``offload_optimizer``, still without a figure. "Over all nodes" is our reading: [3]_ does not
    divide by nodes, and every rank pins its own partition.

    >>> zero3_pinned_bytes(
    ...     1000, offload=DeepSpeedOffload.OPTIMIZER_AND_PARAM, gradient_accumulation=True
    ... )
    8000
    """
    match offload:
        case DeepSpeedOffload.OPTIMIZER_AND_PARAM:
            return (8 if gradient_accumulation else 6) * total_params
        case DeepSpeedOffload.OPTIMIZER:
            return 4 * total_params
        case DeepSpeedOffload.NONE:
            return 0


def zero2_table(case: DeepSpeedCase, *, formula: DeepSpeedFormula) -> tuple[DeepSpeedRow, ...]:
    """Return the rows of DeepSpeed's ZeRO-2 table, in its order.

    >>> case = DeepSpeedCase(
    ...     total_params=2_851_598_336, largest_layer_params=32_899_072, num_gpus_per_node=8
    ... )
    >>> for row in zero2_table(case, formula=DeepSpeedFormula.DOCUMENTED):
    ...     print(f"{row.per_cpu_bytes / 2**30:.2f} {row.per_gpu_bytes / 2**30:.2f}")
    127.48 5.31
    127.48 15.93
    """
    return tuple(
        _zero2_row(case, offload=offload, formula=formula)
        for offload in (DeepSpeedOffload.OPTIMIZER, DeepSpeedOffload.NONE)
    )


def zero3_table(case: DeepSpeedCase) -> tuple[DeepSpeedRow, ...]:
    """Return the rows of DeepSpeed's ZeRO-3 table, in its order; none without a largest layer.

    >>> case = DeepSpeedCase(
    ...     total_params=2_851_598_336, largest_layer_params=32_899_072, num_gpus_per_node=8
    ... )
    >>> row = zero3_table(case)[4]
    >>> row.offload_optimizer, row.zero_init, f"{row.per_gpu_bytes / 2**30:.2f}"
    (False, True, '6.10')
    """
    largest = case.largest_layer_params
    if largest is None:
        return ()
    return tuple(
        _zero3_row(case, largest, offload=offload, zero_init=zero_init)
        for offload in DeepSpeedOffload
        for zero_init in (True, False)
    )


def _zero2_row(
    case: DeepSpeedCase, *, offload: DeepSpeedOffload, formula: DeepSpeedFormula
) -> DeepSpeedRow:
    documented = None
    if offload.optimizer and case.num_nodes > 1:
        documented = zero2_documented_cpu_bytes(
            case.total_params,
            num_gpus_per_node=case.num_gpus_per_node,
            additional_buffer_factor=case.additional_buffer_factor,
        )
    return DeepSpeedRow(
        zero_stage=2,
        offload=offload,
        zero_init=None,
        per_cpu_bytes=zero2_cpu_bytes(
            case.total_params,
            num_gpus_per_node=case.num_gpus_per_node,
            num_nodes=case.num_nodes,
            offload_optimizer=offload.optimizer,
            additional_buffer_factor=case.additional_buffer_factor,
        ),
        documented_cpu_bytes=documented,
        per_gpu_bytes=zero2_gpu_bytes(
            case.total_params,
            num_gpus=case.num_gpus,
            offload_optimizer=offload.optimizer,
            formula=formula,
        ),
    )


def _zero3_row(
    case: DeepSpeedCase, largest_layer_params: int, *, offload: DeepSpeedOffload, zero_init: bool
) -> DeepSpeedRow:
    return DeepSpeedRow(
        zero_stage=3,
        offload=offload,
        zero_init=zero_init,
        per_cpu_bytes=zero3_cpu_bytes(
            case.total_params,
            largest_layer_params=largest_layer_params,
            num_gpus_per_node=case.num_gpus_per_node,
            num_nodes=case.num_nodes,
            offload=offload,
            zero_init=zero_init,
            additional_buffer_factor=case.additional_buffer_factor,
        ),
        per_gpu_bytes=zero3_gpu_bytes(
            case.total_params,
            largest_layer_params=largest_layer_params,
            num_gpus=case.num_gpus,
            offload=offload,
        ),
    )


def _share_bytes(total_params: int, *, num_bytes: int, num_gpus: int) -> int:
    """One GPU's share of ``num_bytes`` per parameter, cut as DeepSpeed cuts it [bytes]."""
    # Not ``//``: past 2^53 the float division rounds otherwise, and DeepSpeed's digits are asked.
    return int(num_bytes * total_params / num_gpus)


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_COUNT:
        msg = f"{name} is {_shown(count)}: it must be at least 1 and at most 10^18"
        raise SetupError(msg)


def _shown(count: int) -> str:
    """The count itself, or its size where its digits would fill the screen."""
    return str(count) if abs(count) <= 10 * MAX_COUNT else f"about 2^{count.bit_length()}"
