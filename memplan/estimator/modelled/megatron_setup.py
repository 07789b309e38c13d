"""Which setups Megatron's engine is modelled for: the others are refused, never ignored."""

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.graph.megatron.local_sizes import padded_vocabulary
from memplan.memory.megatron.options import MegatronStates, layers_of
from memplan.model.joining import Joining
from memplan.model.mixtures import MixtureSpec
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES, Fp8Package, Fp8Recipe
from memplan.training.choices_of_kernels.kernels import KernelPreset, Packing
from memplan.training.compilation import Compilation
from memplan.training.freezing import FrozenParts
from memplan.training.jobs import PLAIN
from memplan.training.precision import PRECISIONS
from memplan.training.setup import PLAIN_OPTIMIZERS, TrainingSetup
from memplan.training.splitting.megatron import (
    MegatronLayers,
    RecomputeGranularity,
    RecomputeMethod,
    TransformerImpl,
)

SAID_APART = (
    "transformer_impl", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "use_distributed_optimizer", "grad_reduce_in_bf16", "wrap_with_ddp",
    "make_vocab_size_divisible_by",
)  # fmt: skip
"""Options that ``megatron_words`` says."""
_KERNELS = ("attention", "norm", "mlp", "rotary", "loss")


def check_megatron(setup: TrainingSetup) -> None:
    """Refuse what is not modelled under this engine, and what contradicts it.

    Raises ``SetupError``.
    """
    if setup.sequence_parallel and setup.tensor_parallel == 1:
        msg = "sequence_parallel: splits more of what tensor_parallel splits, and that is 1: give it too"
        raise SetupError(msg)
    for name, odd, nearest in _beside(setup):
        if odd:
            msg = f"{name}: is not modelled with the engine megatron; {nearest}"
            raise SetupError(msg)
    layers = layers_of(setup)
    _check_narrow(setup, layers)
    MegatronStates.of(setup)
    _check_experts(setup, layers)
    master = PRECISIONS[setup.chosen_precision].master_weights
    full = PRECISIONS[setup.chosen_precision].weights.num_bytes > 2
    if layers.wrap_with_ddp and not (master or full):
        msg = (
            f"precision: Megatron steps fp32 copies of 16-bit weights: take {setup.chosen_precision.value}"
            "-master, or wrap_with_ddp=false for a loop and an optimizer of one's own"
        )
        raise SetupError(msg)
    if not layers.wrap_with_ddp and (master or setup.data_parallel > 1):
        msg = (
            "engine_options: wrap_with_ddp: without it nothing reduces gradients or keeps fp32 copies: take "
            "precision bf16 or fp32, and no more GPUs than tensor_parallel"
        )
        raise SetupError(msg)


def without_towers(model: ModelSpec) -> ModelSpec:
    """The language model alone, whose layers are Megatron's: what sees or hears is left out of the figures, and said so.

    Layers that attend to what a tower gives are no layers of Megatron's, and refused as they are.
    """
    if model.join is None or model.join.joining is Joining.CROSSED or len(model.stacks) != 1:
        return model
    return replace(
        model, join=None, picture=None, sound=None,
        activations_left_out="what sees or hears, its weights and states too (Megatron's towers are not modelled)",
    )  # fmt: skip


def _has_recipe(setup: TrainingSetup) -> bool:
    """Whether its products are of 16 bits, or by a recipe of TransformerEngine's."""
    found = FP8_RECIPES.get(setup.fp8)
    return found is None or found.package is Fp8Package.TRANSFORMER_ENGINE


def _check_narrow(setup: TrainingSetup, layers: MegatronLayers) -> None:
    """Only TransformerEngine's modules multiply 8 bits."""
    if setup.fp8 is Fp8Recipe.NONE:
        return
    if layers.transformer_impl is not TransformerImpl.TRANSFORMER_ENGINE:
        msg = (
            f"fp8: {setup.fp8.value}: transformer_impl {layers.transformer_impl.value} multiplies 16 bits: leave fp8 or "
            "transformer_impl out"
        )
        raise SetupError(msg)


def _check_experts(setup: TrainingSetup, layers: MegatronLayers) -> None:
    """Experts are spread, and each of them split, over ranks of one stage."""
    each, experts = layers.expert_ranks(setup.tensor_parallel), setup.expert_parallel
    ranks = setup.data_parallel * setup.context_parallel * setup.tensor_parallel
    if each not in (1, setup.tensor_parallel):
        msg = (
            f"engine_options: expert_tensor_parallel_size: {each} is not modelled beside tensor_parallel "
            f"{setup.tensor_parallel}: say 1, or leave it out"
        )
        raise SetupError(msg)
    if each != setup.tensor_parallel and experts == 1:
        msg = (
            "engine_options: expert_tensor_parallel_size: experts that are whole on every rank are not modelled: "
            "give expert_parallel"
        )
        raise SetupError(msg)
    together = each * experts
    if ranks % together:
        words = f", each split over {each}," if each > 1 else ""
        msg = (
            f"expert_parallel: {experts} ranks with other experts{words} do not divide the {ranks} ranks of a "
            f"stage: {ranks} = {together} x {ranks // together} + {ranks % together}"
        )
        raise SetupError(msg)


