"""From a module and an example batch to a ``TracedModule``: several runs, of which one program is made."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.errors import TraceError
from memplan.model.spec import ModelSpec
from memplan.model.traced import (
    AUTOCAST,
    FULL,
    HALF,
    RECOMPUTED,
    SYMBOLS,
    Format,
    Program,
    Step,
    StepKind,
    TracedModule,
    TracedParameter,
    Value,
)
from memplan.sources.about_models.tape_file import traced_spec
from memplan.tracing.fitting import Points, Sizes, points_for
from memplan.tracing.on_torch.recorder import Recorder, SeenStep, tensors_in

OWN_FORMATS = {FULL: torch.float64, HALF: torch.bfloat16, AUTOCAST: torch.float32}
"""What stands for the module's own format in a run. Full precision is float64 there, so that what the
module itself makes fp32 can be told from it; under autocast every format is what it is."""
FORMATS = {
    torch.float32: Format.FP32, torch.int64: Format.INT64, torch.int32: Format.INT32,
    torch.bool: Format.BOOL,
}  # fmt: skip
HALF_FORMAT = torch.bfloat16
CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""What transformers' models call it: the first from version 6 on."""
NUM_BATCH_DIMENSIONS = 2


def trace(
    module: nn.Module,
    example_inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
    *,
    name: str | None = None,
) -> ModelSpec:
    """Write down what a training module does with a batch, as a model that memplan estimates.

    ``example_inputs`` are its arguments, by name or in order; the first dimension of each is the batch,
    the second of those with two or three the sequence (the target's where the module is an encoder and
    a decoder and the name begins with ``labels`` or ``decoder_``). The module returns its loss: as
    ``.loss``, ``["loss"]``, or a tensor of one element.

    Raises ``TraceError`` where it does something else for another batch, or returns no loss.
    """
    runs = _Runs(module, _named(module, example_inputs))
    programs = [(name, runs.program(name)) for name in OWN_FORMATS]
    if any(hasattr(module, each) for each in CHECKPOINTING):
        programs += [
            (f"{name}, {RECOMPUTED}", runs.program(name, recomputes=True)) for name in OWN_FORMATS
        ]
    sizes = runs.example_sizes()
    traced = TracedModule(
        class_name=type(module).__name__,
        torch_version=str(torch.__version__),
        example=tuple(sizes.get(name, 0) for name in SYMBOLS),
        guesses=tuple(sorted(runs.guesses)),
        parameters=_parameters(module),
        programs=tuple(programs),
    )
    return traced_spec(traced, name=name or type(module).__name__, source="memplan.trace")


def _parameters(module: nn.Module) -> tuple[TracedParameter, ...]:
    output = _output_matrix(module)
    return tuple(
        TracedParameter(
            name=name,
            shape=tuple(each.shape),
            trainable=each.requires_grad,
            is_output=each is output,
        )
        for name, each in module.named_parameters()
    )


