"""Setups written for the frameworks that run them.

One module for each: ``emit(setup) -> Emitted``, or ``emit(setup, model)`` where the framework is told
the model's shape too. What a framework's file cannot hold is named in the result's notes; what a
framework cannot do is refused.
"""

from dataclasses import replace
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, cast

from memplan.sources.emitters.emitted import Emitted
from memplan.training.setup import LOADING_OPTION, QUANTIZATION_OPTIONS, TrainingSetup

if TYPE_CHECKING:
    from collections.abc import Callable

    from memplan.model.spec import ModelSpec

__all__ = ["Emitted", "Framework", "emit"]


class Framework(Enum):
    """What a setup can be written for."""

    DEEPSPEED = "deepspeed"
    """``ds_config.json``."""
    ACCELERATE = "accelerate"
    """The YAML that ``accelerate launch --config_file`` takes, with FSDP."""
    TRAINING_ARGS = "training-args"
    """``transformers.TrainingArguments``, as JSON or YAML."""
    TORCHTITAN = "torchtitan"
    """torchtitan's command-line overrides."""
    AXOLOTL = "axolotl"
    """The YAML that ``axolotl train`` takes."""
    TRL_SFT = "trl-sft"
    """The YAML that ``trl sft --config`` takes: TRL's ``SFTConfig``, its ``ModelConfig`` and their launch line."""
    LLAMA_FACTORY = "llama-factory"
    """The YAML that ``llamafactory-cli train`` takes."""
    TORCHTUNE = "torchtune"
    """The YAML that ``tune run RECIPE --config`` takes."""
    UNSLOTH = "unsloth"
    """The YAML that ``unsloth train --config`` takes."""
    MEGATRON = "megatron"
    """Arguments of Megatron-LM's ``pretrain_gpt.py``."""
    DEEPSPEED_MEGATRON = "deepspeed+megatron"
    """Megatron-DeepSpeed's arguments, and the ``ds_config.json`` beside them."""

    @property
    def is_told_the_model(self) -> bool:
        """Whether what is written holds the model's name or shape."""
        return self in (*_SHAPED, *_NAMED)

    @property
    def is_read_back(self) -> bool:
        """Whether what is written can be read here."""
        return self is not Framework.DEEPSPEED_MEGATRON

    @property
    def takes_flags(self) -> bool:
        """Whether it is told on its command line."""
        return self in (Framework.TORCHTITAN, Framework.MEGATRON, Framework.DEEPSPEED_MEGATRON)


_SHAPED = (Framework.MEGATRON, Framework.DEEPSPEED_MEGATRON)
_NAMED = (
    Framework.AXOLOTL, Framework.TRL_SFT, Framework.LLAMA_FACTORY, Framework.TORCHTUNE, Framework.UNSLOTH,
)  # fmt: skip
_MODULES = {
    Framework.AXOLOTL: "axolotl",
    Framework.TRL_SFT: "trl_sft",
    Framework.LLAMA_FACTORY: "llama_factory",
    Framework.TORCHTUNE: "torchtune",
    Framework.UNSLOTH: "unsloth",
    Framework.DEEPSPEED: "deepspeed",
    Framework.ACCELERATE: "accelerate",
    Framework.TRAINING_ARGS: "training_arguments",
    Framework.TORCHTITAN: "torchtitan",
    Framework.MEGATRON: "megatron",
    Framework.DEEPSPEED_MEGATRON: "megatron_deepspeed",
}


def emit(setup: TrainingSetup, framework: Framework, model: "ModelSpec | None" = None) -> Emitted:
    """Write a setup for a framework; defaults are filled in first.

    Raises ``SetupError`` for what the framework cannot be told or cannot do.

    >>> made = emit(TrainingSetup(num_gpus=8, zero_stage=3, seq_len=2048), Framework.DEEPSPEED)
    >>> made.values["zero_optimization"]
    {'stage': 3}
    """
    module = import_module(f"memplan.sources.emitters.{_MODULES[framework]}")
    write = cast("Callable[..., Emitted]", module.emit)
    resolved, loading = _without_loading(setup.resolve())
    resolved = _without_packing(resolved)
    if framework.is_told_the_model:
        assert model is not None
        made = write(resolved, model)
    else:
        made = write(resolved)
    said = _left_to_the_script(resolved, loading)
    if framework.is_read_back:
        from memplan.sources.emitters.reading_back import set_by_hand

        told = made.setup
        asked = replace(setup, dropout=told.dropout, layers_per_stage=told.layers_per_stage)
        by_hand = set_by_hand(asked, made.values, framework.value)
        made = replace(made, by_hand=by_hand)
        unsaid = {*by_hand, *dict(by_hand.get("engine_options", ()))}  # type: ignore[call-overload]
        said = {name: words for name, words in said.items() if name in unsaid}
    return replace(made, notes=(*made.notes, *said.values())) if said else made


def _without_packing(setup: TrainingSetup) -> TrainingSetup:
    """How the base is packed said by ``quantize`` alone: the script loads it, and no option of the engine's does."""
    how = setup.chosen_quantization
    if how is None:
        return setup
    options = dict(setup.engine_options)
    others = {name: options[name] for name in options if name not in QUANTIZATION_OPTIONS}
    return replace(setup, quantize=how, engine_options=others)


def _left_to_the_script(setup: TrainingSetup, loading: str) -> dict[str, str]:
    """By field, what an engine's own file has no key for."""
    said: dict[str, str] = {}
    if setup.adapter is not None:
        said["adapter"] = (
            f"give the model its adapter, {setup.adapter}, in the script: no key here does"
        )
    if loading:
        said[LOADING_OPTION] = loading
    if setup.chosen_quantization is not None:
        said["quantize"] = f"load the base quantized: {setup.chosen_quantization}"
    return said


def _without_loading(setup: TrainingSetup) -> tuple[TrainingSetup, str]:
    """The setup without the way in which its weights come to the GPU, and that in words: a script says it."""
    options = dict(setup.engine_options)
    if options.pop(LOADING_OPTION, None) is None:
        return setup, ""
    words = (
        f"whether from_pretrained gets a {LOADING_OPTION} is said in the script: no key here does"
    )
    return replace(setup, engine_options=options), words
