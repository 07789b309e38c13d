"""Which setups may spread experts over ranks: the others are refused, never ignored."""

from memplan.errors import SetupError
from memplan.training.compilation import Compilation
from memplan.training.jobs import PLAIN
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup


def check_spread(setup: TrainingSetup) -> None:
    """Refuse experts that are spread over no ranks, or not evenly, and what is not modelled beside.

    Raises ``SetupError``.
    """
    degree = setup.expert_parallel
    if degree == 1:
        msg = "expert_imbalance: says what expert_parallel ranks are given, and that is 1: give it too"
        raise SetupError(msg)
    if setup.chosen_engine is Engine.MEGATRON:
        msg = "expert_imbalance: is not modelled with the engine megatron, whose experts are given even shares"
        raise SetupError(msg)
    if setup.chosen_engine is not Engine.FSDP:
        msg = (
            f"expert_parallel: is modelled for the engines fsdp and megatron, and the engine is "
            f"{setup.chosen_engine.value}: name one of them"
        )
        raise SetupError(msg)
    _check_groups(setup)
    for name, odd in _beside(setup):
        if odd:
            msg = f"{name}: is not modelled beside expert_parallel; leave one of the two out"
            raise SetupError(msg)


def _check_groups(setup: TrainingSetup) -> None:
    """Ranks of a stage are groups of those that have other experts; who splits layers is in one group.

    (torchtitan 0.3.0, distributed/parallel_dims.py: ``efsdp = fsdp * tp // ep``)
    """
    degree, split = setup.expert_parallel, setup.tensor_parallel
    ranks = setup.gradient_ranks * split
    share, rest = divmod(ranks, degree)
    if rest:
        msg = (
            f"expert_parallel: {ranks} ranks of data cannot be groups of {degree}: "
            f"{ranks} = {degree} x {share} + {rest}"
        )
        raise SetupError(msg)
    if split == 1:
        return
    if degree % split:
        msg = (
            f"expert_parallel: is modelled for groups that hold all ranks that split a layer, and {degree} "
            f"is no multiple of tensor_parallel, {split}"
        )
        raise SetupError(msg)
    if not setup.sequence_parallel:
        msg = (
            "tensor_parallel: beside expert_parallel is modelled with sequence_parallel, as torchtitan runs it: "
            "give it too"
        )
        raise SetupError(msg)


def _odd_adapter(setup: TrainingSetup) -> str:
    """What of an adapter is more than LoRA on linear layers, which ranks hold as any other weight; none is left of one
    on experts, which NeMo AutoModel gives to its own classes of them (components/_peft/lora_experts.py)."""
    from memplan.training.adapters import Lora  # only then

    adapter = setup.adapter
    if adapter is None:
        return ""
    if not isinstance(adapter, Lora):
        return str(adapter)
    return next((name for name in ("modules_to_save", "parameters") if getattr(adapter, name)), "")


def _beside(setup: TrainingSetup) -> tuple[tuple[str, bool], ...]:
    """Fields, and whether they say what does not go with experts that are spread."""
    compute = PRECISIONS[setup.chosen_precision].compute
    return (
        ("adapter: " + _odd_adapter(setup), bool(_odd_adapter(setup))),
        ("job", setup.job != PLAIN),
        ("quantize", setup.chosen_quantization is not None),
        ("compile: model", setup.compile is Compilation.MODEL),
        (f"precision: {setup.chosen_precision.value}", compute.label != "bf16"),
    )
