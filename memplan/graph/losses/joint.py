"""Heads of jobs beside plain language modelling: log-probabilities, divergences, values, and their losses.

What another model says is not computed here: a segment of its own, ``loss``, comes after the head, and
before it the passes of other models run (``Tape.joined_at``).

References
----------
.. [1] TRL 1.16, ``trainer/utils.py`` (``selective_log_softmax``, ``entropy_from_logits``),
   ``kernels/chunked_logprob.py``, ``experimental/gkd/gkd_trainer.py`` (``generalized_jsd_loss``),
   ``experimental/cpo/cpo_trainer.py`` (``concatenated_forward``).
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.losses.tasks import trl_scratch
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.products import linear
from memplan.model.parameters import ModelPart, WeightRole
from memplan.model.spec import ModelSpec
from memplan.training.compilation import Compilation
from memplan.training.objectives import LogProbabilities, Objective

ENTROPY_ROWS = 128
"""Rows of logits of which the entropy is computed at once (``entropy_from_logits``)."""
TOKEN_STATISTICS = 7
"""Numbers that the fused head gathers for every token, in fp32."""


def objective_outputs(
    t: Tape, model: ModelSpec, x: Tensor, table: Parameter, project: Callable[[Tensor], Tensor]
) -> Tensor:
    """What a head gives for the objective: sums, log-probabilities, logits or values.

    ``project`` makes logits of hidden states.
    """
    objective = t.options.objective
    if objective is Objective.VALUES:
        return _values(t, linear(t, x, "score", model.hidden_size, 1))
    x, rows = _kept_rows(t, x, table.shape[-1])
    if objective in (Objective.LOGITS, Objective.LAST_LOGITS):
        return project(x)
    if t.options.log_probabilities is LogProbabilities.FUSED and objective in _FUSED:
        weight = _output_weight(t, model, table)
        t.compiled_before = t.segment.index
        return _ended(t, fused_log_probabilities(t, x, weight, rows))
    logits = project(x)
    if t.options.log_probabilities is LogProbabilities.WHOLE:
        logits = t.cast(logits, DType.FP32)
    if objective is not Objective.DIVERGENCE or t.options.compile is Compilation.MODEL:
        _return(t, logits)
    if objective is Objective.DIVERGENCE:
        t.hold(logits)
        return logits
    likelihood = None
    if objective is Objective.LIKELIHOOD_AND_PREFERENCE and t.options.ends_in_loss:
        likelihood = _chosen_likelihood(t, logits, rows, model.num_outputs)
    each = log_probabilities(t, logits, rows, model.num_outputs)
    if t.options.ends_in_loss:
        # The caller's variable, until the loss is there.
        t.hold(logits)
    else:
        t.touch(logits)
    out = _ended(t, each)
    return out if likelihood is None else t.add(t.mean(out, out.numel), likelihood)


def _return(t: Tape, x: Tensor) -> None:
    """The model returns: what follows is the trainer's own, in which torch.compile's graph has no part.

    Without gradients nothing keeps its last hidden states then.
    """
    t.end(x)
    t.begin("log_probabilities", part=ModelPart.HEAD, x=x)
    t.returned_at = t.segment.index
    if t.options.compile is Compilation.MODEL and not t.options.without_gradients:
        t.loss_apart = True
        t.compiled_before = t.segment.index


_FUSED = frozenset({Objective.PREFERENCE, Objective.POLICY_GRADIENT})


def _ended(t: Tape, each: Tensor) -> Tensor:
    """Tokens' log-probabilities summed up by sequence, or as they are."""
    if t.options.objective is Objective.POLICY_GRADIENT:
        return each
    return t.mean(each, each.numel // t.options.batch_size)


def _kept_rows(t: Tape, x: Tensor, width: int) -> tuple[Tensor, int]:
    """The hidden states that have logits, and how many of each sequence."""
    kept = t.options.kept_logits
    if t.options.objective is Objective.LAST_LOGITS:
        rows = 1
    elif kept is None or kept >= t.options.seq_len:
        return x, t.options.seq_len
    else:
        rows = kept + 1
    return t.slice(x, t.options.batch_size * rows * width), rows


def log_probabilities(t: Tape, logits: Tensor, rows: int, vocab_size: int) -> Tensor:
    """``selective_log_softmax`` of all tokens but each sequence's last [1]_.

    Half precision goes by log-softmax, which stays; fp32 by the sum of exponentials, which keeps the
    logits themselves.
    """
    if t.options.log_probabilities is LogProbabilities.IN_PLACE:
        return _in_place(t, logits, vocab_size)
    batch = t.options.batch_size
    numel = max(rows - 1, 1) * vocab_size
    cut = t.slice(logits, batch * numel)
    tokens = max(rows - 1, 1)
    if t.options.log_probabilities is LogProbabilities.WHOLE:
        picked = _gather(t, _log_softmax(t, t.scale(cut)), batch * tokens)
        t.touch(logits)
        return picked
    if logits.dtype is DType.FP32:
        picked = _gather(t, cut, batch * tokens)
        sums = [_log_sum(t, row, tokens) for row in _rows(t, cut, batch, numel)]
        total = t.concatenate(*sums)
        out = t.tensor(picked.numel, DType.FP32)
        t.record(
            OperationKind.SUB, (picked, total), (out,), gradients=(Gradient.ALIAS, Gradient.FRESH)
        )
    else:
        out = t.concatenate(*[_picked_row(t, row, tokens) for row in _rows(t, cut, batch, numel)])
    if t.options.objective is Objective.POLICY_GRADIENT:
        _entropy(t, cut, vocab_size)
    t.touch(logits)
    return out


def _in_place(t: Tape, logits: Tensor, vocab_size: int) -> Tensor:
    """flash-attn's ``CrossEntropyLoss.forward``: the logits as they are, and two fp32 numbers a row."""
    rows = logits.numel // vocab_size
    labels = t.tensor(rows, DType.INT64)
    t.record(OperationKind.SHIFT_LABELS, (), (labels,))
    out, statistic = t.tensor(rows, DType.FP32), t.tensor(rows, DType.FP32)
    t.record(
        OperationKind.CROSS_ENTROPY, (logits, labels), (out, statistic),
        saves=(logits, statistic, labels), gradients=(Gradient.SAVED, Gradient.NONE), in_python=True,
    )  # fmt: skip
    t.touch(logits)
    return out


def _rows(t: Tape, cut: Tensor, batch: int, numel: int) -> list[Tensor]:
    """Sequence by sequence: one node (``unbind``), whose backward stacks their gradients."""
    return t.split(cut, *([numel] * batch))


def _picked_row(t: Tape, row: Tensor, tokens: int) -> Tensor:
    """A sequence's log-softmax, which autocast computes in fp32, and what is picked of it."""
    if t.autocast is not None:
        row = t.cast(row, DType.FP32)
    out = t.tensor(row.numel, row.dtype)
    t.record(OperationKind.LOG_SOFTMAX, (row,), (out,), saves=(out,), gradients=(Gradient.FRESH,))
    return _gather(t, out, tokens)


def _gather(t: Tape, x: Tensor, tokens: int) -> Tensor:
    """One element of each row: its gradient is put into zeros of the whole."""
    out = t.tensor(tokens, x.dtype)
    t.record(OperationKind.GATHER, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _log_sum(t: Tape, row: Tensor, tokens: int) -> Tensor:
    """``torch.logsumexp``: keeps its input and its result; a copy of the row in either pass."""
    out = t.tensor(tokens, row.dtype)
    size = _bytes(row)
    t.record(
        OperationKind.LOGSUMEXP, (row,), (out,), saves=(row, out), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=size, backward_scratch_bytes=(size, size),
    )  # fmt: skip
    return out


def _bytes(x: Tensor) -> int:
    return allocated_bytes(x.numel, x.dtype)


def _entropy(t: Tape, cut: Tensor, vocab_size: int) -> None:
    """``entropy_from_logits`` without gradients, some rows at a time: three copies of these."""
    rows = min(ENTROPY_ROWS, cut.numel // vocab_size)
    dtype = DType.FP32 if t.autocast is not None else cut.dtype
    size = allocated_bytes(rows * vocab_size, dtype)
    out = t.tensor(cut.numel // vocab_size, dtype)
    t.record(
        OperationKind.ENTROPY, (cut,), (out,), gradients=(Gradient.NONE,),
        forward_scratch_bytes=(size, size, size),
    )  # fmt: skip
    out.requires_grad = False
    t.hold(out)


def _chosen_likelihood(t: Tape, logits: Tensor, rows: int, vocab_size: int) -> Tensor:
    """Cross-entropy of the chosen half, whose logits are copied."""
    chosen = max(t.options.batch_size // 2, 1)
    half = t.slice(logits, chosen * rows * vocab_size)
    copied = t.contiguous(t.slice(half, chosen * max(rows - 1, 1) * vocab_size))
    return cross_entropy(t, copied)


def _output_weight(t: Tape, model: ModelSpec, table: Parameter) -> Parameter:
    if model.head.tied:
        return table
    return t.parameter("lm_head.weight", model.num_outputs, table.shape[-1], role=WeightRole.OUTPUT)


def fused_log_probabilities(t: Tape, x: Tensor, weight: Parameter, rows: int) -> Tensor:
    """TRL's ``ChunkedLogProbFunction``: hidden states and weight are kept, gradients are fp32 [1]_."""
    vocab_size, width = weight.shape
    tokens = t.options.batch_size * max(rows - 1, 1)
    picked = t.tensor(tokens * width, x.dtype)
    t.record(
        OperationKind.INDEX, (t.slice(x, tokens * width),), (picked,), gradients=(Gradient.FRESH,)
    )
    forward, backward = trl_scratch(picked, weight, t.autocast or x.dtype, tokens)
    each = allocated_bytes(tokens, DType.FP32)
    out = t.tensor(tokens, DType.FP32)
    t.record(
        OperationKind.FUSED_LOG_PROBABILITIES, (picked, weight), (out,), saves=(picked, weight, out),
        gradients=(Gradient.FRESH, Gradient.FRESH),
        forward_scratch_bytes=(*[each] * TOKEN_STATISTICS, *forward),
        backward_scratch_bytes=backward, flops=2 * picked.numel * vocab_size,
    )  # fmt: skip
    return out


def _values(t: Tape, values: Tensor) -> Tensor:
    """The squared error of every token's value."""
    if t.options.without_gradients:
        return values
    return t.mean(t.square(t.cast(values, DType.FP32)), values.numel)


def joint_loss(t: Tape, x: Tensor, vocab_size: int) -> None:
    """The loss, once other models' passes have run."""
    t.begin("loss", part=ModelPart.HEAD, x=x)
    t.joined_at = t.segment.index
    if t.returned_at is None:
        t.returned_at = t.segment.index
    if t.options.objective is Objective.DIVERGENCE:
        loss = divergence(t, x, vocab_size)
    else:
        margin = t.scale(x)
        out = t.tensor(margin.numel, margin.dtype)
        t.record(
            OperationKind.LOG_SIGMOID, (margin,), (out,), saves=(margin,),
            gradients=(Gradient.FRESH,),
        )  # fmt: skip
        loss = t.mean(out, out.numel)
    for segment in t.segments:
        if segment.part is not ModelPart.HEAD:
            continue
        for operation in segment.operations:
            for tensor in operation.outputs:
                if tensor.storage.held and tensor.storage not in t.segment.releases:
                    t.release(tensor)
    t.end(loss)


def divergence(t: Tape, logits: Tensor, vocab_size: int) -> Tensor:
    """``generalized_jsd_loss`` with its default interpolation of one half [1]_.

    Both models' logits and log-probabilities are variables until it returns.
    """
    teacher = t.tensor(logits.numel, logits.dtype)
    t.record(OperationKind.GIVEN, (), (teacher,))
    numel = logits.numel - t.options.batch_size * vocab_size
    student = t.scale(t.slice(logits, max(numel, vocab_size)))
    told = t.scale(t.view(teacher, student.numel))
    student, told = _log_softmax(t, student), _log_softmax(t, told)
    stacked = t.concatenate(t.shift(student), t.shift(told))
    mixture = t.tensor(student.numel, student.dtype)
    copy = _bytes(stacked)
    t.record(
        OperationKind.LOGSUMEXP, (stacked,), (mixture,), saves=(stacked, mixture),
        gradients=(Gradient.FRESH,), forward_scratch_bytes=copy, backward_scratch_bytes=(copy, copy),
    )  # fmt: skip
    of_teacher = _kl(t, mixture, told)
    of_student = _kl(t, mixture, student)
    distance = t.add(t.scale(of_teacher), t.scale(of_student))
    picked = t.tensor(distance.numel, distance.dtype)
    t.record(OperationKind.INDEX, (distance,), (picked,), gradients=(Gradient.FRESH,))
    t.touch(logits, teacher, student, told, mixture, of_teacher, of_student, distance)
    return t.mean(picked, picked.numel)


def _log_softmax(t: Tape, x: Tensor) -> Tensor:
    if t.autocast is not None:
        x = t.cast(x, DType.FP32)
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.LOG_SOFTMAX, (x,), (out,), saves=(out,), gradients=(Gradient.FRESH,))
    return out


def _kl(t: Tape, given: Tensor, target: Tensor) -> Tensor:
    """``F.kl_div(given, target, log_target=True)``: ``exp(target) * (target - given)``."""
    weight = t.elementwise(OperationKind.EXP, target)
    difference = t.tensor(target.numel, target.dtype)
    t.record(
        OperationKind.SUB,
        (target, given),
        (difference,),
        gradients=(Gradient.ALIAS, Gradient.FRESH),
    )
    return t.mul(weight, difference)


def check_objective(model: ModelSpec) -> None:
    """Refuse what has no head of this kind.

    Raises ``SetupError``.
    """
    if len(model.stacks) != 1 or model.task.value != "causal-lm":
        msg = f"job: {model.name} is no decoder with a language model's head ({model.task.value})"
        raise SetupError(msg)
