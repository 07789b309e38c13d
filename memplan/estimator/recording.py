"""A model recorded and walked: what all engines, and all cards that run the same kernels, share."""

from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass, replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Gradient, Operation
from memplan.graph.core.sorting import sort_tile
from memplan.graph.core.tape import Tape
from memplan.graph.model import record_model
from memplan.graph.operations.reduction import Multiprocessors, may_be_split
from memplan.graph.remembered import OF_TAPES
from memplan.hardware.gpu import (
    GpuSpec,
    grouped_workspace_bytes,
    is_ampere,
    num_multiprocessors,
    threads_per_multiprocessor,
)
from memplan.memory.beside import ALONE, Beside
from memplan.memory.engine_options import (
    casts_inputs,
    casts_weights_again,
    engine_autocast,
    gathers_codes,
    has_module_hooks,
    has_python_linear,
)
from memplan.memory.passes import StepPasses
from memplan.memory.rank import RankInput
from memplan.memory.step import StepWalk
from memplan.model.spec import ModelSpec
from memplan.training.choices import Recomputation
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import (
    OF_TRANSFORMERS,
    LossKernel,
    Packing,
    SelectivePolicy,
)
from memplan.training.choices_of_kernels.sdpa import (
    SDPA_SUPPORT,
    sdpa_support,
    sdpa_way,
)
from memplan.training.compilation import Compilation
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.objectives import LogProbabilities
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import PLAIN_OPTIMIZERS, TrainingSetup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.training.quantization import Quantization
    from memplan.training.splitting.megatron import MegatronLayers


@OF_TAPES.remembered(maxsize=256)
def record(model: ModelSpec, options: TapeOptions) -> Tape:
    """The model on the tape; remembered, since cards are compared by it.

    Written down once for all cards that run the same operations.
    """
    written = _written_down(model, _plain(options))
    for tape in written:
        found = tape.as_on(options)
        if found is not None:
            return found
    tape = record_model(model, options)
    OF_TAPES.count(tape)
    written.append(tape)
    return tape


@OF_TAPES.remembered(maxsize=256)
def _written_down(model: ModelSpec, plain: TapeOptions) -> list[Tape]:  # noqa: ARG001
    """What was recorded of a model with these options, for one card after the other."""
    return []


def _plain(options: TapeOptions) -> TapeOptions:
    """The same on the plainest card."""
    default = TapeOptions()
    return replace(
        options,
        sdpa=default.sdpa,
        multiprocessors=default.multiprocessors,
        threads_per_multiprocessor=default.threads_per_multiprocessor,
        sort_tile=default.sort_tile,
        grouped_workspace_bytes=default.grouped_workspace_bytes,
        is_ampere=default.is_ampere,
    )


def one_token(options: TapeOptions) -> TapeOptions:
    """The same for a micro-batch of one sequence as short as can be, on a card that splits sums as the plainest does."""
    default = TapeOptions()
    return replace(
        options,
        batch_size=default.batch_size,
        seq_len=default.seq_len,
        target_seq_len=default.target_seq_len,
        num_sequences=default.num_sequences,
        multiprocessors=default.multiprocessors,
        threads_per_multiprocessor=default.threads_per_multiprocessor,
        sort_tile=default.sort_tile,
        grouped_workspace_bytes=default.grouped_workspace_bytes,
    )


@OF_TAPES.remembered(maxsize=256)
def record_and_walk(model: ModelSpec, options: TapeOptions) -> tuple[Tape, StepPasses]:
    """The model on the tape, and the walk over it; remembered, since engines share activations."""
    tape = record(model, options)
    return tape, StepWalk(tape).run()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Walked:
    """A model recorded and walked with some options: one object for all that share it."""

    model: ModelSpec
    options: TapeOptions
    tape: Tape
    passes: StepPasses

    def trained_as(
        self, resolved: TrainingSetup, gpu: GpuSpec | None, beside: Beside = ALONE
    ) -> RankInput:
        """With a setup whose tape this is, on a card that shares it, and what its job has beside it."""
        return RankInput(
            tape=self.tape,
            passes=self.passes,
            setup=resolved,
            beside=beside,
            device=reducing_device(resolved, gpu),
        )


