"""What runs a training step: the plain loop, DistributedDataParallel, FSDP2, DeepSpeed."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memplan.errors import SetupError, UsageError
from memplan.fast_dataclass import dataclass
from memplan.memory.ddp import CommHook, DdpOptions
from memplan.memory.fsdp2.options import Fsdp2Options, InitDevice, Wrapping
from memplan.training.choices import FsdpStrategy
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup
from memplan.verify.on_torch.building import fill_in, layer_lists, to_device
from memplan.verify.on_torch.formats import FORMATS
from memplan.verify.on_torch.optimizers import optimizer_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A model on its device, and the parts of a step of it."""

    forward: Callable[[Mapping[str, Any]], Any]
    """From a batch to what the model returns, its loss among it."""
    backward: Callable[[Any], None]
    step: Callable[[], None]
    """Steps the optimizer, and lets the gradients go."""
    unsynchronised: Callable[[], Any]
    """Where gradients are summed up before they are reduced."""
    passed: Callable[[], None] = lambda: None
    """Called behind every micro-batch but a step's last."""


def trainer_of(model: Any, setup: TrainingSetup, *, is_alone: bool, has_gpu: bool) -> Trainer:
    """Lay the setup's engine over a model without memory.

    ``is_alone``: the process stands for one rank of several, and nothing is sent.

    Raises ``SetupError`` for what is not run here.
    """
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        return _deepspeed(model, setup)
    if engine is Engine.FSDP:
        return _fsdp2(model, setup, has_gpu=has_gpu)
    to_device(model, "cuda", fill=has_gpu)
    world_size = setup.num_gpus
    wrapped = model if world_size == 1 else _ddp(model, setup, is_alone=is_alone)
    optimizer = optimizer_of(setup, model.parameters(), has_gpu=has_gpu)
    return _plain(wrapped, optimizer, setup)


def _plain(model: Any, optimizer: Any, setup: TrainingSetup) -> Trainer:
    half = PRECISIONS[setup.chosen_precision].autocast

    def forward(batch: Mapping[str, Any]) -> Any:
        if half is None:
            return model(**batch)
        with torch.autocast("cuda", dtype=FORMATS[half]):
            outputs = model(**batch)
        return _in_fp32(outputs) if setup.upcast_outputs else outputs

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Trainer(
        forward=forward,
        backward=lambda loss: loss.backward(),
        step=step,
        unsynchronised=getattr(model, "no_sync", contextlib.nullcontext),
    )


def _in_fp32(outputs: Any) -> Any:
    """As accelerate hands outputs over under mixed precision (``ConvertOutputsToFp32``)."""
    widened = {
        name: each.float() if torch.is_tensor(each) else each for name, each in outputs.items()
    }
    return type(outputs)(**widened)


def _ddp(model: Any, setup: TrainingSetup, *, is_alone: bool) -> Any:
    options = DdpOptions.of(setup)
    if options.comm_hook is not CommHook.ALLREDUCE:
        msg = f"comm_hook: verify does not run {options.comm_hook.value}"
        raise SetupError(msg)
    # The default is not said: torch is about to give it another name.
    said: dict[str, Any] = {}
    if not options.broadcast_buffers or is_alone:
        said["broadcast_buffers"] = False
    # A cap that is said is that of the first bucket too.
    if options.bucket_cap_mb is not None:
        said["bucket_cap_mb"] = options.bucket_cap_mb
    with _unchecked() if is_alone else contextlib.nullcontext():
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[torch.cuda.current_device()],
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            **said,
        )
    if is_alone:
        # Instead of the reduction, which is made where the bucket lies too.
        wrapped.register_comm_hook(None, _as_it_is)
    return wrapped


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Ranks that are not there agree on every shape, and send nothing."""
    module = torch.nn.parallel.distributed
    names = ("_verify_param_shape_across_processes", "_sync_module_states")
    kept = {name: getattr(module, name) for name in names}
    for name in names:
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, each in kept.items():
            setattr(module, name, each)


def _as_it_is(
    _: object, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _fsdp2(model: Any, setup: TrainingSetup, *, has_gpu: bool) -> Trainer:
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import init_device_mesh

    options = Fsdp2Options.of(setup)
    strategy = setup.fsdp_strategy
    if options.wrapping is not Wrapping.LAYERS or strategy is FsdpStrategy.HYBRID:
        msg = "fsdp: verify shards each layer and the root over all ranks, and nothing else"
        raise SetupError(msg)
    with unset_fake_temporarily():  # the mesh reads the numbers of its ranks
        mesh = init_device_mesh("cuda", (setup.num_gpus,))
    choices: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _fsdp2_policy(setup, options),
        "reshard_after_forward": options.reshard_after_forward,
    }
    _shard_layers(model, choices, options.init_device, has_gpu=has_gpu)
    if has_gpu:
        fill_in([*model.parameters(), *model.buffers()])
    optimizer = optimizer_of(setup, model.parameters(), has_gpu=has_gpu)

    @contextlib.contextmanager
    def unsynchronised() -> Any:
        if options.sync_each_batch:
            yield
            return
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    plain = _plain(model, optimizer, setup)
    return Trainer(
        forward=plain.forward,
        backward=plain.backward,
        step=plain.step,
        unsynchronised=unsynchronised,
    )


def _fsdp2_policy(setup: TrainingSetup, options: Fsdp2Options) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    formats = PRECISIONS[setup.chosen_precision]
    reduced = options.reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=FORMATS[formats.compute] if formats.compute is not formats.weights else None,
        reduce_dtype=None if reduced is None else FORMATS[reduced],
    )


def _shard_layers(
    model: Any, choices: dict[str, Any], init_device: InitDevice, *, has_gpu: bool
) -> None:
    """Each layer and the root, on the card before or behind.

    Raises ``SetupError`` for a class that does not say what its layers are.
    """
    from torch.distributed.fsdp import fully_shard

    stacks = layer_lists(model)
    if not stacks:
        msg = (
            f"engine fsdp: transformers' {type(model).__name__} marks no layers (it neither checkpoints nor names "
            "any), so that verify cannot tell what to shard beside the root"
        )
        raise SetupError(msg)
    is_empty = init_device in (InitDevice.META, InitDevice.TO_EMPTY)
    if not is_empty:
        # A fake tensor cannot be moved where it stands: it begins on the card.
        to_device(model, init_device.value if has_gpu else "cuda", fill=False)
    for layers in stacks:
        for layer in layers:
            fully_shard(layer, **choices)
    fully_shard(model, **choices)
    if is_empty:
        model.to_empty(device="cuda")
        model.tie_weights()


def _deepspeed(model: Any, setup: TrainingSetup) -> Trainer:
    try:
        import deepspeed
    except ImportError as error:
        msg = f"engine deepspeed: {error}: pip install deepspeed"
        raise UsageError(msg) from None
    from memplan.sources.emitters.deepspeed import config_for_own_optimizer

    # torch's own optimizer in the place of DeepSpeed's, which would first be compiled: it holds the same.
    values = config_for_own_optimizer(setup)
    values |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    to_device(model, "cuda", fill=True)
    optimizer = optimizer_of(setup, model.parameters(), has_gpu=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=values)
    return Trainer(
        forward=lambda batch: engine(**batch),
        backward=lambda loss: engine.backward(loss),
        step=lambda: engine.step(),
        unsynchronised=contextlib.nullcontext,
        # It counts the micro-batches of a step by these calls.
        passed=lambda: engine.step(),
    )
