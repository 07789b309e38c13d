"""Griffin's recurrent block, token by token, as transformers 5.23 trains it (``RecurrentGemma``).

A loop in Python makes one state after another in fp32. The module keeps the last one, and with it the
graph that made it, until it is called again: without checkpointing backward has emptied that graph by
then, but of a checkpointed layer it is the second run's, which nothing else would have kept.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.modules.iteration import Turns
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import written
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.mixers import GatedRecurrenceSpec
from memplan.model.parameters import WeightRole


def recurrent_block(t: Tape, x: Tensor, spec: GatedRecurrenceSpec, context: StackContext) -> Tensor:
    """A branch through a nonlinearity, times one through a convolution and the recurrence."""
    hidden, width = context.hidden_size, spec.width
    name = "recurrent_mixer"
    beside = linear(t, x, f"{name}.linear_y", hidden, width, bias=True)
    beside = activation(t, beside, spec.activation)
    entering = linear(t, x, f"{name}.linear_x", hidden, width, bias=True)
    convolved = _convolved(t, turned(t, entering, context.batch), f"{name}.conv_1d", spec, context)
    t.touch(entering)
    states = _recurrence(t, convolved, f"{name}.rg_lru", spec, context)
    product = t.mul(states, beside)
    t.touch(states, beside)
    rows = product if context.batch == 1 else t.contiguous(product)
    out = linear(t, rows, f"{name}.linear_out", width, hidden, bias=True)
    t.touch(product)
    return out


def _convolved(
    t: Tape, x: Tensor, name: str, spec: GatedRecurrenceSpec, context: StackContext
) -> Tensor:
    """A padded convolution, cut to the tokens that there are.

    Its input lies token by token: the kernels copy it, forward and backward.
    """
    weight = t.parameter(f"{name}.weight", spec.width, 1, spec.kernel)
    bias = t.parameter(f"{name}.bias", spec.width)
    addend, factor = t.cast_weight(bias), t.cast_weight(weight)
    read = x if t.autocast is None else t.cast(x, t.autocast)
    longer = x.numel + context.batch * spec.width * (spec.kernel - 1)
    out = t.tensor(longer, read.dtype)
    is_copied = context.seq_len > 1 and not t.decomposed
    copy = allocated_bytes(read.numel, read.dtype)
    again = (copy, *(RESULT,) * sum(each.requires_grad for each in (read, factor, addend)))
    t.record(
        OperationKind.CONVOLUTION, (read, factor, addend), (out,), saves=(read, factor),
        gradients=(Gradient.FRESH,) * 3, flops=2 * longer * spec.kernel,
        forward_scratch_bytes=(copy, RESULT) if is_copied else (),
        backward_scratch_bytes=again if is_copied else (),
    )  # fmt: skip
    return t.slice(out, x.numel)


def _recurrence(
    t: Tape, x: Tensor, name: str, spec: GatedRecurrenceSpec, context: StackContext
) -> Tensor:
    """``RecurrentGemmaRglru``: gates of each block of channels, then the scan."""
    tokens = context.seq_len
    first = t.tensor(tokens, DType.BOOL)
    t.record(OperationKind.EQ, (), (first,))
    rows = x if context.batch == 1 else t.contiguous(x)
    entry, made = _gate(t, rows, f"{name}.input_gate", spec, None)
    fading, made = _gate(t, rows, f"{name}.recurrent_gate", spec, made)
    rate = t.parameter(f"{name}.recurrent_param", spec.width, role=WeightRole.OTHER)
    logarithm = t.mul(t.scale(fading), _softplus(t, rate))
    decay = t.elementwise(OperationKind.EXP, logarithm)
    squared = t.elementwise(OperationKind.EXP, t.scale(logarithm))
    gated = t.mul(x, entry)
    root = _bounded_root(t, t.scale(squared, OperationKind.NEG))
    factor = t.shift(_where_not(t, root, first))
    t.touch(root)
    narrow = t.cast(factor, x.dtype)
    states = t.mul(gated, narrow)
    t.touch(narrow)
    out = _scan(t, states, _where_not(t, decay, first), context)
    t.touch(states, first, made, logarithm, factor)
    return out


def _gate(
    t: Tape, rows: Tensor, name: str, spec: GatedRecurrenceSpec, held: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A sigmoid of each block's product, laid out token by token; and that product, which a name holds."""
    block = spec.width // spec.num_heads
    weight = t.parameter(f"{name}_weight", spec.num_heads, block, block)
    bias = t.parameter(f"{name}_bias", spec.num_heads, block, role=WeightRole.OTHER)
    factor, read = t.cast_weight(weight), rows
    addend: Tensor = bias
    if t.autocast is not None:
        read, addend = t.cast(rows, t.autocast), t.cast(bias, t.autocast)
    out = t.tensor(rows.numel, read.dtype)
    t.record(
        OperationKind.BADDBMM, (addend, read, factor), (out,), saves=(read, factor),
        gradients=(Gradient.SUMMED, Gradient.FRESH, Gradient.FRESH),
        flops=2 * rows.numel * block,
    )  # fmt: skip
    if held is not None:
        t.touch(held)
    laid = t.contiguous(out)
    return t.elementwise(OperationKind.SIGMOID, laid), out


def _softplus(t: Tape, x: Tensor) -> Tensor:
    given = x if t.autocast is None else t.cast(x, DType.FP32)
    return t.elementwise(OperationKind.SOFTPLUS, given)


def _bounded_root(t: Tape, x: Tensor) -> Tensor:
    """``SqrtBoundDerivative``: keeps what it is given; in backward a name holds it fourfold and clipped."""
    out = t.tensor(x.numel, x.dtype)
    size = out.storage.num_bytes
    t.record(
        OperationKind.SQRT, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,), in_python=True,
        backward_scratch_bytes=(size, size, ~0, size, RESULT),
    )  # fmt: skip
    return out


def _where_not(t: Tape, x: Tensor, first: Tensor) -> Tensor:
    """Times the opposite of a mask of first tokens."""
    other = t.tensor(first.numel, DType.BOOL)
    t.record(OperationKind.BITWISE_NOT, (first,), (other,))
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.MUL, (x, other), (out,), saves=(other,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _scan(t: Tape, states: Tensor, decay: Tensor, context: StackContext) -> Tensor:
    """``_rnn_scan``: one fp32 state after another, each written into its token's row."""
    size = states.numel // context.seq_len
    state = t.tensor(size, DType.FP32)
    t.record(OperationKind.ZEROS, (), (state,))
    out = t.tensor(states.numel, states.dtype)
    t.record(OperationKind.ZEROS, (), (out,))
    turns = Turns(t, context.seq_len)
    for _ in turns:
        fading = t.cast(t.slice(decay, size), DType.FP32)
        kept = t.mul(fading, state)
        own = t.cast(t.slice(states, size), DType.FP32)
        following = t.add(kept, own)
        t.touch(own, kept, state)
        state = following
        out = written(t, out, t.cast(state, states.dtype))
    turns.close()
    t.hold_buffer(allocated_bytes(size, DType.FP32), "last states that modules keep")
    if t.segment.checkpointed:
        t.hold_graph(state)
    t.touch(decay)
    return out


def turned(t: Tape, x: Tensor, batch: int) -> Tensor:
    """A view with the channels before the tokens.

    The gradient of more than one sequence is copied back into rows.
    """
    if batch == 1:
        return x
    out = t.view(x, x.numel)
    t.record(OperationKind.TRANSPOSE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out
