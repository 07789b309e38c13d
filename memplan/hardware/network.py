"""What joins GPUs, and GPUs to their host, as far as it takes time: rates and latencies.

References
----------
.. [1] S. Bekman, "Machine Learning Engineering Open Book", network/README.md: NVLink all-reduce reaches
   235 of 300 GB/s on A100 and 368 of 450 on H200; DGX H100 has 8 x 400 Gbit/s, AWS P4d 4 x 100.
.. [2] NCCL, src/graph/tuning.cc: ``baseLat``, ``hwLat`` of the Simple protocol.
"""

from memplan.errors import InputError
from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import GpuSpec

ACHIEVED = 0.80
"""Of a link's nominal rate, what collectives reach ([1]: 78 % on A100, 82 % on H200)."""
FIFTH_NVLINK = 0.70
"""The same of NVLink 5: 67 % in gathers and scatters, 74 % in all-reduces on a B200 (SimuMax 1.2,
configs/system/b200_bf16_ceperm.json)."""
THROUGH_HOST = 0.45
"""The same over PCIe: what GPUs without a link of their own send one another crosses the host's
memory."""
HOST_ACHIEVED = 0.85
"""Of PCIe's nominal rate, what pinned copies reach: 55 of 63 GB/s on an H100, and 45 where they go both ways
(``tests/measured/h100_rates.json``)."""
DEFAULT_PCIE = 31_500_000_000
"""PCIe 4, 16 lanes [bytes/s]."""
BASE_S = 8.4e-6
"""A collective's own, whatever its size [2]."""
HOP_S = 3.4e-6
"""From one GPU of a node to the next one of a ring [2]."""
NODE_HOP_S = 14e-6
"""From one node to the next [2]."""
FIFTH_BASE_S, FIFTH_HOP_S = 23e-6, 8.6e-6
"""The same of a node with NVLink 5, measured in training: gathers 23.1 and 9.2 microseconds, scatters 25.6 and 8.0, all-reduces 22.2 and
5.5 each way (SimuMax 1.2, configs/system/b200_bf16_ceperm.json, ``fixed_latency_us`` and ``latency_us``)."""
SUMMED_S = 25e-6
"""An all-reduce's latency where NVLink's switches add up [2, ``hwLat`` of NVLS]."""
_SUMMED: tuple[tuple[tuple[int, int], float], ...] = (((10, 0), 0.695), ((9, 0), 0.74))
"""Of what rings reach, the rate at which messages are added up by the third and fourth generation of NVLink's switches: 274 of 370 GB/s on
eight H100 (nccl-tests #212: 480 GB/s of bus bandwidth), 483 of 695 on eight B300 (NCCL #2140)."""
HOST_MEMORY_SHARE = 0.2
"""Of what a node's sockets read and write by their data sheet, what they reach with an optimizer's step: threads are bound to no cores, and
most memory is another socket's. Two DGX A100 (two EPYC 7742, 410 GB/s) with two ranks step 3.1 billion parameters in 2.9 s, 2.5 with bound
cores, transfers and passes included (DeepSpeed blogs/zenflow-corebinding); a node of eight A100 18 billion in 10 s (DeepSpeed #6834, 32 GPUs
and 72 billion), four A100 6.7 billion in 4.6 s (blogs/deepspeed-zenflow, figure 4); a node of H100 26 billion in 9.6 s under a profiler (slime
#1139). Alone and bound, the kernel reaches more: half of a Grace's (1 billion in 0.098 s: blogs/deepspeed-superoffload, figure 5). DeepSpeed's
paper is remembered at 4 billion in a second (arXiv:2101.06840, table 4, not read again)."""
HOST_MEMORY_BYTES_PER_S = 80_000_000_000
"""The same where a node's sockets are not known: 1.4 billion parameters in a second with 28 bytes each and the engine's own passes, as one
process stepped 11.6 billion in 8.2 s (DeepSpeed #735) and fused AdamW of torch 4.0 billion in 4 s on a workstation (prime-rl #3210)."""
LEAF_NODES = 32
"""Nodes whose network cards hang on the same switches: a scalable unit of NVIDIA's DGX SuperPOD with H100."""
PAGEABLE_SHARE = 1 / 4.5
"""Of what pinned copies reach, what others do: pinning made them 6 times as fast with one GPU, 4 to 5 times on a node of eight (DeepSpeed #5301)."""
GPUS_OF_AN_UPLINK = 2
"""A100s in nodes of eight whose PCIe switch shares one link to the CPUs (NVIDIA, DGX A100 system architecture: four switches)."""
STORAGE_BYTES_PER_S = 3_200_000_000
"""Each GPU's share of a node's NVMe drives, to read and to write: a drive for each. DeepSpeed reads 3.7 GB/s from one drive
of PCIe 4 and writes 3.2 (DeepSpeed docs/_tutorials/deepnvme.md), and from four drives of an A100 machine with four GPUs
10 and 5 together (blogs/deepnvme/08-2024)."""

