"""What a denoiser is given: latents as tokens, a prompt's embeddings, a time (diffusers 0.42)."""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.denoisers.attention import WRITTEN_OUT
from memplan.graph.denoisers.modulation import full_norm
from memplan.graph.denoisers.state import (
    PICTURE_TOKENS,
    Denoising,
    LatentSize,
    batch_dtype,
    latent_size,
)
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import from_batch
from memplan.model.denoisers import (
    ClipEntryBody,
    ComplexEntryBody,
    ConditionedEntryBody,
    ImageEntryBody,
    JoinedEntryBody,
    LatentGrid,
    PackedEntryBody,
    TimeEmbedding,
)
from memplan.model.networks import Activation

LATENTS_IN_LOOP = 4
"""Variables of the training loop beside what the model is given: latents, noise, the loss's target and,
of the step before, what the model gave."""


def take_latents(t: Tape, d: Denoising, grid: LatentGrid, *, packed: bool = False) -> Tensor:
    """Noised latents, and what the training loop's other variables hold; ``packed`` are a copy."""
    d.size = latent_size(t.options, grid)
    dtype = batch_dtype(t)
    for _ in range(LATENTS_IN_LOOP + packed):
        from_batch(t, d.latents, dtype)
    if grid.beside:
        known = d.latents // grid.channels * grid.beside
        from_batch(t, d.latents, dtype)
        from_batch(t, known, dtype)
        return from_batch(t, d.latents + known, dtype)
    return from_batch(t, d.latents, dtype)


def take_prompt(t: Tape, d: Denoising, width: int) -> Tensor:
    """Embeddings of the prompts' tokens, computed before."""
    return from_batch(t, d.batch * d.prompt_tokens * width, batch_dtype(t))


def waves(t: Tape, numel: int, dtype: DType) -> Tensor:
    """Sines and cosines of a number of each sample, in fp32, cast."""
    made = t.tensor(numel, DType.FP32)
    t.record(OperationKind.CAT, (), (made,))
    return t.cast(made, dtype)


def perceptron(
    t: Tape, x: Tensor, module: str, inputs: int, size: int, kind: Activation, outputs: int = 0
) -> Tensor:
    """Two linear layers."""
    raised = linear(t, x, f"{module}.linear_1", inputs, size, bias=True)
    active = activation(t, raised, kind)
    return linear(t, active, f"{module}.linear_2", size, outputs or size, bias=True)


def embed_time(t: Tape, d: Denoising, spec: TimeEmbedding) -> None:
    """What modulates the layers, held until the model returns."""
    d.condition = d.share(t, embedded_time(t, d, spec))


def embedded_time(t: Tape, d: Denoising, spec: TimeEmbedding) -> Tensor:
    """``CombinedTimestep…Embeddings``: vectors of the times, a guidance, the pooled prompt, added up."""
    beginning = f"{spec.module}." if spec.module else ""
    found: Tensor | None = None
    for part in spec.parts:
        given = waves(t, d.batch * spec.features, batch_dtype(t))
        made = perceptron(t, given, f"{beginning}{part}", spec.features, spec.size, Activation.SILU)
        found = made if found is None else t.add(found, made)
    if spec.pooled:
        pooled = from_batch(t, d.batch * spec.pooled, batch_dtype(t))
        made = perceptron(
            t, pooled, f"{beginning}text_embedder", spec.pooled, spec.size, Activation.SILU
        )
        found = made if found is None else t.add(found, made)
    assert found is not None
    return found


def image_entry(t: Tape, body: ImageEntryBody, d: Denoising) -> Tensor:
    """``SD3Transformer2DModel.forward`` up to its blocks."""
    latents = take_latents(t, d, body.grid)
    x = convolution(t, latents, "pos_embed.proj", d.tokens)
    table = t.buffer(body.positions**2 * body.size, t.options.weights)
    assert d.size is not None
    rows = t.tensor(d.size.tokens * body.size, table.dtype)
    t.record(OperationKind.CLONE, (table,), (rows,))
    x = t.contiguous(t.cast(t.add(x, rows), x.dtype))
    embed_time(t, d, body.time)
    given = take_prompt(t, d, body.text)
    d.prompt = linear(t, given, "context_embedder", body.text, body.size, bias=True)
    return x


