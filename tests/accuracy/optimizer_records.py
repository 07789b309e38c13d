"""A record of an optimizer run by its own package, as a training setup."""

from typing import Any

from memplan.estimator.job import prepared
from memplan.estimator.recording import record_and_walk, tape_options
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.graph.declaration import declared_parameters
from memplan.memory.programs import program_of
from memplan.memory.programs.stepping import stepped
from memplan.memory.replaying.allocator import CachingAllocator
from memplan.memory.replaying.ledger import Ledger, Part
from memplan.memory.replaying.replay import replay
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.optimizers.script import Stepped
from memplan.training.setup import TrainingSetup

TASKS = {"causal": "causal-lm", "seq2seq": "seq2seq-lm", "mlm": "masked-lm"}
PRECISIONS = {"bf16": "bf16", "amp": "bf16-amp", "fp32": "fp32"}
GPU = "h100-sxm-80gb"

_RANK = {"rank": 256}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_loop": {"optimizer": "adamw-loop"},
    "sgd_foreach": {"optimizer": "sgd"},
    "sgd_loop": {"optimizer": "sgd"},
    "sgd_fused": {"optimizer": "sgd"},
    "sgd_momentum": {"optimizer": "sgd-momentum"},
    "adafactor_torch": {"optimizer": "adafactor-foreach"},
    "adafactor_torch_loop": {"optimizer": "adafactor-loop"},
    "adafactor_hf": {"optimizer": "adafactor"},
    "adafactor_hf_momentum": {"optimizer": "adafactor", "optimizer_options": {"beta1": 0.9}},
    # These runs hand the output matrix, where it is not the embedding, to Muon too.
    "muon": {"optimizer": "muon", "optimizer_options": {"head": "muon"}},
    "bnb_AdamW": {"optimizer": "bnb-adamw"},
    "bnb_AdamW8bit": {"optimizer": "bnb-adamw-8bit"},
    "bnb_PagedAdamW": {"optimizer": "paged_adamw_32bit"},
    "bnb_PagedAdamW8bit": {"optimizer": "bnb-paged-adamw-8bit"},
    "bnb_Lion": {"optimizer": "lion_32bit"},
    "bnb_Lion8bit": {"optimizer": "bnb-lion-8bit"},
    "lion8": {"optimizer": "bnb-lion-8bit"},
    "bnb_AdEMAMix8bit": {"optimizer": "bnb-ademamix-8bit"},
    "in_backward_sgd": {"optimizer": "sgd", "optimizer_in_backward": True},
    "in_backward_adamw": {"optimizer": "adamw-fused", "optimizer_in_backward": True},
    "in_backward_adamw8bit": {"optimizer": "bnb-adamw-8bit", "optimizer_in_backward": True},
    "came": {"optimizer": "came"},
    "galore": {"optimizer": "galore_adamw", "optimizer_options": _RANK},
    "galore_8bit": {"optimizer": "galore_adamw_8bit", "optimizer_options": _RANK},
    "galore_adafactor": {"optimizer": "galore_adafactor", "optimizer_options": _RANK},
    "apollo": {"optimizer": "apollo_adamw", "optimizer_options": _RANK},
    "apollo_mini": {"optimizer": "apollo-mini"},
    "adalomo": {"optimizer": "adalomo"},
    "lomo": {"optimizer": "lomo"},
    "ao_AdamW8bit": {"optimizer": "adamw_torch_8bit"},
    "ao_AdamW4bit": {"optimizer": "torchao-adamw-4bit"},
    "ao_AdamWFp8": {"optimizer": "torchao-adamw-fp8"},
    "ao_offload": {"optimizer": "torchao-cpu-offload"},
    "ao_offload_grads": {
        "optimizer": "torchao-cpu-offload",
        "optimizer_options": {"offload_gradients": True},
    },
}
"""What the records call an optimizer -> what is asked for."""


def setup_of(record: dict[str, Any]) -> TrainingSetup:
    """The record's settings in memplan's words."""
    settings = record["settings"]
    name = settings["opt"]
    fields = dict(OPTIMIZERS.get(name) or {"optimizer": name.replace("_", "-")})
    return TrainingSetup(
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        precision=PRECISIONS[settings["precision"]],  # type: ignore[arg-type]
        engine="ddp",  # type: ignore[arg-type]
        **fields,
    )


class _Sizing(CachingAllocator):
    """An allocator that remembers how large the blocks are that it hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def blocks_in_use(self) -> dict[int, Any]:
        return _InUse(self.sizes)


class _InUse(dict[int, Any]):
    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __setitem__(self, block: int, found: Any) -> None:
        super().__setitem__(block, found)
        self.sizes[block] = found[1] * ALLOCATION_ROUNDING


class Marked(Ledger):
    """A ledger that knows where each part of each step begins."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[int, Part, int]] = []

    def enter(self, part: Part, step: int = 0) -> None:
        self.marks.append((len(self.events), part, step))

    def recurs(self) -> bool:
        """No: each step has marks of its own."""
        return False

    def block_sizes(self) -> dict[int, int]:
        """What the allocator hands out for each request, unsplit rests included [bytes]."""
        allocator = _Sizing()
        allocator.replay(self.events, self.streams)
        return allocator.sizes

    def figures(self) -> dict[str, int]:
        """Bytes before the last step, and the fullest moment of each of its parts."""
        sizes = self.block_sizes()
        levels = [0]
        for number, event in enumerate(self.events):
            change = sizes[number] if event >= 0 else -sizes[~event]
            levels.append(levels[-1] + change)
        last = max(step for _, _, step in self.marks)
        ends = [*(start for start, _, _ in self.marks[1:]), len(self.events)]
        found = {}
        for (start, part, step), end in zip(self.marks, ends, strict=True):
            if step == last and part is not Part.LOAD:
                found[f"peak_{part.value}"] = max(levels[start : end + 1])
                if part is Part.FORWARD:
                    found["bytes_before"] = levels[start]
        steps = [found[f"peak_{part}"] for part in ("forward", "backward", "step")]
        return {**found, "peak": max(steps)}


def stepped_tensors(record: dict[str, Any]) -> list[Stepped]:
    """The model's weights as an optimizer sees them, copies of a layer once."""
    model = load_model(record["config"], TASKS[record["task"]])
    setup = setup_of(record).resolve(model.context_length)
    tape, _ = record_and_walk(model, tape_options(setup, load_gpu(GPU)))
    found: dict[Stepped, None] = {}
    for _, parameters in declared_parameters(tape):
        found.update(dict.fromkeys(map(stepped, parameters)))
    return list(found)


def played(record: dict[str, Any]) -> dict[str, int]:
    """The figures of the last step, as the run is played out, and what the allocator reserves."""
    model = load_model(record["config"], TASKS[record["task"]])
    gpu = load_gpu(GPU)
    setup = setup_of(record).resolve(model.context_length)
    given = prepared(model, setup, gpu).rank_input
    ledger = Marked()
    workspace = workspace_bytes(gpu.compute_capability) // NUM_HANDLES
    program = program_of(given, ledger, workspace_bytes=workspace)
    program.run(num_steps=record["settings"]["steps"])
    reserved = replay(ledger.events, ledger.streams).reserved_bytes
    off = program.optimizer.off_gpu_bytes
    return {**ledger.figures(), "reserved_peak": reserved, "off_gpu_bytes": off}
