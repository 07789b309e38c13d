"""Latent attention to chosen tokens alone: DeepSeek V3.2 and GLM-5.

An indexer scores all earlier tokens, without autograd: nothing that it makes outlives the layer but the mask. Some of
GLM-5's layers attend to what an earlier one chose.

(transformers 5.23: models/deepseek_v32, models/glm_moe_dsa)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memplan.classes.llama import LayerKind, LlamaDecoderLayer, Window
from memplan.classes.mixed.deepseek import DeepseekV3MoE, places_of_best
from memplan.classes.mixed.latent import DeepseekV3Model, LatentAttention, apply_rotary_interleave
from memplan.classes.mixed.mixtures import MixtureBlock, MixtureLayer, typed_sparse
from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import attention_function
from memplan.graph.modules.basic import LayerNorm, Linear
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import made_from, masked_fill
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import causal_mask, causal_pattern, position_ids
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables, concatenate, rotate_half
from memplan.graph.modules.stages import linked, receive_beside, send_beside
from memplan.graph.modules.unread import NoGradient
from memplan.model.config import ConfigReader
from memplan.model.latent import IndexerSpec, LatentAttentionSpec


class ChoosingKind(NamedTuple):
    """What sets a layer apart from its neighbours."""

    sparse: bool
    chooses: bool = True
    """It has an indexer of its own."""
    is_last: bool = False
    """Its own choice is none's."""
    window: Window = None
    turned: bool = True


class DeepseekV32Indexer(Module):
    interleaved = False
    """Neighbouring numbers are turned together."""

    def __init__(self, config: ConfigReader, rank: int) -> None:
        hidden = config.integer("hidden_size")
        self.n_heads = config.integer("index_n_heads")
        self.head_dim = config.integer("index_head_dim")
        self.index_topk = config.integer("index_topk")
        self.turning = config.integer("qk_rope_head_dim")
        self.wq_b = Linear(rank, self.n_heads * self.head_dim)
        self.wk = Linear(hidden, self.head_dim)
        self.k_norm = LayerNorm(self.head_dim)
        self.weights_proj = Linear(hidden, self.n_heads)

    def __call__(self, *args: object) -> Handle:
        """Without autograd."""
        with NoGradient(self.run):
            made: Handle = super().__call__(*args)
        return made

    def forward(self, x: Handle, q_resid: Handle, tables: Tables, mask: Handle) -> Handle:
        batch, length, _ = x.shape
        cos, sin = tables
        q = self.wq_b(q_resid)
        q = q.view(batch, length, self.n_heads, self.head_dim)
        q_rot, q_pass = q.split(self.turning, self.head_dim - self.turning)
        k = self.k_norm(self.wk(x)).unsqueeze(2)
        k_rot, k_pass = k.split(self.turning, self.head_dim - self.turning)
        q_rot, k_rot = self.turned(q_rot, k_rot, cos, sin)
        q = concatenate(q_rot, q_pass)
        k = concatenate(k_rot, k_pass).view(batch, length, self.head_dim)
        scores = matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * 1.0
        scores = scores.unary(OperationKind.RELU)
        weights = self.weights_proj(x).float() * 1.0
        index_scores = matmul(weights.unsqueeze(-2), scores).view(batch, length, length)
        if mask.dtype is DType.BOOL:
            outside = (batch, length, length)  # the mask is one matrix, spread over the batch
            index_scores = masked_fill(
                index_scores, mask.apart(OperationKind.BITWISE_NOT, shape=outside)
            )
        else:
            index_scores = index_scores + mask.view(batch, length, length)
        topk = min(self.index_topk, length)
        return places_of_best(index_scores, topk).apart(OperationKind.TO, dtype=DType.INT32)

    def turned(self, q_rot: Handle, k_rot: Handle, cos: Handle, sin: Handle) -> Tables:
        if self.interleaved:
            return apply_rotary_interleave(q_rot, k_rot, cos, sin, dim=2)
        cos = cos.unsqueeze(2)
        sin = sin.unsqueeze(2)
        q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
        k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
        return q_embed, k_embed


class GlmMoeDsaIndexer(DeepseekV32Indexer):
    interleaved = True


