"""Low-bit and offloaded AdamW of torchao 0.18 (torchao/optim).

A state of at least 4096 elements that blocks divide is codes, an fp32 scale for each block and a map of
its own; any other is in the parameter's format. The step is compiled for each shape: inductor makes the
new states in fp32, since their scales are found before they are written, and 4-bit codes as int64. On the CPU they
are compiled as well (its own tests run them there).
"""

from memplan.dtypes import DType
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import Made, OptimizerRow, Place, Script, Stepped
from memplan.training.optimizers.torch_rows import counted_moments

SMALLEST = 4096
MAPS = {8: 256, 4: 16}
"""Values of a map, by bits; fp8 has none."""
SOURCE = "torchao 0.18, torchao/optim"
_STATES = ("exp_avg", "exp_avg_sq")


def is_quantized(script: Script, tensor: Stepped) -> bool:
    """Whether blocks divide a tensor that is large enough (``_new_buffer``)."""
    return tensor.numel >= SMALLEST and tensor.numel % script.number("block_size") == 0


def _states(script: Script, tensor: Stepped, *, codes: DType, packed: int, map_values: int) -> None:
    for name in _STATES:
        if not is_quantized(script, tensor):
            script.state(name, tensor.numel, tensor.dtype)
            continue
        script.state(f"{name}.codes", tensor.numel // packed, codes)
        blocks = tensor.numel // script.number("block_size")
        script.state(f"{name}.scale", blocks, DType.FP32)
        if map_values:
            script.state(f"{name}.qmap", map_values, DType.FP32)


def states_8bit(script: Script, tensor: Stepped) -> None:
    """A byte for each element."""
    _states(script, tensor, codes=DType.UINT8, packed=1, map_values=MAPS[8])


def states_4bit(script: Script, tensor: Stepped) -> None:
    """A byte for two."""
    _states(script, tensor, codes=DType.UINT8, packed=2, map_values=MAPS[4])


def states_fp8(script: Script, tensor: Stepped) -> None:
    """A byte for each element, and no map."""
    _states(script, tensor, codes=DType.FP8, packed=1, map_values=0)


def _scales(script: Script, tensor: Stepped) -> None:
    blocks = tensor.numel // script.number("block_size")
    for name in _STATES:
        script.let(f"{name} scale", blocks, DType.FP32)


def update_8bit(script: Script, tensor: Stepped) -> None:
    """The new states in fp32."""
    if not is_quantized(script, tensor):
        return
    _scales(script, tensor)
    for name in _STATES:
        script.let(name, tensor.numel, DType.FP32)
    script.drop(*_STATES, *(f"{name} scale" for name in _STATES))


def update_4bit(script: Script, tensor: Stepped) -> None:
    """The same, and their codes before they are packed."""
    if not is_quantized(script, tensor):
        return
    _scales(script, tensor)
    for name in _STATES:
        script.let(name, tensor.numel, DType.FP32)
    for name in _STATES:
        script.let(f"{name} codes", tensor.numel, DType.INT64)
    for name in _STATES:
        script.drop(name, f"{name} codes", f"{name} scale")


def update_fp8(script: Script, tensor: Stepped) -> None:
    """The scales alone: what is divided by them is cast in the same kernel."""
    if is_quantized(script, tensor):
        _scales(script, tensor)
        script.drop(*(f"{name} scale" for name in _STATES))


def is_offloaded(tensor: Stepped) -> bool:
    """Whether ``CPUOffloadOptimizer`` takes a tensor to the CPU: not below ``minimal_size``."""
    return tensor.numel >= SMALLEST


def offloaded_states(script: Script, tensor: Stepped) -> None:
    """A page-locked copy and gradient, and AdamW's states there; small ones are fused AdamW's."""
    if not is_offloaded(tensor):
        counted_moments(script, tensor)
        return
    for name in ("copy", "gradient", *_STATES):
        script.state(name, tensor.numel, tensor.dtype, place=Place.HOST)


ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.TORCHAO_ADAMW_8BIT: OptimizerRow(
        init=states_8bit, update=update_8bit, made=Made.EACH, options={"block_size": 256}, any_device=True,
        words="2 x uint8 with an fp32 scale for each block", source=f"{SOURCE}/subclass_8bit.py",
    ),
    Optimizer.TORCHAO_ADAMW_4BIT: OptimizerRow(
        init=states_4bit, update=update_4bit, made=Made.EACH, options={"block_size": 128}, any_device=True,
        words="2 x half a byte with an fp32 scale for each block",
        source=f"{SOURCE}/subclass_4bit.py",
    ),
    Optimizer.TORCHAO_ADAMW_FP8: OptimizerRow(
        init=states_fp8, update=update_fp8, made=Made.EACH, options={"block_size": 256},
        least_capability=(8, 9),  # on older cards inductor leaves the casts to eager code (recorded)
        words="2 x fp8 with an fp32 scale for each block", source=f"{SOURCE}/subclass_fp8.py",
    ),
    Optimizer.TORCHAO_CPU_OFFLOAD: OptimizerRow(
        init=offloaded_states, words="2 x {dtype} of the small ones, all others' in CPU RAM,",
        options={"offload_gradients": False}, single_gpu=True, on_cpu=True,
        source=f"{SOURCE}/cpu_offload.py, CPUOffloadOptimizer with fused AdamW",
    ),
}  # fmt: skip
