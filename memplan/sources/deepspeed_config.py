"""A DeepSpeed configuration file (``ds_config.json``), read into the fields of a ``TrainingSetup``.

``"auto"`` means what the Hugging Face integration makes of it: batch sizes, precision, stage and
offload come from the training arguments, here from the options given beside the file; sizes that
follow the model's width stay ``"auto"`` for the engine's account to fill in. A key that DeepSpeed
does not have is refused, and so is one that changes memory in a way that is not modelled. A value
that contradicts an option given beside the file is refused too.
"""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import NoReturn

from memplan.errors import ConfigError, did_you_mean
from memplan.records import dataclass

AUTO = "auto"

_IGNORED = frozenset({
    "gradient_clipping", "scheduler", "steps_per_print", "wall_clock_breakdown", "dump_state",
    "prescale_gradients", "gradient_predivide_factor",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "tensorboard", "wandb",
    "csv_monitor", "comet", "comms_logger", "flops_profiler", "memory_breakdown", "aio",
    "checkpoint", "autotuning", "data_efficiency", "curriculum_learning", "seed", "disable_allgather",
    "dataloader_drop_last", "nebula", "timers", "load_universal_checkpoint",
    "use_data_before_expert_parallelism", "graph_harvesting", "sparse_gradients",
})  # fmt: skip
"""Keys that change no memory worth counting."""

_NAMED = {
    "activation_checkpointing": "acts only through deepspeed.checkpointing; give checkpointing",
    "elasticity": "sets batch sizes at start-up; give micro_batch_size",
}
"""Keys that may change memory elsewhere: the answer names them."""

_REFUSED = (
    "tensor_parallel", "pipeline", "sparse_attention", "quantize_training", "torch_autocast",
    "compression_training", "amp", "hybrid_engine", "sequence_parallel_size", "zenflow",
    "expert_parallel", "weight_quantization", "compile", "progressive_layer_drop", "eigenvalue",
)  # fmt: skip
"""Keys that change memory and are not modelled, unless their ``enabled`` is false."""

_READ = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "fp16", "bf16", "bfloat16", "data_types", "communication_data_type", "optimizer",
    "zero_optimization",
)  # fmt: skip

_OPTIMIZERS = {"adam": "adamw-fused", "adamw": "adamw-fused", "sgd": "sgd"}
"""DeepSpeed's optimizers, by ``optimizer.type`` in lower case."""

