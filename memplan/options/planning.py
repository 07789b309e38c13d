"""What ``plan`` is asked: a model, a goal, the GPUs to plan for."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from memplan.errors import UsageError, did_you_mean
from memplan.fast_dataclass import dataclass, replace
from memplan.options.asked import Asked
from memplan.options.axes import parse_share, read_axes, read_concessions
from memplan.options.rows.settings import FIELD_PARAMETERS, group_fields, setting_axes
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.hardware.gpu import GpuSpec
    from memplan.hardware.pool import Pool
    from memplan.model.spec import ModelSpec
    from memplan.search.planning.goal import Goal, Objective
    from memplan.training.choices import Checkpointing, ZeroStage
    from memplan.training.precision import Engine, Precision
    from memplan.training.setup import TrainingSetup

PLANNED_FIELDS = frozenset({
    "micro_batch_size", "gradient_accumulation_steps", "seq_len", "target_seq_len", "checkpointing",
    "tensor_parallel", "pipeline_parallel", "pipeline_schedule", "virtual_stages",
    "context_parallel", "context_parallel_kind", "sequence_parallel",
    "expert_parallel", "expert_imbalance",
})  # fmt: skip
"""Fields that a plan chooses, or has options of its own for."""
DEFAULT_GPU = "h100-80gb"
"""What a plan is for when no GPU is named."""
DEFAULT_NUM_GPUS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion:
    """What is to be planned."""

    model: "ModelSpec"
    goal: "Goal"
    gpus: "list[GpuSpec]"
    """Empty where pools are planned for."""
    pools: "tuple[Pool, ...]" = ()
    """A platform's, of which the best is looked for."""
    asks_count: bool = True
    """How many GPUs there are to be was said."""
    times: "TimeQuestion | None"
    """What the search is told of each setup's time; None: nothing."""
    shows_times: bool
    """They were asked for, or the goal is about them."""


def plan_question(asked: Asked, *, remark: Callable[[str], None]) -> PlanQuestion:
    """Make the question of the options.

    Raises a ``MemplanError`` for options that do not go together.
    """
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.options.hardware import chosen_gpus
    from memplan.options.run_times import time_question
    from memplan.search.planning.goal import Objective

    values = asked.values
    wanted = _objective(asked)
    priced = ("price",) if wanted is Objective.COST else ()
    times = time_question(values, without_length=priced)
    shows_times = times is not None or wanted is Objective.COST
    if times is None and wanted in (Objective.SPEED, Objective.COST, Objective.GPUS):
        times = TimeQuestion()
    goal = _goal(asked, wanted, remark)
    if values["pools"] is not None:
        return _pooled(asked, goal, times, remark)
    names = values["gpu"] or ([] if values["gpu_memory"] is not None else [DEFAULT_GPU])
    return PlanQuestion(
        model=asked.model(values["model"]),
        goal=goal,
        gpus=chosen_gpus(names, values["gpu_memory"], remark=remark),
        times=times,
        shows_times=shows_times,
    )


def _pooled(
    asked: Asked, goal: "Goal", times: "TimeQuestion | None", remark: Callable[[str], None]
) -> PlanQuestion:
    """The question where pools say which cards there are, how many and at what price."""
    from memplan.search.planning.pools import usual_objective
    from memplan.sources.pools import chosen_pools, read_pools

    values = asked.values
    for name in ("gpu", "gpu_memory"):
        if values[name]:
            msg = f"--{name.replace('_', '-')}: --pools says which cards there are: give one of the two"
            raise UsageError(msg)
    pools = read_pools(chosen_pools(values["pools"]))
    if not {"objective", "maximize"} & asked.given:
        goal = replace(goal, objective=usual_objective(pools))
        remark(f"--objective {goal.objective.value}: {_WHY[goal.objective.value]}")
    return PlanQuestion(
        model=asked.model(values["model"]), goal=goal, gpus=[], pools=pools, times=times,
        asks_count=bool({"gpus", "nodes"} & asked.given) or goal.base.num_gpus > 1, shows_times=True,
    )  # fmt: skip


_WHY = {"cost": "every pool has a price", "speed": "not every pool has a price"}


def _goal(asked: Asked, wanted: "Objective", remark: Callable[[str], None]) -> "Goal":
    from memplan.search.planning.goal import Goal

    values = asked.values
    base = _base(asked, wanted, remark)
    degrees: Any = {
        name: _degrees(values[name], f"--{name.replace('_', '-')}")
        for name in (
            "tensor_parallel", "pipeline_parallel", "virtual_stages", "context_parallel",
            "expert_parallel",
        )
    }  # fmt: skip
    return Goal(
        num_gpus=_counts(values["gpus"], values["nodes"], base),
        global_batch_size=values["global_batch_size"],
        headroom=parse_share(values["headroom"], option="--headroom"),
        objective=wanted,
        base=base,
        engines=_engines(values["engine"]) or tuple(filter(None, [base.engine])),
        zero_stages=_stages(values["zero"]),
        precisions=_precisions(values["precision"]) or tuple(filter(None, [base.precision])),
        checkpointing=_policies(values["checkpointing"]),
        allow=read_concessions(values["allow"]),
        limit=values["limit"],
        node_memory_bytes=asked.node_memory_bytes(),
        **degrees,
    )


