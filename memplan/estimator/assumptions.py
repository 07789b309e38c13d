"""What was assumed, in words: every default that a physical figure hangs on."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Self

from memplan.estimator.modelled.quantized_base import base_words
from memplan.estimator.recording import adapter_dtype, kept_dtype
from memplan.hardware.gpu import GpuSpec
from memplan.memory.engine_options import loads_under_zero_init
from memplan.model.spec import ModelSpec
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import AllocatorKind, checkpointing_text
from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES, Fp8Recipe
from memplan.training.choices_of_kernels.kernels import (
    FITTING_TILES,
    TILED_LOSSES,
    WHOLE,
    AttentionKernel,
    KernelPreset,
    Packing,
)
from memplan.training.compilation import Compilation
from memplan.training.precision import PRECISIONS, Engine, PrecisionFormats
from memplan.training.setup import (
    DEFAULT_SEQ_LEN_CAP,
    PLAIN_OPTIMIZERS,
    QUANTIZATION_OPTIONS,
    TrainingSetup,
)
from memplan.training.splitting.parallelism import TensorParallelKind

OFFLOAD_WORDS = {
    ActivationOffload.SAVE_ON_CPU: "activations, and weights that are kept with them, in CPU RAM between "
    "the passes (save_on_cpu)",
    ActivationOffload.STREAMED: "activations in CPU RAM between the passes (TRL's OffloadActivations), but "
    "those kept twice",
    ActivationOffload.BLOCKING: "activations in CPU RAM between the passes (TRL's OffloadActivations without "
    "a stream of its own)",
    ActivationOffload.TORCHTUNE: "activations in CPU RAM between the passes (torchtune's OffloadActivations)",
    ActivationOffload.CHECKPOINTS: "inputs of checkpointed layers in CPU RAM between the passes",
}
COMPILED_REGIONS = {
    Compilation.LAYER: "each layer",
    Compilation.MODEL: "the whole model with its loss",
}


class Topic(StrEnum):
    """What an assumption is about."""

    SAID = "said"
    """What the line of the job says already."""
    TRAINING = "training"
    PRECISION = "precision"
    KERNELS = "kernels"


class Assumption(str):
    """An assumption in words, which knows what it is about.

    >>> Assumption("micro-batch 1", Topic.SAID) == "micro-batch 1"
    True
    """

    __slots__ = ("topic",)
    topic: Topic

    def __new__(cls, text: str, topic: Topic = Topic.TRAINING) -> Self:
        """Words that know their topic."""
        made = super().__new__(cls, text)
        made.topic = topic
        return made

    def __getnewargs__(self) -> tuple[str, Topic]:  # type: ignore[override]
        return str(self), self.topic


def assumptions_of(
    model: ModelSpec, asked: TrainingSetup, resolved: TrainingSetup, gpu: GpuSpec | None = None
) -> tuple[str, ...]:
    """The settings that decide the figure, those that were not asked for marked as defaults."""
    given = asked.seq_len is not None or resolved.lengths is not None
    parts = (
        (Topic.TRAINING, model.assumptions),
        (Topic.SAID if given else Topic.TRAINING, (_sequence(model, asked, resolved),)),
        (Topic.TRAINING, _media(model, resolved)),
        (Topic.SAID, (f"micro-batch {resolved.micro_batch_size}",)),
        (Topic.PRECISION, (_precision(asked, resolved, gpu), *_fp8(resolved))),
        (_optimizer_topic(resolved), (_optimizer(resolved),)),
        (Topic.TRAINING, _unprojected(model, resolved)),
        (Topic.KERNELS, _layers(model, resolved)),
        (Topic.SAID, _recomputed(resolved)),
        (Topic.TRAINING, (*_split(model, resolved), *_pipeline(model, resolved))),
        (
            Topic.TRAINING,
            (*_unnamed(model, resolved), *_adapter(model, resolved), *_job(resolved)),
        ),
        (Topic.PRECISION, base_words(model, asked, resolved)),
        (Topic.TRAINING, (*_loading(asked, resolved), *_overrides(resolved))),
    )
    return tuple(Assumption(text, topic) for topic, texts in parts for text in texts)


def _optimizer_topic(resolved: TrainingSetup) -> Topic:
    """The job's line names an optimizer, not how it is set."""
    is_plain = not dict(resolved.optimizer_options) and not resolved.optimizer_in_backward
    return Topic.SAID if is_plain else Topic.TRAINING


