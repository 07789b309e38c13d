"""CogVideoX: clip and prompt share all but how they are modulated; version 1.5 cuts clips in time too.

(diffusers 0.42: models/transformers/cogvideox_transformer_3d.py, models/embeddings.py, ``CogVideoXPatchEmbed``)
"""

from memplan.classes.denoising.attention import Attention, Tables, attended, turned
from memplan.classes.denoising.base import (
    SCALE,
    Denoiser,
    PatchEmbedding,
    Sample,
    heads_of,
    refuse,
    unpatched,
)
from memplan.classes.denoising.parts import (
    BareNorm,
    FeedForward,
    Modulated,
    Perceptron,
    cut_row,
    waves,
)
from memplan.classes.denoising.positions import made_in_fp64
from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.denoisers.sizes import latent_size
from memplan.graph.modules.basic import Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operations.elementwise import written
from memplan.model.config import ConfigReader
from memplan.model.denoisers import LatentGrid


class JoinedAttention(Attention):
    """``Attention`` with ``CogVideoXAttnProcessor2_0``: one row of both; the clip's heads are turned where
    they lie."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(*heads_of(config))
        self.norm_q, self.norm_k = LayerNorm(self.head_dim), LayerNorm(self.head_dim)
        self.add_projections("to_q", "to_k", "to_v", bias=config.flag("attention_bias"))
        self.add_output()

    def forward(
        self,
        hidden_states: Handle,
        encoder_hidden_states: Handle,
        image_rotary_emb: Tables | None,
    ) -> tuple[Handle, Handle]:
        text_seq_length, length = encoder_hidden_states.shape[1], hidden_states.shape[1]
        hidden_states = concatenate(encoder_hidden_states, hidden_states, dim=1)
        query, key, value = self.projected(hidden_states, "to_q", "to_k", "to_v")
        query, key, value = self.heads(query), self.heads(key), self.heads(value)
        query = self.norm_q(query)
        key = self.norm_k(key)
        if image_rotary_emb is not None:
            query = part_turned(query, length, image_rotary_emb)
            key = part_turned(key, length, image_rotary_emb)
        hidden_states = attended(query, key, value)
        hidden_states = self.output(hidden_states)
        encoder_hidden_states, hidden_states = hidden_states.split(text_seq_length, length, dim=1)
        return hidden_states, encoder_hidden_states


def part_turned(x: Handle, length: int, tables: Tables) -> Handle:
    """``x[:, :, text:] = apply_rotary_emb(x[:, :, text:])``."""
    part = turned(x.narrow(length, dim=2), tables)
    return Handle(x.run, written(x.run, x.laid(), part.laid()), x.shape, x.strides)


class LayerNormZero(Modulated):
    """``CogVideoXLayerNormZero``: one norm's weights for both streams."""

    def forward(
        self, hidden_states: Handle, encoder_hidden_states: Handle, temb: Handle
    ) -> tuple[Handle, ...]:
        shift, scale, gate, enc_shift, enc_scale, enc_gate = self.vectors(temb)
        hidden_states = self.norm(hidden_states) * (1 + scale).unsqueeze(1) + shift.unsqueeze(1)
        encoder_hidden_states = self.norm(encoder_hidden_states) * (1 + enc_scale).unsqueeze(
            1
        ) + enc_shift.unsqueeze(1)
        return hidden_states, encoder_hidden_states, gate.unsqueeze(1), enc_gate.unsqueeze(1)


