"""From a model and a setup to an ``Estimate``: record the tape, walk it, lay the engine over it."""

from dataclasses import replace
from functools import lru_cache, partial

from memplan.errors import SetupError
from memplan.estimator.assumptions import assumptions_of, notes_of
from memplan.estimator.estimate import Estimate
from memplan.fast_dataclass import dataclass
from memplan.graph.counts import total_parameters, trainable_parameters
from memplan.graph.model import record_model
from memplan.graph.options import TapeOptions
from memplan.graph.tape import Tape
from memplan.hardware.gpu import (
    GpuSpec,
    num_multiprocessors,
    threads_per_multiprocessor,
)
from memplan.memory import accounts
from memplan.memory.account import ComponentKind, Entry, Phase, RankAccount
from memplan.memory.engine_options import (
    casts_inputs,
    engine_autocast,
    has_module_hooks,
    has_python_linear,
)
from memplan.memory.programs import rank_kinds
from memplan.memory.rank import RankInput, joined
from memplan.memory.required import RunSource
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.memory.step import StepPasses, StepWalk, splits_sums
from memplan.model.spec import ModelSpec
from memplan.training.kernels import AttentionKernel, SelectivePolicy
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.precision import PRECISIONS, refuse_unmodelled
from memplan.training.sdpa import (
    SDPA_SUPPORT,
    choose_sdpa_kernel,
    sdpa_support,
)
from memplan.training.setup import Recomputation, TrainingSetup


def estimate(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None = None, *, rank: int | None = None
) -> Estimate:
    """Estimate the memory of training ``model`` as ``setup`` says; a pure function.

    ``gpu`` decides which attention kernel can run and the verdict; without one, kernels are those
    of a current GPU and there is no verdict. ``rank`` asks for the account of one rank, in place of
    the worst one's.

    Raises ``SetupError`` for a setup that this model or engine cannot be trained with, and for a
    rank that it does not have.
    """
    job = _Job.of(model, setup, gpu)
    account = job.account(rank=rank)
    return Estimate(
        model=model,
        setup=job.setup,
        gpu=gpu,
        run_source=job.run_source(account),
        num_params=total_parameters(job.given.tape),
        trainable_params=trainable_parameters(job.given.tape),
        account=account,
        activations_bytes=job.given.passes.after_forward.total_bytes,
        attention_kernel=attention_kernel(job.given.tape),
        assumptions=assumptions_of(model, setup, job.setup, gpu),
        notes=notes_of(model, job.setup, gpu),
    )


