"""A layer: a norm, attention and a sum; a norm, a network and a sum.

Megatron-core 0.16.1, core/transformer/transformer_layer.py.
"""

from memplan.graph.megatron.config import Backend, MegatronModule, TransformerConfig
from memplan.graph.megatron.layers import IdentityOp, Norm, WithBias
from memplan.graph.megatron.mixture import MoELayer
from memplan.graph.megatron.mlp import bias_dropout_add
from memplan.graph.megatron.recomputation import CheckpointWithoutOutput, checkpoint
from memplan.graph.modules.handles import Handle
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import LayerSpec
from memplan.model.mixtures import MixtureSpec
from memplan.training.splitting.megatron import RecomputeModule


class TransformerLayer(MegatronModule):
    def __init__(self, config: TransformerConfig, spec: LayerSpec, backend: Backend) -> None:
        self.config = config
        self.attention_dropout = spec.attention_output_dropout
        self.hidden_dropout = spec.feed_forward_output_dropout
        is_latent = isinstance(spec.attention, LatentAttentionSpec)
        is_moe_layer = isinstance(spec.feed_forward, MixtureSpec)
        self.input_layernorm = self.layernorm(spec, backend, is_apart=is_latent)
        self.self_attention = backend.attention(config, spec.attention, backend, spec.norm)
        self.pre_mlp_layernorm = self.layernorm(spec, backend, is_apart=is_moe_layer)
        if isinstance(spec.feed_forward, MixtureSpec):
            self.mlp = MoELayer(config, spec.feed_forward, backend)
        else:
            self.mlp = backend.network(config, spec.feed_forward, backend, spec.norm)
        recomputes = config.settings.recomputes
        self.recomputes_norms = recomputes(RecomputeModule.LAYERNORM)
        self.recompute_mlp = recomputes(RecomputeModule.MLP) and not is_moe_layer

    def layernorm(self, spec: LayerSpec, backend: Backend, *, is_apart: bool) -> MegatronModule:
        """A module of its own, or part of the next one."""
        if is_apart or not backend.normed_column.has_norm:
            return Norm(spec.norm, self.config.hidden_size)
        return IdentityOp()

    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> Handle:
        self.register()
        hidden_states = self._forward_attention(hidden_states, rotary_pos_emb)
        output = self._forward_mlp(hidden_states)
        return output

    def _forward_attention(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> Handle:
        residual = hidden_states
        norm_checkpoint = self.norm_checkpoint(self.input_layernorm)
        input_layernorm_output = norm_checkpoint.checkpoint(self.input_layernorm, hidden_states)
        attention_output_with_bias = self.self_attention(input_layernorm_output, rotary_pos_emb)
        norm_checkpoint.discard_output_and_register_recompute()
        hidden_states = bias_dropout_add(
            self.config, attention_output_with_bias, residual, self.attention_dropout
        )
        return hidden_states

    def _forward_mlp(self, hidden_states: Handle) -> Handle:
        residual = hidden_states
        norm_checkpoint = self.norm_checkpoint(self.pre_mlp_layernorm)
        pre_mlp_layernorm_output = norm_checkpoint.checkpoint(self.pre_mlp_layernorm, hidden_states)
        mlp_output_with_bias: WithBias = checkpoint(
            self.mlp, pre_mlp_layernorm_output, active=self.recompute_mlp
        )
        norm_checkpoint.discard_output_and_register_recompute()
        return bias_dropout_add(self.config, mlp_output_with_bias, residual, self.hidden_dropout)

    def norm_checkpoint(self, norm: MegatronModule) -> CheckpointWithoutOutput:
        is_recomputed = self.recomputes_norms and not isinstance(norm, IdentityOp)
        return CheckpointWithoutOutput(self.run, active=is_recomputed)
