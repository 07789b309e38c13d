"""Trained queries that read a tower's tokens: ``AriaProjector`` of transformers."""

from memplan.errors import SetupError
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.graph.towers.state import Flow
from memplan.model.towers.queried import MaskedQueriesBody, QueriedBody


def write_queried(t: Tape, x: Tensor, body: QueriedBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.queried``."""
    return _masked_queries(t, x, body, flow)


def _masked_queries(t: Tape, x: Tensor, body: MaskedQueriesBody, flow: Flow) -> Tensor:
    size, module = body.size, body.module
    count = dict(body.counts).get(flow.patches)
    if count is None:
        known = ", ".join(str(patches) for patches, _ in body.counts)
        msg = (
            f"image_size: a picture of {flow.patches} patches has no number of queries in "
            f"projector_patch_to_query_dict, which knows {known}; choose a size of as many patches"
        )
        raise SetupError(msg)
    first = t.slice(t.parameter(body.query), count * size)
    asked = t.tensor(flow.items * count * size, first.dtype)
    t.record(OperationKind.REPEAT, (first,), (asked,), gradients=(Gradient.FRESH,))
    normed = layer_norm(t, asked, f"{module}.layer_norm", size)
    query = linear(t, normed, f"{module}.q_proj", size, size, bias=False)
    read = layer_norm(t, x, f"{module}.layer_norm_kv", size)
    key = linear(t, read, f"{module}.k_proj", size, size, bias=False)
    value = linear(t, read, f"{module}.v_proj", size, size, bias=False)
    given = whole_attention(t, (query, key, value), f"{module}.multihead_attn", body, flow)
    t.touch(asked, normed, read)
    rows = t.contiguous(given if t.autocast is None else t.cast(given, t.autocast))
    bias = t.parameter(f"{module}.linear.bias")
    made = t.add(
        matmul_weight(t, rows, t.parameter(f"{module}.linear.weight")), t.cast_weight(bias)
    )
    out = layer_norm(t, made, body.norm, size)
    raised = linear(t, out, f"{body.network}.fc1", size, body.outputs, bias=False)
    active = activation(t, raised, body.activation)
    t.touch(raised)
    return linear(t, active, f"{body.network}.fc2", body.outputs, body.outputs, bias=False)


def whole_attention(
    t: Tape, parts: tuple[Tensor, Tensor, Tensor], name: str, body: MaskedQueriesBody, flow: Flow
) -> Tensor:
    """``torch.nn.MultiheadAttention`` that is given a mask and asked for its weights.

    Sequences lie across, so that each third of the one weight reads a copy.
    """
    query, key, value = parts
    size, heads = body.size, body.num_heads
    pairs = query.numel // size * (key.numel // size // flow.items) * heads
    mask = t.tensor(pairs, query.dtype)
    t.record(OperationKind.MASK, (), (mask,))
    weights = t.split(t.parameter(f"{name}.in_proj_weight"), *(size * size,) * 3)
    biases = t.split(t.parameter(f"{name}.in_proj_bias"), *(size,) * 3)
    made = [_across(t, *each, size) for each in zip(parts, weights, biases, strict=True)]
    scaled = t.scale(made[0])
    added = mask if t.autocast is None else t.cast(mask, t.autocast)
    scores = t.tensor(pairs, scaled.dtype)
    t.record(
        OperationKind.BADDBMM, (added, scaled, made[1]), (scores,), saves=(scaled, made[1]),
        gradients=(Gradient.NONE, Gradient.FRESH, Gradient.FRESH),
        flops=2 * pairs * (size // heads),
    )  # fmt: skip
    shares = softmax(t, scores)
    t.touch(scores, made[0])
    seen = batched_matmul(t, shares, made[2], query.numel, pairs * size // heads // query.numel)
    joined = t.contiguous(seen)
    t.touch(seen, mask, query, key, value)
    out = linear(t, joined, f"{name}.out_proj", size, size, bias=True)
    t.touch(joined, shares)
    return out


def _across(t: Tape, x: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
    """A linear layer on what lies across, with a part of a weight, and its bias added."""
    if t.autocast is not None:
        x, weight, bias = (t.cast(each, t.autocast) for each in (x, weight, bias))
    rows = t.contiguous(x)
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.MATMUL, (rows, weight), (out,), saves=(rows, weight),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * x.numel * size,
    )  # fmt: skip
    return t.add(out, bias)