_RENAMED = {
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
"""Older and shorter names that DeepSpeed takes too."""

_HALF_OPTIONS = {
    "fp16": ("fp16_master_weights_and_grads",),
    "bf16": ("immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
}
"""Settings of a precision that change memory."""

_OFFLOAD_KEYS = (
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pin_memory",
    "ratio",
    "super_offload",
)
_OFFLOAD_IGNORED = frozenset({
    "device", "nvme_path", "pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc",
    "pipeline",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedFile:
    """What a configuration file says, in memplan's words."""

    fields: dict[str, object]
    """Fields of ``TrainingSetup`` that the file decides; ``engine_options`` among them, those given
    beside the file included."""
    notes: tuple[str, ...] = ()
    """Keys that may change memory and that the answer should name."""


def read_deepspeed_config(
    path: str | Path, given: Mapping[str, object] | None = None
) -> DeepSpeedFile:
    """Read a ``ds_config.json``.

    ``given`` are the fields of ``TrainingSetup`` that were given beside it. Raises ``ConfigError``
    where the file cannot be read, has a key that is unknown or not modelled, or contradicts
    ``given``.
    """
    from memplan.sources.files import read_mapping

    return deepspeed_fields(read_mapping(path), given or {}, source=str(path))


def deepspeed_fields(
    config: Mapping[str, object], given: Mapping[str, object], *, source: str
) -> DeepSpeedFile:
    """The same from a mapping; ``source`` names it in errors.

    >>> config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    >>> deepspeed_fields(config, {}, source="ds.json").fields
    {'engine': 'deepspeed', 'precision': 'bf16-master', 'zero_stage': 3, 'engine_options': {}}
    """
    return _Reader(config, given, source).read()


@dataclass(slots=True)
class _Reader:
    config: Mapping[str, object]
    given: Mapping[str, object]
    source: str
    fields: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self) -> DeepSpeedFile:
        self._check_keys()
        self._set("engine", "deepspeed", "the file")
        self._read_precision()
        self._read_zero()
        self._read_optimizer()
        self._read_batch()
        self._add_given_options()
        self.fields["engine_options"] = self.options
        return DeepSpeedFile(fields=self.fields, notes=tuple(self.notes))

    # -- keys ------------------------------------------------------------------------------------

    def _check_keys(self) -> None:
        known = [*_READ, *_IGNORED, *_NAMED, *_REFUSED]
        for key, value in self.config.items():
            if key in _NAMED:
                self.notes.append(f"{key} {_NAMED[key]}")
            elif key in _REFUSED and not _is_off(value):
                self._fail(key, "changes memory and is not modelled; remove it")
            elif key not in known:
                self._fail(key, f"DeepSpeed has no such key.{did_you_mean(key, known)}")

    def _section(
        self, key: str, parent: Mapping[str, object] | None = None
    ) -> Mapping[str, object]:
        value = (self.config if parent is None else parent).get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._fail(key, f"expected a mapping, got {value!r}")
        return value

    # -- the parts -------------------------------------------------------------------------------

    def _read_precision(self) -> None:
        bf16_key = "bfloat16" if "bfloat16" in self.config else "bf16"
        bf16, fp16 = self._section(bf16_key), self._section("fp16")
        wants = {
            "bf16-master": bf16.get("enabled", False),
            "fp16-master": fp16.get("enabled", False),
        }
        on = [name for name, value in wants.items() if value is True]
        if len(on) == 2:
            self._fail("fp16.enabled", "and bf16.enabled are both true; DeepSpeed takes one")
        if on:
            self._set("precision", on[0], f"{on[0][:4]}.enabled")
        elif AUTO not in wants.values():
            self._set("precision", "fp32", "neither bf16.enabled nor fp16.enabled")
        for section, names in ((bf16, _HALF_OPTIONS["bf16"]), (fp16, _HALF_OPTIONS["fp16"])):
            self.options.update({name: section[name] for name in names if name in section})
        dtype = self._section("data_types").get("grad_accum_dtype")
        if dtype is not None:
            self.options["grad_accum_dtype"] = dtype
        travelling = self.config.get("communication_data_type")
        if travelling is not None:
            self.options["communication_data_type"] = travelling

    def _read_zero(self) -> None:
        zero = self._section("zero_optimization")
        stage = zero.get("stage", 0)
        if stage != AUTO:
            if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
                self._fail("zero_optimization.stage", f"must be 0, 1, 2 or 3, got {stage!r}")
            self._set("zero_stage", stage, "zero_optimization.stage")
        for part in ("offload_optimizer", "offload_param"):
            self._read_offload(part, self._section(part, zero))
        for key, part in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
        ):
            if zero.get(key):
                self._set(part, "cpu", f"zero_optimization.{key}")
        skipped = {
            "stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param",
            "cpu_offload_use_pin_memory", "legacy_stage1", "pipeline_loading_checkpoint",
            "save_muon_momentum_buffer_in_memory",
        }  # fmt: skip
        for key, value in zero.items():
            if key not in skipped and value is not None:
                self.options[self._zero_name(key)] = value

    def _zero_name(self, key: str) -> str:
        from memplan.memory.deepspeed.options import OPTION_NAMES

        name = _RENAMED.get(key, key)
        if name not in OPTION_NAMES:
            guess = did_you_mean(
                key, ["stage", "offload_optimizer", "offload_param", *OPTION_NAMES]
            )
            self._fail(f"zero_optimization.{key}", f"DeepSpeed has no such key.{guess}")
        return name

    def _read_offload(self, part: str, section: Mapping[str, object]) -> None:
        device = section.get("device", "none")
        place = f"zero_optimization.{part}"
        if device not in ("none", "cpu", "nvme", AUTO, None):
            self._fail(f"{place}.device", f"must be none, cpu or nvme, got {device!r}")
        if device in ("cpu", "nvme"):
            self._set(part, device, f"{place}.device")
        for key, value in section.items():
            if key in _OFFLOAD_KEYS and value not in (AUTO, None):
                self.options[f"{part}.{key}"] = value
            elif key not in _OFFLOAD_KEYS and key not in _OFFLOAD_IGNORED:
                guess = did_you_mean(key, [*_OFFLOAD_KEYS, *sorted(_OFFLOAD_IGNORED)])
                self._fail(f"{place}.{key}", f"DeepSpeed has no such key.{guess}")

    def _read_optimizer(self) -> None:
        section = self._section("optimizer")
        kind = section.get("type")
        if not section and self._known_stage() == 0:
            # HF Trainer brings its own AdamW then, which the engine wraps in another way.
            self.options["torch_adam"] = True
        if kind is None or kind == AUTO:
            return
        name = _OPTIMIZERS.get(str(kind).lower())
        if name is None:
            self._fail("optimizer.type", f"{kind} is not modelled; Adam, AdamW and SGD are")
        params = self._section("params", section)
        if name == "sgd" and params.get("momentum") not in (None, 0, 0.0, AUTO):
            name = "sgd-momentum"
        if name == "adamw-fused" and params.get("torch_adam") is True:
            name = "adamw-foreach"
        self._set("optimizer", name, "optimizer.type")

    def _known_stage(self) -> object:
        stage = self.fields.get("zero_stage", self.given.get("zero_stage"))
        return getattr(stage, "value", stage)

    def _read_batch(self) -> None:
        micro = self._count("train_micro_batch_size_per_gpu")
        steps = self._count("gradient_accumulation_steps")
        whole = self._count("train_batch_size")
        if micro is not None:
            self._set("micro_batch_size", micro, "train_micro_batch_size_per_gpu")
        if steps is not None:
            self._set("gradient_accumulation_steps", steps, "gradient_accumulation_steps")
        if whole is not None:
            self._spread(whole)

    def _spread(self, whole: int) -> None:
        """DeepSpeed's rule: batch = micro-batch x steps x data-parallel ranks."""
        ranks = self._given_count("num_gpus") or 1
        for degree in ("tensor_parallel", "pipeline_parallel"):
            ranks //= self._given_count(degree) or 1
        micro = self._known("micro_batch_size")
        steps = self._known("gradient_accumulation_steps")
        if micro is None:
            steps = steps or 1
            micro = whole // (ranks * steps)
            self.fields["micro_batch_size"] = micro
        elif steps is None:
            steps = whole // (ranks * micro)
        self.fields["gradient_accumulation_steps"] = steps
        if micro * (steps or 0) * ranks != whole:
            self._fail(
                "train_batch_size",
                f"is {whole}, but micro-batch x accumulation steps x ranks = "
                f"{micro} x {steps} x {ranks} = {micro * (steps or 0) * ranks}",
            )

    def _known(self, name: str) -> int | None:
        value = self.fields.get(name)
        return value if isinstance(value, int) else self._given_count(name)

    def _given_count(self, name: str) -> int | None:
        value = self.given.get(name)
        return value if isinstance(value, int) else None

    def _count(self, key: str) -> int | None:
        value = self.config.get(key)
        if value is None or value == AUTO:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._fail(key, f"must be a whole number from 1 up or 'auto', got {value!r}")
        return value

    # -- what was given beside the file ----------------------------------------------------------

    def _set(self, name: str, value: object, where: str) -> None:
        given = self.given.get(name)
        if given is not None and getattr(given, "value", given) != value:
            shown = getattr(given, "value", given)
            self._fail(where, f"says {name} {value}, but {shown} was given; leave one out")
        self.fields[name] = value

    def _add_given_options(self) -> None:
        options = self.given.get("engine_options") or {}
        for name, value in dict(options).items():  # type: ignore[call-overload]
            known = self.options.get(name)
            if known is not None and known not in (AUTO, value):
                self._fail(name, f"is {known} in the file, but {value} was given; leave one out")
            self.options[name] = value

    def _fail(self, key: str, problem: str) -> NoReturn:
        msg = f"{self.source}: {key}: {problem}"
        raise ConfigError(msg)


def _is_off(value: object) -> bool:
    """Absent in effect: false, null, 1, or a section that is not enabled."""
    if isinstance(value, Mapping):
        return value.get("enabled", len(value) > 0) is False or not value
    return value in (None, False, 1)
