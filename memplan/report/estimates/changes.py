"""Setups and what differs between two of them, in words: the language of every advice."""

from memplan.estimator import Estimate, Verdict
from memplan.memory.engine_options import loads_under_zero_init
from memplan.search.advice import Advice
from memplan.search.node_ram import overfills_usual_node, usual_node_bytes
from memplan.training.activation_offload import ActivationOffload
from memplan.training.adapters import Lora
from memplan.training.choices import (
    AllocatorKind,
    FsdpStrategy,
    Offload,
    Recomputation,
    checkpointing_text,
)
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.precision import Engine, carried_precision, engine_precision
from memplan.training.quantization import Quantization
from memplan.training.setup import TrainingSetup
from memplan.units import format_gib

_STRATEGY_LABELS = {
    FsdpStrategy.FULL_SHARD: "", FsdpStrategy.SHARD_GRAD_OP: " without resharding",
    FsdpStrategy.HYBRID: " hybrid", FsdpStrategy.NO_SHARD: " without sharding",
}  # fmt: skip
_ENGINE_LABELS = {
    Engine.DDP: "DDP", Engine.FSDP: "FSDP2", Engine.FSDP1: "FSDP1", Engine.MEGATRON: "Megatron",
}  # fmt: skip


def engine_name(setup: TrainingSetup) -> str:
    """``ZeRO`` for DeepSpeed, else the engine as it is called everywhere."""
    return _ENGINE_LABELS.get(setup.chosen_engine, "ZeRO")


_DEGREES = {
    "tensor_parallel": "tensor parallel", "pipeline_parallel": "a pipeline",
    "context_parallel": "sequences shared", "expert_parallel": "expert parallel",
}  # fmt: skip
ONE_GPU = "one GPU"
"""What a setup without an engine is called."""


def engine_label(setup: TrainingSetup) -> str:
    """The engine and what it shards.

    >>> engine_label(TrainingSetup(num_gpus=8, zero_stage=3)), engine_label(TrainingSetup())
    ('ZeRO-3', 'one GPU')
    """
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        return f"ZeRO-{2 if setup.zero_stage is None else setup.zero_stage.value}"
    if engine is Engine.DDP and setup.num_gpus == 1:
        return ONE_GPU
    label = _ENGINE_LABELS[engine]
    if setup.fsdp_strategy is not None:
        label += _STRATEGY_LABELS[setup.fsdp_strategy]
    return label


def gpus_label(setup: TrainingSetup) -> str:
    """``1 GPU`` or ``8 GPUs``."""
    return _gpus(setup.num_gpus)


