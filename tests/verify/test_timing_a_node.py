"""What ``verify --calibrate`` times, on a CPU: each thing is run, and takes time; no figure is a card's.

Runs behind the tests on fake tensors, whose card autograd's engine does not know any more once it has run on a CPU.
"""

from importlib.util import find_spec

import pytest

from memplan.compute.rates import rates_of
from memplan.estimator.time.calibration import Part
from memplan.hardware.network import network_of
from memplan.sources.cards.catalog import load_gpu

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),  # of other people's code
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None,
        reason="torch and transformers are not installed: make verify",
    ),
]


def test_everything_is_timed_once() -> None:
    import torch

    from memplan.verify.on_torch.timing import Sizes, timed_here

    card = load_gpu("h100")
    sizes = Sizes(
        tokens=32, hidden=64, queries=96, width=128, adam_weights=1000, copied_bytes=1000,
        host_repeats=1, least_s=0.0,
    )  # fmt: skip
    found = list(
        timed_here(torch.device("cpu"), rates_of(card), network_of(card, gpus_per_node=1), sizes)
    )
    assert [each.part for each in found] == [
        Part.COMPUTE, Part.COMPUTE, Part.HOST, Part.OFFLOAD, Part.OFFLOAD,
    ]  # fmt: skip
    assert all(each.measured_s > 0 and each.said_s > 0 for each in found)


def test_collectives_among_processes() -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from memplan.verify.on_torch.processes import leave
    from memplan.verify.on_torch.timing import Sizes, Stopwatch, _collectives

    card = load_gpu("h100")
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        sizes, network = Sizes(collective_bytes=1024), network_of(card, gpus_per_node=8)
        found = list(_collectives(Stopwatch(torch.device("cpu")), network, sizes))
    finally:
        leave()
    assert [each.words for each in found] == ["all-reduce", "all-gather", "reduce-scatter"]
    assert all(each.measured_s > 0 and each.said_s > 0 for each in found)
