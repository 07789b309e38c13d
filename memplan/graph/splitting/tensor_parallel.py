"""What DTensor does where a split block begins and ends: its collectives, as operations of the tape.

torch 2.13, torch/distributed/tensor: ``parallel/style.py`` (``ColwiseParallel``, ``RowwiseParallel``,
``SequenceParallel``, ``PrepareModuleInput``), ``parallel/loss.py`` and ``placement_types.py``. Sizes that
the model's own specs give are a rank's already (``memplan.graph.splitting.local_model``).

A gradient that a collective makes is a tensor subclass that autograd never adds to in place.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.splits import Split
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.model.parameters import WeightRole
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.splitting.parallelism import TensorParallel
from memplan.units import ceil_div


def split_product(
    t: Tape,
    group: TensorParallel,
    x: Tensor,
    split: Split,
    num_outputs: int,
    product: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """A product of which a rank has its share, with the collectives before and behind it.

    ``product`` is of the input and the number of outputs, which of a vocabulary is whole here.
    """
    declared = len(t.segment.parameters)
    by_row = split in (Split.ROW, Split.ROW_CUT, Split.ROW_PARTIAL)
    if split is Split.VOCABULARY:
        x = gather_sequence(t, group, x)
    whole = num_outputs
    if split in (Split.VOCABULARY, Split.COLUMN_JOINED):
        num_outputs = ceil_div(whole, group.degree)
    if split is Split.ROW and t.options.fp8 is not Fp8Recipe.NONE:
        from memplan.graph.fp8 import narrowed, narrows  # only then

        x = narrowed(t, x) if narrows(t) else x
    if split is Split.ROW_CUT:
        x = cut_columns(t, group, x)
    elif not by_row:
        x = copied_to_ranks(t, group, x)
    out = product(x, num_outputs)
    for weight in t.segment.parameters[declared:]:
        # A row's bias is the same on all: it is added once.
        weight.ranks = 1 if by_row and len(weight.shape) == 1 else group.degree
        weight.is_distributed = True
        is_uneven = num_outputs * group.degree != whole and split is Split.VOCABULARY
        if is_uneven and weight.shape[0] == num_outputs:
            weight.whole_numel = weight.numel // num_outputs * whole
    if split is Split.ROW_PARTIAL:
        return out
    if by_row:
        return add_up(t, group, out)
    stays = split is Split.COLUMN or (split is Split.VOCABULARY and group.loss)
    return out if stays else join_columns(t, group, out, out.numel // num_outputs * whole)


def gather_sequence(t: Tape, group: TensorParallel, x: Tensor) -> Tensor:
    """All of the sequences of which each rank has a share (``Shard(1)`` to ``Replicate``).

    In backward the ranks' gradients are added up and each keeps its share: what ``reduce_scatter`` sends
    is a copy whose pieces lie one after another. ``all_gather`` gives such pieces too, which are rows
    in order for one sequence only.
    """
    if not group.sequence:
        return x
    out = t.tensor(x.numel * group.degree, x.dtype)
    out.storage.num_bytes = joined = x.storage.num_bytes * group.degree  # codes stay codes
    size = allocated_bytes(out.numel, out.dtype)
    t.record(
        OperationKind.ALL_GATHER, (x,), (out,), gradients=(Gradient.VIEW,),
        forward_scratch_bytes=_joined(t, joined), backward_scratch_bytes=(size, RESULT),
    )  # fmt: skip
    return out


def copied_to_ranks(t: Tape, group: TensorParallel, x: Tensor) -> Tensor:
    """The same on every rank, read by its columns: what each makes of its gradient is added up.

    Each split layer that is given a plain tensor does so for itself; where sequences were gathered, the
    gather's own backward pass does it once for all that read them.
    """
    if group.sequence:
        return x
    out = t.view(x, x.numel)
    out.is_flat, out.by_head = x.is_flat, x.by_head
    t.record(OperationKind.COPY_TO_RANKS, (x,), (out,), gradients=(Gradient.VIEW,))
    return out


def add_up(t: Tape, group: TensorParallel, x: Tensor) -> Tensor:
    """The ranks' partial results added up: whole on each, or its share of the sequences."""
    if not group.sequence:
        out = t.tensor(x.numel, x.dtype)
        t.record(OperationKind.ALL_REDUCE, (x,), (out,), gradients=(Gradient.ALIAS,))
        return out
    out = t.tensor(x.numel // group.degree, x.dtype)
    size = x.storage.num_bytes
    t.record(
        OperationKind.REDUCE_SCATTER, (x,), (out,), gradients=(Gradient.VIEW,),
        forward_scratch_bytes=(size, RESULT), backward_scratch_bytes=_joined(t, size),
    )  # fmt: skip
    return out


def join_columns(t: Tape, group: TensorParallel, x: Tensor, whole: int) -> Tensor:
    """Each rank's columns side by side; in backward a rank copies its own out of the gradient.

    Where the last rank has fewer, what it lacks is padded, joined too, and cut off in one more copy.
    """
    out = t.tensor(whole, x.dtype)
    joined = allocated_bytes(x.numel * group.degree, x.dtype)
    padded = (joined, joined, ~0, RESULT) if whole != x.numel * group.degree else (joined, RESULT)
    t.record(
        OperationKind.ALL_GATHER, (x,), (out,), gradients=(Gradient.VIEW,),
        forward_scratch_bytes=padded,
    )  # fmt: skip
    return out


def cut_columns(t: Tape, group: TensorParallel, x: Tensor) -> Tensor:
    """A rank's own columns of what all have, copied out; in backward the ranks' gradients are joined."""
    out = t.tensor(x.numel // group.degree, x.dtype)
    t.record(
        OperationKind.COPY_SLICE, (x,), (out,), gradients=(Gradient.VIEW,),
        backward_scratch_bytes=(x.storage.num_bytes, RESULT),
    )  # fmt: skip
    return out


def shared_experts_input(t: Tape, x: Tensor) -> Tensor:
    """What all ranks have, handed to experts of which each has a share: its gradients are added up.

    (transformers 5.23, distributed/parallel_utils.py, ``_AllReduceBackward``: in place)
    """
    out = t.view(x, x.numel)
    t.record(OperationKind.COPY_TO_RANKS, (x,), (out,), gradients=(Gradient.ALIAS,), in_python=True)
    return out


def summed_experts_output(t: Tape, x: Tensor) -> Tensor:
    """What each rank's share of all experts gives, added up in place (``_AllReduceForward``)."""
    whole = t.view(x, x.numel)
    t.record(OperationKind.ALL_REDUCE, (x,), (whole,), gradients=(Gradient.ALIAS,), in_python=True)
    return whole


def note_parts_of_sums(t: Tape, declared: int) -> None:
    """Weights that ranks have whole, behind gathered sequences: each makes a part of their gradients."""
    for weight in t.segment.parameters[declared:]:
        if not weight.is_distributed:
            weight.added_up = weight.is_distributed = True


def _joined(t: Tape, num_bytes: int) -> tuple[int, ...]:
    """What comes from all ranks before it is laid in the order of several sequences."""
    return (num_bytes, RESULT) if t.options.batch_size > 1 else ()


def token_table(
    t: Tape, group: TensorParallel, num_rows: int, width: int, *, tied: bool
) -> Parameter:
    """A rank's rows of the token table.

    Its gradient is made whole on every rank, since the gradient of what was looked up is: the optimizer,
    or what shards it further, cuts the rank's rows out (``_ops/_embedding_ops.py``,
    ``embedding_dense_backward_strategy``). A tied one is added to the output matrix's, which is split.
    """
    own = ceil_div(num_rows, group.degree)
    table = t.parameter("embed_tokens.weight", own, width, role=WeightRole.TOKEN_TABLE)
    table.ranks = group.degree
    if own * group.degree != num_rows:
        table.whole_numel = num_rows * width
    table.is_distributed = True
    if not tied:
        table.gradient_numel = num_rows * width
    return table


def parallel_cross_entropy(t: Tape, logits: Tensor, labels: Tensor | None) -> Tensor:
    """Cross-entropy of logits that are split over the vocabulary (``loss_parallel``).

    Log-softmax and its backward pass are written out in Python (``_log_softmax``,
    ``_nll_loss_and_log_softmax_backward``): the latter makes the gradient of the logits at once.
    """
    size = logits.storage.num_bytes
    log_probabilities = t.tensor(logits.numel, logits.dtype)
    t.record(
        OperationKind.LOG_SOFTMAX, (logits,), (log_probabilities,), saves=(log_probabilities,),
        gradients=(Gradient.ALIAS,),
        # What is left of the highest; its exponential, which goes when it is summed.
        forward_scratch_bytes=(size, size, ~1, RESULT),
    )  # fmt: skip
    if log_probabilities.dtype is not DType.FP32 and t.autocast is not None:
        log_probabilities = t.cast(log_probabilities, DType.FP32)
    wide = allocated_bytes(log_probabilities.numel, log_probabilities.dtype)
    loss, total_weight = (t.tensor(1, log_probabilities.dtype) for _ in range(2))
    inputs: tuple[Tensor, ...] = (log_probabilities,)
    gradients: tuple[int, ...] = (Gradient.FRESH,)
    if labels is not None:
        inputs += (labels,)
        gradients += (Gradient.NONE,)
    t.record(
        OperationKind.NLL_LOSS, inputs, (loss, total_weight), saves=(*inputs, total_weight),
        gradients=gradients,
        # Zeros with the labels' entries, the probabilities, their sum, then the product.
        backward_scratch_bytes=(wide, wide, wide, ~1, RESULT),
    )  # fmt: skip
    t.touch(logits)
    return loss
