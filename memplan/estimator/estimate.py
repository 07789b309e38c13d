"""The answer: peaks, phases, ranges, the verdict."""

from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from memplan.estimator.overhead import nccl_of, overhead_of
from memplan.fast_dataclass import dataclass, field, fields
from memplan.hardware.gpu import GpuSpec
from memplan.memory.account import COMPONENT_LABELS, Phase, RankAccount
from memplan.memory.required import RunSource
from memplan.memory.runtime import SURELY_ENOUGH, ByteRange, context_range, workspace_bytes
from memplan.model.spec import ModelSpec
from memplan.training.setup import TrainingSetup
from memplan.units import format_gib
from memplan.upward import Displayed, Document, Drawn, Hint, provided

if TYPE_CHECKING:
    from memplan.compute.flops import StepFlops
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.estimator.time.step_time import StepTime
    from memplan.memory.required import PlayedRun, Replays

SCHEMA_VERSION = 1
"""Of ``Estimate.to_dict`` and of the JSON that reports write."""


FLUSHES_NOTE = (
    "{gpu} has no room for the allocator's cache, which is given back and taken again in every step: slow; "
    "a smaller micro-batch or checkpointing leaves room"
)
COMPILED = "what a compiler makes of a step, beyond what is kept between steps"
STAGE_NOTES = ("The fullest rank is shown: ", "One rank is shown: ")
"""How notes begin that say whose account it is: the worst rank's, or that of the one asked for."""