def _recomputed(resolved: TrainingSetup) -> tuple[str, ...]:
    """What is computed again, where Megatron's words do not say it."""
    return () if resolved.chosen_engine is Engine.MEGATRON else (_checkpointing(resolved),)


def _layers(model: ModelSpec, resolved: TrainingSetup) -> tuple[str, ...]:
    """How the layers run."""
    if resolved.chosen_engine is Engine.MEGATRON:
        from memplan.estimator.modelled.megatron_setup import megatron_words  # only for its engine

        return megatron_words(model, resolved)
    return (
        _kernels(resolved),
        _attention(model, resolved),
        *_scans(model, resolved),
    )


def _attention(model: ModelSpec, resolved: TrainingSetup) -> str:
    """The kernel that is asked for, or what the class has in its place."""
    asked = resolved.chosen_kernels.attention
    if not model.eager_attention_only or asked is not AttentionKernel.SDPA:
        return f"attention {asked.value}"
    return "attention eager (the class has nothing else)"


def _scans(model: ModelSpec, resolved: TrainingSetup) -> tuple[str, ...]:
    """Whose scans a state-space model runs, where nobody said."""
    runs = [run for stack in model.stacks for run in stack.runs]
    if resolved.scan is not None or not any(
        getattr(run.layer.attention, "scans", False) for run in runs
    ):
        return ()
    choice = resolved.chosen_kernels.scan.value
    words = "transformers' own; `scan=package` where mamba-ssm and causal-conv1d are installed"
    return (f"scan {choice} ({words})",)


def _split(model: ModelSpec, resolved: TrainingSetup) -> tuple[str, ...]:
    """Over how many ranks each layer is split, by whose plan, what else is, and who
    shares sequences and experts."""
    group = resolved.split_over
    others = (resolved.sequences_shared, resolved.experts_spread)
    words = tuple(each.words for each in others if each is not None)
    if group is None:
        return words
    if group.kind is TensorParallelKind.MEGATRON:
        return (group.words, *words)
    from memplan.graph.splitting.tensor_plans import plan_words  # only where it is split

    return (f"{group.words}, {plan_words(model, group)}", *words)


def _pipeline(model: ModelSpec, resolved: TrainingSetup) -> tuple[str, ...]:
    """How many ranks have the layers, which of them each, and in which order they run."""
    if resolved.pipeline is None:
        return ()
    from memplan.estimator.pipelines import pipeline_words  # only for pipelines

    return pipeline_words(model, resolved.pipeline)


def _job(resolved: TrainingSetup) -> tuple[str, ...]:
    """What else takes part, and what it was taken to be."""
    if not resolved.has_company and resolved.lengths is None:
        return ()
    from memplan.estimator.job_words import job_words  # only for jobs beside sft

    return job_words(resolved)


def _optimizer(resolved: TrainingSetup) -> str:
    """With its own settings, as they were given."""
    given = ", ".join(f"{key} {value}" for key, value in dict(resolved.optimizer_options).items())
    words = f" ({given})" if given else ""
    when = " within backward" if resolved.optimizer_in_backward else ""
    return f"optimizer {resolved.optimizer.value}{words}{when}"


def _unprojected(model: ModelSpec, resolved: TrainingSetup) -> tuple[str, ...]:
    """Optimizers that project linear layers' matrices go by ``isinstance(module, nn.Linear)`` (transformers
    5.23, trainer_optimizer.py, ``_setup_low_rank_optimizer``; galore_torch's and apollo_torch's scripts)."""
    if not model.transposed_linear or resolved.optimizer in PLAIN_OPTIMIZERS:
        return ()
    from memplan.memory.programs.stepping import NO_TARGETS  # only for optimizers of other packages
    from memplan.training.optimizers.table import chosen

    _, options = chosen(resolved.optimizer, resolved.optimizer_options)
    if dict(options).get("target_modules", NO_TARGETS) == NO_TARGETS:
        return ()
    found = f"finds none in the layers of {model.family} (Conv1D): their matrices are stepped whole"
    name = resolved.optimizer.value
    return (f"{name} projects torch.nn.Linear alone, {found}; transformers' Trainer refuses it",)


def _unnamed(model: ModelSpec, resolved: TrainingSetup) -> tuple[str, ...]:
    """Patterns of what alone is trained that name nothing of the model, which is frozen then."""
    patterns = resolved.freeze.but
    if not patterns:
        return ()
    from memplan.graph.model import trained_alone  # only for named parameters

    absent = trained_alone(model, patterns).absent
    if not absent:
        return ()
    return (f"freeze: {model.name} has no parameter {', '.join(absent)}",)


