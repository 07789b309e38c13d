"""LoRA beside a layer of which each rank has a share, as NeMo AutoModel splits both of its factors.

NeMo AutoModel 0.7, components/distributed/parallel_styles.py (``ColwiseParallelLora``,
``RowwiseParallelLora``) and components/_peft/lora.py (``LinearLoRA.forward``): beside columns both factors are
split by their outputs, and what A gives is gathered before B reads it; beside rows both are split by their
inputs, and what A gives is added up and scattered over its columns. What is added to a rank's rows is a
partial sum as their own result is, so that one collective behind both is enough.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.splits import Split
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.products import matmul_weight
from memplan.graph.replacing.adapters import dropped_input, low_rank
from memplan.training.adapters import Lora
from memplan.training.splitting.parallelism import TensorParallel
from memplan.units import ceil_div

BY_ROW = (Split.ROW, Split.ROW_CUT, Split.ROW_PARTIAL)
"""Splits by inputs, whose results are partial sums."""


def beside_split(
    t: Tape,
    group: TensorParallel,
    lora: Lora,
    dtype: DType,
    x: Tensor,
    out: Tensor,
    weight: Parameter,
    module: str,
    *,
    rank: int,
    split: Split,
) -> Tensor:
    """``res + lora_B(lora_A(x) * scale)`` of a rank's share (``LinearLoRA.forward``)."""
    by_row = split in BY_ROW
    own = ceil_div(rank, group.degree)
    down, up = low_rank(
        t, lora, dtype, module, weight, rank if by_row else own, up_rank=own if by_row else rank
    )
    if own * group.degree != rank:
        # Of A, in_features x rank beside columns; B's out_features x rank beside rows.
        uneven = up[0] if by_row else down
        uneven.whole_numel = uneven.numel // own * rank
    given = t.cast(x, t.options.adapter_input)
    narrow = matmul_weight(t, dropped_input(t, lora, given, down), down)
    tokens = narrow.numel // down.shape[0]
    exchanged = scattered(t, narrow, tokens * own) if by_row else gathered(t, narrow, tokens * rank)
    lifted = matmul_weight(t, t.scale(exchanged), *up)
    total = t.cast(t.add(out, lifted), out.dtype)
    t.touch(given, narrow, exchanged, x)
    return total


def gathered(t: Tape, narrow: Tensor, numel: int) -> Tensor:
    """All columns of what A gives (``lora_a_output_hook``); in backward the ranks' gradients are added up."""
    out = t.tensor(numel, narrow.dtype)
    size = out.storage.num_bytes
    t.record(
        OperationKind.ALL_GATHER, (narrow,), (out,), gradients=(Gradient.VIEW,),
        forward_scratch_bytes=(size, RESULT), backward_scratch_bytes=(size, RESULT),
    )  # fmt: skip
    return out


def scattered(t: Tape, narrow: Tensor, numel: int) -> Tensor:
    """A rank's columns of the sum of what all ranks' shares of A give: a partial sum cannot be multiplied by a
    share of B (torch 2.13, torch/distributed/tensor/_ops/_matrix_ops.py, ``mm_strategy``)."""
    size = narrow.storage.num_bytes
    out = t.tensor(numel, narrow.dtype)
    t.record(
        OperationKind.REDUCE_SCATTER, (narrow,), (out,), gradients=(Gradient.VIEW,),
        forward_scratch_bytes=(size, RESULT), backward_scratch_bytes=(size, RESULT),
    )  # fmt: skip
    return out