class Verdict(StrEnum):
    """Whether the run fits; the value is what reports print.

    >>> Verdict.FITS == "fits"
    True
    """

    FITS = "fits"
    """Even the high end of the range is within the GPU's memory."""
    TIGHT = "tight"
    """The GPU's memory lies inside the range."""
    OOM = "OOM"
    """Even the low end exceeds it."""
    STATES_FIT = "states fit"
    """Something is left out of the figure, and what is in it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate(Displayed):
    """The memory of one training setup."""

    model: ModelSpec
    setup: TrainingSetup
    """With every default filled in."""
    gpu: GpuSpec | None
    """None: no verdict."""
    num_params: int
    """All parameters, shared ones once."""
    trainable_params: int
    """Those that are trained."""
    account: RankAccount
    """Of the worst rank, or of the one asked for."""
    activations_bytes: int
    """What the forward pass leaves behind for the backward pass, logits included [bytes]."""
    attention_kernel: str
    """What computes the attention scores in the end: cudnn, flash, efficient, math or eager."""
    assumptions: tuple[str, ...]
    """The defaults that were used, in words."""
    notes: tuple[str, ...] = ()
    """What the reader should know: what is not modelled, what surprises."""
    run_source: "RunSource | Replays" = field(repr=False, compare=False)
    """From which the run is played out, event by event, when it is asked for; or what replays of it
    have found already."""
    crowded: "Estimate | None" = field(default=None, repr=False, compare=False)
    """The same with the most tokens that spread experts may be given, where that is a range: the high end of
    ranges and verdicts, whose low end this is. None: it is none."""
    node_memory_bytes: int | None = None
    """CPU RAM that a node has; None: there is no verdict on it [bytes]."""
    times: "TimeQuestion | None" = field(default=None, repr=False, compare=False)
    """What is asked of time, which ``to_dict`` then tells too; None: nothing."""

    def __repr__(self) -> str:
        card = self.gpu.short_name if self.gpu is not None else "GPU"
        verdict = f", {self.verdict}" if self.gpu is not None else ""
        return (
            f"Estimate({self.model.name} on {self.setup.num_gpus}x{card}: "
            f"{format_gib(self.peak_bytes, digits=1)} allocated{verdict})"
        )

    @property
    def peak_bytes(self) -> int:
        """The fullest moment of a training step, as ``max_memory_allocated`` counts it [bytes]."""
        return self.account.peak.peak_bytes

    @property
    def peak_phase(self) -> str:
        """``forward``, ``backward`` or ``step``."""
        return self.account.peak.name

    @property
    def phases(self) -> dict[str, Phase]:
        """Every phase by name, ``load`` among them."""
        return {phase.name: phase for phase in self.account.phases}

    @property
    def ranks(self) -> tuple[RankAccount, ...]:
        """Every distinct rank's account, the fullest first; each says which ranks it is of.

        Computed anew at each call.

        >>> import memplan
        >>> setup = memplan.TrainingSetup(
        ...     num_gpus=16, num_nodes=2, zero_stage=2, offload_optimizer="cpu", seq_len=512
        ... )
        >>> answer = memplan.estimate("llama-3.1-8b", setup)
        >>> [(each.num_ranks, each.ranks) for each in answer.ranks]
        [(1, (range(15, 16),)), (1, (range(0, 1),)), (14, (range(1, 15),))]
        """
        from memplan.estimator.job import all_ranks  # which most estimates are not asked for

        return tuple(all_ranks(self.model, self.setup, self.gpu))

    @property
    def stage_note(self) -> str:
        """Of a pipeline, which rank's account it is, and which stages that has; else nothing."""
        return next((note for note in self.notes if note.startswith(STAGE_NOTES)), "")

    @property
    def held_bytes(self) -> int:
        """Between steps, once optimizer states exist [bytes]."""
        return self.account.held_bytes

    @property
    def host_bytes(self) -> int:
        """CPU RAM of one node, all its ranks together [bytes]."""
        return self.account.node_bytes(self.setup.gpus_per_node)

    @property
    def host_verdict(self) -> Verdict | None:
        """Whether a node's CPU RAM is enough; None where it is not known how much there is."""
        if self.node_memory_bytes is None:
            return None
        return Verdict.FITS if self.host_bytes <= self.node_memory_bytes else Verdict.OOM

    @property
    def job_verdict(self) -> Verdict | None:
        """The GPU's verdict, or OOM where a node's CPU RAM is not enough."""
        return Verdict.OOM if self.host_verdict is Verdict.OOM else self.verdict

    @property
    def worst_bytes(self) -> int:
        """The fullest moment of the whole run, loading and saving included [bytes]."""
        return max(phase.peak_bytes for phase in self.account.phases)

    @property
    def fullest(self) -> "Estimate":
        """The estimate of its high end, where an assumption is a range; else itself."""
        return self if self.crowded is None else self.crowded

    @property
    def deciding_phase(self) -> str:
        """The phase of that moment, which the verdict rests on; the step's where others tie."""
        if self.worst_bytes == self.peak_bytes:
            return self.peak_phase
        return max(self.account.phases, key=lambda phase: phase.peak_bytes).name

    @property
    def run(self) -> "PlayedRun | Replays":
        """The run of this rank, played out, or what was found of it."""
        source = self.run_source
        return source.played if isinstance(source, RunSource) else source

    @property
    def reserved_bytes(self) -> int:
        """Segments of the allocator, as ``max_memory_reserved`` counts them on a card with room [bytes]."""
        return self.run.peaks.reserved_bytes

    @property
    def required_bytes(self) -> int:
        """Least memory for the allocator's segments from which on every larger one is enough for loading
        and all steps [bytes].

        What of this card is left for segments is looked at too, be it between two that are enough. Of a card whose
        allocator is not replayed it is the low end: what is allocated at once, or kept between steps where a compiler lays it out.
        """
        if self.certain_bytes is not None:
            return self.certain_bytes
        required = self.run.required_bytes
        if self.gpu is None:
            return required
        capacity, overhead = self.gpu.capacity_bytes, self.overhead_bytes
        for room in (capacity - overhead.high, capacity - overhead.low):
            while required <= room:
                found = self.run.on_card(room)
                if found.died_at is None:
                    break
                assert found.lacked_bytes is not None, "a run dies for want of something"
                required = found.lacked_bytes
        return required

    @property
    def certain_bytes(self) -> int | None:
        """What such a run surely takes of a card whose allocator is not replayed, CUDA's workspaces left out; None: it is [bytes]."""
        if self.gpu is None or self.gpu.manager.is_replayed:
            return None
        if self.gpu.manager.rules.compiles:
            return self.held_bytes
        return max(self.held_bytes, self.worst_bytes - workspace_bytes(self.gpu.compute_capability))

    @property
    def overhead_bytes(self) -> ByteRange:
        """CUDA context and NCCL, which lie beside the allocator's segments [bytes]."""
        return overhead_of(self.setup, self.gpu)

    @property
    def context_bytes(self) -> ByteRange:
        """CUDA context alone [bytes]."""
        return context_range(self.gpu.compute_capability if self.gpu is not None else None)

    @property
    def nccl_bytes(self) -> ByteRange:
        """NCCL's buffers alone; nothing where no GPUs exchange anything [bytes]."""
        return nccl_of(self.setup)

    @property
    def fragmentation_bytes(self) -> int:
        """What the allocator must have beyond what is asked of it at the fullest moment [bytes]."""
        return max(0, self.required_bytes - self.run.peaks.requested_bytes)

    @property
    def all_gpus_bytes(self) -> ByteRange:
        """What all GPUs of the job need together, each counted as the fullest [bytes]."""
        total, num_gpus = self.total_bytes, self.setup.num_gpus
        return ByteRange(num_gpus * total.low, num_gpus * total.high)

    @property
    def least_total_bytes(self) -> int:
        """The low end of ``total_bytes``, for which the high end's run is not replayed [bytes]."""
        return self.required_bytes + self.overhead_bytes.low

    @property
    def total_bytes(self) -> ByteRange:
        """What it needs of a card: the allocator's segments, the context, NCCL [bytes]."""
        low = self.least_total_bytes
        if self.crowded is not None:
            return ByteRange(low, self.crowded.total_bytes.high)
        most = self.required_bytes
        if self.certain_bytes is not None:
            most = max(most, self.reserved_bytes)
        return ByteRange(low, most + self.overhead_bytes.high)

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits: what ``total_bytes`` says of the card; None without a GPU."""
        if self.gpu is None:
            return None
        capacity = self.gpu.capacity_bytes
        if self.is_beyond(capacity):
            return Verdict.TIGHT if self.account.unsaved else Verdict.OOM
        if self.unmodelled:
            return Verdict.STATES_FIT
        return Verdict.FITS if self.fits_within(capacity) else Verdict.TIGHT

    def is_beyond(self, capacity_bytes: int) -> bool:
        """Whether even the low end of what is needed is more than so much of a card.

        It is where what is allocated at once is, for which nothing has to be replayed.
        """
        low = self.overhead_bytes.low
        if self.certain_bytes is not None:
            return self.certain_bytes + low > capacity_bytes
        if self.worst_bytes + low > capacity_bytes:
            return True
        if self.worst_bytes * SURELY_ENOUGH + low <= capacity_bytes:
            return False
        return not self.run.is_enough(capacity_bytes - low)

    def fits_within(self, capacity_bytes: int) -> bool:
        """Whether so much of a card holds the high end of what is needed.

        It does where it holds twice what is allocated at once, and does not where it does not hold that:
        for either nothing has to be replayed. A run may live with the room that the high end leaves and die with more: of
        such a card nobody can say that it fits.
        """
        if self.crowded is not None and not self.crowded.fits_within(capacity_bytes):
            return False
        high = self.overhead_bytes.high
        if self.worst_bytes + high > capacity_bytes:
            return False
        if self.worst_bytes * SURELY_ENOUGH + high <= capacity_bytes:
            return True
        if self.certain_bytes is not None:
            return self.total_bytes.high <= capacity_bytes
        return self.run.is_enough(capacity_bytes - high) and not self.is_beyond(capacity_bytes)

    def surely_fits_within(self, capacity_bytes: int) -> bool:
        """Whether it does without a replay."""
        if self.crowded is not None and not self.crowded.surely_fits_within(capacity_bytes):
            return False
        return self.worst_bytes * SURELY_ENOUGH + self.overhead_bytes.high <= capacity_bytes

    def may_fit_within(self, capacity_bytes: int) -> bool:
        """Whether a first look does not deny it: where this says no, ``fits_within`` does too, but later."""
        if self.crowded is not None and not self.crowded.may_fit_within(capacity_bytes):
            return False
        high = self.overhead_bytes.high
        if self.worst_bytes + high > capacity_bytes:
            return False
        if self.worst_bytes * SURELY_ENOUGH + high <= capacity_bytes:
            return True
        if self.certain_bytes is not None:
            return self.total_bytes.high <= capacity_bytes
        return self.run.may_be_enough(capacity_bytes - high)

    @property
    def flushes_every_step(self) -> bool:
        """Whether the allocator gives its free segments back in every step on this card.

        Each time it waits for the GPU. It does where the card holds what is needed, but not what would be
        reserved; False without a GPU.
        """
        if self.gpu is None or not self.gpu.manager.is_replayed:
            return False
        room = self.gpu.capacity_bytes - self.overhead_bytes.high
        if self.worst_bytes * SURELY_ENOUGH <= room:
            return False
        return self.run.on_card(room).flushes_recur

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What the figures do not hold, in words: where there is any, no verdict says fits."""
        return self._left_out

    @property
    def _left_out(self) -> tuple[str, ...]:
        """What the account lacks, and what the job holds beside it."""
        found = (*self.account.left_out, *self.setup.left_out)
        if (
            self.gpu is not None
            and not self.gpu.manager.is_replayed
            and self.gpu.manager.rules.compiles
        ):
            found = (*found, COMPILED)
        return found

    @property
    def all_notes(self) -> tuple[str, ...]:
        """What the reader should know, what the allocator does on this card included."""
        if self.gpu is not None and not self.gpu.manager.is_replayed:
            return (self.gpu.manager.rules.note, *self.notes)
        if self.verdict is not Verdict.FITS or not self.flushes_every_step:
            return self.notes
        assert self.gpu is not None
        return (*self.notes, FLUSHES_NOTE.format(gpu=self.gpu.short_name))

    @property
    def left_out_notes(self) -> tuple[str, ...]:
        """What the figures do not hold, and what follows from it, a line each."""
        return (
            *(
                f"Left out: {text}. The figures are lower bounds, and no verdict says fits"
                for text in self._left_out
            ),
            *(
                f"Saves memory: {text}. The figures are upper bounds, and no verdict says OOM"
                for text in self.account.unsaved
            ),
        )

    @property
    def flops(self) -> "StepFlops":
        """FLOPs of one micro-batch through one copy of the model, all s x s scores counted.

        Counted anew at each call; ``memplan.estimator.flops`` has the other convention.
        """
        from memplan.estimator.flops import estimate_flops  # most estimates are of memory alone

        return estimate_flops(self.model, self.setup, self.gpu)

    @property
    def time(self) -> "StepTime":
        """How long an optimizer step takes, between nodes as these cards are sold in.

        Computed anew at each call; ``memplan.estimator.time.step_time`` takes another network. Raises
        ``UnsupportedOperationError`` for a model whose operations are not written down.
        """
        from memplan.estimator.time.step_time import step_time  # most estimates are of memory alone

        return step_time(self)

    @property
    def needs(self) -> ByteRange:
        """What it needs of a card, as ``total_bytes``; as a text in GiB [bytes]."""
        return self.total_bytes

    @property
    def largest_batch(self) -> int | None:
        """The largest micro-batch that fits the GPU; 0: none. None without a GPU, or where it is not known.

        Looked for anew at each call.
        """
        found: int | None = provided("largest_batch", self)
        return found

    def hints(self, *, allow: str | Sequence[str] = ()) -> tuple[Hint, ...]:
        """What would make it fit its GPU; nothing where it does.

        ``allow`` is what may be given up: ``8bit``, ``lora``, ``qlora``.

        >>> import memplan
        >>> [hint.text[:20] for hint in memplan.estimate("gpt2", batch_size=64, gpu="t4").hints()]
        ['to fit: batch_size 4']
        """
        found: tuple[Hint, ...] = provided("hints", self, allow)
        return found

    def explain(self) -> Document:
        """Its arithmetic: every component of every phase, every tensor that a layer keeps."""
        found: Document = provided("explanation", self)
        return found

    def plot(self, what: str = "components") -> Drawn:
        """A picture of it: ``components`` of each phase, the ``step`` in order, or a pipeline's ``ranks``.

        It shows itself in a notebook, with the table behind it. Raises ``UsageError`` for another word.
        """
        found: Drawn = provided("estimate_picture", self, what)
        return found

    def to_dict(self) -> dict[str, object]:
        """One row of ``--format json``: flat, bytes as integers, in a stable order."""
        setup, total = self.setup, self.total_bytes
        row: dict[str, object] = {
            "model": self.model.name,
            "task": self.model.task.value,
            "num_params": self.num_params,
            "trainable_params": self.trainable_params,
            "gpu": self.gpu.gpu_id if self.gpu is not None else None,
            "gpu_capacity_bytes": self.gpu.capacity_bytes if self.gpu is not None else None,
            "num_gpus": setup.num_gpus,
            "num_nodes": setup.nodes,
            **setup_row(setup),
            "attention_kernel": self.attention_kernel,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "worst_bytes": self.worst_bytes,
            "deciding_phase": self.deciding_phase,
            "held_bytes": self.held_bytes,
            "kept_after_forward_bytes": self.activations_bytes,
            "host_bytes": self.host_bytes,
            "reserved_bytes": self.reserved_bytes,
            "required_bytes": self.required_bytes,
            "fragmentation_bytes": self.fragmentation_bytes,
            "context_bytes": self.context_bytes.high,
            "nccl_bytes": self.nccl_bytes.high,
            "total_low_bytes": total.low,
            "total_high_bytes": total.high,
            "all_gpus_low_bytes": setup.num_gpus * total.low,
            "all_gpus_high_bytes": setup.num_gpus * total.high,
            "verdict": self.verdict.value if self.verdict is not None else None,
        }
        return row | self._peaks_row() | self._rare_row()

    def _peaks_row(self) -> dict[str, object]:
        """The peak of each phase, and what is there at the highest [bytes]."""
        row: dict[str, object] = {}
        for name in PHASE_NAMES:
            phase = self.phases.get(name)
            row[f"{name.replace(' ', '_')}_peak_bytes"] = (
                phase.peak_bytes if phase is not None else None
            )
        components = self.account.peak.components
        for label in COMPONENT_LABELS:
            row[f"{label}_bytes"] = components.get(label, 0)
        return row

    def _rare_row(self) -> dict[str, object]:
        """What is not modelled, and what only some setups have."""
        row: dict[str, object] = {"left_out": "; ".join(self.unmodelled)}
        if self.setup.pipeline is not None:
            from memplan.estimator.pipelines import stages_of_rank  # only for pipelines

            row["rank"] = self.account.rank
            row["stages"] = " ".join(map(str, stages_of_rank(self.setup, self.account.rank)))
        if self.crowded is not None and self.setup.experts_spread is not None:
            row["expert_imbalance"] = str(self.setup.experts_spread.imbalance)
            row["crowded_peak_bytes"] = self.crowded.peak_bytes
        if self.host_verdict is not None:
            row["node_memory_bytes"] = self.node_memory_bytes
            row["host_verdict"] = self.host_verdict.value
        if self.times is not None:
            row |= provided("timed_row", self)
        return row


