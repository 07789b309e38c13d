"""What single operations save for the backward pass, why, and what a fused kernel would save.

Every lesson is recorded on a tape by the code that estimates use, so it cannot say anything else
than they do. Sources: torch 2.13 ``tools/autograd/derivatives.yaml`` for what is saved;
transformers 5.23 for how models write the operation.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.feed_forward import feed_forward
from memplan.graph.losses.tasks import language_model_loss
from memplan.graph.operations.activations import gelu_new
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.lookups import embedding
from memplan.graph.operations.norms import layer_norm, rms_norm
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.operations.rotary import rotary
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.report.lessons.teaching import (
    LARGE,
    Lesson,
    Record,
    Sizes,
    Variant,
    given,
    hidden_states,
)
from memplan.training.choices_of_kernels.kernels import (
    AttentionKernel,
    FeedForwardKernel,
    Kernels,
    LossKernel,
    NormKernel,
    RotaryKernel,
)


def _unary(kind: OperationKind) -> Record:
    def record(t: Tape, sizes: Sizes) -> Tensor:
        return t.elementwise(kind, hidden_states(t, sizes))

    return record


def _product_of_sums(*, x: bool, y: bool) -> Record:
    def record(t: Tape, sizes: Sizes) -> Tensor:
        numel, dtype = sizes.large
        left = given(t, numel, dtype, requires_grad=x)
        right = given(t, numel, dtype, requires_grad=y)
        return t.mul(t.shift(left), t.shift(right))

    return record


def _sigmoids(t: Tape, sizes: Sizes) -> Tensor:
    x = given(t, *sizes.large)
    for _ in range(5):
        x = t.elementwise(OperationKind.SIGMOID, x)
    return x


def _written_out(*, in_place: bool) -> Record:
    """``1 / (1 + exp(-x))``, an operator for each sign, or in place where that is allowed."""

    def record(t: Tape, sizes: Sizes) -> Tensor:
        x = hidden_states(t, sizes)
        negative = t.scale(x, OperationKind.NEG)
        raised = _kept_result(t, OperationKind.EXP, negative, in_place=in_place)
        # exp keeps its result, so that nothing may be added to it in place.
        out = _kept_result(t, OperationKind.RECIPROCAL, t.shift(raised), in_place=in_place)
        t.touch(x)  # the caller's
        return out

    return record


def _kept_result(t: Tape, kind: OperationKind, x: Tensor, *, in_place: bool = False) -> Tensor:
    """A function whose result is kept, in a tensor of its own or in its input's place."""
    if not in_place:
        return t.elementwise(kind, x)
    out = t.view(x, x.numel)
    t.record(kind, (x,), (out,), saves=(out,), gradients=(Gradient.FRESH,))
    return out


def _own_function(t: Tape, sizes: Sizes) -> Tensor:
    """A ``torch.autograd.Function`` that writes the sigmoid out, keeps its input and writes it out again in backward."""
    x = hidden_states(t, sizes)
    out = t.tensor(x.numel, x.dtype)
    size = out.storage.num_bytes
    t.record(
        OperationKind.SIGMOID, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=size, backward_scratch_bytes=(size, size),
    )  # fmt: skip
    return out


def _convolution(t: Tape, sizes: Sizes) -> Tensor:
    """A convolution of width 3 over the tokens, as many channels out as in."""
    x = hidden_states(t, sizes)
    weight = t.parameter("conv.weight", sizes.hidden, sizes.hidden, 3)
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.CONVOLUTION, (x, weight), (out,), saves=(x, weight),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * x.numel * sizes.hidden * 3,
    )  # fmt: skip
    return out


def _attention(t: Tape, sizes: Sizes) -> Tensor:
    heads, tokens = sizes.heads, sizes.tokens
    spec = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=sizes.head_dim)
    query, key, value = (given(t, sizes.attended_numel) for _ in range(3))
    return attend(t, query, key, value, Shape(sizes.batch, tokens, tokens, spec), None)


