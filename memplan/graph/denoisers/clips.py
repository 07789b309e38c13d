"""Layers of video models: Wan's, which attend to the prompt apart, and CogVideoX's."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import as_heads
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.denoisers.attention import (
    head_normed,
    head_spec,
    kernel_normed,
    let_go_of,
    project,
    scores,
)
from memplan.graph.denoisers.joint import cut_row, network
from memplan.graph.denoisers.modulation import (
    affine_norm,
    full_norm,
    modulated,
    modulations,
    plain_norm,
    vectors,
)
from memplan.graph.denoisers.rotation import turned, turned_in_place
from memplan.graph.denoisers.state import PICTURE_TOKENS, Denoising
from memplan.graph.operations.elementwise import dropout, written
from memplan.model.denoisers import CrossLayerBody, ExpertLayerBody, HeadNorm
from memplan.model.parameters import LayerBlock


def cross_layer(t: Tape, x: Tensor, body: CrossLayerBody, d: Denoising) -> Tensor:
    """``WanTransformerBlock``: norms and sums in fp32, what stands between in the stream's format."""
    size, dtype = body.size, x.dtype
    assert d.modulations is not None
    table = t.parameter("model.scale_shift_table", 1, 6, size)
    by = t.add(table, t.cast(d.modulations, DType.FP32))
    shift, scale, gate, *of_network = vectors(t, by, 6)
    normed = t.cast(modulated(t, full_norm(t, _full(t, x), size), scale, shift), dtype)
    first = found = _attention(t, normed, normed, "attn1", body, d, rotary=True)
    x = t.cast(t.add(_full(t, x), t.mul(found, gate)), dtype)
    given = x
    if body.normed:
        given = t.cast(full_norm(t, _full(t, x), size, "norm2"), dtype)
    t.touch(normed)
    assert d.memory is not None
    found = _attention(t, given, d.memory, "attn2", body, d, rotary=False)
    t.touch(first)
    t.linger(found)
    x = t.add(x, found)
    t.block = LayerBlock.NETWORK
    shift, scale, gate = of_network
    normed = t.cast(modulated(t, full_norm(t, _full(t, x), size), scale, shift), dtype)
    t.touch(given)
    t.linger(normed)
    fed = network(t, normed, "ffn", size, body.inner_size)
    t.linger(fed)
    out = t.cast(t.add(_full(t, x), t.mul(_full(t, fed), gate)), dtype)
    t.touch(x)
    return out


def _full(t: Tape, x: Tensor) -> Tensor:
    return t.cast(x, DType.FP32)


def _attention(
    t: Tape,
    x: Tensor,
    read: Tensor,
    module: str,
    body: CrossLayerBody,
    d: Denoising,
    *,
    rotary: bool,
) -> Tensor:
    """``WanAttnProcessor``: queries and keys are normed over all heads at once."""
    t.block = LayerBlock.ATTENTION if rotary else LayerBlock.CROSS_ATTENTION
    size = body.size
    picture = None
    if body.sees and not rotary:
        own = d.batch * PICTURE_TOKENS * size
        picture, read = t.slice(read, own), t.slice(read, read.numel - own)
    query = project(t, x, f"{module}.to_q", size)
    key = _read(t, d, read, f"{module}.to_k", size, apart=picture is not None)
    value = _read(t, d, read, f"{module}.to_v", size, apart=picture is not None)
    query = kernel_normed(t, query, f"{module}.norm_q", size)
    key = kernel_normed(t, key, f"{module}.norm_k", size)
    if rotary and d.tables is not None:
        query, key = turned_in_place(t, query, d.tables), turned_in_place(t, key, d.tables)
    spec = head_spec(size, body.num_heads)
    seen: tuple[Tensor, ...] = ()
    if picture is not None:
        keys = _read(t, d, picture, f"{module}.add_k_proj", size, apart=True)
        values = _read(t, d, picture, f"{module}.add_v_proj", size, apart=True)
        keys = kernel_normed(t, keys, f"{module}.norm_added_k", size)
        seen = keys, values, scores(t, query, keys, values, d.batch, spec)
    out = scores(t, query, key, value, d.batch, spec)
    if seen:
        out = t.add(out, seen[-1])
    out = project(t, out, f"{module}.to_out.0", size)
    t.touch(query, key, value, *seen)
    return out


