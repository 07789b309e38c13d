"""What every scheduler's text needs: sizes rounded up, the launch line, comments."""

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memplan.units import GIB, MIB, ceil_div

if TYPE_CHECKING:
    from memplan.estimator.job_request import JobRequest

SCRIPT = "train.py"
"""What stands for the training script."""
PORT = 29500
"""Where ranks meet: torchrun's default (torch 2.13, ``torch/distributed/run.py``)."""


def whole_gib(num_bytes: int) -> int:
    """A size as schedulers take it, rounded up [GiB].

    >>> whole_gib(2**30 + 1)
    2
    """
    return ceil_div(num_bytes, GIB)


def whole_mib(num_bytes: int) -> int:
    """The same in MiB, which Slurm counts in."""
    return ceil_div(num_bytes, MIB)


def torchrun(request: "JobRequest", *, head: str, rank: str = "") -> list[str]:
    """The launch line of one node; ``head`` is the first node's address, as the scheduler's shell has it.

    torchrun starts every engine's script, DeepSpeed's and Megatron's too: it sets the variables that they read.
    """
    words = ["torchrun", f"--nproc-per-node={request.gpus_per_node}"]
    if request.num_nodes > 1:
        words.append(f"--nnodes={request.num_nodes}")
        if rank:
            words += [f"--node-rank={rank}", f"--master-addr={head}", f"--master-port={PORT}"]
        else:
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={head}:{PORT}"]
    return [*words, SCRIPT]


def comments(request: "JobRequest") -> Iterable[str]:
    """Lines for people at the head of a text."""
    yield f"# {request.title}"
    yield f"# {SCRIPT} stands for your script. Taken for granted:"
    for each in request.assumptions:
        yield f"#   {each}"


def exports(request: "JobRequest") -> list[str]:
    """The environment as a shell sets it."""
    return [f"export {name}={shlex.quote(value)}" for name, value in request.environment.items()]


def clock(seconds: int) -> str:
    """A time limit as Slurm reads it: days, hours, minutes, seconds.

    >>> clock(90_061)
    '1-01:01:01'
    """
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
