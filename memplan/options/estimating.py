"""What ``estimate`` is asked: one model, the setups to judge, the GPUs to judge them by."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from memplan.errors import UsageError
from memplan.fast_dataclass import dataclass, replace
from memplan.options.asked import Asked
from memplan.options.compared_setups import compared_setups, is_of
from memplan.options.largest import filled, found_note, looked_for, without_max
from memplan.options.rows.settings import setting_fields
from memplan.options.table import Values
from memplan.search.pipelined import STEPS, fewest_steps

if TYPE_CHECKING:
    from memplan.estimator import Estimate
    from memplan.hardware.gpu import GpuSpec
    from memplan.model.spec import ModelSpec
    from memplan.options.setup_files import BaseSetup
    from memplan.search.quantity import Quantity
    from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateQuestion:
    """What is to be judged."""

    model: "ModelSpec"
    setups: "list[TrainingSetup]"
    gpus: "list[GpuSpec]"
    """Empty where none is to be judged by."""
    node_memory_bytes: int | None
    """CPU RAM of a node, where it is judged too."""
    notes: tuple[str, ...]
    """What is to be said of each answer besides."""


def estimate_question(
    asked: Asked, model: "ModelSpec | None", *, alone: bool, remark: Callable[[str], None]
) -> EstimateQuestion:
    """Make the question of the options.

    ``model`` may be named by the setup's file instead. ``alone``: of the engines and places that an
    open question compares, the usual one, and no GPU unless one is named. Raises a ``MemplanError``
    for options that do not go together.
    """
    asked, quantity = _opened(asked)
    values = asked.values
    named = [word for word in (values["gpu"], values["gpu_memory"]) if word is not None]
    setups, base = _setups(asked, model, alone=alone)
    if model is None:
        from memplan.options.setup_files import model_of

        model = asked.model(model_of(base, values["setup"]))
    if values["global_batch_size"] is not None:
        setups = _with_global_batch(asked, setups)
    gpus = _gpus(values, setups[0], remark) if named or not alone else []
    if isinstance(values["num_layers"], int):
        from memplan.search.depth import with_layers

        model = with_layers(model, values["num_layers"])
    notes = (*_steps_note(asked, setups[0]), *base.notes)
    if quantity is not None:
        found = filled(
            quantity, model, setups, gpus, is_named=bool(named),
            global_batch_size=values["global_batch_size"],
        )  # fmt: skip
        model, setups = found[0].model, [each.setup for each in found]
        if len(found) == 1:
            notes = (found_note(found[0], quantity, gpus[0]), *notes)
    return EstimateQuestion(
        model=model, setups=setups, gpus=gpus, node_memory_bytes=asked.node_memory_bytes(), notes=notes
    )  # fmt: skip


def _opened(asked: Asked) -> "tuple[Asked, Quantity | None]":
    """The question with what is ``max`` at its least, and what that is."""
    quantity = looked_for(asked.values)
    if quantity is None:
        return asked, None
    return replace(asked, values=without_max(asked.values)), quantity


def _gpus(values: Values, first: "TrainingSetup", remark: Callable[[str], None]) -> "list[GpuSpec]":
    from memplan.options.hardware import chosen_gpus

    return chosen_gpus(
        values["gpu"],
        values["gpu_memory"],
        attention=first.chosen_kernels.attention.value,
        setup=first,
        remark=remark,
    )


def _setups(
    asked: Asked, model: "ModelSpec | None", *, alone: bool
) -> "tuple[list[TrainingSetup], BaseSetup]":
    """The setups of every engine that is named, and what the first of them starts from."""
    from memplan.options.setup_files import read_base

    values = asked.values
    given, words = _words(asked)
    engine, zero = words["engine"], words["zero"]
    engines = [None] if engine is None else [part.strip() for part in engine.split(",")]
    if alone and len(engines) > 1:
        msg = "--engine: names several, and one setup has one: a sweep takes several"
        raise UsageError(msg)
    files = ("preset", "training_args", "deepspeed_config", "accelerate_config")
    bases = {
        each: read_base(
            given,
            named={"engine": each or (zero and "deepspeed"), "precision": words["precision"]},
            setup_file=values["setup"],
            model=model,
            **{name: values[name] for name in files},
        )
        for each in engines
    }
    first = bases[engines[0]]
    if alone:
        from memplan.options.single import with_engine

        return [with_engine(first.setup, **words)], first
    setups = [
        setup
        for each in engines
        for setup in compared_setups(
            bases[each],
            precision=words["precision"],
            engine=each,
            zero=zero if is_of(each, "deepspeed", engines) else None,
            offload=words["offload"],
            offload_param=words["offload_param"],
            fsdp_strategy=words["fsdp_strategy"] if is_of(each, "fsdp", engines) else None,
        )
    ]
    return setups, first


_ENGINE_WORDS = ("precision", "engine", "zero", "offload", "offload_param", "fsdp_strategy")


def _words(asked: Asked) -> tuple[dict[str, object], dict[str, str | None]]:
    """The fields that were given, and the words that name an engine.

    An engine's own file names the engine: what is said beside it may only agree.
    """
    from memplan.options.engine_options import parse_engine_options

    values = asked.values
    fields = {
        "num_gpus": values["gpus"],
        "num_nodes": values["nodes"],
        **setting_fields(values),
        "engine_options": parse_engine_options(values["engine_option"]),
    }
    given = with_fewest_steps(asked, fields)
    words: dict[str, str | None] = {name: values[name] for name in _ENGINE_WORDS}
    if values["deepspeed_config"] is None and values["accelerate_config"] is None:
        return given, words
    zero = words["zero"]
    named = {
        "engine": words["engine"],
        "precision": words["precision"],
        "zero_stage": int(zero) if zero is not None and zero.isdecimal() else zero,
        "fsdp_strategy": words["fsdp_strategy"],
    }
    given |= {name: value for name, value in named.items() if value is not None}
    return given, words | dict.fromkeys(("engine", "precision", "zero", "fsdp_strategy"))


def with_fewest_steps(asked: Asked, fields: Values) -> dict[str, object]:
    """The fields that were given, and of how many micro-batches a pipeline's step is where neither an option nor a file says it."""
    given = asked.given_fields(fields)
    if (STEPS_SAID - {"global_batch_size"}) & asked.given:
        return given
    steps = fewest_steps(given)
    return given if steps == 1 else given | {STEPS: steps}


