"""Wan: a clip attends to itself, then to the prompt; norms and sums are fp32.

(diffusers 0.42: models/transformers/transformer_wan.py)
"""

from memplan.classes.denoising.attention import (
    Attention,
    KernelRMSNorm,
    Tables,
    dispatched,
    made_tables,
    pairs_of,
)
from memplan.classes.denoising.base import (
    SCALE,
    Denoiser,
    PatchEmbedding,
    Sample,
    chunked,
    heads_of,
    unpatched,
)
from memplan.classes.denoising.parts import FeedForward, FP32LayerNorm, Perceptron, cut_row, waves
from memplan.classes.denoising.positions import added_twice
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operations.elementwise import written
from memplan.model.config import ConfigReader
from memplan.model.denoisers import LatentGrid
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock

PROMPT = 512
"""Tokens of a prompt, which umT5 pads it to."""
IMAGE = (480, 832)
FRAMES = 81
FRAME_SCALE = 4
"""Frames of a latent, of the autoencoder for video."""
PICTURE_TOKENS = 257
"""Of CLIP's large model: 16 x 16 patches and one for all of them."""


class WanAttention(Attention):
    """``WanAttention`` with ``WanAttnProcessor``: queries and keys are normed over all heads at once."""

    def __init__(self, size: int, num_heads: int, *, sees: bool = False) -> None:
        super().__init__(size, num_heads)
        self.add_projections("to_q", "to_k", "to_v")
        self.add_output()
        self.norm_q, self.norm_k = KernelRMSNorm(size), KernelRMSNorm(size)
        self.sees = sees
        if sees:
            self.add_projections("add_k_proj", "add_v_proj")
            self.norm_added_k = KernelRMSNorm(size)

    def forward(
        self,
        hidden_states: Handle,
        encoder_hidden_states: Handle | None = None,
        rotary_emb: Tables | None = None,
    ) -> Handle:
        encoder_hidden_states_img = None
        if self.sees and encoder_hidden_states is not None:
            encoder_hidden_states_img, encoder_hidden_states = cut_row(
                encoder_hidden_states, PICTURE_TOKENS
            )
        read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = self.to_q(hidden_states), self.to_k(read), self.to_v(read)
        del read
        query = self.norm_q(query)
        key = self.norm_k(key)
        query, key, value = self.apart(query), self.apart(key), self.apart(value)
        if rotary_emb is not None:
            query = turned(query, *rotary_emb)
            key = turned(key, *rotary_emb)
        hidden_states_img = None
        if encoder_hidden_states_img is not None:
            key_img, value_img = self.projected(
                encoder_hidden_states_img, "add_k_proj", "add_v_proj"
            )
            key_img = self.norm_added_k(key_img)
            key_img, value_img = self.apart(key_img), self.apart(value_img)
            hidden_states_img = dispatched(query, key_img, value_img)
            hidden_states_img = hidden_states_img.to(query.dtype)
        hidden_states = dispatched(query, key, value)
        hidden_states = hidden_states.to(query.dtype)
        if hidden_states_img is not None:
            hidden_states = hidden_states + hidden_states_img
        return self.output(hidden_states)


def turned(hidden_states: Handle, freqs_cos: Handle, freqs_sin: Handle) -> Handle:
    """``apply_rotary_emb``: both halves are written into an empty tensor."""
    x1, x2 = pairs_of(hidden_states)
    cos, sin = freqs_cos.narrow(x1.shape[-1]), freqs_sin.narrow(x1.shape[-1])
    out = made_by(hidden_states.run, OperationKind.EMPTY, hidden_states.shape, hidden_states.dtype)
    out = put(out, x1 * cos - x2 * sin)
    out = put(out, x1 * sin + x2 * cos)
    return out


def put(out: Handle, half: Handle) -> Handle:
    """``out[..., 0::2] = half``: in place."""
    return Handle(out.run, written(out.run, out.record, half.record), out.shape)