def _read(t: Tape, d: Denoising, x: Tensor, module: str, size: int, *, apart: bool) -> Tensor:
    """Keys or values of a part of what is read; of several samples, parts are copied into rows first."""
    return project(t, t.contiguous(x) if apart and d.batch > 1 else x, module, size)


def expert_layer(t: Tape, x: Tensor, body: ExpertLayerBody, d: Denoising) -> Tensor:
    """``CogVideoXBlock``; the first is given one row of prompt and clip, of which both are views."""
    size = body.size
    prompt, clip = d.prompt, x
    if prompt is None:
        prompt, clip = cut_row(t, x, size, d)
    gate, gate_of_prompt, normed, normed_prompt = _modulated_both(t, clip, prompt, "norm1", body, d)
    found_of_prompt, found = _joined_attention(t, normed, normed_prompt, body, d)
    t.linger(found)
    before = normed, normed_prompt
    clip = t.add(clip, t.mul(gate, found))
    prompt = t.add(prompt, t.mul(gate_of_prompt, found_of_prompt))
    t.block = LayerBlock.NETWORK
    gate, gate_of_prompt, normed, normed_prompt = _modulated_both(t, clip, prompt, "norm2", body, d)
    t.touch(*before)
    row = t.concatenate(normed_prompt, normed)
    t.linger(normed_prompt)
    fed = dropout(t, network(t, row, "ff", size, body.inner_size), body.dropout)
    of_clip = t.slice(fed, clip.numel)
    clip = t.add(clip, t.mul(gate, of_clip))
    prompt = t.add(prompt, t.mul(gate_of_prompt, t.slice(fed, prompt.numel)))
    t.touch(fed, row)
    d.prompt = prompt
    return clip


def _modulated_both(
    t: Tape, clip: Tensor, prompt: Tensor, module: str, body: ExpertLayerBody, d: Denoising
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``CogVideoXLayerNormZero``: one norm's weights for both streams; both gates come first here."""
    size = body.size
    shift, scale, gate, *of_prompt = modulations(t, d, module, size, 6)
    normed = modulated(t, _norm(t, clip, module, body), scale, shift)
    normed_prompt = modulated(t, _norm(t, prompt, module, body), of_prompt[1], of_prompt[0])
    return gate, of_prompt[2], normed, normed_prompt


def _norm(t: Tape, x: Tensor, module: str, body: ExpertLayerBody) -> Tensor:
    if not body.affine:
        return plain_norm(t, x, body.size)
    return affine_norm(t, x, f"{module}.norm", body.size)


def _joined_attention(
    t: Tape, clip: Tensor, prompt: Tensor, body: ExpertLayerBody, d: Denoising
) -> tuple[Tensor, Tensor]:
    """``CogVideoXAttnProcessor2_0``: one row of both; the clip's heads are turned where they lie."""
    t.block = LayerBlock.ATTENTION
    size, spec = body.size, head_spec(body.size, body.num_heads)
    row = t.concatenate(prompt, clip)
    parts = [
        project(t, row, f"attn1.{name}", size, bias=body.bias) for name in ("to_q", "to_k", "to_v")
    ]
    query, key, value = (as_heads(t, each, spec.num_heads) for each in parts)
    query = head_normed(t, query, HeadNorm.LAYER, "attn1.norm_q", spec.head_dim)
    key = head_normed(t, key, HeadNorm.LAYER, "attn1.norm_k", spec.head_dim)
    if body.rotary and d.tables is not None:
        query = _turned_clip(t, query, clip.numel, d.tables)
        key = _turned_clip(t, key, clip.numel, d.tables)
    before = len(t.segment.operations)
    out = scores(t, query, key, value, d.batch, spec, widened=False)
    let_go_of(t, row, before)
    out = project(t, out, "attn1.to_out.0", size)
    t.touch(query, key, value)
    of_prompt, of_clip = t.split(out, prompt.numel, clip.numel)
    return of_prompt, of_clip


def _turned_clip(t: Tape, x: Tensor, numel: int, tables: tuple[Tensor, Tensor]) -> Tensor:
    part = t.slice(x, numel)
    part.by_head = x.by_head
    return written(t, x, turned(t, part, tables))
