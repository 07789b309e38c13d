"""Layers of two streams, each with norms and networks of its own, that attend to both (SD3's and FLUX's).

(diffusers 0.42: models/attention.py, ``JointTransformerBlock``; transformer_flux.py, ``FluxTransformerBlock``)
"""

from memplan.classes.denoising.attention import Tables
from memplan.classes.denoising.parts import BareNorm, FeedForward, modulated
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module


class JointBlock(Module):
    """Norms, attention and networks as each class declares them; where the prompt's norm gives nothing beside
    what it norms, nothing of the prompt goes on."""

    further = 1
    names_outputs = False
    """What attention returned has a name to the end."""
    norm1: Module
    norm1_context: Module
    attn: Module
    attn2: Module

    def add_networks(self, size: int, *, gives_prompt: bool = True) -> None:
        """Declare what stands behind attention."""
        self.norm2 = BareNorm()
        self.ff = FeedForward(size)
        if gives_prompt:
            self.norm2_context = BareNorm()
            self.ff_context = FeedForward(size)

    def forward(
        self, hidden_states: Handle, encoder_hidden_states: Handle, temb: Handle, *turns: Tables
    ) -> tuple[Handle, Handle | None]:
        norm_hidden_states, gate_msa, shift_mlp, scale_mlp, gate_mlp, *dual = self.norm1(
            hidden_states, temb
        )
        norm_encoder_hidden_states, *context = self.norm1_context(encoder_hidden_states, temb)
        attention_outputs = self.attn(norm_hidden_states, norm_encoder_hidden_states, *turns)
        attn_output, context_attn_output = attention_outputs
        if not self.names_outputs:
            del attention_outputs
        attn_output = gate_msa.unsqueeze(1) * attn_output
        hidden_states = hidden_states + attn_output
        if dual:
            norm_hidden_states2, gate_msa2 = dual
            attn_output2, _ = self.attn2(norm_hidden_states2)
            attn_output2 = gate_msa2.unsqueeze(1) * attn_output2
            hidden_states = hidden_states + attn_output2
        norm_hidden_states = self.norm2(hidden_states)
        norm_hidden_states = modulated(norm_hidden_states, scale_mlp, shift_mlp)
        ff_output = self.ff(norm_hidden_states)
        ff_output = gate_mlp.unsqueeze(1) * ff_output
        hidden_states = hidden_states + ff_output
        if not context:
            return hidden_states, None
        c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp = context
        context_attn_output = c_gate_msa.unsqueeze(1) * context_attn_output
        encoder_hidden_states = encoder_hidden_states + context_attn_output
        norm_hidden = self.norm2_context(encoder_hidden_states)
        del norm_encoder_hidden_states
        norm_hidden = modulated(norm_hidden, c_scale_mlp, c_shift_mlp)
        context_ff_output = self.ff_context(norm_hidden)
        encoder_hidden_states = encoder_hidden_states + c_gate_mlp.unsqueeze(1) * context_ff_output
        return hidden_states, encoder_hidden_states
