"""Mixtures of experts over TransformerEngine: grouped products, tokens sent all to all.

Megatron-core 0.16.1, core/transformer/moe/moe_layer.py, token_dispatcher.py (``MoEAlltoAllTokenDispatcher``),
experts.py (``TEGroupedMLP``), router.py, shared_experts.py; ``moe_permute_fusion``. Each expert is given as many
tokens as the others: what ``moe_expert_capacity_factor`` 1 with ``moe_pad_expert_input_to_capacity`` makes so.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import ExpertShare
from memplan.graph.megatron.config import Backend, MegatronModule, Part, TransformerConfig
from memplan.graph.megatron.layers import WithBias
from memplan.graph.megatron.mlp import MLP
from memplan.graph.megatron.recomputation import CheckpointWithoutOutput, checkpoint
from memplan.graph.modules.functional import (
    divide,
    linear,
    made_from,
    scatter_into,
    topk,
    total,
    zeros,
)
from memplan.graph.modules.fused import megatron, transformer_engine
from memplan.graph.modules.handles import Handle
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.training.splitting.exchange import ExchangeKind, Group, both_ways
from memplan.training.splitting.megatron import RecomputeModule
from memplan.units import ceil_div

Routed = tuple[Handle, Handle]
"""Weights of each token's experts, and which they are, as tables of all experts."""
Dispatched = tuple[Handle, Handle]
"""Rows of tokens, and a weight for each."""


class MoELayer(MegatronModule):
    def __init__(self, config: TransformerConfig, spec: MixtureSpec, backend: Backend) -> None:
        self.config = config
        self.router = TopKRouter(config, spec)
        self.token_dispatcher = TokenDispatcher(config, spec)
        self.experts = TEGroupedMLP(config, spec)
        self.has_shared = spec.shared is not None
        if spec.shared is not None:
            self.shared_experts = SharedExpertMLP(
                config, spec.shared, backend, gate=spec.shared_gate
            )

    def forward(self, hidden_states: Handle) -> WithBias:
        recomputes = self.config.settings.recomputes(RecomputeModule.MOE)
        return checkpoint(self.custom_forward, hidden_states, active=recomputes), None

    def custom_forward(self, hidden_states: Handle) -> Handle:
        """Route, dispatch, compute, combine."""
        dispatcher = self.token_dispatcher
        shared_expert_output = self.shared_experts_compute(hidden_states)
        routed = self.router(hidden_states)  # the dispatcher has names for them
        shape = hidden_states.shape
        hidden_states, probs = dispatcher.dispatch_preprocess(hidden_states, *routed)
        dispatched_input, probs = dispatcher.token_dispatch(hidden_states, probs)
        output = self.routed_experts_compute(dispatched_input, probs)
        output = dispatcher.all_to_all(output)
        output = megatron.exchanged(OperationKind.INDEX_ADD_IN_PLACE, output, shape)
        if shared_expert_output is not None:
            output = output + shared_expert_output
        return output

    def shared_experts_compute(self, hidden_states: Handle) -> Handle | None:
        if not self.has_shared:
            return None
        recomputes = self.config.settings.recomputes(RecomputeModule.SHARED_EXPERTS)
        output, _ = checkpoint(self.shared_experts, hidden_states, active=recomputes)
        return output

    def routed_experts_compute(self, hidden_states: Handle, probs: Handle) -> Handle:
        dispatched_input, permuted_probs = self.token_dispatcher.dispatch_postprocess(
            hidden_states, probs
        )
        expert_output = self.experts(dispatched_input, permuted_probs)
        output = self.token_dispatcher.combine_preprocess(expert_output)
        return output


class SharedExpertMLP(MLP):
    """What a gate's sigmoid of each token weighs where there is one (``moe_shared_expert_gate``)."""

    words = "shared experts"

    def __init__(
        self, config: TransformerConfig, spec: FeedForwardSpec, backend: Backend, *, gate: bool
    ) -> None:
        super().__init__(config, spec, backend)
        self.gate_weight = Part(1, config.hidden_size) if gate else None

    def forward(self, hidden_states: Handle) -> WithBias:
        output, bias = super().forward(hidden_states)
        if self.gate_weight is not None:
            logits = linear(hidden_states, self, self.gate_weight)
            gate_score = logits.unary(OperationKind.SIGMOID)
            output = output * gate_score
        return output, bias


class TopKRouter(MegatronModule):
    """Logits in fp32, scores of each token's experts, and their weights in a sparse table beside one that says which they are."""

    def __init__(self, config: TransformerConfig, spec: MixtureSpec) -> None:
        self.topk = spec.num_experts_per_token
        self.weight = Part(spec.num_experts, config.hidden_size)

    def forward(self, hidden_states: Handle) -> Routed:
        logits = self.gating(hidden_states)
        probs, routing_map = self.routing(logits)
        return probs, routing_map

    def gating(self, x: Handle) -> Handle:
        return megatron.router_logits(x, self.operand(self.weight))

    def routing(self, logits: Handle) -> Routed:
        """``topk_routing_with_score_function``."""
        scores = logits.unary(OperationKind.SIGMOID)
        scores, top_indices = topk(scores, self.topk)
        probs = divide(scores, total(scores) + 1e-20) if self.topk > 1 else scores
        routing_probs = scatter_into(probs, top_indices, logits.shape)
        numbers = zeros(logits).apart(OperationKind.TO, dtype=DType.INT32)
        numbers = made_from(OperationKind.SCATTER, logits.shape, DType.INT32, numbers, top_indices)
        routing_map = numbers.apart(OperationKind.TO, dtype=DType.BOOL)
        return routing_probs, routing_map


