"""Setups that are refused before anything is recorded: what a card, a class or memplan does not do."""

from memplan.errors import SetupError
from memplan.graph.attention.masks import attentions
from memplan.hardware.gpu import GpuSpec
from memplan.memory.engine_options import engine_autocast
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES, Fp8Recipe
from memplan.training.choices_of_kernels.kernels import (
    FITTING_TILES,
    OF_TRANSFORMERS,
    TILED_LOSSES,
    WHOLE,
    AttentionKernel,
    Packing,
)
from memplan.training.optimizers.table import row_of
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup


def check_splits(setup: TrainingSetup) -> None:
    """Refuse ways of splitting a model that are not modelled. Raises ``SetupError``."""
    if setup.chosen_engine is Engine.MEGATRON:
        from memplan.estimator.modelled.megatron_setup import check_megatron  # only for its engine

        check_megatron(setup)
    elif setup.is_split:
        from memplan.estimator.modelled.split_model import check_split  # only where it is split

        check_split(setup)
    if setup.context_parallel > 1 or setup.context_parallel_kind is not None:
        from memplan.estimator.modelled.shared_sequences import check_shared  # only where they are

        check_shared(setup)
    if setup.pipeline_parallel > 1:
        from memplan.estimator.pipelines import check_pipeline  # only for pipelines

        check_pipeline(setup)
    spreads = setup.expert_parallel > 1 and setup.chosen_engine is not Engine.MEGATRON
    if spreads or setup.expert_imbalance is not None:
        from memplan.estimator.modelled.spread_experts import check_spread  # only where they are

        check_spread(setup)


