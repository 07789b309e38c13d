"""Stacked experts that run one after another, on the rows of the tokens that chose each.

Classes that transformers 5.23 does not run by grouped products (DBRX, Step 3.7): each expert's matrices
are a slice of the stack, whose gradient is a zero-filled tensor of the whole stack. How many tokens
choose an expert is decided by data; all are taken as chosen equally often.
"""

from memplan.dtypes import DType
from memplan.graph.experts.routing import take
from memplan.graph.feed_forward import clamped_product
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.products import matmul_tensor
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import ExpertShare, Parameter, Tensor
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import Clamp
from memplan.units import ceil_div


def stacked_in_turn(
    t: Tape, x: Tensor, weights: Tensor, chosen: Tensor, spec: MixtureSpec, hidden_size: int
) -> Tensor:
    """The weighted sum of every token's experts, added row by row to zeros."""
    rows = ceil_div(chosen.numel, spec.num_experts)
    stacks = _stacks(t, spec, hidden_size)
    total = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.ZEROS, (), (total,))
    equal = t.tensor(chosen.numel * (spec.num_experts + 1), DType.BOOL)
    t.record(OperationKind.EQ, (chosen,), (equal,))
    mask = t.tensor(equal.numel, DType.INT64)
    t.record(OperationKind.TO, (equal,), (mask,))
    for _ in range(spec.num_experts):
        places, tokens = t.tensor(rows, DType.INT64), t.tensor(rows, DType.INT64)
        t.record(OperationKind.WHERE, (mask,), (places, tokens))
        made = _expert(t, x, tokens, rows, stacks, spec, hidden_size)
        weighted = t.mul(made, take(t, weights, places, rows))
        total = add_rows(t, total, t.cast(weighted, total.dtype), tokens)
    t.touch(mask)
    return total


def _stacks(t: Tape, spec: MixtureSpec, hidden_size: int) -> list[Parameter]:
    """All experts' matrices: gate and up in one stack, or each in its own; then those that lead back."""
    inner = spec.expert.intermediate_size
    count, active = spec.num_experts, spec.num_experts_per_token
    name = "mlp.experts"
    if spec.separate_stacks:
        share = ExpertShare(count, active)
        return [
            t.parameter(f"{name}.{matrix}", count * inner, hidden_size, experts=share)
            for matrix in ("w1", "v1", "w2")
        ]
    fused = ExpertShare(count, active, 2)
    return [
        t.parameter(f"{name}.gate_up_proj", count, 2 * inner, hidden_size, experts=fused),
        t.parameter(
            f"{name}.down_proj", count, hidden_size, inner, experts=ExpertShare(count, active)
        ),
    ]


def _expert(
    t: Tape,
    x: Tensor,
    tokens: Tensor,
    rows: int,
    stacks: list[Parameter],
    spec: MixtureSpec,
    hidden_size: int,
) -> Tensor:
    expert, count = spec.expert, spec.num_experts
    state = None
    if spec.separate_stacks:
        first, second, last = (_own_part(t, each, count) for each in stacks)
        state = take(t, x, tokens, rows * hidden_size)
        gate = matmul_tensor(t, state, first, hidden_size)
        up = matmul_tensor(t, state, second, hidden_size)
    else:
        state = take(t, x, tokens, rows * hidden_size)
        fused = t.slice(stacks[0], stacks[0].numel // count)
        both = matmul_tensor(t, state, fused, hidden_size)
        gate, up = t.split(both, both.numel // 2, both.numel // 2)
        last = None
    if expert.clamp is not Clamp.NEVER:
        middle = clamped_product(t, gate, up, expert, "mlp.experts")
    else:
        middle = t.mul(activation_module(t, gate, expert.activation, "mlp.experts.act_fn"), up)
    if last is None:
        last = t.slice(stacks[1], stacks[1].numel // count)
    return matmul_tensor(t, middle, last, expert.intermediate_size)


def _own_part(t: Tape, stack: Tensor, count: int) -> Tensor:
    """An expert's part of a stack that is seen in parts; so is its gradient, which sums take no place in."""
    out = t.view(stack, stack.numel // count)
    t.record(OperationKind.SLICE, (stack,), (out,), gradients=(Gradient.VIEW,))
    return out


def add_rows(t: Tape, total: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """``index_add_``: keeps rows and places; the rows' gradient is taken out of the sum's."""
    out = t.view(total, total.numel)
    t.record(
        OperationKind.INDEX_ADD_IN_PLACE, (total, rows, tokens), (out,), saves=(tokens, rows),
        gradients=(Gradient.ALIAS, Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out
