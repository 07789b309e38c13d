"""How much slower links between nodes are where other jobs use the same switches, by how many nodes there are.

What one job's own traffic meets is in the topology (``Network.oversubscription``); what others send is not known of a cluster, so it
lengthens the high end of a range and not what is expected: 248 nodes of H200 reached 350 GB/s of bus bandwidth, as few do, and at times
less than 300 (nccl-tests #283).

References
----------
.. [1] D. De Sensi et al., "Exploring GPU-to-GPU communication: insights into supercomputer interconnects", SC 2024, arXiv:2408.14090: on
   Leonardo (A100, InfiniBand) other jobs take up to half of the all-reduces' rate with 1,024 GPUs, 256 nodes of four; on Alps next to
   nothing (read in a summary of the paper, not in the paper).
"""

from math import log2

from memplan.hardware.network import LEAF_NODES

QUIET = 1.4
"""How many times as long as expected exchanges take at the high end, below one layer of switches: links by how busy they are."""
MOST_LOST, LOST_NODES = 2.0, 256
"""How many times as long with so many nodes [1]_."""


def crowded_factor(num_nodes: int) -> float:
    """How many times as long exchanges take at the high end on so many nodes.

    Beyond the nodes of one layer of switches it grows with each doubling, along a line to what was measured with 256; nobody was found
    who measured more, and the line goes on.

    >>> [round(crowded_factor(each), 2) for each in (1, 32, 64, 256, 2048)]
    [1.4, 1.4, 1.6, 2.0, 2.6]
    """
    doublings = log2(max(num_nodes, LEAF_NODES) / LEAF_NODES)
    return QUIET + (MOST_LOST - QUIET) * doublings / log2(LOST_NODES / LEAF_NODES)
