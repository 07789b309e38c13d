"""From the last hidden states to the loss of a language model, by every known way.

Which there are, and where each was read, is ``memplan.training.choices_of_kernels.losses``: the choice moves a
Llama-3.1-8B step by tens of GiB, since logits are tokens x vocabulary, in up to three copies at once.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.block_script import BlockScript, Held
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import (
    ALLOCATION_ROUNDING,
    Parameter,
    Storage,
    Tensor,
    allocated_bytes,
)
from memplan.graph.operations.losses import causal_lm_loss, cross_entropy, next_token_labels
from memplan.graph.operations.products import matmul_weight
from memplan.training.choices_of_kernels.kernels import FITTING_TILES, LossKernel
from memplan.training.choices_of_kernels.losses import (
    LOSS_FORMS,
    LossForm,
    LossGradient,
    MatrixLoss,
)
from memplan.training.compilation import Compilation
from memplan.units import GIB, ceil_div, round_up

NUM_CHUNKS = 8
"""Pieces of torchtitan's chunked loss (``ChunkedLossWrapper.Config.num_chunks``) and of torchtune's
(``CEWithChunkedOutputLoss.num_output_chunks``)."""

Project = Callable[[Tensor], Tensor]
"""The output matrix with what the model does to its logits."""


def takes_matrix(t: Tape) -> bool:
    """Whether the loss is given the output matrix itself, and never makes all logits."""
    return LOSS_FORMS[t.kernels.loss].matrix is not None


def language_model_loss(
    t: Tape, x: Tensor, weight: Parameter | None, vocab_size: int, project: Project
) -> Tensor:
    """The loss of the hidden states ``x`` through ``weight``, the output matrix, where the loss is given it."""
    form = LOSS_FORMS[t.kernels.loss]
    if form.matrix is not None:
        assert weight is not None
        return _MATRIX_LOSSES[form.matrix](t, x, weight)
    logits = project(x)
    if t.kernels.loss is LossKernel.PARALLEL_FUSED:
        return softmax_in_place(t, logits)
    if form.rebinds:
        # ``logits = logits.float()``: what the class returns is the copy.
        logits = t.cast(logits, DType.FP32)
    t.returned.append(logits)
    if form.gradient is LossGradient.TORCH:
        loss = causal_lm_loss(t, logits, vocab_size)
    else:
        loss = kernel_loss(t, logits, vocab_size, form)
    keep_outputs(t, logits)
    return loss


def keep_outputs(t: Tape, logits: Tensor) -> None:
    """What a training loop does with the logits that the model returns beside the loss.

    accelerate's mixed precision copies every output to fp32 (``ConvertOutputsToFp32``); a loop that
    holds the outputs keeps them until after the backward pass.
    """
    outputs = logits
    if t.options.upcast_outputs and logits.dtype is not DType.FP32:
        outputs = t.tensor(logits.numel, DType.FP32)
        t.record(OperationKind.OUTPUTS_TO_FP32, (), (outputs,))
        t.touch(logits)
    if t.options.outputs_held:
        t.hold(outputs)
        t.outputs = outputs.storage
    elif not LOSS_FORMS[t.kernels.loss].rebinds:
        t.give_out(outputs)


def copy_outputs(t: Tape, logits: Tensor) -> bool:
    """The same of a model whose loss is no decoder's, where the loop does more than take the loss; whether it does."""
    if not (t.options.upcast_outputs or t.options.outputs_held):
        return False
    keep_outputs(t, logits)
    return True


def hand_out(t: Tape, *outputs: Tensor) -> None:
    """Return tensors beside such a loss: they die with the outputs, once the forward pass is over, unless the loop does
    more with them."""
    t.returned += outputs
    given: set[Storage] = set()  # some are views of one
    for each in outputs:
        if not copy_outputs(t, each) and each.storage not in given:
            given.add(each.storage)
            t.give_out(each)


def softmax_in_place(t: Tape, logits: Tensor) -> Tensor:
    """Megatron's: fp32 logits become their softmax, and later their gradient, in one storage."""
    full = t.cast(logits, DType.FP32)
    if full is logits:
        full = t.contiguous(logits)
    loss = t.tensor(1, DType.FP32)
    t.record(
        OperationKind.VOCAB_PARALLEL_CROSS_ENTROPY, (full,), (loss,), saves=(full,),
        gradients=(Gradient.SAVED,),
    )  # fmt: skip
    return loss


