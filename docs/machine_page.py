"""What ``memplan doctor`` prints on a machine that stands still: two H100s and an A100 in two slices."""

from pathlib import Path

import shown

from memplan.cli.doctor import examined
from memplan.hardware.machine import CardsHere, Host
from memplan.report.lookups.doctor import print_examination
from memplan.report.terminal.console import TerminalConsole
from memplan.sources.machine.nvidia_smi import cards_from_xml
from memplan.sources.machine.packages import packages_here
from memplan.units import GIB

ANSWER = Path(__file__).parent.parent / "tests" / "data" / "machine" / "nvidia-smi.xml"
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.18.2", "peft": "0.19"}


def doctor() -> str:
    """The page of that machine."""
    found = examined(
        cards=CardsHere(cards=cards_from_xml(ANSWER.read_text("utf-8"))),
        host=Host(
            memory_bytes=2048 * GIB,
            limit_bytes=512 * GIB,
            num_cores=64,
            shared_bytes=64 * GIB,
            disk_bytes=3500 * GIB,
        ),
        packages=packages_here(lambda name: VERSIONS.get(name, "1.0")),
        settings={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        version="memplan, replay compiled",
    )
    text = shown.printed(lambda: print_examination(TerminalConsole(), found))
    return f"```console\n$ memplan doctor\n{text}```"
