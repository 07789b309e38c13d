"""Warnings that belong to a figure, in words: what would raise, and where the figure is unsure."""

from collections.abc import Iterator

from memplan.estimator.modelled.quantized_base import base_notes
from memplan.graph.core.tape import Tape
from memplan.hardware.gpu import GpuSpec
from memplan.memory.ddp import DdpOptions
from memplan.model.spec import ModelSpec, Tying
from memplan.training.choices import ZeroStage
from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES, Fp8Package, Fp8Recipe
from memplan.training.choices_of_kernels.kernels import KernelPreset, Packing
from memplan.training.compilation import Compilation
from memplan.training.precision import FP16_FORM, PRECISIONS, Engine
from memplan.training.setup import TrainingSetup
from memplan.units import format_gib


def notes_of(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> tuple[str, ...]:
    """Warnings that belong to the figure."""
    return (
        *_too_long(model, setup),
        *_kernels_notes(model, setup),
        *_packing_notes(setup),
        *_training_notes(model, setup),
        *_fp8_notes(setup),
        *base_notes(model, setup),
        *_emulated(setup, gpu),
    )


def unread_words(tape: Tape, setup: TrainingSetup) -> Iterator[str]:
    """Trained weights that no pass reads: DDP waits in vain for their gradients (reducer.cpp, ``prepare_for_forward``)."""
    if setup.chosen_engine is not Engine.DDP or setup.data_parallel == 1:
        return
    options = DdpOptions.of(setup)
    if options.find_unused_parameters or options.static_graph:
        return
    unread = [
        each.name
        for segment in tape.segments
        for each in segment.parameters
        if each.requires_grad and each.unused
    ]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        yield (
            f"No pass reads {unread[0]}{more}: DDP raises in the second step ('Expected to have finished reduction') "
            "but with engine option find_unused_parameters=true, or with such weights frozen"
        )


def viewed_words(tape: Tape, setup: TrainingSetup) -> Iterator[str]:
    """Weights that stage 3 lets go of and the graph holds: a view of them is saved, as ``grouped_mm`` does of its stack."""
    if setup.zero_stage is not ZeroStage.PARAMETERS or setup.num_gpus == 1:
        return
    held_bytes = sum(
        each.storage.num_bytes * segment.num_copies
        for segment in tape.segments
        for each in segment.parameters
        if each.viewed and not segment.checkpointed
    )
    if held_bytes:
        yield (
            f"Weights of {format_gib(held_bytes)} stay gathered from forward to backward: the graph keeps a view of "
            "each, checkpointing none"
        )


def _too_long(model: ModelSpec, setup: TrainingSetup) -> Iterator[str]:
    """A table of positions with fewer rows than tokens."""
    has_table = any(stack.embedding and stack.embedding.num_positions for stack in model.stacks)
    if has_table and setup.seq_len is not None and setup.seq_len > model.context_length:
        yield (
            f"{model.name} holds {model.context_length:,} positions: {setup.seq_len:,} tokens would "
            "fail when it runs"
        )


def _kernels_notes(model: ModelSpec, setup: TrainingSetup) -> Iterator[str]:
    if setup.kernels is KernelPreset.LIGER:
        from memplan.training.choices_of_kernels.liger import (
            liger_note,  # only where Liger is asked for
        )

        if note := liger_note(model.family):
            yield note
    if setup.kernels is KernelPreset.UNSLOTH:
        yield (
            "Unsloth's loss is counted in pieces of its whole budget, 4 GiB less both gradients, and "
            "its functions over adapters as peft's: upper bounds"
        )


def _packing_notes(setup: TrainingSetup) -> Iterator[str]:
    if setup.packing is not Packing.NONE and not setup.chosen_kernels.attention.is_package:
        tokens = setup.seq_len or 1
        if setup.packing is Packing.PADDING_FREE:
            tokens *= setup.micro_batch_size
        yield (
            f"Sequences in one row of {tokens:,} tokens are told apart by a mask of every pair of "
            "tokens, which each layer's attention is given: attention flash needs none"
        )


def _training_notes(model: ModelSpec, setup: TrainingSetup) -> Iterator[str]:
    if setup.compile is not Compilation.NONE:
        yield (
            "The first run with torch.compile times its kernels on buffers of full size: with a cold "
            "cache torch reserved up to 1.2 GiB more than is shown, once"
        )
    if setup.gradient_accumulation_steps > 1 and _piles_up(setup):
        yield (
            "Gradients are reduced at the last micro-batch alone, as HF Trainer and accelerate do, "
            "and stay whole until then: engine option sync_each_batch"
        )
    if setup.target_seq_len != setup.seq_len and len(model.stacks) == 1:
        yield (
            f"target_seq_len {setup.target_seq_len} has no effect: {model.name} is no "
            "encoder-decoder"
        )


def _emulated(setup: TrainingSetup, gpu: GpuSpec | None) -> Iterator[str]:
    """bf16 on a card that has none."""
    formats = PRECISIONS[setup.chosen_precision]
    half = formats.autocast or formats.compute
    if gpu is not None and half.label == "bf16" and not gpu.has_bf16:
        form = FP16_FORM[setup.chosen_engine].value
        yield f"{gpu.gpu_id} has no bf16 hardware: bf16 is emulated there; precision fp16 is {form}"


def _fp8_notes(setup: TrainingSetup) -> list[str]:
    """How sure a recipe's figures are."""
    if setup.fp8 is Fp8Recipe.NONE:
        return []
    formats = FP8_RECIPES[setup.fp8]
    notes: list[str] = []
    if formats.package is Fp8Package.TRANSFORMER_ENGINE:
        notes.append(
            "TransformerEngine's copies are counted as its source makes them; no run confirms it"
        )
    return notes


def _piles_up(setup: TrainingSetup) -> bool:
    """Whether sharded gradients wait, whole, for the last micro-batch."""
    if setup.gradient_ranks == 1:
        return False
    if setup.chosen_engine is Engine.FSDP:
        from memplan.memory.fsdp2.options import Fsdp2Options

        return not Fsdp2Options.of(setup).sync_each_batch
    if setup.chosen_engine is Engine.FSDP1:
        from memplan.memory.fsdp1.options import Fsdp1Options

        return not Fsdp1Options.of(setup).sync_each_batch
    return False


def tying_note(model: ModelSpec, *, tied: int, untied: int) -> str:
    """Both totals, where file and class disagree on sharing the matrices; else nothing."""
    if model.tying is not Tying.AMBIGUOUS:
        return ""
    return (
        f"transformers ties the input and output matrices ({tied:,} parameters); the published "
        f"checkpoint holds both ({untied:,})"
    )
