"""Symbolic tensors: a size and a dtype on a storage, and weights with the module that owns them.

Sizes are rounded up to ``ALLOCATION_ROUNDING``, the smallest block of torch's caching allocator
(c10/core/AllocatorConfig.h, torch 2.13).
"""

from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.units import MIB

if TYPE_CHECKING:
    from memplan.training.quantization import Quantization

ALLOCATION_ROUNDING = 512
"""Bytes to which torch's allocator rounds every block up."""
SMALL_REQUEST_BYTES = 1 * MIB
"""Up to here a block lies in segments for small ones (``kSmallSize``)."""


def allocated_bytes(numel: int, dtype: DType) -> int:
    """Bytes that the allocator hands out for a tensor [bytes].

    >>> allocated_bytes(100, DType.FP32)
    512
    """
    return -(-numel * dtype.num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING


class Storage:
    """A block of memory: its size, who reads it last, how many operations keep it."""

    __slots__ = (
        "held", "kept_by_maker", "last_read", "num_bytes", "segment", "touched", "weight_cast",
    )  # fmt: skip

    def __init__(self, num_bytes: int, segment: int, position: int) -> None:
        self.num_bytes = num_bytes
        self.segment = segment
        """Which segment made it."""
        self.last_read = position
        """The last operation of its segment that reads it in the forward pass."""
        self.touched = 0
        """When a variable that holds it was last let go: those of inner frames come first."""
        self.held = False
        """Something outside its segment keeps it until ``Tape.release``."""
        self.kept_by_maker = False
        """An operation of its own segment keeps it for backward, so that no later one lets it go."""
        self.weight_cast = False
        """A weight's 16-bit copy in autocast's cache: it lives until the context ends."""


class Tensor:
    """A number of elements and a dtype, on a storage."""

    __slots__ = (
        "by_channel", "by_column", "by_head", "dtype", "is_flat", "is_scattered", "numel",
        "requires_grad", "storage",
    )  # fmt: skip

    def __init__(
        self, numel: int, dtype: DType, storage: Storage, *, requires_grad: bool = False
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self.storage = storage
        self.requires_grad = requires_grad
        self.by_channel = False
        """Hidden states that lie channel by channel in memory, as a convolution gives them, and not
        token by token. What is computed of them element by element lies so too."""
        self.by_column = False
        """A weight, or what was made of one: each of its elements belongs to a column of activations."""
        self.by_head = False
        """Queries, keys or values that lie head by head in memory, not token by token."""
        self.is_flat = False
        """Its rows are one dimension, so that its gradient out of a product is no view of one."""
        self.is_scattered = False
        """Its rows are seen as one dimension only in a copy, which what multiplies it makes itself."""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What a weight that stacks the matrices of all routed experts consists of."""

    num_experts: int
    num_active: int
    """Experts that each token passes."""
    num_matrices: int = 1
    """Linear layers fused in it: 2 where gate and up are one."""
    spread: int = 1
    """Ranks that have other experts: the weight has this rank's alone."""
    splitting: int = 1
    """How many of them split the rest of the model between them, and see the same data."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """What the codes of a quantized weight stand for."""

    shape: tuple[int, ...]
    """Of the matrix: ``(out_features, in_features)``."""
    quantization: "Quantization"
    """How it is packed, every default filled in."""
    loaded: DType
    """What it was quantized from, and what 4-bit layers unpack it to in backward."""

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.shape[0] * self.shape[1]


class Parameter(Tensor):
    """A weight: a leaf whose gradient outlives the backward pass.

    Shape, elements and format are those of the tensor in memory: of a quantized one, its codes; of one
    that is split over ranks, a rank's part.
    """

    __slots__ = (
        "added_up",
        "block",
        "codes_bytes",
        "experts",
        "gathered_as",
        "gradient_numel",
        "in_conv1d",
        "is_distributed",
        "module",
        "name",
        "num_modules",
        "of_adapter",
        "of_linear",
        "packed",
        "ranks",
        "role",
        "shape",
        "unused", "viewed", "whole_numel",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        *,
        module: str,
        trainable: bool,
        experts: ExpertShare | None = None,
        of_adapter: bool = False,
        packed: PackedMatrix | None = None,
        role: WeightRole = WeightRole.MATRIX,
        block: LayerBlock = LayerBlock.NETWORK,
    ) -> None:
        numel = 1
        for size in shape:
            numel *= size
        super().__init__(
            numel, dtype, Storage(allocated_bytes(numel, dtype), -1, 0), requires_grad=trainable
        )
        self.name = name
        self.by_column = True
        self.module = module
        """The module that owns it directly."""
        self.role = role
        self.block = block
        self.shape = shape
        self.of_adapter = of_adapter
        """An adapter's own weight, or a copy that is trained in place of a frozen one."""
        self.experts = experts
        """Set where it holds all routed experts' matrices."""
        self.codes_bytes = 0
        """Of narrow copies that stay from its first use on, beside itself (TransformerEngine's, with Megatron)."""
        self.gathered_as = dtype
        """What it is when an engine has gathered it, where it is sharded."""
        self.gradient_numel = numel
        """Elements of the gradient that autograd makes: more where it makes those of other ranks too."""
        self.whole_numel = 0
        """Elements of the weight on all ranks together, where their parts are not equally large."""
        self.num_modules = 1
        """How many modules' weights it stands for, side by side (experts in turn, several at once)."""
        self.ranks = 1
        """How many ranks have a part of the weight like this one each."""
        self.is_distributed = False
        """It is a DTensor, be it one that every rank has whole."""
        self.added_up = False
        """Its gradient is a rank's part of a sum over the ranks that have the rest of the sequences."""
        self.unused = False
        """No loss reaches it: it never has a gradient, and a plain optimizer no states for it."""
        self.viewed = False
        """Its product keeps a view of it for backward, and with that the memory in which it was gathered."""
        self.of_linear = False
        """The matrix of a ``torch.nn.Linear`` whose product is not written down."""
        self.in_conv1d = False
        """The matrix of transformers' ``Conv1D``: it has columns for outputs, and is no ``torch.nn.Linear``'s."""
        self.packed = packed
        """Set where it holds the codes of a quantized matrix."""

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the weight that it is to the model."""
        return self.shape if self.packed is None else self.packed.shape

    @property
    def num_weights(self) -> int:
        """Elements of the weight that it is to the model, other ranks' parts with it [elements]."""
        if self.whole_numel:
            return self.whole_numel
        return self.ranks * (self.numel if self.packed is None else self.packed.numel)

    @property
    def has_gradient_apart(self) -> bool:
        """Whether its gradient is split otherwise than the weight: what steps or shards it makes another."""
        return self.added_up or self.gradient_numel != self.numel

    @property
    def active_numel(self) -> int:
        """Elements that one token's computation uses [elements]."""
        if self.experts is None:
            return self.num_weights
        return self.num_weights // self.experts.num_experts * self.experts.num_active

    @property
    def unfused_numel(self) -> int:
        """Elements of one expert's matrix, as a module of its own would hold it [elements]."""
        if self.experts is None:
            return self.num_weights
        return self.num_weights // (self.experts.num_experts * self.experts.num_matrices)
