"""Products, bandwidths, launches, copies and collectives, timed on the card that is here."""

import os
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers

from memplan.compute.rates import Rates, rates_of
from memplan.errors import UsageError
from memplan.estimator.time.calibration import Calibration, Part
from memplan.fast_dataclass import dataclass
from memplan.hardware.network import Network, network_of
from memplan.sources.cards.catalog import load_gpu
from memplan.training.splitting.exchange import ExchangeKind
from memplan.verify.node_timing import (
    HOST_CONFIG,
    HOST_PASSES_S,
    HOST_TOKENS,
    Timed,
    adam_said,
    calibration_of,
    collective_said,
    copied_said,
    moved_said,
    product_said,
)
from memplan.verify.on_torch.card import driver_version, has_card
from memplan.verify.on_torch.processes import leave, rank_and_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of what is timed; a layer of Llama 8B and its tokens, unless a test wants less."""

    tokens: int = 4096
    hidden: int = 4096
    queries: int = 6144
    """With keys and values."""
    width: int = 14336
    adam_weights: int = 100_000_000
    copied_bytes: int = 1 << 28
    collective_bytes: int = 1 << 28
    host_repeats: int = 25
    least_s: float = 4.0
    """So long large products run: a card's limit of power shows after a second or two."""


USUAL = Sizes()
PASSES = 6
"""Element-wise passes over a layer's widest tensor: with them a fourth of the layer's time is reading and writing, as in a step."""
REPEATS = 5


class Stopwatch:
    """Time on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def settle(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median(self, run: Callable[[], object], repeats: int = REPEATS) -> float:
        """The median of some runs, after one that is not counted [s]."""
        took = sorted(list(self.each(run, repeats))[1:])
        return took[len(took) // 2]

    def each(self, run: Callable[[], object], repeats: int) -> Iterator[float]:
        """Of each run, and of one before them [s]."""
        for _ in range(repeats + 1):
            self.settle()
            start = perf_counter()
            run()
            self.settle()
            yield perf_counter() - start


def timed_here(
    device: torch.device, rates: Rates, network: Network, sizes: Sizes = USUAL
) -> Iterator[Timed]:
    """Each as it is done."""
    watch = Stopwatch(device)
    yield from _layer(watch, rates, sizes)
    yield _launches(watch, sizes)
    yield from _offload(watch, network, sizes)
    if dist.is_initialized() and dist.get_world_size() > 1:
        yield from _collectives(watch, network, sizes)


def _layer(watch: Stopwatch, rates: Rates, sizes: Sizes) -> Iterator[Timed]:
    """A layer's products forward and backward, and passes over its tensors, again and again until the card is warm."""
    m, h = sizes.tokens, sizes.hidden
    shapes = ((sizes.queries, h), (h, h), (2 * sizes.width, h), (h, sizes.width))
    operands = [_operands(watch.device, m, n, k) for n, k in shapes]

    def products() -> None:
        for x, weight, gradient in operands:
            torch.mm(x, weight.t())
            torch.mm(gradient, weight)
            torch.mm(gradient.t(), x)

    said = sum(
        product_said(*each, rates) for n, k in shapes for each in ((m, n, k), (m, k, n), (n, k, m))
    )
    repeats = max(REPEATS, int(sizes.least_s / said)) if sizes.least_s else REPEATS
    took = sorted(list(watch.each(products, repeats))[repeats // 2 :])
    yield Timed(Part.COMPUTE, "products of a layer", took[len(took) // 2], said)
    wide = torch.ones(m, sizes.width, dtype=torch.bfloat16, device=watch.device)
    out = torch.empty_like(wide)

    def passes() -> None:
        for _ in range(PASSES):
            torch.mul(wide, wide, out=out)

    said = PASSES * moved_said(2 * wide.numel() * wide.element_size(), rates)
    yield Timed(Part.COMPUTE, "passes over a layer's tensors", watch.median(passes), said)


def _operands(
    device: torch.device, m: int, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(m, k, device=device, dtype=torch.bfloat16),
        torch.randn(n, k, device=device, dtype=torch.bfloat16),
        torch.randn(m, n, device=device, dtype=torch.bfloat16),
    )


def _launches(watch: Stopwatch, sizes: Sizes) -> Timed:
    """A model so small that the device has done each kernel before the next one is asked for."""
    config = transformers.AutoConfig.for_model(**HOST_CONFIG)
    with watch.device:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        tokens = torch.ones(1, HOST_TOKENS, dtype=torch.long)
    model = model.to(torch.bfloat16).train()

    def passes() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    took = watch.median(passes, sizes.host_repeats)
    return Timed(Part.HOST, "asking for a small model's kernels", took, HOST_PASSES_S)


def _offload(watch: Stopwatch, network: Network, sizes: Sizes) -> Iterator[Timed]:
    has_card = watch.device.type == "cuda"
    there = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=watch.device)
    here = torch.empty(sizes.copied_bytes, dtype=torch.uint8, pin_memory=has_card)

    def copies() -> None:
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)

    said = 2 * copied_said(sizes.copied_bytes, network)
    yield Timed(Part.OFFLOAD, "copies to the host and back", watch.median(copies), said)
    weight = torch.nn.Parameter(torch.ones(sizes.adam_weights))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    said = adam_said(sizes.adam_weights, network)
    yield Timed(Part.OFFLOAD, "AdamW on the CPUs", watch.median(optimizer.step), said)


def _collectives(watch: Stopwatch, network: Network, sizes: Sizes) -> Iterator[Timed]:
    ranks = dist.get_world_size()
    whole = torch.ones(sizes.collective_bytes // 2 // ranks * ranks, dtype=torch.bfloat16).to(
        watch.device
    )
    own = whole[: whole.numel() // ranks].clone()
    runs: tuple[tuple[ExchangeKind, Callable[[], object]], ...] = (
        (ExchangeKind.ALL_REDUCE, lambda: dist.all_reduce(whole)),
        (ExchangeKind.ALL_GATHER, lambda: dist.all_gather_into_tensor(whole, own)),
        (ExchangeKind.REDUCE_SCATTER, lambda: dist.reduce_scatter_tensor(own, whole)),
    )
    num_bytes = whole.numel() * whole.element_size()
    for kind, run in runs:
        said = collective_said(kind, num_bytes, ranks, network)
        yield Timed(Part.LINKS, kind.value, watch.median(run), said)


class NodeTimes(NamedTuple):
    """What this node's operations took, and what that says of every setup there."""

    timed: tuple[Timed, ...]
    calibration: Calibration


def node_times(date: str) -> NodeTimes | None:
    """Of the card that is here, and of all that torchrun started processes for; None on a rank that is not the one to speak.

    Raises ``UsageError`` without a card, and ``GpuNotFoundError`` for one that the catalog lacks.
    """
    if not has_card():
        msg = "calibrate: there is no GPU here: run it on the node that is to be measured"
        raise UsageError(msg)
    rank, ranks = rank_and_size() or (0, 1)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    card = load_gpu(torch.cuda.get_device_name(device))
    if ranks > 1:
        dist.init_process_group("nccl")
    try:
        timed = tuple(timed_here(device, rates_of(card), network_of(card, gpus_per_node=here)))
    finally:
        leave()
    if rank:
        return None
    calibration = calibration_of(
        timed, gpu=card.gpu_id, date=date, driver=driver_version(), torch=str(torch.__version__)
    )
    return NodeTimes(timed, calibration)
