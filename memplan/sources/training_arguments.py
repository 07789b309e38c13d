"""Hugging Face ``TrainingArguments`` (transformers 5.23), read from JSON or YAML.

They say nothing of the model, the number of GPUs and the length of sequences: those are given
beside them. ``deepspeed`` may be a mapping or the path of a ``ds_config.json``, and ``fsdp_config``
a mapping or a path, as the Trainer takes them; paths are relative to the file's folder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from memplan.errors import ConfigError, SetupError, did_you_mean
from memplan.training.kernels import KernelPreset
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision
from memplan.training.setup import Recomputation, TrainingSetup

_OPTIMIZERS = {
    "adamw_torch_fused": Optimizer.ADAMW_FUSED,
    "adamw_torch": Optimizer.ADAMW_FOREACH,
    "sgd": Optimizer.SGD,
}
"""transformers' names of the optimizers that are modelled."""
_PRECISIONS = {
    ("bf16", Engine.DDP): Precision.BF16_AMP,
    ("bf16", Engine.DEEPSPEED): Precision.BF16_MASTER,
    ("bf16", Engine.FSDP): Precision.BF16_MIXED,
    ("bf16", Engine.FSDP1): Precision.BF16_MIXED,
    ("fp16", Engine.DDP): Precision.FP16_AMP,
    ("fp16", Engine.DEEPSPEED): Precision.FP16_MASTER,
    ("fp16", Engine.FSDP): Precision.FP16_MIXED,
    ("fp16", Engine.FSDP1): Precision.FP16_MIXED,
}
"""What a flag means under each engine, for a model that is loaded in fp32."""


def read_training_arguments(path: str | Path, base: TrainingSetup | None = None) -> TrainingSetup:
    """Read a setup from a file of training arguments.

    ``base`` holds what they do not say. Raises ``ConfigError`` when the file cannot be read, or a
    value is wrong or names something that is not modelled.
    """
    from memplan.sources.files import read_mapping

    values = read_mapping(path)
    return setup_from_arguments(values, base, source=str(path), folder=Path(path).parent)


def setup_from_arguments(
    values: Mapping[str, object],
    base: TrainingSetup | None = None,
    *,
    source: str,
    folder: Path = Path(),
) -> TrainingSetup:
    """Make a setup from training arguments; keys that change no memory are passed over.

    >>> setup_from_arguments({"bf16": True, "per_device_train_batch_size": 4}, source="example")
    ... # doctest: +ELLIPSIS
    TrainingSetup(num_gpus=1, ... micro_batch_size=4, ... precision=<Precision.BF16_AMP...>, ...)
    """
    reader = _Arguments(values, base or TrainingSetup(), source=source, folder=folder)
    try:
        return reader.setup()
    except SetupError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None


