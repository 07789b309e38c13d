"""Stable Diffusion 3: picture and prompt, each with all of its own, attend to both.

(diffusers 0.42: models/transformers/transformer_sd3.py, models/attention.py, ``JointTransformerBlock``)
"""

from typing import Any

from memplan.classes.denoising.attention import Attention, RMSNorm, attended
from memplan.classes.denoising.base import (
    SCALE,
    Denoiser,
    PatchEmbedding,
    Sample,
    heads_of,
    unpatched,
)
from memplan.classes.denoising.joint import JointBlock
from memplan.classes.denoising.parts import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    Modulated,
    TimeTextEmbedding,
    cut_row,
)
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.denoisers import LatentGrid

PROMPT = 154
"""Tokens of a prompt: 77 for both CLIPs and, as the script's ``--max_sequence_length``, 77 for T5."""


class AdaLayerNormZeroX(Modulated):
    """``SD35AdaLayerNormZeroX``: one norm, modulated for two attentions."""

    parts = 9

    def forward(self, hidden_states: Handle, emb: Handle) -> tuple[Handle, ...]:
        made = self.vectors(emb)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = made[:6]
        shift_msa2, scale_msa2, gate_msa2 = made[6:]
        del made
        norm_hidden_states = self.norm(hidden_states)
        hidden_states = norm_hidden_states * (1 + scale_msa.unsqueeze(1)) + shift_msa.unsqueeze(1)
        norm_hidden_states2 = norm_hidden_states * (1 + scale_msa2.unsqueeze(1)) + (
            shift_msa2.unsqueeze(1)
        )
        return (
            hidden_states, gate_msa, shift_mlp, scale_mlp, gate_mlp, norm_hidden_states2, gate_msa2,
        )  # fmt: skip


class JointAttention(Attention):
    """``Attention`` with ``JointAttnProcessor2_0``: the prompt's tokens stand behind the picture's."""

    def __init__(
        self, size: int, num_heads: int, *, normed: bool, added: bool, gives_prompt: bool = True
    ) -> None:
        super().__init__(size, num_heads)
        if normed:
            self.norm_q, self.norm_k = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        self.add_projections("to_q", "to_k", "to_v")
        if added:
            self.add_projections("add_k_proj", "add_v_proj", "add_q_proj")
        self.add_output()
        if added and gives_prompt:
            self.add_projections("to_add_out")
        if added and normed:
            self.norm_added_q = RMSNorm(self.head_dim)
            self.norm_added_k = RMSNorm(self.head_dim)

    def forward(
        self, hidden_states: Handle, encoder_hidden_states: Handle | None = None
    ) -> tuple[Handle, Handle | None]:
        length = hidden_states.shape[1]
        query, key, value = self.projected(hidden_states, "to_q", "to_k", "to_v")
        query, key, value = self.heads(query), self.heads(key), self.heads(value)
        query = self.normed("norm_q", query)
        key = self.normed("norm_k", key)
        residual = hidden_states
        if encoder_hidden_states is not None:
            encoder_query, encoder_key, encoder_value = self.projected(
                encoder_hidden_states, "add_q_proj", "add_k_proj", "add_v_proj"
            )
            encoder_query = self.heads(encoder_query)
            encoder_key = self.heads(encoder_key)
            encoder_value = self.heads(encoder_value)
            encoder_query = self.normed("norm_added_q", encoder_query)
            encoder_key = self.normed("norm_added_k", encoder_key)
            query = concatenate(query, encoder_query, dim=2)
            key = concatenate(key, encoder_key, dim=2)
            value = concatenate(value, encoder_value, dim=2)
        hidden_states = attended(query, key, value)
        hidden_states = hidden_states.to(query.dtype)
        if encoder_hidden_states is not None:
            hidden_states, encoder_hidden_states = cut_row(hidden_states, length)
            if "to_add_out" in self.children:
                encoder_hidden_states = self.to_add_out(encoder_hidden_states)
        hidden_states = self.output(hidden_states)
        del residual
        return hidden_states, encoder_hidden_states


