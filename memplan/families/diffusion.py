"""Diffusion transformers from a diffusers config, which names its class (``_class_name``).

Text encoders and the autoencoder are no part of the model: the training scripts compute prompts'
embeddings and latents before, or let frozen models do so outside the graph.
"""

from collections.abc import Callable

from memplan.errors import ConfigError
from memplan.families.classes import dispatch
from memplan.families.request import ReadRequest, checkpoint_dtype
from memplan.model.config import ConfigReader
from memplan.model.denoisers import (
    ClipEntryBody,
    ComplexEntryBody,
    ConditionedEntryBody,
    CrossLayerBody,
    DenoisedBody,
    DoubleLayerBody,
    ExpertLayerBody,
    HeadNorm,
    ImageEntryBody,
    JoinedEntryBody,
    JointLayerBody,
    LatentGrid,
    Modulation,
    PackedEntryBody,
    SingleLayerBody,
    TableLayerBody,
    TimeEmbedding,
)
from memplan.model.heads import HeadSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

WAVES = 256
"""Sines and cosines of a time (SD3, FLUX)."""
SCALE = 8
"""Pixels of a latent, down and across, of the autoencoders that these models have."""
FRAME_SCALE = 4
"""Frames of a latent, of those for video."""
NETWORK_RATIO = 4
"""A network's width, in widths of the layer, where the config says nothing (``FeedForward``)."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any class of this module."""
    task = request.task
    if task is not None and task not in {Task.OTHER, Task.BASE}:
        msg = (
            f"{reader.source}: {request.model_type} learns to take noise away, and has no task "
            f"{task.value!r}: leave `task` out"
        )
        raise ConfigError(msg)
    return dispatch(_READERS, reader, request)


def _model(
    reader: ConfigReader,
    request: ReadRequest,
    table: ParameterTable,
    *,
    size: int,
    prompt: int,
) -> ModelSpec:
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=Task.OTHER,
        vocab_size=0,
        hidden_size=size,
        context_length=prompt,
        stacks=(),
        head=HeadSpec(tied=False),
        checkpoint_dtype=checkpoint_dtype(reader),
        tables=table.blocks(),
        source=reader.source,
    )


def _width(reader: ConfigReader) -> tuple[int, int]:
    heads = reader.integer("num_attention_heads")
    return heads * reader.integer("attention_head_dim"), heads


def _network(table: ParameterTable, module: str, size: int, inner: int) -> None:
    table.linear(f"{module}.net.0.proj", size, inner)
    table.linear(f"{module}.net.2", inner, size)


def _perceptron(
    table: ParameterTable, module: str, inputs: int, size: int, outputs: int = 0
) -> None:
    table.linear(f"{module}.linear_1", inputs, size)
    table.linear(f"{module}.linear_2", size, outputs or size)


def _time(table: ParameterTable, spec: TimeEmbedding) -> None:
    beginning = f"{spec.module}." if spec.module else ""
    for part in spec.parts:
        _perceptron(table, f"{beginning}{part}", spec.features, spec.size)
    if spec.pooled:
        _perceptron(table, f"{beginning}text_embedder", spec.pooled, spec.size)


def _head_norms(table: ParameterTable, module: str, head_dim: int, *names: str) -> None:
    for name in names:
        table.norm(f"{module}.{name}", head_dim, bias=False)


def _squares(table: ParameterTable, module: str, size: int, *names: str, bias: bool = True) -> None:
    for name in names:
        table.linear(f"{module}.{name}", size, size, bias=bias)


SD3_PROMPT = 154
"""Tokens of a prompt: 77 for both CLIPs and, as the script's ``--max_sequence_length``, 77 for T5."""