class CogVideoXBlock(Module):
    """``CogVideoXBlock``; the first is given one row of prompt and clip, of which both are views."""

    further = 1

    def __init__(self, config: ConfigReader) -> None:
        size, _ = heads_of(config)
        condition = config.integer("time_embed_dim")
        self.norm1 = LayerNormZero(size, condition=condition, norm=token_norm(config))
        self.attn1 = JoinedAttention(config)
        self.norm2 = LayerNormZero(size, condition=condition, norm=token_norm(config))
        self.ff = FeedForward(size)
        self.ff_dropout = Dropout(config.number("dropout"))

    def forward(
        self,
        hidden_states: Handle,
        encoder_hidden_states: Handle | None,
        temb: Handle,
        image_rotary_emb: Tables | None,
        text_seq_length: int,
    ) -> tuple[Handle, Handle]:
        if encoder_hidden_states is None:
            encoder_hidden_states, hidden_states = cut_row(hidden_states, text_seq_length)
        norm_hidden_states, norm_encoder_hidden_states, gate_msa, enc_gate_msa = self.norm1(
            hidden_states, encoder_hidden_states, temb
        )
        attn_hidden_states, attn_encoder_hidden_states = self.attn1(
            norm_hidden_states, norm_encoder_hidden_states, image_rotary_emb
        )
        hidden_states = hidden_states + gate_msa * attn_hidden_states
        encoder_hidden_states = encoder_hidden_states + enc_gate_msa * attn_encoder_hidden_states
        norm_hidden_states, norm_encoder_hidden_states, gate_ff, enc_gate_ff = self.norm2(
            hidden_states, encoder_hidden_states, temb
        )
        norm_hidden_states = concatenate(norm_encoder_hidden_states, norm_hidden_states, dim=1)
        ff_output = self.ff_dropout(self.ff(norm_hidden_states))
        length = hidden_states.shape[1]
        hidden_states = hidden_states + gate_ff * ff_output.narrow(length, dim=1)
        encoder_hidden_states = encoder_hidden_states + enc_gate_ff * ff_output.narrow(
            text_seq_length, dim=1
        )
        return hidden_states, encoder_hidden_states


def token_norm(config: ConfigReader) -> Module:
    """The norm of tokens, with weights where the config says so."""
    size, _ = heads_of(config)
    return LayerNorm(size) if config.flag("norm_elementwise_affine") else BareNorm()


