"""A task for SkyPilot (0.10, *Task YAML*): ``resources.accelerators`` by SkyPilot's own names, memory and processors at least (``+``).

Its shell knows ``SKYPILOT_NODE_IPS``, ``SKYPILOT_NODE_RANK`` (*Distributed multi-node jobs*). A time limit it does not have, except for what
``sky launch --idle-minutes-to-autostop`` does after the end.
"""

import shlex
from typing import TYPE_CHECKING

from memplan.errors import UsageError
from memplan.hardware.managers import MemoryManager
from memplan.sources.requests.words import comments, torchrun, whole_gib

if TYPE_CHECKING:
    from memplan.estimator.job_request import JobRequest
    from memplan.hardware.gpu import GpuSpec

ACCELERATORS = {
    "v100-sxm2-16gb": "V100", "v100-sxm2-32gb": "V100-32GB", "t4-16gb": "T4", "a10-24gb": "A10", "a10g-24gb": "A10G",
    "l4-24gb": "L4", "l40-48gb": "L40", "l40s-48gb": "L40S", "a100-sxm4-40gb": "A100", "a100-sxm4-80gb": "A100-80GB",
    "a100-pcie-80gb": "A100-80GB", "h100-sxm-80gb": "H100", "h100-pcie-80gb": "H100", "h200-sxm-141gb": "H200",
    "b200-180gb": "B200", "mi300x-192gb": "MI300X", "a100-pcie-40gb": "A100", "h100-nvl-94gb": "H100-NVL", "a30-24gb": "A30", "a40-48gb": "A40",
    "rtx3080-10gb": "RTX3080", "rtx3090-24gb": "RTX3090", "rtx3090ti-24gb": "RTX3090-Ti", "rtx4080-16gb": "RTX4080", "rtx4090-24gb": "RTX4090",
    "rtx6000ada-48gb": "RTX6000-Ada", "rtx5080-16gb": "RTX5080", "rtx5090-32gb": "RTX5090", "rtx-a4000-16gb": "RTXA4000",
    "rtx-a5000-24gb": "RTXA5000", "rtx-a6000-48gb": "RTXA6000", "rtxpro6000-blackwell-96gb": "RTXPRO6000",
}  # fmt: skip
"""SkyPilot's names by the catalog's: those of ``sky/catalog/__init__.py`` (``get_common_gpus``) and of its fetchers (skypilot 0.14.1); the whole list,
``sky show-gpus``, is fetched from the network and was not read. A card that is not here goes by its short name."""


def text(request: "JobRequest") -> str:
    """The task."""
    import yaml

    resources: dict[str, object] = {
        "memory": f"{whole_gib(request.memory_bytes)}+",
        "cpus": f"{request.num_cores}+",
        "disk_size": max(LEAST_DISK, whole_gib(request.disk_bytes) + SYSTEM_DISK),
    }
    if request.gpu is not None:
        resources = {
            "accelerators": f"{accelerator(request.gpu)}:{request.gpus_per_node}",
            **resources,
        }
    task: dict[str, object] = {
        "name": request.name,
        "num_nodes": request.num_nodes,
        "resources": resources,
    }
    if request.environment:
        task["envs"] = dict(request.environment)
    body = yaml.safe_dump(task, sort_keys=False, width=1000).rstrip()
    return "\n".join((*_head(request), body, "run: |", *(f"  {line}" for line in _run(request))))


_NOT_WRITTEN = (MemoryManager.XLA, MemoryManager.NEURON, MemoryManager.MPS)

LEAST_DISK, SYSTEM_DISK = 256, 100
"""GB: SkyPilot's default, and what the image and its packages take of it (*Task YAML*, ``disk_size``)."""


def accelerator(gpu: "GpuSpec") -> str:
    """SkyPilot's name of a card.

    Raises ``UsageError`` for a Mac, and for TPUs and Trainium, whose names there say how many chips or cores an instance has.
    """
    if gpu.manager in _NOT_WRITTEN:
        msg = f"emit: {gpu.name} is not written for SkyPilot, which asks for whole instances of it, or has none: take kubernetes or slurm"
        raise UsageError(msg)
    return ACCELERATORS.get(gpu.gpu_id, gpu.short_name)


def _head(request: "JobRequest") -> list[str]:
    lines = list(comments(request))
    if request.time_s is not None:
        lines.append(
            f"#   at most {request.time_s / 3600:,.1f} hours, for which SkyPilot has no key"
        )
    return lines


def _run(request: "JobRequest") -> list[str]:
    lines = ["set -euo pipefail"]
    if request.num_nodes == 1:
        return [*lines, shlex.join(torchrun(request, head=""))]
    words = " ".join(torchrun(request, head="$head", rank="$SKYPILOT_NODE_RANK"))
    return [*lines, 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', words]
