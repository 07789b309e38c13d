"""A job: a walked model trained in one way on one kind of GPU, and what its ranks hold."""

from collections import OrderedDict
from collections.abc import Hashable
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from memplan.errors import SetupError
from memplan.estimator.modelled.quantized_base import on_its_base
from memplan.estimator.overhead import overhead_of
from memplan.estimator.recording import (
    Walked,
    one_token,
    record_and_walk,
    reducing_device,
    tape_options,
    walked_forward,
    walked_on_card,
)
from memplan.estimator.refusals import check_model, check_splits
from memplan.fast_dataclass import dataclass, fields, replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import trainable_parameters
from memplan.graph.remembered import OF_TAPES
from memplan.hardware.gpu import GpuSpec
from memplan.memory import accounts
from memplan.memory.account import ComponentKind, Entry, Phase, RankAccount
from memplan.memory.programs import holds_inputs, loads_by_capacity, rank_kinds
from memplan.memory.rank import RankInput, Stage, joined
from memplan.memory.required import RunSource
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.model.spec import ModelSpec
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup

_OF_THE_BATCH = ("micro_batch_size", "seq_len", "target_seq_len")
all_but_the_batch = attrgetter(
    *(each.name for each in fields(TrainingSetup) if each.name not in _OF_THE_BATCH)
)
"""A setup's values but for how many sequences a micro-batch has, and how long they are."""


