"""Reading an engine's own settings from ``TrainingSetup.engine_options``."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import fields
from memplan.text import shown
from memplan.training.choices import ZeroStage
from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES, Fp8Package, Fp8Recipe
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.coercion import coerce_enum
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import (
    LOADING_OPTION,
    PIPELINE_OPTIONS,
    QUANTIZATION_OPTIONS,
    TrainingSetup,
)
from memplan.training.splitting.parallelism import PipelineRuntime

_Kind = TypeVar("_Kind", bound=Enum)

_DTYPES = {
    "fp32": DType.FP32, "float32": DType.FP32,
    "bf16": DType.BF16, "bfloat16": DType.BF16,
    "fp16": DType.FP16, "float16": DType.FP16,
}  # fmt: skip


class OptionReader:
    """The options of one setup, each checked for its type when it is read."""

    def __init__(self, setup: TrainingSetup, known: Iterable[str]) -> None:
        self.engine = setup.chosen_engine.value
        self.values = dict(setup.engine_options)
        names = list(known)
        for name in self.values:
            if name in names or says_pipeline(name, setup) or says_loading(name, setup):
                continue
            if not says_quantization(name, setup):
                msg = (
                    f"engine_options: {self.engine} has no option {shown(name)}."
                    f"{did_you_mean(name, names)} It has {', '.join(names)}"
                )
                raise SetupError(msg)

    def boolean(self, name: str, default: Any) -> Any:
        """True or false; ``default`` where it is not given or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise self._wrong(name, value, "true or false")

    def positive(self, name: str, default: int) -> int:
        """A whole number from 1 up."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, "a whole number from 1 up")
        return value

    def number(self, name: str, default: float) -> float:
        """A number above 0."""
        found = self.optional_number(name)
        return default if found is None else found

    def optional_number(self, name: str) -> float | None:
        """The same; None where it is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def member(self, name: str, default: _Kind) -> _Kind:
        """A member of the default's enum, by its value."""
        value = self.values.get(name)
        if value is None:
            return default
        return coerce_enum(f"engine_options: {name}", value, type(default))

    def dtype(self, name: str, default: DType | None) -> DType | None:
        """A floating format by its name; None where it is not given."""
        value = self.values.get(name)
        if value is None:
            return default
        found = value if isinstance(value, DType) else _DTYPES.get(str(value).split(".")[-1])
        if found is None or not found.is_floating:
            raise self._wrong(name, value, "fp32, bf16 or fp16")
        return found

    def _wrong(self, name: str, value: object, wanted: str) -> SetupError:
        return SetupError(f"engine_options: {name}: expected {wanted}, got {shown(value)}")


def frozen_format(setup: TrainingSetup) -> DType:
    """What FSDP keeps shards of frozen weights in: what they are loaded in.

    >>> frozen_format(TrainingSetup(num_gpus=8, engine="fsdp")).label
    'fp32'
    """
    formats = PRECISIONS[setup.chosen_precision]
    if setup.adapter is None:
        return formats.weights
    given = dict(setup.engine_options).get("frozen_dtype")
    return formats.compute if given is None else _DTYPES[str(getattr(given, "label", given))]


def says_quantization(name: str, setup: TrainingSetup) -> bool:
    """Whether an option says how the base is quantized; refused where nothing is.

    Raises ``SetupError``.
    """
    if name not in QUANTIZATION_OPTIONS:
        return False
    if setup.chosen_quantization is None:
        msg = f"engine_options: {name}: nothing is quantized; say quantize, such as nf4"
        raise SetupError(msg)
    return True


def says_loading(name: str, setup: TrainingSetup) -> bool:
    """Whether an option says how whole weights come to the GPU; refused where they never lie there whole.

    Raises ``SetupError``.
    """
    if name != LOADING_OPTION:
        return False
    loads_by_device_map(setup)
    return True


def loads_by_device_map(setup: TrainingSetup) -> bool:
    """Whether transformers loads the weights right onto this GPU (``from_pretrained(device_map=...)``).

    A quantized base is loaded so unless the option says that another loader takes it; any other model
    comes to the GPU as ``model.to`` moves it unless the option says so.

    Raises ``SetupError`` where weights never lie on a GPU whole, and for what is neither true nor false.

    >>> loads_by_device_map(TrainingSetup()), loads_by_device_map(TrainingSetup(engine_options={"device_map": True}))
    (False, True)
    """
    said = dict(setup.engine_options).get(LOADING_OPTION)
    is_quantized = setup.chosen_quantization is not None
    if said is None:
        return is_quantized
    if not isinstance(said, bool):
        msg = f"engine_options: {LOADING_OPTION}: expected true or false, got {shown(said)}"
        raise SetupError(msg)
    engine = setup.chosen_engine
    is_whole = engine is Engine.DDP or (engine is Engine.DEEPSPEED and not has_module_hooks(setup))
    parts = setup.tensor_parallel * setup.pipeline_parallel * setup.context_parallel
    if said and not is_quantized and (not is_whole or parts * setup.expert_parallel > 1):
        msg = (
            f"engine_options: {LOADING_OPTION}: is of engines that keep all weights on each GPU: "
            "ddp, and DeepSpeed up to stage 2"
        )
        raise SetupError(msg)
    return said


def says_pipeline(name: str, setup: TrainingSetup) -> bool:
    """Whether an option is of torch's pipelines; refused where there is none.

    Raises ``SetupError``.
    """
    if name not in PIPELINE_OPTIONS:
        return False
    pipeline = setup.pipeline
    if pipeline is None or pipeline.runtime is not PipelineRuntime.TORCH:
        msg = f"engine_options: {name}: is of torch's pipelines; say pipeline_parallel, with ddp or fsdp"
        raise SetupError(msg)
    value = dict(setup.engine_options)[name]
    if not isinstance(value, bool):
        msg = f"engine_options: {name}: expected true or false, got {shown(value)}"
        raise SetupError(msg)
    return True


