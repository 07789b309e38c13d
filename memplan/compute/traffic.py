"""What operations read and write: the bytes that a kernel over whole tensors moves.

In a compiled region what stands between two kernels is one kernel, and only what is really written moves.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

from memplan.graph.core.operation_kinds import EXTERN_KERNELS, OperationKind
from memplan.graph.core.segments import Gradient, Operation
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.training.quantization import QuantizedProduct

LOOKUPS = frozenset(
    {OperationKind.EMBEDDING, OperationKind.INDEX_SELECT, OperationKind.INDEX, OperationKind.GATHER}
)
"""What reads no more of its first input than it makes."""
_UNWRITTEN = frozenset(
    map(int, (Gradient.NONE, Gradient.ALIAS, Gradient.SEEN, Gradient.COLUMNS, Gradient.SAVED))
)
"""Gradients that no kernel writes."""


def scratch_bytes(scratch: Iterable[int]) -> int:
    """Of a kernel's temporaries, all that it asks for [bytes]."""
    return sum([each for each in scratch if each > 0])


def num_bytes_of(tensor: Tensor) -> int:
    """Of its elements [bytes]."""
    return tensor.numel * tensor.dtype.num_bytes


def made_bytes(operation: Operation) -> int:
    """What it writes forward [bytes]."""
    return sum([each.numel * each.dtype.num_bytes for each in operation.outputs])


def read_bytes(operation: Operation) -> int:
    """What it reads forward [bytes]."""
    sizes = [each.numel * each.dtype.num_bytes for each in operation.inputs]
    if sizes and operation.kind in LOOKUPS:
        sizes[0] = min(sizes[0], made_bytes(operation))
        sizes[1:] = [min(each, sizes[0]) for each in sizes[1:]]
    return sum(sizes)


UNPACKED_BYTES: Mapping[QuantizedProduct, int] = {QuantizedProduct.GPTQ_TORCH: 22}
"""Read and written for each weight between its codes and its value, where PyTorch's own operations unpack it one after
the other: shifted in 32 bits, cast to 8, masked, zeros gathered and taken away, scales gathered and multiplied
(GPTQModel, nn_modules/qlinear/torch.py, ``dequantize_weight``)."""
UNPACKING_KERNELS: Mapping[QuantizedProduct, int] = {QuantizedProduct.GPTQ_TORCH: 8}
"""Of these operations, those beside one."""


def unpacking_bytes(weight: Tensor) -> int:
    """Between the codes and the weight, beside both [bytes]."""
    if not _is_packed(weight):
        return 0
    packed = weight.packed
    assert packed is not None
    return packed.numel * UNPACKED_BYTES.get(packed.quantization.format.product, 0)


def unpacking_kernels(weight: Tensor) -> int:
    """Launched for it, beside one."""
    if not _is_packed(weight):
        return 0
    packed = weight.packed
    assert packed is not None
    return UNPACKING_KERNELS.get(packed.quantization.format.product, 0)


def _is_packed(tensor: Tensor) -> TypeGuard[Parameter]:
    return isinstance(tensor, Parameter) and tensor.packed is not None


def backward_bytes(operation: Operation) -> int:
    """Gradients that come and go, and what was kept [bytes]."""
    made = 0
    for tensor, kind in zip(operation.inputs, operation.gradients, strict=False):
        if tensor.requires_grad and kind not in _UNWRITTEN:
            made += tensor.numel * tensor.dtype.num_bytes + (2 * kind if kind > 0 else 0)
    if not made:
        return 0
    return made + sum([each.num_bytes for each in operation.saved]) + arriving_bytes(operation)


def arriving_bytes(operation: Operation) -> int:
    """Gradients of what it made [bytes]."""
    return sum(
        [each.numel * each.dtype.num_bytes for each in operation.outputs if each.requires_grad]
    )


# -- compiled regions ------------------------------------------------------------------------------


def kernels_of(operations: Iterable[Operation]) -> list[list[Operation]]:
    """Operations by kernel: those that are one of their own, and what stands between them."""
    found: list[list[Operation]] = []
    is_open = False
    for operation in operations:
        alone = operation.kind in EXTERN_KERNELS
        if alone or not is_open:
            found.append([operation])
        else:
            found[-1].append(operation)
        is_open = not alone
    return found


def fused_bytes(kernel: Sequence[Operation]) -> int:
    """What one kernel reads from outside, and what of its results is written."""
    made = {tensor.storage for each in kernel for tensor in each.outputs}
    read: dict[Storage, int] = {}
    for operation in kernel:
        lookup = operation.kind in LOOKUPS
        for tensor in operation.inputs:
            if tensor.storage not in made:
                size = min(num_bytes_of(tensor), tensor.storage.num_bytes or 0)
                if lookup:
                    size = min(size, made_bytes(operation))
                read[tensor.storage] = max(read.get(tensor.storage, 0), size)
    return sum(read.values()) + sum(each.num_bytes for each in made)


def fused_backward_bytes(kernel: Sequence[Operation]) -> int:
    """The same of its backward pass [bytes]."""
    made = {tensor.storage for each in kernel for tensor in each.outputs}
    inner = {tensor.storage for each in kernel for tensor in each.inputs} & made
    kept = {storage for each in kernel for storage in each.saved}
    arriving = {
        tensor: num_bytes_of(tensor)
        for each in kernel
        for tensor in each.outputs
        if tensor.requires_grad and tensor.storage not in inner
    }
    leaving = {
        tensor: num_bytes_of(tensor)
        for each in kernel
        for tensor, kind in zip(each.inputs, each.gradients, strict=False)
        if tensor.requires_grad and tensor.storage not in made and kind != Gradient.NONE
    }
    return sum(each.num_bytes for each in kept) + sum(arriving.values()) + sum(leaving.values())
