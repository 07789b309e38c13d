"""The library's face: questions asked in keywords, or with the objects that these are made into.

The keywords are the command line's options (``memplan.options``), and so are their values, defaults and
errors. Nothing is printed.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from memplan.errors import UsageError
from memplan.estimator import Estimate
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.named import Model
from memplan.options.python import ESTIMATE, PLAN, SWEEP, asked_in_python, python_words
from memplan.training.setup import TrainingSetup

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from memplan.hardware.pool import Pool
    from memplan.options.asked import Asked
    from memplan.options.planning import PlanQuestion
    from memplan.options.typed import EstimateOptions, PlanOptions, SweepOptions
    from memplan.report.comparison import Comparison
    from memplan.search.admission import Admission
    from memplan.search.grid import Grid
    from memplan.search.planning.goal import Goal, Plan
    from memplan.search.quantity import Quantity
    from memplan.search.sweep import Sweep
    from memplan.sources.about_models.registry import BuiltinModel


def estimate(
    model: Model | None = None,
    setup: TrainingSetup | str | os.PathLike[str] | None = None,
    *,
    gpu: str | GpuSpec | None = None,
    rank: int | None = None,
    **options: Unpack["EstimateOptions"],
) -> Estimate:
    """Estimate the memory of one training run on one GPU.

    The keywords are the options of ``memplan estimate``, with their defaults; ``setup`` is where they
    start from: a ``TrainingSetup`` or a file's path. ``gpu`` is a name of the catalog, a card's memory
    (``46GiB``) or a ``GpuSpec``. Where the command line compares engines or usual GPUs because none is
    named, this takes the usual engine and gives no verdict. The account is the worst rank's, or with
    ``rank`` that one's; ``Estimate.ranks`` has them all. Raises a ``MemplanError`` for what cannot be
    read or trained, for a keyword or value that there is not, and for a rank that there is not.

    >>> import memplan
    >>> answer = memplan.estimate("t5-3b", gpus=8, engine="deepspeed", zero=2, gpu="h100")
    >>> answer.verdict.value, str(answer.needs), answer.largest_batch
    ('fits', '17.6-19.9 GiB', 17)
    >>> setup = memplan.TrainingSetup(precision="bf16", seq_len=2048, checkpointing="full")
    >>> answer = memplan.estimate("llama-3.2-1b", setup, gpu="h100")
    >>> answer.num_params, answer.peak_phase, answer.verdict.value
    (1235814400, 'backward', 'fits')
    """
    asked = asked_in_python(model, {**options, "setup": setup, "gpu": gpu}, ESTIMATE)
    with python_words(asked.given):
        from memplan.options.estimating import answers
        from memplan.options.run_times import time_question

        remarks: list[str] = []
        times = time_question(asked.values)
        spec = None if model is None else asked.model(model)
        if spec is None and setup is None:
            msg = "name a model: memplan.models() lists the built-in ones"
            raise UsageError(msg)
        found = answers(asked, spec, remark=remarks.append, rank=rank)
        return replace(_only(found), times=times, notes=(*found[0].notes, *remarks))


def _only(found: list[Estimate]) -> Estimate:
    """The answer of a question that has one."""
    if len(found) > 1:
        msg = "gpu: names several, and one estimate is of one: memplan.sweep takes several"
        raise UsageError(msg)
    return found[0]


def largest(
    model: Model,
    setup: TrainingSetup | None = None,
    *,
    of: "str | Quantity" = "micro_batch_size",
    gpu: str | GpuSpec,
) -> Estimate | None:
    """The estimate of the largest value with which a setup fits a card; None: not even the least does.

    ``of`` is ``micro_batch_size``, ``seq_len``, ``rank`` (of the setup's LoRA) or ``num_layers`` (of
    each stack; the answer's ``model`` has them). Raises a ``MemplanError`` as ``estimate`` does.

    >>> import memplan
    >>> setup = memplan.TrainingSetup(checkpointing="full")
    >>> memplan.largest("gpt2", setup, of="micro_batch_size", gpu="t4").setup.micro_batch_size
    16
    """
    from memplan.search.largest import largest as look_for
    from memplan.search.quantity import Quantity
    from memplan.sources.models import load_model
    from memplan.training.coercion import coerce_enum

    asked = setup or TrainingSetup()
    return look_for(load_model(model), asked, _card(gpu), coerce_enum("of", of, Quantity))


@overload
def sweep(
    model: Model,
    grid: "Grid | Mapping[str, object]",
    *,
    gpus: Sequence[str | GpuSpec] = (),
    cpu_memory: str | int | None = None,
    num_jobs: int = 1,
    executor: "Executor | None" = None,
) -> "Sweep": ...
@overload
def sweep(
    model: Model, *, executor: "Executor | None" = None, **options: Unpack["SweepOptions"]
) -> "Sweep": ...
def sweep(
    model: Model,
    grid: "Grid | Mapping[str, object] | None" = None,
    *,
    executor: "Executor | None" = None,
    **options: Any,
) -> "Sweep":
    """Estimate every setup of a grid, on every GPU; lazily, in a stable order.

    The keywords are the options of ``memplan sweep``: a list, a range or a text for one where several
    values are taken. A path of a sweep's YAML file may stand for the model. Or ``grid`` is a ``Grid``,
    or its axes alone, fields of ``TrainingSetup`` and the values of each; beside it ``gpus`` are
    the GPUs to judge by, and ``num_jobs`` processes do the work, which changes no result.

    Iterating gives a ``SweepResult`` for each setup, its ``estimates`` in the order of the GPUs;
    nothing is computed before, and nothing is kept. An ``executor`` (any ``concurrent.futures.Executor``: of
    processes, of a Dask client, of MPI ranks) does the work instead, and stays open: it is its owner's. What cannot be trained is left out, and counted
    in ``impossible``. Raises a ``MemplanError`` for what cannot be read or swept over.

    >>> import memplan
    >>> found = memplan.sweep("gpt2", batch_size=[1, 16], seq_len=1024, gpu=["t4", "h100"])
    >>> [(row["micro_batch_size"], row["gpu"], row["verdict"]) for row in found.rows()]
    [(1, 't4-16gb', 'fits'), (1, 'h100-sxm-80gb', 'fits'), (16, 't4-16gb', 'OOM'), (16, 'h100-sxm-80gb', 'fits')]
    >>> axes = {"precision": "bf16", "seq_len": 1024, "micro_batch_size": [1, 4, 16]}
    >>> for result in memplan.sweep("llama-3.2-1b", axes, gpus=["v100-32gb", "h100"]):
    ...     verdicts = [each.verdict.value for each in result.estimates]
    ...     print(result.setup.micro_batch_size, *verdicts)
    1 fits fits
    4 fits fits
    16 OOM fits
    """
    if grid is not None:
        return _swept(model, grid, executor=executor, **options)
    return _asked_sweep(asked_in_python(model, options, SWEEP), executor)


def _asked_sweep(asked: "Asked", executor: "Executor | None") -> "Sweep":
    """The sweep of a question in the options' words."""
    with python_words(asked.given):
        from memplan.options.numbers import shard_of
        from memplan.options.run_times import time_question
        from memplan.options.sweeping import sweep_question
        from memplan.search.sweep import Sweep

        remarks: list[str] = []
        question = sweep_question(asked, judges=False, remark=remarks.append)
        return Sweep(
            question.model,
            question.grid,
            question.gpus,
            num_jobs=asked.values["jobs"],
            node_memory_bytes=question.node_memory_bytes,
            times=time_question(asked.values),
            notes=tuple(remarks),
            executor=executor,
            part=shard_of(question.grid.num_combinations, asked.values["shard"]),
        )


def _swept(
    model: Model,
    grid: "Grid | Mapping[str, object]",
    *,
    gpus: Sequence[str | GpuSpec] = (),
    cpu_memory: str | int | None = None,
    num_jobs: int = 1,
    executor: "Executor | None" = None,
) -> "Sweep":
    """A sweep of objects."""
    from memplan.search.grid import Grid
    from memplan.search.sweep import Sweep
    from memplan.sources.models import load_model

    made = Grid(axes=grid) if isinstance(grid, Mapping) else grid
    return Sweep(
        load_model(model),
        made,
        [_card(gpu) for gpu in gpus],
        num_jobs=num_jobs,
        node_memory_bytes=_size(cpu_memory),
        executor=executor,
    )


@overload
def plan(model: Model, goal: "Goal", *, gpu: str | GpuSpec = "h100") -> "Plan": ...
@overload
def plan(model: Model, **options: Unpack["PlanOptions"]) -> "Plan": ...
def plan(model: Model, goal: "Goal | None" = None, **options: Any) -> "Plan":
    """Search for the setups that fit one kind of GPU, best first.

    The keywords are the options of ``memplan plan``; or ``goal`` says it all, with ``gpu`` beside it.
    The plan's ``setups`` are those that fit, each with its largest micro-batch; its ``shortfalls`` say
    what the others lack, and the nearest setup that fits. Raises a ``MemplanError`` for what cannot be
    read or planned.

    >>> import memplan
    >>> found = memplan.plan("llama-3.2-1b", gpus=1, gpu="h100", seq_len=2048)
    >>> best = found.setups[0]
    >>> best.setup.num_gpus, best.estimate.verdict.value
    (1, 'fits')
    >>> goal = memplan.Goal(num_gpus=(1,), base=memplan.TrainingSetup(seq_len=2048))
    >>> memplan.plan("llama-3.2-1b", goal, gpu="h100").setups[0].estimate.verdict.value
    'fits'
    """
    if goal is not None:
        return _planned(model, goal, **options)
    asked = asked_in_python(model, options, PLAN)
    with python_words(asked.given):
        from memplan.options.planning import plan_question
        from memplan.search.planning.planner import plan as plan_setups

        remarks: list[str] = []
        question = plan_question(asked, remark=remarks.append)
        if question.pools:
            return _best_pool(question, remarks)
        if len(question.gpus) > 1:
            msg = "gpu: names several, and one plan is for one: ask for each"
            raise UsageError(msg)
        found = plan_setups(question.model, question.goal, question.gpus[0], times=question.times)
        known = question.shows_times or any(each.time is not None for each in found.setups)
        return replace(
            found,
            times=question.times if known else None,
            assumptions=(*found.assumptions, *remarks),
        )


def _best_pool(question: "PlanQuestion", remarks: Sequence[str]) -> "Plan":
    """The plan of the pool that comes first."""
    from memplan.search.planning.pools import pool_plans, pool_times

    first = pool_plans(
        question.model, question.goal, question.pools, times=question.times,
        is_open=not question.asks_count,
    )[0]  # fmt: skip
    assert first.plan is not None, "a pool that cannot be tried is no first"
    times = pool_times(question.times, first.pool)
    return replace(first.plan, times=times, assumptions=(*first.plan.assumptions, *remarks))


def _planned(model: Model, goal: "Goal", *, gpu: str | GpuSpec = "h100") -> "Plan":
    """A plan of objects."""
    from memplan.search.planning.planner import plan as plan_setups
    from memplan.sources.models import load_model

    return plan_setups(load_model(model), goal, _card(gpu))


def admit(
    request: str | os.PathLike[str] | Mapping[str, object],
    pools: "str | os.PathLike[str] | Sequence[Pool]",
    *,
    fail_on: str = "oom",
) -> "Admission":
    """Say whether a job may start, and in which of a platform's pools.

    ``request`` is a mapping, or the path of a YAML file: the keywords of ``memplan.estimate`` with ``model``, and
    ``pool`` where one is meant. ``pools`` is such a path too (``memplan.sources.pools``), or the pools. It goes where it
    fits, to the cheapest of these; ``fail_on="tight"`` refuses what might not fit as well. Raises a ``MemplanError`` for
    what cannot be read or trained; that it does not fit is an answer.

    >>> import memplan
    >>> found = memplan.admit({"model": "gpt2", "gpus": 2}, "configs/pools/platform.yaml")
    >>> found.admitted, found.verdict, found.chosen.pool.name
    (True, 'fits', 'dev')
    """
    from memplan.options.admitting import admission
    from memplan.sources.files import read_mapping
    from memplan.sources.pools import read_pools

    if fail_on not in ("oom", "tight"):
        msg = f"fail_on: {fail_on!r} is not one of oom, tight"
        raise UsageError(msg)
    asked = request if isinstance(request, Mapping) else read_mapping(os.fspath(request))
    known = read_pools(os.fspath(pools)) if isinstance(pools, str | os.PathLike) else pools
    return admission(asked, known, fails_on_tight=fail_on == "tight")


def compare(one: Estimate, other: Estimate) -> "Comparison":
    """Set two estimates side by side, component by component.

    >>> import memplan
    >>> one, other = (memplan.estimate("gpt2", seq_len=512, batch_size=size) for size in (1, 2))
    >>> found = memplan.compare(one, other)
    >>> found.difference_bytes > 0, max(found.components, key=found.components.get)
    (True, 'activations')
    """
    from memplan.report.comparison import Comparison

    return Comparison(one=one, other=other)


def models(part: str = "") -> "tuple[BuiltinModel, ...]":
    """The built-in models, or those with this in their name, family or hub id.

    >>> import memplan
    >>> [each.name for each in memplan.models("t5-3b")]
    ['t5-3b']
    """
    from memplan.sources.about_models.registry import builtin_models, builtins_holding

    return tuple(builtins_holding(part)) if part else builtin_models()


def gpus() -> tuple[GpuSpec, ...]:
    """The GPU catalog.

    >>> import memplan
    >>> [each.gpu_id for each in memplan.gpus() if each.gpu_id.startswith("h100")]
    ['h100-pcie-80gb', 'h100-sxm-80gb', 'h100-nvl-94gb']
    """
    from memplan.sources.cards.catalog import all_gpus

    return all_gpus()


def _card(gpu: str | GpuSpec) -> GpuSpec:
    from memplan.sources.gpus import load_gpu

    return load_gpu(gpu) if isinstance(gpu, str) else gpu


def _size(memory: str | int | None) -> int | None:
    """A size as it is written, such as ``512GiB`` [bytes]."""
    if not isinstance(memory, str):
        return memory
    from memplan.units import parse_bytes

    return parse_bytes(memory)
