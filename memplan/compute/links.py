"""The time of an exchange between ranks or with the host, from its size, its algorithm and its link.

A ring moves (d-1)/d of an all-gather's or a reduce-scatter's message through each of d ranks, and twice
that of an all-reduce's; each step of it has a latency. NCCL takes a tree in place of a long ring for small
all-reduces, whose latency grows with the logarithm, and lets the switches of NVLink add up large ones inside an island (NVLS): each GPU
then sends its message once in place of nearly twice. Where the switches between nodes add up as well (SHARP, NCCL's CollNet), each node
sends its sum once and gets everybody's once.
"""

from math import ceil, log2

from memplan.hardware.network import NODE_HOP_S, SUMMED_S, Network
from memplan.training.splitting.exchange import ExchangeKind, Ranks

LEAST_SUMMED_BYTES = 2 * 2**20
"""From which size NCCL lets NVLink's switches add up: 2 MiB on a node of eight H100, rings below (nccl-tests #309)."""
LEAST_SUMMED_RANKS = 5
"""And from how many GPUs it is faster: with two to four as fast as a ring, from five on 420, 440, 460 and 480 GB/s of bus bandwidth on H100,
where a ring has 370 (NCCL #1455; NVIDIA's own word on eight: nccl-tests #212)."""
_ROUNDS = {
    ExchangeKind.ALL_GATHER: 1, ExchangeKind.REDUCE_SCATTER: 1, ExchangeKind.ALL_REDUCE: 2,
    ExchangeKind.BROADCAST: 1, ExchangeKind.ALL_TO_ALL: 1,
}  # fmt: skip
"""How often a message goes round."""


def collective_seconds(
    kind: ExchangeKind, num_bytes: float, ranks: Ranks, network: Network
) -> float:
    """How long a collective takes by itself [s].

    >>> from memplan.hardware.network import network_of
    >>> network = network_of(None, gpus_per_node=8)
    >>> ring = collective_seconds(ExchangeKind.ALL_REDUCE, 10**9, Ranks(8), network)
    >>> round(ring * network.within_node / 10**9, 2)
    1.75
    """
    degree, stride = ranks
    if degree <= 1:
        return 0.0
    rate = network.rate(degree, stride)
    if kind is ExchangeKind.SEND:
        crosses = network.crosses(degree, stride)
        between = network.between(degree, stride) if crosses else network.within_node
        return network.base_s + num_bytes / between
    if kind is ExchangeKind.ALL_TO_ALL and network.crosses(degree, stride):
        # Each rank sends to every other by its own card.
        members = network.members(stride)
        far = num_bytes * (degree - members) / degree
        return (
            network.base_s
            + NODE_HOP_S
            + max(far / network.between(degree, stride), num_bytes / network.within_node)
        )
    rounds = _ROUNDS[kind]
    moved = rounds * num_bytes * (degree - 1) / degree
    ring_s = network.base_s + latency_seconds(kind, ranks, network) + moved / rate
    if kind is not ExchangeKind.ALL_REDUCE:
        return ring_s
    if is_summed_by_switches(num_bytes, ranks, network):
        return min(ring_s, SUMMED_S + num_bytes / (network.summed_share * network.within_node))
    if network.sums_between and network.crosses(degree, stride):
        return min(ring_s, summed_between_seconds(num_bytes, ranks, network))
    return ring_s


def summed_between_seconds(num_bytes: float, ranks: Ranks, network: Network) -> float:
    """An all-reduce that the switches between nodes add up [s].

    Each network card of a node sends and gets its share of the sum once, whatever lies above its switch; inside the node the message
    goes to the cards and comes back, which NVLink's switches do at once and links without them twice. On eight A100 with eight cards
    of 200 Gbit/s that is 110 GB/s, and 80 with four cards, by the word of NCCL's author (NCCL #320): NVLink decides, then the cards.

    >>> from memplan.hardware.network import network_of
    >>> from memplan.sources.cards.catalog import load_gpu
    >>> network = network_of(load_gpu("a100-80gb"), gpus_per_node=8, sums_between=True)
    >>> round(1e10 / summed_between_seconds(1e10, Ranks(64), network) / 1e9)
    120
    """
    members = min(ranks.degree, network.members(ranks.stride))
    sent_s = num_bytes / (members * network.between_nodes)
    within = network.summed_share * network.within_node or network.within_node / 2
    within_s = num_bytes / within if members > 1 else 0.0
    return network.base_s + SUMMED_S + 2 * NODE_HOP_S + max(sent_s, within_s)


def is_summed_by_switches(num_bytes: float, ranks: Ranks, network: Network) -> bool:
    """Whether NCCL leaves an all-reduce to the switches of NVLink."""
    has_switches = network.summed_share > 0 and not network.crosses(*ranks)
    return has_switches and ranks.degree >= LEAST_SUMMED_RANKS and num_bytes >= LEAST_SUMMED_BYTES


def latency_seconds(kind: ExchangeKind, ranks: Ranks, network: Network) -> float:
    """What the steps of a collective take beside moving bytes [s]."""
    degree, stride = ranks
    nodes = network.nodes_of(degree, stride)
    members = ceil(degree / nodes)
    if kind is ExchangeKind.ALL_TO_ALL:
        return network.hop_s
    ring = (degree - nodes) * network.hop_s + (nodes if nodes > 1 else 0) * NODE_HOP_S
    if kind is not ExchangeKind.ALL_REDUCE:
        return ring
    tree = 2 * ((members - 1) * network.hop_s + log2(nodes) * NODE_HOP_S)
    return min(2 * ring, tree)