def _adapter(model: ModelSpec, resolved: TrainingSetup) -> tuple[str, ...]:
    """What is trained in place of the model's weights, and in which format it is held."""
    adapter = resolved.adapter
    if adapter is None:
        return ()
    text = str(adapter)
    if getattr(adapter, "targets", "") is None:
        from memplan.graph.replacing.adaptation import usual_targets  # only for adapters
        from memplan.training.adapters import targets_text

        named = targets_text(usual_targets(model, adapter))
        whose = "the script's choice" if model.denoises else "peft's choice"
        text = text.replace(targets_text(None), f"{named} ({whose})")
    said = f"adapter {text}, {kept_dtype(resolved).label} weights, the model's frozen"
    if isinstance(getattr(adapter, "targets", None), tuple) and not model.traced:
        from memplan.graph.model import absent_targets  # only for named modules

        absent = absent_targets(model, adapter, adapter_dtype(resolved))
        if absent:
            said += f"; {model.name} has no module {', '.join(absent)}"
    group = resolved.split_over
    if group is not None and group.splits_adapters:
        said += "; both factors split as NeMo AutoModel splits them"
    if resolved.experts_spread is not None and resolved.chosen_engine is Engine.FSDP:
        said += "; experts that are spread have none"
    return (said,)


def _loading(asked: TrainingSetup, resolved: TrainingSetup) -> tuple[str, ...]:
    """How stage 3 comes by its shards: nothing else loads in two ways."""
    if not loads_under_zero_init(resolved):
        return ()
    given = "zero_init" in dict(asked.engine_options)
    return (ZERO_INIT if given else f"{ZERO_INIT} (default)",)


ZERO_INIT = "ZeRO-3 loads under zero.Init"
"""The assumption that ``zero_init=false`` takes back."""


def _tiles(count: int) -> str:
    """How many tiles, as ALST's recipes have them where no number is given."""
    return "as many tiles as ALST's recipes have" if count == FITTING_TILES else f"{count} tiles"


def _overrides(setup: TrainingSetup) -> list[str]:
    """What was asked for beside the kernels' and the config's own."""
    return [*_chosen_kernels(setup), *_chosen_loop(setup), *_said_options(setup)]


def _chosen_kernels(setup: TrainingSetup) -> Iterator[str]:
    named = {"norm": setup.norm, "mlp": setup.mlp, "rotary": setup.rotary, "scan": setup.scan}
    yield from (f"{name} {kernel.value}" for name, kernel in named.items() if kernel is not None)
    kernels = setup.chosen_kernels
    if kernels.mlp_tiles != WHOLE:
        yield f"networks in {_tiles(kernels.mlp_tiles)}"
    if kernels.loss in TILED_LOSSES:
        yield f"loss in {_tiles(kernels.loss_tiles)}"
    elif kernels.loss_tiles != FITTING_TILES:
        yield f"loss in {kernels.loss_tiles} pieces"


def _chosen_loop(setup: TrainingSetup) -> Iterator[str]:
    """What the training loop is told to do."""
    if setup.packing is not Packing.NONE:
        yield _packing(setup)
    if setup.dropout is not None:
        yield f"dropout {setup.dropout:g}"
    if setup.outputs_held:
        yield "outputs held until after backward"
    if setup.gradients_held:
        yield "gradients held until after the next forward pass"
    if setup.upcast_outputs:
        yield "outputs copied to fp32"
    if setup.offload_activations.sends:
        yield _offload_words(setup)
    if setup.allocator is not AllocatorKind.DEFAULT:
        yield f"allocator {setup.allocator.value}"
    if setup.compile is not Compilation.NONE:
        yield f"torch.compile of {COMPILED_REGIONS[setup.compile]}"


def _said_options(setup: TrainingSetup) -> Iterator[str]:
    """The engine's options, but for those that another line says."""
    apart = set(QUANTIZATION_OPTIONS)  # said by ``base_words``
    if loads_under_zero_init(setup):
        apart.add("zero_init")  # said by ``_loading``
    if setup.chosen_engine is Engine.MEGATRON:
        from memplan.estimator.modelled.megatron_setup import SAID_APART  # only for its engine

        apart.update(SAID_APART)  # said by ``_layers``
    for name, value in dict(setup.engine_options).items():
        if name not in apart:
            yield f"{name} {value}"