class DeepseekV32Attention(LatentAttention):
    indexer_class = DeepseekV32Indexer

    def __init__(self, config: ConfigReader, kind: ChoosingKind) -> None:
        super().__init__(config, LayerKind())
        if self.q_lora_rank is None:
            error = config.fail("q_lora_rank", "is null, but the indexer reads that narrow vector")
            raise error
        self.chooses = kind.chooses
        if kind.chooses:
            self.indexer = self.indexer_class(config, self.q_lora_rank)

    def facts(self) -> LatentAttentionSpec:
        """What others read of it."""
        found = super().facts()
        if not self.chooses:
            return found
        own = self.indexer
        spec = IndexerSpec(
            num_heads=own.n_heads, head_dim=own.head_dim, rotary_dim=own.turning,
            top_k=own.index_topk,
        )  # fmt: skip
        return replace(found, indexer=spec)

    def forward(  # type: ignore[override]
        self, x: Handle, tables: Tables, mask: Handle | None, prev_topk_indices: Handle | None
    ) -> tuple[Handle, Handle | None, Handle | None]:
        batch, length, _ = x.shape
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q_states = self.q_b_proj(q_resid).view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
        q_pass, q_rot = q_states.split(self.qk_nope_head_dim, self.qk_rope_head_dim)
        compressed_kv = self.kv_a_proj_with_mqa(x)
        kv_pass, k_rot = compressed_kv.split(self.kv_lora_rank, self.qk_rope_head_dim)
        k_pass = self.kv_a_layernorm(kv_pass).view(batch, 1, length, self.kv_lora_rank)
        k_rot = k_rot.view(batch, 1, length, self.qk_rope_head_dim)
        q_rot, k_rot = apply_rotary_interleave(q_rot, k_rot, *tables)
        query_states = concatenate(q_pass, q_rot)
        key_states, value_states = self.expand_kv(k_pass, k_rot)
        topk_indices = prev_topk_indices
        if mask is not None:
            topk_indices = self.chosen(x, q_resid, tables, mask, prev_topk_indices)
            index_mask = left_out(topk_indices, (batch, length, length)).unsqueeze(1)
            mask = masked_but(mask, index_mask)
        attend = attention_function(self.run)
        out, weights = attend(query_states, key_states, value_states, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.o_proj(out)
        return out, weights, topk_indices

    def chosen(
        self, x: Handle, q_resid: Handle, tables: Tables, mask: Handle, given: Handle | None
    ) -> Handle:
        if self.chooses:
            return self.indexer(x, q_resid, tables, mask)
        if given is None:
            msg = (
                "a pipeline's later stage cannot begin with a layer that shares an earlier layer's choice of "
                "tokens: split it before a layer with an indexer of its own (layers_per_stage)"
            )
            raise UnsupportedOperationError(msg)
        return given


def left_out(topk_indices: Handle, shape: tuple[int, ...]) -> Handle:
    """``topk_indices.new_ones(shape, dtype=torch.bool).scatter(-1, topk_indices.long(), False)``."""
    ones = made_by(topk_indices.run, OperationKind.NEW_ONES, shape, DType.BOOL)
    places = topk_indices.apart(OperationKind.TO, dtype=DType.INT64)
    return made_from(OperationKind.SCATTER, shape, DType.BOOL, ones, places)


def masked_but(mask: Handle, index_mask: Handle) -> Handle:
    """The mask of the chosen tokens alone."""
    if mask.dtype is DType.BOOL:
        return mask & index_mask.apart(OperationKind.BITWISE_NOT)
    return mask.apart(OperationKind.MASKED_FILL, index_mask)


class DeepseekV32DecoderLayer(MixtureLayer):
    attention_class = DeepseekV32Attention
    block_class: Callable[[ConfigReader], MixtureBlock] = DeepseekV3MoE

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask, None)[:2]
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = residual + x
        return x


class DeepseekV32Model(DeepseekV3Model):
    layer_class: type[LlamaDecoderLayer] = DeepseekV32DecoderLayer

    def kinds(self, config: ConfigReader) -> Sequence[ChoosingKind]:  # type: ignore[override]
        return [
            ChoosingKind(self.is_sparse(config, number))
            for number in range(config.layers("num_hidden_layers"))
        ]

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        first = config.integer("first_k_dense_replace", default=0, minimum=0)
        return typed_sparse(config, number, first=first)

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        if self.run.kernels.attention.is_package:
            return {
                None: causal_pattern(self.run, length)
            }  # which tokens are chosen is said by a mask alone
        return {None: causal_mask(self.run, batch, length, written=True)}