_BY_CAPABILITY: tuple[tuple[tuple[int, int], int], ...] = (
    ((10, 3), 100_000_000_000),
    ((9, 0), 50_000_000_000),
    ((8, 0), 25_000_000_000),
)
"""Between nodes, each GPU's share: DGX B300 8 x 800 Gbit/s, DGX H100 and B200 8 x 400, DGX A100
8 x 200."""
SLOW_NETWORK = 12_500_000_000
"""100 Gbit/s: of cards that are not sold in nodes of eight with a network card each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Rates of one direction, for one GPU [bytes/s]."""

    within_node: float
    """What a GPU sends the others of its node, as collectives reach it."""
    between_nodes: float
    """Its share of what its node sends to others, as collectives reach it."""
    to_host: float
    """Where all GPUs of a node copy at once."""
    to_host_alone: float
    gpus_per_node: int
    num_joined: int = 0
    """GPUs on one switch of their own links, where these are of several nodes; 0: those of a node."""
    host_memory: float = HOST_MEMORY_BYTES_PER_S
    """Of a node."""
    is_switched: bool = True
    """The GPUs of a node have a link beside PCIe."""
    oversubscription: float = 1.0
    """How many times as much the nodes on a switch send as it passes on to others."""
    base_s: float = BASE_S
    """What a collective takes whatever its size [s]."""
    hop_s: float = HOP_S
    """From one GPU of a node to the next one of a ring [s]."""
    summed_share: float = 0.0
    """Of ``within_node``, the rate at which its switches add up all-reduces; 0: they do not."""
    sums_between: bool = False
    """The switches between nodes add up all-reduces too (SHARP)."""
    is_pinned: bool = True
    """What goes to the host goes to pages that stay where they are: beside computing."""

    @property
    def to_host_pageable(self) -> float:
        """The same of copies whose other end lies in pages that may move."""
        return self.to_host * (PAGEABLE_SHARE if self.is_pinned else 1.0)

    @property
    def island(self) -> int:
        """GPUs that reach one another by their own links."""
        return max(self.num_joined, self.gpus_per_node)

    def members(self, stride: int) -> int:
        """Of ranks so far apart, those on one island."""
        return max(1, self.island // stride)

    def rate(self, degree: int, stride: int) -> float:
        """What a ring over these ranks moves at each of them [bytes/s].

        A ring passes from node to node through as many network cards as the node has ranks in it.
        """
        if not self.crosses(degree, stride):
            return self.within_node
        members = self.members(stride)
        return min(self.within_node, members * self.between(degree, stride))

    def between(self, degree: int, stride: int) -> float:
        """A GPU's share of what its node sends to others, where so many ranks send [bytes/s]."""
        beyond = self.nodes_of(degree, stride) > LEAF_NODES
        return self.between_nodes / (self.oversubscription if beyond else 1.0)

    def crosses(self, degree: int, stride: int) -> bool:
        """Whether these ranks are of several nodes."""
        return degree * stride > self.island

    def nodes_of(self, degree: int, stride: int) -> int:
        """Of how many nodes they are."""
        if not self.crosses(degree, stride):
            return 1
        members = self.members(stride)
        return max(2, -(-degree // members))


def network_of(
    gpu: GpuSpec | None,
    *,
    gpus_per_node: int,
    between_nodes: float | None = None,
    oversubscription: float = 1.0,
    sums_between: bool = False,
    is_pinned: bool = True,
) -> Network:
    """The links of a GPU in a node of its usual kind.

    ``between_nodes`` is the nominal rate of a GPU's share of the network, where it is known [bytes/s];
    ``sums_between``: its switches add up; ``is_pinned``: what is offloaded lies in pinned memory.

    >>> from memplan.sources.cards.catalog import load_gpu
    >>> found = network_of(load_gpu("h100"), gpus_per_node=8)
    >>> [round(each / 1e9) for each in (found.within_node, found.between_nodes, found.to_host)]
    [360, 40, 54]
    """
    _check_rate(between_nodes)
    pcie = gpu.pcie.bytes_per_s if gpu is not None and gpu.pcie is not None else DEFAULT_PCIE
    link = gpu.link if gpu is not None else None
    is_fifth = _has_fifth_nvlink(gpu)
    pinned = 1 if is_pinned else PAGEABLE_SHARE
    return Network(
        within_node=_within_node(gpu, pcie),
        between_nodes=ACHIEVED * (between_nodes or _usual_network(gpu)),
        to_host=_host_share(gpu, gpus_per_node) * pcie * pinned,
        to_host_alone=HOST_ACHIEVED * pcie * pinned,
        oversubscription=oversubscription,
        is_pinned=is_pinned,
        base_s=FIFTH_BASE_S if is_fifth else BASE_S,
        hop_s=FIFTH_HOP_S if is_fifth else HOP_S,
        gpus_per_node=gpus_per_node,
        host_memory=_host_memory(gpu),
        num_joined=link.num_joined if link is not None else 0,
        summed_share=_summed_share(gpu),
        sums_between=sums_between,
        is_switched=link is not None,
    )


def _check_rate(between_nodes: float | None) -> None:
    if between_nodes is not None and between_nodes <= 0:
        msg = f"network: a rate between nodes must be above 0, got {between_nodes}"
        raise InputError(msg)


def _within_node(gpu: GpuSpec | None, pcie: float) -> float:
    if gpu is None or gpu.link is None:
        return THROUGH_HOST * pcie
    return (FIFTH_NVLINK if _has_fifth_nvlink(gpu) else ACHIEVED) * gpu.link.bytes_per_s


def _has_fifth_nvlink(gpu: GpuSpec | None) -> bool:
    if gpu is None or gpu.link is None or gpu.compute_capability is None:
        return False
    return gpu.compute_capability >= (10, 0)


def _host_share(gpu: GpuSpec | None, gpus_per_node: int) -> float:
    """Of PCIe's nominal rate, what copies of all of a node's GPUs at once reach."""
    shares_uplink = (
        gpu is not None and gpu.link is not None and gpu.compute_capability == (8, 0)
        and gpus_per_node > GPUS_OF_AN_UPLINK
    )  # fmt: skip
    return HOST_ACHIEVED / GPUS_OF_AN_UPLINK if shares_uplink else HOST_ACHIEVED


def _host_memory(gpu: GpuSpec | None) -> float:
    """What the CPUs of a card's usual node reach [bytes/s]."""
    rate = gpu.node.memory_bytes_per_s if gpu is not None and gpu.node is not None else None
    return HOST_MEMORY_BYTES_PER_S if rate is None else HOST_MEMORY_SHARE * rate


def _summed_share(gpu: GpuSpec | None) -> float:
    """NVLink's switches add up from Hopper on; bridges between cards have none."""
    link = gpu.link if gpu is not None else None
    capability = gpu.compute_capability if gpu is not None else None
    has_switches = link is not None and ("NVSwitch" in link.topology or link.num_joined > 0)
    if capability is None or not has_switches:
        return 0.0
    return next((share for least, share in _SUMMED if capability >= least), 0.0)


def _usual_network(gpu: GpuSpec | None) -> int:
    capability = gpu.compute_capability if gpu is not None else None
    if gpu is not None and gpu.link is None:
        return SLOW_NETWORK
    if capability is None:
        return 50_000_000_000 if gpu is not None and (gpu.year or 0) >= 2022 else 25_000_000_000
    return next((rate for least, rate in _BY_CAPABILITY if capability >= least), SLOW_NETWORK)