class _LookedAt:
    """What is found out about a job once, however many of its ranks are asked for."""

    __slots__ = ("_room_bytes",)
    _room_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(_LookedAt):
    """A model, a setup and a GPU, recorded and walked."""

    walked: Walked
    gpu: GpuSpec | None
    given: RankInput

    @classmethod
    def of(cls, model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> "Job":
        """Fill the setup's defaults in, record the model and walk it."""
        OF_TAPES.make_room()
        resolved = setup.resolve(
            model.context_length,
            has_bf16=gpu is None or gpu.has_bf16,
            family=model.family,
        )
        resolved = on_its_base(model, resolved)
        check_splits(resolved)
        check_model(model, resolved, gpu)
        if resolved.chosen_engine is Engine.MEGATRON and model.has_towers:
            from memplan.estimator.modelled.megatron_setup import without_towers  # only then

            model = without_towers(model)
        given = prepared(model, resolved, gpu)
        _refuse_untrained(given)
        return cls(walked=given.walked, gpu=gpu, given=given.rank_input)

    @classmethod
    def of_answer(cls, model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> "Job":
        """The job that an answer was made of, whose setup is resolved; remembered for the latest."""
        found = _LATEST.get(id(setup))
        if found is not None and found.is_of(model, setup, gpu):
            return found.job
        return cls.of(model, setup, gpu)

    def remember(self, model: ModelSpec) -> None:
        """Have it at hand when more is asked of its answer: how long a step takes."""
        _LATEST[id(self.setup)] = _Latest(model, self)
        if len(_LATEST) > REMEMBERED_JOBS:
            _LATEST.popitem(last=False)

    @property
    def setup(self) -> TrainingSetup:
        """With every default filled in."""
        return self.given.setup

    @property
    def fingerprint(self) -> str:
        """The same of the same model, setup and card in every process."""
        from hashlib import sha256  # only where a step was measured

        card = self.gpu.gpu_id if self.gpu is not None else ""
        model = self.walked.model
        told = f"{model.family} {model.num_params} {self.setup!r} {card}"
        return sha256(told.encode()).hexdigest()[:16]

    @property
    def code(self) -> str:
        """What decides which code runs, in words: sizes, lengths and how many GPUs there are do not."""
        setup = self.setup
        splits = [
            name
            for name in ("tensor", "pipeline", "context", "expert")
            if getattr(setup, f"{name}_parallel") > 1
        ]
        told = [
            setup.chosen_engine.value, setup.zero_stage.value if setup.zero_stage is not None else "",
            "+".join(splits), "adapter" if setup.adapter is not None else "",
            str(setup.quantize or ""), setup.fp8.value, setup.offload_optimizer.value,
            setup.job.kind.value,
        ]  # fmt: skip
        return " ".join(str(each) for each in told if str(each) not in ("", "none"))

    def account(self, *, rank: int | None) -> RankAccount:
        """One rank's account, or the worst one's, on this GPU."""
        account = self._without_workspaces(rank)
        gpu = self.gpu
        if _multiplies(self.given, account.rank):
            account = with_workspaces(account, _scratch_bytes(self.setup, gpu))
        left_out = [*filter(None, (self.walked.model.activations_left_out,))]
        if self.setup.job.rollout_share and gpu is None:
            left_out.append(
                f"the share of the card that {self.setup.job.chosen_rollout.value} takes: name a GPU"
            )
        if left_out:
            account = replace(account, left_out=(*account.left_out, *left_out))
        return account

    def _without_workspaces(self, rank: int | None) -> RankAccount:
        room = self.load_capacity_bytes
        if rank is None:
            worst = worst_account(_Given(self.given), self.setup)
            if room is None:
                return worst
            rank = worst.rank
        return rank_account(self.given, rank=rank, capacity_bytes=room)

    def run_source(self, account: RankAccount) -> RunSource:
        """From which that rank's run is played out."""
        return RunSource(
            record=partial(_recorded, self.walked.model, self.walked.options, self.setup, self.gpu),
            setup=self.setup,
            rank=account.rank,
            workspace_bytes=_scratch_bytes(self.setup, self.gpu) // NUM_HANDLES,
            capacity_bytes=self.load_capacity_bytes,
            likeness=self._likeness,
        )

    @property
    def _likeness(self) -> Hashable:
        """What runs have in common whose micro-batches, lengths or cards alone differ; None: such are not alike."""
        setup = self.setup
        if setup.has_company or setup.pipeline is not None or holds_inputs(setup):
            return None
        return self.walked.model, one_token(self.walked.options), all_but_the_batch(setup)

    @property
    def load_capacity_bytes(self) -> int | None:
        """What an engine that loads by the room there is has of this card [bytes]; None: it has enough.

        Beside context and NCCL, each at the most that it may be.
        """
        try:
            return self._room_bytes
        except AttributeError:
            found = self._find_room()
            object.__setattr__(self, "_room_bytes", found)
            return found

    def _find_room(self) -> int | None:
        gpu, setup = self.gpu, self.setup
        if gpu is None or not loads_by_capacity(setup):
            return None
        room = gpu.capacity_bytes - overhead_of(setup, gpu).high
        loading = worst_account(_Given(self.given), setup).phases[0].peak_bytes
        return room if loading > room else None


REMEMBERED_JOBS = 64
"""Answers of which more may be asked: a table's."""


class _Latest(NamedTuple):
    """A job, and the model that was asked for."""

    model: ModelSpec
    job: Job

    def is_of(self, model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> bool:
        return self.model is model and self.job.setup is setup and self.job.gpu is gpu


_LATEST: OrderedDict[int, _Latest] = OrderedDict()
"""By the setup itself, which a job holds."""
OF_TAPES.forget_with(_LATEST.clear)


class Prepared(NamedTuple):
    """A model recorded and walked, and all that its job has beside it."""

    walked: Walked
    rank_input: RankInput


def prepared(model: ModelSpec, resolved: TrainingSetup, gpu: GpuSpec | None) -> Prepared:
    """Record what a resolved setup trains, and what runs beside it."""
    if not resolved.has_company:
        walk = walked_on_card if resolved.pipeline is None else walked_forward
        walked = walk(model, tape_options(resolved, gpu))
        given = walked.trained_as(resolved, gpu)
        if resolved.pipeline is not None:
            given = replace(given, stages=_stages(walked, resolved))
        return Prepared(walked, given)
    from memplan.estimator.others import beside, trained_model  # only for jobs beside sft

    trained = trained_model(model, resolved.job)
    walk = walked_on_card if resolved.pipeline is None else walked_forward
    walked = walk(trained, tape_options(resolved, gpu))
    given = walked.trained_as(resolved, gpu, beside(walked, resolved, gpu))
    if resolved.pipeline is not None:
        given = replace(given, stages=_stages(walked, resolved))
    return Prepared(walked, given)


def _stages(walked: Walked, resolved: TrainingSetup) -> tuple[Stage, ...]:
    from memplan.estimator.pipelines import stages_of  # only for pipelines

    assert resolved.pipeline is not None
    return stages_of(walked.model, walked.options, resolved.pipeline)


def _recorded(
    model: ModelSpec, options: TapeOptions, resolved: TrainingSetup, gpu: GpuSpec | None
) -> RankInput:
    """A run's tapes, recorded and walked again where they are not remembered."""
    if not resolved.has_company and resolved.pipeline is None:
        tape, passes = record_and_walk(model, options)
        device = reducing_device(resolved, gpu)
        return RankInput(tape=tape, passes=passes, setup=resolved, device=device)
    return prepared(model, resolved, gpu).rank_input


def _multiplies(given: RankInput, rank: int) -> bool:
    """Whether a rank has any product: of a pipeline's stages one may be an embedding alone."""
    if not given.stages:
        return True
    from memplan.estimator.pipelines import stages_of_rank  # only for pipelines

    return any(
        operation.multiplies
        for number in stages_of_rank(given.setup, rank)
        for segment in given.stages[number].tape.segments
        for operation in segment.operations
    )


def _scratch_bytes(setup: TrainingSetup, gpu: GpuSpec | None) -> int:
    if not setup.kernel_scratch:
        return 0
    return workspace_bytes(gpu.compute_capability if gpu is not None else None)


class _Given:
    """What a rank's account is made from, told apart by the objects that it is of."""

    __slots__ = ("given", "key")

    def __init__(self, given: RankInput) -> None:
        self.given = given
        self.key = (id(given.tape), id(given.beside), given.device, tuple(map(id, given.stages)))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given) and other.key == self.key


@OF_TAPES.remembered(maxsize=256)
def worst_account(made_from: _Given, resolved: TrainingSetup) -> RankAccount:  # noqa: ARG001
    """The worst rank's account on a GPU with room to load; remembered, since GPUs share it."""
    return rank_account(made_from.given)


def with_workspaces(account: RankAccount, num_bytes: int) -> RankAccount:
    """The account with cuBLAS workspaces in every phase but ``load``."""
    if not num_bytes:
        return account
    entry = Entry(ComponentKind.KERNEL_SCRATCH, num_bytes, "cuBLAS workspaces")
    phases = tuple(
        phase if phase.name == "load" else Phase(phase.name, (*phase.entries, entry))
        for phase in account.phases
    )
    return replace(account, phases=phases, held_bytes=account.held_bytes + num_bytes)


def rank_account(
    given: RankInput, *, rank: int | None = None, capacity_bytes: int | None = None
) -> RankAccount:
    """One rank's account, as its engine really holds it; the worst rank's where none is named.

    ``capacity_bytes`` is what an engine goes by that loads differently where there is no room.
    Raises ``SetupError`` for an engine or a parallel degree that is not modelled, and for a rank
    that the setup does not have.
    """
    return accounts.rank_account(given, rank=rank, capacity_bytes=capacity_bytes)


def all_ranks(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> list[RankAccount]:
    """Every distinct account of a job, the fullest first, with the ranks that it is of.

    Of equally full ones that of the rank which stands for the job comes first.
    """
    job = Job.of(model, setup, gpu)
    worst = job.account(rank=None).rank
    found: dict[RankAccount, list[range]] = {}
    for runs in rank_kinds(job.given):
        account = job.account(rank=runs[0].start)
        found.setdefault(replace(account, rank=0), []).extend(runs)
    accounts = [
        replace(account, rank=_rank_of(ranks, worst), ranks=ranks)
        for account, runs in found.items()
        for ranks in [joined(runs)]
    ]
    return sorted(
        accounts, key=lambda each: (-each.peak.peak_bytes, not each.is_of(worst), each.rank)
    )


def _rank_of(runs: tuple[range, ...], worst: int) -> int:
    """The rank that stands for some: the one that stands for the job, if it is among them."""
    return worst if any(worst in run for run in runs) else runs[0].start


def _refuse_untrained(given: Prepared) -> None:
    """Refuse to freeze all that there is: neither loss nor optimizer has anything to act on."""
    walked, setup = given.walked, given.rank_input.setup
    if setup.freeze.any and not trainable_parameters(walked.tape):
        whose = (
            "an adapter's weights in these parts are not trained either" if setup.adapter else ""
        )
        msg = f"freeze: {setup.freeze} leaves nothing of {walked.model.name} to train"
        raise SetupError(f"{msg}: {whose}" if whose else f"{msg}; leave a part out")
