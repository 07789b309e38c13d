"""What DeepSpeed's AutoTP does where a split layer begins and ends, as operations of the tape.

deepspeed 0.19.8, module_inject/layers.py: ``LinearLayer`` (``ColumnParallel``, and for the output matrix
``GatherFromTensorParallelRegion``) and ``LinearAllreduce`` (``RowParallel``). Their collectives run in
place on what there is already; a bias is added out of place, by itself.
"""

from collections.abc import Callable

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.splits import Split
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.training.splitting.parallelism import TensorParallel


def autotp_product(
    t: Tape,
    group: TensorParallel,
    x: Tensor,
    split: Split,
    num_outputs: int,
    product: Callable[[Tensor, int], Tensor],
    add_bias: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """A product of which a rank has its share; ``product`` and ``add_bias`` are given their outputs."""
    declared = len(t.segment.parameters)
    joined = split in (Split.VOCABULARY, Split.COLUMN_JOINED)
    if joined:
        num_outputs //= group.degree
    if split is Split.ROW:
        out = _in_place(t, OperationKind.ALL_REDUCE, product(x, num_outputs))
    else:
        out = product(_in_place(t, OperationKind.COPY_TO_RANKS, x), num_outputs)
    out = add_bias(out, num_outputs)
    for weight in t.segment.parameters[declared:]:
        weight.ranks = 1 if split is Split.ROW and len(weight.shape) == 1 else group.degree
    return _gathered(t, group, out) if joined else out


def _in_place(t: Tape, kind: OperationKind, x: Tensor) -> Tensor:
    """A sum over the ranks, forward or backward, of what lies there."""
    out = t.view(x, x.numel)
    out.is_flat, out.by_head = x.is_flat, x.by_head
    t.record(kind, (x,), (out,), gradients=(Gradient.ALIAS,), in_python=True)
    return out


def _gathered(t: Tape, group: TensorParallel, x: Tensor) -> Tensor:
    """Every rank's columns in one buffer, then side by side; in backward its own are copied out."""
    out = t.tensor(x.numel * group.degree, x.dtype)
    t.record(
        OperationKind.ALL_GATHER, (x,), (out,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=(out.storage.num_bytes, RESULT), in_python=True,
    )  # fmt: skip
    return out