def reducing_device(setup: TrainingSetup, gpu: GpuSpec | None) -> Multiprocessors | None:
    """The card, where the optimizer has sums of its own that are split by it."""
    if setup.optimizer in PLAIN_OPTIMIZERS:
        return None
    return Multiprocessors(num_multiprocessors(gpu), threads_per_multiprocessor(gpu))


@OF_TAPES.remembered(maxsize=256)
def walked_on_card(model: ModelSpec, options: TapeOptions) -> Walked:
    """Remembered by a card's own options too: a model is long to tell from another."""
    return _walked(model, shared_options(model, options))


@OF_TAPES.remembered(maxsize=256)
def walked_forward(model: ModelSpec, options: TapeOptions) -> Walked:
    """Forward alone: of a model that runs in stages, which are walked themselves."""
    tape = record(model, shared_options(model, options))
    return Walked(model=model, options=options, tape=tape, passes=StepWalk(tape).forward())


@OF_TAPES.remembered(maxsize=256)
def _walked(model: ModelSpec, options: TapeOptions) -> Walked:
    tape, passes = record_and_walk(model, options)
    return Walked(model=model, options=options, tape=tape, passes=passes)


def shared_options(model: ModelSpec, options: TapeOptions) -> TapeOptions:
    """Options for a card: those of the plainest card whose kernels are the same for this model.

    What a walk finds depends on the card through the kernels it runs alone, and how they split long
    sums and keys, so cards that do the same share the walk.
    """
    plain = _plain(options)
    tape = record(model, options)
    is_alike = tape.runs_alike_on(plain) and not _splits_sums(tape)
    shared = replace(plain, sdpa=options.sdpa) if is_alike else options
    chosen = [sdpa_way(call, options.sdpa) for call in tape.sdpa_calls]
    for support in (plain.sdpa, *SDPA_SUPPORT.values()):
        if [sdpa_way(call, support) for call in tape.sdpa_calls] == chosen:
            return replace(shared, sdpa=support)
    return shared


