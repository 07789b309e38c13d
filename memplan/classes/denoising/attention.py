"""Heads of pictures, clips and prompts, and how positions turn them.

(diffusers 0.42: models/attention_processor.py, models/embeddings.py, ``apply_rotary_emb``)
"""

from memplan.classes.denoising.base import ModuleList
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.attention import in_heads, scaled_dot_product_attention
from memplan.graph.modules.basic import Dropout, Linear, Norm
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.run import Run
from memplan.graph.operations.norms import beside_partial_sums
from memplan.model.norms import NormKind
from memplan.model.parameters import LayerBlock

Tables = tuple[Handle, Handle]
"""Cosines and sines of every position."""


class Attention(Module):
    """Projections of a stream, which each class declares in its own order."""

    block = LayerBlock.ATTENTION
    to_q: Linear
    to_k: Linear
    to_v: Linear
    to_add_out: Linear

    def __init__(self, size: int, num_heads: int) -> None:
        self.size, self.num_heads, self.head_dim = size, num_heads, size // num_heads

    def add_projections(self, *names: str, bias: bool = True) -> None:
        """Declare square ones."""
        for name in names:
            setattr(self, name, Linear(self.size, self.size, bias=bias))

    def add_output(self, dropout: float = 0.0) -> None:
        """Declare what stands behind the heads."""
        self.to_out = ModuleList({0: Linear(self.size, self.size, bias=True), 1: Dropout(dropout)})

    def projected(self, x: Handle, *names: str) -> list[Handle]:
        """A stream through some of them."""
        return [self.children[name](x) for name in names]

    def output(self, hidden_states: Handle) -> Handle:
        """Through the output matrix and the dropout behind it."""
        hidden_states = self.to_out[0](hidden_states)
        hidden_states = self.to_out[1](hidden_states)
        return hidden_states

    def normed(self, name: str, x: Handle) -> Handle:
        """Through a norm, where it is declared."""
        norm = self.children.get(name)
        made: Handle = x if norm is None else norm(x)
        return made

    def heads(self, x: Handle) -> Handle:
        """(batch, heads, tokens, width)."""
        return in_heads(x, self.head_dim)

    def apart(self, x: Handle) -> Handle:
        """(batch, tokens, heads, width)."""
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, -1, self.head_dim)


class KernelRMSNorm(Norm):
    """``torch.nn.RMSNorm``: one kernel, which autocast gives fp32 copies."""

    kind = NormKind.RMS

    def forward(self, x: Handle) -> Handle:
        """It keeps what it was given, its weight and a number for each row."""
        run = self.run
        given, weight = x, self.operand(self.weight)
        if run.autocast is not None:
            given, weight = given.float(), weight.float()
        out = run.tensor(given.numel, given.dtype)
        statistic = run.tensor(given.numel // self.weight.shape[-1], DType.FP32)
        run.record(
            OperationKind.RMS_NORM, (given.record, weight.record), (out, statistic),
            saves=(given.record, statistic, weight.record),
            gradients=(Gradient.FRESH, Gradient.FRESH),
            backward_scratch_bytes=beside_partial_sums(run, (), given.record, (weight.record,)),
        )  # fmt: skip
        return given.like(out)


class RMSNorm(Norm):
    """diffusers' own (models/normalization.py): x itself is scaled, cast to a 16-bit weight's format, and named
    anew each time."""

    kind = NormKind.RMS_T5

    def forward(self, hidden_states: Handle) -> Handle:
        """Over the last dimension."""
        variance = hidden_states.float().pow(2).mean()
        hidden_states = hidden_states * (variance + 1e-6).rsqrt()
        weight = self.parameter(self.weight)
        if weight.dtype.is_half:
            hidden_states = hidden_states.to(weight.dtype)
        hidden_states = hidden_states.like(self.run.mul(hidden_states.record, weight))
        return hidden_states


def attended(query: Handle, key: Handle, value: Handle, mask: Handle | None = None) -> Handle:
    """``scaled_dot_product_attention``, its heads beside each other: (batch, tokens, width)."""
    batch, heads, tokens, width = query.shape
    out = scaled_dot_product_attention(query, key, value, mask, 0.0, causal=False)
    return out.transpose(1, 2).reshape(batch, tokens, heads * width)


def dispatched(query: Handle, key: Handle, value: Handle) -> Handle:
    """``dispatch_attention_fn`` of (batch, tokens, heads, width), flattened: (batch, tokens, width)."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return attended(query, key, value)


def pairs_of(x: Handle) -> list[Handle]:
    """The first and the second of each pair of neighbours: views."""
    return x.view(*x.shape[:-1], -1, 2).unbind(-1)


def turned(x: Handle, tables: Tables) -> Handle:
    """``apply_rotary_emb``: ``x * cos + rotated * sin`` in fp32, cast back."""
    cos, sin = tables
    x_real, x_imag = pairs_of(x)
    x_rotated = concatenate((-x_imag).unsqueeze(-1), x_real.unsqueeze(-1)).view(*x.shape)
    return (x.float() * cos + x_rotated.float() * sin).to(x.dtype)


def made_tables(run: Run, *shape: int) -> Tables:
    """Cosines and sines of every position, in fp32."""
    cos = made_by(run, OperationKind.COS, shape, DType.FP32)
    sin = made_by(run, OperationKind.SIN, shape, DType.FP32)
    return cos, sin
