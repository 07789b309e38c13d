"""PixArt, Alpha and Sigma: a picture attends to itself, then to the prompt; a table and the time modulate it.

(diffusers 0.42: models/transformers/pixart_transformer_2d.py, models/attention.py, ``BasicTransformerBlock``)
"""

from memplan.classes.denoising.attention import Attention, attended
from memplan.classes.denoising.base import (
    SCALE,
    Denoiser,
    PatchEmbedding,
    Sample,
    chunked,
    heads_of,
    unpatched,
)
from memplan.classes.denoising.parts import (
    WAVES,
    BareNorm,
    FeedForward,
    Perceptron,
    TimeTextEmbedding,
    waves,
)
from memplan.classes.denoising.positions import added_twice, made_in_fp64
from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.denoisers.sizes import latent_size
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.denoisers import LatentGrid
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock

PROMPT = 300
"""Tokens that T5's prompts are padded to: Sigma's; Alpha's are 120."""
CONDITIONED_SIZE = 128
"""Latents of a picture's side from which on its resolution and aspect ratio are embedded, where the config
says nothing of it."""


class PixArtAttention(Attention):
    """``Attention`` with ``AttnProcessor2_0``: what it finds is divided by one."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(*heads_of(config))
        self.add_projections("to_q", "to_k", "to_v", bias=config.flag("attention_bias"))
        self.add_output(config.number("dropout"))

    def forward(
        self,
        hidden_states: Handle,
        encoder_hidden_states: Handle | None = None,
        attention_mask: Handle | None = None,
    ) -> Handle:
        if attention_mask is not None:
            batch, _, keys = attention_mask.shape
            shape = batch, self.num_heads, 1, keys
            attention_mask = made_from(
                OperationKind.REPEAT, shape, attention_mask.dtype, attention_mask
            )
        query = self.to_q(hidden_states)
        if encoder_hidden_states is None:
            encoder_hidden_states = hidden_states
        key = self.to_k(encoder_hidden_states)
        value = self.to_v(encoder_hidden_states)
        query, key, value = self.heads(query), self.heads(key), self.heads(value)
        hidden_states = attended(query, key, value, attention_mask)
        hidden_states = hidden_states.to(query.dtype)
        hidden_states = self.output(hidden_states)
        hidden_states = hidden_states / 1.0
        return hidden_states


class TableBlock(Module):
    """``BasicTransformerBlock`` with ``ada_norm_single``: no norm stands before the prompt."""

    def __init__(self, config: ConfigReader) -> None:
        size, _ = heads_of(config)
        self.scale_shift_table = Weight(6, size)
        self.norm1 = BareNorm()
        self.attn1 = PixArtAttention(config)
        self.norm2 = BareNorm()
        self.attn2 = PixArtAttention(config)
        self.attn2.block = LayerBlock.CROSS_ATTENTION
        self.ff = FeedForward(size)

    def forward(
        self, hidden_states: Handle, encoder_hidden_states: Handle, mask: Handle, timestep: Handle
    ) -> Handle:
        batch, _, size = hidden_states.shape
        table = self.operand(self.scale_shift_table)
        made = table.unsqueeze(0) + timestep.view(batch, 6, size)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = chunked(made, 6, dim=1)
        del made, table
        norm_hidden_states = self.norm1(hidden_states)
        norm_hidden_states = norm_hidden_states * (1 + scale_msa) + shift_msa
        attn_output = self.attn1(norm_hidden_states)
        attn_output = gate_msa * attn_output
        hidden_states = attn_output + hidden_states
        norm_hidden_states = hidden_states
        attn_output = self.attn2(norm_hidden_states, encoder_hidden_states, mask)
        hidden_states = attn_output + hidden_states
        norm_hidden_states = self.norm2(hidden_states)
        norm_hidden_states = norm_hidden_states * (1 + scale_mlp) + shift_mlp
        ff_output = self.ff(norm_hidden_states)
        ff_output = gate_mlp * ff_output
        hidden_states = ff_output + hidden_states
        return hidden_states


class SquarePositions(Module):
    """``PatchEmbed``: fixed positions of the module's own size, or made for this one in fp64."""

    def __init__(self, grid: LatentGrid, size: int) -> None:
        self.grid = grid
        self.proj = PatchEmbedding(grid.channels, size, *grid.patch)

    def forward(self, latent: Handle, sample: Sample) -> Handle:
        run = self.run
        latent = self.proj(latent)
        width = latent.shape[-1]
        usual = latent_size(replace(run.options, image_size=None, image_width=None), self.grid)
        table = run.buffer(usual.tokens * width, run.options.weights)
        size, shape = sample.size, (1, sample.size.tokens, width)
        if usual.height == size.height and usual.width == size.width:
            pos_embed = Handle(run, table, shape)
        else:
            half = size.tokens * width // 2
            whole = made_in_fp64(run, 2 * half, made_in_fp64(run, half), made_in_fp64(run, half))
            pos_embed = made_from(OperationKind.TO, shape, DType.FP32, whole)
            del whole
        return (latent + pos_embed).to(latent.dtype)