class WanBlock(Module):
    """``WanTransformerBlock``: norms and sums in fp32, what stands between in the stream's format."""

    def __init__(self, config: ConfigReader, *, sees: bool) -> None:
        size, heads = heads_of(config)
        self.scale_shift_table = Weight(1, 6, size)
        self.norm1 = FP32LayerNorm(size, affine=False)
        self.attn1 = WanAttention(size, heads)
        self.attn2 = WanAttention(size, heads, sees=sees)
        self.attn2.block = LayerBlock.CROSS_ATTENTION
        self.normed = config.flag("cross_attn_norm")
        if self.normed:
            self.norm2 = FP32LayerNorm(size)
        self.ffn = FeedForward(size, config.integer("ffn_dim"))
        self.norm3 = FP32LayerNorm(size, affine=False)

    def forward(
        self,
        hidden_states: Handle,
        encoder_hidden_states: Handle,
        temb: Handle,
        rotary_emb: Tables,
    ) -> Handle:
        dtype = hidden_states.dtype
        made = self.operand(self.scale_shift_table) + temb.float()
        shift_msa, scale_msa, gate_msa, c_shift_msa, c_scale_msa, c_gate_msa = chunked(
            made, 6, dim=1
        )
        del made
        norm_hidden_states = (self.norm1(hidden_states.float()) * (1 + scale_msa) + shift_msa).to(
            dtype
        )
        attn_output = self.attn1(norm_hidden_states, None, rotary_emb)
        hidden_states = (hidden_states.float() + attn_output * gate_msa).to(dtype)
        if self.normed:
            norm_hidden_states = self.norm2(hidden_states.float()).to(dtype)
        else:
            norm_hidden_states = hidden_states.float().to(dtype)
        attn_output = self.attn2(norm_hidden_states, encoder_hidden_states)
        hidden_states = hidden_states + attn_output
        norm_hidden_states = (
            self.norm3(hidden_states.float()) * (1 + c_scale_msa) + c_shift_msa
        ).to(dtype)
        ff_output = self.ffn(norm_hidden_states)
        hidden_states = (hidden_states.float() + ff_output.float() * c_gate_msa).to(dtype)
        return hidden_states


class PictureEmbedding(Module):
    """``WanImageEmbedding``: norms in fp32, a network between them."""

    def __init__(self, picture: int, size: int) -> None:
        self.norm1 = FP32LayerNorm(picture)
        self.ff = FeedForward(picture, picture, size, Activation.GELU)
        self.norm2 = FP32LayerNorm(size)

    def forward(self, encoder_hidden_states_image: Handle) -> Handle:
        hidden_states = self.norm1(encoder_hidden_states_image)
        hidden_states = self.ff(hidden_states)
        hidden_states = self.norm2(hidden_states)
        return hidden_states


class TimeTextImageEmbedding(Module):
    """``WanTimeTextImageEmbedding``."""

    def __init__(self, waves_of_time: int, size: int, text: int, picture: int) -> None:
        self.waves, self.size = waves_of_time, size
        self.time_embedder = Perceptron(waves_of_time, size)
        self.act_fn = ActivationModule(Activation.SILU)
        self.time_proj = Linear(size, 6 * size, bias=True)
        self.text_embedder = Perceptron(text, size, kind=Activation.GELU_TANH)
        if picture:
            self.image_embedder = PictureEmbedding(picture, size)

    def forward(
        self, sample: Sample, encoder_hidden_states: Handle, picture: Handle | None
    ) -> tuple[Handle, Handle, Handle, Handle | None]:
        run = self.run
        timestep = waves(run, (sample.batch, self.waves), run.compute)
        temb = self.time_embedder(timestep).to(sample.dtype)
        timestep_proj = self.time_proj(self.act_fn(temb))
        encoder_hidden_states = self.text_embedder(encoder_hidden_states)
        if picture is not None:
            picture = self.image_embedder(picture)
        return temb, timestep_proj, encoder_hidden_states, picture


