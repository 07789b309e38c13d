"""What transformers, DeepSpeed and people call the optimizers.

Sources: transformers 5.23 ``training_args.py`` (``OptimizerNames``) and ``trainer_optimizer.py``, which
says what each name makes; DeepSpeed 0.19.8 ``runtime/engine.py`` (``_configure_basic_optimizer``).
"""

from collections.abc import Mapping

from memplan.fast_dataclass import dataclass
from memplan.training.optimizers import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """What a name elsewhere means here."""

    optimizer: Optimizer
    options: tuple[tuple[str, object], ...] = ()
    """What that name sets otherwise than the optimizer's own defaults."""
    in_backward: bool = False
    """Each gradient is stepped as soon as it is there."""


def _named(optimizer: Optimizer, *, in_backward: bool = False, **options: object) -> Spelling:
    return Spelling(optimizer=optimizer, options=tuple(options.items()), in_backward=in_backward)


# The Trainer has bitsandbytes keep the states of every ``nn.Embedding`` in fp32 (trainer.py, ``create_optimizer``:
# ``GlobalOptimManager.register_module_override``).
TRANSFORMERS: Mapping[str, Spelling] = {
    "adamw_torch": _named(Optimizer.ADAMW_FOREACH),
    "adamw_torch_fused": _named(Optimizer.ADAMW_FUSED),
    "adafactor": _named(Optimizer.ADAFACTOR),
    # The Trainer hands 256 to both, whatever torchao's own default is.
    "adamw_torch_4bit": _named(Optimizer.TORCHAO_ADAMW_4BIT, block_size=256),
    "adamw_torch_8bit": _named(Optimizer.TORCHAO_ADAMW_8BIT),
    "ademamix": _named(Optimizer.BNB_ADEMAMIX),
    "ademamix_8bit": _named(Optimizer.BNB_ADEMAMIX_8BIT, embeddings_32bit=True),
    "paged_ademamix_32bit": _named(Optimizer.BNB_PAGED_ADEMAMIX),
    "paged_ademamix_8bit": _named(Optimizer.BNB_PAGED_ADEMAMIX_8BIT, embeddings_32bit=True),
    "sgd": _named(Optimizer.SGD),
    "adagrad": _named(Optimizer.ADAGRAD),
    "adamw_bnb_8bit": _named(Optimizer.BNB_ADAMW_8BIT, embeddings_32bit=True),
    "adamw_8bit": _named(Optimizer.BNB_ADAMW_8BIT, embeddings_32bit=True),
    "paged_adamw_32bit": _named(Optimizer.BNB_PAGED_ADAMW),
    "paged_adamw_8bit": _named(Optimizer.BNB_PAGED_ADAMW_8BIT, embeddings_32bit=True),
    "lion_32bit": _named(Optimizer.BNB_LION),
    "lion_8bit": _named(Optimizer.BNB_LION_8BIT, embeddings_32bit=True),
    "paged_lion_32bit": _named(Optimizer.BNB_PAGED_LION),
    "paged_lion_8bit": _named(Optimizer.BNB_PAGED_LION_8BIT, embeddings_32bit=True),
    "rmsprop": _named(Optimizer.RMSPROP),
    # ``optim_bits`` is 8 only where the name says 8bit.
    "rmsprop_bnb": _named(Optimizer.BNB_RMSPROP),
    "rmsprop_bnb_8bit": _named(Optimizer.BNB_RMSPROP_8BIT, embeddings_32bit=True),
    "rmsprop_bnb_32bit": _named(Optimizer.BNB_RMSPROP),
    "galore_adamw": _named(Optimizer.GALORE_ADAMW),
    "galore_adamw_8bit": _named(Optimizer.GALORE_ADAMW_8BIT),
    "galore_adafactor": _named(Optimizer.GALORE_ADAFACTOR),
    "galore_adamw_layerwise": _named(Optimizer.GALORE_ADAMW, in_backward=True),
    "galore_adamw_8bit_layerwise": _named(Optimizer.GALORE_ADAMW_8BIT, in_backward=True),
    "galore_adafactor_layerwise": _named(Optimizer.GALORE_ADAFACTOR, in_backward=True),
    "apollo_adamw": _named(Optimizer.APOLLO_ADAMW),
    "apollo_adamw_layerwise": _named(Optimizer.APOLLO_ADAMW, in_backward=True),
    "lomo": _named(Optimizer.LOMO),
    "adalomo": _named(Optimizer.ADALOMO),
    "grokadamw": _named(Optimizer.GROKADAMW),
    "schedule_free_radam": _named(Optimizer.SCHEDULE_FREE_RADAM),
    "schedule_free_adamw": _named(Optimizer.SCHEDULE_FREE_ADAMW),
    "schedule_free_sgd": _named(Optimizer.SCHEDULE_FREE_SGD),
    "stable_adamw": _named(Optimizer.STABLE_ADAMW),
}
"""``TrainingArguments.optim``."""

