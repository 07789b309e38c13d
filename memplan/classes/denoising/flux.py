"""FLUX: layers of two streams, then of one row of both.

(diffusers 0.42: models/transformers/transformer_flux.py)
"""

from memplan.classes.denoising.attention import (
    Attention,
    KernelRMSNorm,
    Tables,
    dispatched,
    made_tables,
    turned,
)
from memplan.classes.denoising.base import SCALE, Denoiser, Sample, heads_of, unpatched
from memplan.classes.denoising.joint import JointBlock
from memplan.classes.denoising.parts import (
    NETWORK_RATIO,
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    Modulated,
    TimeTextEmbedding,
    cut_row,
)
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.denoisers import LatentGrid
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock

PROMPT = 512
"""Tokens of T5's part of a prompt (``--max_sequence_length``)."""
IMAGE = (1024, 1024)
PACKED = 2
"""Latents of a token, down and across: four lie in its channels already."""


class FluxAttention(Attention):
    """``FluxAttention`` with ``FluxAttnProcessor``: the prompt's tokens stand before the picture's."""

    def __init__(self, size: int, num_heads: int, *, added: bool) -> None:
        super().__init__(size, num_heads)
        self.norm_q, self.norm_k = KernelRMSNorm(self.head_dim), KernelRMSNorm(self.head_dim)
        self.add_projections("to_q", "to_k", "to_v")
        if added:
            self.add_output()
            self.norm_added_q = KernelRMSNorm(self.head_dim)
            self.norm_added_k = KernelRMSNorm(self.head_dim)
            self.add_projections("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    def forward(
        self,
        hidden_states: Handle,
        encoder_hidden_states: Handle | None,
        image_rotary_emb: Tables,
    ) -> tuple[Handle, Handle | None]:
        query, key, value = self.projected(hidden_states, "to_q", "to_k", "to_v")
        others: list[Handle] = []
        if encoder_hidden_states is not None:
            others = self.projected(encoder_hidden_states, "add_q_proj", "add_k_proj", "add_v_proj")
        query, key, value = self.apart(query), self.apart(key), self.apart(value)
        query = self.norm_q(query)
        key = self.norm_k(key)
        if others:
            others[0] = self.norm_added_q(self.apart(others[0]))
            others[1] = self.norm_added_k(self.apart(others[1]))
            others[2] = self.apart(others[2])
            query = concatenate(others[0], query, dim=1)
            key = concatenate(others[1], key, dim=1)
            value = concatenate(others[2], value, dim=1)
        query = turned(query, image_rotary_emb)
        key = turned(key, image_rotary_emb)
        hidden_states = dispatched(query, key, value)
        hidden_states = hidden_states.to(query.dtype)
        if encoder_hidden_states is None:
            return hidden_states, None
        first, whole = encoder_hidden_states.shape[1], hidden_states.shape[1]
        encoder_hidden_states, hidden_states = hidden_states.split(first, whole - first, dim=1)
        hidden_states = self.to_out[0](hidden_states.contiguous())
        hidden_states = self.to_out[1](hidden_states)
        encoder_hidden_states = self.to_add_out(encoder_hidden_states.contiguous())
        return hidden_states, encoder_hidden_states


class FluxBlock(JointBlock):
    """``FluxTransformerBlock``."""

    names_outputs = True

    def __init__(self, config: ConfigReader) -> None:
        size, heads = heads_of(config)
        self.norm1 = AdaLayerNormZero(size)
        self.norm1_context = AdaLayerNormZero(size)
        self.attn = FluxAttention(size, heads, added=True)
        self.add_networks(size)


class AdaLayerNormZeroSingle(Modulated):
    """Of the row of both: a gate beside what is modulated."""

    parts = 3

    def forward(self, x: Handle, emb: Handle) -> tuple[Handle, Handle]:
        shift_msa, scale_msa, gate_msa = self.vectors(emb)
        x = self.norm(x) * (1 + scale_msa.unsqueeze(1)) + shift_msa.unsqueeze(1)
        return x, gate_msa


