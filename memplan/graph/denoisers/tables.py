"""Layers that a table and the time modulate (diffusers 0.42, ``BasicTransformerBlock`` of PixArt)."""

from memplan.graph.attention.head_layout import Shape, broadcast
from memplan.graph.attention.paths import attend
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.denoisers.attention import head_spec, project
from memplan.graph.denoisers.joint import network
from memplan.graph.denoisers.modulation import modulated, plain_norm, vectors
from memplan.graph.denoisers.state import Denoising
from memplan.graph.operations.elementwise import dropout
from memplan.model.denoisers import TableLayerBody
from memplan.model.parameters import LayerBlock


def table_layer(t: Tape, x: Tensor, body: TableLayerBody, d: Denoising) -> Tensor:
    """``BasicTransformerBlock`` with ``ada_norm_single``: no norm stands before the prompt."""
    size = body.size
    assert d.modulations is not None
    assert d.memory is not None
    by = t.add(t.parameter("model.scale_shift_table", 6, size), d.modulations)
    shift, scale, gate, *of_network = vectors(t, by, 6)
    normed = modulated(t, plain_norm(t, x, size), scale, shift)
    found = _attention(t, d, normed, normed, "attn1", body, None)
    gated = t.mul(gate, found)
    x = t.add(gated, x)
    t.touch(normed)
    found = _attention(t, d, x, d.memory, "attn2", body, d.mask)
    t.touch(gated)
    t.linger(found)
    total = t.add(found, x)
    t.block = LayerBlock.NETWORK
    shift, scale, gate = of_network
    again = plain_norm(t, total, size)
    t.touch(x)
    normed = modulated(t, again, scale, shift)
    t.linger(normed)
    fed = dropout(t, network(t, normed, "ff", size, body.inner_size), body.dropout)
    gated = t.mul(gate, fed)
    out = t.add(gated, total)
    t.touch(gated)
    return out


def _attention(
    t: Tape,
    d: Denoising,
    x: Tensor,
    read: Tensor,
    module: str,
    body: TableLayerBody,
    mask: Tensor | None,
) -> Tensor:
    """``AttnProcessor2_0``: what it finds is divided by one."""
    t.block = LayerBlock.ATTENTION if mask is None else LayerBlock.CROSS_ATTENTION
    size, spec = body.size, head_spec(body.size, body.num_heads)
    query = project(t, x, f"{module}.to_q", size, bias=body.bias)
    key = project(t, read, f"{module}.to_k", size, bias=body.bias)
    value = project(t, read, f"{module}.to_v", size, bias=body.bias)
    if mask is not None:
        mask = broadcast(t, mask, mask.numel * body.num_heads)
    shape = Shape(d.batch, query.numel // size // d.batch, key.numel // size // d.batch, spec)
    out = t.cast(attend(t, query, key, value, shape, mask), query.dtype)
    out = t.scale(dropout(t, project(t, out, f"{module}.to_out.0", size), body.dropout))
    t.touch(query, key, value)
    return out