class TokenDispatcher(MegatronModule):
    """``MoEAlltoAllTokenDispatcher``."""

    def __init__(self, config: TransformerConfig, spec: MixtureSpec) -> None:
        self.ep_size, self.tp_size = config.experts, config.expert_degree
        self.num_experts, self.topk = spec.num_experts, spec.num_experts_per_token
        self.num_local_experts = spec.num_experts // config.experts

    def dispatch_preprocess(
        self, hidden_states: Handle, probs: Handle, routing_map: Handle
    ) -> Dispatched:
        """Rows sorted by expert with their weights, as many of each."""
        capacity = ceil_div(probs.shape[0] * self.topk, self.num_experts)
        return megatron.permuted(hidden_states, probs, routing_map, capacity * self.num_experts)

    def token_dispatch(self, hidden_states: Handle, probs: Handle) -> Dispatched:
        global_input_tokens = self.all_to_all(hidden_states)
        global_probs = self.all_to_all(probs)
        return global_input_tokens, global_probs

    def all_to_all(self, x: Handle) -> Handle:
        if self.ep_size == 1:
            return x
        sends = both_ways(ExchangeKind.ALL_TO_ALL, x.numel * x.dtype.num_bytes, Group.SPREAD)
        return megatron.exchanged(OperationKind.ALL_TO_ALL, x, x.shape, sends)

    def dispatch_postprocess(self, global_input_tokens: Handle, global_probs: Handle) -> Dispatched:
        """The rows of all ranks that each expert is split over, sorted by this rank's experts."""
        if self.tp_size > 1:
            given = self.tp_size, Group.EXPERT
            global_input_tokens = megatron.gathered(global_input_tokens, *given)
            global_probs = megatron.gathered(global_probs, *given)
        senders, local = self.tp_size * self.ep_size, self.num_local_experts
        global_input_tokens = chunks_sorted(global_input_tokens, senders, local)
        global_probs = chunks_sorted(global_probs, senders, local)
        return global_input_tokens, global_probs

    def combine_preprocess(self, hidden_states: Handle) -> Handle:
        """Back by sender; partial results added up into shares, in the format of the chances."""
        senders, local = self.tp_size * self.ep_size, self.num_local_experts
        hidden_states = chunks_sorted(hidden_states, local, senders)
        if self.tp_size > 1:
            wide = megatron.scattered(hidden_states.float(), self.tp_size, Group.EXPERT)
            hidden_states = wide.to(hidden_states.dtype)
        return hidden_states


def chunks_sorted(x: Handle, outer: int, inner: int) -> Handle:
    """Chunks of equal size, of which the inner ones come first: a copy where there are several of both."""
    shape = x.shape
    x = x.view(outer, inner, -1, *shape[1:])
    return x.transpose(0, 1).contiguous().view(*shape)


class TEGroupedLinear(MegatronModule):
    """A weight of its own for each of this rank's experts, or its part of that."""

    def __init__(
        self, config: TransformerConfig, spec: MixtureSpec, width: int, columns: int
    ) -> None:
        local = spec.num_experts // config.experts
        self.columns = columns
        self.weight = Part(
            local * columns, width, ranks=config.experts * config.expert_degree,
            experts=ExpertShare(local, spec.num_experts_per_token),
        )  # fmt: skip

    def forward(self, x: Handle) -> Handle:
        weight, (rows, width) = self.parameter(self.weight), self.weight.shape
        stacked = Handle(self.run, weight, (rows // self.columns, self.columns, width))
        return transformer_engine.own_product(x, stacked)


class TEGroupedMLP(MegatronModule):
    """Two grouped products around a weighted SwiGLU, which keeps its input and the weights."""

    def __init__(self, config: TransformerConfig, spec: MixtureSpec) -> None:
        what, hidden = f"the width of {config.name}'s experts", config.hidden_size
        width = config.share(spec.expert.intermediate_size, what, config.expert_degree)
        self.recomputes_activation = config.settings.recomputes(RecomputeModule.MOE_ACT)
        self.linear_fc1 = TEGroupedLinear(config, spec, hidden, 2 * width)
        self.linear_fc2 = TEGroupedLinear(config, spec, width, hidden)

    def forward(self, hidden_states: Handle, permuted_probs: Handle) -> Handle:
        activation_checkpoint = CheckpointWithoutOutput(self.run, active=self.recomputes_activation)
        fc1_output = self.linear_fc1(hidden_states)
        bias_act_output = activation_checkpoint.checkpoint(
            megatron.weighted_swiglu, fc1_output, permuted_probs
        )
        output: Handle = self.linear_fc2(bias_act_output)
        activation_checkpoint.discard_output_and_register_recompute()
        return output
