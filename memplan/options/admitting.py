"""What ``admit`` is asked: one job, in the words of ``memplan.estimate``, and the pools that it may go to."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.errors import SetupError, UsageError, did_you_mean
from memplan.fast_dataclass import replace
from memplan.options.python import ESTIMATE, asked_in_python, python_words
from memplan.search.admission import (
    Admission,
    PoolAnswer,
    chosen_of,
    is_admitted,
    kind_of,
    reason_of,
)
from memplan.text import shown

if TYPE_CHECKING:
    from memplan.estimator import Estimate
    from memplan.hardware.pool import Pool
    from memplan.options.asked import Asked

POOLS_SAY = frozenset({"gpu", "gpu_memory", "cpu_memory"})
"""What a pool says, and a request therefore does not."""
TEXTS = (
    "setup",
    "adapter",
    "training_args",
    "deepspeed_config",
    "accelerate_config",
    "calibration",
)
"""Keys whose value is a file's name; elsewhere some of them may be objects."""
OWN_KEYS = ("model", "pool")
"""Keys of a request that are no options."""


def admission(
    request: Mapping[str, object], pools: "Sequence[Pool]", *, fails_on_tight: bool
) -> Admission:
    """Judge a request by every pool that it may go to.

    Raises a ``MemplanError`` for keys that there are not, for what cannot be read, and for a pool that there is not.
    """
    options = {key: value for key, value in request.items() if key not in OWN_KEYS}
    for key in sorted(POOLS_SAY & options.keys()):
        msg = f"{key}: the pools say it: leave it out of the request, or name a pool"
        raise UsageError(msg)
    for key in TEXTS:
        if not isinstance(options.get(key, ""), str):
            msg = f"{key}: write the name of a file, not {shown(options[key])}"
            raise UsageError(msg)
    asked = asked_in_python(request.get("model"), options, ESTIMATE)
    with python_words(asked.given):
        return _admission(asked, _meant(request.get("pool"), pools), fails_on_tight=fails_on_tight)


def _meant(name: object, pools: "Sequence[Pool]") -> "Sequence[Pool]":
    """The pool that is named, by its scheduler's word for it too, or all."""
    if name is None:
        return pools
    found = [each for each in pools if each.name == name] or [
        each for each in pools if each.queue and each.queue == name
    ]
    if not found:
        known = tuple(each.name for each in pools)
        hint = did_you_mean(str(name), known) or f" There are: {', '.join(known)}"
        msg = f"pool: there is no pool {str(name)[:100]!r}.{hint}"
        raise UsageError(msg)
    return found


def _admission(asked: "Asked", pools: "Sequence[Pool]", *, fails_on_tight: bool) -> Admission:
    from memplan.estimator.job_request import job_request
    from memplan.options.run_times import time_question
    from memplan.sources.outcomes import confidence_of

    job = _answered(asked, None)
    answers = tuple(_pool_answer(asked, each, job) for each in pools)
    chosen = chosen_of(answers)
    answer = None if chosen is None else chosen.answer
    question = time_question(asked.values)
    request = None
    if chosen is not None and answer is not None:
        request = replace(job_request(answer, question), queue=chosen.pool.queue)
    return Admission(
        admitted=is_admitted(chosen, fails_on_tight=fails_on_tight),
        chosen=chosen,
        request=request,
        confidence=confidence_of(kind_of(job.setup)),
        pools=answers,
    )


def _pool_answer(asked: "Asked", pool: "Pool", job: "Estimate") -> PoolAnswer:
    """What the pool means for the job: it has not the GPUs, does not run it, or is judged."""
    count = job.setup.num_gpus
    if shortage := pool.shortage(count):
        return PoolAnswer(pool=pool, answer=None, reason=shortage)
    try:
        answer = _answered(_on_nodes(asked, pool, job), pool)
    except SetupError as error:
        return PoolAnswer(pool=pool, answer=None, reason=str(error))
    if pool.node_memory_bytes is not None:
        answer = replace(answer, node_memory_bytes=pool.node_memory_bytes)
    return PoolAnswer(pool=pool, answer=answer, reason=reason_of(answer))


def _on_nodes(asked: "Asked", pool: "Pool", job: "Estimate") -> "Asked":
    """The question with as many nodes as the pool spreads the job over.

    Raises ``SetupError`` where a node would hold more GPUs than the pool's have.
    """
    setup = job.setup
    if setup.num_nodes is None or "nodes" not in asked.given:
        nodes = max(pool.num_nodes(setup.num_gpus), 1)
        return replace(
            asked, values={**asked.values, "nodes": nodes}, given=asked.given | {"nodes"}
        )
    if setup.gpus_per_node > pool.gpus_per_node:
        msg = f"has {pool.gpus_per_node} GPUs in a node, and {setup.gpus_per_node} are asked for"
        raise SetupError(msg)
    return asked


def _answered(asked: "Asked", pool: "Pool | None") -> "Estimate":
    """The request's estimate, on the pool's card or on none."""
    from memplan.options.estimating import answers

    cards = None if pool is None else [pool.gpu]
    model = asked.values["model"]
    if model is None and asked.values["setup"] is None:
        msg = "model: name one: `memplan models` lists the built-in ones"
        raise UsageError(msg)
    remarks: list[str] = []
    (found,) = answers(
        replace(asked, values={**asked.values, "gpu": cards}),
        None if model is None else asked.model(model),
        remark=remarks.append,
    )
    return found
