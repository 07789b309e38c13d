"""Zamba's layers with a block before their mixer whose weights other layers run too.

The block reads hidden states and embeddings side by side. Its weights are the first such layer's; what
later ones have of their own are a projection of its result and, in Zamba 2, adapters
(transformers 5.23, ``ZambaHybridLayer``, ``Zamba2HybridLayer``).
"""

from contextlib import AbstractContextManager, nullcontext

from memplan.graph.attention.head_layout import Shape, as_heads, splits_heads
from memplan.graph.attention.paths import attend
from memplan.graph.attention.rotary import rotate, turns_heads
from memplan.graph.layer_parts import mix_tokens
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.layers import LayerSpec, SharedBlockSpec
from memplan.model.parameters import LayerBlock, WeightRole

BLOCK = "shared_transformer"
"""The block's module."""


def block_layer(
    t: Tape, x: Tensor, layer: LayerSpec, block: SharedBlockSpec, context: StackContext
) -> Tensor:
    """The block, its projection, their sum with the states; a norm, the mixer, a sum."""
    hidden = context.hidden_size
    fed = _block(t, x, layer, block, context)
    added = linear(t, fed, "linear", hidden, hidden)
    t.touch(fed)
    if t.segment.checkpointed:
        # The mixer's module is checkpointed by itself, inside this layer, which keeps what it is given.
        t.segment.kept_outputs |= {added.storage}
    summed = t.add(x, added)
    normed = norm(t, summed, layer.norm, "mamba_decoder.input_layernorm", hidden)
    t.touch(summed)
    mixed = mix_tokens(t, normed, layer.attention, context)
    out = t.add(x, mixed)
    t.touch(mixed, normed, added)
    return out


def _block(
    t: Tape, x: Tensor, layer: LayerSpec, block: SharedBlockSpec, context: StackContext
) -> Tensor:
    """A norm, attention, another norm and the network; no sums between them."""
    assert context.embeddings is not None
    both = t.concatenate(x, context.embeddings)
    width = both.numel // (context.batch * context.seq_len)
    with _weights(t, block, context):
        normed = norm(t, both, layer.norm, f"{BLOCK}.input_layernorm", width)
    t.touch(both)
    t.block = LayerBlock.ATTENTION
    attended = _attention(t, normed, block, context, width)
    t.block = LayerBlock.NETWORK
    with _weights(t, block, context):
        normed = norm(t, attended, layer.norm, f"{BLOCK}.pre_ff_layernorm", context.hidden_size)
    t.touch(attended)
    return _network(t, normed, block, context)


def _weights(
    t: Tape, block: SharedBlockSpec, context: StackContext
) -> AbstractContextManager[None]:
    """Those of the layer that ran the block first, of which this one owns some too."""
    owner = context.blocks.setdefault(block.number, t.segment)
    return nullcontext() if owner is t.segment else t.declared_weights(owner)


def _linear(
    t: Tape,
    x: Tensor,
    name: str,
    sizes: tuple[int, int],
    block: SharedBlockSpec,
    context: StackContext,
    *,
    bias: bool = False,
    role: WeightRole = WeightRole.MATRIX,
) -> Tensor:
    """One of the block's linear layers."""
    with _weights(t, block, context):
        return linear(t, x, f"{BLOCK}.{name}", *sizes, bias=bias, role=role)


def _adapted(
    t: Tape, x: Tensor, made: Tensor, name: str, sizes: tuple[int, int], block: SharedBlockSpec
) -> Tensor:
    """The sum with what an adapter of the layer's own makes of the same states."""
    at, rank = f"{BLOCK}.{name}_list.{block.turn}", block.adapter_rank
    narrow = linear(t, x, f"{at}.0", sizes[0], rank)
    wide = linear(t, narrow, f"{at}.1", rank, sizes[1])
    return t.add(made, wide)


def _attention(
    t: Tape, x: Tensor, block: SharedBlockSpec, context: StackContext, width: int
) -> Tensor:
    """Queries, keys and values of states and embeddings; what comes out is as wide as the states."""
    spec = block.scores
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec, splits_heads(t, spec))
    turned = turns_heads(t, spec) or shape.heads_split
    parts = []
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        sizes = (width, heads * spec.head_dim)
        role = WeightRole.MATRIX if name == "v" else WeightRole.QUERY_KEY
        made = _linear(t, x, f"self_attn.{name}_proj", sizes, block, context, role=role)
        parts.append(made)
    if block.adapts_attention:
        for number, name in enumerate("qkv"):
            plain = parts[number]
            parts[number] = _adapted(
                t, x, plain, f"self_attn.linear_{name}_adapter", (width, width), block
            )
            t.touch(plain)
    query, key = (as_heads(t, each, spec.num_heads) if turned else each for each in parts[:2])
    value = as_heads(t, parts[2], spec.num_kv_heads) if shape.heads_split else parts[2]
    if spec.rotary is not None:
        query, key = rotate(t, query, key, spec, *context.tables(spec))
    out = attend(t, query, key, value, shape, context.mask)
    sizes = (spec.num_heads * spec.head_dim, context.hidden_size)
    role = WeightRole.ATTENTION_OUTPUT
    result = _linear(t, out, "self_attn.o_proj", sizes, block, context, role=role)
    t.touch(query, key, value, x)
    return result


def _network(t: Tape, x: Tensor, block: SharedBlockSpec, context: StackContext) -> Tensor:
    """Gate and up, of one linear layer where an adapter stands beside it."""
    spec, hidden = block.network, context.hidden_size
    inner = spec.intermediate_size
    if not spec.fused_gate_up:
        gate = _linear(t, x, "mlp.gate_proj", (hidden, inner), block, context, bias=spec.bias)
        active = activation_module(t, gate, spec.activation, f"{BLOCK}.mlp.act_fn")
        up = _linear(t, x, "mlp.up_proj", (hidden, inner), block, context, bias=spec.bias)
        halves = x
    else:
        sizes = (hidden, 2 * inner)
        plain = _linear(t, x, "mlp.gate_up_proj", sizes, block, context, bias=spec.bias)
        halves = _adapted(t, x, plain, "mlp.gate_up_proj_adapter", sizes, block)
        t.touch(plain)
        gate, up = t.split(halves, halves.numel // 2, halves.numel // 2)
        active = activation_module(t, gate, spec.activation, f"{BLOCK}.mlp.act_fn")
    middle = t.mul(active, up)
    out = _linear(t, middle, "mlp.down_proj", (inner, hidden), block, context, bias=spec.bias)
    t.touch(halves, middle, x)
    return out
