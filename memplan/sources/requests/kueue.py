"""The manifests of Kubernetes, held back for Kueue (0.10, *Run A Kubernetes Job*): a label names the queue, and the job is suspended
until the queue lets it go."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.sources.requests import kubernetes

if TYPE_CHECKING:
    from memplan.estimator.job_request import JobRequest

QUEUE = "user-queue"
"""What stands for the queue: the name of Kueue's own examples."""


def text(request: "JobRequest") -> str:
    """The manifests, the job's last."""
    *others, job = kubernetes.manifests(request)
    return kubernetes.written(request, [*others, _queued(job, request.queue or QUEUE)])


def _queued(job: Mapping[str, object], queue: str) -> Mapping[str, object]:
    metadata, spec = job["metadata"], job["spec"]
    assert isinstance(metadata, Mapping)
    assert isinstance(spec, Mapping)
    labels = {"kueue.x-k8s.io/queue-name": queue}
    return {**job, "metadata": {**metadata, "labels": labels}, "spec": {"suspend": True, **spec}}
