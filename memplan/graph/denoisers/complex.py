"""Layers of two streams whose heads are turned as complex numbers (diffusers 0.42, Qwen-Image's)."""

from collections.abc import Iterator
from contextlib import contextmanager

from memplan.dtypes import DType
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.denoisers.attention import head_normed, head_spec, project, scores
from memplan.graph.denoisers.joint import network
from memplan.graph.denoisers.modulation import modulated, plain_norm, vectors
from memplan.graph.denoisers.state import Denoising
from memplan.graph.operations.activations import activation
from memplan.graph.operations.products import linear
from memplan.model.denoisers import DoubleLayerBody, HeadNorm
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock

STREAMS = ("img", "txt")
"""The picture's modules and the prompt's, by the beginning of their names."""


def double_layer(t: Tape, x: Tensor, body: DoubleLayerBody, d: Denoising) -> Tensor:
    """``QwenImageTransformerBlock``: every name in it stays to its end."""
    prompt = d.prompt
    assert prompt is not None
    size = body.size
    halves = [_halves(t, d, name, size) for name in STREAMS]
    streams = [x, prompt]
    entered, gates = [], []
    for stream, (first, _) in zip(streams, halves, strict=True):
        shift, scale, gate = first
        gates.append(gate)
        entered.append(_modulated(t, stream, scale, shift, size))
    found = _attention(t, d, entered[0], entered[1], body)
    for each in found:
        t.linger(each)
    t.block = LayerBlock.NETWORK
    picture = t.add(x, t.mul(gates[0], found[0]))
    with _leads_nowhere(t, d, is_so=body.last):
        prompt = t.add(prompt, t.mul(gates[1], found[1]))
    picture = _fed(t, picture, "img", halves[0][1], body)
    with _leads_nowhere(t, d, is_so=body.last):
        prompt = _fed(t, prompt, "txt", halves[1][1], body)
    d.prompt = prompt
    return picture


def _fed(t: Tape, x: Tensor, name: str, by: list[Tensor], body: DoubleLayerBody) -> Tensor:
    shift, scale, gate = by
    normed = _modulated(t, x, scale, shift, body.size)
    fed = network(t, normed, f"{name}_mlp", body.size, body.inner_size)
    t.linger(fed)
    out = t.add(x, t.mul(gate, fed))
    t.touch(x)
    return out


@contextmanager
def _leads_nowhere(t: Tape, d: Denoising, *, is_so: bool) -> Iterator[None]:
    """What is made of the last prompt is never differentiated; its graph stays until the model returns."""
    start = len(t.segment.operations)
    yield
    if not is_so:
        return
    for operation in t.segment.operations[start:]:
        for storage in operation.saved:
            is_own = storage.segment == t.segment.index and not storage.weight_cast
            if is_own and not (storage.held or t.segment.checkpointed):
                d.share(t, Tensor(1, DType.BF16, storage))
        for tensor in operation.inputs:
            if isinstance(tensor, Parameter):
                tensor.unused = True
        operation.forget()


def _halves(t: Tape, d: Denoising, name: str, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """A stream's modulations for attention, and for its network: shift, scale and gate of each."""
    active = activation(t, d.condition_of(), Activation.SILU)
    made = linear(t, active, f"{name}_mod.1", size, 6 * size, bias=True)
    first, second = vectors(t, made, 2)
    return vectors(t, first, 3), vectors(t, second, 3)


def _modulated(t: Tape, x: Tensor, scale: Tensor, shift: Tensor, size: int) -> Tensor:
    normed = plain_norm(t, x, size)
    out = modulated(t, normed, scale, shift)
    t.linger(normed)
    t.linger(out)
    return out


def _attention(
    t: Tape, d: Denoising, x: Tensor, prompt: Tensor, body: DoubleLayerBody
) -> tuple[Tensor, Tensor]:
    """``QwenDoubleStreamAttnProcessor2_0``: the prompt's tokens stand before the picture's."""
    t.block = LayerBlock.ATTENTION
    size, spec = body.size, head_spec(body.size, body.num_heads)
    own = [project(t, x, f"attn.{name}", size) for name in ("to_q", "to_k", "to_v")]
    names = ("add_q_proj", "add_k_proj", "add_v_proj")
    other = [project(t, prompt, f"attn.{name}", size) for name in names]
    kind = HeadNorm.WRITTEN_OUT
    for parts, modules in (
        (own, ("norm_q", "norm_k")),
        (other, ("norm_added_q", "norm_added_k")),
    ):
        for position, module in enumerate(modules):
            parts[position] = head_normed(t, parts[position], kind, f"attn.{module}", spec.head_dim)
    assert d.tables is not None
    for parts, table in zip((own, other), d.tables, strict=True):
        for position in range(2):
            parts[position] = _turned(t, parts[position], table)
    joined = [t.concatenate(others, mine) for mine, others in zip(own, other, strict=True)]
    query, key, value = joined
    out = scores(t, query, key, value, d.batch, spec)
    of_prompt, of_picture = t.slice(out, prompt.numel), t.slice(out, x.numel)
    mine = project(t, _rows(t, of_picture, d), "attn.to_out.0", size)
    with _leads_nowhere(t, d, is_so=body.last):
        others = project(t, _rows(t, of_prompt, d), "attn.to_add_out", size)
    t.touch(out, *own, *other, *joined)
    return mine, others


def _rows(t: Tape, part: Tensor, d: Denoising) -> Tensor:
    return part if d.batch == 1 else t.contiguous(part)


def _turned(t: Tape, x: Tensor, table: Tensor) -> Tensor:
    """``apply_rotary_emb_qwen``: a product of complex numbers in fp32, cast back."""
    out = t.cast(t.mul(t.cast(x, DType.FP32), table), x.dtype)
    t.touch(x)
    return out
