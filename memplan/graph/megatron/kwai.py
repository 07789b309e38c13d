"""Megatron-Kwai's attention over shared sequences: local products around flash-attention over keys and values of all ranks.

kwai/Megatron-Kwai at its tag atc24ae, core/context_parallel/dattention.py, model/transformer.py (``ParallelAttention``).
"""

from typing import Any

from memplan.graph.megatron.attention import SelfAttention, apply_rotary_pos_emb
from memplan.graph.megatron.layer import TransformerLayer
from memplan.graph.megatron.mlp import bias_dropout_add
from memplan.graph.megatron.recomputation import recompute_into_product
from memplan.graph.modules.fused import kwai, megatron
from memplan.graph.modules.handles import Handle


class KwaiSelfAttention(SelfAttention):
    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> Any:
        """Queries of a rank's tokens against keys and values of all, which are returned behind what it gives."""
        query, pair = self.gathered(hidden_states)
        assert rotary_pos_emb is not None
        query = apply_rotary_pos_emb(self.config, query, rotary_pos_emb)
        sizes = self.core_attention.sizes(query, query)
        out, pair = kwai.against_all(query, pair, sizes, self.config.context)
        output, bias = self.linear_proj(out)
        return (output, bias), pair

    def gathered(self, x: Handle) -> tuple[Handle, Handle]:
        """A product, which may norm what it is given itself, and again before its backward formula."""
        linear, start = self.linear_qkv, len(self.run.segment.operations)
        if linear.has_norm:
            x = megatron.norm(x, **linear.norms())
        weight = linear.operand(linear.weight)
        made = kwai.gathered_pairs(x, weight, self.head_dim, self.config.context)
        if linear.has_norm:
            recompute_into_product(self.run, start)
        return made


class KwaiTransformerLayer(TransformerLayer):
    """Keys and values of all ranks are let go behind the network."""

    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> Handle:
        self.register()
        hidden_states, pair = self._with_pair(hidden_states, rotary_pos_emb)
        residual = hidden_states
        pre_mlp_layernorm_output = self.pre_mlp_layernorm(hidden_states)
        mlp_output, mlp_bias = self.mlp(pre_mlp_layernorm_output)
        mlp_output = kwai.shard_saved(mlp_output, pair, self.config.context)
        del pair
        return bias_dropout_add(self.config, (mlp_output, mlp_bias), residual, self.hidden_dropout)

    def _with_pair(
        self, hidden_states: Handle, rotary_pos_emb: Handle | None
    ) -> tuple[Handle, Handle]:
        residual = hidden_states
        input_layernorm_output = self.input_layernorm(hidden_states)
        attention_output_with_bias, pair = self.self_attention(
            input_layernorm_output, rotary_pos_emb
        )
        hidden_states = bias_dropout_add(
            self.config, attention_output_with_bias, residual, self.attention_dropout
        )
        return hidden_states, pair
