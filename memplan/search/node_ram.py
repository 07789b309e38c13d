"""How much CPU RAM a node has for what is offloaded, where nobody says."""

from memplan.estimator import Estimate, Verdict
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.training.choices import Offload
from memplan.training.setup import TrainingSetup


def usual_node_bytes(setup: TrainingSetup, gpu: GpuSpec) -> int | None:
    """CPU RAM that goes with a node's GPUs in a usual machine of theirs [bytes]; None: nothing lies there, or not known.

    >>> from memplan.sources.cards.catalog import load_gpu
    >>> setup = TrainingSetup(num_gpus=2, zero_stage=3, offload_optimizer="cpu")
    >>> usual_node_bytes(setup, load_gpu("h100")) // 2**30
    512
    """
    offloads = Offload.CPU in (setup.offload_optimizer, setup.offload_param)
    if gpu.node is None or not (offloads or setup.offload_activations.sends):
        return None
    return gpu.node.share_bytes(setup.gpus_per_node)


def overfills_usual_node(answer: Estimate) -> bool:
    """Whether what is offloaded is more than a usual node of the card has for it."""
    if answer.gpu is None:
        return False
    usual = usual_node_bytes(answer.setup, answer.gpu)
    if usual is None:
        return False
    return replace(answer, node_memory_bytes=usual).host_verdict is Verdict.OOM