def _output_matrix(module: nn.Module) -> torch.Tensor | None:
    """What a model of transformers calls its output embeddings."""
    ask = getattr(module, "get_output_embeddings", None)
    found = ask() if ask is not None else None
    weight = getattr(found, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def _named(
    module: nn.Module, given: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Arguments by their names."""
    if isinstance(given, Mapping):
        return dict(given)
    import inspect

    names = list(inspect.signature(module.forward).parameters)
    return dict(zip(names, given, strict=False))


@dataclass
class _Run:
    """One run, written down."""

    recorder: Recorder
    loss: int
    outputs: tuple[int, ...]


class _Runs:
    """The module in other formats and on batches of other sizes."""

    def __init__(self, module: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        self.module = module
        self.inputs = inputs
        config = getattr(module, "config", None)
        self.guesses: set[str] = set()
        """Calls whose values the module looked at."""
        self.has_target = bool(getattr(config, "is_encoder_decoder", False))

    def program(self, name: str, *, recomputes: bool = False) -> Program:
        """What all runs in a format have in common; as the module runs with checkpointing, or without."""
        points, own = points_for(self.example_sizes()), OWN_FORMATS[name]
        copied = _on_meta(self.module, own)
        if recomputes:
            _checkpoint(copied)
        autocast = HALF_FORMAT if name == AUTOCAST else None
        runs = [self._run(copied, own, autocast, sizes) for sizes in points.all]
        return _combined(runs, points, own)

    def _symbol(self, name: str, tensor: torch.Tensor) -> str | None:
        """What the second dimension of an argument is."""
        if not NUM_BATCH_DIMENSIONS <= tensor.dim() <= NUM_BATCH_DIMENSIONS + 1:
            return None
        is_target = self.has_target and name.startswith(("labels", "decoder_"))
        return "target_seq_len" if is_target else "seq_len"

    def example_sizes(self) -> Sizes:
        """The batch and the lengths of the example."""
        found: Sizes = {}
        for name, tensor in self.inputs.items():
            if tensor.dim():
                found.setdefault("batch_size", tensor.shape[0])
            symbol = self._symbol(name, tensor)
            if symbol is not None:
                found.setdefault(symbol, tensor.shape[1])
        return found

    def _sized(self, own: torch.dtype, sizes: Sizes) -> dict[str, torch.Tensor]:
        made = {}
        for name, tensor in self.inputs.items():
            shape = list(tensor.shape)
            if shape:
                shape[0] = sizes["batch_size"]
            symbol = self._symbol(name, tensor)
            if symbol is not None:
                shape[1] = sizes[symbol]
            dtype = own if tensor.dtype.is_floating_point else tensor.dtype
            made[name] = torch.empty(shape, dtype=dtype, device="meta")
        return made

    def _run(
        self, module: nn.Module, own: torch.dtype, autocast: torch.dtype | None, sizes: Sizes
    ) -> _Run:
        parameters = {id(each): name for name, each in module.named_parameters()}
        recorder = Recorder(parameters, autocast=autocast)
        given = self._sized(own, sizes)
        for name, tensor in given.items():
            recorder.values[recorder.number(tensor)].input = name
        handles = list(_watched(module, recorder))
        try:
            with torch.no_grad(), recorder, torch.device("meta"):
                returned = module(**given)
        finally:
            for each in handles:
                each.remove()
        recorder.is_over = True
        self.guesses |= set(recorder.guesses)
        loss = _loss_of(returned)
        outputs = tuple(
            recorder.number(each)
            for each in tensors_in(_plain(returned))
            if each is not loss and each.dtype.is_floating_point
        )
        return _Run(recorder, recorder.number(loss), outputs)


def _on_meta(module: nn.Module, own: torch.dtype) -> nn.Module:
    """A copy without any weights, in another format; buffers keep theirs."""
    memo: dict[int, Any] = {}
    for each in module.parameters():
        dtype = own if each.dtype.is_floating_point else each.dtype
        memo[id(each)] = nn.Parameter(
            torch.empty(each.shape, dtype=dtype, device="meta"), requires_grad=each.requires_grad
        )
    for each in module.buffers():
        memo[id(each)] = torch.empty(each.shape, dtype=each.dtype, device="meta")
    return copy.deepcopy(module, memo)


def _checkpoint(module: nn.Module) -> None:
    """Have a model of transformers run as with checkpointing: without a cache, its layers called as they are."""
    named = (getattr(module, name, None) for name in CHECKPOINTING)
    enable = next(each for each in named if each is not None)
    enable()
    for each in module.modules():
        if hasattr(each, "_gradient_checkpointing_func"):
            each._gradient_checkpointing_func = _call


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _watched(module: nn.Module, recorder: Recorder) -> Any:
    """Hooks at the borders of layers: members of lists of modules that hang in no other list."""
    lists = [
        name
        for name, each in module.named_modules()
        if isinstance(each, nn.ModuleList) and len(each) > 1
    ]
    outermost = [name for name in lists if not any(name.startswith(f"{each}.") for each in lists)]
    for name in outermost:
        for index, layer in enumerate(module.get_submodule(name)):
            label = f"{name}.{index}"

            def begin(_: Any, args: Any, kwargs: Any, label: str = label) -> None:
                recorder.border(StepKind.BEGIN, label, (args, kwargs))

            def end(_: Any, __: Any, ___: Any, out: Any, label: str = label) -> None:
                recorder.border(StepKind.END, label, out)

            yield layer.register_forward_pre_hook(begin, with_kwargs=True)
            yield layer.register_forward_hook(end, with_kwargs=True)


def _plain(returned: Any) -> Any:
    """A ``ModelOutput`` as the dictionary that it is."""
    return dict(returned) if isinstance(returned, Mapping) else returned


def _loss_of(returned: Any) -> torch.Tensor:
    found = getattr(returned, "loss", None)
    if found is None and isinstance(returned, Mapping):
        found = returned.get("loss")
    if found is None:
        scalars = [each for each in tensors_in(_plain(returned)) if each.numel() == 1]
        found = scalars[0] if scalars else None
    if found is None:
        msg = "trace: the module returns no loss: neither `.loss` nor a tensor of one element"
        raise TraceError(msg)
    assert isinstance(found, torch.Tensor)
    return found


def _combined(runs: Sequence[_Run], points: Points, own: torch.dtype) -> Program:
    """One program, if all runs are alike but for sizes."""
    first = runs[0].recorder
    for run in runs[1:]:
        _check_alike(first.steps, run.recorder.steps)
    sizes = points.fitting()
    values = []
    for number, seen in enumerate(first.values):
        shapes = [run.recorder.values[number].shape for run in runs]
        if len({len(shape) for shape in shapes}) > 1:
            msg = "trace: a tensor has more dimensions for another batch"
            raise TraceError(msg)
        shape = tuple(sizes.add(dimension) for dimension in zip(*shapes, strict=True))
        is_own = seen.dtype is own
        values.append(
            Value(
                shape=shape,
                format=Format.MODEL if is_own else FORMATS.get(seen.dtype, Format.HALF),
                storage=seen.storage,
                strided=seen.strided,
                parameter=seen.parameter,
                input=seen.input,
            )
        )
    kept = runs[0]
    steps = tuple(
        Step(step.kind, step.name, step.inputs, step.outputs, _common(step, position, runs))
        for position, step in enumerate(first.steps)
    )
    return Program(
        sizes=tuple(sizes.found), values=tuple(values), steps=steps,
        loss=kept.loss, outputs=kept.outputs,
    )  # fmt: skip


def _check_alike(left: Sequence[SeenStep], right: Sequence[SeenStep]) -> None:
    for one, other in zip(left, right, strict=False):
        mine = (one.kind, one.name, one.inputs, one.outputs)
        if mine != (other.kind, other.name, other.inputs, other.outputs):
            msg = (
                f"trace: the module calls {one.name or one.kind} for one batch and {other.name or other.kind} "
                "for another: what it does hangs on sizes, which a program cannot say"
            )
            raise TraceError(msg)


def _common(step: SeenStep, position: int, runs: Sequence[_Run]) -> tuple[tuple[str, object], ...]:
    """Settings that are the same in all runs; others hang on sizes, and shapes say those."""
    others = [run.recorder.steps[position].settings for run in runs[1:]]
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in step.settings.items()
        if all(other.get(key) == value for other in others)
    )
