"""What one run of a module asks of torch, call by call, and when its variables let tensors go.

Calls are seen where Python makes them (``__torch_function__``), above autograd and autocast: what those
add is the tape's to say. Every tensor has a number; a tensor that its last variable lets go of is a step
of its own, since what a frame still names is alive whatever reads it.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from memplan.model.traced import StepKind

READERS = (
    "torch.Tensor.item",
    "torch.Tensor.__bool__",
    "torch.Tensor.__int__",
    "torch.Tensor.__float__",
)
"""Calls that look at values."""
LEAF = "torch.Tensor.requires_grad_"
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


@dataclass
class SeenValue:
    """A tensor as it was in this run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    strided: bool
    parameter: str = ""
    input: str = ""


@dataclass
class SeenStep:
    """A step as it was in this run."""

    kind: StepKind
    name: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)


class Recorder(TorchFunctionMode):
    """Writes a run down."""

    def __init__(self, parameters: dict[int, str], *, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.autocast = autocast
        """Calls that ``torch.autocast`` casts for are made so."""
        self.values: list[SeenValue] = []
        self.steps: list[SeenStep] = []
        self.guesses: list[str] = []
        """Calls whose values the module looked at, which nobody knows here."""
        self._made_by: dict[int, str] = {}
        self.is_over = False
        """The module has returned: what goes now goes with its outputs."""
        self._parameters = parameters
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._kept_storages: list[Any] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a call and write it down where it makes a tensor."""
        del types
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        if name in READERS:
            return self._read(args[0])
        given_args, given_kwargs = args, kwargs
        if self.autocast is not None:
            given_args, given_kwargs = autocast_to(self.autocast, name, args, kwargs)
        if name == ATTENTION:
            out = laid_out_attention(*given_args, **given_kwargs)
        else:
            out = func(*given_args, **given_kwargs)
        made = list(tensors_in(out))
        if name.endswith("requires_grad.__set__") and args[1]:
            number = self.number(args[0])
            self.steps.append(SeenStep(StepKind.CALL, LEAF, (number,), (number,)))
        elif made and not name.endswith("__get__"):
            given = list(tensors_in((args, kwargs)))
            inputs = tuple(self.number(each) for each in given)
            settings = settings_of(args, kwargs)
            outputs = tuple(self.number(each) for each in made)
            self._made_by |= {id(each): name for each in made}
            self.steps.append(SeenStep(StepKind.CALL, name, inputs, outputs, settings))
        return out

    def _read(self, tensor: torch.Tensor) -> bool | int | float:
        """What a tensor without values is taken to hold: all of a batch alike, and nothing out of order."""
        made = self._made_by.get(id(tensor), "")
        self.guesses.append(made)
        if tensor.dtype is torch.bool:
            return made.endswith((".all", "torch.all"))
        return 0

    def number(self, tensor: torch.Tensor) -> int:
        """A tensor's number, given when it is first seen."""
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        number = len(self.values)
        self._numbers[id(tensor)] = number
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            # Kept, so that no other storage is given its address.
            self._storages[key] = len(self._storages)
            self._kept_storages.append(storage)
        self.values.append(
            SeenValue(
                tuple(tensor.shape), tensor.dtype, self._storages[key], not tensor.is_contiguous(),
                parameter=self._parameters.get(id(tensor), ""),
            )
        )  # fmt: skip
        weakref.finalize(tensor, self._let_go, id(tensor), number)
        return number

    def _let_go(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        if self.is_over:
            return
        if self.steps and self.steps[-1].kind is StepKind.FREE:
            self.steps[-1].inputs += (number,)
        else:
            self.steps.append(SeenStep(StepKind.FREE, inputs=(number,)))

    def border(self, kind: StepKind, module: str, given: Any) -> None:
        """A layer is called with these arguments, or returned this."""
        numbers = tuple(self.number(each) for each in tensors_in(given))
        self.steps.append(SeenStep(kind, module, numbers))


NARROWED = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "__matmul__", "einsum", "prelu",
    "scaled_dot_product_attention",
})  # fmt: skip
"""What autocast computes in 16 bits (torch 2.13, aten/src/ATen/autocast_mode.h,
``AT_FORALL_LOWER_PRECISION_FP``)."""
WIDENED = frozenset({
    "acos", "asin", "cosh", "cross_entropy", "cumprod", "cumsum", "exp", "expm1", "group_norm", "l1_loss",
    "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "mse_loss", "nll_loss", "norm",
    "pow", "__pow__", "prod", "reciprocal", "rsqrt", "smooth_l1_loss", "softmax", "softplus", "sum", "tan",
})  # fmt: skip
"""What it computes in fp32 (the same file, ``AT_FORALL_FP32`` and ``AT_FORALL_FP32_SET_OPT_DTYPE``)."""


def autocast_to(
    half: torch.dtype, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments as autocast hands them on."""
    short = name.rpartition(".")[2]
    target = half if short in NARROWED else torch.float32 if short in WIDENED else None
    if target is None:
        return args, kwargs

    def cast(found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return found.to(target) if found.dtype.is_floating_point else found
        if isinstance(found, (tuple, list)):
            return type(found)(map(cast, found))
        return found

    return tuple(map(cast, args)), {key: cast(each) for key, each in kwargs.items()}


def laid_out_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """What attention returns on a GPU: row after row, all heads of a row together."""
    del key, args, kwargs
    batch, heads, rows = query.shape[0], query.shape[-3], query.shape[-2]
    return query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)


def tensors_in(found: Any) -> Iterable[torch.Tensor]:
    """All tensors of arguments or results, in their order."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        for each in found.values():
            yield from tensors_in(each)
    elif isinstance(found, (tuple, list)):
        for each in found:
            yield from tensors_in(each)


def settings_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, object]:
    """Arguments that are no tensors, by position or name; formats by their names."""
    found: dict[str, object] = {}
    for position, each in enumerate(args):
        add_setting(found, str(position), each)
    for key, each in kwargs.items():
        add_setting(found, key, each)
    return found


def add_setting(found: dict[str, object], key: str, value: Any) -> None:
    """Note an argument as something that JSON can hold; tensors have places of their own."""
    if isinstance(value, torch.dtype):
        found[key] = str(value).removeprefix("torch.")
    elif isinstance(value, bool | int | float | str) or value is None:
        found[key] = value
    elif isinstance(value, (tuple, list)) and all(isinstance(each, int) for each in value):
        found[key] = list(value)