def kernel_loss(t: Tape, logits: Tensor, vocab_size: int, form: LossForm) -> Tensor:
    """One kernel that keeps the logits it is given, with two fp32 numbers a row.

    Liger's makes their gradient over them in the forward pass, the others in the backward pass.
    """
    given = t.cast(logits, DType.FP32) if form.upcast else logits
    full = given
    rows = logits.numel // vocab_size
    if form.shifted:
        rows = max(rows - t.options.batch_size, 1)
        given = t.contiguous(t.slice(full, rows * vocab_size))
        labels, *_ = next_token_labels(t, rows, padded=False)
    else:
        labels, *_ = next_token_labels(t, rows, padded=True)
    losses, statistic = t.tensor(rows, DType.FP32), t.tensor(rows, DType.FP32)
    gradient = Gradient.SAVED if form.gradient is LossGradient.IN_PLACE else Gradient.FRESH
    t.record(
        OperationKind.CROSS_ENTROPY, (given, labels), (losses, statistic),
        saves=(given, statistic, labels), gradients=(gradient, Gradient.NONE), in_python=True,
    )  # fmt: skip
    loss = t.tensor(1, DType.FP32)
    t.record(OperationKind.SUM, (losses,), (loss,), gradients=(Gradient.FRESH,))
    t.touch(full, given)
    return loss


