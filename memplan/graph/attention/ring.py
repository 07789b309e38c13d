"""Attention over sequences that several ranks share.

Ring attention is torch 2.13's (torch/distributed/tensor/experimental/_context_parallel/_attention.py,
``_templated_ring_attention`` and ``_templated_ring_attention_backward``), with its defaults: every
sequence in ``2 c`` pieces of which a rank has one from the front and one from the back, keys and values
of all ranks gathered at once, results merged in fp32. Sizes are a rank's own: ``TapeOptions.seq_len`` is
its share.
"""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.masks import attentions
from memplan.graph.attention.scratch import (
    cudnn_backward_scratch,
    cudnn_forward_scratch,
    efficient_backward_scratch,
    efficient_forward_scratch,
    flash_backward_scratch,
    flash_forward_scratch,
)
from memplan.graph.block_script import BlockScript, Held
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.model.attention import AttentionForm, AttentionSpec
from memplan.model.spec import ModelSpec, Task
from memplan.training.choices_of_kernels.sdpa import ScoreKernel
from memplan.training.splitting.context_parallel import ContextParallel, RotateMethod
from memplan.training.splitting.exchange import ExchangeKind, Group, Send, Sends

RING_KERNELS = {
    ScoreKernel.FLASH: OperationKind.FLASH_ATTENTION,
    ScoreKernel.CUDNN: OperationKind.CUDNN_ATTENTION,
    ScoreKernel.EFFICIENT: OperationKind.EFFICIENT_ATTENTION,
}
"""Kernels that ring attention is written for (``_sdpa_handler``)."""
PIECES = 2
"""Of each rank's share of a sequence: one from the front and one from the back."""


def check_shared(model: ModelSpec, group: ContextParallel) -> None:
    """Refuse models whose ranks cannot share sequences.

    What the model's own classes do is theirs: of windows a ring keeps as much as of all tokens, and of a layer without
    attention each rank has its own tokens, or some channels of all. Elsewhere:
    accelerate 1.15, ``_attach_context_parallel_hooks``: masks are dropped for a plain causal one.
    Raises ``SetupError``.
    """
    if len(model.stacks) != 1 or model.task is not Task.CAUSAL_LM:
        _refuse(
            model, f"only decoders with a language model's head are, and this is {model.task.value}"
        )
    specs = attentions(model.stacks[0])
    layers = [run.layer for run in model.stacks[0].runs]
    hands_on = group.in_classes
    if not hands_on and any(not isinstance(each.attention, AttentionSpec) for each in layers):
        _refuse(model, "not all of its layers mix tokens by attention")
    for spec in specs:
        if spec.sliding_window is not None and not hands_on:
            _refuse(model, "some layers look at a window alone, and ring attention knows no mask")
        if not _is_plain(spec):
            _refuse(model, "its attention is not torch's causal one")


def _is_plain(spec: AttentionSpec) -> bool:
    odd = (
        not spec.causal, spec.form is not AttentionForm.INTERFACE, spec.sinks,
        bool(spec.softcap),
    )  # fmt: skip
    return not any(odd)


def _refuse(model: ModelSpec, why: str) -> None:
    msg = (
        f"context_parallel: is not modelled for {model.name} ({model.family}): {why}; the nearest that "
        "is: checkpointing full, which keeps less of each sequence"
    )
    raise SetupError(msg)


def ring_attention(
    t: Tape,
    group: ContextParallel,
    kernel: ScoreKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
) -> Tensor:
    """A rank's queries over the keys of all, one rank's after the other's.

    Keeps what one kernel keeps. The gradients of keys and values are two views of one tensor.
    """
    if kernel not in RING_KERNELS:
        msg = (
            f"context_parallel: ring attention runs torch's flash, cuDNN's or memory-efficient attention, "
            f"and this model's goes through {kernel.value}: name a card and a precision with one of these"
        )
        raise SetupError(msg)
    ring = _Ring(t, group, kernel, query, key, value, shape)
    both = Tensor(key.numel + value.numel, key.dtype, key.storage, requires_grad=key.requires_grad)
    t.record(OperationKind.VIEW, (key, value), (both,), gradients=(Gradient.ALIAS, Gradient.ALIAS))
    out = t.tensor(shape.outputs, query.dtype)
    # Merged halves are joined head by head.
    out.by_head = query.by_head or group.place < group.degree - 1
    statistics = t.tensor(shape.rows * shape.spec.num_heads, DType.FP32)
    random_state = t.tensor(2, DType.INT64), t.tensor(1, DType.INT64)
    all_keys = replace(shape, keys=shape.keys * group.degree)
    t.record(
        RING_KERNELS[kernel], (query, both), (out, statistics, *random_state),
        saves=(key, query, value, statistics, out, *random_state),
        gradients=(Gradient.FRESH, Gradient.VIEW),
        forward_scratch_bytes=ring.forward(), backward_scratch_bytes=ring.backward(out),
        flops=2 * all_keys.scores * (shape.spec.head_dim + shape.value_head_dim),
        sends=ring_sends(
            both.numel * both.dtype.num_bytes, both.numel * DType.FP32.num_bytes, group.degree
        ),
    )  # fmt: skip
    return out


