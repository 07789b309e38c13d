"""Experts that multiply their rows one after another, sorted and joined again (``JetMoeMoE``).

A token's rows are taken once for each of its experts, sorted by expert and cut where the next one's
begin; products are joined, and added to zeros at their tokens' places. JetMoE's attention has its queries
from such experts, and its output too. All experts are taken as chosen equally often.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.head_layout import Shape, as_heads, splits_heads
from memplan.graph.attention.paths import attend
from memplan.graph.attention.rotary import rotate, turns_heads
from memplan.graph.experts.routing import take, top_k
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.products import linear, matmul_tensor
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import ExpertShare, Tensor
from memplan.model.mixtures import SortedAttentionSpec, SortedExpertsSpec
from memplan.model.parameters import LayerBlock, WeightRole


@dataclass(slots=True)
class Routes:
    """Where each token's rows go."""

    order: Tensor
    """Of the rows, sorted by expert."""
    tokens: Tensor
    """The token of each sorted row."""
    weights: Tensor
    logits: Tensor


def sorted_experts(t: Tape, x: Tensor, spec: SortedExpertsSpec, context: StackContext) -> Tensor:
    """The network: routed rows up, gated, down, weighted and added."""
    hidden_size = context.hidden_size
    bias = t.parameter("mlp.bias", hidden_size)
    flat = t.flatten(x)
    routes = _routes(t, flat, "mlp.router.layer", spec, hidden_size)
    rows = routes.order.numel
    inner = spec.intermediate_size
    given = take(t, flat, routes.tokens, rows * hidden_size)
    both = _products(t, given, "mlp.input_linear", spec, 2 * inner, hidden_size, matrices=2)
    gate, up = t.split(both, both.numel // 2, both.numel // 2)
    active = activation_module(t, gate, spec.activation, "mlp.activation")
    middle = t.mul(active, up)
    made = _products(t, middle, "mlp.output_linear", spec, hidden_size, inner)
    out = _gathered(t, made, routes, bias, x.numel)
    t.touch(given, both, middle, made, x, routes.logits)
    return out


def sorted_attention(
    t: Tape, x: Tensor, spec: SortedAttentionSpec, context: StackContext
) -> Tensor:
    """Queries of each token's experts, keys and values repeated for them, and their outputs."""
    scores, experts, hidden = spec.scores, spec.experts, context.hidden_size
    width = scores.num_kv_heads * scores.head_dim
    bias = t.parameter("self_attn.experts.bias", hidden)
    flat = t.flatten(x)
    routes = _routes(t, flat, "self_attn.experts.router.layer", experts, hidden)
    query = _queries(t, flat, routes, spec, hidden)
    both = linear(t, x, "self_attn.kv_proj", hidden, 2 * width)
    key, value = t.split(both, both.numel // 2, both.numel // 2)
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec.repeated)
    if splits_heads(t, scores) or turns_heads(t, scores):
        query = as_heads(t, query, scores.num_heads)
        key, value = (as_heads(t, each, scores.num_kv_heads) for each in (key, value))
    cos, sin = context.tables(scores)
    query, turned = rotate(t, query, key, scores, cos, sin)
    times = scores.num_heads // scores.num_kv_heads
    repeated = _repeated(t, turned, times), _repeated(t, value, times)
    made = attend(t, query, *repeated, shape, context.mask)
    rows = routes.order.numel
    given = take(t, made, routes.order, rows * width)
    out = _products(t, given, "self_attn.experts.output_linear", experts, hidden, width)
    result = _gathered(t, out, routes, bias, x.numel)
    t.touch(query, *repeated, given, out, x, routes.logits)
    return result


def _queries(
    t: Tape, x: Tensor, routes: Routes, spec: SortedAttentionSpec, hidden_size: int
) -> Tensor:
    """``JetMoeMoA.map``: products of the sorted rows, put back in order."""
    width = spec.scores.num_kv_heads * spec.scores.head_dim
    rows = routes.order.numel
    given = take(t, x, routes.tokens, rows * hidden_size)
    made = _products(t, given, "self_attn.experts.input_linear", spec.experts, width, hidden_size)
    out = _added(t, made, routes.order, made.numel)
    t.touch(given, made)
    return out


def _repeated(t: Tape, x: Tensor, times: int) -> Tensor:
    out = t.tensor(times * x.numel, x.dtype)
    t.record(OperationKind.REPEAT, (x,), (out,), gradients=(Gradient.FRESH,))
    out.by_head = True
    return out


def _routes(t: Tape, x: Tensor, name: str, spec: SortedExpertsSpec, hidden_size: int) -> Routes:
    """``JetMoeTopKGating``: the largest logits, a softmax of those, and the rows by expert."""
    tokens = x.numel // hidden_size
    rows = tokens * spec.num_chosen
    made = linear(t, x, name, hidden_size, spec.num_experts, role=WeightRole.ROUTER)
    logits = t.cast(made, DType.FP32)
    best, chosen = top_k(t, logits, rows)
    weights = t.cast(softmax(t, best), x.dtype)
    blank, spread = (t.tensor(tokens * spec.num_experts, weights.dtype) for _ in range(2))
    t.record(OperationKind.ZEROS, (), (blank,))
    t.record(OperationKind.SCATTER, (blank, chosen), (spread,))
    counts = t.tensor(spec.num_experts, DType.INT64)
    scratch = t.tensor(spread.numel, DType.INT64).storage.num_bytes
    t.record(OperationKind.SUM, (spread,), (counts,), forward_scratch_bytes=scratch)
    by_expert, order = t.tensor(rows, DType.INT64), t.tensor(rows, DType.INT64)
    t.record(OperationKind.SORT, (chosen,), (by_expert, order))
    sources = t.tensor(rows, DType.INT64)
    t.record(OperationKind.FLOOR_DIVIDE, (order,), (sources,))
    taken = take(t, weights, order, rows)
    t.touch(best, weights, blank, spread, by_expert)
    return Routes(order=order, tokens=sources, weights=taken, logits=logits)


def _products(
    t: Tape,
    x: Tensor,
    name: str,
    spec: SortedExpertsSpec,
    outputs: int,
    inputs: int,
    *,
    matrices: int = 1,
) -> Tensor:
    """Each expert's rows times its matrix, joined again."""
    t.block = LayerBlock.EXPERTS
    count = spec.num_experts
    weight = t.parameter(
        f"{name}.weight", count, outputs, inputs, module=name,
        experts=ExpertShare(count, spec.num_chosen, matrices),
    )  # fmt: skip
    parts = t.split(x, *_shares(x.numel // inputs, count, inputs))
    made = [
        matmul_tensor(t, part, t.slice(weight, weight.numel // count), inputs) for part in parts
    ]
    out = t.concatenate(*made)
    t.touch(*made)
    t.block = LayerBlock.NETWORK
    return out


def _shares(rows: int, count: int, width: int) -> list[int]:
    """Elements of each expert's rows, the first ones having one more where they do not divide."""
    each, rest = divmod(rows, count)
    return [(each + (number < rest)) * width for number in range(count)]


def _added(t: Tape, rows: Tensor, places: Tensor, numel: int) -> Tensor:
    """``zeros.index_add``: a new tensor, which keeps rows and places."""
    blank, out = t.tensor(numel, rows.dtype), t.tensor(numel, rows.dtype)
    t.record(OperationKind.ZEROS, (), (blank,))
    t.record(
        OperationKind.INDEX_ADD_IN_PLACE, (blank, rows, places), (out,), saves=(places, rows),
        gradients=(Gradient.NONE, Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    t.touch(blank)
    return out


def _gathered(t: Tape, made: Tensor, routes: Routes, bias: Tensor, numel: int) -> Tensor:
    """Weighted, added at the tokens' places, with one bias for all experts."""
    total = _added(t, t.mul(made, routes.weights), routes.tokens, numel)
    return t.add(total, bias)
