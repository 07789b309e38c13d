"""How queries, keys and values lie in memory, and the products of their heads."""

from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.model.attention import AttentionSpec
from memplan.training.choices_of_kernels.kernels import AttentionKernel


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one attention call [elements]."""

    batch: int
    queries: int
    keys: int
    spec: AttentionSpec
    heads_split: bool = False
    """``as_heads`` was recorded behind the projections, so that their gradients are laid out there."""
    is_varlen: bool = False
    """The sequences lie one behind the other in one row: flash-attention's ``varlen`` functions."""

    @property
    def rows(self) -> int:
        """Query rows over the batch."""
        return self.batch * self.queries

    @property
    def scores(self) -> int:
        """Elements of the full score matrix of all heads."""
        return self.batch * self.spec.num_heads * self.queries * self.keys

    @property
    def outputs(self) -> int:
        """Elements that come out for all heads."""
        spec = self.spec
        return self.rows * spec.num_heads * (spec.value_head_dim or spec.head_dim)

    @property
    def groups(self) -> int:
        """Query heads for each key/value head."""
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def value_head_dim(self) -> int:
        """Size of a value's head."""
        return self.spec.value_head_dim or self.spec.head_dim


def splits_heads(t: Tape, spec: AttentionSpec) -> bool:
    """Whether the scores are products of heads written out, whose gradients lie head by head."""
    kernel = t.kernels.attention
    # The flash-attention package caps scores itself; torch's dispatcher has nothing that does.
    capped = bool(spec.softcap) and not kernel.is_package
    return kernel is AttentionKernel.EAGER or capped


def expand_heads(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """``repeat_kv``: a copy of keys or values for every query head; of a single head, a view."""
    if shape.groups == 1:
        return x
    if shape.spec.num_kv_heads > 1:
        return repeat_heads(t, x, shape)
    out = t.view(x, x.numel * shape.groups)
    t.record(OperationKind.EXPAND, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def repeat_heads(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """``repeat_interleave``: a copy of keys or values for every query head."""
    out = t.tensor(x.numel * shape.groups, x.dtype)
    t.record(OperationKind.REPEAT_KV, (x,), (out,), gradients=(Gradient.FRESH,))
    out.by_head = True
    return out


def merged_heads(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """A projection's view with the heads before the rows, as a batched product wants it.

    Batch and heads do not merge into one dimension, so more than one sequence is copied; the
    gradient is copied back into rows either way.
    """
    if x.by_head:
        return x
    if t.autocast is not None:
        x = t.cast(x, t.autocast)
    if shape.heads_split:
        return x if shape.batch == 1 else t.contiguous(x)
    single = x.numel == shape.batch * shape.spec.num_heads * shape.spec.head_dim
    if shape.batch == 1 or shape.spec.num_heads == 1 or single:
        return t.slice(x, x.numel)
    return t.scale(x, OperationKind.CLONE)


def spread_head(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """One key or value head as a factor of all query heads' product.

    It is spread in a view, which a product of more than one sequence copies.
    """
    if t.autocast is not None:
        x = t.cast(x, t.autocast)
    if shape.batch == 1:
        return t.slice(x, x.numel)
    return broadcast(t, x, x.numel * shape.spec.num_heads)


def broadcast(t: Tape, x: Tensor, numel: int) -> Tensor:
    """A copy in which each element stands several times."""
    out = t.tensor(numel, x.dtype)
    t.record(OperationKind.BROADCAST, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def batched_matmul(
    t: Tape,
    left: Tensor,
    right: Tensor,
    numel: int,
    inner: int,
    *,
    backward_scratch_bytes: tuple[int, ...] = (),
) -> Tensor:
    """``left @ right`` of two activations: both are kept."""
    if t.autocast is not None:
        right = t.cast(right, t.autocast)
        left = t.cast(left, t.autocast)
    out = t.tensor(numel, left.dtype)
    saves = []
    if left.requires_grad:
        saves.append(right)
    if right.requires_grad:
        saves.append(left)
    t.record(
        OperationKind.MATMUL, (left, right), (out,), saves=saves, gradients=(Gradient.VIEW, Gradient.VIEW),
        backward_scratch_bytes=backward_scratch_bytes, flops=2 * numel * inner,
    )  # fmt: skip
    return out