def _splits_sums(tape: Tape) -> bool:
    """Whether the multiprocessors of a GPU decide how a sum over rows in it is split.

    Operations outside autograd have no gradients.
    """
    return any(
        may_be_split(tensor.numel, operation.outputs[0].numel // tensor.numel)
        for segment in tape.segments
        for operation in segment.operations
        for tensor, kind in zip(operation.inputs, operation.gradients, strict=False)
        if tensor.by_column and tensor.requires_grad and (kind == Gradient.SUMMED or kind > 0)
    )


def tape_options(setup: TrainingSetup, gpu: GpuSpec | None) -> TapeOptions:
    """How the tape has to be written for a setup with every default filled in."""
    formats = PRECISIONS[setup.chosen_precision]
    options = replace(
        _with_ways(_inputs(setup), setup),
        weights=formats.weights,
        compute=formats.compute,
        autocast=formats.autocast or engine_autocast(setup),
        kernels=setup.chosen_kernels,
        dropout=_dropout(setup),
        decomposed=not setup.kernel_scratch,
        sdpa=sdpa_support(gpu),
        multiprocessors=num_multiprocessors(gpu),
        threads_per_multiprocessor=threads_per_multiprocessor(gpu),
        sort_tile=_sort_tile(gpu),
        grouped_workspace_bytes=grouped_workspace_bytes(gpu),
        is_ampere=is_ampere(gpu),
        module_hooks=has_module_hooks(setup),
        layer_hooks=_has_layer_hooks(setup),
        casts_inputs=casts_inputs(setup),
        python_linear=has_python_linear(setup),
        fp8=setup.fp8,
        fp8_transposes=needs_transposes(setup.fp8, gpu),
        gathers_codes=gathers_codes(setup),
        casts_weights_again=casts_weights_again(setup),
        adapter=setup.adapter,
        adapter_dtype=adapter_dtype(setup),
        adapter_input=_adapter_input(setup),
    )
    how = setup.chosen_quantization
    return options if how is None else _quantized(options, how)


def _has_layer_hooks(setup: TrainingSetup) -> bool:
    """Whether the engine sums up gradients before a layer's arguments; of a compiled layer its own graph does."""
    return setup.chosen_engine is Engine.FSDP and setup.compile is Compilation.NONE


def _inputs(setup: TrainingSetup) -> TapeOptions:
    """What a micro-batch holds."""
    sequences = setup.micro_batch_size * setup.job.sequences_per_example
    rows, seq_len = sequences, (setup.seq_len or 1) // setup.context_parallel
    if setup.packing is Packing.PADDING_FREE:
        rows, seq_len = 1, rows * seq_len
    return TapeOptions(
        batch_size=rows,
        seq_len=seq_len,
        packing=setup.packing,
        num_sequences=sequences,
        target_seq_len=(setup.target_seq_len or 0) // setup.context_parallel or seq_len,
        images_per_sample=setup.images_per_sample,
        image_size=setup.image_size,
        image_width=setup.image_width,
        num_frames=setup.num_frames,
        audio_seconds=setup.audio_seconds,
    )


def _with_ways(options: TapeOptions, setup: TrainingSetup) -> TapeOptions:
    """The same, and how a step goes through the model: what is split, recomputed, sent away, looked for."""
    return replace(
        options,
        outputs_held=setup.outputs_held,
        upcast_outputs=setup.upcast_outputs,
        tensor_parallel=setup.split_over,
        offload=setup.offload_activations,
        weights_stay=not setup.offload_activations.sends or setup.chosen_engine is Engine.DDP,
        megatron=_megatron_layers(setup),
        expert_ranks=setup.expert_parallel if setup.chosen_engine is Engine.MEGATRON else 1,
        context_parallel=setup.sequences_shared,
        expert_parallel=setup.experts_spread,
        checkpointed_layers=_checkpointed_layers(setup),
        selective=setup.checkpointing is Recomputation.SELECTIVE,
        freeze=setup.freeze,
        compile=setup.compile,
        input_gradients=_input_gradients(setup),
        objective=setup.job.objective,
        log_probabilities=_log_probabilities(setup),
        kept_logits=_kept_logits(setup) if setup.job.generates else None,
    )


def _megatron_layers(setup: TrainingSetup) -> "MegatronLayers | None":
    """How Megatron writes its layers down; None under every other engine."""
    if setup.chosen_engine is not Engine.MEGATRON:
        return None
    from memplan.memory.megatron.options import layers_of  # only then

    return layers_of(setup)


def _quantized(options: TapeOptions, how: "Quantization") -> TapeOptions:
    """Over a packed base: what peft's preparation leaves is in fp32, and the residual stream with it."""
    from memplan.training.quantization import Upcast  # only where something is quantized

    options = replace(options, quantization=how, quantized_from=options.weights)
    if how.upcast is Upcast.ALL:
        return replace(options, weights=DType.FP32, compute=DType.FP32)
    if how.upcast is Upcast.NORMS:
        return replace(options, norms=DType.FP32)
    return options


def _log_probabilities(setup: TrainingSetup) -> LogProbabilities:
    """TRL's fused head is a kernel of the loss too."""
    if setup.chosen_kernels.loss is LossKernel.TRL:
        return LogProbabilities.FUSED
    return setup.job.log_probabilities


def _sort_tile(gpu: GpuSpec | None) -> int:
    """Of a card that is not known, an H100's."""
    capability = gpu.compute_capability if gpu is not None else None
    return TapeOptions().sort_tile if capability is None else sort_tile(capability)


def _dropout(setup: TrainingSetup) -> float | None:
    """Trainers that compare with a reference switch dropout off (TRL 1.16, ``disable_dropout``)."""
    if setup.dropout is None and setup.job.switches_dropout_off:
        return 0.0
    return setup.dropout


def _kept_logits(setup: TrainingSetup) -> int:
    """Tokens of a row that have logits: of each sequence of a packed row, and a rank's share of them."""
    packed = setup.packing is Packing.PADDING_FREE
    sequences = setup.micro_batch_size if packed else 1
    scored = min(setup.job.scored_length or completion_length(setup), setup.seq_len or 1)
    return max(1, scored * sequences // setup.context_parallel)


def completion_length(setup: TrainingSetup) -> int:
    """Tokens of a sequence that were generated, the default filled in."""
    length = setup.seq_len or 1
    if setup.job.completion_length is not None:
        return min(setup.job.completion_length, length)
    return length // 2


def adapter_dtype(setup: TrainingSetup) -> DType:
    """What an adapter's weights are as the layers see them.

    DeepSpeed casts the whole module to its 16-bit format, and FSDP's mixed precision computes with
    casts of all that it shards; elsewhere they are what peft makes them.
    """
    formats = PRECISIONS[setup.chosen_precision]
    is_cast = formats.master_weights or formats.compute is not formats.weights
    if setup.adapter is None or is_cast:
        return formats.compute
    return setup.adapter.dtype.format


def _adapter_input(setup: TrainingSetup) -> DType:
    """What an adapter casts its input to.

    Under FSDP1 it looks at its weights before they are gathered, which in the first pass are those of
    the flat parameter as it is kept; what the first step holds for it no later one exceeds.
    """
    return kept_dtype(setup) if setup.chosen_engine is Engine.FSDP1 else adapter_dtype(setup)


def _input_gradients(setup: TrainingSetup) -> bool:
    """Whether the input embeddings' output is made to require a gradient.

    peft does so for a model that checkpoints its activations (``peft_model.py``,
    ``prepare_model_for_gradient_checkpointing``), whose frozen first layers hand none on otherwise; and
    transformers 5 wherever it checkpoints them itself (``_activation_checkpointing_enable``). Under FSDP, and
    where it is selective, layers are wrapped from outside.
    """
    if setup.checkpointing in (Recomputation.NONE, 0.0):
        return False
    of_transformers = setup.kernels in OF_TRANSFORMERS
    wrapped = setup.chosen_engine in (Engine.FSDP, Engine.FSDP1)
    wrapped |= setup.checkpointing is Recomputation.SELECTIVE
    return setup.adapter is not None or (of_transformers and not wrapped)


def kept_dtype(setup: TrainingSetup) -> DType:
    """What an adapter's weights are held in between steps."""
    formats = PRECISIONS[setup.chosen_precision]
    return formats.weights if formats.compute is not formats.weights else adapter_dtype(setup)


def _checkpointed_layers(setup: TrainingSetup) -> float | CheckpointedLayers:
    checkpointing = setup.checkpointing
    if isinstance(checkpointing, float | CheckpointedLayers):
        return checkpointing
    if checkpointing is Recomputation.SELECTIVE:
        policy = setup.chosen_kernels.selective
        return 1.0 if policy is SelectivePolicy.EVERY_OTHER_MATMUL else 0.0
    return 1.0 if checkpointing is Recomputation.FULL else 0.0


def needs_transposes(recipe: Fp8Recipe, gpu: GpuSpec | None) -> bool:
    """Whether narrow products take one layout only: cards before compute capability 10.

    TransformerEngine's ``is_non_tn_fp8_gemm_supported``. One answer for all where none are narrow.
    """
    capability = gpu.compute_capability if gpu is not None else None
    return recipe is Fp8Recipe.NONE or capability is None or capability < (10, 0)


@OF_TAPES.remembered(maxsize=256)
def attention_kernel(tape: Tape) -> str:
    """Which kernel computes the attention scores.

    Where layers differ, all of them, in the order they come.
    """
    found: list[str] = []
    for segment in tape.segments:
        for place, operation in enumerate(segment.operations):
            name = _KERNEL_OPERATIONS.get(operation.name)
            if name is None or name in found:
                continue
            if name != "eager" or _weighs_values(operation, segment.operations[place + 1 :]):
                found.append(name)
    return "+".join(found) or "none"


def _weighs_values(softmax: Operation, later: "Sequence[Operation]") -> bool:
    """Whether a matrix is multiplied with what it gives, be it masked, cast, cut or dropped out before.

    A router's picks experts: what it gives is spread over hidden states, which are larger.
    """
    followed = {softmax.outputs[0]}
    for operation in later:
        weights = followed.intersection(operation.inputs)
        if weights and operation.multiplies:
            return True
        sizes = {each.numel for each in weights}
        if weights and followed.issuperset(operation.inputs):
            followed.update(operation.outputs)
        followed.update(each for each in operation.outputs if each.numel in sizes)
    return False


_KERNEL_OPERATIONS = {
    "flash_attention": "flash",
    "cudnn_attention": "cudnn",
    "efficient_attention": "efficient",
    "safe_softmax": "math",
    "softmax": "eager",
    "fused_softmax": "eager",
}
