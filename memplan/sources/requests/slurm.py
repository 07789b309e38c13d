"""A batch script for Slurm (``sbatch(1)``, 24.05).

``--gpus-per-node`` without a type: types are a site's own names (``gres.conf``). ``--mem`` is one node's. One task a node runs
torchrun, which starts a process for each GPU.
"""

import shlex
from typing import TYPE_CHECKING

from memplan.sources.requests.words import clock, comments, exports, torchrun, whole_mib

if TYPE_CHECKING:
    from memplan.estimator.job_request import JobRequest


def text(request: "JobRequest") -> str:
    """The script."""
    lines = [
        "#!/bin/bash",
        *comments(request),
        f"#SBATCH --job-name={request.name}",
        f"#SBATCH --nodes={request.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={request.gpus_per_node}",
        f"#SBATCH --cpus-per-task={request.num_cores}",
        f"#SBATCH --mem={whole_mib(request.memory_bytes)}M",
    ]
    if request.queue:
        lines.append(f"#SBATCH --partition={request.queue}")
    if request.time_s is not None:
        lines.append(f"#SBATCH --time={clock(request.time_s)}")
    lines += ["", "set -euo pipefail", *exports(request)]
    if request.num_nodes > 1:
        lines.append('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
    return "\n".join((*lines, f"srun {_line(request)}"))


def _line(request: "JobRequest") -> str:
    """The launch line; the head's name is for the shell to fill in."""
    words = [shlex.quote(word) for word in torchrun(request, head="HEAD")]
    return " ".join(words).replace("HEAD:", '"$head":')
