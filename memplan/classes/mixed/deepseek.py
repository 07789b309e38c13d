"""Mixtures that are routed as DeepSeek-V3's: sigmoid scores, a correction, groups that are ruled out.

(transformers 5.23: models/glm4_moe, models/dots1, models/solar_open, models/minimax_m2, models/hy_v3)
"""

from collections.abc import Callable

from memplan.classes.llama import (
    SLIDING,
    HeadsFirstAttention,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    Qwen3Attention,
    RowsAttention,
    Window,
    check_types,
    head_width,
    rotated_width,
)
from memplan.classes.llama_kin import HeadNormAttention
from memplan.classes.mixed.experts import Experts
from memplan.classes.mixed.mixtures import (
    MixtralSparseMoeBlock,
    MixtureBlock,
    MixtureLayer,
    MixtureModel,
    SharedExpert,
    typed_sparse,
)
from memplan.classes.mixed.routers import Routed, Router, experts_key
from memplan.dtypes import DType, promote
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import RMSNorm
from memplan.graph.modules.functional import (
    best,
    detached,
    divide,
    divide_in_place,
    fp32_linear,
    gather,
    linear,
    row_sums,
    total,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.rotary import Turn, apply_rotary_to_part
from memplan.graph.modules.strides import Shape
from memplan.model.config import ConfigReader
from memplan.model.mixtures import RouterScore

BEST_OF_GROUP = 2
"""Scores of a group that stand for it."""


class GroupedRouter(Router):
    """Experts of other groups than the best ones are ruled out."""

    best_of_group = BEST_OF_GROUP

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.num_group = config.integer("n_group", default=1)
        self.topk_group = config.integer("topk_group", default=1)
        config.divide(experts_key(config), self.num_experts, "n_group", self.num_group)
        self.norm_topk_prob = config.flag("norm_topk_prob")

    def groups(self, scores: Handle) -> tuple[Handle, ...]:
        """What has a name, or is kept, from the scores of groups to the mask of experts that are out."""
        groups = scores.shape[0], self.num_group, self.num_experts // self.num_group
        saved, group_scores = sums_of_best(scores.view(*groups), self.best_of_group)
        group_idx = places_of_best(group_scores, self.topk_group)
        group_mask = made_by(self.run, OperationKind.ZEROS, group_scores.shape, group_scores.dtype)
        score_mask = group_mask.unsqueeze(-1)
        if self.num_group > 1:
            score_mask = score_mask.apart(OperationKind.CLONE, shape=groups)
        outside = ruled_out(score_mask, groups)
        return saved, group_scores, group_idx, group_mask, score_mask, outside


class DeepseekV3TopkRouter(GroupedRouter):
    score = RouterScore.SIGMOID
    is_corrected = True

    def forward(self, hidden_states: Handle) -> Routed:
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits = fp32_linear(hidden_states, self, self.weight)
        scores = router_logits.unary(OperationKind.SIGMOID)
        scores_for_choice = corrected(scores, module=self.within)
        saved, group_scores, group_idx, _group_mask, _score_mask, outside = self.groups(
            scores_for_choice
        )
        scores_for_choice = scores_for_choice.apart(OperationKind.MASKED_FILL, outside)
        topk_indices = places_of_best(scores_for_choice, self.top_k)
        topk_weights = gather(scores, topk_indices)
        if self.norm_topk_prob:
            denominator = total(topk_weights) + 1e-20
            topk_weights = divide_in_place(topk_weights, denominator)
        topk_weights = topk_weights * 1.0
        # Names go in the order in which they were set, and before each what autograd keeps behind it.
        del outside, scores_for_choice, saved, group_scores, group_idx
        return router_logits, topk_weights, topk_indices


def sums_of_best(x: Handle, count: int) -> tuple[Handle, Handle]:
    """``x.topk(count)[0].sum(dim=-1)``, behind the places that autograd keeps."""
    values, places = best(x, count)
    return places, row_sums(values)


def places_of_best(x: Handle, count: int) -> Handle:
    """``x.topk(count)[1]``."""
    _, places = best(x, count)
    return places


def ruled_out(score_mask: Handle, shape: Shape) -> Handle:
    """``~score_mask.bool()``, of every expert."""
    kept = score_mask.apart(OperationKind.TO, dtype=DType.BOOL, shape=shape)
    return kept.apart(OperationKind.BITWISE_NOT).view(shape[0], -1)


class DeepseekV3MoE(MixtureBlock):
    """Routed experts, and those that every token passes."""

    router_class: type[Router] = DeepseekV3TopkRouter

    def __init__(self, config: ConfigReader) -> None:
        self.experts = Experts(config)
        self.gate = self.router_class(config)
        count = self.num_shared(config)
        self.has_shared = count > 0
        if self.has_shared:
            self.shared_experts = SharedExpert(config, self.experts.intermediate_dim * count)

    def num_shared(self, config: ConfigReader) -> int:
        return config.integer("n_shared_experts", minimum=0)

    def forward(self, hidden_states: Handle) -> Handle:
        residuals = hidden_states
        orig_shape = hidden_states.shape
        _, topk_weights, topk_indices = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        hidden_states = self.experts(hidden_states, topk_indices, topk_weights).view(*orig_shape)
        if self.has_shared:
            hidden_states = hidden_states + self.shared_experts(residuals)
        return hidden_states


class FirstDenseModel(MixtureModel):
    """Its first layers are no mixtures; it adds no loss on routers."""

    adds_router_loss = False

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        return number >= config.integer("first_k_dense_replace", default=0, minimum=0)


class SolarOpenAttention(LlamaAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("attention_bias"), False


class Glm4MoeAttention(HeadsFirstAttention, SolarOpenAttention):
    turn: Turn = staticmethod(apply_rotary_to_part)


class Glm4MoeDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = Glm4MoeAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = DeepseekV3MoE


class Glm4MoeModel(FirstDenseModel):
    layer_class: type[LlamaDecoderLayer] = Glm4MoeDecoderLayer

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config, 0.5)


class Dots1DecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = Qwen3Attention
    block_class: Callable[[ConfigReader], MixtureBlock] = DeepseekV3MoE


class Dots1Model(FirstDenseModel):
    layer_class: type[LlamaDecoderLayer] = Dots1DecoderLayer

    def window(self, config: ConfigReader, number: int) -> Window:
        types = config.texts("layer_types")
        if types:
            check_types(config, types, config.layers("num_hidden_layers"))
        last = config.integer("max_window_layers", default=0, minimum=0)
        slides = types[number] == SLIDING if types else number >= last
        return config.optional_integer("sliding_window") if slides else None


class SolarOpenDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = SolarOpenAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = DeepseekV3MoE


class SolarOpenModel(FirstDenseModel):
    layer_class: type[LlamaDecoderLayer] = SolarOpenDecoderLayer

    def is_sparse(self, config: ConfigReader, number: int) -> bool:  # noqa: ARG002
        return True


class MiniMaxM2TopKRouter(Router):
    score = RouterScore.SIGMOID
    is_corrected = True

    def forward(self, hidden_states: Handle) -> Routed:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        router_logits = linear(
            hidden_states.to(self.parameter(self.weight).dtype), self, self.weight
        )
        routing_weights = router_logits.float().unary(OperationKind.SIGMOID)
        scores_for_choice = corrected(routing_weights, module=self.within)
        chosen, top_k_index = best(scores_for_choice, self.top_k)
        top_k_weights = gather(routing_weights, top_k_index)
        top_k_weights = divide_in_place(top_k_weights, total(top_k_weights))
        router_scores = top_k_weights
        del chosen
        return router_logits, router_scores, top_k_index


def corrected(scores: Handle, *bias: Handle, module: str = "") -> Handle:
    """``scores + e_score_correction_bias``: for choosing only; a buffer of the ``module``, where it is no weight."""
    run = scores.run
    if not bias and not run.decomposed:
        run.hold_buffer(scores.shape[-1], run.options.weights, module=module)
    dtype = promote(scores.dtype, bias[0].dtype if bias else run.compute)
    return detached(scores).apart(OperationKind.ADD, *bias, dtype=dtype)


class MiniMaxM2SparseMoeBlock(MixtralSparseMoeBlock):
    sealed = False
    router_class: type[Router] = MiniMaxM2TopKRouter


class MiniMaxM2Attention(RowsAttention):
    turn: Turn = staticmethod(apply_rotary_to_part)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.q_norm = RMSNorm(self.q_proj.out_features)
        self.k_norm = RMSNorm(self.k_proj.out_features)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return False, False


class MiniMaxM2DecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = MiniMaxM2Attention
    block_class: Callable[[ConfigReader], MixtureBlock] = MiniMaxM2SparseMoeBlock


class MiniMaxM2Model(MixtureModel):
    layer_class: type[LlamaDecoderLayer] = MiniMaxM2DecoderLayer

    def rotary_width(self, config: ConfigReader) -> int:
        width, turned = head_width(config), config.optional_integer("rotary_dim")
        return rotated_width(config, 1.0 if turned is None else turned / width)


class HYV3TopKRouter(Router):
    score = RouterScore.SIGMOID
    is_corrected = True

    def forward(self, hidden_states: Handle) -> Routed:
        hidden_states = hidden_states.seen_as(-1, hidden_states.shape[-1])
        router_logits = fp32_linear(hidden_states, self, self.weight)
        routing_weights = router_logits.unary(OperationKind.SIGMOID)
        scores_for_choice = corrected(routing_weights, module=self.within)
        chosen, top_k_index = best(scores_for_choice, self.top_k)
        top_k_weights = gather(routing_weights, top_k_index)
        top_k_weights = divide(top_k_weights, total(top_k_weights) + 1e-20)
        top_k_weights = top_k_weights * 1.0
        del scores_for_choice, chosen
        return router_logits, top_k_weights, top_k_index


class HYV3MoE(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.gate = HYV3TopKRouter(config)
        self.experts = Experts(config)
        self.enable_moe_fp32_combine = config.flag("enable_moe_fp32_combine")
        count = config.integer("num_shared_experts", minimum=1)
        self.shared_experts = SharedExpert(config, self.experts.intermediate_dim * count)

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, seq_len, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        _, top_k_weights, top_k_index = self.gate(hidden_states)
        routed_output = self.experts(hidden_states, top_k_index, top_k_weights)
        if self.enable_moe_fp32_combine:
            summed = routed_output.float() + self.shared_experts(hidden_states).float()
            hidden_states = summed.to(hidden_states.dtype)
            del summed
        else:
            hidden_states = routed_output + self.shared_experts(hidden_states)
        return hidden_states.reshape(batch_size, seq_len, hidden_dim)


class HYV3DecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = HeadNormAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = HYV3MoE


class HYV3Model(MixtureModel):
    layer_class: type[LlamaDecoderLayer] = HYV3DecoderLayer
    adds_router_loss = False

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        return typed_sparse(config, number)
