"""The library's face: the core's functions, with names resolved to what they name."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.estimator import estimate as estimate_memory
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.training.setup import TrainingSetup

if TYPE_CHECKING:
    from memplan.search.goal import Goal, Plan
    from memplan.search.grid import Grid
    from memplan.search.quantity import Quantity
    from memplan.search.sweep import Sweep

Model = str | os.PathLike[str] | Mapping[str, object] | ModelSpec
"""What names a model: a built-in name, a hub id, a path, a config dict or a spec."""


def estimate(
    model: Model,
    setup: TrainingSetup | None = None,
    *,
    gpu: str | GpuSpec | None = None,
    cpu_memory: str | int | None = None,
    rank: int | None = None,
) -> Estimate:
    """Estimate the memory of a training run.

    ``gpu`` is a name of the catalog, a card's memory (``46GiB``) or a ``GpuSpec``; without one there
    is no verdict. ``cpu_memory`` is that of a node (``512GiB``, or [bytes]), which ``host_verdict``
    judges. The account is the worst rank's, or with ``rank`` that one's; ``Estimate.ranks`` has them
    all. Raises a ``MemplanError`` for what cannot be read or trained, and for a rank that there is
    not.

    >>> import memplan
    >>> setup = memplan.TrainingSetup(precision="bf16", seq_len=2048, checkpointing="full")
    >>> answer = memplan.estimate("llama-3.2-1b", setup, gpu="h100")
    >>> answer.num_params, answer.peak_phase, answer.verdict.value
    (1235814400, 'backward', 'fits')
    """
    from memplan.sources.models import load_model

    spec = load_model(model)
    card = _card(gpu) if gpu is not None else None
    asked = setup or TrainingSetup()
    if asked.job.names:
        from memplan.sources.job_models import looked_up

        asked = looked_up(asked)
    answer = estimate_memory(spec, asked, card, rank=rank)
    answer = replace(answer, node_memory_bytes=_size(cpu_memory))
    if asked.lengths is None:
        return answer
    from memplan.search.lengths import with_batches

    return with_batches(answer)


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


def sweep(
    model: Model,
    grid: "Grid | Mapping[str, object]",
    *,
    gpus: Sequence[str | GpuSpec] = (),
    cpu_memory: str | int | None = None,
    num_jobs: int = 1,
) -> "Sweep":
    """Estimate every setup of a grid, on every GPU; lazily, in a stable order.

    ``cpu_memory`` is that of a node, as ``estimate`` takes it. The work is spread over ``num_jobs``
    processes; that changes no result.

    ``grid`` is a ``Grid``, or its axes alone: fields of ``TrainingSetup`` and the values of each.
    Iterating gives a ``SweepResult`` for each setup, its ``estimates`` in the order of ``gpus``;
    nothing is computed before, and nothing is kept. What cannot be trained is left out, and counted
    in ``impossible``. Raises a ``MemplanError`` for what cannot be read or swept over.

    >>> import memplan
    >>> axes = {"precision": "bf16", "seq_len": 1024, "micro_batch_size": [1, 4, 16]}
    >>> for result in memplan.sweep("llama-3.2-1b", axes, gpus=["v100-32gb", "h100"]):
    ...     verdicts = [each.verdict.value for each in result.estimates]
    ...     print(result.setup.micro_batch_size, *verdicts)
    1 fits fits
    4 fits fits
    16 OOM fits
    """
    from memplan.search.grid import Grid
    from memplan.search.sweep import Sweep
    from memplan.sources.models import load_model

    made = Grid(axes=grid) if isinstance(grid, Mapping) else grid
    cards = [_card(gpu) for gpu in gpus]
    return Sweep(
        load_model(model),
        made,
        cards,
        num_jobs=num_jobs,
        node_memory_bytes=_size(cpu_memory),
    )


def plan(model: Model, goal: "Goal | None" = None, *, gpu: str | GpuSpec = "h100") -> "Plan":
    """Search for the setups that reach a goal on one kind of GPU.

    The plan's ``setups`` are those that fit, best first, each with its largest micro-batch; its
    ``shortfalls`` say what the others lack, and the nearest setup that fits. Raises a
    ``MemplanError`` for what cannot be read or planned.

    >>> import memplan
    >>> base = memplan.TrainingSetup(seq_len=2048)
    >>> found = memplan.plan("llama-3.2-1b", memplan.Goal(num_gpus=(1,), base=base), gpu="h100")
    >>> best = found.setups[0]
    >>> best.setup.checkpointing.value, best.setup.micro_batch_size
    ('none', 8)
    """
    from memplan.search.goal import Goal
    from memplan.search.planner import plan as plan_setups
    from memplan.sources.models import load_model

    return plan_setups(load_model(model), goal or Goal(), _card(gpu))


def _card(gpu: str | GpuSpec) -> GpuSpec:
    from memplan.sources.catalog import load_gpu

    return load_gpu(gpu) if isinstance(gpu, str) else gpu


def _size(memory: str | int | None) -> int | None:
    """A size as it is written, such as ``512GiB`` [bytes]."""
    if not isinstance(memory, str):
        return memory
    from memplan.units import parse_bytes

    return parse_bytes(memory)
