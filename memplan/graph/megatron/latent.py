"""DeepSeek's latent attention over TransformerEngine.

Megatron-core 0.16.1, core/transformer/multi_latent_attention.py (``MLASelfAttention``): the layers into the narrow vectors are
whole on every rank, norms are fused with the layers out of them; queries are turned where they lie, keys and values are laid
out anew.
"""

from memplan.fast_dataclass import replace
from memplan.graph.megatron.config import Backend, MegatronModule, TransformerConfig
from memplan.graph.megatron.layers import TELinear, WithBias
from memplan.graph.megatron.recomputation import CheckpointWithoutOutput, checkpoint
from memplan.graph.modules.fused import megatron, transformer_engine
from memplan.graph.modules.handles import Handle
from memplan.model.latent import LatentAttentionSpec
from memplan.model.norms import NormSpec
from memplan.training.splitting.exchange import Group
from memplan.training.splitting.megatron import RecomputeModule


class MLASelfAttention(MegatronModule):
    def __init__(
        self,
        config: TransformerConfig,
        spec: LatentAttentionSpec,
        backend: Backend,
        norm: NormSpec,  # noqa: ARG002  (the layer's is a module of its own)
    ) -> None:
        self.config, self.spec = config, spec
        hidden, rank = config.hidden_size, spec.key_value_rank
        heads = config.share(spec.num_heads, f"{config.name}'s number of heads")
        self.heads, self.q_head_dim = heads, spec.plain_head_dim + spec.rotary.dim
        self.checkpoint_core_attention = config.settings.recomputes(RecomputeModule.CORE_ATTN)
        self.core_attention = backend.core_attention(config, replace(spec, num_heads=heads).scores)
        self.linear_proj = backend.row(config, heads * spec.value_head_dim, hidden)
        columns, up = heads * self.q_head_dim, backend.normed_column
        if spec.query_rank is None:
            self.linear_q_proj = backend.column(config, hidden, columns)
        else:
            self.linear_q_down_proj = TELinear(config, hidden, spec.query_rank)
            self.linear_q_up_proj = up(config, spec.query_rank, columns, norm=spec.norm)
        self.linear_kv_down_proj = TELinear(config, hidden, rank + spec.rotary.dim)
        widths = spec.plain_head_dim + spec.value_head_dim
        self.linear_kv_up_proj = up(config, rank, heads * widths, norm=spec.norm)

    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> WithBias:  # noqa: ARG002
        recomputes = self.config.settings.recomputes(RecomputeModule.MLA_UP_PROJ)
        up_checkpoint = CheckpointWithoutOutput(self.run, active=recomputes)
        # What they were made from has names here, too.
        query, key, value, *_ = self.get_query_key_value_tensors(hidden_states, up_checkpoint)
        core_attn_out = checkpoint(
            self.core_attention, query, key, value, active=self.checkpoint_core_attention
        )
        up_checkpoint.discard_output_and_register_recompute()
        output, bias = self.linear_proj(core_attn_out)
        return output, bias

    def get_query_key_value_tensors(
        self, hidden_states: Handle, up_checkpoint: CheckpointWithoutOutput
    ) -> tuple[Handle, Handle, Handle, Handle, Handle]:
        spec = self.spec
        if spec.query_rank is None:
            q_compressed = hidden_states
        else:
            q_compressed, _ = self.linear_q_down_proj(hidden_states)
        kv_combined, _ = self.linear_kv_down_proj(hidden_states)
        kv_compressed, k_pos_emb = kv_combined.split(spec.key_value_rank, spec.rotary.dim)
        ranks = megatron.sequence_ranks(self.run)
        if ranks > 1:
            k_pos_emb = megatron.gathered(k_pos_emb, ranks, Group.SPLIT)
        made = up_checkpoint.checkpoint(
            self.qkv_up_proj_and_rope_apply, q_compressed, kv_compressed, k_pos_emb
        )
        return (*made, q_compressed, kv_compressed)

    def qkv_up_proj_and_rope_apply(
        self, q_compressed: Handle, kv_compressed: Handle, k_pos_emb: Handle
    ) -> tuple[Handle, Handle, Handle]:
        spec, heads, width = self.spec, self.heads, self.q_head_dim
        project = self.linear_q_proj if spec.query_rank is None else self.linear_q_up_proj
        q, _ = project(q_compressed)
        # A module's input is laid row after row first.
        kv, _ = self.linear_kv_up_proj(kv_compressed.contiguous())
        length, batch, _ = q.shape
        query = transformer_engine.turned_in_place(q.view(length, batch, heads, width))
        key, value = transformer_engine.keys_and_values(
            kv, k_pos_emb, query.shape, (length, batch, heads, spec.value_head_dim)
        )
        return query, key, value