class LastNorm(AdaLayerNormContinuous):
    """Of the prompt, in the last layer: there are no gates beside it."""

    def forward(self, x: Handle, emb: Handle) -> Any:
        return (super().forward(x, emb),)


class SD3Block(JointBlock):
    """``JointTransformerBlock``; of the last one nothing of the prompt goes on."""

    def __init__(self, config: ConfigReader, *, dual: bool, last: bool) -> None:
        size, heads = heads_of(config)
        normed = bool(config.text("qk_norm"))
        self.norm1 = AdaLayerNormZeroX(size) if dual else AdaLayerNormZero(size)
        self.norm1_context = LastNorm(size) if last else AdaLayerNormZero(size)
        self.attn = JointAttention(size, heads, normed=normed, added=True, gives_prompt=not last)
        if dual:
            self.attn2 = JointAttention(size, heads, normed=normed, added=False)
        self.add_networks(size, gives_prompt=not last)


class CroppedPositions(Module):
    """``PatchEmbed``: latents through a convolution; of a square of fixed positions the middle is added."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        patch = config.integer("patch_size")
        self.proj = PatchEmbedding(config.integer("in_channels"), size, patch, patch)
        self.positions = config.integer("pos_embed_max_size")

    def forward(self, latent: Handle) -> Handle:
        run, (_, tokens, _) = self.run, latent.shape
        latent = self.proj(latent)
        width = latent.shape[-1]
        table = run.buffer(self.positions**2 * width, run.options.weights)
        whole = Handle(run, table, (1, self.positions**2, width))
        rows = made_from(OperationKind.CLONE, (1, tokens, width), whole.dtype, whole)
        return (latent + rows).to(latent.dtype)


class SD3Model(Denoiser):
    """``SD3Transformer2DModel``; Stable Diffusion 3.5 norms heads, and its medium one has dual layers."""

    prompt = PROMPT

    def __init__(self, config: ConfigReader) -> None:
        self.size, _ = heads_of(config)
        size, key = self.size, "caption_projection_dim"
        if config.integer(key) != size:
            msg = f"must be num_attention_heads x attention_head_dim ({size}): both streams are as wide"
            raise config.fail(key, msg)
        norm = config.text("qk_norm")
        if norm:
            config.choice("qk_norm", norm, ("rms_norm",))
        patch, channels = config.integer("patch_size"), config.integer("in_channels")
        side = config.integer("sample_size") * SCALE
        self.grid = LatentGrid(
            channels=channels, image=(side, side), scale=SCALE, patch=(patch, patch)
        )
        self.pos_embed = CroppedPositions(config, size)
        pooled = config.integer("pooled_projection_dim")
        self.time_text_embed = TimeTextEmbedding(size, pooled=pooled)
        self.text = config.integer("joint_attention_dim")
        self.context_embedder = Linear(self.text, size, bias=True)
        dual, count = set(config.integers("dual_attention_layers")), config.layers("num_layers")
        kinds = [(number in dual, number == count - 1) for number in range(count)]
        self.transformer_blocks = LayerList(
            "joint.layers", kinds, lambda kind: SD3Block(config, dual=kind[0], last=kind[1])
        )
        self.norm_out = AdaLayerNormContinuous(size)
        outputs = patch * patch * config.integer("out_channels", default=channels)
        self.proj_out = Linear(size, outputs, bias=True)
        self.number_layers()

    def forward(self, sample: Sample) -> Handle:
        hidden_states = self.pos_embed(sample.latents())
        hidden_states = hidden_states.contiguous()
        temb = self.time_text_embed(sample)
        encoder_hidden_states = self.context_embedder(sample.prompt(self.text))
        for block in self.transformer_blocks:
            hidden_states, encoder_hidden_states = block(hidden_states, encoder_hidden_states, temb)
        self.begin_head(hidden_states)
        hidden_states = self.norm_out(hidden_states, temb)
        hidden_states = self.proj_out(hidden_states)
        return unpatched(hidden_states)
