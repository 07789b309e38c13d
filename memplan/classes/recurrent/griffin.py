"""RecurrentGemma: Griffin's recurrent block in most layers, token by token, and local attention in the others.

A loop in Python makes one state after another in fp32. The module keeps the last one, and with it the
graph that made it, until it is called again: without checkpointing backward has emptied that graph by
then, but of a checkpointed layer it is the second run's, which nothing else would have kept.

(transformers 5.23: models/recurrent_gemma)
"""

from collections.abc import Callable, Sequence

from memplan.classes.gemma import GemmaRMSNorm
from memplan.classes.llama import (
    DecoderLayer,
    GatedMLP,
    LayerKind,
    LlamaAttention,
    LlamaModel,
    SelfAttention,
    Window,
    head_width,
)
from memplan.classes.recurrent.mamba import Mixer
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import ActivationModule, Linear, Norm, fp32_under_autocast
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.iteration import Turns
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, apply_rotary_to_part
from memplan.graph.modules.strides import dense_strides, is_contiguous
from memplan.graph.operations.elementwise import written
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole


class RecurrentGemmaAttention(LlamaAttention):
    """It makes its rotary tables itself."""

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.rotary_emb = RotaryEmbedding(int(self.head_dim * 0.5))

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("attention_bias"), True

    def forward(self, x: Handle, positions: Handle, mask: Handle | None) -> Attended:  # type: ignore[override]
        batch, length, _ = x.shape
        query, key, value = self.projected(x)
        cos, sin = self.rotary_emb(value, positions)
        query, key = apply_rotary_to_part(query, key, cos, sin)
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.project_out(out)
        return out, weights


class PaddedConv1d(Conv1d):
    """A depthwise convolution, padded at both ends, whose end is cut off again."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__(channels, channels, kernel, groups=channels)
        self.kernel = kernel

    def forward(self, x: Handle) -> Handle:
        run, (batch, channels, length) = self.run, x.shape
        bias = run.cast_weight(self.parameter(self.bias))
        weight = run.cast_weight(self.parameter(self.weight))
        if run.autocast is not None:
            x = x.to(run.autocast)
        made = empty(run, (batch, channels, length + self.kernel - 1), x.dtype)
        copied = not run.decomposed and not is_contiguous(x.shape, x.strides)
        copy = allocated_bytes(x.numel, x.dtype)
        inputs = weight, x.record, bias  # the kernel makes the weight's gradient first
        run.record(
            OperationKind.CONVOLUTION, inputs, (made.record,), saves=inputs[:2],
            gradients=(Gradient.FRESH,) * 3, flops=2 * made.numel * self.kernel,
            forward_scratch_bytes=(copy, RESULT) if copied else (),
            backward_scratch_bytes=(copy, *(RESULT,) * sum(each.requires_grad for each in inputs))
            if copied
            else (),
        )  # fmt: skip
        return x.leads_to(made, in_rows(x.shape)).narrow(length)


class RecurrentGemmaRglru(Module):
    def __init__(self, width: int, heads: int) -> None:
        block = width // heads
        self.heads, self.block_width = heads, block
        self.recurrent_param = Weight(width)
        self.input_gate_weight = Weight(heads, block, block)
        self.input_gate_bias = Weight(heads, block, role=WeightRole.OTHER)
        self.recurrent_gate_weight = Weight(heads, block, block)
        self.recurrent_gate_bias = Weight(heads, block, role=WeightRole.OTHER)

    def forward(self, activations: Handle) -> Handle:
        batch, length, width = activations.shape
        reset = made_by(self.run, OperationKind.EQ, (1, length, 1), DType.BOOL)
        reshape_act = activations.reshaped(batch * length, self.heads, self.block_width)
        reshape_act = reshape_act.permute(1, 0, 2)
        res = self.gate(self.input_gate_bias, reshape_act, self.input_gate_weight)
        input_gate = res.transpose(0, 1).reshape(batch, length, width).unary(OperationKind.SIGMOID)
        res = self.gate(self.recurrent_gate_bias, reshape_act, self.recurrent_gate_weight)
        recurrent_gate = (
            res.transpose(0, 1).reshape(batch, length, width).unary(OperationKind.SIGMOID)
        )
        log_recurrent_gate = -8.0 * recurrent_gate * self.softplus()
        recurrent_gate = log_recurrent_gate.unary(OperationKind.EXP)
        a_square = (2.0 * log_recurrent_gate).unary(OperationKind.EXP)
        gated_inputs = activations * input_gate
        multiplier = bounded_root(-a_square)
        multiplier = where_not(reset, multiplier) + 1.0
        normalized_x = gated_inputs * multiplier.to(activations.dtype)
        return self.rnn_scan(normalized_x, recurrent_gate, reset)

    def gate(self, bias: Weight, x: Handle, weight: Weight) -> Handle:
        """``torch.baddbmm(bias[:, None, :], x, weight)``."""
        run = self.run
        factor = run.cast_weight(self.parameter(weight))
        addend, read = self.operand(bias), x
        if run.autocast is not None:
            read, addend = x.to(run.autocast), addend.to(run.autocast)
        made = empty(run, x.shape, read.dtype)
        inputs = addend.record, read.record, factor
        run.record(
            OperationKind.BADDBMM, inputs, (made.record,), saves=inputs[1:],
            gradients=(Gradient.SUMMED, Gradient.FRESH, Gradient.FRESH),
            flops=2 * x.numel * self.block_width,
        )  # fmt: skip
        return read.leads_to(made, in_rows(read.shape))

    def softplus(self) -> Handle:
        """Of each channel's rate."""
        return fp32_under_autocast(self.operand(self.recurrent_param)).unary(OperationKind.SOFTPLUS)

    def rnn_scan(self, hidden_states: Handle, recurrent_gate: Handle, reset: Handle) -> Handle:
        """``_rnn_scan``: each state is written into its token's row."""
        run, (batch, length, width) = self.run, hidden_states.shape
        recurrent_gate = where_not(reset, recurrent_gate)
        states = made_by(run, OperationKind.ZEROS, (batch, width), DType.FP32)
        contextualized = made_by(run, OperationKind.ZEROS, hidden_states.shape, hidden_states.dtype)
        lies = dense_strides(
            hidden_states.shape, hidden_states.strides
        )  # as ``zeros_like`` makes it
        turns = Turns(run, length)
        for _ in turns:
            states = recurrent_gate.select(1).float() * states
            states = states + hidden_states.select(1).float()
            row = states.to(hidden_states.dtype)
            made = written(run, contextualized.record, row.record)
            contextualized = Handle(run, made, hidden_states.shape, lies)
            del row
        turns.close()
        run.hold_buffer(states.numel, DType.FP32, "last states that modules keep")
        if run.segment.checkpointed:
            run.hold_graph(states.record)
        return contextualized