class GlmMoeDsaAttention(DeepseekV32Attention):
    indexer_class = GlmMoeDsaIndexer


class GlmMoeDsaDecoderLayer(MixtureLayer):
    attention_class = GlmMoeDsaAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = DeepseekV3MoE

    def __init__(self, config: ConfigReader, kind: ChoosingKind) -> None:
        super().__init__(config, kind)  # type: ignore[arg-type]
        self.hands_on = 0 if kind.chooses else 1
        self.hands_choice = kind.chooses and not kind.is_last

    def forward(  # type: ignore[override]
        self, x: Handle, tables: Tables, mask: Handle | None, prev_topk_indices: Handle | None
    ) -> tuple[Handle, Handle | None]:
        residual = x
        x = self.input_layernorm(x)
        x, _, topk_indices = self.self_attn(x, tables, mask, prev_topk_indices)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = residual + x
        segment = self.run.segment
        if topk_indices is not None and self.hands_choice and segment.checkpointed:
            # An argument of the next layer, which its checkpoint keeps.
            segment.handed_in |= {topk_indices.record.storage}
        return x, topk_indices


class GlmMoeDsaModel(DeepseekV32Model):
    layer_class: type[LlamaDecoderLayer] = GlmMoeDsaDecoderLayer

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.index_topk = config.integer("index_topk")
        self.any_shares = not all(each.chooses for each in self.kinds(config))

    def kinds(self, config: ConfigReader) -> Sequence[ChoosingKind]:  # type: ignore[override]
        found = [
            each._replace(chooses=not shares_choice(config, number))
            for number, each in enumerate(super().kinds(config))
        ]
        found[-1:] = [each._replace(is_last=True) for each in found[-1:]]
        if found and not found[0].chooses:
            error = config.fail(
                "indexer_types", "the first layer has no earlier one's choice to share"
            )
            raise error
        return found

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        positions = position_ids(self.run, batch, length)
        mask = self.masks(batch, length)[None]
        x = embeds
        tables = self.tables(x, positions)[None]
        topk_indices = None if received is None else self.received_choice(batch, length)
        for layer in self.layer_list:
            x, topk_indices = layer(x, tables, mask, topk_indices, unread=positions)
        x = self.norm(x)
        stage = self.run.options.stage
        hands_on = stage is not None and not stage.is_last and self.is_carried
        if hands_on and topk_indices is not None:
            send_beside(self.run, x, topk_indices, self.carried)
        return x

    @property
    def is_carried(self) -> bool:
        """A pipeline of torch's hands the choice from stage to stage, where any layer shares it (NeMo AutoModel,
        components/models/glm_moe_dsa/model.py)."""
        stage = self.run.options.stage
        return stage is not None and stage.runtime.reads_buffers and self.any_shares

    @property
    def carried(self) -> Tensor | None:
        """The choice as a stage received it, beside its hidden states."""
        return self.run.leaves[1] if len(self.run.leaves) > 1 else None

    def received_choice(self, batch: int, length: int) -> Handle | None:
        """What the stage before chose, in whole numbers again."""
        if not self.is_carried:
            return None
        carried = receive_beside(self.run, batch, length, min(self.index_topk, length))
        return carried.apart(OperationKind.TO, dtype=DType.INT64)

    def adjusted(self, logits: Handle) -> Handle:
        """A pipeline's last stage makes the choice that it received a part of what it returns."""
        carried = self.carried
        return logits if carried is None else linked(self.run, logits, carried)


def shares_choice(config: ConfigReader, number: int) -> bool:
    """``indexer_types``, a pattern of letters, or every so many layers."""
    types = config.texts("indexer_types")
    pattern = config.raw("index_topk_pattern")
    if not types and isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif not types:
        types = config.texts("index_topk_pattern")
    if types:
        if number >= len(types):
            error = config.fail("indexer_types", f"names {len(types)} layers, needs more")
            raise error
        return config.choice("indexer_types", types[number], ("full", "shared")) == "shared"
    every = config.integer("index_topk_freq", default=1, minimum=0) or 1
    offset = config.integer("index_skip_topk_offset", default=2, minimum=0)
    return max(number - offset + 1, 0) % every != 0
