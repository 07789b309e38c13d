"""Which setups may share each sequence between ranks: the others are refused, never ignored."""

from memplan.errors import SetupError
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Packing
from memplan.training.compilation import Compilation
from memplan.training.jobs import COLOCATED, PLAIN, Rollout
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.context_parallel import ContextParallelKind

PIECES = 2
"""Of each rank's share of a sequence in a ring: one from the front and one from the back."""

_ENGINES = {
    ContextParallelKind.RING: (Engine.FSDP, Engine.DDP, Engine.DEEPSPEED, Engine.MEGATRON),
    ContextParallelKind.ALL_TO_ALL: (Engine.DEEPSPEED, Engine.FSDP, Engine.FSDP1, Engine.MEGATRON),
}


def check_shared(setup: TrainingSetup) -> None:
    """Refuse sequences that are shared by one rank, that do not divide, and what is not modelled beside.

    Raises ``SetupError``.
    """
    group = setup.sequences_shared
    if group is None:
        msg = "context_parallel_kind: says how context_parallel ranks share sequences, and that is 1: give it too"
        raise SetupError(msg)
    _check_engine(setup, group.kind)
    _check_length(setup, group.kind)
    for name, odd, nearest in _beside(setup, group.kind):
        if odd:
            msg = f"{name}: is not modelled beside context_parallel; {nearest}"
            raise SetupError(msg)


def _check_engine(setup: TrainingSetup, kind: ContextParallelKind) -> None:
    engine = setup.chosen_engine
    if engine not in _ENGINES[kind]:
        known = " and ".join(each.value for each in _ENGINES[kind])
        msg = (
            f"context_parallel: {kind.value} is modelled for {known}, and the engine is {engine.value}: "
            "name one of them, or another context_parallel_kind"
        )
        raise SetupError(msg)


def _check_length(setup: TrainingSetup, kind: ContextParallelKind) -> None:
    length = setup.seq_len or 1
    pieces = setup.context_parallel * (PIECES if kind is ContextParallelKind.RING else 1)
    share, rest = divmod(length, pieces)
    if not rest:
        return
    why = "each rank has a piece from the front and one from the back, " * (
        kind is ContextParallelKind.RING
    )
    msg = (
        f"seq_len: {length} tokens cannot be shared evenly: {why}{length} = {pieces} x {share} + {rest}; "
        f"give a multiple of {pieces}"
    )
    raise SetupError(msg)


def _beside(setup: TrainingSetup, kind: ContextParallelKind) -> tuple[tuple[str, bool, str], ...]:
    """Fields, whether they say what does not go with shared sequences, and what to do."""
    attention = setup.chosen_kernels.attention
    is_ring = kind is ContextParallelKind.RING
    plain = "leave it out"
    return (
        (
            "pipeline_parallel",
            setup.pipeline_parallel > 1 and setup.chosen_engine is not Engine.MEGATRON, plain,
        ),
        ("job", setup.job != PLAIN and (is_ring or not _is_generated_elsewhere(setup)), plain),
        ("adapter: prompt", type(setup.adapter).__name__ == "PromptTuning", "take lora"),
        ("lengths", setup.lengths is not None, plain),
        ("quantize", setup.chosen_quantization is not None, plain),
        (
            "compile: model", setup.compile is Compilation.MODEL,
            "compile each layer on its own: attention is called between the graphs",
        ),
        ("packing", setup.packing is not Packing.NONE and not _keeps_rows_apart(setup, kind), plain),
        (
            f"attention: {attention.value}", is_ring and attention is not AttentionKernel.SDPA,
            "ring attention is torch's sdpa: leave it out",
        ),
    )  # fmt: skip


def _is_generated_elsewhere(setup: TrainingSetup) -> bool:
    """Whether a job's sequences come from an engine of its own, so that each pass here is one over shares."""
    return setup.job.generates and setup.job.chosen_rollout in (*COLOCATED, Rollout.SERVER)


def _keeps_rows_apart(setup: TrainingSetup, kind: ContextParallelKind) -> bool:
    """Whether sequences packed into a row are told apart by where they begin, which every rank is told.

    Ulysses hands each rank some heads of the whole row, and flash-attention the starts with it.
    """
    is_whole = kind is ContextParallelKind.ALL_TO_ALL
    return is_whole and setup.chosen_kernels.attention.is_package