class _Arguments:
    """One file of arguments."""

    def __init__(
        self, values: Mapping[str, object], base: TrainingSetup, *, source: str, folder: Path
    ) -> None:
        self.values = values
        self.base = base
        self.source = source
        self.folder = folder

    def setup(self) -> TrainingSetup:
        """The setup that the arguments and the base make together."""
        found: dict[str, object] = {
            "micro_batch_size": self._count("per_device_train_batch_size", default=8),
            "gradient_accumulation_steps": self._count("gradient_accumulation_steps", default=1),
        }
        found["checkpointing"] = self._checkpointing()
        found["optimizer"] = self._optimizer()
        if self._flag("use_liger_kernel"):
            found["kernels"] = KernelPreset.LIGER
        if self._flag("torch_compile"):
            found["compiled"] = True
        self._refuse_unmodelled()
        deepspeed = self._nested("deepspeed")
        if deepspeed is not None:
            return self._with_deepspeed(found, deepspeed)
        if self._uses_fsdp():
            return self._with_fsdp(found)
        found["engine"] = Engine.DDP
        found["precision"] = self._precision(Engine.DDP)
        # accelerate copies the outputs of a mixed-precision model to fp32 (``prepare_model``).
        found["upcast_outputs"] = found["precision"] is not Precision.FP32
        return replace(self.base, **found)  # type: ignore[arg-type]

    # -- engines ---------------------------------------------------------------------------------

    def _with_deepspeed(
        self, found: dict[str, object], config: Mapping[str, object]
    ) -> TrainingSetup:
        from memplan.sources.deepspeed_config import deepspeed_fields

        precision = self._precision(Engine.DEEPSPEED)
        given = {
            "num_gpus": self.base.num_gpus,
            "micro_batch_size": found["micro_batch_size"],
            "gradient_accumulation_steps": found["gradient_accumulation_steps"],
        }
        if "optimizer" not in config:
            given["optimizer"] = found["optimizer"]
        if precision is not Precision.FP32:
            given["precision"] = precision
        read = deepspeed_fields(config, given, source=f"{self.source}: deepspeed")
        made = {**found, "precision": precision, **read.fields}
        return replace(self.base, **made)  # type: ignore[arg-type]

    def _uses_fsdp(self) -> bool:
        value = self.values.get("fsdp")
        if value in (None, False, "", []):
            return False
        if value is True or isinstance(value, str | list):
            return True
        key = "fsdp"
        raise self._wrong(key, "true, or words such as full_shard auto_wrap")

    def _with_fsdp(self, found: dict[str, object]) -> TrainingSetup:
        from memplan.sources.accelerate_config import accelerate_fields
        from memplan.sources.emitters.accelerate import accelerate_values

        halves = [name for name in ("bf16", "fp16") if self._flag(name)]
        arguments = {"fsdp": self.values.get("fsdp"), "fsdp_config": self._nested("fsdp_config")}
        described = accelerate_values(arguments, halves[0] if halves else "no")
        read = accelerate_fields(described, {}, source=f"{self.source}: fsdp_config").fields
        if found["checkpointing"] is Recomputation.FULL:
            read["checkpointing"] = Recomputation.FULL
        return replace(self.base, **{**found, **read})  # type: ignore[arg-type]

    # -- values ----------------------------------------------------------------------------------

    def _checkpointing(self) -> Recomputation:
        """transformers 5.23 renamed it, and the new name goes first (``__post_init__``)."""
        named = "activation_checkpointing"
        key = named if self.values.get(named) is not None else "gradient_checkpointing"
        if not self._flag(key):
            return Recomputation.NONE
        options = self._nested(f"{key}_kwargs") or {}
        for name, usual in (("every_n_layers", 1), ("offload", False)):
            if options.get(name) not in (None, usual):
                msg = (
                    f"{self.source}: {key}_kwargs.{name}: changes memory and is not modelled; "
                    "remove it"
                )
                raise ConfigError(msg)
        return Recomputation.FULL

    def _precision(self, engine: Engine) -> Precision:
        halves = [name for name in ("bf16", "fp16") if self._flag(name)]
        if len(halves) == 2:
            msg = f"{self.source}: fp16: and bf16 are both true; the Trainer takes one"
            raise ConfigError(msg)
        return _PRECISIONS[(halves[0], engine)] if halves else Precision.FP32

    def _optimizer(self) -> Optimizer:
        name = self.values.get("optim", "adamw_torch_fused")
        if isinstance(name, str) and name in _OPTIMIZERS:
            return _OPTIMIZERS[name]
        known = list(_OPTIMIZERS)
        hint = did_you_mean(str(name), known)
        msg = f"{self.source}: optim: {name!r} is not modelled.{hint} There are: {', '.join(known)}"
        raise ConfigError(msg)

    def _refuse_unmodelled(self) -> None:
        for key in _UNMODELLED:
            if self.values.get(key) not in (None, False, "", [], {}):
                msg = f"{self.source}: {key}: changes memory and is not modelled; remove it"
                raise ConfigError(msg)

    def _flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def _count(self, key: str, *, default: int) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a whole number from 1 up")
        return value

    def _nested(self, key: str) -> Mapping[str, object] | None:
        """A mapping, or the file that holds it."""
        value = self.values.get(key)
        if value in (None, "", {}):
            return None
        if isinstance(value, str):
            from memplan.sources.files import read_mapping

            return read_mapping(self.folder / value)
        if not isinstance(value, Mapping):
            raise self._wrong(key, "a mapping or the path of a file")
        return value

    def _wrong(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.source}: {key}: write {wanted}, not {self.values[key]!r}")


_UNMODELLED = ("galore_config", "optim_target_modules", "auto_find_batch_size", "tp_size")
"""Arguments that change memory in ways that are not modelled."""
