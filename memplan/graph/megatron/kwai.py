"""Megatron-Kwai's attention over shared sequences: local products around flash-attention over keys and values of all ranks.

kwai/Megatron-Kwai at its tag atc24ae, core/context_parallel/dattention.py, model/transformer.py (``ParallelAttention``).
"""

from memplan.graph.attention import megatron as shared
from memplan.graph.attention.head_layout import Shape
from memplan.graph.megatron.attention import SelfAttention, apply_rotary_pos_emb, merged
from memplan.graph.megatron.layer import TransformerLayer
from memplan.graph.megatron.layers import WithBias
from memplan.graph.megatron.mlp import bias_dropout_add
from memplan.graph.megatron.recomputation import recompute_into_product
from memplan.graph.modules.handles import Handle
from memplan.graph.operations import megatron

Pair = tuple[WithBias, Handle]
"""What attention gives, and keys and values of all ranks."""


class KwaiSelfAttention(SelfAttention):
    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> Pair:
        """Queries of a rank's tokens against keys and values of all."""
        query, pair = self.gathered(hidden_states)
        assert rotary_pos_emb is not None
        query = apply_rotary_pos_emb(self.config, query, rotary_pos_emb)
        out, pair = self.attended(query, pair)
        output, bias = self.linear_proj(out)
        return (output, bias), pair

    def gathered(self, x: Handle) -> tuple[Handle, Handle]:
        """A product, which may norm what it is given itself, and again before its backward formula."""
        run, linear, start = self.run, self.linear_qkv, len(self.run.segment.operations)
        ranks, tokens = self.config.context, x.shape[0] * megatron.sequence_ranks(self.run)
        normed = megatron.norm(run, x.record, linear.norms()) if linear.has_norm else x.record
        weight = linear.parameter(linear.weight)
        query, pair = shared.gathered_pairs(run, normed, weight, ranks)
        if linear.has_norm:
            recompute_into_product(run, start)
        shape = tokens, x.shape[1], self.heads, self.head_dim
        return Handle(run, query, shape), Handle(run, pair, (2, tokens * ranks, *shape[1:]))

    def attended(self, query: Handle, pair: Handle) -> tuple[Handle, Handle]:
        run, ranks, (length, batch, *_) = self.run, self.config.context, query.shape
        shape = Shape(batch, length, length, self.core_attention.spec)
        out, sent = shared.against_all(run, query.record, pair.record, shape, ranks)
        return merged(query, out), Handle(run, sent, pair.shape)


class KwaiTransformerLayer(TransformerLayer):
    """Keys and values of all ranks are let go behind the network."""

    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> Handle:
        self.register()
        hidden_states, pair = self._with_pair(hidden_states, rotary_pos_emb)
        residual = hidden_states
        pre_mlp_layernorm_output = self.pre_mlp_layernorm(hidden_states)
        mlp_output, mlp_bias = self.mlp(pre_mlp_layernorm_output)
        mlp_output = self.shard_saved(mlp_output, pair)
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

    def shard_saved(self, x: Handle, pair: Handle) -> Handle:
        ranks = self.config.context
        return Handle(self.run, shared.shard_saved(self.run, x.record, pair.record, ranks), x.shape)
