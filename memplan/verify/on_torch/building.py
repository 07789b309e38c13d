"""A model as transformers builds it from its config, with weights of any value, on the device."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from memplan.errors import SetupError, UnsupportedFamilyError
from memplan.model.spec import ModelSpec, Task
from memplan.training.adapters import Lora
from memplan.training.choices import Recomputation
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup
from memplan.verify.on_torch.adapting import adapted
from memplan.verify.on_torch.formats import FORMATS
from memplan.verify.on_torch.samples import class_name

AUTO_CLASSES = {
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.PRETRAINING: "AutoModelForPreTraining",
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
}
"""Classes that come with a loss, by what they are trained for."""
NO_PART_OF_A_CLASS = (
    "name", "torch_dtype", "dtype", "auto_map", "quantization_config",
    "transformers_version",
)  # fmt: skip
"""Keys of a config that say something of a checkpoint, and nothing of the model."""
LEFT_OUT_BY_CHANCE = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Shares of the layers that a step skips: the estimate is of a step with all of them."""
WEIGHT_SCALE = 0.02
"""Standard deviation of the weights: transformers' usual ``initializer_range``."""


def config_of(values: Mapping[str, object], *, dropout: float | None) -> Any:
    """The config object of a ``config.json``; no code of a repository is run for it.

    Raises ``UnsupportedFamilyError`` for a type that the installed transformers has no class for.
    """
    given = copy.deepcopy(
        {key: each for key, each in values.items() if key not in NO_PART_OF_A_CLASS}
    )
    kind = given.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        msg = (
            f"model_type {kind!r}: transformers {transformers.__version__} has no class of its own for it, "
            "and code from a model's repository is not run"
        )
        raise UnsupportedFamilyError(msg)
    made = transformers.CONFIG_MAPPING[kind].from_dict(given)
    for each in _with_parts(made):
        each.use_cache = False
        for name in LEFT_OUT_BY_CHANCE:
            if hasattr(each, name):
                setattr(each, name, 0.0)
        if dropout is not None:
            _set_dropout(each, dropout)
    for key in ("decoder_start_token_id", "pad_token_id"):
        if getattr(made, key, None) is None:
            setattr(made, key, 0)
    return made


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield part


def _set_dropout(config: Any, dropout: float) -> None:
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, dropout)


def _class_of(config: Any, model: ModelSpec) -> Any:
    """Raises ``SetupError`` for a task without a loss of its own, and for a class that there is none of."""
    if model.has_towers or model.picture or model.sound:
        name = class_name(config, model)
        kind = getattr(transformers, name, None)
        if kind is None:
            msg = f"architectures: transformers {transformers.__version__} has no class {name}"
            raise SetupError(msg)
        return kind
    if model.task not in AUTO_CLASSES:
        known = ", ".join(each.value for each in AUTO_CLASSES)
        msg = f"task: {model.task.value} has no loss that transformers computes; verify trains {known}"
        raise SetupError(msg)
    return getattr(transformers, AUTO_CLASSES[model.task])


def build(config: Any, spec: ModelSpec, setup: TrainingSetup) -> Any:
    """The model without memory for its weights, as the setup trains it.

    Raises ``SetupError`` for a class that has no loss of its own.
    """
    kind = _class_of(config, spec)
    dtype = FORMATS[PRECISIONS[setup.chosen_precision].weights]
    # Where none is asked for, it is the class that chooses: sdpa, or eager where it has nothing else.
    asked = setup.attention or (
        None if setup.kernels is KernelPreset.HF else setup.chosen_kernels.attention
    )
    attention = None if asked is None else ATTENTION_NAMES.get(asked.value, asked.value)
    with torch.device("meta"), _no_initial_values():
        try:
            if hasattr(kind, "from_config"):
                model = kind.from_config(
                    config, attn_implementation=attention, dtype=dtype, trust_remote_code=False
                )
            else:
                model = kind._from_config(config, attn_implementation=attention, dtype=dtype)
        except (ValueError, ImportError) as error:
            # The class lacks this attention, the task, or a package.
            msg = f"transformers {transformers.__version__}: {str(error).splitlines()[0]}"
            raise SetupError(msg) from None
    model.tie_weights()
    model.train()
    _checkpoint(model, setup)
    if isinstance(setup.adapter, Lora):
        model = adapted(model, setup.adapter)
    return model


ATTENTION_NAMES = {"flash": "flash_attention_2", "flash3": "flash_attention_3"}


def _no_initial_values() -> Any:
    """Random values take minutes for a large model; what there is instead is drawn on the device."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from contextlib import nullcontext

        return nullcontext()
    return no_init_weights()


def _checkpoint(model: Any, setup: TrainingSetup) -> None:
    choice = setup.checkpointing
    if choice is Recomputation.NONE:
        return
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers renamed it
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if not isinstance(choice, CheckpointedLayers):
        return
    for layers in layer_lists(model):
        for index, layer in enumerate(layers):
            if not hasattr(layer, "gradient_checkpointing"):
                msg = (
                    f"checkpointing: {type(layer).__name__} can only be checkpointed in all layers"
                )
                raise SetupError(msg)
            layer.gradient_checkpointing = index in choice


def layer_lists(model: Any) -> list[Any]:
    """The stacks of layers: lists of modules that are not inside another one."""
    found: list[Any] = []
    inside: set[int] = set()
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if id(module) in inside or not isinstance(module, torch.nn.ModuleList) or not len(module):
            continue
        if hasattr(module[0], "gradient_checkpointing") or type(module[0]).__name__ in names:
            found.append(module)
            inside |= {id(each) for layer in module for each in layer.modules()}
    return found


def to_device(model: Any, device: str, *, fill: bool) -> None:
    """Give every weight and buffer memory, in the order of ``Module.to``; tied ones stay tied.

    ``fill``: with values, of which none is not a number; buffers are zero, so that no index is out of
    bounds.
    """
    moved: dict[int, Any] = {}
    kept = []
    for module in children_first(model):
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = _placed(tensor, device)
                    kept.append(tensor)  # so that no other takes its number
                table[name] = moved[id(tensor)]
    if fill:
        fill_in(moved.values())


def children_first(module: Any) -> Iterator[Any]:
    """Modules as ``Module._apply`` comes past them: the last one is the whole."""
    for each in module.children():
        yield from children_first(each)
    yield module


def fill_in(tensors: Any) -> None:
    """Draw weights, and set what is none to zero."""
    with torch.no_grad():
        for tensor in tensors:
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if isinstance(tensor, torch.nn.Parameter) and own.is_floating_point():
                own.normal_(0.0, WEIGHT_SCALE)
            else:
                own.zero_()


def _placed(tensor: Any, device: str) -> Any:
    # In CPU RAM zeros cost nothing until they are read.
    make = torch.zeros if device == "cpu" else torch.empty
    made = make(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made