def _base(asked: Asked, wanted: "Objective", remark: Callable[[str], None]) -> "TrainingSetup":
    """What every setup of the plan starts from."""
    from memplan.options.setup_files import base_setup
    from memplan.search.planning.goal import Objective

    values = asked.values
    own = {FIELD_PARAMETERS[field] for field in PLANNED_FIELDS}
    settings = {name: value for name, value in values.items() if name not in own}
    changes = {"seq_len": values["seq_len"], **_settled(settings), **group_fields(settings)}
    places = (values["setup"], values["training_args"], values["preset"])
    base = base_setup(*places, remark=remark, model=values["model"])
    base = _laid_over(base, changes)
    if wanted in (Objective.SEQ_LEN, Objective.LAYERS):
        if "batch_size" in asked.given:
            base = replace(base, micro_batch_size=values["batch_size"])
        _name_replaced(base, remark, kept=("micro_batch_size", "gradient_accumulation_steps"))
        return base
    if "batch_size" in asked.given:
        msg = "--batch-size: means nothing without --maximize seq-len or layers: add that, or leave it out"
        raise UsageError(msg)
    _name_replaced(base, remark)
    return base


def _settled(settings: Values) -> dict[str, object]:
    """The one value of each setting that a sweep takes several of.

    Raises ``UsageError`` where several are given.
    """
    found: dict[str, object] = {}
    for field, values in read_axes(setting_axes(settings)).items():
        (value, *others) = values if isinstance(values, list) else [values]
        if others:
            option = f"--{FIELD_PARAMETERS[field].replace('_', '-')}"
            msg = f"{option}: a plan takes one value, and {len(others) + 1} are given: use a sweep"
            raise UsageError(msg)
        found[field] = value
    return found


CHOSEN_BY_PLAN = (
    "micro_batch_size", "gradient_accumulation_steps", "checkpointing", "num_nodes", "zero_stage",
    "fsdp_strategy", "offload_optimizer", "offload_param",
)  # fmt: skip
"""What a file may fix, and a plan searches for all the same."""


def _name_replaced(
    base: "TrainingSetup", remark: Callable[[str], None], *, kept: Collection[str] = ()
) -> None:
    """Say what of a file's setup the plan does not keep."""
    from memplan.training.setup import TrainingSetup

    usual = TrainingSetup()
    replaced = [name for name in CHOSEN_BY_PLAN if getattr(base, name) != getattr(usual, name)]
    replaced = [name for name in replaced if name not in kept]
    if replaced:
        remark(f"the plan itself chooses {', '.join(replaced)}")


def _laid_over(base: "TrainingSetup", changes: Values) -> "TrainingSetup":
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(base, **given) if given else base


def _counts(gpus: str | None, nodes: str | None, base: "TrainingSetup") -> tuple[int, ...]:
    """Numbers of GPUs to look through. Raises ``UsageError`` where nodes would hold another number of them."""
    from memplan.search.ranges import parse_range
    from memplan.training.setup_derived import GPUS_PER_NODE

    counts = () if gpus is None else tuple(parse_range(gpus, option="--gpus", minimum=1))
    if nodes is not None:
        asked = parse_range(nodes, option="--nodes", minimum=1)
        needed = {-(-count // GPUS_PER_NODE) for count in counts}
        if counts and needed != set(asked):
            msg = f"--nodes: plans are of nodes with {GPUS_PER_NODE} GPUs each, and --gpus {gpus} says another number"
            raise UsageError(msg)
        return counts or tuple(count * GPUS_PER_NODE for count in asked)
    return counts or (base.num_gpus if base.num_gpus > 1 else DEFAULT_NUM_GPUS,)


def _objective(asked: Asked) -> "Objective":
    """What comes first. Raises ``UsageError`` where that is said twice."""
    from memplan.search.planning.goal import Objective
    from memplan.training.coercion import coerce_enum

    maximize = asked.values["maximize"]
    if maximize is None:
        return coerce_enum("objective", asked.values["objective"], Objective)
    found = {each.value: each for each in (Objective.BATCH, Objective.SEQ_LEN, Objective.LAYERS)}
    if maximize not in found:
        known = tuple(found)
        hint = did_you_mean(maximize, known)
        msg = f"--maximize: {maximize!r} is not one of {', '.join(known)}.{hint}"
        raise UsageError(msg)
    if "objective" in asked.given:
        msg = "--maximize makes no use of --objective: leave it out, or run twice"
        raise UsageError(msg)
    if maximize == Objective.SEQ_LEN.value and "seq_len" in asked.given:
        msg = "--maximize seq-len makes no use of --seq-len: leave it out, or run twice"
        raise UsageError(msg)
    return found[maximize]


def _stages(text: str | None) -> "tuple[ZeroStage, ...]":
    from memplan.search.ranges import parse_range
    from memplan.training.choices import ZeroStage
    from memplan.training.coercion import coerce_enum

    if text is None:
        return ()
    return tuple(
        coerce_enum("zero_stage", stage, ZeroStage) for stage in parse_range(text, option="--zero")
    )


def _degrees(text: str | None, option: str) -> tuple[int, ...]:
    from memplan.search.ranges import parse_range

    return () if text is None else tuple(parse_range(text, option=option, minimum=1))


def _engines(text: str | None) -> "tuple[Engine, ...]":
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Engine

    return tuple(coerce_enum("engine", each, Engine) for each in _parts(text))


def _precisions(text: str | None) -> "tuple[Precision, ...]":
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Precision

    return tuple(coerce_enum("precision", each, Precision) for each in _parts(text))


def _policies(text: str | None) -> "tuple[Checkpointing, ...]":
    from memplan.training.setup import TrainingSetup

    return tuple(
        TrainingSetup(checkpointing=each).checkpointing  # type: ignore[arg-type]
        for each in _parts(text)
    )


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []
