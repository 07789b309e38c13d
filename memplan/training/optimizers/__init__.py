"""Optimizers: their names here, what each keeps and its step takes in ``table``.

``Optimizer`` is all that a setup needs. What a step asks the allocator for is written down in the
modules beside this one, a short program for each optimizer (``script``); ``spellings`` knows what
transformers and DeepSpeed call them.
"""

from enum import Enum


class Optimizer(Enum):
    """Optimizers by the names the command line takes."""

    ADAMW_FUSED = "adamw-fused"
    ADAMW_FOREACH = "adamw-foreach"
    ADAMW_LOOP = "adamw-loop"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"
    NADAM = "nadam"
    RADAM = "radam"
    MUON = "muon"
    ADAFACTOR = "adafactor"
    ADAFACTOR_FOREACH = "adafactor-foreach"
    ADAFACTOR_LOOP = "adafactor-loop"
    CAME = "came"
    LION = "lion"
    LION_FUSED = "lion-fused"
    LAMB = "lamb"
    SOPHIA = "sophia"
    SHAMPOO = "shampoo"
    SOAP = "soap"
    ADAM_MINI = "adam-mini"
    STABLE_ADAMW = "stable-adamw"
    SCHEDULE_FREE_ADAMW = "schedule-free-adamw"
    SCHEDULE_FREE_RADAM = "schedule-free-radam"
    SCHEDULE_FREE_SGD = "schedule-free-sgd"
    GROKADAMW = "grokadamw"
    BNB_ADAMW = "bnb-adamw"
    BNB_ADAMW_8BIT = "bnb-adamw-8bit"
    BNB_PAGED_ADAMW = "bnb-paged-adamw"
    BNB_PAGED_ADAMW_8BIT = "bnb-paged-adamw-8bit"
    BNB_LION = "bnb-lion"
    BNB_LION_8BIT = "bnb-lion-8bit"
    BNB_PAGED_LION = "bnb-paged-lion"
    BNB_PAGED_LION_8BIT = "bnb-paged-lion-8bit"
    BNB_ADEMAMIX = "bnb-ademamix"
    BNB_ADEMAMIX_8BIT = "bnb-ademamix-8bit"
    BNB_PAGED_ADEMAMIX = "bnb-paged-ademamix"
    BNB_PAGED_ADEMAMIX_8BIT = "bnb-paged-ademamix-8bit"
    BNB_RMSPROP = "bnb-rmsprop"
    BNB_RMSPROP_8BIT = "bnb-rmsprop-8bit"
    TORCHAO_ADAMW_8BIT = "torchao-adamw-8bit"
    TORCHAO_ADAMW_4BIT = "torchao-adamw-4bit"
    TORCHAO_ADAMW_FP8 = "torchao-adamw-fp8"
    TORCHAO_CPU_OFFLOAD = "torchao-cpu-offload"
    GALORE_ADAMW = "galore-adamw"
    GALORE_ADAMW_8BIT = "galore-adamw-8bit"
    GALORE_ADAFACTOR = "galore-adafactor"
    Q_GALORE_ADAMW_8BIT = "q-galore-adamw-8bit"
    APOLLO_ADAMW = "apollo-adamw"
    LOMO = "lomo"
    ADALOMO = "adalomo"
    TE_ADAMW = "te-adamw"

    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> "Optimizer | None":
        if not isinstance(value, str):
            return None
        from memplan.training.optimizers.spellings import spelled

        found = spelled(value)
        return cls._plugged(value) if found is None else found.optimizer

    @classmethod
    def _plugged(cls, value: str) -> "Optimizer | None":
        """A plug-in's, which has a name here and is no member: nobody iterates over it."""
        from memplan.upward import provided

        if provided("plugged", "optimizers", value) is None:
            return None
        own = object.__new__(cls)
        own._name_, own._value_ = f"PLUGGED_{value}", value
        cls._value2member_map_[value] = own
        return own
