"""Setups and what differs between two of them, in words: the language of every advice."""

from memplan.estimator import Verdict
from memplan.memory.engine_options import loads_under_zero_init
from memplan.search.advice import Advice
from memplan.training.precision import Engine
from memplan.training.setup import FsdpStrategy, Offload, Recomputation, TrainingSetup
from memplan.units import format_gib

_STRATEGY_LABELS = {
    FsdpStrategy.FULL_SHARD: "", FsdpStrategy.SHARD_GRAD_OP: " without resharding",
    FsdpStrategy.HYBRID: " hybrid", FsdpStrategy.NO_SHARD: " without sharding",
}  # fmt: skip
_ENGINE_LABELS = {
    Engine.DDP: "DDP", Engine.FSDP: "FSDP2", Engine.FSDP1: "FSDP1", Engine.MEGATRON: "Megatron",
}  # fmt: skip


def engine_label(setup: TrainingSetup) -> str:
    """The engine and what it shards.

    >>> engine_label(TrainingSetup(num_gpus=8, zero_stage=3)), engine_label(TrainingSetup())
    ('ZeRO-3', 'one GPU')
    """
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        return f"ZeRO-{2 if setup.zero_stage is None else setup.zero_stage.value}"
    if engine is Engine.DDP and setup.num_gpus == 1:
        return "one GPU"
    label = _ENGINE_LABELS[engine]
    if setup.fsdp_strategy is not None:
        label += _STRATEGY_LABELS[setup.fsdp_strategy]
    return label


def offload_label(setup: TrainingSetup) -> str:
    """What is offloaded, and where to; empty where nothing is."""
    moved = {"optimizer": setup.offload_optimizer, "parameters": setup.offload_param}
    places = {name: place for name, place in moved.items() if place is not Offload.NONE}
    if not places:
        return ""
    place = next(iter(places.values()))
    return f"{' + '.join(places)} on {place.value.upper()}"


def full_label(setup: TrainingSetup) -> str:
    """The engine, and what is offloaded."""
    moved = offload_label(setup)
    return f"{engine_label(setup)}, {moved}" if moved else engine_label(setup)


def checkpointing_label(setup: TrainingSetup) -> str:
    """``none``, ``full``, ``selective`` or a share of layers."""
    value = setup.checkpointing
    return value.value if isinstance(value, Recomputation) else f"{value:.0%}"


def describe_change(before: TrainingSetup, after: TrainingSetup) -> str:
    """What to change in one setup to get the other, simplest first.

    >>> one = TrainingSetup(num_gpus=8, micro_batch_size=4)
    >>> describe_change(one, TrainingSetup(num_gpus=8, micro_batch_size=2, checkpointing="full"))
    'micro-batch 4 -> 2 and checkpointing'
    """
    parts = []
    if before.micro_batch_size != after.micro_batch_size:
        parts.append(f"micro-batch {before.micro_batch_size} -> {after.micro_batch_size}")
    if before.checkpointing != after.checkpointing:
        parts.append(_CHECKPOINTING.get(checkpointing_label(after), "partial checkpointing"))
    if engine_label(before) != engine_label(after) and after.num_gpus > 1:
        parts.append(engine_label(after))
    same_stage = before.zero_stage is after.zero_stage
    if same_stage and loads_under_zero_init(after) and not loads_under_zero_init(before):
        parts.append("zero.Init")
    if offload_label(before) != offload_label(after):
        parts.append(offload_label(after) or "no offloading")
    if before.num_gpus != after.num_gpus:
        parts.append(f"{after.num_gpus} GPUs instead of {before.num_gpus}")
    same_engine = before.chosen_engine is after.chosen_engine
    if before.chosen_precision is not after.chosen_precision and same_engine:
        parts.append(f"precision {after.chosen_precision.value}")
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


_CHECKPOINTING = {
    "none": "no checkpointing", "full": "checkpointing", "selective": "selective checkpointing",
}  # fmt: skip


def saving_text(change: str, *, missing_bytes: int, saved_bytes: int) -> str:
    """How much is missing and what a change saves, in one line.

    >>> saving_text("ZeRO-3", missing_bytes=12 * 2**30, saved_bytes=18 * 2**30)
    '12.0 GiB more needed: ZeRO-3 saves 18.0 GiB'
    """
    missing = format_gib(missing_bytes, digits=1)
    return f"{missing} more needed: {change} saves {format_gib(saved_bytes, digits=1)}"


def advice_text(advice: Advice) -> str:
    """An advice in one line."""
    better = advice.better
    if better is None:
        missing = format_gib(advice.missing_bytes, digits=1)
        return f"{missing} more needed: no change of batch, engine, offload or GPUs gives that"
    change = describe_change(advice.answer.setup, better.setup)
    text = saving_text(change, missing_bytes=advice.missing_bytes, saved_bytes=advice.saved_bytes)
    return text if better.verdict is Verdict.FITS else f"{text}, and is still tight"
