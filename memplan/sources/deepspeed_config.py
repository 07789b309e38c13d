"""A DeepSpeed configuration file (``ds_config.json``), read into the fields of a ``TrainingSetup``.

``"auto"`` means what the Hugging Face integration makes of it: batch sizes, precision, stage and
offload come from the training arguments, here from the options given beside the file; sizes that
follow the model's width stay ``"auto"`` for the engine's account to fill in, and DeepSpeed's own
default stands for every other ``"auto"``. A key that DeepSpeed does not have is refused, and so is
one that changes memory in a way that is not modelled. A value that contradicts an option given beside
the file is refused too.
"""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import NoReturn

from memplan.errors import ConfigError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.sources.deepspeed_keys import (
    FLAG,
    OPTIMIZER_PARAMS,
    REMOVED,
    REMOVED_FROM_ZERO,
    RENAMED_IN_ZERO,
    TOP,
    Key,
    Section,
    coerce,
    is_comment,
)
from memplan.training.optimizers.spellings import DEEPSPEED, DEEPSPEED_UNMODELLED

AUTO = "auto"
VERSION = "0.19.8"
"""The DeepSpeed whose keys these are."""

_NAMED = {
    "activation_checkpointing": "acts only through deepspeed.checkpointing; give checkpointing",
    "data_efficiency": "may drop tokens or shorten sequences: the figures are upper bounds",
    "autotuning": "tries other batch sizes and stages; this is the setup that the file itself names",
}
"""Keys that may change memory elsewhere: the answer names them, unless they are off."""

_REFUSED = (
    "torch_autocast", "hybrid_engine",
    "expert_parallel", "weight_quantization", "compile", "msamp",
)  # fmt: skip
"""Keys that change memory and are not modelled, unless they are off."""

_PIPELINE = (
    "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned",
    "grad_partitioned", "use_reentrant",
)  # fmt: skip
"""Keys of ``pipeline``. The engine reads neither ``partition`` nor ``seed_layers``: they are arguments of
``PipelineModule``; partitioned messages are of models split over ranks too."""

_PLAIN_SPLIT = ("autotp_size", "dtype", "keep_module_on_host")
"""Keys of ``tensor_parallel`` beside which layers are split as transformers plans it."""

_TORCH_FORMS = {
    (False, False): "adamw-foreach", (False, True): "adamw-loop",
    (True, False): "adamw-fused", (True, True): "adamw-fused",
}  # fmt: skip
"""torch's AdamW, which ``optimizer.params`` go to as they are, by whether it is fused and not foreach."""
_REMOVED_AT = {"": tuple(REMOVED), "zero_optimization.": REMOVED_FROM_ZERO}
"""Keys that are passed over, by where they stand: ``_pass_over_removed`` speaks of them."""

