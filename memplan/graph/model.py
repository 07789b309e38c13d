"""A whole model on the tape."""

from functools import lru_cache
from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.overlay import adapter_module
from memplan.graph.core.tape import Tape
from memplan.model.sounds import SoundSpec
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.kernels import WHOLE
from memplan.training.compilation import Compilation
from memplan.training.freezing import ALL_LAYERS, FrozenParts
from memplan.training.layer_choice import CheckpointedLayers

if TYPE_CHECKING:
    from memplan.graph.core.overlay import Overlay
    from memplan.graph.core.trained_alone import TrainedAlone
    from memplan.training.adapters import Adapter


def record_model(model: ModelSpec, options: TapeOptions) -> Tape:
    """Write the model's training step on a new tape: of a split model, a rank's own."""
    if model.traced is not None:
        from memplan.graph.traced.checks import check_traced  # only for a user's own module

        check_traced(model, options)
    if model.denoises:
        from memplan.graph.denoisers.checks import check_denoiser  # only for diffusion transformers

        check_denoiser(model, options)
    if options.adapter is not None and options.adaptation is None:
        overlay = _overlay(
            model, options.adapter, options.adapter_dtype, stacks=_stacks_experts(options)
        )
        seq_len = options.seq_len + overlay.num_prompts
        options = replace(options, adaptation=overlay, seq_len=seq_len)
    if options.freeze.but and options.trained is None:
        options = replace(options, trained=trained_alone(model, options.freeze.but))
    if options.quantization is not None and options.quantizer is None:
        from memplan.graph.replacing.quantized import PackedBase, check_skipped  # only then

        quantizer = PackedBase.of(options.quantization, options.quantized_from, model.family)
        tape = record_model(model, replace(options, quantizer=quantizer))
        check_skipped(tape, options.quantization, model.name)
        return tape
    if options.megatron is not None:
        from memplan.graph.megatron.model import record_megatron  # only for its engine

        return record_megatron(model, options, options.megatron)
    if options.tensor_parallel is not None:
        from memplan.graph.splitting.local_model import local_model  # only where it is split
        from memplan.graph.splitting.tensor_plans import plan_of

        group = options.tensor_parallel
        options = replace(options, split_plan=plan_of(model, group))
        model = local_model(model, options, group)
    if options.context_parallel is not None:
        from memplan.graph.attention.ring import check_shared  # only where sequences are shared

        check_shared(model, options.context_parallel)
    if options.expert_parallel is not None:
        from memplan.graph.experts.parallel import (  # only where experts are spread
            check_has_experts,
            check_spread,
        )

        if options.stage is None:
            check_has_experts(model)
        check_spread(model, options.expert_parallel)
    tape = _record(model, options)
    if options.kernels.mlp_tiles != WHOLE:
        from memplan.graph.tiles import check_tiled  # only then

        check_tiled(model, tape)
    if options.adaptation is not None:
        _check_adapted(model, tape, options.adaptation)
    if model.transposed_linear:
        _mark_transposed(tape)
    if options.compile is not Compilation.NONE:
        from memplan.graph.compiled import compile_tape  # only with torch.compile

        compile_tape(tape)
    return tape


def _mark_transposed(tape: Tape) -> None:
    for segment in tape.segments:
        for weight in segment.parameters if segment.is_layer else ():
            weight.in_conv1d = len(weight.matrix_shape) == 2 and not weight.of_adapter


def _stacks_experts(options: TapeOptions) -> bool:
    """Whether names of experts' matrices mean stacks of them: peft's rule, not that of a stack whose ranks spread
    experts or split both factors (NeMo AutoModel 0.7, components/_peft/lora.py, ``apply_lora_to_linear_modules``)."""
    group = options.tensor_parallel
    return options.expert_parallel is None and (group is None or not group.splits_adapters)


@lru_cache(maxsize=64)
def _overlay(
    model: ModelSpec, adapter: "Adapter", dtype: DType, *, stacks: bool = True
) -> "Overlay":
    """The adapter laid over the model; remembered, since every batch has the same."""
    from memplan.training.adapters import PromptTuning

    if isinstance(adapter, PromptTuning):
        from memplan.graph.replacing.prompts import prompts_of  # only for prompts

        return prompts_of(model, adapter)
    from memplan.graph.replacing.adaptation import adapt  # only for adapters

    return adapt(model, record_model(model, TapeOptions()), adapter, dtype, stacks=stacks)


@lru_cache(maxsize=64)
def trained_alone(model: ModelSpec, patterns: tuple[str, ...]) -> "TrainedAlone":
    """The parameters that patterns name; remembered, since every batch has the same."""
    from memplan.graph.core.trained_alone import matching
    from memplan.graph.module_names import named_parameters

    return matching(patterns, named_parameters(record_model(model, TapeOptions())))