def option_names(kind: Any) -> tuple[str, ...]:
    """The names of an options class's fields."""
    return tuple(field.name for field in fields(kind))


def reduces_each_micro_batch(setup: TrainingSetup) -> bool:
    """Whether FSDP reduces gradients at every micro-batch, where nobody says it.

    PyTorch's own loop does, and torchtitan's; HF Trainer and accelerate run all micro-batches but the
    last under ``no_sync``, and whole gradients stay (transformers 5.23, ``trainer.py``; accelerate
    1.15, ``Accelerator.no_sync``). The kernels' preset says whose loop it is.
    """
    accumulates = (
        KernelPreset.HF, KernelPreset.HF4, KernelPreset.LIGER, KernelPreset.UNSLOTH,
    )  # fmt: skip
    return setup.kernels not in accumulates


def loads_under_zero_init(setup: TrainingSetup) -> bool:
    """Whether DeepSpeed's stage 3 shards the model while it is built (``deepspeed.zero.Init``).

    transformers and accelerate do so by themselves (transformers 5.23, ``modeling_utils.py``;
    accelerate 1.15, ``zero3_init_flag``), and so it is the default; a loop of one's own need not. A
    quantized base is loaded whole (``get_init_context``).

    >>> loads_under_zero_init(TrainingSetup(num_gpus=8, zero_stage=3))
    True
    """
    if not has_module_hooks(setup) or setup.chosen_quantization is not None:
        return False
    return str(dict(setup.engine_options).get("zero_init")).lower() != "false"


def has_module_hooks(setup: TrainingSetup) -> bool:
    """Whether an engine hangs hooks on every module's backward pass: DeepSpeed's stage 3 does."""
    is_sharded = setup.zero_stage is ZeroStage.PARAMETERS
    return is_sharded and setup.chosen_engine is Engine.DEEPSPEED


def looks_for_overflow(setup: TrainingSetup) -> bool:
    """Whether a step goes through all gradients at once first: their absolute values, and a flag for
    each (DeepSpeed's stage3.py, ``has_overflow``)."""
    return has_module_hooks(setup) and PRECISIONS[setup.chosen_precision].weights is DType.FP16


def casts_inputs(setup: TrainingSetup) -> bool:
    """Whether an engine casts what every layer is handed to the format of its weights.

    FSDP2's mixed precision does (``MixedPrecisionPolicy.cast_forward_inputs``), so that tables which
    a model keeps in fp32 are copied once for each layer.
    """
    formats = PRECISIONS[setup.chosen_precision]
    return setup.chosen_engine is Engine.FSDP and formats.compute is not formats.weights


def casts_weights_again(setup: TrainingSetup) -> bool:
    """Whether TransformerEngine casts gathered weights anew in backward: under FSDP2 (``is_fsdp2``)."""
    if setup.fp8 is Fp8Recipe.NONE or setup.chosen_engine is not Engine.FSDP:
        return False
    return FP8_RECIPES[setup.fp8].package is Fp8Package.TRANSFORMER_ENGINE


FP8_ALL_GATHER = "enable_fsdp_float8_all_gather"
"""torchao's own name of the option."""


def gathers_codes(setup: TrainingSetup) -> bool:
    """Whether FSDP2's shards are cast to fp8 before they are gathered (torchao, ``Float8LinearConfig``).

    Raises ``SetupError`` where the recipe scales by row, or is none.
    """
    if setup.chosen_engine is not Engine.FSDP:
        return False
    asked = dict(setup.engine_options).get(FP8_ALL_GATHER)
    if str(asked).lower() != "true":
        return False
    if setup.fp8 is not Fp8Recipe.TENSORWISE:
        msg = (
            f"engine_options: {FP8_ALL_GATHER}: torchao gathers fp8 with the recipe "
            f"{Fp8Recipe.TENSORWISE.value} alone, and fp8 is {setup.fp8.value}"
        )
        raise SetupError(msg)
    return True


def has_python_linear(setup: TrainingSetup) -> bool:
    """Whether an engine replaces ``torch.nn.functional.linear`` by a function of its own.

    DeepSpeed's stage 3 does unless ``memory_efficient_linear`` is off (runtime/zero/linear.py).
    """
    if not has_module_hooks(setup):
        return False
    asked = dict(setup.engine_options).get("memory_efficient_linear", True)
    return str(asked).lower() != "false"


def engine_autocast(setup: TrainingSetup) -> DType | None:
    """What an engine's ``autocast`` option turns matrix products into, on top of its own precision.

    accelerate adds it to FSDP1's mixed precision and not to FSDP2's (accelerate 1.15,
    ``prepare_model`` and ``_prepare_fsdp2``). None where it is not asked for; beside an adapter
    FSDP1's mixed precision has it.

    Raises ``SetupError`` where an adapter needs it and it is switched off: its input is cast to fp32,
    and its gathered weights are not.
    """
    formats = PRECISIONS[setup.chosen_precision]
    mixed = setup.chosen_engine is Engine.FSDP1 and formats.compute is not formats.weights
    needed = mixed and setup.adapter is not None
    asked = dict(setup.engine_options).get("autocast")
    if needed and str(asked).lower() == "false":
        msg = (
            "engine_options: autocast: FSDP1's mixed precision runs an adapter under autocast only, as "
            "accelerate does: leave it out, or take the engine fsdp"
        )
        raise SetupError(msg)
    if not needed and asked not in (True, "true", "True"):
        return None
    return formats.compute