def _offload_words(setup: TrainingSetup) -> str:
    if setup.offload_activations is ActivationOffload.CHUNKS:
        share = setup.offload_activations_ratio
        return f"{share:.0%} of each pass's activations in CPU RAM while others run, as Megatron-Kwai does"
    return OFFLOAD_WORDS[setup.offload_activations]


def _packing(setup: TrainingSetup) -> str:
    """How many tokens a row has, and what tells its sequences apart."""
    by = "cu_seqlens" if setup.chosen_kernels.attention.is_package else "a mask of every pair"
    if setup.packing is Packing.DOCUMENTS:
        return f"rows of several documents, told apart by {by}"
    tokens = setup.micro_batch_size * (setup.seq_len or 1)
    return f"without padding: one row of {tokens:,} tokens, its sequences told apart by {by}"


def _kernels(setup: TrainingSetup) -> str:
    """Whose kernels, and which loss where it is not theirs."""
    preset = setup.kernels
    text = f"kernels {preset.value if isinstance(preset, KernelPreset) else 'of your own'}"
    return f"{text} with loss {setup.loss.value}" if setup.loss is not None else text


def _sequence(model: ModelSpec, asked: TrainingSetup, resolved: TrainingSetup) -> str:
    text = f"{resolved.seq_len:,} tokens"
    if model.denoises:
        default = "" if asked.seq_len is not None else " (default)"
        return f"prompts of {text}{default}"
    if resolved.target_seq_len != resolved.seq_len:
        text += f" in, {resolved.target_seq_len:,} out"
    if asked.seq_len is not None or resolved.lengths is not None:
        return text
    if model.context_length > DEFAULT_SEQ_LEN_CAP:
        return f"{text} (default: context {model.context_length:,}, capped)"
    return f"{text} (default: the context length)"


def _media(model: ModelSpec, resolved: TrainingSetup) -> tuple[str, ...]:
    """What a model sees and hears in a sample."""
    embedding = model.stacks[0].embedding if model.stacks else None
    if embedding is not None and embedding.steps:
        return (
            "a sequence's length counts steps of a return, a state and an action",
            "the loss, which the class leaves to its user, is the squared error of the actions",
        )
    if embedding is not None and embedding.num_regions:
        return (f"a picture of {embedding.num_regions} regions beside each sequence",)
    if model.denoises:
        from memplan.graph.denoisers.media import sample_words  # only for diffusion transformers

        return sample_words(model, resolved.image_size, resolved.image_width, resolved.num_frames)
    sees = model.has_towers or model.picture or model.sound
    if not sees or resolved.chosen_engine is Engine.MEGATRON:  # whose towers are left out
        return ()
    from memplan.graph.towers.media import media_words  # only for towers

    return media_words(
        model, resolved.image_size, resolved.audio_seconds, resolved.images_per_sample
    )


def _precision(asked: TrainingSetup, resolved: TrainingSetup, gpu: GpuSpec | None) -> str:
    precision = resolved.chosen_precision
    formats = PRECISIONS[precision]
    default = ", default" if asked.precision is None else ""
    if default and gpu is not None and not gpu.has_bf16:
        default = f", default: {gpu.gpu_id} has no bf16"
    return f"{precision.value} ({formats_text(formats)}{default})"


def _fp8(setup: TrainingSetup) -> tuple[str, ...]:
    """What linear layers multiply in, where it is not the precision's own format."""
    if setup.fp8 is Fp8Recipe.NONE:
        return ()
    has_own_head = setup.chosen_engine is Engine.MEGATRON
    is_narrow = FP8_RECIPES[setup.fp8].converts_head and not has_own_head
    head = "output matrix too" if is_narrow else "output matrix in bf16"
    return (f"linear layers in {setup.fp8.value} ({head})",)


def formats_text(formats: PrecisionFormats) -> str:
    """The formats in a few words."""
    parts = [f"{formats.weights.label} weights"]
    if formats.autocast is not None:
        parts.append(f"{formats.autocast.label} autocast")
    elif formats.compute is not formats.weights:
        parts.append(f"{formats.compute.label} compute")
    if formats.master_weights:
        parts.append("fp32 master")
    return ", ".join(parts)


def _checkpointing(setup: TrainingSetup) -> str:
    value = setup.checkpointing
    if isinstance(value, float):
        return f"checkpointing of {value:.0%} of the layers"
    return f"checkpointing {checkpointing_text(value)}"
