"""What single operations save for the backward pass, why, and what a fused kernel would save.

Every lesson is recorded on a tape by the code that estimates use, so it cannot say anything else
than they do. Sources: torch 2.13 ``tools/autograd/derivatives.yaml`` for what is saved;
transformers 5.23 for how models write the operation.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.errors import UsageError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.paths import attend
from memplan.graph.feed_forward import feed_forward
from memplan.graph.losses import language_model_loss
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations import (
    dropout,
    embedding,
    gelu_new,
    layer_norm,
    linear,
    matmul_weight,
    rms_norm,
    rotary,
    softmax,
)
from memplan.graph.options import TapeOptions
from memplan.graph.segments import Operation
from memplan.graph.tape import Tape
from memplan.graph.tensors import Storage, Tensor
from memplan.memory.step import StepWalk
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.training.kernels import (
    AttentionKernel,
    FeedForwardKernel,
    Kernels,
    LossKernel,
    NormKernel,
)
from memplan.units import GIB

TOKENS, HIDDEN, WIDTH, HEADS, VOCABULARY = 2048, 4096, 11008, 32, 32000
"""The sizes that lessons are about: one sequence through a layer of Llama-2-7B, in bf16."""
SIZES = (
    f"{TOKENS} tokens, hidden size {HIDDEN}, feed-forward {WIDTH}, {HEADS} heads, "
    f"vocabulary {VOCABULARY}, bf16"
)
LARGE = f"tensors of 1 GiB: {GIB // 4:,} numbers in fp32"

Record = Callable[[Tape], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to write or call the operation."""

    name: str
    record: Record
    kernels: Kernels = Kernels()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """An operation, the ways to run it, and why they keep what they keep."""

    name: str
    title: str
    why: str
    source: str
    variants: tuple[Variant, ...]
    """The usual way first."""
    sizes: str = SIZES


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStep:
    """One operation on the tape."""

    operation: str
    made_bytes: int
    saves: tuple[tuple[str, int], ...]
    """What it keeps: a description and its bytes; what another one keeps already left out."""
    again_bytes: int
    """What it keeps that another one kept before: counted once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """One variant, recorded."""

    variant: Variant
    steps: tuple[SavedStep, ...]
    kept_bytes: int
    """What stays for backward, each storage once."""
    output_bytes: int
    kept_beside_output_bytes: int
    """The same without the result, which somebody else holds anyway."""
    peak_bytes: int
    """The most alive at once, forward or backward, weights and their gradients left out."""


def find_lesson(name: str) -> Lesson:
    """The lesson of this name; ``UsageError`` names the nearest one."""
    wanted = name.lower().replace("-", "_")
    for lesson in LESSONS:
        if lesson.name == wanted:
            return lesson
    known = tuple(lesson.name for lesson in LESSONS)
    hint = did_you_mean(wanted, known)
    msg = f"operation: there is no lesson on {name!r}.{hint} There are: {', '.join(known)}"
    raise UsageError(msg)


def teach(variant: Variant) -> Taught:
    """Record a variant on a tape of its own and see what it keeps."""
    tape = Tape(
        TapeOptions(
            batch_size=1, seq_len=TOKENS, weights=DType.BF16, compute=DType.BF16,
            kernels=variant.kernels,
        )
    )  # fmt: skip
    tape.begin(variant.name)
    out = variant.record(tape)
    tape.end(out)
    seen: dict[Storage, None] = {}
    steps = []
    for operation in tape.segment.operations:
        if operation.kind is not OperationKind.GIVEN:
            steps.append(_step(operation, tape.segment.operations, seen))
    kept = sum(storage.num_bytes for storage in seen)
    beside = sum(storage.num_bytes for storage in seen if storage is not out.storage)
    return Taught(
        variant=variant,
        steps=tuple(steps),
        kept_bytes=kept,
        output_bytes=out.storage.num_bytes,
        kept_beside_output_bytes=beside,
        peak_bytes=_peak(tape),
    )


def _peak(tape: Tape) -> int:
    passes = StepWalk(tape).run()
    forward = [height.total_bytes for each in passes.forward for height in each.heights()]
    backward = [
        each.start.total_bytes + interval.peak.total_bytes
        for each in passes.backward
        for interval in each.intervals
    ]
    return max(forward + backward)


def _step(
    operation: Operation, operations: list[Operation], seen: dict[Storage, None]
) -> SavedStep:
    saves, again = [], 0
    own = {tensor.storage for tensor in operation.outputs}
    read = {tensor.storage for tensor in operation.inputs}
    for storage in dict.fromkeys(operation.saved):
        if storage in seen:
            again += storage.num_bytes
            continue
        seen[storage] = None
        saves.append((_described(storage, own, read, operations), storage.num_bytes))
    made = sum(storage.num_bytes for storage in own - read)
    return SavedStep(
        operation=operation.name, made_bytes=made, saves=tuple(saves), again_bytes=again
    )


def _described(
    storage: Storage, own: set[Storage], read: set[Storage], operations: list[Operation]
) -> str:
    if storage in own and storage not in read:
        return "its result"
    for operation in operations:
        if any(tensor.storage is storage for tensor in operation.outputs):
            if operation.kind is OperationKind.GIVEN:
                return "its input"
            return f"the result of {operation.name}"
    return "its input"


# -- inputs --------------------------------------------------------------------------------------


def given(t: Tape, numel: int, dtype: DType = DType.BF16, *, requires_grad: bool = True) -> Tensor:
    """A tensor that was there before."""
    made = t.tensor(numel, dtype, requires_grad=requires_grad)
    t.record(OperationKind.GIVEN, (), (made,))
    return made


def hidden_states(t: Tape) -> Tensor:
    """The residual stream of the lessons' layer."""
    return given(t, TOKENS * HIDDEN)


