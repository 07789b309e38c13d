"""Layers that diffusion transformers share: networks, times, norms that a time modulates.

(diffusers 0.42: models/attention.py, models/embeddings.py, models/normalization.py)
"""

from collections.abc import Sequence

from memplan.classes.denoising.base import ModuleList, Sample, chunked
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import ActivationModule, Linear, Norm, layer_norm
from memplan.graph.modules.functional import activated
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.run import Run
from memplan.model.networks import Activation
from memplan.model.norms import NormKind
from memplan.model.parameters import LayerBlock, WeightRole

WAVES = 256
"""Sines and cosines of a time (SD3, FLUX)."""
NETWORK_RATIO = 4
"""A network's width, in widths of the layer, where the config says nothing (``FeedForward``)."""


class Projected(Module):
    """``GELU``: a linear layer and the activation behind it."""

    def __init__(self, size: int, inner: int, kind: Activation) -> None:
        self.proj = Linear(size, inner, bias=True)
        self.kind = kind

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.proj(hidden_states)
        hidden_states = activated(hidden_states, self.kind)
        return hidden_states


class FeedForward(Module):
    """``FeedForward``, with GELU's tanh form where nothing else is said."""

    block = LayerBlock.NETWORK

    def __init__(
        self,
        size: int,
        inner: int = 0,
        outputs: int = 0,
        kind: Activation = Activation.GELU_TANH,
    ) -> None:
        inner = inner or NETWORK_RATIO * size
        last = Linear(inner, outputs or size, bias=True)
        self.net = ModuleList({0: Projected(size, inner, kind), 2: last})

    def forward(self, hidden_states: Handle) -> Handle:
        for module in self.net.children.values():
            hidden_states = module(hidden_states)
        return hidden_states


class Perceptron(Module):
    """``TimestepEmbedding`` and ``PixArtAlphaTextProjection``: two linear layers."""

    def __init__(
        self, inputs: int, size: int, *, kind: Activation = Activation.SILU, outputs: int = 0
    ) -> None:
        self.linear_1 = Linear(inputs, size, bias=True)
        self.act = ActivationModule(kind)
        self.linear_2 = Linear(size, outputs or size, bias=True)

    def forward(self, sample: Handle) -> Handle:
        sample = self.linear_1(sample)
        sample = self.act(sample)
        sample = self.linear_2(sample)
        return sample


def waves(run: Run, shape: tuple[int, ...], dtype: DType) -> Handle:
    """``Timesteps``: sines and cosines of a number of each sample, in fp32, cast."""
    return made_by(run, OperationKind.CAT, shape, DType.FP32).to(dtype)


class TimeTextEmbedding(Module):
    """``CombinedTimestep…Embeddings``: vectors of the times, a guidance, the pooled prompt, added up."""

    def __init__(
        self, size: int, *, parts: Sequence[str] = ("timestep_embedder",), pooled: int = 0
    ) -> None:
        self.parts, self.pooled = tuple(parts), pooled
        for each in parts:
            setattr(self, each, Perceptron(WAVES, size))
        if pooled:
            self.text_embedder = Perceptron(pooled, size)

    def forward(self, sample: Sample) -> Handle:
        conditioning: Handle | None = None
        for each in self.parts:
            given = waves(self.run, (sample.batch, WAVES), sample.dtype)
            embedded = self.children[each](given)
            conditioning = embedded if conditioning is None else conditioning + embedded
            del embedded, given
        assert conditioning is not None
        if self.pooled:
            conditioning = conditioning + self.text_embedder(sample.take(sample.batch, self.pooled))
        return conditioning


def modulated(x: Handle, scale: Handle, shift: Handle) -> Handle:
    """``x * (1 + scale[:, None]) + shift[:, None]``, of what has a name."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class BareNorm(Module):
    """``torch.nn.LayerNorm`` without weights."""

    def forward(self, x: Handle) -> Handle:
        """One kernel."""
        return layer_norm(x, x.shape[-1])


class FP32LayerNorm(Norm):
    """A layer norm of fp32 copies, cast back, with weights or without."""

    kind = NormKind.LAYER

    def __init__(self, width: int, *, affine: bool = True) -> None:
        if affine:
            self.weight = Weight(width, role=WeightRole.NORM)
            self.bias = Weight(width, role=WeightRole.NORM)

    def forward(self, inputs: Handle) -> Handle:
        """One kernel between casts."""
        dtype = inputs.dtype
        weights = [self.operand(each, DType.FP32) for each in self.weights.values()]
        given = tuple(each.record for each in weights)
        return layer_norm(inputs.float(), inputs.shape[-1], given).to(dtype)


class Modulated(Module):
    """What an ``AdaLayerNorm…`` has: a linear layer on the time's vector, and a norm."""

    parts = 6
    """Vectors that it makes."""

    def __init__(self, size: int, *, condition: int = 0, norm: Module | None = None) -> None:
        self.silu = ActivationModule(Activation.SILU)
        self.linear = Linear(condition or size, self.parts * size, bias=True)
        self.norm = norm or BareNorm()

    def vectors(self, emb: Handle) -> list[Handle]:
        """The vectors, each of the layers' width."""
        emb = self.linear(self.silu(emb))
        return chunked(emb, self.parts)


class AdaLayerNormZero(Modulated):
    """Of one stream: the gate of attention, then shift, scale and gate of the network."""

    def forward(self, x: Handle, emb: Handle) -> tuple[Handle, ...]:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.vectors(emb)
        x = self.norm(x) * (1 + scale_msa.unsqueeze(1)) + shift_msa.unsqueeze(1)
        return x, gate_msa, shift_mlp, scale_mlp, gate_mlp


class AdaLayerNormContinuous(Modulated):
    """Of what the layers gave: a scale and a shift."""

    parts = 2

    def forward(self, x: Handle, emb: Handle) -> Handle:
        scale, shift = self.vectors(emb)
        return self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def cut_row(row: Handle, first: int) -> tuple[Handle, Handle]:
    """The first tokens of a row, and those behind them."""
    return row.narrow(first, dim=1), row.narrow(row.shape[1] - first, dim=1)