def _beside(setup: TrainingSetup) -> tuple[tuple[str, bool, str], ...]:
    """Fields, whether they say what does not go with it, and what to do."""
    plain = "leave it out"
    settings = "its layers' kernels are engine_options such as transformer_impl=local"
    return (
        *((name, getattr(setup, name) is not None, settings) for name in _KERNELS),
        (
            "kernels", setup.kernels not in (KernelPreset.HF, KernelPreset.MEGATRON), settings,
        ),
        ("loss_parallel", setup.loss_parallel, "its loss is always split as the vocabulary is"),
        ("adapter", setup.adapter is not None, plain),
        ("freeze", setup.freeze != FrozenParts(), plain),
        ("job", setup.job != PLAIN, plain),
        ("ema", setup.ema is not None, plain),
        ("lengths", setup.lengths is not None, plain),
        ("quantize", setup.chosen_quantization is not None, plain),
        ("fp8", not _has_recipe(setup), "take one of TransformerEngine's recipes, as te-delayed"),
        ("compile", setup.compile is not Compilation.NONE, plain),
        ("packing", setup.packing is not Packing.NONE, plain),
        ("optimizer_in_backward", setup.optimizer_in_backward, plain),
        ("outputs_held", setup.outputs_held, plain),
        ("upcast_outputs", setup.upcast_outputs, plain),
        (
            f"optimizer: {setup.optimizer.value}", setup.optimizer not in PLAIN_OPTIMIZERS,
            f"those that are: {', '.join(each.value for each in PLAIN_OPTIMIZERS)}",
        ),
    )  # fmt: skip


def megatron_words(model: ModelSpec, setup: TrainingSetup) -> tuple[str, ...]:
    """What the figure hangs on of Megatron's own settings, each with what it is by default."""
    layers, states = layers_of(setup), MegatronStates.of(setup)
    asked = dict(setup.engine_options)

    def said(text: str, *names: str) -> str:
        return text if any(name in asked for name in names) else f"{text} (default)"

    rows = padded_vocabulary(model, layers, setup.tensor_parallel)
    multiple = layers.make_vocab_size_divisible_by
    found = [
        said(
            f"Megatron's layers, transformer_impl {layers.transformer_impl.value}",
            "transformer_impl",
        ),
        f"vocabulary padded to {rows} rows, a multiple of {multiple} x {setup.tensor_parallel}",
        _recomputed_words(layers),
        *_expert_words(model, setup),
    ]
    if not layers.wrap_with_ddp:
        return (*found, "gradients and optimizer of a loop of one's own")
    weights = PRECISIONS[setup.chosen_precision].weights
    gradients = states.main_gradients(weights).label
    words = (
        "distributed optimizer" if states.use_distributed_optimizer else "no distributed optimizer"
    )
    return (
        *found,
        said(f"main gradients in {gradients}, one buffer", "grad_reduce_in_bf16"),
        said(words, "use_distributed_optimizer"),
    )


def _expert_words(model: ModelSpec, setup: TrainingSetup) -> tuple[str, ...]:
    """How tokens come to experts."""
    runs = model.stacks[0].runs
    if not any(isinstance(run.layer.feed_forward, MixtureSpec) for run in runs):
        return ()
    where = f"experts spread over {setup.expert_parallel} ranks, " * (setup.expert_parallel > 1)
    return (f"{where}each expert given as many tokens as the others (capacity factor 1, padded)",)


def _recomputed_words(layers: MegatronLayers) -> str:
    """Which layers, or parts of them, are computed again."""
    granularity = layers.recompute_granularity
    if granularity is RecomputeGranularity.NONE:
        return "nothing recomputed"
    if granularity is RecomputeGranularity.SELECTIVE:
        modules = ", ".join(each.value for each in layers.recompute_modules)
        return f"recompute_granularity selective: {modules}"
    number = layers.recompute_num_layers
    chunks = f"chunks of {number}" if number > 1 else "each layer"
    if layers.recompute_method is RecomputeMethod.BLOCK:
        chunks = f"the first {number} layers"
    return f"recompute_granularity full, {layers.recompute_method.value}: {chunks}"