def packed_entry(t: Tape, body: PackedEntryBody, d: Denoising) -> Tensor:
    """``FluxTransformer2DModel.forward`` up to its blocks."""
    latents = take_latents(t, d, body.grid, packed=True)
    x = linear(t, latents, "x_embedder", body.grid.features, body.size, bias=True)
    embed_time(t, d, body.time)
    given = take_prompt(t, d, body.text)
    d.prompt = linear(t, given, "context_embedder", body.text, body.size, bias=True)
    assert d.size is not None
    _make_tables(t, d, (d.prompt_tokens + d.size.tokens) * body.head_dim)
    return x


def complex_entry(t: Tape, body: ComplexEntryBody, d: Denoising) -> Tensor:
    """``QwenImageTransformer2DModel.forward`` up to its blocks."""
    latents = take_latents(t, d, body.grid, packed=True)
    x = linear(t, latents, "img_in", body.grid.features, body.size, bias=True)
    given = norm(t, take_prompt(t, d, body.text), WRITTEN_OUT, "txt_norm", body.text)
    d.prompt = linear(t, given, "txt_in", body.text, body.size, bias=True)
    embed_time(t, d, body.time)
    assert d.size is not None
    # Tables of positions ahead and behind, and a picture's, stay on the GPU (``lru_cache``).
    ahead, _ = (t.buffer(COMPLEX_POSITIONS * body.head_dim, DType.FP32) for _ in range(2))
    known = t.buffer(d.size.tokens * body.head_dim, DType.FP32)
    table = t.tensor(known.numel, DType.FP32)
    t.record(OperationKind.CAT, (known,), (table,))
    d.tables = d.share(t, table), t.view(ahead, d.prompt_tokens * body.head_dim)
    return x


def conditioned_entry(t: Tape, body: ConditionedEntryBody, d: Denoising) -> Tensor:
    """``PixArtTransformer2DModel.forward`` up to its blocks."""
    latents = take_latents(t, d, body.grid)
    assert d.size is not None
    padded = from_batch(t, d.batch * d.prompt_tokens, batch_dtype(t))
    d.mask = d.share(t, t.scale(t.scale(padded, OperationKind.SUB)))
    x = convolution(t, latents, "pos_embed.proj", d.tokens)
    positions = _square_positions(t, body, d.size)
    x = t.cast(t.add(x, positions), x.dtype)
    size, time = body.size, body.time
    condition = embedded_time(t, d, time)
    if body.conditions:
        found = [
            perceptron(
                t, waves(t, d.batch * number * time.features, batch_dtype(t)),
                f"{time.module}.{module}", time.features, size // 3, Activation.SILU,
            )
            for module, number in zip(body.conditions, (2, 1), strict=True)
        ]  # fmt: skip
        condition = t.add(condition, t.concatenate(*found))
    d.condition = d.share(t, condition)
    active = activation(t, d.condition, Activation.SILU)
    d.modulations = d.share(t, linear(t, active, "adaln_single.linear", size, 6 * size, bias=True))
    prompt = take_prompt(t, d, body.text)
    kind = Activation.GELU_TANH
    d.memory = d.share(t, perceptron(t, prompt, "caption_projection", body.text, size, kind))
    return x


