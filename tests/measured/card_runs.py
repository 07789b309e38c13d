"""Training steps measured on one H100 and one H200 (``h100.json``, ``h200.json``) as setups of memplan.

Each record is three steps of a transformers model with random weights, built from the config beside it; the third
was measured. The model was made under ``no_init_weights``, which leaves tied weights untied: what was trained has
tables of its own for the head, and its config here says so. Runs under FSDP2 were tied after sharding.
"""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from memplan.api import estimate
from memplan.estimator import Estimate
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.allocator_records import TASKS, played, setup_of

CARDS = {"H100": "h100-sxm-80gb", "H200": "h200-sxm-141gb"}
"""What was measured on, and the catalog's name of it."""
PHASES = ("forward", "backward", "step")
NUM_STEPS = 3


def model_of(config: dict[str, Any], task: str) -> ModelSpec:
    """A record's model; a dozen models were run in two hundred ways."""
    return _read(json.dumps(config), task)


@cache
def _read(config: str, task: str) -> ModelSpec:
    return load_model(json.loads(config), TASKS[task])


def file_of(card: str) -> Path:
    """Where the records of a card are."""
    return Path(__file__).with_name(f"{card.lower()}.json")


@dataclass(frozen=True, kw_only=True)
class CardRun:
    """One record, and what memplan says of the same run."""

    id: str
    card: str
    model: str
    task: str
    config: dict[str, Any]
    settings: dict[str, Any]
    measured: dict[str, Any] | None
    """None: it died."""

    @property
    def gpu(self) -> GpuSpec:
        """The catalog's."""
        return load_gpu(CARDS[self.card])

    @property
    def is_sharded(self) -> bool:
        """Under FSDP2, with collectives that do nothing: the memory of one rank of many."""
        return "fsdp" in self.settings

    @property
    def is_tied(self) -> bool:
        """Whether the head's table is the embeddings'."""
        apart = self.config | {"tie_word_embeddings": False}
        return model_of(self.config, self.task).num_params < model_of(apart, self.task).num_params

    def forget(self) -> None:
        """Let go of the estimate: it holds the whole run."""
        self.__dict__.pop("answer", None)

    def in_words(self) -> str:
        """What was run, whatever the card."""
        return json.dumps([self.config, self.task, self.settings], sort_keys=True)

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
        return estimate(model_of(self.config, self.task), self.setup, gpu=self.gpu)

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


def read_file(card: str) -> dict[str, Any]:
    """What was written down of a card."""
    found: dict[str, Any] = json.loads(file_of(card).read_text(encoding="utf-8"))
    return found


def chain_seconds(card: str) -> float:
    """How long the card's host takes for a few chains of operations, both ways: how fast it launches."""
    name = f"{card.lower()}_rates.json"
    data = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    rows = next(each["rows"] for each in data["tables"] if each["kind"] == "launch_chain")
    return 1e-6 * float(sum(forward + backward for _, forward, backward in rows))


def read_runs(card: str) -> list[CardRun]:
    """Every record of a card that the script could run."""
    data = read_file(card)
    models = read_file("H100")["models"]  # both cards ran the same ones
    runs = []
    for record in data["records"]:
        if "error" in record:
            continue
        config = dict(models[record["model"]])
        if "fsdp" not in record["settings"]:
            config["tie_word_embeddings"] = False
        names = ("id", "model", "task", "settings")
        given = {name: record[name] for name in names}
        runs.append(CardRun(**given, card=card, config=config, measured=record.get("measured")))
    return runs