def _steps_note(asked: Asked, setup: "TrainingSetup") -> tuple[str, ...]:
    """That a number of micro-batches is the fewest that there can be, where nobody asked for one."""
    steps = setup.gradient_accumulation_steps
    if STEPS_SAID & asked.given or setup.pipeline is None or steps == 1:
        return ()
    ranks = setup.pipeline_parallel
    words = f"{steps} micro-batches a step, the fewest that a pipeline of {ranks} ranks takes"
    return (f"{words}: --gradient-accumulation says more",)


STEPS_SAID = frozenset(
    {
        "gradient_accumulation",
        "global_batch_size",
        "setup",
        "preset",
        "training_args",
        "accelerate_config",
    }
)
"""Options of which each may say how many micro-batches a step has."""


def _with_global_batch(asked: Asked, setups: "list[TrainingSetup]") -> "list[TrainingSetup]":
    """The setups with as many accumulation steps as make up the global batch."""
    from memplan.search.grid import with_global_batch

    if "gradient_accumulation" in asked.given:
        msg = (
            "--global-batch-size makes no use of --gradient-accumulation, which follows from it: leave "
            "it out, or run twice"
        )
        raise UsageError(msg)
    size = asked.values["global_batch_size"]
    return [with_global_batch(each, size) for each in setups]


def answers(
    asked: Asked,
    model: "ModelSpec | None",
    *,
    remark: Callable[[str], None],
    rank: int | None = None,
) -> "list[Estimate]":
    """Estimate one setup on each GPU that is named, or once on none.

    Raises a ``MemplanError`` for options that do not go together, and as ``estimate`` does.
    """
    from memplan.estimator import estimate

    question = estimate_question(asked, model, alone=True, remark=remark)
    (setup,) = question.setups
    if setup.job.names:
        from memplan.sources.job_models import looked_up

        setup = looked_up(setup)
    cards: list[GpuSpec | None] = [*question.gpus] or [None]
    found = [estimate(question.model, setup, card, rank=rank) for card in cards]
    found = [
        replace(
            each, node_memory_bytes=question.node_memory_bytes, notes=(*each.notes, *question.notes)
        )
        for each in found
    ]
    if setup.lengths is None:
        return found
    from memplan.search.lengths import with_batches

    return [with_batches(each) for each in found]