def _unary(kind: OperationKind, *, saves_input: bool) -> Record:
    def record(t: Tape) -> Tensor:
        return t.elementwise(
            kind, hidden_states(t), saves_input=saves_input, saves_output=not saves_input
        )

    return record


def _product_of_sums(*, x: bool, y: bool) -> Record:
    def record(t: Tape) -> Tensor:
        left = given(t, GIB // 4, DType.FP32, requires_grad=x)
        right = given(t, GIB // 4, DType.FP32, requires_grad=y)
        return t.mul(t.shift(left), t.shift(right))

    return record


def _sigmoids(t: Tape) -> Tensor:
    x = given(t, GIB // 4, DType.FP32)
    for _ in range(5):
        x = t.elementwise(OperationKind.SIGMOID, x, saves_output=True)
    return x


def _attention(t: Tape) -> Tensor:
    spec = AttentionSpec(num_heads=HEADS, num_kv_heads=HEADS, head_dim=HIDDEN // HEADS)
    query, key, value = (hidden_states(t) for _ in range(3))
    return attend(t, query, key, value, Shape(1, TOKENS, TOKENS, spec), None)


def _swiglu(t: Tape) -> Tensor:
    spec = FeedForwardSpec(intermediate_size=WIDTH, activation=Activation.SILU, gated=True)
    return feed_forward(t, hidden_states(t), spec, HIDDEN)


def _loss(t: Tape) -> Tensor:
    x = hidden_states(t)
    weight = t.parameter("lm_head.weight", VOCABULARY, HIDDEN)
    return language_model_loss(
        t, x, weight, VOCABULARY, lambda hidden: matmul_weight(t, hidden, weight)
    )


def _rotary(t: Tape) -> Tensor:
    dim = HIDDEN // HEADS
    cos, sin = (given(t, TOKENS * dim, requires_grad=False) for _ in range(2))
    return rotary(t, hidden_states(t), cos, sin)


def _gelu_new(t: Tape) -> Tensor:
    if t.kernels.fused_elementwise:
        return t.elementwise(OperationKind.GELU, hidden_states(t), saves_input=True)
    return gelu_new(t, hidden_states(t))


def _lesson(
    name: str, title: str, record: Record, why: str, *more: Variant, kernels: Kernels | None = None
) -> Lesson:
    usual = Variant(name=title, record=record, kernels=kernels or Kernels())
    return Lesson(
        name=name, title=title, why=why,
        source="torch 2.13, tools/autograd/derivatives.yaml", variants=(usual, *more),
    )  # fmt: skip


_EAGER = Kernels(attention=AttentionKernel.EAGER)

LESSONS: tuple[Lesson, ...] = (
    _lesson(
        "add", "x + y", lambda t: t.add(hidden_states(t), hidden_states(t)),
        "The gradient of a sum is the incoming gradient for both summands: no value is needed.",
    ),
    _lesson(
        "mul", "x * y", lambda t: t.mul(hidden_states(t), hidden_states(t)),
        "dx = g·y and dy = g·x: each factor is kept for the other's gradient.",
    ),
    _lesson(
        "square", "x.pow(2)", lambda t: t.square(hidden_states(t)),
        "dx = 2x·g: the input is kept.",
    ),
    _lesson(
        "relu", "relu(x)", _unary(OperationKind.RELU, saves_input=False),
        "The gradient passes where the result is positive: the result is kept, which the next "
        "operation mostly keeps anyway.",
    ),
    _lesson(
        "sigmoid", "sigmoid(x)", _unary(OperationKind.SIGMOID, saves_input=False),
        "dx = g·y(1 - y): the result is kept.",
    ),
    _lesson(
        "tanh", "tanh(x)", _unary(OperationKind.TANH, saves_input=False),
        "dx = g(1 - y²): the result is kept.",
    ),
    _lesson(
        "silu", "silu(x)", _unary(OperationKind.SILU, saves_input=True),
        "dx is a function of x, not of the result: the input is kept.",
    ),
    _lesson(
        "gelu", "gelu(x), one kernel", _unary(OperationKind.GELU, saves_input=True),
        "dx is a function of x, not of the result: the input is kept.",
    ),
    _lesson(
        "gelu_new", "GPT-2's gelu, written out in Python", _gelu_new,
        "Eight elementwise operations, each of which keeps what its own derivative asks for.",
        Variant(
            name="one kernel", record=_gelu_new, kernels=Kernels(fused_elementwise=True),
        ),
    ),
    _lesson(
        "dropout", "dropout(x, p)", lambda t: dropout(t, hidden_states(t), 0.1),
        "The mask is kept, one byte for each number; with p = 0 nothing runs and nothing is kept.",
    ),
    _lesson(
        "linear", "x @ W.T", lambda t: linear(t, hidden_states(t), "proj", HIDDEN, WIDTH),
        "dW = g.T·x keeps the input; dx = g·W keeps the weight, which is there anyway. A frozen "
        "weight needs no input.",
    ),
    _lesson(
        "embedding", "rows of a table", lambda t: embedding(
            t, "embed", VOCABULARY, HIDDEN, TOKENS, given(t, TOKENS, DType.INT64)
        ),
        "The gradient goes to the rows that were looked up: the ids are kept, 8 bytes a token.",
    ),
    _lesson(
        "softmax", "softmax(x) over 32 heads of scores",
        lambda t: softmax(t, given(t, HEADS * TOKENS * TOKENS), dtype=DType.FP32),
        "dx = y(g - sum(g·y)): the result is kept, in fp32 where it is computed so.",
    ),
    _lesson(
        "layer_norm", "torch.nn.LayerNorm", lambda t: layer_norm(t, hidden_states(t), "n", HIDDEN),
        "One kernel: its input, and two fp32 statistics for each row.",
    ),
    _lesson(
        "rms_norm", "Llama's RMSNorm, written out in Python",
        lambda t: rms_norm(t, hidden_states(t), t.parameter("norm.weight", HIDDEN)),
        "The fp32 copy is kept by the square and by the product, and the normalized copy by the "
        "product with the weight: 6 bytes a number where a fused kernel keeps 2.",
        Variant(
            name="one kernel",
            record=lambda t: _fused_norm(t), kernels=Kernels(norm=NormKernel.FUSED),
        ),
    ),
    _lesson(
        "rotary", "x * cos + rotate_half(x) * sin", _rotary,
        "The tables do not need a gradient, so x is not kept: only the tables, which all layers "
        "share.",
        Variant(name="one kernel", record=_rotary, kernels=Kernels(fused_rotary=True)),
    ),
    _lesson(
        "attention", "attention written out: scores, softmax, values", _attention,
        "Scores are s x s for every head; their softmax is kept in fp32, and its copy in bf16 for "
        "the product with the values.",
        Variant(name="flash attention", record=_attention),
        kernels=_EAGER,
    ),
    _lesson(
        "swiglu", "down(silu(gate(x)) * up(x))", _swiglu,
        "Gate, its silu, up and their product are kept: 8 bytes for each inner number. Fused, the "
        "silu is computed again in backward: 6.",
        Variant(
            name="Liger's kernel", record=_swiglu,
            kernels=Kernels(feed_forward=FeedForwardKernel.FUSED),
        ),
    ),
    _lesson(
        "cross_entropy", "logits to loss, as transformers does", _loss,
        "The log-softmax of fp32 logits is kept, 4 bytes for each token and word, beside the "
        "input of the output matrix.",
        Variant(
            name="Megatron's, in place", record=_loss,
            kernels=Kernels(loss=LossKernel.PARALLEL_FUSED),
        ),
        Variant(
            name="Liger's, gradients in forward", record=_loss,
            kernels=Kernels(loss=LossKernel.FUSED_LINEAR),
        ),
    ),
    Lesson(
        name="product_of_sums",
        title="(x + 1) * (y + 1)",
        why="A factor is kept only where the other one needs a gradient.",
        source="torch 2.13, tools/autograd/derivatives.yaml",
        variants=(
            Variant(name="neither requires grad", record=_product_of_sums(x=False, y=False)),
            Variant(name="both require grad", record=_product_of_sums(x=True, y=True)),
            Variant(name="only x requires grad", record=_product_of_sums(x=True, y=False)),
        ),
        sizes=LARGE,
    ),
    Lesson(
        name="sigmoid_chain",
        title="five sigmoids, one after another",
        why="Each one keeps its result, so four of them live on beside the last.",
        source="torch 2.13, tools/autograd/derivatives.yaml",
        variants=(Variant(name="five sigmoids", record=_sigmoids),),
        sizes=LARGE,
    ),
)  # fmt: skip
"""Every operation that ``--operation`` knows."""


def _fused_norm(t: Tape) -> Tensor:
    from memplan.graph.operations import rms_norm_fused

    return rms_norm_fused(t, hidden_states(t), t.parameter("norm.weight", HIDDEN))
