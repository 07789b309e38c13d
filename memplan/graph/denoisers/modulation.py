"""Norms that a sample's time scales and shifts, and gates (diffusers 0.42, models/normalization.py)."""

from memplan.dtypes import DType
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.denoisers.state import Denoising
from memplan.graph.operations.activations import activation
from memplan.graph.operations.norms import native_layer_norm
from memplan.graph.operations.products import linear
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole


def modulations(t: Tape, d: Denoising, module: str, size: int, parts: int) -> list[Tensor]:
    """A linear layer on the time's vector, cut into vectors of the layers' width."""
    condition = d.condition_of()
    active = activation(t, condition, Activation.SILU)
    width = condition.numel // d.batch
    made = linear(t, active, f"{module}.linear", width, parts * size, bias=True)
    return vectors(t, made, parts)


def vectors(t: Tape, made: Tensor, parts: int) -> list[Tensor]:
    """Parts of a projection, each a vector that is spread over the tokens: gradients are summed back."""
    found = t.split(made, *(made.numel // parts,) * parts)
    for each in found:
        each.by_column = True
    return found


def plain_norm(t: Tape, x: Tensor, size: int) -> Tensor:
    """A layer norm without weights."""
    return native_layer_norm(t, x, size, ())


def affine_norm(t: Tape, x: Tensor, module: str, size: int) -> Tensor:
    """A layer norm with its own, declared already."""
    weights = (
        t.parameter(f"{module}.weight", size, role=WeightRole.NORM),
        t.parameter(f"{module}.bias", size, role=WeightRole.NORM),
    )
    return native_layer_norm(t, x, size, weights)


def full_norm(t: Tape, x: Tensor, size: int, module: str = "") -> Tensor:
    """``FP32LayerNorm`` of what is fp32 already, its weights cast where it has any."""
    weights: tuple[Tensor, ...] = ()
    if module:
        weights = tuple(
            t.cast(t.parameter(f"{module}.{name}", size, role=WeightRole.NORM), DType.FP32)
            for name in ("weight", "bias")
        )
    return native_layer_norm(t, x, size, weights)


def modulated(t: Tape, normed: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * (1 + scale) + shift``, both broadcast over the tokens."""
    return t.add(t.mul(normed, t.shift(scale)), shift)
