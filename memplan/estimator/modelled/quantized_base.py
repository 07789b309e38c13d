"""The quantized base of a job: asked for, or as the model's own config has it; refused where it cannot be."""

from typing import TYPE_CHECKING

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.memory.engine_options import says_quantization
from memplan.model.layers import LayerSpec
from memplan.model.spec import ModelSpec
from memplan.training.choices import Recomputation
from memplan.training.freezing import ALL_LAYERS
from memplan.training.setup import TrainingSetup

if TYPE_CHECKING:
    from memplan.training.quantization import Quantization

_TRAINABLE = "lay an adapter over it: `adapter`"


def on_its_base(model: ModelSpec, setup: TrainingSetup) -> TrainingSetup:
    """The setup with the quantization that the model's config says, where it says none itself.

    Without an adapter the checkpoint's weights are taken to be unpacked when they are loaded: nothing
    else can train them. Raises ``SetupError`` for a quantized base of which nothing can be trained,
    and under an adapter for one in a format that is not modelled.
    """
    if setup.quantize is None and model.quantization and setup.adapter is not None:
        setup = replace(setup, quantize=_own(model))
    if setup.chosen_quantization is not None and not _trains_beside(model, setup):
        kind = setup.chosen_quantization.kind.value
        msg = f"quantize: weights in {kind} cannot be trained: {_TRAINABLE}, or quantize none"
        raise SetupError(msg)
    for name in dict(setup.engine_options):
        says_quantization(name, setup)
    return setup


def _own(model: ModelSpec) -> "Quantization":
    from memplan.training.quantization_config import quantization_method, read_quantization_config

    config = dict(model.quantization)
    found = read_quantization_config(config)
    if found is None:
        msg = (
            f"quantize: {model.name} is stored in {quantization_method(config)} "
            "(quantization_config), which is not modelled under an adapter: say none to count its "
            "weights unpacked, or another format, such as nf4"
        )
        raise SetupError(msg)
    return found


def _trains_beside(model: ModelSpec, setup: TrainingSetup) -> bool:
    """Whether something else than the packed layers is trained: an adapter, or what is in no layer."""
    if setup.adapter is not None:
        return True
    frozen = setup.freeze
    if any(last >= ALL_LAYERS and not first for first, last in frozen.layer_ranges):
        return True
    return len(model.stacks) > 1 and frozen.encoder and frozen.decoder


def base_words(model: ModelSpec, asked: TrainingSetup, resolved: TrainingSetup) -> tuple[str, ...]:
    """How the base is quantized and what said so; or that a checkpoint's own codes are not kept."""
    how = resolved.chosen_quantization
    if how is None:
        return _unpacked(model, asked)
    parts = [f"base {how}"]
    if how.compute_dtype is not None:
        given = "compute_dtype" in dict(asked.engine_options) or asked.quantize is None
        said = "" if given else " by default, where BitsAndBytesConfig's own is fp32"
        parts.append(f"computed in {how.compute_dtype.label}{said}")
    if how.upcast.value != "none":
        rest = "the rest" if how.upcast.value == "all" else "norms"
        parts.append(f"{rest} in fp32 (prepare_model_for_kbit_training)")
    elif how.format.is_prepared:
        parts.append("the rest as loaded (no prepare_model_for_kbit_training)")
    if asked.quantize is None:
        parts.append("as the config's quantization_config says")
    elif model.quantization:
        parts.append("in place of the config's quantization_config")
    return ("; ".join(parts),)


_NOT_WHOLE = ("cpu", "meta", "to_empty")
"""Places of a model before FSDP shards it, with which a GPU has a layer of it at once at most."""


def base_notes(model: ModelSpec, setup: TrainingSetup) -> list[str]:
    """What a quantized base does that nobody expects of it."""
    how = setup.chosen_quantization
    if how is None:
        return []
    notes = []
    if how.kind.value == "int8" and setup.checkpointing is not Recomputation.NONE:
        notes.append(
            "LLM.int8 holds the input of every linear layer until backward is over, checkpointed or "
            "not (bitsandbytes' MatMul8bitLt keeps it in its context): nf4 does not"
        )
    place = dict(setup.engine_options).get("init_device")
    is_sharded = how.storage_dtype is not None and how.storage_dtype.is_floating
    if is_sharded and place not in _NOT_WHOLE:
        notes.append(
            "the quantized base lies whole on each GPU before it is sharded, as transformers loads it; "
            "from the CPU (device_map cpu): engine option init_device=cpu with FSDP"
        )
    if any(_has_experts(run.layer) for stack in model.stacks for run in stack.runs):
        rest = "fp32" if how.upcast.value == "all" else "16 bits"
        notes.append(
            f"{model.name}'s experts are no linear layers to transformers 5: they are not quantized, "
            f"and held in {rest}"
        )
    return notes


def _has_experts(layer: LayerSpec) -> bool:
    from memplan.model.mixtures import MixtureSpec  # only where something is quantized

    return isinstance(layer.feed_forward, MixtureSpec)


def _unpacked(model: ModelSpec, asked: TrainingSetup) -> tuple[str, ...]:
    if not model.quantization:
        return ()
    from memplan.training.quantization_config import is_modelled, quantization_method

    config = dict(model.quantization)
    if not is_modelled(config):
        return ()  # the model's own assumptions say it
    method = quantization_method(config)
    text = f"quantization_config ({method}): weights are counted unpacked, in the setup's precision"
    if asked.quantize is None:
        text += f"; to train on them as they are, {_TRAINABLE}"
    return (text,)
