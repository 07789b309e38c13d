"""What goes to CPU RAM between the passes: for each tensor that an operation keeps, whether it goes.

Autograd hands every tensor that it keeps to the hooks that are set when it is kept
(torch/csrc/autograd/saved_variable.cpp), one after another, weights and doubles among them.
"""

from collections.abc import Callable, Sequence

from memplan.graph.core.operation_kinds import ATTENTION_KERNELS, PRODUCTS, OperationKind
from memplan.graph.core.tensors import Parameter, Storage, Tensor, allocated_bytes
from memplan.training.activation_offload import (
    OFFLOAD_RULES,
    ActivationOffload,
    OffloadRules,
    Rows,
    WeightsKept,
)


class Away:
    """A tensor that lies in CPU RAM from its forward to its backward pass."""

    __slots__ = (
        "copied_bytes", "is_result", "is_turned", "num_bytes", "pinned_bytes", "storage",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, *, copied: bool = False, is_result: bool = False) -> None:
        self.storage = tensor.storage
        self.num_bytes = allocated_bytes(tensor.numel, tensor.dtype)
        """Of what comes back."""
        self.copied_bytes = self.num_bytes if copied else 0
        """Of a copy on the GPU, made first."""
        self.is_result = is_result
        """The operation has run when it goes."""
        self.is_turned = False
        """It comes back in rows, where it lay across them."""
        self.pinned_bytes = pinned_bytes(tensor.numel * tensor.dtype.num_bytes)


def pinned_bytes(num_bytes: int) -> int:
    """What torch's allocator of page-locked memory takes: a power of two
    (ATen/core/CachingHostAllocator.h, ``allocate``) [bytes].

    >>> pinned_bytes(3 * 2**20) == 4 * 2**20
    True
    """
    return 1 << max(num_bytes - 1, 0).bit_length()


Handed = tuple[Away | None, ...]
"""For each tensor handed to the hooks, where it lies in between; None: it stays."""


def hooks_of(how: ActivationOffload, *, weights_stay: bool) -> "Hooks":
    """New hooks of a way of offloading."""
    return Hooks(OFFLOAD_RULES[how], weights_stay=weights_stay)


class Hooks:
    """What takes the tensors that a model's operations keep."""

    def __init__(self, rules: OffloadRules, *, weights_stay: bool) -> None:
        self.rules = rules
        self.weights_stay = weights_stay
        """Weights are where they were when the hooks were made, and known by that."""
        self.number = 0
        self.waiting: list[tuple[int, tuple[object, ...]]] = []
        """What is on its way: which one it was, and what it is known by."""
        self.known: dict[tuple[object, ...], int] = {}

    def take(
        self,
        kind: OperationKind,
        tensors: Sequence[Tensor],
        *,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        in_head: bool,
        in_python: bool,
        is_shared: Callable[[Storage], bool],
    ) -> tuple[list[Tensor], Handed]:
        """Those of an operation's tensors that stay, and where each of all lies."""
        rules = self.rules
        if rules.only_checkpoints:
            return list(tensors), ()
        if in_head and (rules.keeps_loss or (rules.keeps_output_layer and kind in PRODUCTS)):
            return list(tensors), ()
        handed: list[Away | None] = []
        for tensor in tensors:
            self.number += 1
            away = None
            if not self._stays(kind, tensor, is_shared=is_shared(tensor.storage)):
                is_result = in_python or any(tensor is out for out in outputs)
                lies_across = _lies_across(kind, tensor, (*inputs[:3], *outputs[:1]))
                copied = self._is_copied(tensor, lies_across=lies_across)
                away = Away(tensor, copied=copied, is_result=is_result)
                away.is_turned = lies_across and rules.rows is not Rows.AS_THEY_LIE
                self._send(tensor)
            handed.append(away)
        stay = [tensor for tensor, away in zip(tensors, handed, strict=True) if away is None]
        return stay, tuple(handed)

    def take_input(self, tensor: Tensor) -> Away:
        """The input of a layer that is computed again (torch/utils/checkpoint.py, ``_NoopSaveInputs``)."""
        self.number += 1
        return Away(tensor)

    def _stays(self, kind: OperationKind, tensor: Tensor, *, is_shared: bool) -> bool:
        rules = self.rules
        if rules.keeps_doubles and is_shared:
            # Every layer after the first finds it known: two products or more of each read it.
            return True
        if rules.keeps_doubles and _identity(tensor) in self.known:
            self.known[_identity(tensor)] = self.number
            return True
        if tensor.numel * tensor.dtype.num_bytes < rules.least_bytes:
            return True
        if not isinstance(tensor, Parameter):
            return False
        if tensor.packed is not None:
            return True  # bitsandbytes' function keeps its codes by itself.
        if rules.weights_kept is WeightsKept.ALL:
            return self.weights_stay
        return rules.weights_kept is WeightsKept.AS_THEY_ARE and kind not in PRODUCTS

    def _send(self, tensor: Tensor) -> None:
        if not self.rules.keeps_doubles:
            return
        while self.waiting and self.waiting[0][0] <= self.number - self.rules.in_flight:
            number, identity = self.waiting.pop(0)
            if self.known.get(identity) == number:
                del self.known[identity]
        self.waiting.append((self.number, _identity(tensor)))
        self.known[_identity(tensor)] = self.number

    def _is_copied(self, tensor: Tensor, *, lies_across: bool) -> bool:
        has_gaps = allocated_bytes(tensor.numel, tensor.dtype) < tensor.storage.num_bytes
        return has_gaps or (lies_across and self.rules.rows is not Rows.AS_THEY_LIE)


def _lies_across(kind: OperationKind, tensor: Tensor, heads: Sequence[Tensor]) -> bool:
    """Whether an operation keeps it as a transposed view: weights of products, heads of attention."""
    if kind in PRODUCTS:
        return tensor.by_column
    return (
        kind in ATTENTION_KERNELS and not tensor.by_head and any(tensor is each for each in heads)
    )


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """By address and format: whole views of a storage are the same."""
    storage: Storage = tensor.storage
    is_part = allocated_bytes(tensor.numel, tensor.dtype) < storage.num_bytes
    return (storage, tensor.dtype, id(tensor) if is_part else None)
