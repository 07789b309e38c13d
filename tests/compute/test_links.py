"""Collectives' times against the formulas that NCCL's own model has, with round rates."""

import pytest

from memplan.compute.links import collective_seconds
from memplan.errors import InputError
from memplan.hardware.network import (
    BASE_S,
    FIFTH_BASE_S,
    FIFTH_HOP_S,
    HOP_S,
    NODE_HOP_S,
    Network,
    network_of,
)
from memplan.sources.cards.catalog import load_gpu
from memplan.training.splitting.exchange import ExchangeKind, Ranks

FAST = Network(
    within_node=400e9, between_nodes=50e9, to_host=50e9, to_host_alone=50e9, gpus_per_node=8
)
SLOW_INSIDE = Network(
    within_node=10e9, between_nodes=50e9, to_host=50e9, to_host_alone=50e9, gpus_per_node=8
)
N = 8_000_000_000
"""Bytes of a message."""
ONCE = (ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER, ExchangeKind.BROADCAST)


@pytest.mark.parametrize(
    ("ranks", "hops", "node_hops", "seconds"),
    [
        pytest.param(Ranks(8), 7, 0, N * 7 / 8 / 400e9, id="a node"),
        pytest.param(Ranks(4, 2), 3, 0, N * 3 / 4 / 400e9, id="every second of a node"),
        pytest.param(Ranks(32), 28, 4, N * 31 / 32 / 400e9, id="four nodes, eight cards each"),
        pytest.param(Ranks(4, 8), 0, 4, N * 3 / 4 / 50e9, id="one of each node"),
        pytest.param(Ranks(4, 4), 2, 2, N * 3 / 4 / 100e9, id="two of each node"),
        pytest.param(Ranks(5, 4), 2, 3, N * 4 / 5 / 100e9, id="a last node with one"),
    ],
)
def test_a_ring_passes_a_message_on(
    ranks: Ranks, hops: int, node_hops: int, seconds: float
) -> None:
    expected = BASE_S + hops * HOP_S + node_hops * NODE_HOP_S + seconds
    for kind in ONCE:
        assert collective_seconds(kind, N, ranks, FAST) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "hops", "node_hops", "rate"),
    [
        pytest.param(Ranks(8), 14, 0, 400e9, id="a node"),
        pytest.param(Ranks(32), 14, 4, 400e9, id="a tree over four nodes: twice the logarithm"),
        pytest.param(Ranks(16, 8), 0, 8, 50e9, id="one of each of sixteen nodes"),
    ],
)
def test_an_all_reduce_goes_round_twice(
    ranks: Ranks, hops: int, node_hops: int, rate: float
) -> None:
    moved = 2 * N * (ranks.degree - 1) / ranks.degree / rate
    expected = BASE_S + hops * HOP_S + node_hops * NODE_HOP_S + moved
    found = collective_seconds(ExchangeKind.ALL_REDUCE, N, ranks, FAST)
    assert found == pytest.approx(expected, rel=1e-12)


def test_all_to_all_sends_what_is_for_other_nodes_by_the_network() -> None:
    def seconds(ranks: Ranks, network: Network = FAST) -> float:
        return collective_seconds(ExchangeKind.ALL_TO_ALL, N, ranks, network)

    assert seconds(Ranks(8)) == pytest.approx(BASE_S + HOP_S + N * 7 / 8 / 400e9, rel=1e-12)
    assert seconds(Ranks(16)) == pytest.approx(BASE_S + NODE_HOP_S + N / 2 / 50e9, rel=1e-12)
    assert seconds(Ranks(4, 4)) == pytest.approx(BASE_S + NODE_HOP_S + N / 2 / 50e9, rel=1e-12)
    slow = seconds(Ranks(16), SLOW_INSIDE)
    assert slow == pytest.approx(BASE_S + NODE_HOP_S + N / 10e9, rel=1e-12)


def test_one_sends_to_the_next_and_nobody_to_himself() -> None:
    inside, across = (
        collective_seconds(ExchangeKind.SEND, N, ranks, FAST) for ranks in (Ranks(2), Ranks(2, 8))
    )
    assert inside == pytest.approx(BASE_S + N / 400e9, rel=1e-12)
    assert across == pytest.approx(BASE_S + N / 50e9, rel=1e-12)
    assert all(collective_seconds(kind, N, Ranks(1), FAST) == 0 for kind in ExchangeKind)


def test_which_ranks_are_of_several_nodes() -> None:
    assert [FAST.nodes_of(*each) for each in ((8, 1), (4, 2), (9, 1), (2, 8), (24, 1), (3, 16))] == [
        1, 1, 2, 2, 3, 3,
    ]  # fmt: skip
    assert [FAST.crosses(*each) for each in ((8, 1), (4, 2), (9, 1), (2, 8))] == [
        False, False, True, True,
    ]  # fmt: skip
    assert SLOW_INSIDE.rate(16, 1) == 10e9