PHASE_NAMES = (
    "load", "first step", "generation", "forward", "backward", "step", "evaluation", "save",
)  # fmt: skip
"""Every phase a report may name, in order."""


_COLUMNS = frozenset({
    "num_gpus", "num_nodes", "engine", "zero_stage", "fsdp_strategy", "offload_optimizer",
    "offload_param", "micro_batch_size", "gradient_accumulation_steps", "seq_len",
    "target_seq_len", "precision", "optimizer", "checkpointing", "freeze",
    "left_out",
})  # fmt: skip
"""Settings that a row has a column for."""
_OTHER_FIELDS = {
    each.name: each.default for each in fields(TrainingSetup) if each.name not in _COLUMNS
}
"""Settings without a column, and their defaults."""


def setup_row(setup: TrainingSetup) -> dict[str, object]:
    """The setup's fields as they stand in a row."""
    checkpointing = setup.checkpointing
    return {
        "engine": setup.chosen_engine.value,
        "zero_stage": setup.zero_stage.value if setup.zero_stage is not None else None,
        "fsdp_strategy": setup.fsdp_strategy.value if setup.fsdp_strategy is not None else None,
        "offload_optimizer": setup.offload_optimizer.value,
        "offload_param": setup.offload_param.value,
        "micro_batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "seq_len": setup.seq_len,
        "target_seq_len": setup.target_seq_len,
        "precision": setup.chosen_precision.value,
        "optimizer": setup.optimizer.value,
        # Always text: a column of a data frame is of one type.
        "checkpointing": str(getattr(checkpointing, "value", checkpointing)),
        "freeze": str(setup.freeze),
        "other_settings": other_settings(setup),
    }


def other_settings(setup: TrainingSetup) -> str:
    """Every setting that has no column of its own and is not what it is by default, as one text.

    >>> other_settings(TrainingSetup(kernels="liger", engine_options={"bucket_cap_mb": 50}))
    'kernels=liger; bucket_cap_mb=50'
    """
    found = []
    for name, default in _OTHER_FIELDS.items():
        value = getattr(setup, name)
        if value == default:
            continue
        if name in ("engine_options", "optimizer_options"):
            found += [f"{key}={_plain(each)}" for key, each in value]
        else:
            found.append(f"{name}={_plain(value)}")
    return "; ".join(found)


def _plain(value: object) -> str:
    return str(value.value if isinstance(value, Enum) else value)


ROW_QUESTIONS = ("task", "gpu", "num_gpus", "num_nodes", *setup_row(TrainingSetup()))
"""Columns of a row that say what was asked; the model aside, the others are answers."""