class WanModel(Denoiser):
    """``WanTransformer3DModel``: from text, from text and a first frame, and from its tokens too."""

    prompt = PROMPT

    def __init__(self, config: ConfigReader) -> None:
        self.size, heads = heads_of(config)
        size = self.size
        self.head_dim = size // heads
        self.picture = read_picture(config, size)
        config.choice("qk_norm", config.text("qk_norm"), ("rms_norm_across_heads",))
        self.grid = read_grid(config)
        patch = self.grid.frame_patch, *self.grid.patch
        self.text = config.integer("text_dim")
        self.positions = config.integer("rope_max_seq_len")
        self.scale_shift_table = Weight(1, 2, size)
        self.patch_embedding = PatchEmbedding(config.integer("in_channels"), size, *patch)
        self.condition_embedder = TimeTextImageEmbedding(
            config.integer("freq_dim"), size, self.text, self.picture
        )
        sees = bool(self.picture)
        self.blocks = LayerList(
            "layers", [None] * config.layers("num_layers"), lambda _: WanBlock(config, sees=sees)
        )
        self.norm_out = FP32LayerNorm(size, affine=False)
        self.proj_out = Linear(size, self.grid.features, bias=True)
        self.number_layers()

    def rope(self, sample: Sample) -> Tables:
        """The tables of the clip; the module owns those of all positions."""
        run, tokens = self.run, sample.size.tokens
        for _ in range(2):
            run.buffer(self.positions * self.head_dim, DType.FP32)
        return made_tables(run, 1, tokens, 1, self.head_dim)

    def forward(self, sample: Sample) -> Handle:
        latents = sample.latents()
        rotary_emb = self.rope(sample)
        hidden_states = self.patch_embedding(latents)
        hidden_states = hidden_states.contiguous()
        picture = None
        if self.picture:
            picture = sample.take(sample.batch, PICTURE_TOKENS, self.picture)
        temb, timestep_proj, encoder_hidden_states, picture = self.condition_embedder(
            sample, sample.prompt(self.text), picture
        )
        timestep_proj = timestep_proj.view(sample.batch, 6, -1)
        if picture is not None:
            encoder_hidden_states = concatenate(picture, encoder_hidden_states, dim=1)
        for block in self.blocks:
            hidden_states = block(hidden_states, encoder_hidden_states, timestep_proj, rotary_emb)
        self.begin_head(hidden_states)
        dtype = hidden_states.dtype
        shift, scale = added_twice(self, self.scale_shift_table, temb)
        hidden_states = (self.norm_out(hidden_states.float()) * (1 + scale) + shift).to(dtype)
        hidden_states = self.proj_out(hidden_states)
        return unpatched(hidden_states)


def read_picture(config: ConfigReader, size: int) -> int:
    """Width of the tokens that CLIP gives a picture; 0: the model is given none.

    Raises ``ConfigError``.
    """
    key = "pos_embed_seq_len"
    if config.has(key):
        raise config.fail(key, "models that are given a last frame too are not modelled")
    picture = config.optional_integer("image_dim") or 0
    key = "added_kv_proj_dim"
    seen = config.optional_integer(key)
    if bool(seen) is not bool(picture) or (seen and seen != size):
        msg = f"must be num_attention_heads x attention_head_dim ({size}) where image_dim is set, and only there"
        raise config.fail(key, msg)
    return picture


def read_grid(config: ConfigReader) -> LatentGrid:
    """The clips' latents; channels behind those that are made hold what is known.

    Raises ``ConfigError``.
    """
    channels = config.integer("in_channels")
    made = config.integer("out_channels", default=channels)
    if channels < made:
        key = "in_channels"
        raise config.fail(key, f"must be {made} at least, which out_channels says are made")
    key = "patch_size"
    found = config.integers(key, minimum=1)
    if len(found) != 3:
        raise config.fail(key, f"expected three numbers, got {len(found)}")
    times, down, across = found
    return LatentGrid(
        channels=made, image=IMAGE, scale=SCALE, patch=(down, across), frames=FRAMES,
        frame_scale=FRAME_SCALE, frame_patch=times, beside=channels - made,
    )  # fmt: skip