def _swiglu(t: Tape, sizes: Sizes) -> Tensor:
    spec = FeedForwardSpec(intermediate_size=sizes.width, activation=Activation.SILU, gated=True)
    return feed_forward(t, hidden_states(t, sizes), spec, sizes.hidden)


def _loss(t: Tape, sizes: Sizes) -> Tensor:
    x = hidden_states(t, sizes)
    weight = t.parameter("lm_head.weight", sizes.vocabulary, sizes.hidden)
    return language_model_loss(
        t, x, weight, sizes.vocabulary, lambda hidden: matmul_weight(t, hidden, weight)
    )


def _packed(kind: str) -> Record:
    """A linear layer whose weight is quantized, as a frozen base has them."""

    def record(t: Tape, sizes: Sizes) -> Tensor:
        from memplan.graph.replacing.quantized import PackedBase  # only for this lesson
        from memplan.training.quantization import Quantization, QuantizationKind
        from memplan.training.quantize_setting import filled_in

        how = filled_in(Quantization(kind=QuantizationKind(kind)), {}, half=DType.BF16)
        base = PackedBase.of(how, DType.BF16, "")
        weight = base.pack(t, t.parameter("proj.weight", sizes.width, sizes.hidden))
        return base.product(t, hidden_states(t, sizes), weight, None)

    return record


def _rotary(t: Tape, sizes: Sizes) -> Tensor:
    table = sizes.tokens * sizes.head_dim
    cos, sin = (given(t, table, requires_grad=False) for _ in range(2))
    return rotary(t, given(t, sizes.attended_numel), cos, sin)