def absent_targets(model: ModelSpec, adapter: "Adapter", dtype: DType) -> tuple[str, ...]:
    """Modules that an adapter is to stand on and that the model does not have; it stands on the others."""
    found: tuple[str, ...] = getattr(_overlay(model, adapter, dtype), "absent", ())
    return found


def _check_adapted(model: ModelSpec, tape: Tape, overlay: "Overlay") -> None:
    """Refuse an adapter on a module whose weight a kernel takes by itself."""
    begun: dict[str, int] = {}
    for segment in tape.segments:
        repetition = begun.get(segment.name, 0)
        begun[segment.name] = repetition + segment.repeat
        if not segment.parameters:
            continue
        own = [each.name for each in segment.parameters if each.of_adapter]
        ranks = overlay.at(segment.name, repetition)
        for module in ranks:
            if not any(name.startswith(f"{adapter_module(ranks, module)}.") for name in own):
                msg = (
                    f"adapter: targets: {module.replace(':', '.')} of {model.name} is part of another kernel here, which "
                    "goes past its adapter: leave it out of the targets, or choose other kernels"
                )
                raise SetupError(msg)


def _check_frozen(model: ModelSpec, freeze: FrozenParts) -> None:
    """Refuse layers and stacks to freeze that the model does not have."""
    owned = {stack.name for stack in model.stacks}
    sensed = model.picture or model.sound
    if sensed is not None:
        owned |= set(sensed.stacks)
    for name in ("encoder", "decoder", "vision_tower", "audio_tower", "text_tower", "projector"):
        if getattr(freeze, name) and name not in owned:
            msg = f"freeze: {name}: {model.name} has none"
            raise SetupError(msg)
    depth = _depth(model)
    for first, last in freeze.layer_ranges:
        if first >= depth or depth <= last < ALL_LAYERS:
            msg = f"freeze: layers.{first}-{last}: {model.name} has {depth} layers, counted from 0"
            raise SetupError(msg)


def _check_media(model: ModelSpec, options: TapeOptions) -> None:
    """Refuse pictures and sound where the model takes none, or always as many.

    Raises ``SetupError``.
    """
    asked = options.image_size or options.image_width or options.num_frames
    asked = asked or options.audio_seconds
    if options.images_per_sample == 1 and not asked:
        return
    from memplan.graph.denoisers.media import makes_video  # only where it is asked for
    from memplan.graph.towers.media import sees, sound_of

    for name, value, known in (
        (
            "images_per_sample",
            options.images_per_sample > 1,
            model.join is not None and sees(model),
        ),
        ("image_size", options.image_size is not None, sees(model) or model.denoises),
        ("image_width", options.image_width is not None, model.denoises),
        ("num_frames", options.num_frames is not None, makes_video(model)),
        ("audio_seconds", options.audio_seconds is not None, sound_of(model) is not None),
    ):
        if value and not known:
            what = {
                "audio_seconds": "hears", "num_frames": "makes a video of",
                "image_width": "makes a picture of",
            }.get(name, "sees")  # fmt: skip
            msg = f"{name}: no operations are known by which {model.name} {what} anything; leave it out"
            raise SetupError(msg)
    sound = sound_of(model)
    is_padded = not (isinstance(sound, SoundSpec) and sound.rate)
    if options.audio_seconds is not None and is_padded:
        msg = f"audio_seconds: {model.name} pads every clip to 30 seconds; leave it out"
        raise SetupError(msg)


def _depth(model: ModelSpec) -> int:
    """Layers of the deepest stack; of a model without stacks, of its deepest tower."""
    if model.stacks:
        return max(stack.num_layers for stack in model.stacks)
    if model.denoiser is not None or model.picture is not None or model.sound is not None:
        return model.num_layers
    return 0


def _check_checkpointed(model: ModelSpec, layers: float | CheckpointedLayers) -> None:
    """Refuse layers to checkpoint that the model does not have."""
    depth = _depth(model)
    if isinstance(layers, CheckpointedLayers) and layers.last >= depth:
        msg = f"checkpointing: {layers}: {model.name} has {depth} layers, counted from 0"
        raise SetupError(msg)


def _record(model: ModelSpec, options: TapeOptions) -> Tape:
    if model.traced is not None:
        from memplan.graph.traced.play import record_traced  # only for a user's own module

        return record_traced(model, model.traced, options)
    _check_frozen(model, options.freeze)
    _check_media(model, options)
    if not options.images_per_sample and model.join is not None:
        from memplan.graph.towers.joining import check_shown_nothing  # only for text alone

        check_shown_nothing(model)
    _check_checkpointed(model, options.checkpointed_layers)
    if options.checkpointed_layers and not model.recomputes:
        msg = f"{model.source}: the class of {model.family} cannot checkpoint its activations"
        raise SetupError(msg)
    assert model.blueprint is not None
    recorded: Tape = model.blueprint.record(model, options)
    return recorded
