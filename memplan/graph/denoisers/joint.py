"""Layers of two streams that attend to both, and of one row of both (SD3's and FLUX's blocks)."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.denoisers.attention import joint_attention, project, self_attention
from memplan.graph.denoisers.modulation import modulated, modulations, plain_norm
from memplan.graph.denoisers.state import Denoising
from memplan.graph.operations.activations import activation
from memplan.graph.operations.products import linear
from memplan.model.denoisers import HeadNorm, JointLayerBody, SingleLayerBody
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock


def joint_layer(t: Tape, x: Tensor, body: JointLayerBody, d: Denoising) -> Tensor:
    """``JointTransformerBlock`` (models/attention.py) and ``FluxTransformerBlock``."""
    size, prompt = body.size, d.prompt
    assert prompt is not None
    parts = modulations(t, d, "norm1", size, 9 if body.dual else 6)
    shift, scale, gate, shift_network, scale_network, gate_network = parts[:6]
    normed = plain_norm(t, x, size)
    own = modulated(t, normed, scale, shift)
    again = modulated(t, normed, parts[7], parts[6]) if body.dual else None
    others = modulations(t, d, "norm1_context", size, 2 if body.last else 6)
    by = (others[0], others[1]) if body.last else (others[1], others[0])
    given = modulated(t, plain_norm(t, prompt, size), *by)
    found, found_of_prompt = joint_attention(
        t, d, own, given, size, body.num_heads, body.head_norm,
        prompt_first=body.prompt_first, rotary=body.rotary, last=body.last,
    )  # fmt: skip
    x = t.add(x, _gated(t, gate, found))
    if again is not None:
        second = self_attention(t, d, again, "attn2", size, body.num_heads, body.head_norm)
        second = project(t, second, "attn2.to_out.0", size)
        x = t.add(x, _gated(t, parts[8], second))
        t.linger(again)
    t.block = LayerBlock.NETWORK
    x = _fed(t, x, own, "ff", body, (scale_network, shift_network, gate_network))
    d.prompt = None
    t.touch(given)
    if found_of_prompt is not None:
        prompt = t.add(prompt, _gated(t, others[2], found_of_prompt))
        d.prompt = _fed(t, prompt, given, "ff_context", body, (others[4], others[3], others[5]))
    return x


def _fed(
    t: Tape,
    x: Tensor,
    before: Tensor,
    module: str,
    body: JointLayerBody,
    by: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """A stream through its network; the variable that is normed into holds what attention read until then."""
    scale, shift, gate = by
    normed = plain_norm(t, x, body.size)
    t.touch(before)
    normed = modulated(t, normed, scale, shift)
    t.linger(normed)
    return t.add(x, _gated(t, gate, network(t, normed, module, body.size, body.inner_size)))


def _gated(t: Tape, gate: Tensor, x: Tensor) -> Tensor:
    """``x = gate * x``: the layer's variable holds it to the end."""
    product = t.mul(gate, x)
    t.linger(product)
    return product


def network(t: Tape, x: Tensor, module: str, size: int, inner: int) -> Tensor:
    """``FeedForward`` with GELU's tanh form."""
    raised = linear(t, x, f"{module}.net.0.proj", size, inner, bias=True)
    active = activation(t, raised, Activation.GELU_TANH)
    t.touch(raised)
    out = linear(t, active, f"{module}.net.2", inner, size, bias=True)
    t.touch(x)
    return out


def single_layer(t: Tape, x: Tensor, body: SingleLayerBody, d: Denoising) -> Tensor:
    """``FluxSingleTransformerBlock``: what it returns is one row, which the next one cuts and joins."""
    size = body.size
    if d.prompt is not None:
        row = _joined(t, d.prompt, x)
        d.prompt = None
    else:
        row = t.concatenate(*cut_row(t, x, size, d))
    shift, scale, gate = modulations(t, d, "norm", size, 3)
    normed = modulated(t, plain_norm(t, row, size), scale, shift)
    t.block = LayerBlock.NETWORK
    raised = linear(t, normed, "proj_mlp", size, body.inner_size, bias=True)
    active = activation(t, raised, Activation.GELU_TANH)
    found = self_attention(t, d, normed, "attn", size, body.num_heads, HeadNorm.KERNEL, rotary=True)
    t.block = LayerBlock.NETWORK
    both = t.concatenate(found, active)
    out = t.mul(gate, linear(t, both, "proj_out", size + body.inner_size, size, bias=True))
    total = t.add(row, out)
    t.touch(normed, found, active)
    return total


def _joined(t: Tape, prompt: Tensor, x: Tensor) -> Tensor:
    """Both streams as one row. Their gradients are two views of the row's, which outlive this segment
    together; here each is a tensor of its own, as large together."""
    row = t.tensor(prompt.numel + x.numel, x.dtype)
    t.record(OperationKind.CAT, (prompt, x), (row,), gradients=(Gradient.FRESH, Gradient.FRESH))
    return row


def cut_row(t: Tape, row: Tensor, size: int, d: Denoising) -> tuple[Tensor, Tensor]:
    """The prompt's part of a row, and the picture's."""
    prompt = d.batch * d.prompt_tokens * size
    return t.slice(row, prompt), t.slice(row, row.numel - prompt)