def where_not(mask: Handle, x: Handle) -> Handle:
    """``~mask * x``."""
    other = mask.apart(OperationKind.BITWISE_NOT)
    made = x.run.tensor(x.numel, x.dtype)
    x.run.record(
        OperationKind.MUL, (x.record, other.record), (made,), saves=(other.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return x.like(made)


def bounded_root(x: Handle) -> Handle:
    """``SqrtBoundDerivative``: keeps what it is given; in backward a name holds it fourfold and clipped."""
    made = x.run.tensor(x.numel, x.dtype)
    size = made.storage.num_bytes
    x.run.record(
        OperationKind.SQRT, (x.record,), (made,), saves=(x.record,), gradients=(Gradient.FRESH,),
        in_python=True, backward_scratch_bytes=(size, size, ~0, size, RESULT),
    )  # fmt: skip
    return x.like(made)


class RecurrentGemmaRecurrentBlock(Mixer):
    def __init__(self, config: ConfigReader) -> None:
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        width = config.integer("lru_width", default=hidden)
        config.divide("lru_width", width, "num_attention_heads", heads)
        self.linear_y = Linear(hidden, width, bias=True)
        self.linear_x = Linear(hidden, width, bias=True)
        self.linear_out = Linear(width, hidden, bias=True)
        self.conv_1d = PaddedConv1d(width, config.integer("conv1d_width"))
        self.rg_lru = RecurrentGemmaRglru(width, heads)
        self.act_fn = ActivationModule(read_activation(config, "hidden_activation"))

    def forward(self, x: Handle, positions: Handle, mask: Handle | None) -> tuple[Handle, None]:  # noqa: ARG002
        y_branch = self.linear_y(x)
        y_branch = self.act_fn(y_branch)
        x_branch = self.linear_x(x)
        x_branch = x_branch.transpose(1, 2)
        x_branch = self.conv_1d(x_branch)
        x_branch = self.rg_lru(x_branch.transpose(1, 2))
        hidden_states = x_branch * y_branch
        hidden_states = self.linear_out(hidden_states)
        return hidden_states, None


class RecurrentGemmaMlp(GatedMLP):
    def __init__(self, config: ConfigReader) -> None:
        inner = config.integer("intermediate_size")
        super().__init__(config, config.divide("intermediate_size", inner, "halves", 2))

    def bias(self, config: ConfigReader) -> bool:  # noqa: ARG002
        return True

    def forward(self, x: Handle) -> Handle:
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class RecurrentGemmaDecoderLayer(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.temporal_pre_norm = GemmaRMSNorm(hidden)
        made = RecurrentGemmaAttention if kind.attends else None
        self.temporal_block: SelfAttention = (
            RecurrentGemmaRecurrentBlock(config) if made is None else made(config, kind)
        )
        self.channel_pre_norm = GemmaRMSNorm(hidden)
        self.mlp_block = RecurrentGemmaMlp(config)

    def forward(self, x: Handle, positions: Handle, mask: Handle | None) -> Handle:
        raw_activations = x
        inputs_normalized = self.temporal_pre_norm(raw_activations)
        x, _ = self.temporal_block(inputs_normalized, positions, mask)
        residual = x + raw_activations
        x = self.channel_pre_norm(residual)
        x = self.mlp_block(x)
        x = x + residual
        return x


class RecurrentGemmaModel(LlamaModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = RecurrentGemmaDecoderLayer
    norm_class: Callable[[int], Norm] = GemmaRMSNorm
    last = "final_norm"

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.is_capped = config.number("logits_soft_cap", maximum=1e9) > 0

    def add_rotary(self, config: ConfigReader) -> None:
        """Each attention has tables of its own."""
        head_width(config)

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        pattern = config.texts("block_types")
        if not pattern:
            error = config.fail("block_types", "names no kind of layer")
            raise error
        for each in pattern:
            config.choice("block_types", each, ("attention", "recurrent"))
        window, count = config.integer("attention_window_size"), config.layers("num_hidden_layers")
        return [
            LayerKind(window, attends=pattern[number % len(pattern)] == "attention")
            for number in range(count)
        ]

    def entered(self, embeds: Handle) -> Handle:
        return embeds * 1.0

    def tables(self, x: Handle, positions: Handle) -> dict[Window, Tables]:  # noqa: ARG002
        return dict.fromkeys(self.windows, positions)  # type: ignore[arg-type]

    def adjusted(self, logits: Handle) -> Handle:
        return (logits / 30.0).tanh() * 30.0 if self.is_capped else logits
