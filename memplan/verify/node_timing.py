"""What a node's own operations take, beside what memplan says of them: factors for every setup there.

Each measurement is of something that memplan has a figure for; a part's factor is what all its measurements took over what was
said. Nothing here needs torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from memplan.compute.links import collective_seconds
from memplan.compute.products import Shape, product_seconds
from memplan.compute.rates import Rates
from memplan.dtypes import DType
from memplan.errors import InputError
from memplan.estimator.time.calibration import MOST_FACTOR, Calibration, Part
from memplan.hardware.network import Network
from memplan.training.splitting.exchange import ExchangeKind, Ranks

HOST_TOKENS = 128
HOST_CONFIG: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": HOST_TOKENS,
}  # fmt: skip
"""A model whose kernels are done sooner than the next ones are asked for."""
HOST_PASSES_S = 6303e-6
"""What a forward and a backward pass of it over so many tokens take the CPU of the prices, in bf16 with PyTorch's own attention [s]
(the first record of ``tests/data/host_times.jsonl``: 2,723 and 3,580 microseconds)."""
ADAM_BYTES = 28
"""Of fp32 AdamW for each weight: weight, gradient and two states are read, and all but the gradient written."""


class Timed(NamedTuple):
    """Something that was run, and what memplan says of it."""

    part: Part
    words: str
    measured_s: float
    said_s: float


def product_said(rows: int, columns: int, inner: int, rates: Rates) -> float:
    """A product in bf16 [s]."""
    shape = Shape(1, rows, columns, inner)
    rate = rates.rate_of(DType.BF16)
    return rates.kernel_s + product_seconds(
        shape, 2, rate, rates.bytes_per_s, rates.num_multiprocessors
    )


def moved_said(num_bytes: int, rates: Rates) -> float:
    """A kernel over whole tensors that reads and writes so much [s]."""
    return rates.kernel_s + num_bytes / rates.bytes_per_s


def copied_said(num_bytes: int, network: Network) -> float:
    """To the host or back, pinned [s]."""
    return num_bytes / network.to_host


def adam_said(num_weights: int, network: Network) -> float:
    """A step of AdamW on the CPUs, of so many weights in each process of a node [s]."""
    return num_weights * ADAM_BYTES * network.gpus_per_node / network.host_memory


def collective_said(kind: ExchangeKind, num_bytes: int, num_ranks: int, network: Network) -> float:
    """Among all ranks [s]."""
    return collective_seconds(kind, num_bytes, Ranks(num_ranks), network)


def calibration_of(
    timed: Iterable[Timed], *, gpu: str, date: str = "", driver: str = "", torch: str = ""
) -> Calibration:
    """What they say together: a part that nothing was measured of is as said.

    Raises ``InputError`` where a part is further from what was said than any machine of this kind is.

    >>> found = calibration_of(
    ...     [Timed(Part.COMPUTE, "a product", 1.2, 1.0), Timed(Part.COMPUTE, "a sum", 0.3, 0.5)], gpu="h100-sxm-80gb"
    ... )
    >>> found.compute, found.links
    (1.0, 1.0)
    """
    sums = {part: [0.0, 0.0] for part in Part}
    for each in timed:
        sums[each.part][0] += each.measured_s
        sums[each.part][1] += each.said_s
    factors = {part.value: took / said for part, (took, said) in sums.items() if said}
    for name, factor in factors.items():
        if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
            msg = f"calibrate: {name}: took {factor:.3g} times as long as said, which no {gpu} does: see whether the GPU is busy"
            raise InputError(msg)
    return Calibration(gpu=gpu, setup="", code="", date=date, driver=driver, torch=torch, **factors)
