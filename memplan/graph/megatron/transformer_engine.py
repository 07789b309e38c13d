"""TransformerEngine's modules: norm and product in one, fused rotary embeddings, fused attention.

TransformerEngine 2.11, pytorch/module/layernorm_linear.py (``_LayerNormLinear``), linear.py (``_Linear``),
attention/rope.py (``FusedRoPEFunc``), attention/dot_product_attention/utils.py (``get_qkv_layout``).
Userbuffers (``tp_comm_overlap``) are off.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.kernels import cudnn, flash
from memplan.graph.megatron.attention import rotary
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.megatron.norms import norm_weights
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.tensors import Parameter, Tensor
from memplan.model.attention import AttentionSpec
from memplan.model.norms import NormSpec


def norm_linear(
    c: MegatronContext,
    x: Tensor,
    spec: NormSpec,
    name: str,
    weight: Parameter,
    bias: Parameter | None = None,
) -> Tensor:
    """Keeps its input, the normed input and its statistics, which are this rank's share.

    With sequence parallelism the normed input is gathered for the product, and in backward again; the
    whole input gradient stays until the function returns.
    """
    t = c.tape
    out_features, width = weight.shape
    weights = norm_weights(c, spec, f"{name}.layer_norm", width)
    normed = t.tensor(x.numel, x.dtype)
    statistics = [t.tensor(x.numel // width, DType.FP32) for _ in weights]
    out = t.tensor(c.tokens * out_features, c.dtype)
    whole = x.storage.num_bytes * (c.degree if c.sequence else 1)
    inputs: tuple[Tensor, ...] = (x, *weights, weight)
    own = Gradient.NONE if c.fuses_gradients else Gradient.FRESH
    gradients: tuple[int, ...] = (Gradient.FRESH,) * (1 + len(weights)) + (own,)
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.LINEAR, inputs, (normed, *statistics, out),
        saves=(x, normed, *statistics, weight), gradients=gradients,
        forward_scratch_bytes=(whole, RESULT) if c.sequence else (),
        backward_scratch_bytes=(whole, whole, x.storage.num_bytes, ~0, RESULT)
        if c.sequence else (whole, RESULT),
        flops=2 * c.tokens * width * out_features, in_python=True,
    )  # fmt: skip
    return out


def linear(c: MegatronContext, x: Tensor, weight: Parameter) -> Tensor:
    """A product with this rank's rows; with sequence parallelism its gradient is gathered first."""
    t = c.tape
    out_features, in_features = weight.shape
    whole = t.tensor(c.tokens * out_features, c.dtype)
    out = t.tensor(c.stream_tokens * out_features, c.dtype) if c.sequence else whole
    own = Gradient.NONE if c.fuses_gradients else Gradient.FRESH
    gathered = (whole.storage.num_bytes, RESULT) if c.sequence else ()
    t.record(
        OperationKind.LINEAR, (x, weight), (out,), saves=(x, weight),
        gradients=(Gradient.FRESH, own), forward_scratch_bytes=gathered,
        backward_scratch_bytes=gathered, flops=2 * c.tokens * in_features * out_features,
        in_python=True,
    )  # fmt: skip
    return out


def turned(c: MegatronContext, x: Tensor) -> Tensor:
    """Rotary embeddings: one kernel into a new tensor, which keeps the angles alone."""
    t = c.tape
    assert c.frequencies is not None
    if not c.settings.apply_rope_fusion:
        return rotary(c, x)
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.ROTARY, (x, c.frequencies), (out,), saves=(c.frequencies,),
        gradients=(Gradient.FRESH, Gradient.NONE), in_python=True,
    )  # fmt: skip
    return out


def fused_attention(
    c: MegatronContext, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> Tensor:
    """cuDNN's attention on Hopper and Blackwell, flash elsewhere: keeps q, k, v and its output.

    Keys and values that are no regular views of one tensor, as beside turned keys, are copied first.
    """
    t = c.tape
    regular = query.storage is key.storage is value.storage and spec.num_heads == spec.num_kv_heads
    if not regular:
        query, key, value = (_own(c, each) for each in (query, key, value))
    shape = Shape(c.batch, c.seq_len, c.seq_len, spec)
    if t.options.sdpa.cudnn_head_dim >= spec.head_dim:
        return cudnn(t, query, key, value, shape, None)
    return flash(t, query, key, value, shape)


def _own(c: MegatronContext, x: Tensor) -> Tensor:
    """A copy, where it is a part of another tensor."""
    whole = c.tape.tensor(x.numel, x.dtype).storage.num_bytes
    return x if x.storage.num_bytes == whole else c.tape.contiguous(x)
