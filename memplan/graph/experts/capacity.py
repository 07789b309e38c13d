"""Experts of a limited capacity, one for each token, as ``SwitchTransformersSparseMLP`` trains them.

The router scores tokens in a dtype of its own, after multiplying them by noise; each expert, a module,
takes the rows of its tokens, which are taken as equally many up to its capacity, and adds its weighted
results to the sum.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.experts.routing import take
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.products import matmul_weight
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import ExpertShare, Tensor
from memplan.model.mixtures import CapacityMixtureSpec
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.units import ceil_div

MOST_PRODUCTS = 16
"""Experts that are written down one by one; of more, as many at a time as make so many products."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Each token's expert and its weight, and what else the block's variables hold."""

    marks: Tensor
    weights: Tensor
    logits: Tensor


def capacity_mixture(
    t: Tape, x: Tensor, spec: CapacityMixtureSpec, context: StackContext
) -> Tensor:
    """Router, experts in turn, the sum of what they give."""
    hidden, batch = context.hidden_size, context.batch
    choice = _route(t, x, spec, hidden)
    t.block = LayerBlock.EXPERTS
    tokens = x.numel // hidden
    total = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.ZEROS, (), (total,))
    hit = t.tensor(spec.num_experts, DType.INT64)
    t.record(OperationKind.GT, (), (hit,))
    at_once = 1
    if t.options.quantizer is None and t.adaptation is None:
        at_once = ceil_div(spec.num_experts, MOST_PRODUCTS)
    rows = min(ceil_div(tokens, spec.num_experts), spec.capacity * batch)
    for first in range(0, spec.num_experts, at_once):
        count = min(at_once, spec.num_experts - first)
        total = _expert(t, x, total, choice, spec, hidden, first, count, rows)
    t.block = LayerBlock.NETWORK
    t.touch(hit, choice.marks, choice.weights, choice.logits, x)
    return total


def _route(t: Tape, x: Tensor, spec: CapacityMixtureSpec, hidden: int) -> Choice:
    """``SwitchTransformersTop1Router``: its matrix is held in the router's dtype from the first step on."""
    given = t.cast(x, spec.router_dtype)
    if spec.jitter:
        given = _jittered(t, given)
    weight = t.parameter(
        "mlp.router.weight",
        spec.num_experts,
        hidden,
        dtype=spec.router_dtype,
        role=WeightRole.ROUTER,
    )
    bias = None
    if spec.router_bias:
        bias = t.parameter("mlp.router.bias", spec.num_experts, dtype=spec.router_dtype)
    logits = matmul_weight(t, given, weight, bias)
    scores = t.cast(softmax(t, logits, dtype=spec.router_dtype), x.dtype)
    tokens = x.numel // hidden
    chosen, marks = t.tensor(tokens, DType.INT64), t.tensor(scores.numel, DType.INT64)
    t.record(OperationKind.GUMBEL, (scores,), (chosen,), gradients=(Gradient.NONE,))
    t.record(OperationKind.SCATTER, (chosen,), (marks,))
    counts, within = t.tensor(scores.numel, DType.INT64), t.tensor(scores.numel, DType.BOOL)
    t.record(OperationKind.CUMSUM, (marks,), (counts,))
    t.record(OperationKind.LE, (counts,), (within,))
    kept = t.tensor(scores.numel, DType.INT64)
    t.record(OperationKind.MUL, (marks, within), (kept,))
    weights, places = t.tensor(tokens, scores.dtype), t.tensor(tokens, DType.INT64)
    t.record(
        OperationKind.TOPK, (scores,), (weights, places), saves=(places,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    t.touch(scores, counts, within)
    return Choice(kept, weights, logits)


def _jittered(t: Tape, x: Tensor) -> Tensor:
    """Times uniform noise, in place: the noise is kept."""
    noise = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.UNIFORM_IN_PLACE, (), (noise,))
    out = t.view(x, x.numel)
    t.record(
        OperationKind.MUL_IN_PLACE, (x, noise), (out,), saves=(noise,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _expert(
    t: Tape,
    x: Tensor,
    total: Tensor,
    choice: Choice,
    spec: CapacityMixtureSpec,
    hidden: int,
    first: int,
    count: int,
    rows: int,
) -> Tensor:
    """One expert's tokens, or those of ``count`` of them at once, added where they belong."""
    own = t.tensor(x.numel // hidden * count, DType.INT64)
    t.record(OperationKind.INDEX, (choice.marks,), (own,))
    found = t.tensor(2 * rows * count, DType.INT64)
    t.record(OperationKind.SORT, (own,), (found,))
    state = take(t, x, found, rows * count * hidden)
    state.is_flat = True
    name, inner = f"mlp.experts.{first}", spec.expert.intermediate_size
    up = _product(t, state, spec, f"{name}.up_proj", inner, hidden, count)
    middle = activation_module(t, up, spec.expert.activation, f"{name}.act_fn")
    t.touch(up)
    middle = dropout(t, middle, spec.expert.activation_dropout, module=f"{name}.dropout_inside")
    middle = t.cast(middle, t.compute)
    made = _product(t, middle, spec, f"{name}.down_proj", hidden, inner, count)
    weighted = t.mul(made, take(t, choice.weights, found, rows * count))
    added = t.cast(weighted, x.dtype)
    out = t.view(total, total.numel)
    t.record(
        OperationKind.INDEX_ADD_IN_PLACE, (total, added, found), (out,), saves=(found, added),
        gradients=(Gradient.ALIAS, Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    t.touch(state, found)
    return out


def _product(
    t: Tape,
    x: Tensor,
    spec: CapacityMixtureSpec,
    name: str,
    outputs: int,
    inputs: int,
    count: int,
) -> Tensor:
    """A linear layer of one expert, or those of several side by side."""
    weight = t.matrix(f"{name}.weight", count * outputs, inputs)
    weight.experts = ExpertShare(spec.num_experts, 1)
    weight.num_modules = count
    if count == 1:
        return matmul_weight(t, x, weight)
    factor = t.cast_weight(weight)
    given = x if t.autocast is None else t.cast(x, t.autocast)
    rows = given.numel // inputs
    out = t.tensor(rows * outputs, given.dtype)
    t.record(
        OperationKind.LINEAR, (given, factor), (out,), saves=(factor, given),
        gradients=(Gradient.FRESH, Gradient.VIEW), flops=2 * rows * inputs * outputs,
    )  # fmt: skip
    return out
