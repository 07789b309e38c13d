"""Qwen-Image: picture and prompt, each with all of its own; heads are turned as complex numbers.

(diffusers 0.42: models/transformers/transformer_qwenimage.py)
"""

from memplan.classes.denoising.attention import Attention, RMSNorm, Tables, dispatched
from memplan.classes.denoising.base import (
    SCALE,
    Denoiser,
    ModuleList,
    Sample,
    chunked,
    heads_of,
    refuse,
    unpatched,
)
from memplan.classes.denoising.parts import (
    AdaLayerNormContinuous,
    BareNorm,
    FeedForward,
    TimeTextEmbedding,
    cut_row,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle, seen_in
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.unread import unread_graph
from memplan.model.config import ConfigReader
from memplan.model.denoisers import LatentGrid
from memplan.model.networks import Activation

PROMPT = 512
"""Tokens of a prompt at most (``--max_sequence_length``)."""
IMAGE = (1024, 1024)
KNOWN_POSITIONS = 4096
"""Positions ahead and behind of which the module knows the complex numbers."""


class DoubleAttention(Attention):
    """``Attention`` with ``QwenDoubleStreamAttnProcessor2_0``: the prompt's tokens stand before the picture's."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__(size, num_heads)
        self.norm_q, self.norm_k = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        self.add_projections("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj")
        self.add_output()
        self.add_projections("to_add_out")
        self.norm_added_q = RMSNorm(self.head_dim)
        self.norm_added_k = RMSNorm(self.head_dim)

    def forward(
        self, hidden_states: Handle, encoder_hidden_states: Handle, image_rotary_emb: Tables
    ) -> tuple[Handle, Handle]:
        img_query, img_key, img_value = self.projected(hidden_states, "to_q", "to_k", "to_v")
        txt_query, txt_key, txt_value = self.projected(
            encoder_hidden_states, "add_q_proj", "add_k_proj", "add_v_proj"
        )
        img_query, img_key = self.apart(img_query), self.apart(img_key)
        img_value = self.apart(img_value)
        txt_query, txt_key = self.apart(txt_query), self.apart(txt_key)
        txt_value = self.apart(txt_value)
        img_query = self.norm_q(img_query)
        img_key = self.norm_k(img_key)
        txt_query = self.norm_added_q(txt_query)
        txt_key = self.norm_added_k(txt_key)
        img_freqs, txt_freqs = image_rotary_emb
        img_query = turned(img_query, img_freqs)
        img_key = turned(img_key, img_freqs)
        txt_query = turned(txt_query, txt_freqs)
        txt_key = turned(txt_key, txt_freqs)
        joint_query = concatenate(txt_query, img_query, dim=1)
        joint_key = concatenate(txt_key, img_key, dim=1)
        joint_value = concatenate(txt_value, img_value, dim=1)
        joint_hidden_states = dispatched(joint_query, joint_key, joint_value)
        joint_hidden_states = joint_hidden_states.to(joint_query.dtype)
        txt_attn_output, img_attn_output = cut_row(
            joint_hidden_states, encoder_hidden_states.shape[1]
        )
        img_attn_output = self.to_out[0](img_attn_output.contiguous())
        img_attn_output = self.to_out[1](img_attn_output)
        txt_attn_output = self.to_add_out(txt_attn_output.contiguous())
        return img_attn_output, txt_attn_output


def turned(x: Handle, table: Handle) -> Handle:
    """``apply_rotary_emb_qwen``: a product of complex numbers in fp32, cast back."""
    return (x.float() * table).to(x.dtype)


class DoubleBlock(Module):
    """``QwenImageTransformerBlock``; nothing reads what the last one makes of the prompt, though it makes it."""

    further = 1

    def __init__(self, size: int, heads: int) -> None:
        self.img_mod = modulation(size)
        self.img_norm1 = BareNorm()
        self.attn = DoubleAttention(size, heads)
        self.img_norm2 = BareNorm()
        self.img_mlp = FeedForward(size)
        self.txt_mod = modulation(size)
        self.txt_norm1 = BareNorm()
        self.txt_norm2 = BareNorm()
        self.txt_mlp = FeedForward(size)

    def forward(
        self,
        hidden_states: Handle,
        encoder_hidden_states: Handle,
        temb: Handle,
        image_rotary_emb: Tables,
    ) -> tuple[Handle, Handle]:
        img_mod_params = self.img_mod[1](self.img_mod[0](temb))
        txt_mod_params = self.txt_mod[1](self.txt_mod[0](temb))
        img_mod1, img_mod2 = chunked(img_mod_params, 2)
        txt_mod1, txt_mod2 = chunked(txt_mod_params, 2)
        img_normed = self.img_norm1(hidden_states)
        img_modulated, img_gate1 = modulated(img_normed, img_mod1)
        txt_normed = self.txt_norm1(encoder_hidden_states)
        txt_modulated, txt_gate1 = modulated(txt_normed, txt_mod1)
        attn_output = self.attn(img_modulated, txt_modulated, image_rotary_emb)
        img_attn_output, txt_attn_output = attn_output
        hidden_states = hidden_states + img_gate1 * img_attn_output
        encoder_hidden_states = encoder_hidden_states + txt_gate1 * txt_attn_output
        img_normed2 = self.img_norm2(hidden_states)
        img_modulated2, img_gate2 = modulated(img_normed2, img_mod2)
        img_mlp_output = self.img_mlp(img_modulated2)
        hidden_states = hidden_states + img_gate2 * img_mlp_output
        txt_normed2 = self.txt_norm2(encoder_hidden_states)
        txt_modulated2, txt_gate2 = modulated(txt_normed2, txt_mod2)
        txt_mlp_output = self.txt_mlp(txt_modulated2)
        encoder_hidden_states = encoder_hidden_states + txt_gate2 * txt_mlp_output
        return hidden_states, encoder_hidden_states


def modulation(size: int) -> ModuleList:
    """Six vectors of the time's."""
    silu, made = ActivationModule(Activation.SILU), Linear(size, 6 * size, bias=True)
    return ModuleList({0: silu, 1: made})


def modulated(x: Handle, mod_params: Handle) -> tuple[Handle, Handle]:
    """``_modulate``: what is scaled and shifted, and the gate."""
    shift, scale, gate = chunked(mod_params, 3)
    shift_result = shift.unsqueeze(1)
    scale_result = scale.unsqueeze(1)
    gate_result = gate.unsqueeze(1)
    return x * (1 + scale_result) + shift_result, gate_result


class QwenImageModel(Denoiser):
    """``QwenImageTransformer2DModel``."""

    prompt = PROMPT
    packed = True

    def __init__(self, config: ConfigReader) -> None:
        self.size, heads = heads_of(config)
        size = self.size
        self.head_dim = size // heads
        refuse(
            config,
            ("guidance_embeds", "a guidance is not embedded by diffusers' class"),
            ("zero_cond_t", "editing, with two times a sample, is not modelled"),
            ("use_additional_t_cond", "layered pictures are not modelled"),
            ("use_layer3d_rope", "layered pictures are not modelled"),
        )
        channels, patch = config.integer("in_channels"), config.integer("patch_size")
        latent = config.divide("in_channels", channels, "latents of a token", patch**2)
        self.grid = LatentGrid(channels=latent, image=IMAGE, scale=SCALE, patch=(patch, patch))
        self.time_text_embed = TimeTextEmbedding(size)
        self.text = config.integer("joint_attention_dim")
        self.txt_norm = RMSNorm(self.text)
        self.img_in = Linear(channels, size, bias=True)
        self.txt_in = Linear(self.text, size, bias=True)
        count = config.layers("num_layers")
        kinds = [number == count - 1 for number in range(count)]
        self.transformer_blocks = LayerList("layers", kinds, lambda _: DoubleBlock(size, heads))
        self.norm_out = AdaLayerNormContinuous(size)
        outputs = patch * patch * config.integer("out_channels", default=channels)
        self.proj_out = Linear(size, outputs, bias=True)
        self.number_layers()

    def tables(self, sample: Sample) -> Tables:
        """Complex numbers of the picture's positions and the prompt's: those of positions ahead and behind, and
        a picture's, stay on the GPU (``lru_cache``)."""
        run, width, tokens = self.run, self.head_dim, sample.size.tokens
        ahead, _ = (run.buffer(KNOWN_POSITIONS * width, DType.FP32) for _ in range(2))
        known = Handle(run, run.buffer(tokens * width, DType.FP32), (1, tokens, 1, width))
        table = made_from(OperationKind.CAT, known.shape, DType.FP32, known)
        shape = 1, sample.prompt_tokens, 1, width
        return table, seen_in(run, ahead, shape)

    def forward(self, sample: Sample) -> Handle:
        hidden_states = self.img_in(sample.latents())
        encoder_hidden_states = self.txt_norm(sample.prompt(self.text))
        encoder_hidden_states = self.txt_in(encoder_hidden_states)
        temb = self.time_text_embed(sample)
        image_rotary_emb = self.tables(sample)
        for block in self.transformer_blocks:
            hidden_states, encoder_hidden_states = block(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb
            )
        graph = unread_graph(self.run)  # the prompt's name stays to the end
        self.begin_head(hidden_states)
        hidden_states = self.norm_out(hidden_states, temb)
        output = unpatched(self.proj_out(hidden_states))
        del graph
        return output
