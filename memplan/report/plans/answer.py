"""What a plan answers, in a sentence: what to run, and what a run takes."""

from itertools import pairwise
from typing import TYPE_CHECKING

from memplan.model.config import MAX_LAYERS
from memplan.report.estimates.answer import capacity_text, needed_text, params_text
from memplan.report.estimates.changes import (
    ONE_GPU,
    checkpointing_label,
    gpus_label,
    kernels_label,
    setup_label,
)
from memplan.search.planning.concessions import CONCESSIONS, Concession
from memplan.search.planning.goal import Objective, Plan, PlannedSetup
from memplan.search.planning.sizing import SEQ_LEN_STEP
from memplan.units import format_gib

if TYPE_CHECKING:
    from memplan.estimator import Estimate
    from memplan.estimator.time.run_cost import TimeQuestion


OBJECTIVES = {
    Objective.SPEED: "Fastest first", Objective.COST: "Cheapest first", Objective.GPUS: "Fewest GPUs first",
    Objective.BATCH: "Largest batch first", Objective.SEQ_LEN: "Longest sequence first",
    Objective.LAYERS: "Most layers first",
}  # fmt: skip


LARGEST = {
    Objective.SEQ_LEN: f"longest sequence, in steps of {SEQ_LEN_STEP} tokens",
    Objective.LAYERS: "largest number of layers",
}


def job_text(plan: Plan) -> str:
    """The model's size and the tokens, but for what is looked for."""
    some, looked_for = plan.some, plan.goal.objective
    size = f"{params_text(some, ' parameters')}, "
    length = f"{some.setup.seq_len:,} tokens, "
    size = "" if looked_for is Objective.LAYERS else size
    return size if looked_for is Objective.SEQ_LEN else size + length


def answer_text(plan: Plan, question: "TimeQuestion | None" = None) -> str:
    """The first setup in words, what was looked for before it."""
    best = plan.setups[0]
    setup = best.setup
    way = way_text(best)
    found = {
        Objective.GPUS: f"{setup.num_gpus} with {way}",
        Objective.SEQ_LEN: f"{setup.seq_len:,} tokens with {way}",
        Objective.LAYERS: f"{layers_text(best.estimate)} with {way}",
    }.get(plan.goal.objective, f"{way} on {gpus_label(setup)}")
    batch = f"micro-batch {setup.micro_batch_size}"
    if setup.gradient_accumulation_steps > 1:
        batch += f" x {setup.gradient_accumulation_steps}"
    parts = (found, batch, *training_parts(best, plan))
    lead = OBJECTIVES[plan.goal.objective].removesuffix(" first")
    return f"{lead}: {', '.join(parts)}: {', '.join(_figures(best, plan, question))}"


def training_parts(each: PlannedSetup, plan: Plan) -> tuple[str, ...]:
    """Its precision, checkpointing, and kernels where they are not those that were asked for."""
    setup = each.setup
    parts = (setup.chosen_precision.value, f"checkpointing {checkpointing_label(setup)}")
    kernels = f"kernels {kernels_label(setup)}"
    return (*parts, kernels) if has_own_kernels(each, plan) else parts


def _figures(best: PlannedSetup, plan: Plan, question: "TimeQuestion | None") -> list[str]:
    """What a setup needs and takes; where money is what is wanted, its hours and what they cost."""
    answer = best.estimate
    told = [f"needs {needed_text(answer.total_bytes)} of {capacity_text(plan.gpu)}"]
    if best.offloads:
        told.append(f"CPU RAM {format_gib(answer.host_bytes, digits=1)}")
    if best.time is None:
        return told
    from memplan.report.estimates.times import (
        SOME_TOKENS,
        gpu_hours,
        hours_text,
        money_text,
        seconds_text,
    )

    told.append(f"a step takes {seconds_text(best.time.expected_s)}")
    if plan.goal.objective is Objective.COST:
        hours = gpu_hours(best.time)
        told.append(f"{hours_text(hours)} GPU-hours for {SOME_TOKENS}")
        price = None if question is None else question.price_of(plan.gpu)
        told += [] if price is None else [f"cost {money_text(hours * price)}"]
    return told


def way_text(best: PlannedSetup) -> str:
    """How it is trained, in a few words: what is given up before the engine."""
    label = setup_label(best.setup)
    lost = CONCESSIONS[best.given_up].label if best.given_up is not Concession.NONE else ""
    if label == ONE_GPU:
        return lost or "plain training"
    return f"{lost}, {label}" if lost else label


def has_own_kernels(each: PlannedSetup, plan: Plan) -> bool:
    """Whether it runs other kernels than the goal's."""
    base = plan.goal.base
    return (each.setup.kernels, each.setup.loss) != (base.kernels, base.loss)


def run_lines(plan: Plan, question: "TimeQuestion | None") -> list[str]:
    """The whole run on each number of GPUs, with the first setup that it has there."""
    if question is None or not question.has_length:
        return []
    from memplan.report.estimates.times import (  # which most are not asked for
        changed_text,
        run_text,
        timed,
    )

    firsts: dict[int, PlannedSetup] = {}
    for each in plan.setups:
        firsts.setdefault(each.setup.num_gpus, each)
    told, runs = [], []
    for count, each in sorted(firsts.items()):
        run = timed(each.estimate, question).run
        if run is not None:
            told.append(f"{count} GPUs, {setup_label(each.setup)}: {run_text(run, question)}")
            runs.append(run)
    return told + [changed_text(more, fewer) for fewer, more in pairwise(runs)]


def layers_text(answer: "Estimate") -> str:
    """``80 layers``."""
    count = answer.model.num_layers
    more = ", the most that is looked for," if count >= MAX_LAYERS else ""
    return f"{count:,} layers{more}"
