"""BigBird's attention in blocks: to the first and the last, to neighbours, and to some drawn by chance.

transformers 5.23, models/big_bird/modeling_big_bird.py, ``BigBirdBlockSparseAttention``. The first two and the
last two blocks of queries have products of their own; all others share four. Nothing is dropped out. The
weights are written into a matrix of all pairs, which the layer returns and which no gradient reaches.
"""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.head_layout import as_heads, batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.attention import BlockSparseSpec
from memplan.model.layers import LayerRun, StackSpec
from memplan.model.parameters import WeightRole


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of what is cut."""

    batch: int
    heads: int
    tokens: int
    """Of one sequence."""
    block: int
    random: int
    """Blocks drawn by chance for each."""
    width: int
    """Of a head."""

    @property
    def blocks(self) -> int:
        """Of one sequence."""
        return self.tokens // self.block

    @property
    def rows(self) -> int:
        """Tokens of a block, of all heads."""
        return self.batch * self.heads * self.block

    @property
    def whole(self) -> int:
        """Elements of all queries."""
        return self.batch * self.heads * self.tokens * self.width


def settled(stack: StackSpec, seq_len: int) -> StackSpec:
    """The stack as the class runs it: sequences that are too short for blocks attend to all tokens."""
    spec = stack.runs[0].layer.attention
    assert isinstance(spec, BlockSparseSpec)
    if seq_len > (5 + 2 * spec.num_random_blocks) * spec.block_size:
        return replace(stack, multiple_of=spec.block_size)

    def full(run: LayerRun) -> LayerRun:
        attention = run.layer.attention
        assert isinstance(attention, BlockSparseSpec)
        return replace(run, layer=replace(run.layer, attention=attention.full))

    return replace(stack, runs=tuple(full(run) for run in stack.runs), spare_mask=True)


def share_band_mask(t: Tape, spec: BlockSparseSpec, context: StackContext) -> None:
    """What the model makes of its mask for the middle blocks, and holds."""
    blocks = max(context.seq_len // spec.block_size - 4, 1)
    dtype = DType.INT64 if spec.integer_masks else DType.FP32
    mask = t.tensor(context.batch * blocks * 3 * spec.block_size**2, dtype)
    t.record(OperationKind.MUL, (), (mask,))
    t.hold(mask)
    context.mask = mask


def block_sparse(t: Tape, x: Tensor, spec: BlockSparseSpec, context: StackContext) -> Tensor:
    """Projections, the products of each kind of block, their sum of values, the output projection."""
    full, hidden = spec.full, context.hidden_size
    sizes = Sizes(
        context.batch, full.num_heads, context.seq_len, spec.block_size, spec.num_random_blocks,
        full.head_dim,
    )  # fmt: skip
    mask = context.mask
    if mask is not None and not spec.integer_masks:
        mask = t.cast(mask, x.dtype)
    projected, heads = [], []
    for name, bias in zip("qkv", (full.query_bias, full.key_bias, full.value_bias), strict=True):
        projected.append(linear(t, x, f"self_attn.{name}_proj", hidden, hidden, bias=bias))
        heads.append(as_heads(t, projected[-1], sizes.heads))
    work = _Work(t, sizes, mask, DType.INT64 if spec.integer_masks else DType.FP32)
    out = work.attended(*heads)
    t.touch(*work.held, *work.seen_last)
    rows = t.contiguous(out)
    t.touch(out, *projected)
    # The output's module, or the caller, has names for what it is given.
    context.attention_frame = rows, *(() if mask is None or spec.integer_masks else (mask,))
    last = WeightRole.ATTENTION_OUTPUT
    result = linear(t, rows, "self_attn.o_proj", hidden, hidden, bias=full.output_bias, role=last)
    if spec.integer_masks:
        t.touch(rows)
    return result


class _Work:
    """One call: the tape, the sizes, and what the function's variables hold until it returns."""

    def __init__(self, t: Tape, sizes: Sizes, mask: Tensor | None, mask_dtype: DType) -> None:
        self.t, self.sizes, self.mask, self.mask_dtype = t, sizes, mask, mask_dtype
        self.held: list[Tensor] = []
        self.seen_last: list[Tensor] = []
        """Weights of which views are taken at the end."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What each block of queries finds, side by side; then the matrix of all weights."""
        t, sizes = self.t, self.sizes
        drawn = self._drawn()
        queries, blocks, values = (t.reshaped(each) for each in (query, key, value))
        parts = (
            queries,
            blocks,
            values,
            self._gathered(blocks, drawn),
            self._gathered(values, drawn),
        )
        first = self._to_all(queries, key, value)
        second = self._to_some(*parts)
        middle = self._middle(*parts)
        second_last = self._to_some(*parts)
        last = self._to_all(queries, key, value)
        joined = t.concatenate(first, second, middle, second_last, last)
        rows = t.tensor(sizes.batch * sizes.tokens, t.compute)
        out = t.mul(joined, rows)
        matrix = t.tensor(sizes.batch * sizes.heads * sizes.tokens**2, out.dtype)
        t.record(OperationKind.ZEROS, (), (matrix,))
        t.linger(matrix)
        return out

    def _drawn(self) -> Tensor:
        """The numbers of the blocks that were drawn, and the mask of their tokens."""
        t, sizes = self.t, self.sizes
        count = sizes.batch * sizes.heads * (sizes.blocks - 2) * sizes.random
        drawn = t.tensor(count, DType.INT64)
        t.record(OperationKind.INDICES, (), (drawn,))
        mask = t.tensor(count * sizes.block**2, self.mask_dtype)
        t.record(
            OperationKind.GATHER, (drawn,), (mask,),
            forward_scratch_bytes=(allocated_bytes(count * sizes.block, self.mask_dtype), RESULT),
        )  # fmt: skip
        self.held.append(mask)
        return drawn

    def _gathered(self, x: Tensor, drawn: Tensor) -> Tensor:
        """Copies of the blocks that were drawn: what they were copied of is kept."""
        t, sizes = self.t, self.sizes
        out = t.tensor(drawn.numel * sizes.block * sizes.width, x.dtype)
        t.record(
            OperationKind.GATHER, (x, drawn), (out,), saves=(x, drawn),
            gradients=(Gradient.FRESH, Gradient.NONE),
        )  # fmt: skip
        self.held.append(out)
        return out

    def _copied(self, x: Tensor) -> Tensor:
        """Heads as a product of several sequences wants them."""
        return self.t.contiguous(x) if self.sizes.batch > 1 else x

    def _scored(self, left: Tensor, right: Tensor, keys: int) -> Tensor:
        t, sizes = self.t, self.sizes
        rows = left.numel // sizes.width
        scores = t.scale(self._product(left, right, rows * keys, sizes.width))
        self.held.append(scores)
        return scores

    def _product(self, left: Tensor, right: Tensor, numel: int, inner: int) -> Tensor:
        """``torch.matmul`` or ``einsum``: what it copied of the right one goes first."""
        out = batched_matmul(self.t, left, right, numel, inner)
        self.t.touch(right, left)
        return out

    def _part(self, out: Tensor) -> Tensor:
        """A product that is joined to others: its gradient is a part of theirs, and is copied into rows."""
        seen = self.t.view(out, out.numel)
        self.t.record(OperationKind.VIEW, (out,), (seen,), gradients=(Gradient.FRESH,))
        return seen

    def _masked(
        self,
        scores: Tensor,
        elements: int,
        dtype: DType,
        mask: Tensor | None = None,
        *,
        of_two: bool = False,
    ) -> Tensor:
        """``+= (1 - mask) * penalty``: temporaries of the mask's size, one behind another; ``of_two`` masks the
        lesser comes first."""
        t, size = self.t, allocated_bytes(elements, dtype)
        lesser = allocated_bytes(elements, self.mask_dtype)
        out = t.view(scores, scores.numel)
        inputs = (scores,) if mask is None else (scores, mask)
        t.record(
            OperationKind.ADD_IN_PLACE, inputs, (out,),
            gradients=(Gradient.ALIAS, Gradient.NONE)[: len(inputs)],
            forward_scratch_bytes=(lesser, size, ~0, size, ~1) if of_two else (size, size, ~0),
        )  # fmt: skip
        return out

    def _to_all(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The first block, or the last: its tokens see all."""
        t, sizes = self.t, self.sizes
        block = self._copied(t.slice(query, sizes.rows * sizes.width))
        scores = self._scored(block, self._copied(key), sizes.tokens)
        weights = softmax(t, scores)
        out = self._product(weights, self._copied(value), sizes.rows * sizes.width, sizes.tokens)
        self.held += [weights, out]
        return self._part(out)

    def _to_some(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """The second block, or the last but one: four blocks and those drawn for it."""
        t, sizes = self.t, self.sizes
        numel, drawn = sizes.rows * sizes.width, sizes.rows * sizes.width * sizes.random
        near, far = (
            t.concatenate(*(t.slice(whole, numel) for _ in range(4)), t.slice(others, drawn))
            for whole, others in ((key, keys), (value, values))
        )
        self.held += [near, far]
        seen = (4 + sizes.random) * sizes.block
        block = self._copied(t.slice(query, numel))
        pad = t.tensor(sizes.rows * seen, self.mask_dtype)
        product = self._product(block, near, sizes.rows * seen, sizes.width)
        ones = allocated_bytes(sizes.rows * 4 * sizes.block, self.mask_dtype)
        t.record(OperationKind.CAT, (), (pad,), forward_scratch_bytes=(ones, RESULT))
        scores = t.scale(product)
        masked = self._masked(scores, sizes.rows * seen, DType.FP32, of_two=True)
        weights = softmax(t, masked)
        out = batched_matmul(t, weights, far, numel, seen)
        self.held += [scores, pad, out]
        self.seen_last.append(weights)
        return self._part(out)

    def _middle(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """All other blocks: three neighbours, those drawn, the first and the last."""
        t, sizes = self.t, self.sizes
        blocks = sizes.blocks - 4
        numel, edge = sizes.rows * blocks * sizes.width, sizes.rows * sizes.width
        near, far = (
            t.concatenate(*(t.slice(whole, numel) for _ in range(3))) for whole in (key, value)
        )
        self.held += [near, far]
        queries = t.slice(query, numel)
        block, random = sizes.block, sizes.random * sizes.block
        inner = self._scored(t.contiguous(queries), near, 3 * block)
        # Arguments are cut before the product copies either of them.
        drawn = t.slice(keys, numel * sizes.random)
        some = self._scored(t.contiguous(queries), t.contiguous(drawn), random)
        ends = []
        for _ in range(2):
            end = t.slice(key, edge)
            ends.append(self._scored(self._copied(queries), self._copied(end), block))
        first, last = ends
        masked = 0 if self.mask is None else self.mask.numel
        inner = self._masked(inner, masked, t.compute, self.mask)
        some = self._masked(some, sizes.rows * blocks * random, DType.FP32)
        band = t.concatenate(first, inner, some, last)
        self.held.append(band)
        weights = softmax(t, band)
        self.seen_last.append(weights)
        rows = sizes.rows * blocks
        out = batched_matmul(t, t.slice(weights, rows * 3 * block), far, numel, 3 * block)
        out = self._part(out)
        part, drawn = t.slice(weights, rows * random), t.slice(values, numel * sizes.random)
        product = self._product(part, t.contiguous(drawn), numel, random)
        out = self._added(out, product)
        for _ in range(2):
            part = t.slice(weights, rows * block)
            product = self._product(part, self._copied(t.slice(value, edge)), numel, block)
            out = self._added(out, product)
        return out

    def _added(self, x: Tensor, added: Tensor) -> Tensor:
        out = self.t.view(x, x.numel)
        self.t.record(
            OperationKind.ADD_IN_PLACE, (x, self._part(added)), (out,),
            gradients=(Gradient.ALIAS, Gradient.ALIAS),
        )  # fmt: skip
        return out
