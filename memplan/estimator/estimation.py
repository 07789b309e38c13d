"""From a model and a setup to an ``Estimate``: record the tape, walk it, lay the engine over it."""

from dataclasses import replace
from functools import lru_cache

from memplan.errors import SetupError
from memplan.estimator.assumptions import assumptions_of, notes_of
from memplan.estimator.estimate import Estimate
from memplan.graph.counts import total_parameters, trainable_parameters
from memplan.graph.model import record_model
from memplan.graph.options import TapeOptions
from memplan.graph.tape import Tape
from memplan.hardware.gpu import (
    GpuSpec,
    num_multiprocessors,
    threads_per_multiprocessor,
)
from memplan.memory.account import ComponentKind, Entry, Phase, RankAccount
from memplan.memory.engine_options import engine_autocast
from memplan.memory.rank import RankInput
from memplan.memory.runtime import workspace_bytes
from memplan.memory.step import StepPasses, StepWalk
from memplan.model.spec import ModelSpec
from memplan.training.kernels import SelectivePolicy
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import Recomputation, TrainingSetup


def estimate(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None = None) -> Estimate:
    """Estimate the memory of training ``model`` as ``setup`` says; a pure function.

    ``gpu`` decides which attention kernel can run and the verdict; without one, kernels are those
    of a current GPU and there is no verdict.

    Raises ``SetupError`` for a setup that this model or engine cannot be trained with.
    """
    resolved = setup.resolve(model.context_length)
    options = tape_options(resolved, gpu)
    if not options.flash_available:
        options = without_flash(model, options)
    tape, passes = record_and_walk(model, options)
    account = worst_account(model, options, resolved)
    if gpu is not None and account.phases[0].peak_bytes > gpu.capacity_bytes:
        given = RankInput(tape=tape, passes=passes, setup=resolved)
        account = rank_account(given, capacity_bytes=gpu.capacity_bytes)
    account = with_workspaces(account, _scratch_bytes(resolved, gpu))
    if model.activations_left_out:
        left_out = (*account.left_out, model.activations_left_out)
        account = replace(account, left_out=left_out)
    return Estimate(
        model=model,
        setup=resolved,
        gpu=gpu,
        num_params=total_parameters(tape),
        trainable_params=trainable_parameters(tape),
        account=account,
        ranks=(account,),
        activations_bytes=passes.after_forward.total_bytes,
        attention_kernel=attention_kernel(tape),
        assumptions=assumptions_of(model, setup, resolved),
        notes=notes_of(model, resolved, gpu),
    )


@lru_cache(maxsize=256)
def record_and_walk(model: ModelSpec, options: TapeOptions) -> tuple[Tape, StepPasses]:
    """The model on the tape, and the walk over it; remembered, since engines share activations."""
    tape = record_model(model, options)
    return tape, StepWalk(tape).run()


def without_flash(model: ModelSpec, options: TapeOptions) -> TapeOptions:
    """Options for a GPU without flash attention: those of any GPU where it would not be used."""
    current = replace(options, flash_available=True)
    tape, _ = record_and_walk(model, current)
    return options if tape.flash_decides else current


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
        multiprocessors=num_multiprocessors(gpu),
        threads_per_multiprocessor=threads_per_multiprocessor(gpu),
        flash_available=gpu is None or gpu.supports_flash_attention,
        checkpointed_layers=_checkpointed_layers(setup),
        selective=setup.checkpointing is Recomputation.SELECTIVE,
        outputs_held=setup.outputs_held,
        upcast_outputs=setup.upcast_outputs,
        freeze=setup.freeze,
    )


def _checkpointed_layers(setup: TrainingSetup) -> float:
    checkpointing = setup.checkpointing
    if isinstance(checkpointing, float):
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
def worst_account(model: ModelSpec, options: TapeOptions, resolved: TrainingSetup) -> RankAccount:
    """The worst rank's account on a GPU with room to load; remembered, since GPUs share it."""
    tape, passes = record_and_walk(model, options)
    return rank_account(RankInput(tape=tape, passes=passes, setup=resolved))


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
    Raises ``SetupError`` for an engine or a parallel degree that is not modelled.
    """
    setup = given.setup
    _refuse_unmodelled(setup)
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        from memplan.memory.deepspeed import deepspeed_account, fullest_rank

        chosen = fullest_rank(given) if rank is None else rank
        return deepspeed_account(given, rank=chosen, capacity_bytes=capacity_bytes)
    if engine is Engine.FSDP:
        from memplan.memory.fsdp2 import fsdp2_account

        return fsdp2_account(given)
    if engine is Engine.FSDP1:
        from memplan.memory.fsdp1 import fsdp1_account

        return fsdp1_account(given)
    from memplan.memory.ddp import ddp_account

    return ddp_account(given)


def _refuse_unmodelled(setup: TrainingSetup) -> None:
    if setup.chosen_engine is Engine.MEGATRON:
        msg = "engine: megatron is not modelled yet; ddp, deepspeed, fsdp and fsdp1 are"
        raise SetupError(msg)
    for name in UNMODELLED_DEGREES:
        if getattr(setup, name) > 1:
            msg = f"{name}: is not modelled yet; only data parallelism is"
            raise SetupError(msg)


UNMODELLED_DEGREES = (
    "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
    "virtual_stages",
)  # fmt: skip
"""Parallel degrees that a setup may name and no account holds yet: refused, never ignored."""


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
    "efficient_attention": "efficient",
    "tril": "math",
    "softmax": "eager",
    "fused_softmax": "eager",
}