def fused_linear_cross_entropy(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Liger's: both gradients are made in the forward pass, over a piece of the logits at a time.

    Where hidden states or matrix are not in autocast's dtype, each piece's product casts both: of the
    matrix autocast keeps the copy that the second product makes, but not the one of ``weight.t()``,
    which is a view (liger_kernel 0.8.5, ops/fused_linear_cross_entropy.py, ``_can_use_mm_out``). In
    fp32 without autocast, and on cards before Ampere, each piece's gradient of the matrix is a tensor of
    its own, cast to fp32 before it is added (``addmm`` alone adds without one).
    """
    vocab_size, width = weight.shape
    tokens = x.numel // width
    rows = liger_chunk_rows(tokens, vocab_size=vocab_size, hidden_size=width)
    half = t.autocast or x.dtype
    script = BlockScript()
    script.result()
    kept_copy = weight.dtype is not half and weight.requires_grad
    if not kept_copy:
        _liger_piece(t, script, x, weight, rows, half)
        return _gradients_in_forward(
            t, OperationKind.FUSED_LINEAR_CROSS_ENTROPY, x, weight, scratch=tuple(script.steps)
        )
    _liger_logits(t, script, x, weight, rows, half)
    loss = _gradients_in_forward(
        t, OperationKind.FUSED_LINEAR_CROSS_ENTROPY, x, weight, scratch=tuple(script.steps)
    )
    # The second product of the first piece makes the copy that stays; later pieces are like the next.
    script = BlockScript()
    script.result()
    _liger_matrix_gradient(t, script, weight, half)
    if rows < tokens:
        _liger_piece(t, script, x, weight, rows, half)
    copy = _cached_copy(t, weight, half)
    t.record(OperationKind.TO, (x, weight), (copy,), forward_scratch_bytes=tuple(script.steps))
    copy.requires_grad = False
    return loss


def _liger_piece(
    t: Tape, script: BlockScript, x: Tensor, weight: Parameter, rows: int, half: DType
) -> None:
    """A piece of the logits, over which their gradient is written, and what is made from it."""
    blocks = _liger_logits(t, script, x, weight, rows, half)
    _liger_matrix_gradient(t, script, weight, half)
    script.drop(blocks)


def _liger_logits(
    t: Tape, script: BlockScript, x: Tensor, weight: Parameter, rows: int, half: DType
) -> Held:
    """The product, and the casts that it takes."""
    vocab_size, width = weight.shape
    casts = [
        script.take(allocated_bytes(numel, half))
        for tensor, numel in ((x, rows * width), (weight, weight.numel))
        if t.autocast is not None and tensor.dtype is not half
    ]
    logits = script.take(allocated_bytes(rows * vocab_size, half))
    script.drop(*casts)
    return logits


def _liger_matrix_gradient(t: Tape, script: BlockScript, weight: Parameter, half: DType) -> None:
    """A piece's gradient of the matrix, where it is not added in one kernel."""
    if not weight.requires_grad or (half.is_half and t.is_ampere):
        return
    product = script.take(allocated_bytes(weight.numel, half))
    wide = script.take(allocated_bytes(weight.numel, DType.FP32)) if half.is_half else None
    script.drop(product, wide)


def _cached_copy(t: Tape, weight: Parameter, dtype: DType) -> Tensor:
    """A weight's copy that autocast keeps, made within a kernel, where no gradient passes it."""
    copy = t.tensor(weight.numel, dtype)
    copy.storage.weight_cast = True
    return copy


def liger_chunk_rows(tokens: int, *, vocab_size: int, hidden_size: int) -> int:
    """Rows of logits that Liger makes at once: about as many bytes as the hidden states have.

    Equation: ``min(BT, next_power_of_2(BT / ceil(V / H)))``, its constant C being 1.

    >>> liger_chunk_rows(8192, vocab_size=128256, hidden_size=4096)
    256
    """
    pieces = -(-vocab_size // hidden_size)
    wanted = -(-tokens // pieces)
    return min(tokens, 1 << (wanted - 1).bit_length())


UNSLOTH_BYTES_PER_LOGIT = 16
"""What Unsloth reckons a logit of a piece to take (``_CE_BYTES_PER_LOGIT``)."""
UNSLOTH_BUDGET_BYTES = 4 * GIB
"""For a piece and what cannot be cut (``_CE_TARGET_GB_CAP``); half of what is free where that is less,
which a tape does not know."""


def budgeted_cross_entropy(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Unsloth's: both gradients in the forward pass, over pieces that a budget is enough for.

    What a piece takes is what Unsloth itself reckons: an upper bound of what its compiled function
    does. Each piece's gradient of the matrix is a tensor of its own.
    """
    vocab_size, width = weight.shape
    tokens = x.numel // width
    head = (weight.storage.num_bytes,) if weight.requires_grad else ()
    rows = unsloth_chunk_rows(
        tokens, vocab_size=vocab_size, fixed_bytes=x.numel * x.dtype.num_bytes + 2 * sum(head)
    )
    piece = round_up(rows * vocab_size * UNSLOTH_BYTES_PER_LOGIT, ALLOCATION_ROUNDING)
    kind = OperationKind.FUSED_LINEAR_CROSS_ENTROPY
    return _gradients_in_forward(t, kind, x, weight, scratch=(piece, *head))


def unsloth_chunk_rows(tokens: int, *, vocab_size: int, fixed_bytes: int) -> int:
    """Rows of a piece: one piece, or a multiple of four of them (``get_chunk_size``).

    >>> unsloth_chunk_rows(16384, vocab_size=128256, fixed_bytes=2 * 2**30)
    1024
    """
    budget = UNSLOTH_BUDGET_BYTES
    if fixed_bytes < budget:
        budget -= fixed_bytes
    needed = tokens * vocab_size * UNSLOTH_BYTES_PER_LOGIT
    pieces = 1 if needed <= budget else 4 * ceil_div(needed, 4 * budget)
    return ceil_div(tokens, min(pieces, tokens))


def chunked_cross_entropy(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """torchtitan's: head, loss and their backward pass over an eighth of the sequence at a time, or another part.

    The gradient of the hidden states is gathered in fp32 and cast in the end; that of the matrix is
    there from the first piece on, and each further piece adds a tensor of its own to it
    (``ChunkedLossWrapper``, ``GradAccumulator``).
    """
    vocab_size, width = weight.shape
    half = t.autocast or x.dtype
    logits = -(-(x.numel // width) // (t.kernels.loss_tiles or NUM_CHUNKS)) * vocab_size
    wide = allocated_bytes(logits, DType.FP32)
    # Log-probabilities, their gradient, the logits' own; then the product's.
    scratch: tuple[int, ...] = (wide, wide, wide, wide, ~2, ~1)
    if half is not DType.FP32:
        kept = allocated_bytes(logits, half)
        scratch = (kept, wide, wide, ~1, wide, wide, ~4, ~2, kept, ~5)
    scratch += _matrix_gradients(weight, half)
    cached = (_cached_copy(t, weight, half),) if weight.dtype is not half else ()
    gathered = t.tensor(x.numel, DType.FP32)
    made = [t.tensor(weight.numel, weight.dtype)] if weight.requires_grad else []
    total, loss = t.tensor(1, DType.FP32), t.tensor(1, DType.FP32)
    t.record(
        OperationKind.CHUNKED_CROSS_ENTROPY, (x, weight), (total, gathered, *made, *cached),
        saves=made, gradients=(Gradient.NONE, Gradient.SAVED if made else Gradient.NONE),
        forward_scratch_bytes=scratch, flops=6 * x.numel * vocab_size,
    )  # fmt: skip
    for tensor in (gathered, *made, *cached):
        tensor.requires_grad = False
    gradient = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.TO, (x, total, gathered), (loss, gradient), saves=(gradient,),
        gradients=(Gradient.SAVED, Gradient.ALIAS, Gradient.NONE), in_python=True,
    )  # fmt: skip
    gradient.requires_grad = False
    return loss


def _matrix_gradients(weight: Parameter, dtype: DType) -> tuple[int, ...]:
    """A piece's gradient of the matrix, and its copy in the matrix's own dtype, where that is another."""
    if not weight.requires_grad:
        return ()
    product = allocated_bytes(weight.numel, dtype)
    return (product,) if weight.dtype is dtype else (product, weight.storage.num_bytes)


def cut_cross_entropy(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Apple's: keeps hidden states, matrix, a number a row and one a word; both gradients in backward.

    The kernels take 16 bits; an fp32 matrix's gradient is made in 16 bits and cast
    (``cce_backward_kernel``).
    """
    vocab_size, width = weight.shape
    given = t.cast(x, t.autocast) if t.autocast is not None else x
    tokens = x.numel // width
    statistic, average = t.tensor(tokens, DType.FP32), t.tensor(vocab_size, DType.FP32)
    loss = t.tensor(1, DType.FP32)
    narrow = weight.requires_grad and weight.dtype is not given.dtype
    t.record(
        OperationKind.CUT_CROSS_ENTROPY, (given, weight), (loss, statistic, average),
        saves=(given, weight, statistic, average), gradients=(Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=allocated_bytes(weight.numel, given.dtype) if narrow else 0,
        flops=2 * x.numel * vocab_size, in_python=True,
    )  # fmt: skip
    t.touch(x)
    return loss


TRL_TILE = (4096, 32768)
"""Tokens and words of a tile (``TOKEN_CHUNK_SIZE``, ``_CHUNKED_LOGPROB_CHUNK_SIZE``)."""


def trl_scratch(
    labelled: Tensor, weight: Parameter, half: DType, tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What ``ChunkedLogProbFunction`` makes for the moment, forward and backward (trl 1.16, ``kernels/chunked_logprob.py``).

    A tile has all its words, however few the vocabulary has; hidden states and words are cast to what it is multiplied in.
    """
    vocab_size, width = weight.shape
    rows, words = TRL_TILE
    rows = min(tokens, rows)
    tile = allocated_bytes(rows * words, half)
    casts = tuple(
        allocated_bytes(count * width, half)
        for tensor, count in ((labelled, rows), (weight, min(words, vocab_size)))
        if tensor.dtype is not half
    )
    gathered = tuple(
        allocated_bytes(tensor.numel, DType.FP32)
        for tensor in (labelled, weight)
        if tensor.requires_grad and tensor.dtype is not DType.FP32
    )
    backward = (*gathered, tile, *casts, RESULT) if gathered else (tile, *casts)
    return (tile, *casts), backward


def tiled_cross_entropy(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """TRL's: tokens that have a label are copied out; each pass has one tile of logits.

    Both gradients are gathered in fp32 and cast in the end. Every token but the last of a sequence is
    taken to have a label.
    """
    vocab_size, width = weight.shape
    tokens = max(x.numel // width - t.options.batch_size, 1)
    half = t.autocast or x.dtype
    cut = t.slice(x, tokens * width)
    labelled = t.tensor(tokens * width, x.dtype)
    t.record(OperationKind.INDEX, (cut,), (labelled,), gradients=(Gradient.FRESH,))
    forward, backward = trl_scratch(labelled, weight, half, tokens)
    statistic, loss = t.tensor(tokens, DType.FP32), t.tensor(1, DType.FP32)
    t.record(
        OperationKind.TILED_CROSS_ENTROPY, (labelled, weight), (loss, statistic),
        saves=(labelled, weight, statistic), gradients=(Gradient.FRESH, Gradient.FRESH),
        forward_scratch_bytes=forward, backward_scratch_bytes=backward,
        flops=2 * tokens * width * vocab_size, in_python=True,
    )  # fmt: skip
    t.touch(x)
    return loss


TILE_LOGITS_BYTES = GIB
"""Of fp32 logits in a tile of ALST's recipes (ArcticTraining, trainer/sft_trainer.py)."""


def loss_over_tiles(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """ALST's: head and loss of one tile after the other, and the same again in backward."""
    return _over_tiles(t, OperationKind.TILED_LOSS, x, weight, forward_gradients=False)


def loss_gradients_over_tiles(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """The same, each tile with its backward pass in the forward pass."""
    return _over_tiles(t, OperationKind.TILED_LOSS_GRADIENTS, x, weight, forward_gradients=True)


def _over_tiles(
    t: Tape, kind: OperationKind, x: Tensor, weight: Parameter, *, forward_gradients: bool
) -> Tensor:
    from memplan.graph.tiles import run_in_tiles  # only then

    vocab_size, width = weight.shape
    tokens = x.numel // width
    count = t.kernels.loss_tiles
    if count == FITTING_TILES:
        count = ceil_div(tokens * vocab_size * DType.FP32.num_bytes, TILE_LOGITS_BYTES)
    labels = Tensor(tokens, DType.INT64, Storage(allocated_bytes(tokens, DType.INT64), -1, 0))

    def loss_of(tile: Tensor) -> Tensor:
        logits = matmul_weight(t, tile, weight)
        loss = cross_entropy(t, t.cast(logits, DType.FP32), labels)
        t.touch(logits)  # The variable of whoever calls the loss function.
        return loss

    return run_in_tiles(
        t, kind, x, width, count, loss_of, joined=False,
        # No input wants a gradient then (``x_requires_grad``), and a tile runs forward alone.
        forward_gradients=forward_gradients and not t.options.without_gradients,
    )  # fmt: skip


def cross_entropy_in_pieces(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """torchtune's: the logits of every piece, then each piece's fp32 copy and its log-softmax.

    ``TransformerDecoder.chunked_output`` makes all logits before the loss is asked for. Where layers are
    compiled the recipes compile a piece's loss too (``training/_compile.py``, ``compile_loss``).
    """
    width = weight.shape[-1]
    tokens = x.numel // width
    rows = -(-tokens // NUM_CHUNKS)
    sizes = [min(rows, tokens - start) * width for start in range(0, tokens, rows)]
    parts = t.split(x, *sizes)
    if t.options.batch_size > 1:
        # Pieces are cut along the sequence, so that their rows are not one dimension.
        parts = [t.contiguous(part) for part in parts]
    logits = [matmul_weight(t, part, weight) for part in parts]
    total: Tensor | None = None
    for piece in logits:
        if t.options.compile is Compilation.LAYER:
            loss = _compiled_cross_entropy(t, piece, weight.shape[0])
        else:
            loss = cross_entropy(t, t.cast(piece, DType.FP32))
        total = loss if total is None else t.add(total, loss)
    t.touch(*logits)
    assert total is not None
    return total


def _compiled_cross_entropy(t: Tape, logits: Tensor, vocab_size: int) -> Tensor:
    """The loss of a piece as inductor compiles it: no copy of the logits in fp32, but two numbers a row.

    Its backward pass makes their gradient anew from the logits, which are kept (events of torch 2.13's
    CUDA build).
    """
    rows = logits.numel // vocab_size
    largest, total = t.tensor(rows, DType.FP32), t.tensor(rows, DType.FP32)
    loss = t.tensor(1, DType.FP32)
    t.record(
        OperationKind.CROSS_ENTROPY, (logits,), (loss, largest, total),
        saves=(largest, total, logits), gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return loss


def _gradients_in_forward(
    t: Tape,
    kind: OperationKind,
    x: Tensor,
    weight: Parameter,
    *,
    scratch: tuple[int, ...],
) -> Tensor:
    """An operation that keeps its inputs' gradients instead of its inputs; ``scratch`` are its blocks."""
    input_gradient = t.tensor(x.numel, x.dtype)
    saves = [input_gradient]
    gradients = [Gradient.SAVED, Gradient.NONE]
    if weight.requires_grad:
        saves.append(t.tensor(weight.numel, weight.dtype))
        gradients[1] = Gradient.SAVED
    loss = t.tensor(1, DType.FP32)
    t.record(
        kind, (x, weight), (loss, *saves), saves=saves, gradients=gradients,
        forward_scratch_bytes=scratch, flops=6 * x.numel * weight.shape[0],
    )  # fmt: skip
    for tensor in saves:
        tensor.requires_grad = False
    return loss


_MATRIX_LOSSES: dict[MatrixLoss, Callable[[Tape, Tensor, Parameter], Tensor]] = {
    MatrixLoss.FORWARD_GRADIENTS: fused_linear_cross_entropy,
    MatrixLoss.BUDGETED_GRADIENTS: budgeted_cross_entropy,
    MatrixLoss.BACKWARD_BY_PIECE: chunked_cross_entropy,
    MatrixLoss.CUT: cut_cross_entropy,
    MatrixLoss.TILES: tiled_cross_entropy,
    MatrixLoss.TILED: loss_over_tiles,
    MatrixLoss.TILED_GRADIENTS: loss_gradients_over_tiles,
    MatrixLoss.PIECES: cross_entropy_in_pieces,
}
