"""Experts as modules of their own, one after another, as transformers before 5 runs them.

Each takes the rows of the tokens that chose it, which are taken as equally many, and adds its weighted
results to the sum (transformers 4.48.1, models/mixtral/modeling_mixtral.py, ``MixtralSparseMoeBlock``).
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.experts.routing import take
from memplan.graph.feed_forward import feed_forward
from memplan.model.mixtures import MixtureSpec
from memplan.units import ceil_div


def experts_in_turn(
    t: Tape, x: Tensor, weights: Tensor, chosen: Tensor, spec: MixtureSpec, hidden_size: int
) -> Tensor:
    """The weighted sum of every token's experts."""
    rows = ceil_div(chosen.numel, spec.num_experts)
    weights = t.cast(weights, x.dtype)
    total = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.ZEROS, (), (total,))
    for expert in range(spec.num_experts):
        tokens, places = t.tensor(rows, DType.INT64), t.tensor(rows, DType.INT64)
        t.record(OperationKind.SORT, (chosen,), (tokens, places))
        state = take(t, x, tokens, rows * hidden_size)
        made = feed_forward(t, state, spec.expert, hidden_size, f"mlp.experts.{expert}")
        weighted = t.mul(made, take(t, weights, places, rows))
        total = _add_rows(t, total, weighted, tokens)
        t.touch(state, made, tokens, places)
    return total


def _add_rows(t: Tape, total: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """``index_add_``: keeps the rows and where; the rows' gradient is taken out of the sum's."""
    out = t.view(total, total.numel)
    t.record(
        OperationKind.INDEX_ADD_IN_PLACE, (total, rows, tokens), (out,), saves=(rows, tokens),
        gradients=(Gradient.ALIAS, Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out
