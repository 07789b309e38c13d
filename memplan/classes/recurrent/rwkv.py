"""RWKV, trained without the kernel of its own: a loop over the tokens in Python with three fp32 states a channel.

Every turn keeps some fifteen small tensors.

(transformers 5.23: models/rwkv)
"""

from contextlib import nullcontext
from typing import NamedTuple

from memplan.classes.llama import Decoder, DecoderLayer, Heads, Window
from memplan.classes.recurrent.delta_rule import difference
from memplan.classes.recurrent.mamba import Mixer
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear, fp32_under_autocast
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.iteration import Turns
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.unread import UnreadGraph
from memplan.graph.operations.elementwise import written
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart, WeightRole


class RwkvKind(NamedTuple):
    """What sets a layer apart from its neighbours."""

    is_first: bool
    window: Window = None
    turned: bool = False


class TimeShift(Module):
    """``torch.nn.ZeroPad2d((0, 0, 1, -1))``: each token's predecessor."""

    def forward(self, x: Handle) -> Handle:
        """One kernel."""
        made = empty(self.run, x.shape, x.dtype)
        self.run.record(OperationKind.PAD, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
        return made


def mixed(hidden: Handle, shifted: Handle, share: Handle) -> Handle:
    """A token and its predecessor in shares that a weight gives for each channel."""
    return hidden * share + shifted * -share


class RwkvSelfAttention(Mixer):
    def __init__(self, hidden: int, width: int) -> None:
        self.time_decay = Weight(width)
        self.time_first = Weight(width)
        self.time_mix_key = Weight(1, 1, hidden)
        self.time_mix_value = Weight(1, 1, hidden)
        self.time_mix_receptance = Weight(1, 1, hidden)
        self.time_shift = TimeShift()
        self.key = Linear(hidden, width)
        self.value = Linear(hidden, width)
        self.receptance = Linear(hidden, width)
        self.output = Linear(width, hidden)

    def extract_key_value(self, hidden: Handle) -> Heads:
        shifted = self.time_shift(hidden)
        key = mixed(hidden, shifted, self.operand(self.time_mix_key))
        value = mixed(hidden, shifted, self.operand(self.time_mix_value))
        receptance = mixed(hidden, shifted, self.operand(self.time_mix_receptance))
        key = self.key(key)
        value = self.value(value)
        receptance = self.receptance(receptance).unary(OperationKind.SIGMOID)
        return receptance, key, value

    def forward(self, hidden: Handle) -> Handle:
        receptance, key, value = self.extract_key_value(hidden)
        decay, first = self.operand(self.time_decay), self.operand(self.time_first)
        rwkv = rwkv_linear_attention_cpu(decay, first, key, value)
        return self.output(receptance * rwkv)


def rwkv_linear_attention_cpu(
    time_decay: Handle, time_first: Handle, key: Handle, value: Handle
) -> Handle:
    """The average of all earlier values, by keys that fade."""
    run, (batch, length, width) = key.run, key.shape
    output = made_by(run, OperationKind.ZEROS, key.shape, key.dtype)
    num_state = made_by(run, OperationKind.ZEROS, (batch, width), DType.FP32)
    den_state = made_by(run, OperationKind.ZEROS, (batch, width), DType.FP32)
    max_state = made_by(run, OperationKind.ZEROS, (batch, width), DType.FP32) + -1e38
    time_decay = -time_decay.unary(OperationKind.EXP)
    turns, graph = Turns(run, length), UnreadGraph(run)
    for turn in turns:
        current_key = key.select(1).float()
        current_value = value.select(1)
        max_for_output = maximum(max_state, plus(current_key, time_first))
        e1 = difference(max_state, max_for_output).unary(OperationKind.EXP)
        e2 = difference(plus(current_key, time_first), max_for_output).unary(OperationKind.EXP)
        numerator = e1 * num_state + e2 * current_value
        denominator = e1 * den_state + e2
        output = write(output, quotient(numerator, denominator).to(output.dtype))
        with graph if turn.is_last else nullcontext():
            max_for_state = maximum(plus(max_state, time_decay), current_key)
            e1 = difference(plus(max_state, time_decay), max_for_state).unary(OperationKind.EXP)
            e2 = difference(current_key, max_for_state).unary(OperationKind.EXP)
            num_state = e1 * num_state + e2 * current_value
            den_state = e1 * den_state + e2
            max_state = max_for_state
    turns.close()
    return output


def write(output: Handle, part: Handle) -> Handle:
    """``output[:, i] = part``."""
    return Handle(output.run, written(output.run, output.record, part.record), output.shape)


def plus(x: Handle, channels: Handle) -> Handle:
    """A number of each channel, of whatever format, added in fp32."""
    made = x.run.tensor(x.numel, DType.FP32)
    x.run.record(
        OperationKind.ADD, (x.record, channels.record), (made,),
        gradients=(Gradient.ALIAS, Gradient.SUMMED),
    )  # fmt: skip
    return x.like(made)


def quotient(numerator: Handle, denominator: Handle) -> Handle:
    """``numerator / denominator``, whose gradient is ``-grad * ((numerator / denominator) / denominator)``."""
    run, made = numerator.run, numerator.run.tensor(numerator.numel, DType.FP32)
    inputs, each = (numerator.record, denominator.record), made.storage.num_bytes
    run.record(
        OperationKind.DIV, inputs, (made,), saves=inputs, gradients=(Gradient.FRESH,) * 2,
        backward_scratch_bytes=(each, each, each, RESULT, ~2, ~1, ~0, RESULT),
    )  # fmt: skip
    return numerator.like(made)


def maximum(left: Handle, right: Handle) -> Handle:
    """Its gradient is halved where both are equal: a quotient and two comparisons on the way."""
    run, made = left.run, left.run.tensor(left.numel, DType.FP32)
    inputs, size = (left.record, right.record), made.storage.num_bytes
    run.record(
        OperationKind.MAXIMUM, inputs, (made,), saves=inputs, gradients=(Gradient.FRESH,) * 2,
        backward_scratch_bytes=size + allocated_bytes(left.numel, DType.BOOL),
    )  # fmt: skip
    return left.like(made)


class RwkvFeedForward(Module):
    """A squared ReLU, and a receptance that its output is multiplied by."""

    def __init__(self, hidden: int, inner: int) -> None:
        self.time_mix_key = Weight(1, 1, hidden)
        self.time_mix_receptance = Weight(1, 1, hidden)
        self.time_shift = TimeShift()
        self.key = Linear(hidden, inner)
        self.receptance = Linear(hidden, hidden)
        self.value = Linear(inner, hidden)

    def forward(self, hidden: Handle) -> Handle:
        shifted = self.time_shift(hidden)
        key = mixed(hidden, shifted, self.operand(self.time_mix_key))
        receptance = mixed(hidden, shifted, self.operand(self.time_mix_receptance))
        key = fp32_under_autocast(self.key(key).unary(OperationKind.RELU)).pow(2)
        value = self.value(key)
        receptance = self.receptance(receptance).unary(OperationKind.SIGMOID)
        return receptance * value


class RwkvBlock(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: RwkvKind) -> None:
        hidden = config.integer("hidden_size")
        self.is_first = kind.is_first
        if kind.is_first:
            self.pre_ln = LayerNorm(hidden)
        self.ln1 = LayerNorm(hidden)
        self.ln2 = LayerNorm(hidden)
        width = config.integer("attention_hidden_size", default=hidden)
        self.attention = RwkvSelfAttention(hidden, width)
        inner = config.integer("intermediate_size", default=4 * hidden)
        self.feed_forward = RwkvFeedForward(hidden, inner)

    def forward(self, hidden: Handle) -> tuple[Handle, None, None]:
        if self.is_first:
            hidden = self.pre_ln(hidden)
        attention = self.attention(self.ln1(hidden))
        hidden = hidden + attention
        feed_forward = self.feed_forward(self.ln2(hidden))
        hidden = hidden + feed_forward
        return hidden, None, None


class RwkvModel(Decoder):
    prefix = "rwkv"
    table = "embeddings"
    listed = "blocks"
    last = "ln_out"
    context_keys = ("context_length", "max_position_embeddings")

    def __init__(self, config: ConfigReader) -> None:
        hidden, rows = config.integer("hidden_size"), config.integer("vocab_size")
        self.embeddings = Embedding(rows, hidden, role=WeightRole.TOKEN_TABLE)
        count = config.layers("num_hidden_layers")
        kinds = [RwkvKind(not number) for number in range(count)]
        self.blocks = LayerList("decoder.layers", kinds, lambda kind: RwkvBlock(config, kind))
        self.ln_out = LayerNorm(hidden)
        self.ln_out.segment = "decoder.norm", ModelPart.NORM

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        x = embeds
        for block in self.blocks:
            x, _state, _attentions = block(x)
        x = self.ln_out(x)
        return x
