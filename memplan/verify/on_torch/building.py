"""A model as transformers builds it from its config, with weights of any value, on the device."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from memplan.dtypes import DType
from memplan.errors import SetupError, UnsupportedFamilyError
from memplan.model.spec import Task
from memplan.training.adapters import Lora
from memplan.training.choices import Recomputation
from memplan.training.kernels import KernelPreset
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup
from memplan.verify.on_torch.adapting import adapted

AUTO_CLASSES = {
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
}
"""Classes that come with a loss, by what they are trained for."""
FORMATS = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
NO_PART_OF_A_CLASS = (
    "name", "architectures", "torch_dtype", "dtype", "auto_map", "quantization_config",
    "transformers_version",
)  # fmt: skip
"""Keys of a config that say something of a checkpoint, and nothing of the model."""
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


def build(config: Any, task: Task, setup: TrainingSetup) -> Any:
    """The model without memory for its weights, as the setup trains it.

    Raises ``SetupError`` for a task without a loss of its own.
    """
    if task not in AUTO_CLASSES:
        known = ", ".join(each.value for each in AUTO_CLASSES)
        msg = f"task: {task.value} has no loss that transformers computes; verify trains {known}"
        raise SetupError(msg)
    kind = getattr(transformers, AUTO_CLASSES[task])
    dtype = FORMATS[PRECISIONS[setup.chosen_precision].weights]
    # Where none is asked for, it is the class that chooses: sdpa, or eager where it has nothing else.
    asked = setup.attention or (
        None if setup.kernels is KernelPreset.HF else setup.chosen_kernels.attention
    )
    attention = None if asked is None else ATTENTION_NAMES.get(asked.value, asked.value)
    with torch.device("meta"), _no_initial_values():
        try:
            model = kind.from_config(
                config,
                attn_implementation=attention,
                dtype=dtype,
                trust_remote_code=False,
            )
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
    for module in model.modules():
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


def batch_of(config: Any, task: Task, setup: TrainingSetup, device: str) -> dict[str, Any]:
    """Random tokens, with what the task is trained on; ``setup`` has its lengths filled in."""
    size, length = setup.micro_batch_size, setup.seq_len or 1
    vocabulary = config.get_text_config().vocab_size
    tokens = _whole_numbers(vocabulary, (size, length), device)
    targets: dict[str, Any]
    if task is Task.SEQ2SEQ_LM:
        target = (size, setup.target_seq_len or length)
        targets = {"labels": _whole_numbers(vocabulary, target, device)}
    elif task is Task.SEQUENCE_CLASSIFICATION:
        targets = {"labels": _whole_numbers(config.num_labels, (size,), device)}
    elif task is Task.TOKEN_CLASSIFICATION:
        targets = {"labels": _whole_numbers(config.num_labels, (size, length), device)}
    elif task is Task.QUESTION_ANSWERING:
        ends = [_whole_numbers(length, (size,), device) for _ in range(2)]
        targets = {"start_positions": ends[0], "end_positions": ends[1]}
    else:
        targets = {"labels": tokens.clone()}
    return {"input_ids": tokens, **targets}


def _whole_numbers(below: int, shape: tuple[int, ...], device: str) -> Any:
    # From 1 on: 0 is what padding is here, and a sequence without any is trained.
    return torch.randint(min(1, below - 1), max(below, 1), shape, device=device)
