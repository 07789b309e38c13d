"""What it takes the host to ask for a step's kernels: Python, torch's dispatcher, autograd, the launch.

Kernels are asked for ahead of the GPU. Where asking takes longer than running them, as in small models and
short micro-batches, the host decides how long a step takes. What each kind of call takes was measured apart from
any GPU, as CPU time of PyTorch 2.13 and transformers 5.23 on stub libraries whose kernels do nothing
(``tests/data/host_times.jsonl``): six kinds of models, two depths, with and without checkpointing, autocast, eager
attention, DDP, FSDP2, DeepSpeed. A GPU machine's host is slower than that CPU, and a launch is one.
"""

from collections.abc import Mapping
from typing import NamedTuple

from memplan.training.choices import ZeroStage
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


class HostPrices(NamedTuple):
    """What one of each takes the host [s]."""

    start: float
    """A forward pass, beside its layers: masks, positions, the loss."""
    view: float
    kernel: float
    """In Python: an element-wise kernel, a norm, a copy, its module's share included."""
    product: float
    """A product of matrices, the module that it is in included."""
    attention: float
    alias: float
    """In autograd's thread: what makes no gradient of its own."""
    kernel_back: float
    product_back: float
    """Each of them."""
    attention_back: float
    sum_back: float
    """Of two gradients."""
    checkpoint: float
    """Entering a checkpointed layer: hooks, the random generators' states."""
    checkpoint_back: float
    """Running it again."""
    saved: float
    """A tensor that autograd would keep and checkpointing lets go."""
    saved_back: float
    """Its being made again, and handed over."""
    compiled: float
    """A kernel of inductor's code."""
    region: float
    """Entering a compiled region: its guards."""


CPU_PRICES = HostPrices(
    start=500e-6, view=2e-6, kernel=7.6e-6, product=30e-6, attention=43e-6,
    alias=15e-6, kernel_back=8e-6, product_back=19.5e-6, attention_back=50e-6, sum_back=0.0,
    checkpoint=214e-6, checkpoint_back=168e-6, saved=8e-6, saved_back=22e-6,
    compiled=4e-6, region=50e-6,
)  # fmt: skip
"""On the CPU that they were measured on: with these, 120 passes are told to 5 % in the median."""
GPU_MACHINE = 2.5
"""How many times slower a GPU machine's host is, launches included: chains of products, sums and norms take an
H100's 263 microseconds and this CPU 105 (``launch_chain`` of ``tests/measured/h100_rates.json``)."""


def scaled(prices: HostPrices, factor: float) -> HostPrices:
    """The prices on a host that is so many times slower."""
    return HostPrices(*(factor * each for each in prices))


HOST = scaled(CPU_PRICES, GPU_MACHINE)


class EnginePrices(NamedTuple):
    """What an engine's own code takes the host beside the model's, on the same CPU [s]."""

    unit: float = 0.0
    """Gathering a layer's weights in the forward pass."""
    parameter: float = 0.0
    """More for each weight in it."""
    unit_back: float = 0.0
    parameter_back: float = 0.0
    is_rerun: bool = False
    """What the forward pass takes, recomputation takes again."""
    step: float = 0.0
    """In the optimizer's step, for each weight."""


PLAIN = EnginePrices()
_ZERO = EnginePrices(parameter_back=45e-6, step=20e-6)
_PRICES: Mapping[tuple[Engine, ZeroStage | None], EnginePrices] = {
    (Engine.DEEPSPEED, ZeroStage.OPTIMIZER): _ZERO,
    (Engine.DEEPSPEED, ZeroStage.GRADIENTS): _ZERO,
    (Engine.DEEPSPEED, ZeroStage.PARAMETERS): EnginePrices(
        parameter=380e-6, parameter_back=330e-6, is_rerun=True, step=100e-6
    ),
    (Engine.FSDP, None): EnginePrices(
        unit=600e-6, parameter=40e-6, unit_back=700e-6, parameter_back=50e-6, step=18e-6
    ),
    (Engine.FSDP1, None): EnginePrices(unit=600e-6, unit_back=700e-6),
}
"""DDP's hooks could not be told from nothing. DeepSpeed's stage 3 fetches and lets go each module in Python.
FSDP1's flat parameter costs what FSDP2's units do, its weights apart: an assumption."""
_STEPS: Mapping[Optimizer, float] = {Optimizer.ADAMW_FOREACH: 21e-6}
STEP = 6e-6
"""An optimizer's step for each weight on a GPU machine's host: fused AdamW and SGD; foreach makes lists of its
temporaries (``optimizer`` of ``tests/measured/h100_rates.json``)."""


def engine_prices(setup: TrainingSetup) -> EnginePrices:
    """Of a setup's engine."""
    engine = setup.chosen_engine
    if setup.data_parallel == 1 and engine is Engine.DDP:
        return PLAIN
    stage = setup.zero_stage if engine is Engine.DEEPSPEED else None
    return _PRICES.get((engine, stage), PLAIN)


def step_price(setup: TrainingSetup) -> float:
    """What the optimizer's step takes the host for each weight that is trained [s]."""
    return _STEPS.get(setup.optimizer, STEP) + GPU_MACHINE * engine_prices(setup).step