class ConditionedTime(TimeTextEmbedding):
    """``PixArtAlphaCombinedTimestepSizeEmbeddings``: a picture's numbers beside its time."""

    def __init__(self, size: int, *, conditioned: bool) -> None:
        super().__init__(size)
        self.conditioned = conditioned
        if conditioned:
            self.resolution_embedder = Perceptron(WAVES, size // 3)
            self.aspect_ratio_embedder = Perceptron(WAVES, size // 3)

    def forward(self, sample: Sample) -> Handle:
        timesteps_emb = super().forward(sample)
        if not self.conditioned:
            return timesteps_emb
        batch, run = sample.batch, self.run
        resolution = waves(run, (2 * batch, WAVES), sample.dtype)
        resolution_emb = self.resolution_embedder(resolution).view(batch, -1)
        aspect_ratio = waves(run, (batch, WAVES), sample.dtype)
        aspect_ratio_emb = self.aspect_ratio_embedder(aspect_ratio)
        return timesteps_emb + concatenate(resolution_emb, aspect_ratio_emb, dim=1)


class AdaLayerNormSingle(Module):
    """Times as all layers' modulations."""

    def __init__(self, size: int, *, conditioned: bool) -> None:
        self.emb = ConditionedTime(size, conditioned=conditioned)
        self.silu = ActivationModule(Activation.SILU)
        self.linear = Linear(size, 6 * size, bias=True)

    def forward(self, sample: Sample) -> tuple[Handle, Handle]:
        embedded_timestep = self.emb(sample)
        return self.linear(self.silu(embedded_timestep)), embedded_timestep


class PixArtModel(Denoiser):
    """``PixArtTransformer2DModel``."""

    prompt = PROMPT

    def __init__(self, config: ConfigReader) -> None:
        self.size, _ = heads_of(config)
        size = self.size
        check_pixart(config, size)
        patch, channels = config.integer("patch_size"), config.integer("in_channels")
        side = config.integer("sample_size")
        image = (side * SCALE, side * SCALE)
        self.grid = LatentGrid(channels=channels, image=image, scale=SCALE, patch=(patch, patch))
        conditioned = side == CONDITIONED_SIZE
        if config.has("use_additional_conditions"):
            conditioned = config.flag("use_additional_conditions")
        self.scale_shift_table = Weight(2, size)
        self.pos_embed = SquarePositions(self.grid, size)
        self.transformer_blocks = LayerList(
            "layers", [None] * config.layers("num_layers"), lambda _: TableBlock(config)
        )
        self.norm_out = BareNorm()
        out = config.integer("out_channels", default=channels)
        self.halved = out == 2 * channels
        self.proj_out = Linear(size, patch * patch * out, bias=True)
        self.adaln_single = AdaLayerNormSingle(size, conditioned=conditioned)
        self.text = config.integer("caption_channels")
        self.caption_projection = Perceptron(self.text, size, kind=Activation.GELU_TANH)
        self.number_layers()

    def forward(self, sample: Sample) -> Handle:
        latents = sample.latents()
        mask = sample.take(sample.batch, sample.prompt_tokens).apart(OperationKind.SUB)
        encoder_attention_mask = mask.apart(OperationKind.MUL_SCALAR).unsqueeze(1)
        del mask
        hidden_states = self.pos_embed(latents, sample)
        timestep, embedded_timestep = self.adaln_single(sample)
        encoder_hidden_states = self.caption_projection(sample.prompt(self.text))
        for block in self.transformer_blocks:
            hidden_states = block(
                hidden_states, encoder_hidden_states, encoder_attention_mask, timestep
            )
        self.begin_head(hidden_states)
        shift, scale = added_twice(self, self.scale_shift_table, embedded_timestep)
        hidden_states = self.norm_out(hidden_states)
        hidden_states = hidden_states * (1 + scale) + shift
        hidden_states = self.proj_out(hidden_states)
        output = unpatched(hidden_states)
        return output.split(*(output.shape[-1] // 2,) * 2)[0] if self.halved else output


def check_pixart(config: ConfigReader, size: int) -> None:
    """Refuse what is no PixArt.

    Raises ``ConfigError``.
    """
    config.choice("norm_type", config.text("norm_type"), ("ada_norm_single",))
    config.choice("activation_fn", config.text("activation_fn"), ("gelu-approximate",))
    config.choice("attention_type", config.text("attention_type"), ("default",))
    for key in ("upcast_attention", "norm_elementwise_affine"):
        if config.flag(key):
            raise config.fail(key, "must be false: PixArt has no such layers")
    key = "cross_attention_dim"
    if config.integer(key) != size:
        msg = f"must be num_attention_heads x attention_head_dim ({size}): prompts are projected to it"
        raise config.fail(key, msg)
