"""Tasks of SkyPilot: YAML whose ``run`` is the script that every node runs.

Source: SkyPilot, ``sky/task.py`` and ``skylet/constants.py`` (the variables that a task has).
"""

import re
from collections.abc import Mapping

_GPUS = re.compile(r"[^:]*(?::\s*(\d+))?")


def script_of(values: Mapping[str, object]) -> str | None:
    """The script of a task, behind what SkyPilot tells it of its nodes; None of another file.

    >>> script_of({"resources": {"accelerators": "H100:8"}, "num_nodes": 2, "envs": {"A": "b c"}, "run": "go $A"})
    "A='b c'\\nSKYPILOT_NUM_NODES=2\\nSKYPILOT_NUM_GPUS_PER_NODE=8\\ngo $A"
    >>> script_of({"run": "go"})
    """
    run, resources = values.get("run"), values.get("resources")
    if not isinstance(run, str) or not isinstance(resources, Mapping):
        return None
    envs = values.get("envs")
    known = {
        **{
            name: f"'{value}'"
            for name, value in (envs if isinstance(envs, Mapping) else {}).items()
        },
        "SKYPILOT_NUM_NODES": values.get("num_nodes") or 1,
    }
    gpus = _gpus(resources.get("accelerators"))
    if gpus is not None:
        known["SKYPILOT_NUM_GPUS_PER_NODE"] = gpus
    return "\n".join([*(f"{name}={value}" for name, value in known.items()), run])


def _gpus(accelerators: object) -> int | None:
    """How many a node has, where one kind is named.

    >>> _gpus("H100:8"), _gpus({"H100": 4}), _gpus("H100"), _gpus(["H100:8", "A100:8"])
    (8, 4, 1, None)
    """
    if isinstance(accelerators, Mapping) and len(accelerators) == 1:
        accelerators = "{}:{}".format(*next(iter(accelerators.items())))
    if not isinstance(accelerators, str):
        return None
    match = _GPUS.fullmatch(accelerators.strip())
    return None if match is None else int(match[1] or 1)