@pytest.mark.parametrize(
    ("gpu", "within", "between", "to_host"),
    [
        # Nominal rates of data sheets [GB/s], and what of each is reached.
        pytest.param("a100-80gb", 0.8 * 300, 0.8 * 25, 0.85 * 31.5 / 2, id="NVLink 3, two to a link of PCIe 4"),
        pytest.param("h100", 0.8 * 450, 0.8 * 50, 0.85 * 63, id="NVLink 4, PCIe 5"),
        pytest.param("v100-32gb", 0.8 * 150, 0.8 * 12.5, 0.85 * 15.75, id="before nodes of eight cards"),
        pytest.param("rtx4090", 0.45 * 31.5, 0.8 * 12.5, 0.85 * 31.5, id="no link: through the host"),
        pytest.param(None, 0.45 * 31.5, 0.8 * 25, 0.85 * 31.5, id="nothing known"),
    ],
)  # fmt: skip
def test_links_of_cards(gpu: str | None, within: float, between: float, to_host: float) -> None:
    found = network_of(load_gpu(gpu) if gpu else None, gpus_per_node=8)
    rates = (found.within_node, found.between_nodes, found.to_host)
    assert [each / 1e9 for each in rates] == pytest.approx([within, between, to_host])
    assert found.is_switched is (within > 0.45 * 31.5)


def test_a_known_network_takes_the_usual_ones_place() -> None:
    found = network_of(load_gpu("h100"), gpus_per_node=4, between_nodes=10e9)
    assert (found.between_nodes, found.gpus_per_node) == (8e9, 4)
    with pytest.raises(InputError, match="above 0"):
        network_of(None, gpus_per_node=8, between_nodes=0)


def test_a_narrow_upper_network_slows_what_crosses_it() -> None:
    """Beyond 32 nodes alone."""
    wide, narrow = (
        network_of(load_gpu("h100"), gpus_per_node=8, oversubscription=each) for each in (1.0, 4.0)
    )
    for ranks, factor in ((Ranks(256), 1.0), (Ranks(512), 4.0), (Ranks(64, 8), 4.0)):
        assert wide.between(*ranks) == factor * narrow.between(*ranks)
    kind = ExchangeKind.ALL_GATHER
    there, here = (collective_seconds(kind, 10**10, Ranks(64, 8), each) for each in (narrow, wide))
    assert there > 3 * here


def test_switches_between_nodes_add_up_where_they_are_named() -> None:
    """NCCL's author says 80 GB/s with four cards of 200 Gbit/s on eight A100, and 110 with eight, where NVLink decides (NCCL #320)."""
    # With eight cards NVLink decides, of which ``ACHIEVED`` is reached here: 9 % above his figure.
    for cards, said, off in ((4, 80e9, 0.003), (8, 110e9, 0.1)):
        rings, summed = (
            network_of(
                load_gpu("a100-80gb"), gpus_per_node=8, between_nodes=cards / 8 * 25e9, sums_between=each
            )
            for each in (False, True)
        )  # fmt: skip
        found = collective_seconds(ExchangeKind.ALL_REDUCE, N, Ranks(256), summed)
        assert found == pytest.approx(N / said, rel=off)
        assert found <= collective_seconds(ExchangeKind.ALL_REDUCE, N, Ranks(256), rings)
        for kind, ranks in (
            (ExchangeKind.ALL_GATHER, Ranks(256)),
            (ExchangeKind.ALL_REDUCE, Ranks(8)),
        ):
            assert collective_seconds(kind, N, ranks, summed) == collective_seconds(
                kind, N, ranks, rings
            )


def test_fifth_nvlink_has_latencies_of_its_own() -> None:
    """Small gathers of a B200's node take 87 microseconds, of an H100's 32."""
    small = {
        name: collective_seconds(
            ExchangeKind.ALL_GATHER, 8, Ranks(8), network_of(load_gpu(name), gpus_per_node=8)
        )
        for name in ("h100", "b200")
    }
    assert small["h100"] == pytest.approx(BASE_S + 7 * HOP_S, rel=2e-6)
    assert small["b200"] == pytest.approx(FIFTH_BASE_S + 7 * FIFTH_HOP_S)


def test_islands_of_several_nodes() -> None:
    """NVL72: 64 ranks of eight nodes reach one another by NVLink, 144 by the network."""
    network = network_of(load_gpu("gb200"), gpus_per_node=4)
    assert network.rate(64, 1) == network.within_node
    assert not network.crosses(8, 8)
    assert network.nodes_of(144, 1) == 2
    assert network.rate(2, 72) == network.between_nodes


def test_switches_add_up_large_all_reduces_of_five_and_more() -> None:
    """Bus bandwidths that NCCL's users and makers measured on H100: 370 GB/s up to four GPUs and without switches, 420 to 480 with five to
    eight (NCCL #1455, nccl-tests #212), 845 on eight B300 (NCCL #2140); rings for what is small, and for scatters."""

    def bus(
        gpu: str, degree: int, size: int = N, kind: ExchangeKind = ExchangeKind.ALL_REDUCE
    ) -> float:
        network = network_of(load_gpu(gpu), gpus_per_node=8)
        rounds = 2 if kind is ExchangeKind.ALL_REDUCE else 1
        return (
            rounds
            * size
            * (degree - 1)
            / degree
            / collective_seconds(kind, size, Ranks(degree), network)
            / 1e9
        )

    for degree, measured in ((2, 370), (4, 370), (5, 420), (6, 440), (7, 460), (8, 480)):
        assert bus("h100", degree) == pytest.approx(measured, rel=0.04)
    assert bus("b300", 8) == pytest.approx(845, rel=0.1)
    assert bus("h100", 8, kind=ExchangeKind.REDUCE_SCATTER) == pytest.approx(370, rel=0.04)
    assert bus("a100-80gb", 8) == pytest.approx(235, rel=0.04)
    small = 2**20
    h100 = network_of(load_gpu("h100"), gpus_per_node=8)
    assert collective_seconds(ExchangeKind.ALL_REDUCE, small, Ranks(8), h100) == pytest.approx(
        BASE_S + 14 * HOP_S + 2 * small * 7 / 8 / h100.within_node
    )
