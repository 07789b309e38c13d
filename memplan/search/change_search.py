"""Changed setups asked one after another: the first that fits card and node, and the best of the others."""

from contextlib import suppress

from memplan.errors import SetupError
from memplan.estimator import (
    Estimate,
    Verdict,
    bare_estimate,
    is_long_to_tell,
    least_bytes,
    told,
)
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.memory.account import ComponentKind
from memplan.model.spec import ModelSpec
from memplan.search.changed_setups import doublings, possible
from memplan.search.node_ram import overfills_usual_node
from memplan.training.setup import TrainingSetup

FEW_TOKENS = 64
"""Of a sequence, where the length makes no difference."""

FITTING = (Verdict.FITS, Verdict.STATES_FIT)
"""What a change that helps comes to."""

UNSHARED = (
    ComponentKind.ACTIVATIONS, ComponentKind.LOGITS_AND_LOSS, ComponentKind.GATHERED_PARAMETERS,
)  # fmt: skip
"""What each GPU holds of its own, however many there are."""


def unshared_bytes(answer: Estimate) -> int:
    """What more GPUs would not share between them, of what is held at the fullest moment [bytes]."""
    entries = answer.account.peak.entries
    return sum(entry.num_bytes for entry in entries if entry.kind in UNSHARED)


def holds_states(answer: Estimate, gpu: GpuSpec) -> bool:
    """Whether the card has room for what lies on it between steps, which only other states change."""
    kept = 0 if answer.setup.outputs_held else answer.held_bytes
    return kept + answer.overhead_bytes.low <= gpu.capacity_bytes


class ChangeSearch:
    """Looks at changed setups one after another, and remembers the best of those that do not do."""

    def __init__(self, model: ModelSpec, answer: Estimate, gpu: GpuSpec) -> None:
        self.model = model
        self.answer = answer
        self.gpu = gpu
        self.lacks_states = not holds_states(answer, gpu) and is_long_to_tell(answer)
        """What lies on the card between steps decides, so that it is looked at first where that is sooner told."""
        self.found: Estimate | None = None
        self.tried: set[TrainingSetup] = {answer.setup}
        self.too_large: set[TrainingSetup] = set()
        """On one GPU or one group of them, what does not fit however many there are."""
        self.attainable: set[TrainingSetup] = set()
        """The same of what the most GPUs that are tried are not too few for."""
        self.overfilling: list[Estimate] = []
        """Need more CPU RAM than is usual: whether one fits the card is asked only where nothing else does."""
        self.tight: Estimate | None = None

    @property
    def next_best(self) -> Estimate | None:
        """Where none does."""
        fitting = (each for each in self.overfilling if each.job_verdict in FITTING)
        return next(fitting, self.tight)

    def fits(self, setup: TrainingSetup) -> bool:
        """Whether a setup that was not tried yet fits card and node; then it is what is found."""
        alone = replace(setup, num_gpus=setup.num_gpus // setup.data_parallel, num_nodes=None)
        if setup in self.tried or alone in self.too_large:
            return False
        self.tried.add(setup)
        try:
            if self.lacks_states and not self._may_hold_states(setup, alone):
                return False
            if self._is_hopeless(setup):
                self.too_large.add(alone)
                return False
            better = bare_estimate(self.model, setup, self.gpu)
        except SetupError:
            return False
        is_beyond = unshared_bytes(better) > self.gpu.capacity_bytes
        if is_beyond or (alone not in self.attainable and self._stays_too_large(better, alone)):
            self.too_large.add(alone)
        better = replace(better, node_memory_bytes=self.answer.node_memory_bytes)
        if better.node_memory_bytes is None and overfills_usual_node(better):
            self.overfilling.append(told(better, setup))
            return False
        verdict = better.job_verdict
        if verdict in FITTING:
            self.found = told(better, setup)
        elif verdict is Verdict.TIGHT and not overfills_usual_node(better):
            self.tight = self.tight or told(better, setup)
        return verdict in FITTING

    def _stays_too_large(self, answer: Estimate, alone: TrainingSetup) -> bool:
        """Whether what more GPUs than asked for are not enough for is too large for the most that are tried, too.

        All in between are then left out: those fail by the same run at either end. What is allocated alone says as
        much of each, and sooner: only where a run had to be replayed the most are asked, and it counts only where theirs
        had to be, too (of a dimension that is shorter than they are many each holds a row).
        """
        asked, tried = self.answer.setup.num_gpus, answer.setup.num_gpus
        *_, most = (tried, *doublings(asked))
        if not asked < tried < most or not self._lacks_by_replay(answer):
            return False
        with suppress(SetupError):
            setup = replace(answer.setup, num_gpus=most, num_nodes=None)
            if self._lacks_by_replay(bare_estimate(self.model, setup, self.gpu)):
                return True
        self.attainable.add(alone)
        return False

    def _lacks_by_replay(self, answer: Estimate) -> bool:
        """Whether the card is too small for its run, and not for what is allocated at once."""
        allocated = answer.worst_bytes + answer.overhead_bytes.low
        return allocated <= self.gpu.capacity_bytes and answer.verdict is Verdict.OOM

    def _may_hold_states(self, setup: TrainingSetup, alone: TrainingSetup) -> bool:
        """Whether the card has room for what is loaded and for states, which a step of few tokens says as well.

        What is too much while it is loaded with the most GPUs that are tried, too, is so with all in between: no
        shard gets larger with more of them.
        """
        short = self._shortened(setup)
        if short is None or short.account.unsaved:
            return True
        asked, tried = self.answer.setup.num_gpus, setup.num_gpus
        if self._loads(short):
            return holds_states(short, self.gpu)
        *_, most = (tried, *doublings(asked))
        if asked < tried < most:
            for wider in possible(replace, setup, num_gpus=most, num_nodes=None):
                furthest = self._shortened(wider)
                if furthest is not None and not self._loads(furthest):
                    self.too_large.add(alone)
        return False

    def _shortened(self, setup: TrainingSetup) -> Estimate | None:
        """The same with one sequence of few tokens; None where that cannot be."""
        length = min(setup.seq_len or FEW_TOKENS, FEW_TOKENS * setup.context_parallel)
        with suppress(SetupError):
            short = replace(setup, micro_batch_size=1, seq_len=length, evaluation=None)
            return bare_estimate(self.model, short, self.gpu)
        return None

    def _loads(self, answer: Estimate) -> bool:
        """Whether the card has room for loading; of one whose allocator is not replayed that is not asked."""
        loading = answer.phases.get("load")
        if loading is None or answer.certain_bytes is not None:
            return True
        return loading.peak_bytes + answer.overhead_bytes.low <= self.gpu.capacity_bytes

    def _is_hopeless(self, setup: TrainingSetup) -> bool:
        """Whether activations alone are more than the card has, which a walk says long before an estimate."""
        if setup.pipeline_parallel > 1:
            return False
        return least_bytes(self.model, setup, self.gpu) > self.gpu.capacity_bytes
