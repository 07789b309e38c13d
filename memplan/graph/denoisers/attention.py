"""Attention over pictures, clips and prompts (diffusers 0.42's attention processors)."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, as_heads
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.denoisers.rotation import turned
from memplan.graph.denoisers.state import Denoising
from memplan.graph.operations.norms import native_layer_norm, norm
from memplan.graph.operations.products import linear
from memplan.model.attention import AttentionSpec
from memplan.model.denoisers import HeadNorm
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import LayerBlock, WeightRole

WRITTEN_OUT = NormSpec(kind=NormKind.RMS_T5)


def head_spec(size: int, num_heads: int) -> AttentionSpec:
    """Heads that share a width between them, without a mask."""
    return AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=size // num_heads, causal=False
    )


def project(t: Tape, x: Tensor, module: str, size: int, *, bias: bool = True) -> Tensor:
    """A square projection."""
    return linear(t, x, module, size, size, bias=bias)


def head_normed(t: Tape, x: Tensor, kind: HeadNorm, module: str, head_dim: int) -> Tensor:
    """Queries or keys, normed head by head."""
    match kind:
        case HeadNorm.NONE:
            return x
        case HeadNorm.WRITTEN_OUT:
            return norm(t, x, WRITTEN_OUT, module, head_dim)
        case HeadNorm.KERNEL:
            return kernel_normed(t, x, module, head_dim)
        case HeadNorm.LAYER:
            weights = tuple(
                t.parameter(f"{module}.{name}", head_dim, role=WeightRole.NORM)
                for name in ("weight", "bias")
            )
            out = native_layer_norm(t, x, head_dim, weights, strided=True)
            t.touch(x)
            # The kernel lays what it makes head by head, as its argument is read.
            out.by_head = True
            return out


def kernel_normed(t: Tape, x: Tensor, module: str, width: int) -> Tensor:
    """``torch.nn.RMSNorm``: one kernel, which autocast gives fp32 copies."""
    weight: Tensor = t.parameter(f"{module}.weight", width, role=WeightRole.NORM)
    given = x
    if t.autocast is not None:
        given, weight = t.cast(x, DType.FP32), t.cast(weight, DType.FP32)
    out = t.tensor(x.numel, given.dtype)
    statistic = t.tensor(x.numel // width, DType.FP32)
    t.record(
        OperationKind.RMS_NORM, (given, weight), (out, statistic), saves=(given, statistic, weight),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    t.touch(x)
    return out


def scores(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: int,
    spec: AttentionSpec,
    *,
    widened: bool = True,
) -> Tensor:
    """``scaled_dot_product_attention``; ``widened``: its result is cast to the queries' format, which norms
    may have widened."""
    width = spec.num_heads * spec.head_dim
    shape = Shape(batch, query.numel // width // batch, key.numel // width // batch, spec)
    out = attend(t, query, key, value, shape, None)
    if widened:
        out = t.cast(out, query.dtype)
    return out


def let_go_of(t: Tape, given: Tensor, since: int) -> None:
    """Note that the variable of what queries were projected from names what attention found."""
    for position, operation in enumerate(t.segment.operations[since:], since):
        if operation.flops:
            given.storage.last_read = max(given.storage.last_read, position)
            return


def joint_attention(
    t: Tape,
    d: Denoising,
    x: Tensor,
    prompt: Tensor,
    size: int,
    num_heads: int,
    kind: HeadNorm,
    *,
    prompt_first: bool,
    rotary: bool,
    last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Of both streams, each with projections of its own."""
    t.block = LayerBlock.ATTENTION
    spec = head_spec(size, num_heads)
    by_head = not prompt_first
    own = [project(t, x, f"attn.{name}", size) for name in ("to_q", "to_k", "to_v")]
    names = ("add_q_proj", "add_k_proj", "add_v_proj")
    if by_head:
        own = _heads_of(t, own, kind, spec, ("norm_q", "norm_k"))
    other = [project(t, prompt, f"attn.{name}", size) for name in names]
    if by_head:
        other = _heads_of(t, other, kind, spec, ("norm_added_q", "norm_added_k"))
    else:
        own = _normed(t, own, kind, spec, ("norm_q", "norm_k"))
        other = _normed(t, other, kind, spec, ("norm_added_q", "norm_added_k"))
    joined = []
    for mine, others in zip(own, other, strict=True):
        both = t.concatenate(others, mine) if prompt_first else t.concatenate(mine, others)
        both.by_head = by_head
        joined.append(both)
    query, key, value = joined
    if rotary and d.tables is not None:
        query, key = turned(t, query, d.tables), turned(t, key, d.tables)
    out = scores(t, query, key, value, d.batch, spec)
    mine, others = _parted(t, out, x.numel, prompt_first=prompt_first)
    if prompt_first:
        mine = project(t, _rows(t, mine, d), "attn.to_out.0", size)
        given: Tensor | None = project(t, _rows(t, others, d), "attn.to_add_out", size)
    else:
        given = None if last else project(t, _rows(t, others, d), "attn.to_add_out", size)
        mine = project(t, _rows(t, mine, d), "attn.to_out.0", size)
        if last:
            t.linger(others)
    t.touch(out, *other, query, key, value)
    return mine, given


def _heads_of(
    t: Tape, parts: list[Tensor], kind: HeadNorm, spec: AttentionSpec, names: tuple[str, str]
) -> list[Tensor]:
    """Seen head by head, queries and keys normed; gradients come back in that order and are copied."""
    seen = [as_heads(t, each, spec.num_heads) for each in parts]
    return _normed(t, seen, kind, spec, names)


def _normed(
    t: Tape, parts: list[Tensor], kind: HeadNorm, spec: AttentionSpec, names: tuple[str, str]
) -> list[Tensor]:
    query, key, value = parts
    return [
        head_normed(t, query, kind, f"attn.{names[0]}", spec.head_dim),
        head_normed(t, key, kind, f"attn.{names[1]}", spec.head_dim),
        value,
    ]


def _parted(t: Tape, out: Tensor, own: int, *, prompt_first: bool) -> tuple[Tensor, Tensor]:
    """The picture's rows, and the prompt's: two slices (SD3), or one split (FLUX)."""
    rest = out.numel - own
    if prompt_first:
        others, mine = t.split(out, rest, own)
        return mine, others
    return t.slice(out, own), t.slice(out, rest)


def _rows(t: Tape, part: Tensor, d: Denoising) -> Tensor:
    """Of several samples, parts do not lie in one stretch: a product copies them."""
    return part if d.batch == 1 else t.contiguous(part)


def self_attention(
    t: Tape,
    d: Denoising,
    x: Tensor,
    module: str,
    size: int,
    num_heads: int,
    kind: HeadNorm,
    *,
    rotary: bool = False,
) -> Tensor:
    """Of one stream; what it finds is not projected yet."""
    t.block = LayerBlock.ATTENTION
    spec = head_spec(size, num_heads)
    query, key, value = (
        project(t, x, f"{module}.{name}", size) for name in ("to_q", "to_k", "to_v")
    )
    query = head_normed(t, query, kind, f"{module}.norm_q", spec.head_dim)
    key = head_normed(t, key, kind, f"{module}.norm_k", spec.head_dim)
    if rotary and d.tables is not None:
        query, key = turned(t, query, d.tables), turned(t, key, d.tables)
    out = scores(t, query, key, value, d.batch, spec)
    t.touch(query, key, value)
    return out