def _gpus(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def offload_label(setup: TrainingSetup) -> str:
    """What is offloaded, and where to; empty where nothing is.

    >>> setup = TrainingSetup(engine="fsdp", offload_optimizer="cpu", offload_param="cpu")
    >>> offload_label(setup)
    'cpu optimizer+params'
    >>> offload_label(TrainingSetup(offload_activations="streamed"))
    'streamed activations'
    >>> from dataclasses import replace
    >>> stages = TrainingSetup(num_gpus=2, pipeline_parallel=2, gradient_accumulation_steps=4)
    >>> offload_label(replace(stages, offload_activations="chunks", offload_activations_ratio=0.5))
    '50% of chunks on cpu'
    """
    places: dict[str, list[str]] = {}
    for name, place in (("optimizer", setup.offload_optimizer), ("params", setup.offload_param)):
        if place is not Offload.NONE:
            places.setdefault(place.value, []).append(name)
    found = [f"{place} {'+'.join(names)}" for place, names in places.items()]
    if setup.offload_activations.sends:
        found.append(_SENT[setup.offload_activations].format(setup.offload_activations_ratio))
    return ", ".join(found)


_SENT = {
    ActivationOffload.SAVE_ON_CPU: "activations saved on cpu",
    ActivationOffload.STREAMED: "streamed activations",
    ActivationOffload.BLOCKING: "activations on cpu (blocking)",
    ActivationOffload.TORCHTUNE: "streamed activations (torchtune)",
    ActivationOffload.CHECKPOINTS: "checkpoints on cpu",
    ActivationOffload.CHUNKS: "{:.0%} of chunks on cpu",
}


def sharing_label(setup: TrainingSetup) -> str:
    """The engine, and what is offloaded."""
    moved = offload_label(setup)
    return f"{engine_label(setup)}, {moved}" if moved else engine_label(setup)


def setup_label(setup: TrainingSetup) -> str:
    """A setup in a few words, the same everywhere: engine, what is offloaded, how the model is split.

    >>> setup_label(TrainingSetup(num_gpus=8, engine="fsdp", tensor_parallel=4))
    'FSDP2 x TP4'
    >>> setup_label(TrainingSetup(num_gpus=8, context_parallel=8))
    'FSDP2 x CP8'
    """
    split = degrees_label(setup)
    if not split:
        return sharing_label(setup)
    is_named = setup.gradient_ranks > 1 or setup.chosen_engine is Engine.MEGATRON
    return f"{sharing_label(setup)} x {split}" if is_named else split


def degrees_label(setup: TrainingSetup) -> str:
    """How a model is split, in a few words; stages of one rank behind those of all. Empty: it is not.

    >>> degrees_label(TrainingSetup(num_gpus=64, tensor_parallel=8, context_parallel=2))
    'TP8 x CP2'
    """
    parts = [
        f"{name}{degree}"
        for name, degree in (
            ("TP", setup.tensor_parallel), ("PP", setup.pipeline_parallel),
            ("CP", setup.context_parallel), ("EP", setup.expert_parallel),
        )
        if degree > 1
    ]  # fmt: skip
    if setup.virtual_stages > 1:
        parts = [f"{each}x{setup.virtual_stages}" if "PP" in each else each for each in parts]
    return " x ".join(parts)


def kernels_label(setup: TrainingSetup) -> str:
    """Whose kernels run, and the loss where that is another one.

    >>> kernels_label(TrainingSetup(kernels="torchtitan", loss="chunked"))
    'torchtitan, chunked loss'
    """
    preset = _preset(setup) or "its own"
    if setup.loss is None or setup.kernels is KernelPreset.LIGER:
        return preset
    return f"{preset}, {setup.loss.value} loss"


def checkpointing_label(setup: TrainingSetup) -> str:
    """``none``, ``full``, ``selective``, a share of layers or their numbers; Megatron's own option too.

    >>> from memplan.training.setup import TrainingSetup
    >>> own = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4}
    >>> checkpointing_label(TrainingSetup(num_gpus=8, engine="megatron", engine_options=own))
    'full (block 4)'
    """
    own = dict(setup.engine_options)
    granularity = str(own.get("recompute_granularity", Recomputation.NONE.value))
    if setup.checkpointing is not Recomputation.NONE or granularity == Recomputation.NONE.value:
        return checkpointing_text(setup.checkpointing)
    names = ("recompute_method", "recompute_num_layers", "recompute_modules")
    said = " ".join(str(own[name]) for name in names if name in own)
    return f"{granularity} ({said})" if said else granularity


def describe_change(before: TrainingSetup, after: TrainingSetup) -> str:
    """What to change in one setup to get the other, simplest first.

    >>> one = TrainingSetup(num_gpus=8, micro_batch_size=4)
    >>> describe_change(one, TrainingSetup(num_gpus=8, micro_batch_size=2, checkpointing="full"))
    'micro-batch 4 -> 2 and checkpointing'
    """
    parts = [
        *_other_training(before, after),
        *_other_split(before, after),
        *_other_machine(before, after),
    ]
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _other_training(before: TrainingSetup, after: TrainingSetup) -> list[str]:
    """What is trained otherwise on each GPU."""
    parts = []
    if before.micro_batch_size != after.micro_batch_size:
        parts.append(f"micro-batch {before.micro_batch_size} -> {after.micro_batch_size}")
    if before.checkpointing != after.checkpointing:
        parts.append(_CHECKPOINTING.get(checkpointing_label(after), "partial checkpointing"))
    if before.kernels != after.kernels and isinstance(after.kernels, KernelPreset):
        parts.append(_KERNELS.get(after.kernels, f"the kernels of {after.kernels.value}"))
    if before.loss is not after.loss and before.kernels == after.kernels:
        parts.append(f"the loss {after.chosen_kernels.loss.value}")
    if before.adapter != after.adapter and after.adapter is not None:
        parts.append(str(after.adapter))
    if before.quantize != after.quantize and after.quantize is not None:
        parts.append(f"a base in {after.quantize}")
    if before.optimizer is not after.optimizer:
        parts.append(f"optimizer {after.optimizer.value}")
    return parts


def _other_split(before: TrainingSetup, after: TrainingSetup) -> list[str]:
    """The engine, and over how many GPUs it splits what."""
    parts = []
    if engine_label(before) != engine_label(after) and engine_label(after) != ONE_GPU:
        parts.append(engine_label(after))
    parts += [
        f"{words} over {_gpus(getattr(after, field))}"
        for field, words in _DEGREES.items()
        if getattr(before, field) != getattr(after, field)
    ]
    same_split = before.tensor_parallel == after.tensor_parallel
    if same_split and after.sequence_parallel and not before.sequence_parallel:
        parts.append("sequence parallel")
    if _shards_optimizer(after) and not _shards_optimizer(before):
        parts.append("the distributed optimizer")
    same_stage = before.zero_stage is after.zero_stage
    if same_stage and loads_under_zero_init(after) and not loads_under_zero_init(before):
        parts.append("zero.Init")
    return parts


def _other_machine(before: TrainingSetup, after: TrainingSetup) -> list[str]:
    """Where things lie, on how many GPUs, and in which formats."""
    parts = []
    if offload_label(before) != offload_label(after):
        parts.append(offload_label(after) or "no offloading")
    if before.num_gpus != after.num_gpus:
        parts.append(f"{gpus_label(after)} instead of {before.num_gpus}")
    if before.allocator is not after.allocator:
        parts.append(_ALLOCATORS[after.allocator])
    usual = engine_precision(None, after.chosen_engine, is_frozen=after.adapter is not None)
    carried = carried_precision(before.chosen_precision, after.chosen_engine)
    follows = before.adapter != after.adapter and after.chosen_precision is usual
    if not follows and after.chosen_precision is not carried:
        parts.append(f"precision {after.chosen_precision.value}")
    return parts


def _shards_optimizer(setup: TrainingSetup) -> bool:
    """Whether it is Megatron's, over the ranks of data."""
    return dict(setup.engine_options).get("use_distributed_optimizer") is True


_ALLOCATORS = {
    AllocatorKind.DEFAULT: "segments of a fixed size",
    AllocatorKind.EXPANDABLE: "expandable segments",
}
_KERNELS = {KernelPreset.LIGER: "Liger's kernels"}
_CHECKPOINTING = {
    "none": "no checkpointing", "full": "checkpointing", "selective": "selective checkpointing",
}  # fmt: skip


def saving_text(change: str, *, missing_bytes: int, saved_bytes: int) -> str:
    """How much is missing and what a change saves, in one line.

    >>> saving_text("ZeRO-3", missing_bytes=12 * 2**30, saved_bytes=18 * 2**30)
    '12.0 GiB more needed: ZeRO-3 saves 18.0 GiB'
    """
    missing = format_gib(missing_bytes, digits=1)
    saves = "save" if " and " in change or change.endswith("s") else "saves"
    return f"{missing} more needed: {change} {saves} {format_gib(saved_bytes, digits=1)}"


def change_flags(before: TrainingSetup, after: TrainingSetup) -> str:
    """The options that make one setup the other, as they are typed after ``memplan estimate``.

    >>> one = TrainingSetup(num_gpus=8, micro_batch_size=4, zero_stage=2).resolve()
    >>> change_flags(one, TrainingSetup(num_gpus=8, zero_stage=3, checkpointing="full").resolve())
    '--batch-size 1 --zero 3 --checkpointing full'
    """
    given = " ".join(_flags(before, after))
    left = " and ".join(_idle_flags(before, after))
    return f"{given}, without {left}" if left else given


def _flags(before: TrainingSetup, after: TrainingSetup) -> list[str]:
    """Options that have to be given, or given anew."""
    moved = before.chosen_engine is not after.chosen_engine
    kept = {} if moved else dict(before.engine_options)
    options = [
        f"--engine-option {name}={str(value).lower()}"
        for name, value in dict(after.engine_options).items()
        if name not in kept or kept[name] != value
    ]
    found = _both_values(before, after, is_moved=moved, has_options=bool(options))
    changed = [
        f"{name} {new}" for name, (old, new) in found.items() if old != new and new is not None
    ]
    flags = [
        f"--{name.replace('_', '-')}"
        for name in ("sequence_parallel", "loss_parallel")
        if getattr(after, name) and not getattr(before, name)
    ]
    return changed + flags + options


def _both_values(
    before: TrainingSetup, after: TrainingSetup, *, is_moved: bool, has_options: bool
) -> dict[str, tuple[object, object]]:
    """What an option was and is."""
    return {
        "--gpus": (before.num_gpus, after.num_gpus),
        "--nodes": (before.nodes, after.nodes),
        "--batch-size": (before.micro_batch_size, after.micro_batch_size),
        "--gradient-accumulation": (
            before.gradient_accumulation_steps, after.gradient_accumulation_steps
        ),
        "--engine": (before.chosen_engine.value, after.chosen_engine.value),
        # No other engine's row is to stand beside it that does not have the option.
        "--zero": (None if has_options else _stage(before), _stage(after)),
        "--fsdp-strategy": (_strategy(before), _strategy(after)),
        "--offload": _place(before.offload_optimizer, after.offload_optimizer, moved=is_moved),
        "--offload-param": _place(before.offload_param, after.offload_param, moved=is_moved),
        "--offload-activations": (
            before.offload_activations.value, after.offload_activations.value
        ),
        "--checkpointing": (_checkpointing(before), _checkpointing(after)),
        "--kernels": (_preset(before), _preset(after)),
        "--loss": (_loss(before, after), _loss(after, before)),
        "--optimizer": (before.optimizer.value, after.optimizer.value),
        "--lora": (_rank(before), _rank(after)),
        "--lora-targets": (_targets(before), _targets(after)),
        "--quantize": (_format(before), _format(after)),
        "--tp": (before.tensor_parallel, after.tensor_parallel),
        "--pp": (before.pipeline_parallel, after.pipeline_parallel),
        "--cp": (before.context_parallel, after.context_parallel),
        "--ep": (before.expert_parallel, after.expert_parallel),
        "--precision": (before.chosen_precision.value, after.chosen_precision.value),
        "--allocator": (before.allocator.value, after.allocator.value),
    }  # fmt: skip


def _preset(setup: TrainingSetup) -> str | None:
    return setup.kernels.value if isinstance(setup.kernels, KernelPreset) else None


def _loss(setup: TrainingSetup, other: TrainingSetup) -> str | None:
    """The loss, where it is no matter of a preset that changes."""
    if setup.kernels != other.kernels or setup.loss is None:
        return None
    return setup.loss.value


def _rank(setup: TrainingSetup) -> int | None:
    return setup.adapter.rank if isinstance(setup.adapter, Lora) else None


def _targets(setup: TrainingSetup) -> str | None:
    targets = setup.adapter.targets if isinstance(setup.adapter, Lora) else None
    return targets if targets is None or isinstance(targets, str) else ",".join(targets)


def _format(setup: TrainingSetup) -> str | None:
    """The frozen base's."""
    kind = setup.quantize
    return kind.kind.value if isinstance(kind, Quantization) else kind


def _place(before: Offload, after: Offload, *, moved: bool) -> tuple[object, object]:
    """Where a part was and is; under another engine, what is offloaded is to be said anew."""
    known = None if moved and after is not Offload.NONE else before.value
    return known, after.value


def _idle_flags(before: TrainingSetup, after: TrainingSetup) -> list[str]:
    """Options that the other setup cannot have, were they given."""
    found = []
    if _stage(before) is not None and _stage(after) is None:
        found.append("--zero")
    if _strategy(before) is not None and _strategy(after) is None:
        found.append("--fsdp-strategy")
    left = dict(before.engine_options).keys() - dict(after.engine_options).keys()
    return found + [f"--engine-option {name}" for name in sorted(left)]


def _stage(setup: TrainingSetup) -> int | None:
    if setup.chosen_engine is not Engine.DEEPSPEED:
        return None
    return 2 if setup.zero_stage is None else setup.zero_stage.value


def _strategy(setup: TrainingSetup) -> str | None:
    """FSDP's strategy, where it is not the usual one of full shards."""
    strategy = setup.fsdp_strategy
    if strategy is None or strategy is FsdpStrategy.FULL_SHARD:
        return None
    return str(strategy.value)


def _checkpointing(setup: TrainingSetup) -> object:
    value = setup.checkpointing
    return value.value if isinstance(value, Recomputation) else value


def advice_text(advice: Advice) -> str:
    """An advice in one line: what to change, what that saves, and the options for it."""
    better = advice.better
    if better is None and not advice.missing_bytes:
        return (
            "no change of batch, checkpointing, engine, split, offload or GPUs needs less CPU RAM"
        )
    if better is None:
        missing = format_gib(advice.missing_bytes, digits=1)
        return (
            f"{missing} more needed: no change of batch, checkpointing, engine, split, offload or "
            "GPUs gives that"
        )
    from memplan.report.estimates.times import (  # which most answers do without
        factor_text,
        time_factor,
    )

    change = describe_change(advice.answer.setup, better.setup)
    if not advice.missing_bytes and advice.answer.host_verdict is Verdict.OOM:
        before, after = (format_gib(each.host_bytes, digits=1) for each in (advice.answer, better))
        return (
            f"to fit: {change_flags(advice.answer.setup, better.setup)} ({change}: CPU RAM of a node "
            f"{after} instead of {before})"
        )
    saving = saving_text(change, missing_bytes=advice.missing_bytes, saved_bytes=advice.saved_bytes)
    text = saving
    if better.verdict is not None:
        text += _OUTCOMES.get(better.verdict, "")
    text += _room_text(better)
    factor = time_factor(advice.answer, better)
    if factor is not None:
        text += f"; {factor_text(factor)}"
    aim = "nearest" if better.verdict is Verdict.TIGHT else "to fit"
    return f"{aim}: {change_flags(advice.answer.setup, better.setup)} ({text})"


def _room_text(better: Estimate) -> str:
    """What is to be said of CPU RAM, where it is more than a usual node has."""
    if better.gpu is None or better.node_memory_bytes is not None or better.gpu.node is None:
        return ""
    if not overfills_usual_node(better):
        return ""
    needed = format_gib(better.host_bytes, digits=1)
    usual = format_gib(usual_node_bytes(better.setup, better.gpu) or 0, digits=1)
    return f"; CPU RAM {needed}, and a usual node ({better.gpu.node.name}) has {usual} for it"


_OUTCOMES = {
    Verdict.TIGHT: ", and is still tight",
    Verdict.STATES_FIT: ", and then what is counted fits",
}
