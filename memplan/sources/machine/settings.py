"""What this machine's environment tells torch's allocator and CUDA, and the options that say the same.

References: torch's *CUDA semantics*, section *Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF* (``PYTORCH_ALLOC_CONF`` since
2.9); the CUDA C++ Programming Guide, *CUDA Environment Variables*.
"""

from collections.abc import Mapping

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EFFECTS = {
    "CUDA_MODULE_LOADING": "how soon kernels' code takes memory: inside the context's range",
    "NCCL_BUFFSIZE": "the size of NCCL's buffers, which the range of NCCL takes at their default",
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS' workspaces, which are counted at their default",
    "CUDA_VISIBLE_DEVICES": "which cards a job sees",
    "HIP_VISIBLE_DEVICES": "which cards a job sees",
    "ROCR_VISIBLE_DEVICES": "which cards a job sees",
}
"""Variables that move bytes of a card, and which."""
_EXPANDABLE = "expandable_segments"


def settings_here(environment: Mapping[str, str]) -> dict[str, str]:
    """Each variable that is set, with its value and what it means for an estimate."""
    found = {
        name: f"{environment[name]}: {allocator_effect(environment[name])}"
        for name in ALLOCATOR_VARIABLES
        if name in environment
    }
    for name, effect in EFFECTS.items():
        if name in environment:
            found[name] = f"{environment[name] or '(empty)'}: {effect}"
    return found


def allocator_effect(said: str) -> str:
    """What a setting of the allocator means for an estimate.

    >>> allocator_effect("expandable_segments:True")
    'say --allocator expandable'
    >>> allocator_effect("max_split_size_mb:128")
    'max_split_size_mb is not modelled'
    """
    pairs = [each.partition(":") for each in said.split(",") if each.strip()]
    given = {key.strip().lower(): value.strip().lower() for key, _, value in pairs}
    words = ["say --allocator expandable"] if given.pop(_EXPANDABLE, "") == "true" else []
    words += [f"{key} is not modelled" for key in given]
    return ", ".join(words) or "as the default"
