"""MiniMax's lightning attention, block by block, as transformers 5.23 trains it.

Each block attends within itself, and to all earlier blocks through the sum of their keys times
values, which every block decays and adds to (``MiniMaxLightningAttention.forward``). Every block's
own scores are kept, so the memory grows with the sequence times the block.
"""

from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.mixers import LightningSpec


def lightning_attention(t: Tape, x: Tensor, spec: LightningSpec, context: StackContext) -> Tensor:
    """Activated queries, keys and values, the blocks, a norm, a gate, the output projection."""
    hidden, width = context.hidden_size, spec.num_heads * spec.head_dim
    decays = _decays(t, spec)
    states = linear(t, x, "self_attn.qkv_proj", hidden, 3 * width)
    states = activation(t, states, spec.activation)
    query, key, value = t.split(states, *(states.numel // 3,) * 3)
    joined, carried = _blocks(t, (query, key, value), decays, spec, context)
    out = t.contiguous(joined)
    t.touch(joined)
    normed = norm(t, out, spec.norm, "self_attn.norm", width)
    gate = linear(t, x, "self_attn.output_gate", hidden, width)
    gated = t.mul(t.elementwise(OperationKind.SIGMOID, gate), normed)
    result = linear(t, gated, "self_attn.out_proj", width, hidden)
    t.touch(x, states, *carried)
    t.linger(carried[0])
    return result


def _decays(t: Tape, spec: LightningSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers of the module: decays of queries, of keys and of the pairs of a block."""
    heads, block, dtype = spec.num_heads, spec.block_size, t.options.weights
    t.buffer(heads, dtype)
    return (
        t.buffer(heads * block, dtype),
        t.buffer(heads * block, dtype),
        t.buffer(heads * block * block, dtype),
    )


def _blocks(
    t: Tape,
    states: tuple[Tensor, Tensor, Tensor],
    decays: tuple[Tensor, Tensor, Tensor],
    spec: LightningSpec,
    context: StackContext,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All blocks' outputs joined, and what the frame still holds: the sum of keys and values first."""
    query_decay, key_decay, pair_decay = decays
    batch, size = context.batch, spec.head_dim
    heads = batch * spec.num_heads
    total = t.tensor(heads * size * size, states[2].dtype)
    t.record(OperationKind.ZEROS, (), (total,))
    outputs: list[Tensor] = []
    frame: tuple[Tensor, ...] = ()
    for start in range(0, context.seq_len, spec.block_size):
        rows = min(spec.block_size, context.seq_len - start)
        query, key, value = (t.slice(part, heads * rows * size) for part in states)
        decay = t.tensor(spec.num_heads, t.options.weights)
        t.record(OperationKind.EXP, (), (decay,))
        scores = _product(t, query, key, heads * rows * rows, size, batch)
        pairs = t.mul(scores, t.view(pair_decay, spec.num_heads * rows * rows))
        within = batched_matmul(t, pairs, _merged(t, value, batch), query.numel, rows)
        faded = t.mul(query, t.view(query_decay, spec.num_heads * rows))
        before = batched_matmul(t, _merged(t, faded, batch), total, query.numel, size)
        t.touch(faded)
        out = t.add(before, within)
        outputs.append(out)
        if start + rows == context.seq_len:
            key, value, total = (_without_gradient(part) for part in (key, value, total))
        faded_key = t.mul(key, t.view(key_decay, spec.num_heads * rows))
        factors = _merged(t, faded_key, batch), _merged(t, value, batch)
        added = batched_matmul(t, *factors, total.numel, rows)
        t.touch(faded_key)
        total = t.add(t.mul(total, decay), added)
        t.touch(*frame)
        frame = (scores, within, before, added, *factors)
    joined = t.concatenate(*outputs)
    for factor in frame[-2:]:
        t.linger(factor)
    return joined, (total, outputs[-1], *frame[:-2])


def _without_gradient(x: Tensor) -> Tensor:
    """What goes only into the last sum, which no loss reaches.

    Its graph goes with the layer's variable for that sum, and what it kept with it.
    """
    return Tensor(x.numel, x.dtype, x.storage)


def _product(t: Tape, left: Tensor, right: Tensor, numel: int, inner: int, batch: int) -> Tensor:
    return batched_matmul(t, _merged(t, left, batch), _merged(t, right, batch), numel, inner)


def _merged(t: Tape, x: Tensor, batch: int) -> Tensor:
    """Sequences and heads as one dimension: of more than one sequence a copy."""
    return x if batch == 1 else t.contiguous(x)