_HALF_OPTIONS = {
    "bf16": ("immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
    "fp16": ("fp16_master_weights_and_grads",),
}
"""Settings of a precision that change memory."""

_OFFLOAD_OPTIONS = (
    "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "ratio", "super_offload",
)  # fmt: skip

_TIMED_IN_ZENFLOW = ("update_interval", "overlap_step")

_NOT_OPTIONS = frozenset({
    "stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param",
    "cpu_offload_use_pin_memory", "legacy_stage1", "pipeline_loading_checkpoint",
    "save_muon_momentum_buffer_in_memory",
})  # fmt: skip
"""Keys of ``zero_optimization`` that are read by themselves, or change no memory."""

_FILLED_IN = frozenset({
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
})  # fmt: skip
"""Keys whose ``"auto"`` the integration fills in from the model."""


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
        self._pass_over_removed()
        self.config = self._checked(self.config, TOP, "")
        self._check_sections()
        self._set("engine", "deepspeed", "the file")
        self._read_precision()
        self._read_zero()
        self._read_optimizer()
        self._read_tensor_parallel()
        self._read_pipeline()
        self._read_batch()
        self._add_given_options()
        self.fields["engine_options"] = self.options
        return DeepSpeedFile(fields=self.fields, notes=tuple(self.notes))

    # -- keys ------------------------------------------------------------------------------------

    def _pass_over_removed(self) -> None:
        """Take out what this DeepSpeed no longer has; refuse what moved memory when it had it."""
        gone = f"has been removed from DeepSpeed ({VERSION} stops at it)"
        for key, effect in REMOVED.items():
            if key not in self.config:
                continue
            if effect and not _is_off(self.config[key]):
                self._fail(key, f"{effect}, is not modelled, and {gone}; leave it out")
            self.notes.append(f"{key} {gone}")
        zero = self._section("zero_optimization")
        for key in [key for key in REMOVED_FROM_ZERO if key in zero]:
            name = f"zero_optimization.{key}"
            if not _is_off(zero[key]) and zero[key] != -1:
                self._fail(name, f"{gone}, and is not modelled; leave it out")
            self.notes.append(f"{name} {gone}")

    def _checked(
        self, section: Mapping[str, object], known: Section, place: str
    ) -> dict[str, object]:
        """The section with its values as DeepSpeed holds them; comments and ``null`` left out."""
        found: dict[str, object] = {}
        for key, value in section.items():
            if is_comment(key) or key in _REMOVED_AT.get(place, ()):
                continue
            name = f"{place}{key}"
            kind = known.get(str(key))
            if kind is None:
                guess = did_you_mean(str(key), list(known))
                self._fail(name, f"DeepSpeed has no such key.{guess}")
            if isinstance(kind, Key):
                found[key] = self._value(kind, value, name)
            elif value is not None:
                found[key] = self._nested(kind, value, name)
        return {key: value for key, value in found.items() if value is not None}

    def _nested(self, known: Section, value: object, name: str) -> object:
        if name == "zero_optimization" and isinstance(value, bool):
            return {"stage": int(value)}  # the form of old: read_zero_config_deprecated
        if name == "optimizer.params" and value == AUTO:
            return {}
        if not isinstance(value, Mapping):
            self._fail(name, f"expected a mapping, got {_short(value)}")
        return self._checked(value, known, f"{name}.")

    def _value(self, key: Key, value: object, name: str) -> object:
        if value == AUTO:
            return AUTO
        try:
            return coerce(key, value)
        except ValueError as error:
            self._fail(name, f"write {error}, not {_short(value)}")

    def _check_sections(self) -> None:
        """Refuse what is not modelled, and name what may matter elsewhere."""
        for key, value in self.config.items():
            if key in _NAMED and (value == {} or not _is_off(value)):
                self.notes.append(f"{key} {_NAMED[key]}")
            elif key in _REFUSED and not _is_off(value):
                self._fail(key, "changes memory and is not modelled; leave it out")

    def _read_tensor_parallel(self) -> None:
        """AutoTP's degree; what splits layers otherwise than transformers' plans do is refused."""
        section = self._section("tensor_parallel")
        for key, value in section.items():
            plain = key in _PLAIN_SPLIT or value == "torch" or _is_off(value)
            if not plain:
                name = f"tensor_parallel.{key}"
                self._fail(name, "splits layers in a way that is not modelled; leave it out")
        size = section.get("autotp_size")
        if isinstance(size, int) and size > 1:
            self._set("tensor_parallel", size, "tensor_parallel.autotp_size")

    def _read_pipeline(self) -> None:
        """What ``PipelineEngine`` takes of a ``PipelineModule`` from the file (``get_pipeline_config``)."""
        section = self._section("pipeline")
        if not section:
            return
        for key in section:
            if key not in _PIPELINE:
                self._fail(f"pipeline.{key}", f"is not read.{did_you_mean(str(key), _PIPELINE)}")
        stages = section.get("stages", AUTO)
        if isinstance(stages, int) and stages > 1:
            self._set("pipeline_parallel", stages, "pipeline.stages")
        if (self._known("pipeline_parallel") or 1) == 1:
            self.notes.append(
                "pipeline is for a PipelineModule: say pipeline_parallel, how many stages"
            )
        interval = section.get("activation_checkpoint_interval", 0)
        if interval == 1:
            self._set("checkpointing", "full", "pipeline.activation_checkpoint_interval")
        elif interval != 0:
            key = "pipeline.activation_checkpoint_interval"
            self._fail(
                key, f"{_short(interval)}: layers recomputed in groups are not modelled; 0 or 1 is"
            )

    def _section(
        self, key: str, parent: Mapping[str, object] | None = None
    ) -> Mapping[str, object]:
        value = (self.config if parent is None else parent).get(key)
        return value if isinstance(value, Mapping) else {}

    # -- the parts -------------------------------------------------------------------------------

    def _read_precision(self) -> None:
        halves = {"bf16": self._section("bf16") or self._section("bfloat16")}
        halves["fp16"] = self._section("fp16")
        wants = {name: section.get("enabled", False) for name, section in halves.items()}
        on = [name for name, value in wants.items() if value is True]
        if len(on) == 2:
            self._fail("fp16.enabled", "and bf16.enabled are both true; DeepSpeed takes one")
        if on:
            self._set("precision", f"{on[0]}-master", f"{on[0]}.enabled")
        elif AUTO not in wants.values():
            self._set("precision", "fp32", "neither bf16.enabled nor fp16.enabled")
        for name in [name for name, value in wants.items() if value in (True, AUTO)]:
            asked = {key: halves[name].get(key, AUTO) for key in _HALF_OPTIONS[name]}
            self.options.update({key: value for key, value in asked.items() if value != AUTO})
        self._read_formats()

    def _read_formats(self) -> None:
        formats = self._section("data_types")
        if formats.get("param_dtype", AUTO) != AUTO:
            self._fail("data_types.param_dtype", "changes memory and is not modelled; leave it out")
        accumulated = formats.get("grad_accum_dtype", AUTO)
        if accumulated != AUTO:
            self.options["grad_accum_dtype"] = accumulated
        reduced = self.config.get("communication_data_type", AUTO)
        if reduced != AUTO:
            self.options["communication_data_type"] = reduced
        key = "seq_parallel_communication_data_type"
        shared = self.config.get(key, AUTO)
        if shared != AUTO and self.config.get("sequence_parallel_size") in (None, 1):
            self.notes.append(f"{key} acts under Ulysses sequence parallelism alone")
        elif shared != AUTO:
            self.options[key] = shared

    def _read_zero(self) -> None:
        zero = self._section("zero_optimization")
        stage = zero.get("stage", 0)
        if stage != AUTO:
            if stage not in (0, 1, 2, 3):
                self._fail("zero_optimization.stage", f"must be 0, 1, 2 or 3, got {stage!r}")
            self._set("zero_stage", stage, "zero_optimization.stage")
        for part, old in (
            ("offload_optimizer", "cpu_offload"),
            ("offload_param", "cpu_offload_param"),
        ):
            self._read_offload(part, self._section(part, zero))
            if zero.get(old) is True:
                if part in zero:
                    self._fail(f"zero_optimization.{old}", f"and {part} say the same; give one")
                self._set(part, "cpu", f"zero_optimization.{old}")
        if zero.get("compute_grad_norm") is False and stage not in (1, 2, AUTO):
            self._fail("zero_optimization.compute_grad_norm", "is false in stages 1 and 2 only")
        for key, value in zero.items():
            if key not in _NOT_OPTIONS:
                self._add_option(key, value)

    def _add_option(self, key: str, value: object) -> None:
        """One of ZeRO's own settings; ``"auto"`` that nobody fills in is DeepSpeed's default."""
        name = RENAMED_IN_ZERO.get(key, key)
        if name in self.options:
            self._fail(f"zero_optimization.{key}", f"is {name} by another name; give one")
        if isinstance(value, Mapping):
            names = [str(each) for group in value.values() for each in _listed(group)]
            if names:
                self.options[name] = " ".join(names)
            for own in _TIMED_IN_ZENFLOW if key == "zenflow" else ():
                if isinstance(value.get(own), int):
                    self.options[f"{key}.{own}"] = value[own]
        elif value != AUTO or name in _FILLED_IN:
            self.options[name] = value

    def _read_offload(self, part: str, section: Mapping[str, object]) -> None:
        device = section.get("device", "none")
        place = f"zero_optimization.{part}"
        if device not in ("none", "cpu", "nvme", AUTO):
            self._fail(f"{place}.device", f"must be none, cpu or nvme, got {device!r}")
        if device in ("cpu", "nvme") and not self._offloads_nothing(part):
            self._set(part, device, f"{place}.device")
        for key in _OFFLOAD_OPTIONS:
            if section.get(key, AUTO) != AUTO:
                self.options[f"{part}.{key}"] = section[key]

    def _offloads_nothing(self, part: str) -> bool:
        """Whether it is of parameters and the stage is below 3, whose optimizers are not even told of it."""
        stage = self.fields.get("zero_stage")
        if part != "offload_param" or stage not in (0, 1, 2):
            return False
        self.notes.append(f"zero_optimization.{part} does nothing in stage {stage}")
        return True

    def _read_optimizer(self) -> None:
        section = self._section("optimizer")
        kind = section.get("type", AUTO)
        if kind == AUTO:
            if self.fields.get("zero_stage") == 0:
                # The training loop then brings PyTorch's own, which stage 0 wraps in another way.
                self.options["torch_adam"] = True
            return
        name = self._optimizer_name(str(kind))
        params = self._nested(OPTIMIZER_PARAMS, section.get("params") or {}, "optimizer.params")
        assert isinstance(params, Mapping)
        for key, usual in (("amsgrad", False), ("fp32_optimizer_states", True)):
            if params.get(key, AUTO) not in (usual, AUTO):
                self._fail(f"optimizer.params.{key}", "changes memory and is not modelled")
        if name == "sgd" and params.get("momentum", AUTO) not in (0, AUTO):
            name = "sgd-momentum"
        if name == "adamw-fused" and params.get("torch_adam") is True:
            name = _TORCH_FORMS[params.get("fused") is True, params.get("foreach") is False]
        self._set("optimizer", name, "optimizer.type")

    def _optimizer_name(self, kind: str) -> str:
        """The optimizer that DeepSpeed makes of a type, or the one of torch's that is called so."""
        found = DEEPSPEED.get(kind.lower())
        if found is None:
            guess = did_you_mean(kind.lower(), list(DEEPSPEED))
            problem = f"{_short(kind)} is not modelled.{guess}"
            unmodelled = DEEPSPEED_UNMODELLED.get(kind.lower())
            if unmodelled is not None:
                problem = f"{kind}: {unmodelled}"
            self._fail("optimizer.type", problem)
        return found.value

    def _read_batch(self) -> None:
        micro = self._count("train_micro_batch_size_per_gpu")
        steps = self._count("gradient_accumulation_steps")
        whole = self._count("train_batch_size")
        sharing = self._count("sequence_parallel_size")
        if sharing not in (None, 1):
            self._set("context_parallel", sharing, "sequence_parallel_size")
        if micro is not None:
            self._set("micro_batch_size", micro, "train_micro_batch_size_per_gpu")
        if steps is not None:
            self._set("gradient_accumulation_steps", steps, "gradient_accumulation_steps")
        if whole is not None:
            self._spread(whole)

    def _spread(self, whole: int) -> None:
        """DeepSpeed's rule: batch = micro-batch x steps x data-parallel ranks."""
        ranks = self._given_count("num_gpus") or 1
        for degree in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
            ranks = max(1, ranks // (self._known(degree) or 1))
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
        return value if isinstance(value, int) else None

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
    """Absent in effect: false, null, 0, 1, "auto", or a section that is empty or not enabled."""
    if not isinstance(value, Mapping):
        return value is not True and value in (None, False, 0, 1, AUTO, [])
    if "enabled" in value:
        try:
            return coerce(FLAG, value["enabled"]) is False
        except ValueError:
            return False
    return not any(each for each in value.values() if each is not None)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _short(value: object) -> str:
    """A value in a message, which stays one line."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""
