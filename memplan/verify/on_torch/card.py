"""The card of this machine, and what its driver counts."""

import subprocess

import torch

from memplan.units import MIB


def has_card() -> bool:
    """Whether torch can train on a GPU here."""
    return bool(torch.cuda.is_available()) and torch.cuda.device_count() > 0


def others_bytes() -> int:
    """What is in use on the card before this process takes any; 0 where nvidia-smi does not say [bytes]."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        used = [int(line) * MIB for line in said.split()]
        return used[torch.cuda.current_device()] if used else 0
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def driver_version() -> str:
    """As nvidia-smi says; empty where there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.splitlines()[0].strip() if said.strip() else ""


def used_bytes() -> int:
    """What the driver counts for all processes of the card [bytes]."""
    free, total = torch.cuda.mem_get_info()
    return int(total) - int(free)
