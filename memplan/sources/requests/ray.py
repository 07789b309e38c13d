"""A script for Ray Train (Ray 2.50): ``TorchTrainer`` with a ``ScalingConfig``, for ``ray job submit -- python FILE``.

A worker is a GPU. ``resources_per_worker`` counts processors, GPUs and bytes of CPU RAM (*Configuring scale and GPUs*); names of cards are those
of ``ray/util/accelerators/accelerators.py``. Workers of one node share its RAM, so each asks for its part. Ray Train sets up torch's process
group itself: ``train_function`` is called in each worker.
"""

import json
from typing import TYPE_CHECKING

from memplan.errors import UsageError
from memplan.hardware.managers import MemoryManager
from memplan.sources.requests.words import SCRIPT, comments
from memplan.units import ceil_div

if TYPE_CHECKING:
    from memplan.estimator.job_request import JobRequest

ACCELERATORS = {
    "v100-sxm2-16gb": "V100", "v100-sxm2-32gb": "V100", "p100-pcie-16gb": "P100", "p100-sxm2-16gb": "P100", "t4-16gb": "T4",
    "a10g-24gb": "A10G", "l4-24gb": "L4", "l40s-48gb": "L40S", "a100-sxm4-40gb": "A100-40G", "a100-sxm4-80gb": "A100-80G",
    "h100-sxm-80gb": "H100", "h200-sxm-141gb": "H200", "h20-96gb": "H20", "b200-180gb": "B200", "b300-288gb": "B300", "gb200-186gb": "GB200",
    "gb300-288gb": "GB300", "rtxpro6000-blackwell-96gb": "RTX-PRO-6000", "mi210-64gb": "AMD-Instinct-MI210", "mi250x-gcd-64gb": "AMD-Instinct-MI250X",
    "mi300a-128gb": "AMD-Instinct-MI300A", "mi300x-192gb": "AMD-Instinct-MI300X-OAM", "mi325x-256gb": "AMD-Instinct-MI325X-OAM",
    "mi350x-288gb": "AMD-Instinct-MI350X-OAM", "mi355x-288gb": "AMD-Instinct-MI355X-OAM", "max1550-stack-64gb": "Intel-GPU-Max-1550",
    "max1100-48gb": "Intel-GPU-Max-1100", "ascend-910b-64gb": "Ascend910B", "tpu-v4-32gb": "TPU-V4", "tpu-v5e-16gb": "TPU-V5LITEPOD",
    "tpu-v5p-95gb": "TPU-V5P", "tpu-v6e-32gb": "TPU-V6E",
}  # fmt: skip
"""Ray's names by the catalog's (``ray/util/accelerators/accelerators.py`` of 2.60); of a card that is not here none is asked for."""
RESOURCES = {
    MemoryManager.HPU: "HPU", MemoryManager.NPU: "NPU", MemoryManager.XLA: "TPU", MemoryManager.NEURON: "neuron_cores",
}  # fmt: skip
"""What Ray counts cards as that are no GPUs to it (``ray/_private/accelerators``, each ``get_resource_name``)."""


def text(request: "JobRequest") -> str:
    """The script."""
    manager = MemoryManager.CUDA if request.gpu is None else request.gpu.manager
    if manager is MemoryManager.MPS:
        msg = f"emit: {request.gpu.name if request.gpu else ''} is no card of a cluster: leave it out, or name another card"
        raise UsageError(msg)
    resource = RESOURCES.get(manager, "GPU")
    worker = {
        "CPU": ceil_div(request.num_cores, request.gpus_per_node),
        resource: 1,
        "memory": ceil_div(request.memory_bytes, request.gpus_per_node),
    }
    name = None if request.gpu is None else ACCELERATORS.get(request.gpu.gpu_id)
    scaling = {
        "num_workers": request.num_gpus,
        "use_gpu": resource == "GPU",
        "resources_per_worker": worker,
        **({} if name is None else {"accelerator_type": name}),
    }
    environment = json.dumps(dict(request.environment))
    lines = [
        *comments(request),
        *_limit(request),
        "import ray",
        "from ray.train import RunConfig, ScalingConfig",
        "from ray.train.torch import TorchTrainer",
        "",
        f"from {SCRIPT.removesuffix('.py')} import train_function",
        "",
        f'ray.init(runtime_env={{"env_vars": {environment}}})',
        "trainer = TorchTrainer(",
        "    train_function,",
        "    scaling_config=ScalingConfig(",
        *(f"        {key}={value!r}," for key, value in scaling.items()),
        "    ),",
        f"    run_config=RunConfig(name={request.name!r}),",
        ")",
        "trainer.fit()",
    ]
    return "\n".join(lines)


def _limit(request: "JobRequest") -> list[str]:
    if request.time_s is None:
        return []
    return [f"#   at most {request.time_s / 3600:,.1f} hours, for which Ray Train has no key"]