def _square_positions(t: Tape, body: ConditionedEntryBody, size: LatentSize) -> Tensor:
    """``PatchEmbed``'s: a table of the module's own size, or one made for this one in fp64."""
    usual = latent_size(replace(t.options, image_size=None, image_width=None), body.grid)
    table = t.buffer(usual.tokens * body.size, t.options.weights)
    if usual.height == size.height and usual.width == size.width:
        return table
    numel = size.tokens * body.size
    both = made_in_fp64(t, numel, made_in_fp64(t, numel // 2), made_in_fp64(t, numel // 2))
    found = t.tensor(numel, DType.FP32)
    t.record(OperationKind.TO, (both,), (found,))
    return found


COMPLEX_POSITIONS = 4096
"""Positions ahead and behind of which Qwen-Image's module knows the complex numbers."""


def _make_tables(t: Tape, d: Denoising, numel: int) -> None:
    """Cosines and sines of every position, in fp32, held until the model returns."""
    made = []
    for kind in (OperationKind.COS, OperationKind.SIN):
        table = t.tensor(numel, DType.FP32)
        t.record(kind, (), (table,))
        made.append(d.share(t, table))
    d.tables = made[0], made[1]


def clip_entry(t: Tape, body: ClipEntryBody, d: Denoising) -> Tensor:
    """``WanTransformer3DModel.forward`` up to its blocks."""
    latents = take_latents(t, d, body.grid)
    assert d.size is not None
    for _ in range(2):
        t.buffer(body.rotary_positions * body.head_dim, DType.FP32)
    _make_tables(t, d, d.size.tokens * body.head_dim)
    x = t.contiguous(convolution(t, latents, "patch_embedding", d.tokens))
    at = "condition_embedder"
    given = waves(t, d.batch * body.time_features, t.compute)
    time = perceptron(
        t, given, f"{at}.time_embedder", body.time_features, body.size, Activation.SILU
    )
    d.condition = d.share(t, t.cast(time, batch_dtype(t)))
    active = activation(t, d.condition, Activation.SILU)
    projected = linear(t, active, f"{at}.time_proj", body.size, 6 * body.size, bias=True)
    d.modulations = d.share(t, projected)
    given = take_prompt(t, d, body.text)
    kind = Activation.GELU_TANH
    prompt = perceptron(t, given, f"{at}.text_embedder", body.text, body.size, kind)
    if body.picture:
        picture = _picture(t, d, f"{at}.image_embedder", body)
        prompt = t.concatenate(d.share(t, picture), prompt)
    d.memory = d.share(t, prompt)
    return x


def _picture(t: Tape, d: Denoising, module: str, body: ClipEntryBody) -> Tensor:
    """``WanImageEmbedding``: norms in fp32, a network between them."""
    width, dtype = body.picture, batch_dtype(t)
    x = from_batch(t, d.batch * PICTURE_TOKENS * width, dtype)
    normed = full_norm(t, t.cast(x, DType.FP32), width, f"{module}.norm1")
    x = t.cast(normed, dtype)
    raised = linear(t, x, f"{module}.ff.net.0.proj", width, width, bias=True)
    active = activation(t, raised, Activation.GELU)
    fed = linear(t, active, f"{module}.ff.net.2", width, body.size, bias=True)
    normed = full_norm(t, t.cast(fed, DType.FP32), body.size, f"{module}.norm2")
    return t.cast(normed, fed.dtype)


def joined_entry(t: Tape, body: JoinedEntryBody, d: Denoising) -> Tensor:
    """``CogVideoXTransformer3DModel.forward`` up to its blocks: a row of prompt and clip."""
    latents = take_latents(t, d, body.grid)
    assert d.size is not None
    if body.rotary:
        numel = d.size.tokens * body.head_dim
        d.tables = from_batch(t, numel, DType.FP32), from_batch(t, numel, DType.FP32)
    embed_time(t, d, body.time)
    given = take_prompt(t, d, body.text)
    prompt = linear(t, given, "patch_embed.text_proj", body.text, body.size, bias=True)
    if body.grid.frame_patch > 1:
        rows = t.contiguous(latents)
        clip = linear(t, rows, "patch_embed.proj", body.grid.features, body.size, bias=True)
    else:
        clip = convolution(t, latents, "patch_embed.proj", d.tokens, bias=body.patch_bias)
        if d.batch * d.size.frames > 1:
            clip = t.contiguous(clip)
    x = t.concatenate(prompt, clip)
    if not body.rotary:
        positions = _positions(t, body, d, x)
        x = t.add(x, positions)
        t.touch(positions)
    t.touch(clip)
    return dropout(t, x, body.dropout)


def _positions(t: Tape, body: JoinedEntryBody, d: Denoising, x: Tensor) -> Tensor:
    """Fixed positions of the module's own size, or made for this one, cast to the row's format."""
    assert d.size is not None
    usual = latent_size(
        replace(t.options, image_size=None, image_width=None, num_frames=None), body.grid
    )
    table = t.buffer((body.prompt + usual.tokens) * body.size, t.options.weights)
    if usual != d.size:
        return _positions_made(t, body, d.size, x.dtype)
    return t.cast(table, x.dtype)


def _positions_made(t: Tape, body: JoinedEntryBody, size: LatentSize, dtype: DType) -> Tensor:
    """``get_3d_sincos_pos_embed``, in fp64, then cast: a quarter tells of time, the rest of space."""
    numel = size.tokens * body.size
    space = made_in_fp64(t, numel // size.frames * 3 // 4)
    spread = made_in_fp64(t, numel * 3 // 4, space)
    both = made_in_fp64(t, numel, spread, made_in_fp64(t, numel // 4))
    whole = made_in_fp64(t, body.prompt * body.size + numel, both)
    found = t.tensor(whole.numel // 2, dtype)
    t.record(OperationKind.TO, (whole,), (found,))
    return found


def made_in_fp64(t: Tape, numel: int, *given: Tensor) -> Tensor:
    """A table of that format, from others of it: as large as twice the numbers in fp32."""
    table = t.tensor(2 * numel, DType.FP32)
    t.record(OperationKind.CAT, given, (table,))
    return table
