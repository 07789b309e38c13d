"""LXMERT: layers of text, layers of a picture's regions, and layers in which either stream reads the other.

transformers 5.23, models/lxmert/modeling_lxmert.py. The regions are embedded behind the layers of text here, and
not before them; only what a backward pass still keeps of that while it is in those layers differs.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul, merged_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.pruning import prune
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation, activation_module
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.graph.towers.state import from_batch
from memplan.graph.written.layers import post_norm_layer
from memplan.model.attention import AttentionSpec
from memplan.model.heads import FEATURES, RegionHeadSpec
from memplan.model.layers import CrossedSpec, LayerSpec, StackSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole
from memplan.model.spec import ModelSpec


def cross_streams(
    t: Tape, stack: StackSpec, spec: CrossedSpec, x: Tensor, context: StackContext
) -> Tensor:
    """What comes behind the layers of text: returns the text, and hands the regions on."""
    layer, frozen = stack.runs[0].layer, t.options.freeze.encoder
    regions = StackContext(
        hidden_size=context.hidden_size, batch=context.batch, seq_len=spec.regions.count
    )
    beside = _embedded(t, spec, layer, regions)
    for _ in range(spec.region_layers):
        t.begin("regions.layers", part=ModelPart.LAYERS, frozen=frozen, x=beside)
        t.segment.layer = layer
        beside = post_norm_layer(t, beside, layer, regions)
        t.cache(beside)
        t.end(beside)
    streams = x, beside
    for number in range(spec.crossed_layers):
        # Each segment follows on the one before: first from the regions' layers, then from its own kind.
        given = streams[0 if number else 1]
        t.begin("crossed.layers", part=ModelPart.LAYERS, frozen=frozen, x=given)
        t.segment.layer = layer
        streams = _crossed(t, streams, layer, context, regions)
        for each in streams if number < spec.crossed_layers - 1 else ():
            t.cache(each)
        t.hold(streams[1])
        t.end(streams[0])
    # Every layer's results wait in tuples until the model returns.
    t.release_cache()
    t.cached.clear()
    context.beside = streams[1]
    if not spec.read_in_the_end:
        prune(t.segment)
    return streams[0]


def _embedded(t: Tape, spec: CrossedSpec, layer: LayerSpec, regions: StackContext) -> Tensor:
    """Features and boxes, each projected and normed; half of their sum."""
    t.begin("regions.embed", part=ModelPart.EMBEDDING, frozen=_embedding_frozen(t))
    rows, hidden = regions.batch * regions.seq_len, regions.hidden_size
    parts = []
    for name, width in (("feat", spec.regions.num_features), ("pos", spec.num_sides)):
        given = from_batch(t, rows * width, t.compute)
        made = linear(t, given, f"{name}_projection", width, hidden, bias=True)
        parts.append(norm(t, made, layer.norm, f"{name}_norm", hidden))
    summed = t.add(*parts)
    half = t.scale(summed, OperationKind.DIV)
    t.touch(summed)
    out = dropout(t, half, layer.dropout, module="dropout")
    t.touch(half, *parts)
    t.end(out)
    return out


def _embedding_frozen(t: Tape) -> bool:
    return t.options.freeze.embeddings or t.options.freeze.encoder


def _crossed(
    t: Tape,
    streams: tuple[Tensor, Tensor],
    layer: LayerSpec,
    context: StackContext,
    regions: StackContext,
) -> tuple[Tensor, Tensor]:
    """Either reads the other with the same weights, then itself; two networks."""
    text, beside = streams
    network = layer.feed_forward
    assert isinstance(network, FeedForwardSpec)
    hidden = context.hidden_size
    t.block = LayerBlock.CROSS_ATTENTION
    read = _attended(t, text, beside, layer, (context, regions), "cross_attn")
    with t.declared_weights():
        seen = _attended(t, beside, text, layer, (regions, context), "cross_attn")
    t.block = LayerBlock.ATTENTION
    own = _attended(t, read, read, layer, (context, context), "language.self_attn")
    others = _attended(t, seen, seen, layer, (regions, regions), "regions.self_attn")
    t.block = LayerBlock.NETWORK
    names = ("language", "regions")
    inner = [
        _raised(t, each, network, hidden, f"{name}.mlp")
        for name, each in zip(names, (own, others), strict=True)
    ]
    made = [
        _lowered(t, each, given, network, layer, hidden, name)
        for name, each, given in zip(names, inner, (own, others), strict=True)
    ]
    t.touch(read, seen, own, others, *inner)
    return made[0], made[1]


def _raised(t: Tape, x: Tensor, spec: FeedForwardSpec, hidden: int, name: str) -> Tensor:
    up = linear(t, x, f"{name}.up_proj", hidden, spec.intermediate_size, bias=True)
    return activation_module(t, up, spec.activation, f"{name}.act_fn")


def _lowered(
    t: Tape,
    x: Tensor,
    given: Tensor,
    spec: FeedForwardSpec,
    layer: LayerSpec,
    hidden: int,
    name: str,
) -> Tensor:
    down = linear(t, x, f"{name}.mlp.down_proj", spec.intermediate_size, hidden, bias=True)
    return _residual(t, down, given, layer, hidden, f"{name}.final_layer_norm")


def _residual(t: Tape, made: Tensor, x: Tensor, layer: LayerSpec, hidden: int, name: str) -> Tensor:
    dropped = dropout(t, made, layer.dropout, module=f"{name}.dropout")
    out = norm(t, t.add(dropped, x), layer.norm, name, hidden)
    t.touch(dropped)
    return out


def _attended(
    t: Tape,
    x: Tensor,
    other: Tensor,
    layer: LayerSpec,
    contexts: tuple[StackContext, StackContext],
    name: str,
) -> Tensor:
    """``LxmertAttention`` and its output: queries of the one, keys and values of the other."""
    spec, hidden = layer.attention, contexts[0].hidden_size
    assert isinstance(spec, AttentionSpec)
    batch, rows, keys = contexts[0].batch, contexts[0].seq_len, contexts[1].seq_len
    shape, turned = Shape(batch, rows, keys, spec), Shape(batch, keys, rows, spec)
    query, key, value = (
        linear(t, given, f"{name}.{part}_proj", hidden, hidden, bias=True)
        for part, given in zip("qkv", (x, other, other), strict=True)
    )
    left, right = merged_heads(t, query, shape), merged_heads(t, key, turned)
    scores = batched_matmul(t, left, right, shape.scores, spec.head_dim)
    divided = t.scale(scores, OperationKind.DIV)
    t.touch(scores)
    mask = contexts[1].mask
    masked = divided if mask is None else t.add(divided, mask)
    weights = dropout(t, softmax(t, masked), spec.dropout)
    product = batched_matmul(t, weights, merged_heads(t, value, turned), shape.outputs, keys)
    out = t.contiguous(product) if batch == 1 else t.scale(product, OperationKind.CLONE)
    t.touch(product)
    t.touch(query, key, value, masked, weights)
    role = WeightRole.ATTENTION_OUTPUT
    made = linear(t, out, f"{name}.o_proj", hidden, hidden, bias=True, role=role)
    return _residual(t, made, x, layer, hidden, f"{name}_layer_norm")


def region_losses(
    t: Tape,
    model: ModelSpec,
    spec: RegionHeadSpec,
    loss: Tensor,
    beside: Tensor | None,
    pooled: Tensor,
) -> Tensor:
    """What LXMERT's pretraining adds: objects, attributes and features of regions, and answers."""
    hidden, activated = model.hidden_size, spec.activation
    if spec.losses and beside is not None:
        x = linear(t, beside, "objects.transform.dense", hidden, hidden, bias=True)
        x = norm(t, activation(t, x, activated), spec.norm, "objects.transform.norm", hidden)
        made = [
            linear(t, x, f"objects.{name}", hidden, width, bias=True) for name, width in spec.losses
        ]
        for (name, _), found in zip(spec.losses, made, strict=True):
            added = _distance(t, found) if name == FEATURES else cross_entropy(t, found)
            loss = t.add(loss, added)
        for each in made:
            t.give_out(each)
    if spec.num_answers:
        x = linear(t, pooled, "answers.dense", hidden, 2 * hidden, bias=True)
        x = norm(t, activation(t, x, Activation.GELU), spec.norm, "answers.norm", 2 * hidden)
        logits = linear(t, x, "answers.out_proj", 2 * hidden, spec.num_answers, bias=True)
        t.give_out(logits)
        loss = t.add(loss, cross_entropy(t, logits))
    return loss


def _distance(t: Tape, found: Tensor) -> Tensor:
    """A smooth L1 distance of every number, and its mean."""
    full = found if t.autocast is None else t.cast(found, DType.FP32)
    target = from_batch(t, full.numel, full.dtype)
    out = t.tensor(full.numel, full.dtype)
    t.record(
        OperationKind.SMOOTH_L1, (full,), (out,), saves=(full, target), gradients=(Gradient.FRESH,)
    )
    loss = t.tensor(1, out.dtype)
    t.record(OperationKind.MEAN, (out,), (loss,), gradients=(Gradient.FRESH,))
    return loss
