"""A few training steps of a setup, measured: on the card that is here, or on one that is pretended."""

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.errors import MemplanError, SetupError
from memplan.estimator.measured import Death, Measurement
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.training.choices import AllocatorKind
from memplan.training.precision import Engine
from memplan.verify.on_torch import card, processes
from memplan.verify.on_torch.building import build, config_of
from memplan.verify.on_torch.engines import trainer_of
from memplan.verify.on_torch.meters import LOAD, CardMeter, StorageMeter
from memplan.verify.on_torch.pretend_card import pretended_card
from memplan.verify.on_torch.pretend_kernels import pretended_kernels
from memplan.verify.on_torch.samples import Sampler, batch_of
from memplan.verify.on_torch.steps import Meter, train
from memplan.verify.on_torch.storages import StorageRecorder
from memplan.verify.run import Run

DEVICE = "cuda"
MAX_MESSAGE = 300
STEPS_ON_FAKES = 3
"""The second one has optimizer states; of the third on, no byte changes any more."""
STEPS_ON_CARD = 8
"""So many for the time: a process that is new is slower in its first three."""
MAX_RECORDED_EVENTS = 1_000_000


def measure_on_card(run: Run, *, snapshot: Path | None = None) -> list[Measurement]:
    """Train on this machine's card; every rank's measurement, on every rank.

    With ``snapshot`` the allocator's history is written there too. Running out of memory is a measurement.
    Raises a ``MemplanError`` for what cannot be run.
    """
    transformers.logging.set_verbosity_error()
    run = replace(run, num_steps=run.num_steps or STEPS_ON_CARD)
    others = card.others_bytes()
    rank, is_alone = processes.join(run.setup, has_gpu=True)
    _begin_context()
    meter = CardMeter()
    with _recorded(snapshot):
        num_params, death = _train_or_die(run, meter, is_alone=is_alone)
    used = max(0, card.used_bytes() - others)
    stats = torch.cuda.memory_stats()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = Measurement(
        **_common(run, num_params),
        gpu=properties.name,
        gpu_memory_bytes=int(properties.total_memory),
        compute_capability=(properties.major, properties.minor),
        is_fake=False,
        is_alone=is_alone,
        versions=_versions(run, with_card=True),
        parts=meter.parts,
        held_bytes=meter.held_bytes,
        context_bytes=max(0, used - int(stats["reserved_bytes.all.current"])) or None,
        driver_bytes=used or None,
        others_bytes=others,
        num_retries=int(stats["num_alloc_retries"]),
        rank=rank,
        death=death,
        step_seconds=tuple(round(each, 6) for each in meter.step_seconds),
    )
    return [found] if death is not None else _of_all_ranks(found, is_alone=is_alone)


def _of_all_ranks(found: Measurement, *, is_alone: bool) -> list[Measurement]:
    """Every rank's; a rank that died asks for none, and the others wait for it in vain."""
    try:
        return processes.gathered(found, is_alone=is_alone)
    finally:
        processes.leave()


def _train_or_die(run: Run, meter: CardMeter, *, is_alone: bool) -> tuple[int, Death | None]:
    """The number of parameters (0: it died before they were counted), and how it ended where it had no memory."""
    num_params, death = 0, None
    try:
        num_params = _train(run, meter, is_alone=is_alone, has_gpu=True)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        death = Death(part=meter.part, message=_first_line(error))
    meter.note()
    return num_params, death


@contextlib.contextmanager
def _recorded(snapshot: Path | None) -> Iterator[None]:
    """Write the allocator's history of what runs within to a file, where one is named."""
    if snapshot is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MAX_RECORDED_EVENTS)
    yield
    torch.cuda.memory._dump_snapshot(str(snapshot))
    torch.cuda.memory._record_memory_history(enabled=None)


def _begin_context() -> None:
    """Let the driver make its context. Raises ``SetupError`` for a card that cannot be used."""
    try:
        torch.zeros(1, device=DEVICE)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        msg = f"the GPU cannot be used: {_first_line(error)}"
        raise SetupError(msg) from error


