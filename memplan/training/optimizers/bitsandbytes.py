"""Optimizers of bitsandbytes 0.50 (bitsandbytes/optim/optimizer.py).

32-bit states are fp32 whatever the parameter is. 8-bit ones are bytes with a scale for each 256 and a
map of 256 values that all tensors share; tensors below ``min_8bit_size`` elements have fp32 states, and
embeddings only where ``GlobalOptimManager`` was told so (``StableEmbedding`` does it, ``nn.Embedding``
does not): ``embeddings_32bit``. Paged states are in managed memory from 100,000 elements on; scales and
maps are on the GPU.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import (
    Made,
    OptimizerRow,
    OptionValue,
    Place,
    Script,
    Stepped,
    TensorRole,
    Writer,
)
from memplan.units import ceil_div

BLOCK = 256
"""Elements that share a scale."""
MAP_VALUES = 256
PAGED_FROM = 100_000
"""Elements from which a state is paged (``get_state_buffer``: 1e5)."""
SOURCE = "bitsandbytes 0.50.2, bitsandbytes/optim/optimizer.py"


def is_8bit(script: Script, tensor: Stepped) -> bool:
    """Whether a tensor's states are bytes in an 8-bit optimizer."""
    if tensor.role is TensorRole.EMBEDDING and script.flag("embeddings_32bit"):
        return False
    return tensor.numel >= script.number("min_8bit_size")


def _place(tensor: Stepped, *, paged: bool) -> Place:
    return Place.MANAGED if paged and tensor.numel >= PAGED_FROM else Place.GPU


def states_32bit(num_states: int, *, paged: bool) -> Writer:
    """fp32 states; AdEMAMix's first is one tensor of two."""

    def init(script: Script, tensor: Stepped) -> None:
        place = _place(tensor, paged=paged)
        for name, copies in _buffers(num_states):
            script.state(name, copies * tensor.numel, DType.FP32, place=place)

    return init


def states_8bit(num_states: int, *, paged: bool) -> Writer:
    """Bytes and their scales, maps with the first."""
    whole = states_32bit(num_states, paged=paged)

    def init(script: Script, tensor: Stepped) -> None:
        if not is_8bit(script, tensor):
            whole(script, tensor)
            return
        place, blocks = _place(tensor, paged=paged), ceil_div(tensor.numel, BLOCK)
        buffers = _buffers(num_states)
        for number in range(1, len(buffers) + 1):
            script.shared(f"qmap{number}", MAP_VALUES, DType.FP32)
        scales = [(f"absmax{name[-1]}", copies * blocks) for name, copies in buffers]
        codes = [(name, copies * tensor.numel) for name, copies in buffers]
        # AdEMAMix makes its scales first.
        for name, numel in scales if num_states == ADEMAMIX else ():
            script.state(name, numel, DType.FP32)
        for name, numel in codes:
            script.state(name, numel, DType.UINT8, place=place)
        for name, numel in scales if num_states != ADEMAMIX else ():
            script.state(name, numel, DType.FP32)

    return init


ADEMAMIX = 3
"""States of AdEMAMix: two averages of the gradient in one buffer, and one of its square."""


def _buffers(num_states: int) -> list[tuple[str, int]]:
    """Names of the buffers and how many states each holds."""
    if num_states == ADEMAMIX:
        return [("state1", 2), ("state2", 1)]
    return [(f"state{number}", 1) for number in range(1, num_states + 1)]


def no_bf16_kernel(script: Script, tensor: Stepped) -> str:
    """RMSprop's 32-bit kernels are of fp32 and fp16 gradients alone (backends/cuda/ops.py, ``str2optimizer32bit``)."""
    is_narrow = "min_8bit_size" in script.options and is_8bit(script, tensor)
    if tensor.dtype is not DType.BF16 or is_narrow:
        return ""
    whose = " for tensors below min_8bit_size" if "min_8bit_size" in script.options else ""
    return (
        f"bitsandbytes has no RMSprop of bf16 gradients{whose}; choose fp32 weights, or bnb-adamw"
    )


def _row(
    num_states: int,
    bits: int,
    *,
    paged: bool = False,
    lacks: Callable[[Script, Stepped], str] | None = None,
) -> OptimizerRow:
    make = states_8bit if bits == BITS else states_32bit
    own: dict[str, OptionValue] = {"min_8bit_size": 4096, "embeddings_32bit": False}
    words = f"{num_states} x uint8 with an fp32 scale for each {BLOCK}"
    if bits != BITS:
        words = f"{num_states} x fp32"
    return OptimizerRow(
        init=make(num_states, paged=paged),
        made=Made.EACH,
        options=own if bits == BITS else {},
        words=f"{words}, in managed memory" if paged else words,
        lacks=lacks,
        source=SOURCE,
    )


BITS = 8

ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.BNB_ADAMW: _row(2, 32),
    Optimizer.BNB_ADAMW_8BIT: _row(2, 8),
    Optimizer.BNB_PAGED_ADAMW: _row(2, 32, paged=True),
    Optimizer.BNB_PAGED_ADAMW_8BIT: _row(2, 8, paged=True),
    Optimizer.BNB_LION: _row(1, 32),
    Optimizer.BNB_LION_8BIT: _row(1, 8),
    Optimizer.BNB_PAGED_LION: _row(1, 32, paged=True),
    Optimizer.BNB_PAGED_LION_8BIT: _row(1, 8, paged=True),
    Optimizer.BNB_ADEMAMIX: _row(3, 32),
    Optimizer.BNB_ADEMAMIX_8BIT: _row(3, 8),
    Optimizer.BNB_PAGED_ADEMAMIX: _row(3, 32, paged=True),
    Optimizer.BNB_PAGED_ADEMAMIX_8BIT: _row(3, 8, paged=True),
    Optimizer.BNB_RMSPROP: _row(1, 32, lacks=no_bf16_kernel),
    Optimizer.BNB_RMSPROP_8BIT: _row(1, 8, lacks=no_bf16_kernel),
}
