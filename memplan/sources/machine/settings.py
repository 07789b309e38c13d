"""What this machine's environment tells torch's allocator and CUDA.

References: torch's *CUDA semantics*, section *Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF* (``PYTORCH_ALLOC_CONF`` since
2.9); the CUDA C++ Programming Guide, *CUDA Environment Variables*.
"""

from collections.abc import Mapping

VARIABLES = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUDA_MODULE_LOADING", "NCCL_BUFFSIZE",
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that move bytes of a card, or say which cards there are."""


def settings_here(environment: Mapping[str, str]) -> dict[str, str]:
    """Each of them that is set, with its value."""
    return {name: environment[name] for name in VARIABLES if name in environment}