def _gelu_new(t: Tape, sizes: Sizes) -> Tensor:
    if t.kernels.fused_elementwise:
        return t.elementwise(OperationKind.GELU, hidden_states(t, sizes))
    return gelu_new(t, hidden_states(t, sizes))


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
        "add", "x + y", lambda t, z: t.add(hidden_states(t, z), hidden_states(t, z)),
        "The gradient of a sum is the incoming gradient for both summands: no value is needed.",
    ),
    _lesson(
        "mul", "x * y", lambda t, z: t.mul(hidden_states(t, z), hidden_states(t, z)),
        "dx = g·y and dy = g·x: each factor is kept for the other's gradient.",
    ),
    _lesson(
        "square", "x.pow(2)", lambda t, z: t.square(hidden_states(t, z)),
        "dx = 2x·g: the input is kept.",
    ),
    _lesson(
        "relu", "relu(x)", _unary(OperationKind.RELU),
        "The gradient passes where the result is positive: the result is kept, which the next "
        "operation mostly keeps anyway.",
    ),
    _lesson(
        "sigmoid", "sigmoid(x)", _unary(OperationKind.SIGMOID),
        "dx = g·y(1 - y): the result is kept.",
    ),
    _lesson(
        "exp", "exp(x)", _unary(OperationKind.EXP),
        "dx = g·y: the result is kept.",
    ),
    _lesson(
        "reciprocal", "1 / x", _unary(OperationKind.RECIPROCAL),
        "dx = -g·y²: the result is kept.",
    ),
    _lesson(
        "sigmoid_written_out", "1 / (1 + exp(-x))", _written_out(in_place=False),
        "exp and the reciprocal each keep their result: two tensors last, and while the reciprocal runs a third "
        "one, the sum, is alive beside them. The operator keeps one. In place saves moments, not what lasts: exp may "
        "take the negative's place, which nothing keeps, and the reciprocal the sum's, but what exp keeps must "
        "stay as it is (backward raises where it was modified). Inside a Function's forward nothing records "
        "gradients: its temporaries go, apply attaches one node to the result, and what lasts is what "
        "ctx.save_for_backward was given (grad_fn.saved_tensors): here its input, which is there anyway.",
        Variant(name="in place where it may be", record=_written_out(in_place=True)),
        Variant(name="the operator", record=_unary(OperationKind.SIGMOID)),
        Variant(name="an autograd.Function of one's own", record=_own_function),
    ),
    _lesson(
        "tanh", "tanh(x)", _unary(OperationKind.TANH),
        "dx = g(1 - y²): the result is kept.",
    ),
    _lesson(
        "silu", "silu(x)", _unary(OperationKind.SILU),
        "dx is a function of x, not of the result: the input is kept.",
    ),
    _lesson(
        "gelu", "gelu(x), one kernel", _unary(OperationKind.GELU),
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
        "dropout", "dropout(x, p)", lambda t, z: dropout(t, hidden_states(t, z), 0.1),
        "The mask is kept, one byte for each number; with p = 0 nothing runs and nothing is kept.",
    ),
    _lesson(
        "linear", "x @ W.T", lambda t, z: linear(t, hidden_states(t, z), "proj", z.hidden, z.width),
        "dW = g.T·x keeps the input; dx = g·W keeps the weight, which is there anyway. A frozen "
        "weight needs no input.",
    ),
    Lesson(
        name="quantized", title="x @ W.T, W quantized",
        why="bitsandbytes unpacks the weight for each product, n x 2 bytes forward and backward, and keeps "
        "only the codes; LLM.int8 multiplies integers and holds x past checkpointing; GPTQ's product "
        "is torch's own, which keeps the unpacked weight.",
        source="bitsandbytes 0.50.2, autograd/_functions.py; GPTQModel 7, nn_modules/qlinear/torch.py",
        variants=(
            Variant(name="nf4", record=_packed("nf4")),
            Variant(name="LLM.int8", record=_packed("int8")),
            Variant(name="GPTQ", record=_packed("gptq")),
        ),
    ),
    _lesson(
        "convolution", "torch.nn.Conv1d, 3 wide, as many channels out as in", _convolution,
        "dW needs the input and dx the weight: both are kept (_saved_input, _saved_weight), the weight's bytes "
        "are there anyway. A bias needs nothing.",
    ),
    _lesson(
        "embedding", "rows of a table", lambda t, z: embedding(
            t, "embed", z.vocabulary, z.hidden, z.rows, given(t, z.rows, DType.INT64)
        ),
        "The gradient goes to the rows that were looked up: the ids are kept, 8 bytes a token.",
    ),
    _lesson(
        "softmax", "softmax(x) over all heads of scores",
        lambda t, z: softmax(t, given(t, z.scores_numel), dtype=DType.FP32),
        "dx = y(g - sum(g·y)): the result is kept, in fp32 where it is computed so.",
    ),
    _lesson(
        "layer_norm", "torch.nn.LayerNorm", lambda t, z: layer_norm(t, hidden_states(t, z), "n", z.hidden),
        "One kernel: its input, and two fp32 statistics for each row.",
    ),
    _lesson(
        "rms_norm", "Llama's RMSNorm, written out in Python",
        lambda t, z: rms_norm(t, hidden_states(t, z), t.parameter("norm.weight", z.hidden)),
        "The fp32 copy is kept by the square and by the product, and the normalized copy by the "
        "product with the weight: 6 bytes a number where a fused kernel keeps 2.",
        Variant(
            name="one kernel",
            record=lambda t, z: _fused_norm(t, z), kernels=Kernels(norm=NormKernel.FUSED),
        ),
    ),
    _lesson(
        "rotary", "x * cos + rotate_half(x) * sin", _rotary,
        "The tables do not need a gradient, so x is not kept: only the tables, which all layers "
        "share.",
        Variant(name="one kernel", record=_rotary, kernels=Kernels(rotary=RotaryKernel.LIGER)),
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
        fixed_sizes=LARGE,
    ),
    Lesson(
        name="sigmoid_chain",
        title="five sigmoids, one after another",
        why="Each one keeps its result, so four of them live on beside the last.",
        source="torch 2.13, tools/autograd/derivatives.yaml",
        variants=(Variant(name="five sigmoids", record=_sigmoids),),
        fixed_sizes=LARGE,
    ),
)  # fmt: skip
"""Every operation that ``--operation`` knows."""


def _fused_norm(t: Tape, sizes: Sizes) -> Tensor:
    from memplan.graph.operations.norms import rms_norm_fused

    weight = t.parameter("norm.weight", sizes.hidden)
    return rms_norm_fused(t, hidden_states(t, sizes), weight)
