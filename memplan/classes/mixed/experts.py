"""Routed experts: two stacks of matrices, and the functions that run them.

(transformers 5.23, integrations/moe.py: ``use_experts_implementation``)
"""

from collections.abc import Callable, Sequence
from math import prod

from memplan.classes.llama import GatedMLP
from memplan.classes.mixed.routers import EXPERT_KEYS, num_experts
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.sorting import SCAN_SCRATCH_BYTES
from memplan.graph.core.tensors import ExpertShare, Parameter
from memplan.graph.experts.mixture import sum_of_rows
from memplan.graph.experts.products import grouped_matmul
from memplan.graph.modules.basic import ActivationModule
from memplan.graph.modules.functional import (
    add_in_place,
    add_rows,
    index,
    made_from,
    part_of,
    product,
    sort,
    zeros,
)
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.run import Run
from memplan.graph.operations.products import trained_weight
from memplan.graph.splitting.tensor_parallel import shared_experts_input, summed_experts_output
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock
from memplan.units import ceil_div

Forward = Callable[["Experts", Handle, Handle, Handle], Handle]
"""Of the experts, tokens, each token's experts and their weights."""


class Experts(Module):
    """Collection of expert weights stored as 3D tensors (``MixtralExperts`` and its like)."""

    block = LayerBlock.EXPERTS
    width_key = "moe_intermediate_size"
    count_keys: Sequence[str] = EXPERT_KEYS
    as_modules = True
    """Before transformers 5 each was a module."""
    is_gated = True
    is_transposed = False
    """Its stacks lie as grouped products take them; others' are turned by a view (``_grouped_linear``)."""
    in_turn = False
    """Its class runs one after another, whatever implementation is chosen."""

    def __init__(self, config: ConfigReader) -> None:
        self.config = config
        self.num_experts = num_experts(config, self.count_keys)
        self.num_active = config.integer("num_experts_per_tok")
        self.hidden_dim = config.integer("hidden_size")
        self.intermediate_dim = config.integer(self.width_key)
        self.add_stacks(config)

    def add_stacks(self, config: ConfigReader) -> None:
        """Both matrices of all experts."""
        self.gate_up_proj = Weight(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        self.down_proj = Weight(self.num_experts, self.hidden_dim, self.intermediate_dim)
        self.act_fn = ActivationModule(read_activation(config, "hidden_act"))

    @property
    def first(self) -> Weight:
        """The stack that reads the tokens."""
        return self.gate_up_proj

    def forward(self, hidden_states: Handle, top_k_index: Handle, top_k_weights: Handle) -> Handle:
        """As the chosen implementation runs them."""
        return experts_function(self.run)(self, hidden_states, top_k_index, top_k_weights)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """A stack; of experts that ranks split each has a share of every expert's width."""
        group = self.run.options.tensor_parallel
        degree = 1 if group is None else group.degree
        shape = list(weight.shape)
        if weight is self.first:
            shape[1] //= degree
        elif weight is self.down_proj:
            shape[2] //= degree
        joined = 2 if self.is_gated and weight is self.first else 1
        share = ExpertShare(self.num_experts, self.num_active, joined)
        made = self.run.parameter(name, *shape, module=self.within, experts=share)
        if group is not None:
            made.ranks, made.is_distributed = degree, True
        return made

    @property
    def activation_kind(self) -> Activation:
        """Its nonlinearity."""
        return self.act_fn.kind

    def biases(self, name: str, expert_ids: Handle) -> Handle | None:
        """Each row's own expert's, copied out of the table of all experts'."""
        bias = self.weights.get(name)
        if bias is None:
            return None
        return index(self.operand(bias), expert_ids, (expert_ids.numel, bias.shape[1]))

    def apply_gate(self, gate_up_out: Handle) -> Handle:
        """``_default_apply_gate``."""
        width = gate_up_out.shape[-1] // 2
        gate, up = gate_up_out.split(width, width)
        return self.act_fn(gate) * up


class ExpertsInTurn(Experts):
    """Each takes the rows of the tokens that chose it, which are taken as equally many; its matrices are
    slices of the stacks."""

    as_modules = False
    in_turn = True

    def forward(self, hidden_states: Handle, top_k_index: Handle, top_k_weights: Handle) -> Handle:
        """In turn, added row by row to zeros."""
        gate_up_proj, down_proj = self.operand(self.gate_up_proj), self.operand(self.down_proj)
        final = zeros(hidden_states)
        mask = chosen_mask(top_k_index, self.num_experts + 1)
        for _ in range(self.num_experts):
            top_k_pos, token_idx = rows_of(mask, top_k_index.numel, self.num_experts)
            current = index(hidden_states, token_idx, (token_idx.numel, self.hidden_dim))
            current = self.apply_gate(product(current, part_of(gate_up_proj, self.num_experts)))
            current = product(current, part_of(down_proj, self.num_experts)) * index(
                top_k_weights, top_k_pos, (top_k_pos.numel, 1)
            )
            final = add_rows(final, current.to(final.dtype), token_idx)
        return final


def chosen_mask(top_k_index: Handle, classes: int) -> Handle:
    """``torch.nn.functional.one_hot``: int64 for each expert."""
    shape = *top_k_index.shape, classes
    equal = made_from(OperationKind.EQ, shape, DType.BOOL, top_k_index)
    return equal.apart(OperationKind.TO, dtype=DType.INT64)


def rows_of(mask: Handle, pairs: int, count: int) -> tuple[Handle, Handle]:
    """``torch.where(mask[expert])``: of which choice, and of which token; all are chosen equally often."""
    rows = ceil_div(pairs, count)
    places, tokens = (empty(mask.run, (rows,), DType.INT64) for _ in range(2))
    mask.run.record(OperationKind.WHERE, (mask.record,), (places.record, tokens.record))
    return places, tokens


class PlainExperts(Experts):
    """Experts without a gate, where ``moe_latent_size`` says so of narrower tokens."""

    is_gated = as_modules = False

    def add_stacks(self, config: ConfigReader) -> None:
        """Both matrices of all experts."""
        width = config.optional_integer("moe_latent_size") or self.hidden_dim
        self.up_proj = Weight(self.num_experts, self.intermediate_dim, width)
        self.down_proj = Weight(self.num_experts, width, self.intermediate_dim)
        self.act_fn = ActivationModule(read_activation(config, "mlp_hidden_act"))

    @property
    def first(self) -> Weight:
        """The stack that reads the tokens."""
        return self.up_proj

    def apply_gate(self, gate_up_out: Handle) -> Handle:
        """The activation alone."""
        made: Handle = self.act_fn(gate_up_out)
        return made


class NarrowExperts(Experts):
    """Experts whose width the config calls that of the network."""

    width_key = "intermediate_size"


def experts_function(run: Run) -> Forward:
    """``ExpertsInterface.get_interface``, and what stands around it where ranks share each expert."""
    group = run.options.tensor_parallel
    if group is None or group.sequence:
        return grouped_mm_experts_forward

    def shared(
        module: Experts, hidden_states: Handle, top_k_index: Handle, top_k_weights: Handle
    ) -> Handle:
        """``MoeExpertsParallel`` (distributed/tensor_parallel.py): hooks on the module."""
        given = shared_input(hidden_states), top_k_index, shared_input(top_k_weights)
        made = grouped_mm_experts_forward(module, *given)
        return Handle(run, summed_experts_output(run, made.record), made.shape)

    return shared


def shared_input(x: Handle) -> Handle:
    """What all ranks have, handed to experts of which each has a share."""
    return Handle(x.run, shared_experts_input(x.run, x.record), x.shape)


def grouped_mm_experts_forward(
    self: Experts, hidden_states: Handle, top_k_index: Handle, top_k_weights: Handle
) -> Handle:
    """Sort, copy, two grouped products, weight, put back, sum.

    peft's adapters on stacks are cached until the module returns (``parametrize.cached``), so each has a name.
    """
    num_tokens, hidden_dim = hidden_states.shape
    num_top_k = top_k_index.shape[-1]
    rows = num_tokens * num_top_k
    sample_weights = top_k_weights.reshape(-1)
    expert_ids = top_k_index.reshape(-1)
    expert_ids_g, perm = sort(expert_ids)
    tokens = perm.apart(OperationKind.FLOOR_DIVIDE)
    selected_hidden_states_g = index(hidden_states, tokens, (rows, hidden_dim))
    del tokens
    sample_weights_g = index(sample_weights, perm, (rows,))
    histc_input = expert_ids_g.apart(OperationKind.TO, dtype=DType.INT32)
    tokens_per_expert = counted(histc_input, OperationKind.HISTC, self.num_experts)
    scratch = 0 if self.run.decomposed else SCAN_SCRATCH_BYTES
    offsets = counted(
        tokens_per_expert, OperationKind.CUMSUM, self.num_experts, scratch_bytes=scratch
    )
    selected_weights = stack_of(self, self.first)
    selected_biases = self.biases("gate_up_proj_bias", expert_ids_g)
    proj_out = grouped_linear(selected_hidden_states_g, selected_weights, offsets, selected_biases)
    proj_out = self.apply_gate(proj_out)
    second_weights = stack_of(self, self.down_proj)
    selected_biases = self.biases("down_proj_bias", expert_ids_g)
    proj_out = grouped_linear(proj_out, second_weights, offsets, selected_biases)
    weighted_out = proj_out * sample_weights_g.unsqueeze(1)
    inv_perm = inverse(perm)
    weighted_out = index(weighted_out, inv_perm, weighted_out.shape)
    final_hidden_states = summed(weighted_out, hidden_states.shape)
    return final_hidden_states.to(hidden_states.dtype)


def stack_of(module: Experts, weight: Weight) -> "Stack":
    """All experts' matrices, with the adapter that stands on them."""
    parameter = module.parameter(weight)
    parameter.viewed = not module.is_transposed
    return Stack(
        parameter, Handle(module.run, trained_weight(module.run, parameter), parameter.shape)
    )


class Stack:
    """A stack of matrices and what is multiplied by in its place."""

    __slots__ = ("factor", "parameter")

    def __init__(self, parameter: Parameter, factor: Handle) -> None:
        self.parameter, self.factor = parameter, factor


def grouped_linear(x: Handle, weight: Stack, offsets: Handle, bias: Handle | None = None) -> Handle:
    """``_grouped_linear``: each row's own expert's bias is added in place."""
    run, parameter = x.run, weight.parameter
    made = grouped_matmul(run, x.record, parameter, offsets.record, weight.factor.record)
    out = Handle(run, made, (x.shape[0], parameter.shape[1]))
    return out if bias is None else add_in_place(out, bias)


def counted(x: Handle, kind: OperationKind, count: int, *, scratch_bytes: int = 0) -> Handle:
    """A number for each expert."""
    made = empty(x.run, (count,), DType.INT32)
    x.run.record(kind, (x.record,), (made.record,), forward_scratch_bytes=scratch_bytes)
    return made


def inverse(perm: Handle) -> Handle:
    """``inv_perm[perm] = torch.arange(...)``."""
    run, inv_perm = perm.run, empty(perm.run, perm.shape, perm.dtype)
    size = inv_perm.record.storage.num_bytes
    run.record(OperationKind.ARANGE, (), (inv_perm.record,), forward_scratch_bytes=size)
    return inv_perm


def summed(weighted_out: Handle, shape: tuple[int, ...]) -> Handle:
    """``weighted_out.view(num_tokens, num_top_k, hidden_dim).sum(dim=1)``."""
    made = sum_of_rows(weighted_out.run, weighted_out.record, prod(shape))
    return Handle(weighted_out.run, made, shape)


class ExpertModules(Module):
    """Experts as modules of their own, one after another, as transformers before 5 runs them.

    Each takes the rows of the tokens that chose it, which are taken as equally many, and adds its weighted
    results to the sum (transformers 4.48.1, models/mixtral/modeling_mixtral.py, ``MixtralSparseMoeBlock``).
    """

    block = LayerBlock.EXPERTS

    def __init__(self, stacked: Experts) -> None:
        for number in range(stacked.num_experts):
            setattr(self, str(number), GatedMLP(stacked.config, stacked.intermediate_dim))

    def forward(
        self, hidden_states: Handle, selected_experts: Handle, routing_weights: Handle
    ) -> Handle:
        """In turn."""
        run, width = self.run, hidden_states.shape[-1]
        rows = ceil_div(selected_experts.numel, len(self.children))
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = zeros(hidden_states)
        for expert_layer in self.children.values():
            idx, top_x = (empty(run, (rows,), DType.INT64) for _ in range(2))
            run.record(OperationKind.SORT, (selected_experts.record,), (top_x.record, idx.record))
            current_state = index(hidden_states, top_x, (rows, width))
            current_hidden_states = expert_layer(current_state) * index(
                routing_weights, idx, (rows, 1)
            )
            final_hidden_states = add_rows(final_hidden_states, current_hidden_states, top_x)
        return final_hidden_states
