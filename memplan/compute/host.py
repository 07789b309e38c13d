"""What it takes the host to ask for a step's kernels: Python, torch's dispatcher, autograd, the launch.

Kernels are asked for ahead of the GPU. Where asking takes longer than running them, as in small models and
short micro-batches, the host decides how long a step takes. What each kind of call takes was measured apart from
any GPU, as CPU time of PyTorch 2.13 and transformers 5.23 on stub libraries whose kernels do nothing
(``tests/data/host_times.jsonl``): six kinds of models, two depths, with and without checkpointing, autocast, eager
attention, DDP, FSDP2, DeepSpeed. Hosts differ: how many times slower than that CPU one is, is the machine's
(``HostSpeed``).
"""

from collections.abc import Mapping
from enum import StrEnum
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


class HostSpeed(StrEnum):
    """How fast a machine's host asks for kernels."""

    FAST = "fast"
    USUAL = "usual"
    SLOW = "slow"


class HostFactors(NamedTuple):
    """How many times as long as that CPU a host takes, launches included: what is expected, and both ends."""

    low: float
    expected: float
    high: float


HOST_FACTORS: Mapping[HostSpeed, HostFactors] = {
    HostSpeed.FAST: HostFactors(0.5, 0.7, 0.9),
    HostSpeed.USUAL: HostFactors(0.7, 1.0, 4.0),
    HostSpeed.SLOW: HostFactors(1.6, 2.5, 4.0),
}
"""Slow are shared machines in a cloud: chains of products, sums and norms take the host of an H100 263 microseconds, of an
H200 175 and this CPU 105 (``launch_chain`` of ``tests/measured/h100_rates.json`` and ``h200_rates.json``). Machines of one's own are as fast as
this CPU (Qwen's README, an A100 with steps of 256 tokens; the half of its rows that figures may be taken from says 0.9 to
1.2). Fast: a desktop's clock of 5.5 GHz beside a server's of 3.5 to 4; an assumption. Nobody says which host he has: the usual one's
range is wide."""
GIVEN_HOST = (0.8, 1.25)
"""The range of a host whose factor is given: what the same work differs by from step to step (``TIME_WITHIN`` of
``tests/measured/test_cards.py``)."""


def host_factors(host: "HostSpeed | float") -> HostFactors:
    """Of a kind of host, or of one that takes so many times as long as the CPU of the prices.

    >>> host_factors(HostSpeed.SLOW).expected, host_factors(2.0)
    (2.5, HostFactors(low=1.6, expected=2.0, high=2.5))
    """
    if isinstance(host, HostSpeed):
        return HOST_FACTORS[host]
    low, high = GIVEN_HOST
    return HostFactors(low * host, host, high * host)


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
_ALONE: Mapping[tuple[Engine, ZeroStage | None], EnginePrices] = {
    (Engine.DEEPSPEED, ZeroStage.PARAMETERS): EnginePrices(
        parameter=350e-6, parameter_back=295e-6, is_rerun=True, step=80e-6
    ),
}
"""On one GPU, where stage 3 gathers nothing (``num_partitions == 1``, deepspeed/runtime/zero/partition_parameters.py): its hooks around each
module and its trace are as long as with eight, 0.92 of it forward and 0.84 to 1.0 backward (DeepSpeed 0.19.8 in ``tests/data/host_times.jsonl``, where
``world`` is 1)."""
"""DDP's hooks could not be told from nothing. DeepSpeed's stage 3 fetches and lets go each module in Python.
FSDP1's flat parameter costs what FSDP2's units do, its weights apart: an assumption."""
_STEPS: Mapping[Optimizer, float] = {Optimizer.ADAMW_FOREACH: 8.4e-6}
STEP = 2.4e-6
"""An optimizer's step for each weight: fused AdamW and SGD; foreach makes lists of its temporaries (``optimizer`` of
``tests/measured/h100_rates.json``, 21 and 6 microseconds on a host that takes 2.5 times as long)."""


def engine_prices(setup: TrainingSetup) -> EnginePrices:
    """Of a setup's engine."""
    engine = setup.chosen_engine
    if setup.data_parallel == 1 and engine is Engine.DDP:
        return PLAIN
    stage = setup.zero_stage if engine is Engine.DEEPSPEED else None
    found = _PRICES.get((engine, stage), PLAIN)
    return _ALONE.get((engine, stage), found) if setup.data_parallel == 1 else found


def step_price(setup: TrainingSetup) -> float:
    """What the optimizer's step takes the host for each weight that is trained [s]."""
    return _STEPS.get(setup.optimizer, STEP) + engine_prices(setup).step