class PatchEmbed(Module):
    """``CogVideoXPatchEmbed``: a row of prompt and clip, with fixed positions where nothing turns the heads."""

    def __init__(self, config: ConfigReader, grid: LatentGrid, size: int, *, rotary: bool) -> None:
        self.grid, self.rotary = grid, rotary
        self.in_time = config.optional_integer("patch_size_t") is not None
        self.prompt = config.integer("max_text_seq_length")
        if self.in_time:
            self.proj: Module = Linear(grid.features, size, bias=True)
        else:
            bias = config.flag("patch_bias")
            self.proj = PatchEmbedding(grid.channels, size, *grid.patch, bias=bias)
        self.text_proj = Linear(config.integer("text_embed_dim"), size, bias=True)

    def forward(self, text_embeds: Handle, image_embeds: Handle, sample: Sample) -> Handle:
        run = self.run
        text_embeds = self.text_proj(text_embeds)
        if self.in_time:
            image_embeds = image_embeds.like(run.contiguous(image_embeds.record))
            image_embeds = self.proj(image_embeds)
        else:
            image_embeds = self.proj(image_embeds)
            if sample.batch * sample.size.frames > 1:
                image_embeds = image_embeds.contiguous()
        embeds = concatenate(text_embeds, image_embeds, dim=1)
        if not self.rotary:
            pos_embedding = self.positions(sample, embeds)
            embeds = embeds + pos_embedding
        return embeds

    def positions(self, sample: Sample, embeds: Handle) -> Handle:
        """Of the module's own size, or made for this one, cast to the row's format."""
        run, width = self.run, embeds.shape[-1]
        options = replace(run.options, image_size=None, image_width=None, num_frames=None)
        usual = latent_size(options, self.grid)
        numel = (self.prompt + usual.tokens) * width
        shape = 1, self.prompt + sample.size.tokens, width
        table = run.buffer(numel, run.options.weights)
        if usual == sample.size:
            return Handle(run, table, shape).to(embeds.dtype)
        whole = self.positions_made(sample, width)
        return made_from(OperationKind.TO, shape, embeds.dtype, whole)

    def positions_made(self, sample: Sample, width: int) -> Handle:
        """``get_3d_sincos_pos_embed``, in fp64: a quarter tells of time, the rest of space."""
        run, size = self.run, sample.size
        numel = size.tokens * width
        space = made_in_fp64(run, numel // size.frames * 3 // 4)
        spread = made_in_fp64(run, numel * 3 // 4, space)
        both = made_in_fp64(run, numel, spread, made_in_fp64(run, numel // 4))
        del space, spread
        return made_in_fp64(run, self.prompt * width + numel, both)


class CogVideoXModel(Denoiser):
    """``CogVideoXTransformer3DModel``."""

    def __init__(self, config: ConfigReader) -> None:
        self.size, heads = heads_of(config)
        size = self.size
        self.head_dim = size // heads
        refuse(
            config,
            ("ofs_embed_dim", "CogVideoX 1.5's image-to-video model is not modelled"),
            (
                "use_learned_positional_embeddings",
                "CogVideoX's image-to-video model is not modelled",
            ),
        )
        config.choice("activation_fn", config.text("activation_fn"), ("gelu-approximate",))
        self.grid = read_grid(config)
        condition = config.integer("time_embed_dim")
        self.text, self.prompt = (
            config.integer("text_embed_dim"), config.integer("max_text_seq_length"),
        )  # fmt: skip
        self.rotary = config.flag("use_rotary_positional_embeddings")
        self.patch_embed = PatchEmbed(config, self.grid, size, rotary=self.rotary)
        self.embedding_dropout = Dropout(config.number("dropout"))
        self.time_embedding = Perceptron(size, condition)
        self.transformer_blocks = LayerList(
            "layers", [None] * config.layers("num_layers"), lambda _: CogVideoXBlock(config)
        )
        self.norm_final = LayerNorm(size)
        self.norm_out = Continuous(size, condition=condition, norm=token_norm(config))
        channels = self.grid.channels
        outputs = config.integer("out_channels", default=channels)
        self.proj_out = Linear(size, self.grid.features // channels * outputs, bias=True)
        self.number_layers()

    def forward(self, sample: Sample) -> Handle:
        tokens, tables = sample.size.tokens, None
        latents = sample.latents()
        if self.rotary:
            shape = 1, 1, tokens, self.head_dim
            tables = sample.take(*shape, dtype=DType.FP32), sample.take(*shape, dtype=DType.FP32)
        t_emb = waves(self.run, (sample.batch, self.size), sample.dtype)
        emb = self.time_embedding(t_emb)
        hidden_states = self.patch_embed(sample.prompt(self.text), latents, sample)
        hidden_states = self.embedding_dropout(hidden_states)
        encoder_hidden_states: Handle | None = None
        for block in self.transformer_blocks:
            hidden_states, encoder_hidden_states = block(
                hidden_states, encoder_hidden_states, emb, tables, sample.prompt_tokens
            )
        self.begin_head(hidden_states)
        hidden_states = self.norm_final(hidden_states)
        hidden_states = self.norm_out(hidden_states, emb)
        hidden_states = self.proj_out(hidden_states)
        return unpatched(hidden_states)


class Continuous(Modulated):
    """``AdaLayerNorm``, which makes the shift first."""

    parts = 2

    def forward(self, x: Handle, temb: Handle) -> Handle:
        shift, scale = self.vectors(temb)
        x = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return x


def read_grid(config: ConfigReader) -> LatentGrid:
    """The clips' latents."""
    patch = config.integer("patch_size")
    height, width = config.integer("sample_height"), config.integer("sample_width")
    return LatentGrid(
        channels=config.integer("in_channels"), scale=SCALE, patch=(patch, patch),
        image=(height * SCALE, width * SCALE), frames=config.integer("sample_frames"),
        frame_scale=config.integer("temporal_compression_ratio"),
        frame_patch=config.optional_integer("patch_size_t") or 1,
    )  # fmt: skip