UNMODELLED: Mapping[str, str] = {
    "adamw_torch_xla": "torch_xla's AdamW runs on TPUs; on a GPU the nearest is adamw_torch",
    "adamw_torch_npu_fused": "torch_npu's AdamW runs on NPUs; on a GPU the nearest is adamw_torch_fused",
    "adamw_anyprecision": (
        "torchdistx, which it is from, is no longer published; the nearest is adamw_torch"
    ),
}
"""Names of ``OptimizerNames`` that no GPU runs, and what is nearest."""

DEEPSPEED: Mapping[str, Optimizer] = {
    "adam": Optimizer.ADAMW_FUSED,
    "adamw": Optimizer.ADAMW_FUSED,
    "sgd": Optimizer.SGD,
    "lion": Optimizer.LION_FUSED,
    "lamb": Optimizer.LAMB,
    "adagrad": Optimizer.ADAGRAD,
    "rmsprop": Optimizer.RMSPROP,
    "nadam": Optimizer.NADAM,
    "radam": Optimizer.RADAM,
    "adafactor": Optimizer.ADAFACTOR_LOOP,
    "muadam": Optimizer.ADAMW_FOREACH,
    "muadamw": Optimizer.ADAMW_FOREACH,
    "musgd": Optimizer.SGD,
}
"""``optimizer.type``, in lower case; what is not DeepSpeed's own is looked up in ``torch.optim``."""

DEEPSPEED_UNMODELLED: Mapping[str, str] = {
    "muon": "Muon over ZeRO's shards is not modelled; the nearest is AdamW, which holds one state more",
    **dict.fromkeys(
        ("onebitadam", "zerooneadam"),
        "is no longer in DeepSpeed 0.19; the nearest is Adam, which has no error buffers",
    ),
    "onebitlamb": "is no longer in DeepSpeed 0.19; the nearest is Lamb, which has no error buffers",
}

OTHERS: Mapping[str, Spelling] = {
    "adam_fused": _named(Optimizer.ADAMW_FUSED),
    "adam_foreach": _named(Optimizer.ADAMW_FOREACH),
    "adam_loop": _named(Optimizer.ADAMW_LOOP),
    "adamw_apex_fused": _named(Optimizer.ADAMW_FUSED),
    "deepspeed_cpu_adam": _named(Optimizer.ADAMW_FUSED),
    "apollo_mini": _named(Optimizer.APOLLO_ADAMW, rank=1, scale_type="tensor"),
    "adamw_bnb": _named(Optimizer.BNB_ADAMW),
    "paged_adamw": _named(Optimizer.BNB_PAGED_ADAMW),
    "q_galore": _named(Optimizer.Q_GALORE_ADAMW_8BIT),
}
"""What people write besides."""


def spelled(name: str) -> Spelling | None:
    """What a name means here; None where it is known nowhere.

    >>> spelled("paged_adamw_8bit").optimizer.value
    'bnb-paged-adamw-8bit'
    >>> spelled("galore_adamw_layerwise").in_backward
    True
    """
    key = name.lower().replace("-", "_")
    return TRANSFORMERS.get(key) or OTHERS.get(key)