class FluxSingleBlock(Module):
    """``FluxSingleTransformerBlock``: attention and network side by side, joined by one matrix.

    What it returns is one row here, which the next one cuts and joins.
    """

    further = 1

    def __init__(self, config: ConfigReader) -> None:
        size, heads = heads_of(config)
        inner = NETWORK_RATIO * size
        self.norm = AdaLayerNormZeroSingle(size)
        self.proj_mlp = Linear(size, inner, bias=True)
        self.act_mlp = ActivationModule(Activation.GELU_TANH)
        self.proj_out = Linear(size + inner, size, bias=True)
        self.attn = FluxAttention(size, heads, added=False)

    def forward(
        self,
        hidden_states: Handle,
        encoder_hidden_states: Handle | None,
        temb: Handle,
        image_rotary_emb: Tables,
        text_seq_len: int,
    ) -> Handle:
        if encoder_hidden_states is None:
            hidden_states = concatenate(*cut_row(hidden_states, text_seq_len), dim=1)
        else:
            hidden_states = joined(encoder_hidden_states, hidden_states)
        residual = hidden_states
        norm_hidden_states, gate = self.norm(hidden_states, temb)
        run = self.run
        around, run.block = run.block, LayerBlock.NETWORK
        mlp_hidden_states = self.act_mlp(self.proj_mlp(norm_hidden_states))
        attn_output, _ = self.attn(norm_hidden_states, None, image_rotary_emb)
        hidden_states = concatenate(attn_output, mlp_hidden_states, dim=2)
        gate = gate.unsqueeze(1)
        hidden_states = gate * self.proj_out(hidden_states)
        run.block = around
        hidden_states = residual + hidden_states
        return hidden_states


def joined(prompt: Handle, x: Handle) -> Handle:
    """Both streams as one row. Their gradients are two views of the row's, which outlive this segment
    together; here each is a tensor of its own, as large together."""
    run, (batch, first, width) = x.run, prompt.shape
    row = empty(run, (batch, first + x.shape[1], width), x.dtype)
    run.record(
        OperationKind.CAT, (prompt.record, x.record), (row.record,),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    return row


class FluxModel(Denoiser):
    """``FluxTransformer2DModel``."""

    prompt = PROMPT
    packed = True

    def __init__(self, config: ConfigReader) -> None:
        self.size, heads = heads_of(config)
        size, channels = self.size, config.integer("in_channels")
        self.head_dim = size // heads
        key = "patch_size"
        if config.integer(key) != 1:
            raise config.fail(key, "must be 1: the latents of a token are packed before")
        latent = config.divide("in_channels", channels, "latents of a token", PACKED**2)
        self.grid = LatentGrid(channels=latent, image=IMAGE, scale=SCALE, patch=(PACKED, PACKED))
        guided = ("guidance_embedder",) if config.flag("guidance_embeds") else ()
        self.time_text_embed = TimeTextEmbedding(
            size, parts=("timestep_embedder", *guided),
            pooled=config.integer("pooled_projection_dim"),
        )  # fmt: skip
        self.text = config.integer("joint_attention_dim")
        self.context_embedder = Linear(self.text, size, bias=True)
        self.x_embedder = Linear(channels, size, bias=True)
        self.transformer_blocks = LayerList(
            "joint.layers", [None] * config.layers("num_layers"), lambda _: FluxBlock(config)
        )
        self.single_transformer_blocks = LayerList(
            "single.layers",
            [None] * config.layers("num_single_layers"),
            lambda _: FluxSingleBlock(config),
        )
        self.norm_out = AdaLayerNormContinuous(size)
        self.proj_out = Linear(size, config.integer("out_channels", default=channels), bias=True)
        self.number_layers()

    def forward(self, sample: Sample) -> Handle:
        hidden_states = self.x_embedder(sample.latents())
        temb = self.time_text_embed(sample)
        encoder_hidden_states: Handle | None = self.context_embedder(sample.prompt(self.text))
        positions = sample.prompt_tokens + sample.size.tokens
        image_rotary_emb = made_tables(self.run, 1, positions, 1, self.head_dim)
        for block in self.transformer_blocks:
            hidden_states, encoder_hidden_states = block(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb
            )
        for block in self.single_transformer_blocks:
            hidden_states = block(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, sample.prompt_tokens
            )
            encoder_hidden_states = None
        self.begin_head(hidden_states)
        _, hidden_states = cut_row(hidden_states, sample.prompt_tokens)
        hidden_states = self.norm_out(hidden_states, temb)
        output = self.proj_out(hidden_states)
        return unpatched(output)