def least_bytes(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None = None) -> int:
    """What no engine can do with less than: the activations alone [bytes].

    Much sooner told than an estimate. Raises ``SetupError`` as ``estimate`` does.
    """
    return accounts.activations_peak_bytes(_Job.of(model, setup, gpu).given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A model, a setup and a GPU, recorded and walked."""

    walked: "_Walked"
    gpu: GpuSpec | None
    given: RankInput

    @classmethod
    def of(cls, model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> "_Job":
        """Fill the setup's defaults in, record the model and walk it."""
        resolved = setup.resolve(model.context_length, has_bf16=gpu is None or gpu.has_bf16)
        _refuse_kernels(resolved, gpu)
        walked = _walked_on_card(model, tape_options(resolved, gpu))
        return cls(walked=walked, gpu=gpu, given=walked.trained_as(resolved))

    @property
    def setup(self) -> TrainingSetup:
        """With every default filled in."""
        return self.given.setup

    def account(self, *, rank: int | None) -> RankAccount:
        """One rank's account, or the worst one's, on this GPU."""
        if rank is None:
            account = worst_account(self.walked, self.setup)
        else:
            account = rank_account(self.given, rank=rank)
        gpu = self.gpu
        if gpu is not None and account.phases[0].peak_bytes > gpu.capacity_bytes:
            account = rank_account(self.given, rank=account.rank, capacity_bytes=gpu.capacity_bytes)
        account = with_workspaces(account, _scratch_bytes(self.setup, gpu))
        if self.walked.model.activations_left_out:
            left_out = (*account.left_out, self.walked.model.activations_left_out)
            account = replace(account, left_out=left_out)
        return account

    def run_source(self, account: RankAccount) -> RunSource:
        """From which that rank's run is played out."""
        return RunSource(
            record=partial(record_and_walk, self.walked.model, self.walked.options),
            setup=self.setup,
            rank=account.rank,
            workspace_bytes=_scratch_bytes(self.setup, self.gpu) // NUM_HANDLES,
            capacity_bytes=self._tight_capacity(account),
        )

    def _tight_capacity(self, account: RankAccount) -> int | None:
        """The card's, where loading has to go by it; None where there is room."""
        gpu = self.gpu
        if gpu is None or account.phases[0].peak_bytes <= gpu.capacity_bytes:
            return None
        return gpu.capacity_bytes


@lru_cache(maxsize=256)
def record(model: ModelSpec, options: TapeOptions) -> Tape:
    """The model on the tape; remembered, since cards are compared by it."""
    return record_model(model, options)


@lru_cache(maxsize=256)
def record_and_walk(model: ModelSpec, options: TapeOptions) -> tuple[Tape, StepPasses]:
    """The model on the tape, and the walk over it; remembered, since engines share activations."""
    tape = record(model, options)
    return tape, StepWalk(tape).run()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Walked:
    """A model recorded and walked with some options: one object for all that share it."""

    model: ModelSpec
    options: TapeOptions
    tape: Tape
    passes: StepPasses

    def trained_as(self, resolved: TrainingSetup) -> RankInput:
        """With a setup whose tape this is."""
        return RankInput(tape=self.tape, passes=self.passes, setup=resolved)


@lru_cache(maxsize=256)
def _walked_on_card(model: ModelSpec, options: TapeOptions) -> _Walked:
    """Remembered by a card's own options too: a model is long to tell from another."""
    return _walked(model, shared_options(model, options))


@lru_cache(maxsize=256)
def _walked(model: ModelSpec, options: TapeOptions) -> _Walked:
    tape, passes = record_and_walk(model, options)
    return _Walked(model=model, options=options, tape=tape, passes=passes)


def shared_options(model: ModelSpec, options: TapeOptions) -> TapeOptions:
    """Options for a card: those of the plainest card whose kernels are the same for this model.

    What a walk finds depends on the card through the kernels it runs alone, and how they split long
    sums, so cards that do the same share the walk.
    """
    default = TapeOptions()
    plain = replace(
        options,
        sdpa=default.sdpa,
        multiprocessors=default.multiprocessors,
        threads_per_multiprocessor=default.threads_per_multiprocessor,
    )
    tape = record(model, plain)
    shared = options if splits_sums(tape) else replace(plain, sdpa=options.sdpa)
    chosen = [choose_sdpa_kernel(call, options.sdpa) for call in tape.sdpa_calls]
    for support in (default.sdpa, *SDPA_SUPPORT.values()):
        if [choose_sdpa_kernel(call, support) for call in tape.sdpa_calls] == chosen:
            return replace(shared, sdpa=support)
    return shared


def tape_options(setup: TrainingSetup, gpu: GpuSpec | None) -> TapeOptions:
    """How the tape has to be written for a setup with every default filled in."""
    formats = PRECISIONS[setup.chosen_precision]
    seq_len = setup.seq_len or 1
    return TapeOptions(
        batch_size=setup.micro_batch_size,
        seq_len=seq_len,
        target_seq_len=setup.target_seq_len or seq_len,
        weights=formats.weights,
        compute=formats.compute,
        autocast=formats.autocast or engine_autocast(setup),
        kernels=setup.chosen_kernels,
        dropout=setup.dropout,
        decomposed=not setup.kernel_scratch,
        sdpa=sdpa_support(gpu),
        multiprocessors=num_multiprocessors(gpu),
        threads_per_multiprocessor=threads_per_multiprocessor(gpu),
        checkpointed_layers=_checkpointed_layers(setup),
        selective=setup.checkpointing is Recomputation.SELECTIVE,
        module_hooks=has_module_hooks(setup),
        casts_inputs=casts_inputs(setup),
        python_linear=has_python_linear(setup),
        outputs_held=setup.outputs_held,
        upcast_outputs=setup.upcast_outputs,
        freeze=setup.freeze,
    )


def _checkpointed_layers(setup: TrainingSetup) -> float | CheckpointedLayers:
    checkpointing = setup.checkpointing
    if isinstance(checkpointing, float | CheckpointedLayers):
        return checkpointing
    if checkpointing is Recomputation.SELECTIVE:
        policy = setup.chosen_kernels.selective
        return 1.0 if policy is SelectivePolicy.EVERY_OTHER_MATMUL else 0.0
    return 1.0 if checkpointing is Recomputation.FULL else 0.0


def _scratch_bytes(setup: TrainingSetup, gpu: GpuSpec | None) -> int:
    if not setup.kernel_scratch:
        return 0
    return workspace_bytes(gpu.compute_capability if gpu is not None else None)


@lru_cache(maxsize=256)
def worst_account(walked: _Walked, resolved: TrainingSetup) -> RankAccount:
    """The worst rank's account on a GPU with room to load; remembered, since GPUs share it."""
    return rank_account(walked.trained_as(resolved))


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
    _refuse_unmodelled(given.setup)
    return accounts.rank_account(given, rank=rank, capacity_bytes=capacity_bytes)


def all_ranks(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> list[RankAccount]:
    """Every distinct account of a job, the fullest first, with the ranks that it is of.

    Of equally full ones that of the rank which stands for the job comes first.
    """
    job = _Job.of(model, setup, gpu)
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


def _refuse_unmodelled(setup: TrainingSetup) -> None:
    refuse_unmodelled(setup.chosen_engine)
    for name in UNMODELLED_DEGREES:
        if getattr(setup, name) > 1:
            msg = (
                f"{name}: is not modelled; the nearest that is: sharding the model over all GPUs, "
                "`engine='fsdp'` or `zero_stage=3`"
            )
            raise SetupError(msg)
    for name in UNMODELLED_CHOICES:
        if getattr(setup, name):
            msg = f"{name}: is not modelled, as no tensor or pipeline parallelism is"
            raise SetupError(msg)


def _refuse_kernels(setup: TrainingSetup, gpu: GpuSpec | None) -> None:
    """Refuse the flash-attention package where it does not run: on old cards, and in fp32."""
    if setup.chosen_kernels.attention is not AttentionKernel.FLASH:
        return
    if gpu is not None and not gpu.supports_flash_attention:
        version = gpu.compute_capability
        has = f"sm_{version[0]}{version[1]}" if version is not None else gpu.vendor.value
        msg = (
            f"attention: flash needs compute capability 8.0 (sm_80), and {gpu.gpu_id} is {has}; "
            "choose sdpa or eager"
        )
        raise SetupError(msg)
    formats = PRECISIONS[setup.chosen_precision]
    if not (formats.autocast or engine_autocast(setup) or formats.compute).is_half:
        msg = "attention: flash takes 16 bits only, and the precision is fp32; choose sdpa or eager"
        raise SetupError(msg)


UNMODELLED_CHOICES = ("sequence_parallel", "loss_parallel", "pipeline_schedule")
"""What comes with such a degree."""
UNMODELLED_DEGREES = (
    "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
    "virtual_stages",
)  # fmt: skip
"""Parallel degrees that a setup may name and no account holds yet: refused, never ignored."""


@lru_cache(maxsize=256)
def attention_kernel(tape: Tape) -> str:
    """Which kernel computes the attention scores.

    Where layers differ, all of them, in the order they come.
    """
    found: list[str] = []
    for segment in tape.segments:
        for operation in segment.operations:
            name = _KERNEL_OPERATIONS.get(operation.name)
            if name is not None and name not in found:
                found.append(name)
    return "+".join(found) or "none"


_KERNEL_OPERATIONS = {
    "flash_attention": "flash",
    "cudnn_attention": "cudnn",
    "efficient_attention": "efficient",
    "safe_softmax": "math",
    "softmax": "eager",
    "fused_softmax": "eager",
}