def _sd3(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """``SD3Transformer2DModel``; Stable Diffusion 3.5 norms heads, and its medium one has dual layers."""
    size, heads = _width(reader)
    key = "caption_projection_dim"
    if reader.integer(key) != size:
        msg = f"must be num_attention_heads x attention_head_dim ({size}): both streams are as wide"
        raise reader.fail(key, msg)
    patch = reader.integer("patch_size")
    channels = reader.integer("in_channels")
    sample = reader.integer("sample_size") * SCALE
    grid = LatentGrid(channels=channels, image=(sample, sample), scale=SCALE, patch=(patch, patch))
    norm = reader.text("qk_norm")
    if norm:
        reader.choice("qk_norm", norm, ("rms_norm",))
    kind = HeadNorm.WRITTEN_OUT if norm else HeadNorm.NONE
    dual = set(reader.integers("dual_attention_layers"))
    text = reader.integer("joint_attention_dim")
    time = TimeEmbedding(
        module="time_text_embed", size=size, features=WAVES,
        pooled=reader.integer("pooled_projection_dim"),
    )  # fmt: skip
    entry = ImageEntryBody(
        size=size, grid=grid, time=time, text=text, positions=reader.integer("pos_embed_max_size")
    )
    table = ParameterTable()
    with table.block("embed", body=entry):
        table.convolution("pos_embed.proj", channels, size, patch, patch)
        _time(table, time)
        table.linear("context_embedder", text, size)
    count = reader.layers("num_layers")
    for first, last in _runs(dual, count):
        body = JointLayerBody(
            size=size, inner_size=NETWORK_RATIO * size, num_heads=heads, head_norm=kind,
            prompt_first=False, dual=first in dual, last=first == count - 1,
        )  # fmt: skip
        with table.block("joint.layers", count=last - first, body=body):
            _sd3_layer(table, body)
    outputs = patch * patch * reader.integer("out_channels", default=channels)
    _denoised(table, DenoisedBody(size=size, condition=size, outputs=outputs, grid=grid))
    return _model(reader, request, table, size=size, prompt=SD3_PROMPT)


def _runs(dual: set[int], count: int) -> list[tuple[int, int]]:
    """Stretches of equal layers; the last one stands for itself."""
    cuts = [0]
    cuts += [
        each
        for each in range(1, count)
        if (each in dual) is not (each - 1 in dual) or each == count - 1
    ]
    return list(zip(cuts, [*cuts[1:], count], strict=True))


def _sd3_layer(table: ParameterTable, body: JointLayerBody) -> None:
    size, head_dim = body.size, body.size // body.num_heads
    normed = body.head_norm is not HeadNorm.NONE
    table.linear("norm1.linear", size, size * (9 if body.dual else 6))
    table.linear("norm1_context.linear", size, size * (2 if body.last else 6))
    if normed:
        _head_norms(table, "attn", head_dim, "norm_q", "norm_k")
    _squares(table, "attn", size, "to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj")
    _squares(table, "attn", size, "to_out.0", *(() if body.last else ("to_add_out",)))
    if normed:
        _head_norms(table, "attn", head_dim, "norm_added_q", "norm_added_k")
    if body.dual:
        if normed:
            _head_norms(table, "attn2", head_dim, "norm_q", "norm_k")
        _squares(table, "attn2", size, "to_q", "to_k", "to_v", "to_out.0")
    _network(table, "ff", size, body.inner_size)
    if not body.last:
        _network(table, "ff_context", size, body.inner_size)


def _denoised(table: ParameterTable, body: DenoisedBody) -> None:
    with table.block("head", body=body):
        if body.modulation is Modulation.TABLE:
            table.parameter("model", "scale_shift_table", 1, 2, body.size)
        if body.modulation is Modulation.PLAIN_TABLE:
            table.parameter("model", "scale_shift_table", 2, body.size)
        if body.first_norm:
            table.norm(body.first_norm, body.size)
        if body.modulation is Modulation.LINEAR:
            table.linear("norm_out.linear", body.condition, 2 * body.size)
        if body.affine:
            table.norm("norm_out.norm", body.size)
        table.linear("proj_out", body.size, body.outputs)


FLUX_PROMPT = 512
"""Tokens of T5's part of a prompt (``--max_sequence_length``)."""
FLUX_IMAGE = (1024, 1024)
PACKED = 2
"""Latents of a token, down and across: four lie in its channels already."""


def _flux(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """``FluxTransformer2DModel``: layers of two streams, then of one row of both."""
    size, heads = _width(reader)
    channels = reader.integer("in_channels")
    key = "patch_size"
    if reader.integer(key) != 1:
        raise reader.fail(key, "must be 1: the latents of a token are packed before")
    latent = reader.divide("in_channels", channels, "latents of a token", PACKED**2)
    grid = LatentGrid(channels=latent, image=FLUX_IMAGE, scale=SCALE, patch=(PACKED, PACKED))
    guided = ("guidance_embedder",) if reader.flag("guidance_embeds") else ()
    time = TimeEmbedding(
        module="time_text_embed", size=size, features=WAVES,
        parts=("timestep_embedder", *guided),
        pooled=reader.integer("pooled_projection_dim"),
    )  # fmt: skip
    text = reader.integer("joint_attention_dim")
    table = ParameterTable()
    entry = PackedEntryBody(
        size=size, grid=grid, time=time, text=text, head_dim=reader.integer("attention_head_dim")
    )
    with table.block("embed", body=entry):
        _time(table, time)
        table.linear("context_embedder", text, size)
        table.linear("x_embedder", channels, size)
    inner = NETWORK_RATIO * size
    joint = JointLayerBody(
        size=size, inner_size=inner, num_heads=heads, head_norm=HeadNorm.KERNEL, prompt_first=True,
        rotary=True,
    )  # fmt: skip
    with table.block("joint.layers", count=reader.layers("num_layers"), body=joint):
        _flux_joint_layer(table, joint)
    single = SingleLayerBody(size=size, inner_size=inner, num_heads=heads)
    with table.block("single.layers", count=reader.layers("num_single_layers"), body=single):
        _flux_single_layer(table, single)
    ending = DenoisedBody(
        size=size, condition=size, outputs=reader.integer("out_channels", default=channels),
        grid=grid, cropped=True,
    )  # fmt: skip
    _denoised(table, ending)
    return _model(reader, request, table, size=size, prompt=FLUX_PROMPT)


def _flux_joint_layer(table: ParameterTable, body: JointLayerBody) -> None:
    size, head_dim = body.size, body.size // body.num_heads
    table.linear("norm1.linear", size, 6 * size)
    table.linear("norm1_context.linear", size, 6 * size)
    _head_norms(table, "attn", head_dim, "norm_q", "norm_k")
    _squares(table, "attn", size, "to_q", "to_k", "to_v", "to_out.0")
    _head_norms(table, "attn", head_dim, "norm_added_q", "norm_added_k")
    _squares(table, "attn", size, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    _network(table, "ff", size, body.inner_size)
    _network(table, "ff_context", size, body.inner_size)


def _flux_single_layer(table: ParameterTable, body: SingleLayerBody) -> None:
    size, head_dim = body.size, body.size // body.num_heads
    table.linear("norm.linear", size, 3 * size)
    table.linear("proj_mlp", size, body.inner_size)
    table.linear("proj_out", size + body.inner_size, size)
    _head_norms(table, "attn", head_dim, "norm_q", "norm_k")
    _squares(table, "attn", size, "to_q", "to_k", "to_v")


QWEN_PROMPT = 512
"""Tokens of a prompt at most (``--max_sequence_length``)."""
QWEN_IMAGE = (1024, 1024)


def _qwen_image(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """``QwenImageTransformer2DModel``: all layers have two streams, which are normed before their heads meet."""
    size, heads = _width(reader)
    for key, words in (
        ("guidance_embeds", "a guidance is not embedded by diffusers' class"),
        ("zero_cond_t", "editing, with two times a sample, is not modelled"),
        ("use_additional_t_cond", "layered pictures are not modelled"),
        ("use_layer3d_rope", "layered pictures are not modelled"),
    ):
        if reader.raw(key):
            raise reader.fail(key, words)
    channels, patch = reader.integer("in_channels"), reader.integer("patch_size")
    latent = reader.divide("in_channels", channels, "latents of a token", patch**2)
    grid = LatentGrid(channels=latent, image=QWEN_IMAGE, scale=SCALE, patch=(patch, patch))
    time = TimeEmbedding(module="time_text_embed", size=size, features=WAVES)
    text = reader.integer("joint_attention_dim")
    entry = ComplexEntryBody(
        size=size, grid=grid, time=time, text=text, head_dim=reader.integer("attention_head_dim")
    )
    table = ParameterTable()
    with table.block("embed", body=entry):
        _time(table, time)
        table.norm("txt_norm", text, bias=False)
        table.linear("img_in", channels, size)
        table.linear("txt_in", text, size)
    count = reader.layers("num_layers")
    for first, last in _runs(set(), count):
        body = DoubleLayerBody(
            size=size, inner_size=NETWORK_RATIO * size, num_heads=heads, last=last == count
        )
        with table.block("layers", count=last - first, body=body):
            _qwen_image_layer(table, body)
    outputs = patch * patch * reader.integer("out_channels", default=channels)
    _denoised(table, DenoisedBody(size=size, condition=size, outputs=outputs, grid=grid))
    return _model(reader, request, table, size=size, prompt=QWEN_PROMPT)


def _qwen_image_layer(table: ParameterTable, body: DoubleLayerBody) -> None:
    size, head_dim = body.size, body.size // body.num_heads
    table.linear("img_mod.1", size, 6 * size)
    _head_norms(table, "attn", head_dim, "norm_q", "norm_k")
    _squares(table, "attn", size, "to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj")
    _squares(table, "attn", size, "to_out.0", "to_add_out")
    _head_norms(table, "attn", head_dim, "norm_added_q", "norm_added_k")
    _network(table, "img_mlp", size, body.inner_size)
    table.linear("txt_mod.1", size, 6 * size)
    _network(table, "txt_mlp", size, body.inner_size)


PIXART_PROMPT = 300
"""Tokens that T5's prompts are padded to: Sigma's; Alpha's are 120."""
CONDITIONED_SIZE = 128
"""Latents of a picture's side from which on its resolution and aspect ratio are embedded, where the config
says nothing of it."""


def _pixart(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """``PixArtTransformer2DModel``, Alpha and Sigma."""
    size, heads = _width(reader)
    reader.choice("norm_type", reader.text("norm_type"), ("ada_norm_single",))
    reader.choice("activation_fn", reader.text("activation_fn"), ("gelu-approximate",))
    reader.choice("attention_type", reader.text("attention_type"), ("default",))
    for key in ("upcast_attention", "norm_elementwise_affine"):
        if reader.flag(key):
            raise reader.fail(key, "must be false: PixArt has no such layers")
    key = "cross_attention_dim"
    if reader.integer(key) != size:
        msg = f"must be num_attention_heads x attention_head_dim ({size}): prompts are projected to it"
        raise reader.fail(key, msg)
    patch, channels = reader.integer("patch_size"), reader.integer("in_channels")
    side = reader.integer("sample_size")
    image = (side * SCALE, side * SCALE)
    grid = LatentGrid(channels=channels, image=image, scale=SCALE, patch=(patch, patch))
    conditioned = side == CONDITIONED_SIZE
    if reader.has("use_additional_conditions"):
        conditioned = reader.flag("use_additional_conditions")
    module = "adaln_single.emb"
    time = TimeEmbedding(module=module, size=size, features=WAVES)
    text = reader.integer("caption_channels")
    names = ("resolution_embedder", "aspect_ratio_embedder") if conditioned else ()
    entry = ConditionedEntryBody(size=size, grid=grid, time=time, text=text, conditions=names)
    table = ParameterTable()
    with table.block("embed", body=entry):
        table.convolution("pos_embed.proj", channels, size, patch, patch)
        _time(table, time)
        for name in names:
            _perceptron(table, f"{module}.{name}", WAVES, size // 3)
        table.linear("adaln_single.linear", size, 6 * size)
        _perceptron(table, "caption_projection", text, size)
    body = TableLayerBody(
        size=size, inner_size=NETWORK_RATIO * size, num_heads=heads,
        bias=reader.flag("attention_bias"), dropout=reader.number("dropout"),
    )  # fmt: skip
    with table.block("layers", count=reader.layers("num_layers"), body=body):
        _pixart_layer(table, body)
    out = reader.integer("out_channels", default=channels)
    ending = DenoisedBody(
        size=size, condition=size, outputs=patch * patch * out, grid=grid,
        modulation=Modulation.PLAIN_TABLE, halved=out == 2 * channels,
    )  # fmt: skip
    _denoised(table, ending)
    return _model(reader, request, table, size=size, prompt=PIXART_PROMPT)


def _pixart_layer(table: ParameterTable, body: TableLayerBody) -> None:
    size = body.size
    table.parameter("model", "scale_shift_table", 6, size)
    for module in ("attn1", "attn2"):
        _squares(table, module, size, "to_q", "to_k", "to_v", bias=body.bias)
        _squares(table, module, size, "to_out.0")
    _network(table, "ff", size, body.inner_size)


WAN_PROMPT = 512
"""Tokens of a prompt, which umT5 pads it to."""
WAN_CLIP = (480, 832)
WAN_FRAMES = 81


def _wan(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """``WanTransformer3DModel``: from text, from text and a first frame, and from its tokens too."""
    size, heads = _width(reader)
    key = "pos_embed_seq_len"
    if reader.has(key):
        raise reader.fail(key, "models that are given a last frame too are not modelled")
    picture = reader.optional_integer("image_dim") or 0
    key = "added_kv_proj_dim"
    seen = reader.optional_integer(key)
    if bool(seen) is not bool(picture) or (seen and seen != size):
        msg = f"must be num_attention_heads x attention_head_dim ({size}) where image_dim is set, and only there"
        raise reader.fail(key, msg)
    norm = reader.text("qk_norm")
    reader.choice("qk_norm", norm, ("rms_norm_across_heads",))
    channels = reader.integer("in_channels")
    made = reader.integer("out_channels", default=channels)
    key = "in_channels"
    if channels < made:
        raise reader.fail(key, f"must be {made} at least, which out_channels says are made")
    times, down, across = _patch(reader)
    grid = LatentGrid(
        channels=made, image=WAN_CLIP, scale=SCALE, patch=(down, across), frames=WAN_FRAMES,
        frame_scale=FRAME_SCALE, frame_patch=times, beside=channels - made,
    )  # fmt: skip
    text, waves = reader.integer("text_dim"), reader.integer("freq_dim")
    entry = ClipEntryBody(
        size=size, grid=grid, time_features=waves, text=text,
        head_dim=reader.integer("attention_head_dim"),
        rotary_positions=reader.integer("rope_max_seq_len"), picture=picture,
    )  # fmt: skip
    table = ParameterTable()
    with table.block("embed", body=entry):
        table.convolution("patch_embedding", channels, size, times, down, across)
        _perceptron(table, "condition_embedder.time_embedder", waves, size)
        table.linear("condition_embedder.time_proj", size, 6 * size)
        _perceptron(table, "condition_embedder.text_embedder", text, size)
        if picture:
            at = "condition_embedder.image_embedder"
            table.norm(f"{at}.norm1", picture)
            table.linear(f"{at}.ff.net.0.proj", picture, picture)
            table.linear(f"{at}.ff.net.2", picture, size)
            table.norm(f"{at}.norm2", size)
    body = CrossLayerBody(
        size=size, inner_size=reader.integer("ffn_dim"), num_heads=heads,
        normed=reader.flag("cross_attn_norm"), sees=bool(picture),
    )  # fmt: skip
    with table.block("layers", count=reader.layers("num_layers"), body=body):
        _wan_layer(table, body)
    outputs = times * down * across * made
    ending = DenoisedBody(
        size=size, condition=size, outputs=outputs, grid=grid, modulation=Modulation.TABLE
    )
    _denoised(table, ending)
    return _model(reader, request, table, size=size, prompt=WAN_PROMPT)


def _patch(reader: ConfigReader) -> tuple[int, int, int]:
    key = "patch_size"
    found = reader.integers(key, minimum=1)
    if len(found) != 3:
        raise reader.fail(key, f"expected three numbers, got {len(found)}")
    return found[0], found[1], found[2]


def _wan_layer(table: ParameterTable, body: CrossLayerBody) -> None:
    size = body.size
    table.parameter("model", "scale_shift_table", 1, 6, size)
    for module in ("attn1", "attn2"):
        _squares(table, module, size, "to_q", "to_k", "to_v", "to_out.0")
        _head_norms(table, module, size, "norm_q", "norm_k")
    if body.sees:
        _squares(table, "attn2", size, "add_k_proj", "add_v_proj")
        _head_norms(table, "attn2", size, "norm_added_k")
    if body.normed:
        table.norm("norm2", size)
    _network(table, "ffn", size, body.inner_size)


def _cogvideox(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """``CogVideoXTransformer3DModel``; version 1.5 cuts clips in time too."""
    size, heads = _width(reader)
    for key, words in (
        ("ofs_embed_dim", "CogVideoX 1.5's image-to-video model is not modelled"),
        ("use_learned_positional_embeddings", "CogVideoX's image-to-video model is not modelled"),
    ):
        if reader.raw(key):
            raise reader.fail(key, words)
    reader.choice("activation_fn", reader.text("activation_fn"), ("gelu-approximate",))
    patch, channels = reader.integer("patch_size"), reader.integer("in_channels")
    times = reader.optional_integer("patch_size_t")
    grid = LatentGrid(
        channels=channels, scale=SCALE, patch=(patch, patch),
        image=(reader.integer("sample_height") * SCALE, reader.integer("sample_width") * SCALE),
        frames=reader.integer("sample_frames"),
        frame_scale=reader.integer("temporal_compression_ratio"), frame_patch=times or 1,
    )  # fmt: skip
    condition, text = reader.integer("time_embed_dim"), reader.integer("text_embed_dim")
    prompt, dropout = reader.integer("max_text_seq_length"), reader.number("dropout")
    rotary = reader.flag("use_rotary_positional_embeddings")
    time = TimeEmbedding(module="", size=condition, features=size, parts=("time_embedding",))
    entry = JoinedEntryBody(
        size=size, grid=grid, time=time, text=text, head_dim=reader.integer("attention_head_dim"),
        prompt=prompt, rotary=rotary, dropout=dropout, patch_bias=reader.flag("patch_bias"),
    )  # fmt: skip
    table = ParameterTable()
    with table.block("embed", body=entry):
        if times is None:
            bias = entry.patch_bias
            table.convolution("patch_embed.proj", channels, size, patch, patch, bias=bias)
        else:
            table.linear("patch_embed.proj", grid.features, size)
        table.linear("patch_embed.text_proj", text, size)
        _time(table, time)
    affine = reader.flag("norm_elementwise_affine")
    body = ExpertLayerBody(
        size=size, inner_size=NETWORK_RATIO * size, num_heads=heads,
        bias=reader.flag("attention_bias"), rotary=rotary, affine=affine, dropout=dropout,
    )  # fmt: skip
    with table.block("layers", count=reader.layers("num_layers"), body=body):
        _cogvideox_layer(table, body, condition)
    ending = DenoisedBody(
        size=size, condition=condition, grid=grid, affine=affine, first_norm="norm_final",
        outputs=grid.features // channels * reader.integer("out_channels", default=channels),
    )  # fmt: skip
    _denoised(table, ending)
    return _model(reader, request, table, size=size, prompt=prompt)


def _cogvideox_layer(table: ParameterTable, body: ExpertLayerBody, condition: int) -> None:
    size, head_dim = body.size, body.size // body.num_heads
    _expert_norm(table, "norm1", body, condition)
    for name in ("norm_q", "norm_k"):
        table.norm(f"attn1.{name}", head_dim)
    _squares(table, "attn1", size, "to_q", "to_k", "to_v", bias=body.bias)
    _squares(table, "attn1", size, "to_out.0")
    _expert_norm(table, "norm2", body, condition)
    _network(table, "ff", size, body.inner_size)


def _expert_norm(table: ParameterTable, module: str, body: ExpertLayerBody, condition: int) -> None:
    table.linear(f"{module}.linear", condition, 6 * body.size)
    if body.affine:
        table.norm(f"{module}.norm", body.size)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "CogVideoXTransformer3DModel": _cogvideox,
    "FluxTransformer2DModel": _flux,
    "PixArtTransformer2DModel": _pixart,
    "QwenImageTransformer2DModel": _qwen_image,
    "SD3Transformer2DModel": _sd3,
    "WanTransformer3DModel": _wan,
}
