"""Training steps measured on one H100 (``h100.json``) as setups of memplan.

Each record is three steps of a transformers model with random weights, built from the config beside it; the third
was measured. The model was made under ``no_init_weights``, which leaves tied weights untied: what was trained has
tables of its own for the head, and its config here says so. Runs under FSDP2 were tied after sharding.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from memplan.api import estimate
from memplan.estimator import Estimate
from memplan.hardware.gpu import GpuSpec
from memplan.sources.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.allocator_records import TASKS, played, setup_of

FILE = Path(__file__).with_name("h100.json")
PHASES = ("forward", "backward", "step")
NUM_STEPS = 3


def card() -> GpuSpec:
    """The catalog's."""
    return load_gpu("h100-sxm-80gb")


@dataclass(frozen=True, kw_only=True)
class H100Run:
    """One record, and what memplan says of the same run."""

    id: str
    model: str
    task: str
    config: dict[str, Any]
    settings: dict[str, Any]
    measured: dict[str, Any] | None
    """None: it died."""

    @property
    def is_sharded(self) -> bool:
        """Under FSDP2, with collectives that do nothing: the memory of one rank of many."""
        return "fsdp" in self.settings

    @property
    def is_tied(self) -> bool:
        """Whether the head's table is the embeddings'."""
        apart = self.config | {"tie_word_embeddings": False}
        task = TASKS[self.task]
        return load_model(self.config, task).num_params < load_model(apart, task).num_params

    def forget(self) -> None:
        """Let go of the estimate: it holds the whole run."""
        self.__dict__.pop("answer", None)

    @property
    def record(self) -> dict[str, Any]:
        """As the records of PyTorch's CUDA build have it."""
        sharding = self.settings.get("fsdp")
        settings = {**self.settings, "gpu": "h100", "steps": NUM_STEPS}
        if sharding is not None:
            settings |= {"engine": "fsdp2", "world": sharding["world_size"], **sharding}
        return {"config": self.config, "task": self.task, "settings": settings}

    @property
    def setup(self) -> TrainingSetup:
        """The record's settings in memplan's words."""
        return setup_of(self.record["settings"])

    @cached_property
    def answer(self) -> Estimate:
        """memplan's estimate for the card that it ran on."""
        return estimate(load_model(self.config, TASKS[self.task]), self.setup, gpu=card())

    @property
    def reserved_bytes(self) -> int:
        """Segments at the end; a sharded record's weights were made on the GPU, where a user's are loaded."""
        if not self.is_sharded:
            return self.answer.reserved_bytes
        run = played(self.record)
        assert run is not None
        return run.peaks.reserved_bytes

    @property
    def predicted(self) -> dict[str, int]:
        """Figures of the third step, by the names that ``truth`` has them under."""
        answer = self.answer
        peaks = {f"peak_{name}": answer.phases[name].peak_bytes for name in PHASES}
        figures = {"before": answer.held_bytes, **peaks, "peak": max(peaks.values())}
        figures["max_memory_allocated"] = self.answer.run.peaks.allocated_bytes
        if not self.is_sharded:
            figures["after_forward"] = answer.held_bytes + answer.activations_bytes
        return figures

    @property
    def truth(self) -> dict[str, int]:
        """The same as measured; peaks are of bytes asked for, as memplan counts them."""
        assert self.measured is not None
        requested = self.measured["requested"]
        return {
            "before": self.measured["before"],
            "after_forward": self.measured["after_forward"],
            **{f"peak_{name}": each for name, each in zip(PHASES, requested, strict=True)},
            "peak": max(requested),
            "max_memory_allocated": max(self.measured["allocated"]),
            "reserved": self.measured["reserved"],
        }


def read_runs() -> list[H100Run]:
    """Every record that the script could run."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    runs = []
    for record in data["records"]:
        if "error" in record:
            continue
        config = dict(data["models"][record["model"]])
        if "fsdp" not in record["settings"]:
            config["tie_word_embeddings"] = False
        names = ("id", "model", "task", "settings")
        given = {name: record[name] for name in names}
        runs.append(H100Run(**given, config=config, measured=record.get("measured")))
    return runs
