"""RWKV's two mixers, as transformers 5.23 trains them without the kernel of its own.

``rwkv_linear_attention_cpu`` walks over the tokens in Python with three fp32 states a channel; every
turn keeps some fifteen small tensors.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.modules.iteration import Turn, Turns
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import written
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.mixers import ChannelMixingSpec, TimeMixingSpec
from memplan.model.networks import Activation


def time_mixing(t: Tape, x: Tensor, spec: TimeMixingSpec, context: StackContext) -> Tensor:
    """``RwkvSelfAttention``: keys, values and receptance of neighbours, and the running average."""
    hidden, width, name = context.hidden_size, spec.width, "time_mixer"
    decay = t.parameter(f"{name}.time_decay", width)
    first = t.parameter(f"{name}.time_first", width)
    shifted = _shifted(t, x)
    mixed = [
        _mixed(t, x, shifted, f"{name}.time_mix_{each}", hidden)
        for each in ("key", "value", "receptance")
    ]
    t.touch(shifted)
    key = linear(t, mixed[0], f"{name}.key", hidden, width)
    value = linear(t, mixed[1], f"{name}.value", hidden, width)
    gate = linear(t, mixed[2], f"{name}.receptance", hidden, width)
    receptance = t.elementwise(OperationKind.SIGMOID, gate)
    averaged = _running_average(t, key, value, decay, first, context)
    out = linear(t, t.mul(receptance, averaged), f"{name}.output", width, hidden)
    t.touch(x, receptance, key, value, averaged)
    return out


def channel_mixing(t: Tape, x: Tensor, spec: ChannelMixingSpec, context: StackContext) -> Tensor:
    """``RwkvFeedForward``: a squared ReLU of neighbours, times a receptance."""
    hidden = context.hidden_size
    inner = spec.intermediate_size
    shifted = _shifted(t, x)
    key = _mixed(t, x, shifted, "mlp.time_mix_key", hidden)
    receptance = _mixed(t, x, shifted, "mlp.time_mix_receptance", hidden)
    up = linear(t, key, "mlp.key", hidden, inner)
    squared = activation(t, up, Activation.RELU_SQUARED)
    value = linear(t, squared, "mlp.value", inner, hidden)
    gate = linear(t, receptance, "mlp.receptance", hidden, hidden)
    open_share = t.elementwise(OperationKind.SIGMOID, gate)
    out = t.mul(open_share, value)
    t.touch(x, shifted, squared, value, open_share)
    return out


def _shifted(t: Tape, x: Tensor) -> Tensor:
    """Each token's predecessor (``ZeroPad2d``)."""
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.PAD, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _mixed(t: Tape, x: Tensor, shifted: Tensor, name: str, hidden: int) -> Tensor:
    """A token and its predecessor in shares that a weight gives for each channel."""
    share = t.parameter(name, 1, 1, hidden)
    own = t.mul(x, share)
    earlier = t.mul(shifted, t.scale(share, OperationKind.NEG))
    return t.add(own, earlier)


@dataclass(slots=True)
class States:
    """The numerator, the denominator and the largest exponent so far."""

    numerator: Tensor
    denominator: Tensor
    largest: Tensor

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """All three."""
        return self.numerator, self.denominator, self.largest


def _running_average(
    t: Tape, key: Tensor, value: Tensor, decay: Parameter, first: Parameter, context: StackContext
) -> Tensor:
    """``rwkv_linear_attention_cpu``."""
    size = key.numel // context.seq_len
    out = t.tensor(key.numel, key.dtype)
    t.record(OperationKind.ZEROS, (), (out,))
    zeros = [t.tensor(size, DType.FP32) for _ in range(3)]
    for each in zeros:
        t.record(OperationKind.ZEROS, (), (each,))
    states = States(zeros[0], zeros[1], t.shift(zeros[2]))
    rate = t.scale(t.elementwise(OperationKind.EXP, decay), OperationKind.NEG)
    turns = Turns(t, context.seq_len)
    frame: tuple[Tensor, ...] = ()
    for turn in turns:
        token_key = t.cast(t.slice(key, size), DType.FP32)
        token_value = t.slice(value, size)
        quotient, read = _read(t, states, token_key, token_value, first)
        out = written(t, out, t.cast(quotient, key.dtype))
        t.touch(*frame)
        following, made = _following(t, states, token_key, token_value, rate, turn)
        t.touch(*states.all)
        states, frame = following, (*read, *made, token_key)
    turns.close()
    t.touch(*states.all, *frame, rate)
    return out


def _read(
    t: Tape, states: States, key: Tensor, value: Tensor, first: Parameter
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The average at a token, and what variables hold of its making."""
    largest = _maximum(t, states.largest, _plus(t, key, first))
    earlier = _exponential(t, _minus(t, states.largest, largest))
    own = _exponential(t, _minus(t, _plus(t, key, first), largest))
    numerator = t.add(t.mul(earlier, states.numerator), t.mul(own, value))
    denominator = t.add(t.mul(earlier, states.denominator), own)
    quotient = t.tensor(numerator.numel, DType.FP32)
    t.record(
        OperationKind.DIV, (numerator, denominator), (quotient,), saves=(numerator, denominator),
        gradients=(Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=3 * quotient.storage.num_bytes,
    )  # fmt: skip
    return quotient, (largest, numerator, denominator)


def _following(
    t: Tape, states: States, key: Tensor, value: Tensor, rate: Tensor, turn: Turn
) -> tuple[States, tuple[Tensor, ...]]:
    """The states behind a token; those behind the last one lead to no loss."""
    if turn.is_last:
        states = States(*(_without_gradient(each) for each in states.all))
        key, value, rate = (_without_gradient(each) for each in (key, value, rate))
    largest = _maximum(t, _plus(t, states.largest, rate), key)
    earlier = _exponential(t, _minus(t, _plus(t, states.largest, rate), largest))
    own = _exponential(t, _minus(t, key, largest))
    numerator = t.add(t.mul(earlier, states.numerator), t.mul(own, value))
    denominator = t.add(t.mul(earlier, states.denominator), own)
    return States(numerator, denominator, largest), (earlier, own)


def _without_gradient(x: Tensor) -> Tensor:
    return Tensor(x.numel, x.dtype, x.storage)


def _plus(t: Tape, x: Tensor, channels: Tensor) -> Tensor:
    out = t.tensor(x.numel, DType.FP32)
    t.record(OperationKind.ADD, (x, channels), (out,), gradients=(Gradient.ALIAS, Gradient.SUMMED))
    return out


def _minus(t: Tape, left: Tensor, right: Tensor) -> Tensor:
    out = t.tensor(left.numel, DType.FP32)
    t.record(OperationKind.SUB, (left, right), (out,), gradients=(Gradient.ALIAS, Gradient.FRESH))
    return out


def _exponential(t: Tape, x: Tensor) -> Tensor:
    return t.elementwise(OperationKind.EXP, x)


def _maximum(t: Tape, left: Tensor, right: Tensor) -> Tensor:
    """Its gradient is halved where both are equal: a quotient and two comparisons on the way."""
    out = t.tensor(left.numel, DType.FP32)
    size = out.storage.num_bytes
    t.record(
        OperationKind.MAXIMUM, (left, right), (out,), saves=(left, right),
        gradients=(Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=size + allocated_bytes(out.numel, DType.BOOL),
    )  # fmt: skip
    return out