def check_model(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> None:
    """Refuse what this model or card does not run. Raises ``SetupError``."""
    if (setup.mlp_tiles, setup.loss_tiles) != (WHOLE, FITTING_TILES) or (
        setup.chosen_kernels.loss in TILED_LOSSES
    ):
        from memplan.estimator.modelled.tiled_run import check_tiled  # only where anything is tiled

        check_tiled(model, setup)
    _refuse_kernels(setup, gpu)
    _refuse_sdpa(setup, model)
    _refuse_flash(setup, model)
    _refuse_half(setup, model)
    _refuse_autocast(setup, model)
    _refuse_fp8(setup, gpu)
    _refuse_optimizer(setup, gpu)
    _refuse_packing(setup, model)


def _refuse_fp8(setup: TrainingSetup, gpu: GpuSpec | None) -> None:
    """Refuse a recipe that the card cannot multiply in."""
    if setup.fp8 is Fp8Recipe.NONE or gpu is None or gpu.compute_capability is None:
        return
    needed = FP8_RECIPES[setup.fp8].least_capability
    if gpu.compute_capability < needed:
        major, minor = needed
        msg = (
            f"fp8: {setup.fp8.value} needs compute capability {major}.{minor}, and {gpu.gpu_id} has "
            f"{'.'.join(map(str, gpu.compute_capability))}; choose another card or recipe, or none"
        )
        raise SetupError(msg)


def _refuse_optimizer(setup: TrainingSetup, gpu: GpuSpec | None) -> None:
    """Refuse one whose step comes apart on this card."""
    if gpu is None or gpu.compute_capability is None:
        return
    needed = row_of(setup.optimizer).least_capability
    if gpu.compute_capability < needed:
        msg = (
            f"optimizer: the compiled step of {setup.optimizer.value} needs compute capability "
            f"{'.'.join(map(str, needed))}, and {gpu.gpu_id} has {'.'.join(map(str, gpu.compute_capability))}; "
            "choose another card, or torchao-adamw-8bit"
        )
        raise SetupError(msg)


def _refuse_kernels(setup: TrainingSetup, gpu: GpuSpec | None) -> None:
    """Refuse the flash-attention package where it does not run: on old cards, and in fp32."""
    kernel = setup.chosen_kernels.attention
    if not kernel.is_package:
        return
    if gpu is not None and not _runs_flash(kernel, gpu):
        version = gpu.compute_capability
        has = f"sm_{version[0]}{version[1]}" if version is not None else gpu.vendor.value
        third = kernel is AttentionKernel.FLASH3
        needed = "9.0 (sm_90)" if third else "8.0 (sm_80)"
        others = (
            "flash, sdpa or eager" if third and gpu.supports_flash_attention else "sdpa or eager"
        )
        msg = (
            f"attention: {kernel.value} needs compute capability {needed}, and {gpu.gpu_id} is {has}; "
            f"choose {others}"
        )
        raise SetupError(msg)
    formats = PRECISIONS[setup.chosen_precision]
    if not (formats.autocast or engine_autocast(setup) or formats.compute).is_half:
        msg = (
            f"attention: {kernel.value} takes 16 bits only, and the precision is fp32; choose sdpa or "
            "eager"
        )
        raise SetupError(msg)


def _refuse_sdpa(setup: TrainingSetup, model: ModelSpec) -> None:
    """Refuse to ask a class of transformers for what it raises at; the default takes what there is."""
    if setup.attention is AttentionKernel.SDPA and model.without_sdpa:
        msg = (
            f"attention: sdpa: transformers' class of {model.family} raises where it is asked for that; "
            "choose eager, or leave it out"
        )
        raise SetupError(msg)


def _refuse_flash(setup: TrainingSetup, model: ModelSpec) -> None:
    """Refuse to ask a class of transformers for the flash-attention package where it raises at that."""
    kernel = setup.attention
    if kernel is None or not kernel.is_package or setup.kernels not in OF_TRANSFORMERS:
        return
    if model.without_flash:
        others = "eager" if model.without_sdpa else "sdpa or eager"
        msg = (
            f"attention: {kernel.value}: transformers' class of {model.family} raises where it is asked for that; "
            f"choose {others}"
        )
        raise SetupError(msg)


def _refuse_half(setup: TrainingSetup, model: ModelSpec) -> None:
    """Refuse to load a class in 16 bits that keeps a weight in fp32, and multiplies it by others."""
    formats = PRECISIONS[setup.chosen_precision]
    if model.declares_fp32 and formats.weights.is_half and not formats.master_weights:
        msg = (
            f"precision: {setup.chosen_precision.value}: transformers' class of {model.family} makes a weight in "
            "fp32 whatever it is loaded in, and raises; choose fp32 weights: bf16-amp or fp32"
        )
        raise SetupError(msg)


def _refuse_autocast(setup: TrainingSetup, model: ModelSpec) -> None:
    """Refuse a class that writes autocast's 16 bits into a tensor of fp32."""
    autocast = PRECISIONS[setup.chosen_precision].autocast or engine_autocast(setup)
    if model.without_autocast and autocast:
        msg = (
            f"precision: {setup.chosen_precision.value}: transformers' class of {model.family} raises under "
            "autocast (index_put_ of 16 bits into fp32); choose bf16 or fp32"
        )
        raise SetupError(msg)


_HOPPER = (9, 0)
"""Compute capability from which flash-attention's third version runs."""


def _runs_flash(kernel: AttentionKernel, gpu: GpuSpec) -> bool:
    if kernel is AttentionKernel.FLASH3:
        version = gpu.compute_capability
        return version is not None and version >= _HOPPER
    return gpu.supports_flash_attention


def _refuse_packing(setup: TrainingSetup, model: ModelSpec) -> None:
    """Refuse rows of several sequences where a model is not one stack of causal attention."""
    if setup.packing is Packing.NONE:
        return
    specs = attentions(model.stacks[0]) if len(model.stacks) == 1 else []
    if not specs or not all(spec.causal for spec in specs):
        msg = (
            f"packing: {setup.packing.value} is for decoders, which tell sequences apart by their "
            f"position ids, and {model.name} ({model.family}) is none; choose none"
        )
        raise SetupError(msg)