def follow(run: Run, gpu: GpuSpec) -> Measurement:
    """Follow the same code on fake tensors, storage by storage, as on a card of this kind."""
    transformers.logging.set_verbosity_error()
    run = replace(run, num_steps=run.num_steps or STEPS_ON_FAKES)
    with pretended_card(gpu), pretended_kernels(gpu):
        try:
            _, is_alone = processes.join(run.setup, has_gpu=False)
            recorder = StorageRecorder()
            meter = StorageMeter(recorder)
            with FakeTensorMode(allow_non_fake_inputs=True), recorder:
                num_params = _train(run, meter, is_alone=is_alone, has_gpu=False)
        finally:
            processes.leave()
    parts = meter.peaks(expandable=run.setup.allocator is AllocatorKind.EXPANDABLE)
    if run.setup.chosen_engine is Engine.FSDP:
        del parts[LOAD]  # fake tensors began on the card, where a user's come to it unit by unit
    return Measurement(
        **_common(run, num_params),
        gpu=gpu.gpu_id,
        gpu_memory_bytes=gpu.capacity_bytes,
        compute_capability=gpu.compute_capability,
        is_fake=True,
        is_alone=is_alone,
        versions=_versions(run, with_card=False),
        parts=parts,
        held_bytes=meter.held_bytes,
        context_bytes=None,
        driver_bytes=None,
    )


def _train(run: Run, meter: Meter, *, is_alone: bool, has_gpu: bool) -> int:
    """Build, and train; the number of parameters.

    What the frameworks raise on their own is one line: it is their word on this setup. Raises
    ``SetupError`` for it, and lets through what says that memory ran out.
    """
    try:
        return _run(run, meter, is_alone=is_alone, has_gpu=has_gpu)
    except MemplanError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        place = "on fake tensors" if not has_gpu else "here"
        msg = (
            f"torch {torch.__version__} and transformers {transformers.__version__} do not run this {place}: "
            f"{type(error).__name__}: {_first_line(error)}"
        )
        raise SetupError(msg) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: torch's own error, or what cuBLAS and NCCL say in words of their own."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(word in said for word in ("out of memory", "alloc_failed"))
    )


def _run(run: Run, meter: Meter, *, is_alone: bool, has_gpu: bool) -> int:
    setup = run.setup
    config = config_of(run.config, dropout=setup.dropout)
    model = build(config, run.model, setup)
    num_params: int = sum(
        each.numel() for each in {id(each): each for each in model.parameters()}.values()
    )
    arguments = frozenset(inspect.signature(model.forward).parameters)
    torch.manual_seed(0)
    trainer = trainer_of(model, setup, is_alone=is_alone, has_gpu=has_gpu)
    meter.held()  # the batch is none of what is loaded
    sampler = Sampler(
        config=config, model=run.model, setup=setup, device=DEVICE, arguments=arguments
    )
    batch = batch_of(sampler)
    assert run.num_steps is not None
    train(trainer, batch, setup, meter, run.num_steps)
    return num_params


def _common(run: Run, num_params: int) -> dict[str, Any]:
    return {
        "model": run.config,
        "model_name": run.name,
        "task": run.model.task.value,
        "setup": run.setup,
        "num_params": num_params,
        "num_steps": run.num_steps,
    }


def _versions(run: Run, *, with_card: bool) -> dict[str, str]:
    from memplan.version import __version__

    found = {
        "memplan": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    if run.setup.chosen_engine is Engine.DEEPSPEED:
        import deepspeed

        found["deepspeed"] = deepspeed.__version__
    if with_card:
        found |= {
            "cuda": str(torch.version.cuda or torch.version.hip),
            "driver": card.driver_version(),
        }
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:MAX_MESSAGE]


def fullest(measured: list[Measurement]) -> Measurement:
    """The rank that holds the most."""
    return max(measured, key=lambda each: each.peaks.requested_bytes)