def ring_sends(pair_bytes: int, gradient_bytes: int, degree: int) -> Sends:
    """Keys and values of the other ranks, and backward their gradients too.

    A rank looks at its own while the others' come, and at each while the next does.
    """
    beside = (degree - 1) / degree
    forward, backward = (
        Send(ExchangeKind.ALL_GATHER, size * degree, Group.SHARED, beside)
        for size in (pair_bytes, pair_bytes + gradient_bytes)
    )
    return Sends((forward,), (backward,))


class _Ring:
    """What one rank asks for on the way round."""

    def __init__(
        self,
        t: Tape,
        group: ContextParallel,
        kernel: ScoreKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shape: Shape,
    ) -> None:
        self.tape = t
        self.group = group
        self.kernel = kernel
        self.query, self.key, self.value = query, key, value
        self.shape = shape
        self.gathers = group.rotate_method is RotateMethod.ALLGATHER
        # What lies token by token is copied before it is sent, unless it is of one head.
        self.copies = not key.by_head and shape.spec.num_kv_heads > 1

    def _pieces(self, step: int) -> tuple[int, int]:
        """Halves of the queries and of the keys that take part in a step."""
        if step == 0:
            return PIECES, PIECES
        return (PIECES, 1) if step <= self.group.place else (1, PIECES)

    def _part(self, step: int) -> Shape:
        queries, keys = self._pieces(step)
        shape = self.shape
        return replace(
            shape, queries=shape.queries * queries // PIECES, keys=shape.keys * keys // PIECES
        )

    def _sizes(self, part: Shape, dtype: DType) -> tuple[int, int, int]:
        """Queries, keys and values of a part [bytes]."""
        spec, keys = part.spec, part.batch * part.keys * part.spec.num_kv_heads
        numels = (part.rows * spec.num_heads * spec.head_dim, keys * spec.head_dim,
                  keys * part.value_head_dim)  # fmt: skip
        query, key, value = (allocated_bytes(numel, dtype) for numel in numels)
        return query, key, value

    def _both(self, dtype: DType) -> int:
        return allocated_bytes(self.key.numel + self.value.numel, dtype)

    def _arriving(self) -> int:
        """What a rank is sent: all ranks' keys and values, or those of the one before."""
        numel = self.key.numel + self.value.numel
        return allocated_bytes(numel * (self.group.degree if self.gathers else 1), self.key.dtype)

    def _turn(
        self, script: BlockScript, step: int, held: list[Held], coming: Held | None
    ) -> list[Held]:
        """Go on to the keys and values that have come; those looked at so far are let go."""
        if not step:
            return held
        script.drop(*held)
        return [] if self.gathers or coming is None else [coming]

    # -- forward ---------------------------------------------------------------------------------

    def forward(self) -> tuple[int, ...]:
        """``_templated_ring_attention``."""
        script, degree, dtype = BlockScript(), self.group.degree, self.query.dtype
        _, key_bytes, value_bytes = self._sizes(self.shape, self.key.dtype)
        sent = (
            [script.take(key_bytes), script.take(value_bytes)] if self.copies else []
        )  # ``contiguous``
        joined: Held | None = None
        coming: Held | None = None
        merged: list[Held] = []
        block: list[Held] = []
        for step in range(degree):
            script.drop(joined)
            joined, new = None, coming
            if step < degree - 1:
                joined = script.take(self._both(self.key.dtype))
                if step and self.gathers:
                    script.drop(joined)  # they are there already
                    joined = None
                else:
                    new = script.take(self._arriving())
            sent = self._turn(script, step, sent, coming)
            coming = new
            part = self._part(step)
            old, block = block, self._forward_kernel(script, part)
            script.drop(*old)
            merged = self._merge(script, merged, block, part)
        if dtype is DType.FP32:
            script.drop(*merged)
            script.result()
        else:
            script.drop(merged[1])
            script.result()
            script.drop(merged[0])
        script.drop(coming, *block)
        return tuple(script.steps)

    def _forward_kernel(self, script: BlockScript, part: Shape) -> list[Held]:
        """A result, and its log-sum-exp."""
        if self.kernel is ScoreKernel.FLASH:
            scratch = flash_forward_scratch(self.tape, part)
        elif self.kernel is ScoreKernel.CUDNN:
            scratch = _block(cudnn_forward_scratch(self.tape))
        else:
            scratch = _block(efficient_forward_scratch(self.tape, self.query.dtype, part))
        results = (
            allocated_bytes(part.outputs, self.query.dtype),
            allocated_bytes(part.rows * part.spec.num_heads, DType.FP32),
        )
        return script.kernel(results, scratch)

    def _merge(
        self, script: BlockScript, merged: list[Held], block: list[Held], part: Shape
    ) -> list[Held]:
        """``_SDPAMerger``: both in fp32, weighted by what each has seen."""
        result, statistic = block
        wide = allocated_bytes(part.outputs, DType.FP32)
        rows = allocated_bytes(part.rows * part.spec.num_heads, DType.FP32)
        is_wide = self.query.dtype is DType.FP32
        full = script.hold(result) if is_wide else script.take(wide)
        if not merged:
            return [full, script.hold(statistic)]
        difference = script.take(rows)
        weight = script.take(rows)
        script.drop(difference)
        distance, moved = script.take(wide), script.take(wide)
        script.drop(weight, distance)
        out = script.take(wide)
        script.drop(moved)
        difference, weight = script.take(rows), script.take(rows)
        script.drop(difference)
        total = script.take(rows)
        script.drop(weight)
        if part.queries == self.shape.queries:
            script.drop(merged[1], merged[0], full)
            return [out, total]
        joined_rows = allocated_bytes(self.shape.rows * part.spec.num_heads, DType.FP32)
        statistics = script.take(joined_rows)
        script.drop(merged[1])
        joined = script.take(allocated_bytes(self.shape.outputs, DType.FP32))
        script.drop(merged[0], total, out, full)
        return [joined, statistics]

    # -- backward --------------------------------------------------------------------------------

    def backward(self, out: Tensor) -> tuple[int, ...]:
        """``_templated_ring_attention_backward``."""
        script, degree, dtype = BlockScript(), self.group.degree, self.query.dtype
        _, key_bytes, value_bytes = self._sizes(self.shape, self.key.dtype)
        wide_query, wide_key, wide_value = self._sizes(self.shape, DType.FP32)
        wide_both = self._both(DType.FP32)
        query_gradient = script.take(wide_query)
        gradients = [script.take(wide_key), script.take(wide_value)]
        sent = [script.take(key_bytes), script.take(value_bytes)] if self.copies else []
        joined: Held | None = None
        coming: Held | None = None
        parts: list[Held] = []
        rows: Held | None = None
        on_its_way: Held | None = None
        received: Held | None = None
        for step in range(degree):
            new = coming
            if step < degree - 1:
                again = script.take(self._both(self.key.dtype))
                script.drop(joined)
                joined = again
                if not (step and self.gathers):
                    new = script.take(self._arriving())
            part = self._part(step)
            halved = part.queries < self.shape.queries
            if halved:
                cut = script.take(allocated_bytes(part.rows * part.spec.num_heads, DType.FP32))
                script.drop(rows)
                rows = cut
            sent = self._turn(script, step, sent, coming)
            coming = new
            old, parts = parts, self._backward_kernel(script, part, out)
            script.drop(*old)
            if step:
                script.drop(on_its_way, *gradients)
                assert received is not None
                gradients = [script.hold(received)]
                if not halved:
                    # Half of each is added to: ``_partial_update`` joins them anew.
                    updated = [script.take(wide_key), script.take(wide_value)]
                    script.drop(*gradients)
                    gradients = updated
            flat = []
            if not step and self.copies:
                flat = [script.take(wide_key), script.take(wide_value)]
            on_its_way = script.take(wide_both)
            script.drop(*reversed(flat))
            arriving = script.take(wide_both)
            script.drop(received)
            received = arriving
            if halved:
                updated_query = script.take(wide_query)
                script.drop(query_gradient)
                query_gradient = updated_query
        if dtype is DType.FP32:
            script.drop(query_gradient)
            script.result()
            script.drop(on_its_way, *gradients, received)
            script.result()
        else:
            script.result()
            script.drop(query_gradient)
            script.result()
            script.drop(on_its_way, *gradients, received)
        script.drop(joined, *parts, coming, rows)
        return tuple(script.steps)

    def _backward_kernel(self, script: BlockScript, part: Shape, out: Tensor) -> list[Held]:
        """Gradients of a part's queries, keys and values."""
        t, dtype = self.tape, self.query.dtype
        results = self._sizes(part, dtype)
        scratch: tuple[int, ...] = ()
        if self.kernel is ScoreKernel.FLASH and not t.decomposed:
            given = t.tensor(part.outputs, dtype)
            # Halves of several sequences lie apart: the kernel wants gradient and output in rows, and copies both.
            is_apart = part.queries < self.shape.queries and part.batch > 1
            given.by_head = out.by_head and not is_apart
            scratch = flash_backward_scratch(part, given)
            if is_apart:
                scratch = (given.storage.num_bytes, given.storage.num_bytes, RESULT, *scratch)
        elif self.kernel is ScoreKernel.CUDNN:
            numel = part.batch * part.keys * part.spec.num_kv_heads * part.spec.head_dim
            workspace = cudnn_backward_scratch(t, part, t.tensor(numel, dtype))
            scratch = (workspace,) if workspace else ()
        elif self.kernel is ScoreKernel.EFFICIENT:
            scratch = efficient_backward_scratch(t, dtype, part, t.tensor(part.outputs, dtype))
        return script.kernel(results, scratch)


def _block(num_bytes: int) -> tuple[int, ...]:
    return (num_bytes,) if num_bytes else ()
