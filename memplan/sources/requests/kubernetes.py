"""Manifests for Kubernetes (``batch/v1`` Job, indexed; ``v1`` Service, headless).

References: the API reference of Kubernetes 1.31: ``completionMode: Indexed`` gives each pod its number and, with ``subdomain``,
a name that others find (*Job with pod-to-pod communication*); ``emptyDir`` of medium ``Memory`` in the place of the 64 MiB that a
container has for ``/dev/shm``, which counts toward the container's memory limit; ``activeDeadlineSeconds``. GPUs are asked for by their
device plugin's resource: ``nvidia.com/gpu``, ``amd.com/gpu``, ``habana.ai/gaudi`` and so on. Which card is a label of a node: NVIDIA's GPU feature
discovery writes ``nvidia.com/gpu.product``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.errors import UsageError
from memplan.hardware.gpu import Vendor
from memplan.sources.requests.words import PORT, comments, torchrun, whole_gib

if TYPE_CHECKING:
    from memplan.estimator.job_request import JobRequest

RESOURCES = {Vendor.NVIDIA: "nvidia.com/gpu", Vendor.AMD: "amd.com/gpu"}
"""Those of cards whose allocator is CUDA's; the others' are in ``memplan.hardware.managers``."""
IMAGE = "YOUR-IMAGE"
"""What stands for the container's image."""


def text(request: "JobRequest") -> str:
    """The manifests, one after another."""
    return written(request, manifests(request))


def written(request: "JobRequest", parts: list[Mapping[str, object]]) -> str:
    """Manifests as one file, with the remarks at its head."""
    import yaml

    bodies = [yaml.safe_dump(part, sort_keys=False, width=1000).rstrip() for part in parts]
    head = [*comments(request), f"#   {IMAGE} stands for your image"]
    return "\n".join((*head, "\n---\n".join(bodies)))


def manifests(request: "JobRequest") -> list[Mapping[str, object]]:
    """The job, and before it the service over which several pods find one another."""
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": request.name},
        "spec": {
            **({} if request.time_s is None else {"activeDeadlineSeconds": request.time_s}),
            "backoffLimit": 0,
            "completionMode": "Indexed",
            "completions": request.num_nodes,
            "parallelism": request.num_nodes,
            "template": {
                "metadata": {"labels": {"app": request.name}},
                "spec": _pod(request),
            },
        },
    }
    return [_service(request), job] if request.num_nodes > 1 else [job]


def _service(request: "JobRequest") -> Mapping[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": request.name},
        "spec": {"clusterIP": "None", "selector": {"app": request.name}, "ports": [{"port": PORT}]},
    }


def _pod(request: "JobRequest") -> Mapping[str, object]:
    names = () if request.gpu is None else request.gpu.device_names
    product = (
        {"nvidia.com/gpu.product": names[0].replace(" ", "-")}
        if _is_nvidia(request) and names
        else {}
    )
    return {
        **({"subdomain": request.name} if request.num_nodes > 1 else {}),
        **({"nodeSelector": product} if product else {}),
        "restartPolicy": "Never",
        "containers": [_container(request)],
        "volumes": [
            {
                "name": "shm",
                "emptyDir": {
                    "medium": "Memory",
                    "sizeLimit": f"{whole_gib(request.shared_bytes)}Gi",
                },
            }
        ],
    }


def _container(request: "JobRequest") -> Mapping[str, object]:
    asked = {
        "cpu": request.num_cores,
        "memory": f"{whole_gib(request.memory_bytes)}Gi",
        _resource(request): request.gpus_per_node,
    }
    head = f"{request.name}-0.{request.name}"
    return {
        "name": "train",
        "image": IMAGE,
        "command": torchrun(request, head=head, rank="$(JOB_COMPLETION_INDEX)"),
        "env": _environment(request),
        "resources": {"requests": asked, "limits": dict(asked)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


def _environment(request: "JobRequest") -> list[Mapping[str, object]]:
    """The variables; the pod's number, which the kubelet fills into ``$(...)`` of the command, is named so that it may."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    said: list[Mapping[str, object]] = [
        {"name": name, "value": value} for name, value in request.environment.items()
    ]
    if request.num_nodes > 1:
        said.append(
            {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}}
        )
    return said


def _is_nvidia(request: "JobRequest") -> bool:
    return request.gpu is not None and request.gpu.vendor is Vendor.NVIDIA


def _resource(request: "JobRequest") -> str:
    gpu = request.gpu
    if gpu is None or gpu.manager.is_replayed:
        return RESOURCES.get(Vendor.NVIDIA if gpu is None else gpu.vendor, RESOURCES[Vendor.NVIDIA])
    resource = gpu.manager.rules.resource
    if not resource:
        msg = f"emit: {gpu.name} is no card of a cluster: leave it out, or name another card"
        raise UsageError(msg)
    return resource
