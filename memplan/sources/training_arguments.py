"""Hugging Face ``TrainingArguments`` (transformers 5.23), read from JSON or YAML.

TRL's ``SFTConfig``, ``DPOConfig``, ``GRPOConfig`` and ``RewardConfig`` are training arguments too: a
file that holds a name of theirs has their defaults. Every other name is refused. They say nothing of
the model and the number of GPUs: those are given beside them. ``deepspeed`` may be a mapping or the
path of a ``ds_config.json``, and ``fsdp_config`` a mapping or a path, as the Trainer takes them; paths
are relative to the file's folder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from memplan.errors import ConfigError, SetupError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.memory.ddp import DEFAULT_BUCKET_CAP_MB
from memplan.sources.argument_values import ArgumentValues
from memplan.sources.trainer_keys import (
    GENERATING,
    TRL_COMPLETION_LENGTH,
    TRL_LENGTH,
    TRL_PROMPT_LENGTH,
    WITHOUT_DROPOUT,
    check_names,
    left_out,
    older_names,
    remarks,
    stop_at,
    trl_config,
    trl_job,
    trl_remarks,
)
from memplan.sources.trainer_optimizer import read_optimizer
from memplan.text import shown
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import Recomputation
from memplan.training.coercion import coerce_enum
from memplan.training.compilation import Compilation
from memplan.training.evaluation import Evaluation
from memplan.training.kernels import (
    AttentionKernel,
    FeedForwardKernel,
    KernelPreset,
    LossKernel,
    NormKernel,
    Packing,
    RotaryKernel,
)
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup
from memplan.units import ceil_div

_PRECISIONS = {
    ("bf16", Engine.DDP): Precision.BF16_AMP,
    ("bf16", Engine.DEEPSPEED): Precision.BF16_MASTER,
    ("bf16", Engine.MEGATRON): Precision.BF16_MASTER,
    ("bf16", Engine.FSDP): Precision.BF16_MIXED,
    ("bf16", Engine.FSDP1): Precision.BF16_MIXED,
    ("fp16", Engine.DDP): Precision.FP16_AMP,
    ("fp16", Engine.DEEPSPEED): Precision.FP16_MASTER,
    ("fp16", Engine.MEGATRON): Precision.FP16_MASTER,
    ("fp16", Engine.FSDP): Precision.FP16_MIXED,
    ("fp16", Engine.FSDP1): Precision.FP16_MIXED,
}
"""What a flag means under each engine, for a model that is loaded in fp32."""
_CHECKPOINT_OPTIONS = (
    "every_n_layers", "offload", "use_reentrant", "preserve_rng_state", "determinism_check",
    "debug", "early_stop",
)  # fmt: skip
"""What ``activation_checkpointing_kwargs`` may hold: transformers' own, and torch's."""
_ACCELERATOR_OPTIONS = (
    "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
    "gradient_accumulation_kwargs", "use_configured_state",
)  # fmt: skip
_LIGER_FIELDS: dict[str, tuple[str, object]] = {
    "rope": ("rotary", RotaryKernel.EAGER),
    "rms_norm": ("norm", NormKernel.EAGER),
    "swiglu": ("mlp", FeedForwardKernel.EAGER),
    "geglu": ("mlp", FeedForwardKernel.EAGER),
    "relu_squared": ("mlp", FeedForwardKernel.EAGER),
}
"""What ``liger_kernel_config`` calls a kernel -> the field of a setup, and what it is without."""
_LIGER_OPTIONS = (*_LIGER_FIELDS, "layer_norm", "cross_entropy", "fused_linear_cross_entropy")
_LOADED_IN = ("load_in_4bit", "load_in_8bit")
_ATTENTIONS = {
    "eager": AttentionKernel.EAGER,
    "sdpa": AttentionKernel.SDPA,
    "flash_attention_2": AttentionKernel.FLASH,
    "kernels-community/flash-attn2": AttentionKernel.FLASH,
    "flash_attention_3": AttentionKernel.FLASH3,
    "kernels-community/flash-attn3": AttentionKernel.FLASH3,
    "kernels-community/vllm-flash-attn3": AttentionKernel.FLASH3,
}
"""``attn_implementation`` in memplan's words."""
_BEST_FIT = ("bfd", "bfd_split", "ffd")
"""``packing_strategy`` (the last: its name in TRL 0.17) under which TRL drops the padding (``SFTTrainer.__init__``); the first by default."""
_EVALUATION_KEYS = (
    "eval_strategy", "evaluation_strategy", "evaluate_during_training", "eval_on_start",
)  # fmt: skip
"""Arguments, today's and older ones, that ask for evaluation while the model is trained."""
USUAL_EVAL_BATCH = 8
"""``per_device_eval_batch_size`` where it is not given (transformers 5.23, ``TrainingArguments``)."""
_ACCUMULATION_OPTIONS = (
    "num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentsFile:
    """What a file of arguments says, in memplan's words."""

    setup: TrainingSetup
    notes: tuple[str, ...] = ()
    """Arguments that move memory and that the answer should name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFile:
    """An engine's own file, given beside the arguments."""

    values: Mapping[str, object]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Files that a job is launched with, beside the one that says what it trains."""

    deepspeed: EngineFile | None = None
    accelerate: EngineFile | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """What the Trainer is handed beside its arguments, which decides what their flags mean."""

    trainer: str | None = None
    """TRL's class of arguments; None: as their names say."""
    half_weights: bool = False
    """The model is loaded in bf16, not in fp32."""


def read_training_arguments(path: str | Path, base: TrainingSetup | None = None) -> TrainingSetup:
    """Read a setup from a file of training arguments.

    ``base`` holds what they do not say. Raises ``ConfigError`` when the file cannot be read, has a
    name that no class of arguments has, or a value that is wrong or not modelled.
    """
    return read_arguments_file(path, base).setup


def read_arguments_file(
    path: str | Path,
    base: TrainingSetup | None = None,
    *,
    given: Mapping[str, object] | None = None,
    deepspeed: EngineFile | None = None,
    accelerate: EngineFile | None = None,
) -> ArgumentsFile:
    """The same with what the answer should name.

    ``given`` are fields of ``TrainingSetup`` that were given beside the file: the engine and the
    precision decide what its flags mean. ``deepspeed`` and ``accelerate`` are files that the job is
    launched with; the Trainer's flags and sizes fill in what they leave open.
    """
    from memplan.sources.files import read_mapping

    return arguments_file(
        read_mapping(path), base, source=str(path), folder=Path(path).parent, given=given,
        deepspeed=deepspeed, accelerate=accelerate,
    )  # fmt: skip


def setup_from_arguments(
    values: Mapping[str, object],
    base: TrainingSetup | None = None,
    *,
    source: str,
    folder: Path = Path(),
) -> TrainingSetup:
    """Make a setup from training arguments; ``arguments_file`` also says what it leaves out.

    >>> setup_from_arguments({"bf16": True, "per_device_train_batch_size": 4}, source="example")
    ... # doctest: +ELLIPSIS
    TrainingSetup(num_gpus=1, ... micro_batch_size=4, ... precision=<Precision.BF16_AMP...>, ...)
    """
    return arguments_file(values, base, source=source, folder=folder).setup


def arguments_file(
    values: Mapping[str, object],
    base: TrainingSetup | None = None,
    *,
    source: str,
    folder: Path = Path(),
    given: Mapping[str, object] | None = None,
    deepspeed: EngineFile | None = None,
    accelerate: EngineFile | None = None,
    loading: Loading | None = None,
) -> ArgumentsFile:
    """Read arguments from a mapping, as ``read_arguments_file`` does from a file."""
    check_names(values, source=source)
    stop_at(values, source=source)
    reader = _Arguments(
        values, base or TrainingSetup(), given or {}, loading or Loading(), source=source,
        folder=folder,
    )  # fmt: skip
    try:
        setup = reader.setup(deepspeed, accelerate)
    except ConfigError:
        raise
    except SetupError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None
    return ArgumentsFile(setup=setup, notes=tuple(dict.fromkeys(reader.notes)))


class _Arguments(ArgumentValues):
    """One file of arguments."""

    def __init__(
        self,
        values: Mapping[str, object],
        base: TrainingSetup,
        given: Mapping[str, object],
        loading: Loading,
        *,
        source: str,
        folder: Path,
    ) -> None:
        super().__init__(values, source=source, folder=folder)
        self.base = base
        self.given = given
        self.trl = loading.trainer or trl_config(values, source=source)
        self.half_weights = loading.half_weights
        self.notes = [*older_names(values), *remarks(values)]

    def setup(self, deepspeed: EngineFile | None, accelerate: EngineFile | None) -> TrainingSetup:
        """The setup that the arguments and the base make together."""
        found: dict[str, object] = {
            "micro_batch_size": self.count("per_device_train_batch_size", default=8),
            "gradient_accumulation_steps": self._accumulation(),
        }
        found["checkpointing"] = self._checkpointing()
        if self.given.get("evaluation") is None:
            found["evaluation"] = self._evaluation()
        found |= self._offloading()
        found |= read_optimizer(self)
        found |= self._liger()
        if self._compiles():
            found["compile"] = self._compilation()
        found["left_out"] = (*self.base.left_out, *left_out(self.values), *self._graphs())
        if self.trl is not None:
            self._read_trl(found)
        if deepspeed is None and accelerate is None:
            config = self.nested("deepspeed")
            if config is not None:
                deepspeed = EngineFile(values=config, source=f"{self.source}: deepspeed")
        if deepspeed is not None:
            return self._with_deepspeed(found, deepspeed)
        if accelerate is not None or self._uses_fsdp():
            return self._with_accelerate(found, accelerate or self._fsdp_file())
        if self.nested("fsdp_config"):
            self.notes.append("fsdp_config does nothing without fsdp")
        return self._alone(found)

    def _evaluation(self) -> Evaluation | None:
        """Batches between steps, where ``eval_strategy`` asks for them; ``do_eval`` alone runs none of these.

        Without ``compute_metrics``, which no file says, the loss alone is kept (``Trainer.evaluate``).
        """
        asked = [self.values.get(key) for key in _EVALUATION_KEYS]
        if all(value in (None, False, "no", "IntervalStrategy.NO") for value in asked):
            return None
        older = "per_gpu_eval_batch_size"
        key = older if older in self.values else "per_device_eval_batch_size"
        batch_size = self.count(key, default=USUAL_EVAL_BATCH)
        metrics = self.flag("batch_eval_metrics")
        steps = self.values.get("eval_accumulation_steps")
        if metrics:
            steps = 1
        elif steps is not None:
            steps = self.count("eval_accumulation_steps", default=1)
        kept = steps if not self.flag("prediction_loss_only") else None
        said = f"evaluation in batches of {batch_size}"
        if key not in self.values:
            said += " (the Trainer's default)"
        if kept is not None:
            said += f", logits of {kept} kept at once, as compute_metrics would have them"
        elif not self.flag("prediction_loss_only"):
            said += ", of which the loss is kept; with compute_metrics say how many batches' logits are kept too"
        self.notes.append(said)
        return Evaluation(batch_size=batch_size, batches_kept=kept or 0, accumulation_steps=steps)

    def _liger(self) -> dict[str, object]:
        """Liger's kernels, and which of them ``liger_kernel_config`` leaves out.

        What it does not name is as Liger's function for the model's type has it by default.
        """
        config = self.nested("liger_kernel_config") or {}
        self._check_options("liger_kernel_config", config, _LIGER_OPTIONS)
        for name, value in config.items():
            if not isinstance(value, bool):
                self.refuse(f"liger_kernel_config.{name}", "write true or false")
        if not (self.flag("use_liger_kernel") or self.flag("use_liger")):
            if config:
                self.notes.append("liger_kernel_config does nothing without use_liger_kernel")
            return {}
        found: dict[str, object] = {"kernels": KernelPreset.LIGER}
        for name, (field, eager) in _LIGER_FIELDS.items():
            if config.get(name) is False:
                found[field] = eager
        whole = config.get("cross_entropy", False)
        if config.get("fused_linear_cross_entropy", True):
            if whole:
                advice = "Liger takes either: write fused_linear_cross_entropy: false beside it"
                self.refuse("liger_kernel_config.cross_entropy", advice)
        else:
            found["loss"] = LossKernel.LIGER if whole else LossKernel.EAGER
        return found

    def _read_packing(self, found: dict[str, object]) -> None:
        """Without padding all sequences lie in one row; so they do in the packing by best fit."""
        packed = self.trl == "SFTConfig" and self.flag("packing")
        strategy = self.values.get("packing_strategy", _BEST_FIT[0])
        if strategy not in (*_BEST_FIT, "wrapped"):
            known = ", ".join((*_BEST_FIT, "wrapped"))
            guess = did_you_mean(str(strategy), known.split(", "))
            self.refuse("packing_strategy", f"{strategy!r} is none of {known}.{guess}")
        if self.flag("padding_free") or (packed and strategy in _BEST_FIT):
            found["packing"] = Packing.PADDING_FREE

    def _read_trl(self, found: dict[str, object]) -> None:
        """What TRL's trainers do besides; ``bf16`` and checkpointing have their own defaults."""
        config = self.trl
        assert config is not None
        self.notes += trl_remarks(config, self.values)
        has_adapter = self.given.get("adapter") is not None
        if self.given.get("job") is None:
            job = trl_job(config, self.values, has_adapter=has_adapter)
            if job is not None:
                found["job"] = {**job, **self._generated_at_once(job)}
        if self.flag("disable_dropout", default=config in WITHOUT_DROPOUT):
            found["dropout"] = 0.0
        if config in GENERATING:
            self._read_generated_length(found)
        else:
            self._read_length(found)
        self._read_packing(found)
        self._read_loading(found)

    def _read_length(self, found: dict[str, object]) -> None:
        key = "max_length" if "max_length" in self.values else "max_seq_length"
        if key in self.values and self.values[key] is None:
            self.notes.append(f"{key} is null: sequences are not cut; give seq_len")
            return
        length = self._padded(self.count(key, default=TRL_LENGTH))
        found["seq_len"] = length
        default = "" if key in self.values else f" ({self.trl}'s default)"
        said = f"max_length {length}{default} is taken for the length of every sequence"
        if self.given.get("seq_len") is not None:
            return
        packed = self.trl == "SFTConfig" and self.flag("packing")
        self.notes.append(f"{said}, as packing makes it" if packed else f"{said}, an upper bound")

    def _generated_at_once(self, job: Mapping[str, object]) -> dict[str, object]:
        """Sequences of a rank, where another number is given than those of an optimizer step."""
        if job["kind"] != "grpo" or "rollout" in job:
            return {}
        if self.values.get("steps_per_generation") is not None:
            steps = self.count("steps_per_generation", default=1)
            return {"rollout_batch_size": steps * self._per_device()}
        if self.values.get("generation_batch_size") is None:
            return {}
        gpus = self.given.get("num_gpus")
        ranks = gpus if isinstance(gpus, int) else self.base.num_gpus
        return {
            "rollout_batch_size": ceil_div(self.count("generation_batch_size", default=1), ranks)
        }

    def _read_generated_length(self, found: dict[str, object]) -> None:
        """A prompt and what the model generates; ``vllm_max_model_length`` bounds both together."""
        bound = "max_prompt_length"
        cut = self.values.get(bound) is not None
        prompt = self.count(bound, default=TRL_PROMPT_LENGTH) if cut else TRL_PROMPT_LENGTH
        key = "max_completion_length"
        whole = self.values.get(key, TRL_COMPLETION_LENGTH) is None
        answer = TRL_COMPLETION_LENGTH if whole else self.count(key, default=TRL_COMPLETION_LENGTH)
        most = self.values.get("vllm_max_model_length")
        length = prompt + answer
        if most is not None:
            length = min(length, self.count("vllm_max_model_length", default=length))
        found["seq_len"] = self._padded(length)
        if self.given.get("seq_len") is None:
            said = (
                f"{bound} {prompt}" if cut else f"a prompt of {prompt} tokens, which nothing cuts"
            )
            self.notes.append(
                f"{length} tokens are taken for the length of every sequence: {said}, and "
                f"{key} {answer}"
            )

    def _padded(self, length: int) -> int:
        """A length as the collator pads it (``pad_to_multiple_of``)."""
        multiple = self.values.get("pad_to_multiple_of")
        if multiple in (None, "auto", 0):
            return length
        multiple = self.count("pad_to_multiple_of", default=1)
        return ceil_div(length, multiple) * multiple

    def _read_quantization(self, found: dict[str, object], options: Mapping[str, object]) -> None:
        """How ``from_pretrained`` packs the weights: a ``BitsAndBytesConfig``, or flags of one."""
        config = options.get("quantization_config")
        flags = {key: options[key] for key in _LOADED_IN if options.get(key)}
        if not config and not flags:
            return
        from memplan.training.quantization_config import read_quantization_config

        key = "model_init_kwargs.quantization_config"
        if config and not isinstance(config, Mapping):
            self.refuse(key, f"write a mapping, not {config!r}")
        try:
            how = read_quantization_config(config if isinstance(config, Mapping) else flags)
        except SetupError as error:
            self.refuse(key, str(error))
        if how is None:
            self.refuse(key, "is not modelled; bitsandbytes', GPTQ's and AWQ's are")
        found["quantize"] = replace(how, prequantized=how.format.is_calibrated)

    def _read_loading(self, found: dict[str, object]) -> None:
        """``model_init_kwargs``: how the trainer loads the model, where it does."""
        options = self.nested("model_init_kwargs") or {}
        self._read_quantization(found, options)
        named = options.get("attn_implementation")
        if named is not None:
            kernel = _ATTENTIONS.get(str(named))
            if kernel is None:
                known = ", ".join(_ATTENTIONS)
                advice = f"{named!r} is not modelled; there are {known}"
                self.refuse("model_init_kwargs.attn_implementation", advice)
            found["attention"] = kernel
        dtype = str(options.get("dtype", options.get("torch_dtype", "float32"))).split(".")[-1]
        if dtype == "bfloat16":
            self.half_weights = True
        elif dtype != "float32":
            self.notes.append(
                f"model_init_kwargs.dtype {dtype}: weights are counted as the precision says; "
                "bf16-autocast and bf16 are weights in bf16"
            )

    # -- engines ---------------------------------------------------------------------------------

    def _alone(self, found: dict[str, object]) -> TrainingSetup:
        """Without an engine of its own: plain DDP, or the engine that was named beside the file."""
        named = self.given.get("engine")
        engine = Engine.DDP if named is None else coerce_enum("engine", named, Engine)
        found["engine"] = engine
        found["precision"] = self._precision(engine)
        options: dict[str, object] = {}
        if engine is Engine.DDP:
            # accelerate copies the outputs of a mixed-precision model to fp32 (``prepare_model``).
            found["upcast_outputs"] = bool(self._halves())
            options = self._ddp_options()
        if engine is not Engine.DEEPSPEED:
            options |= self._synchronization()
        return self._made(found, options)

    def _ddp_options(self) -> dict[str, object]:
        """DDP's own settings that the Trainer passes on."""
        options: dict[str, object] = {}
        for key in ("find_unused_parameters", "broadcast_buffers", "static_graph"):
            if self.values.get(f"ddp_{key}") is not None:
                options[key] = self.flag(f"ddp_{key}")
        # accelerate passes on what is not its own default, and 25 is (``KwargsHandler.to_kwargs``).
        if self.values.get("ddp_bucket_cap_mb") not in (None, DEFAULT_BUCKET_CAP_MB):
            options["bucket_cap_mb"] = self.count("ddp_bucket_cap_mb", default=1)
        return options

    def _synchronization(self) -> dict[str, object]:
        """Whether gradients are reduced at every micro-batch, where the file says it."""
        kwargs = self._accumulation_options()
        if kwargs.get("sync_each_batch") is None:
            return {}
        where = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
        if not isinstance(kwargs["sync_each_batch"], bool):
            self.refuse(where, "write true or false")
        return {"sync_each_batch": kwargs["sync_each_batch"]}

    def _with_deepspeed(self, found: dict[str, object], file: EngineFile) -> TrainingSetup:
        from memplan.sources.deepspeed_config import deepspeed_fields

        precision = self._precision(Engine.DEEPSPEED)
        given = {
            "num_gpus": self._given("num_gpus", self.base.num_gpus),
            "micro_batch_size": self._per_device(),
            "gradient_accumulation_steps": found["gradient_accumulation_steps"],
            "engine": self.given.get("engine"),
            "zero_stage": self.given.get("zero_stage"),
        }
        if "optimizer" not in file.values:
            given["optimizer"] = found["optimizer"]
        if precision is not Precision.FP32:
            given["precision"] = precision
        read = deepspeed_fields(file.values, given, source=file.source)
        self.notes += read.notes
        if "optimizer" in file.values:
            for name in ("optimizer_options", "optimizer_in_backward"):
                found.pop(name, None)
        made = {**found, "precision": precision, **read.fields}
        made["micro_batch_size"] = found["micro_batch_size"]
        return self._made(made, dict(read.fields["engine_options"]))  # type: ignore[call-overload]

    def _uses_fsdp(self) -> bool:
        value = self.values.get("fsdp")
        if value in (None, False, "", []):
            return False
        if value is True or isinstance(value, str | list):
            return True
        key = "fsdp"
        raise self.wrong(key, "true, or words such as full_shard auto_wrap")

    def _fsdp_file(self) -> EngineFile:
        """``fsdp`` and ``fsdp_config`` as accelerate is told them."""
        from memplan.sources.trainer_fsdp import accelerate_values

        config = dict(self.nested("fsdp_config") or {})
        named = self.given.get("engine")
        if "version" not in config and "fsdp_version" not in config and named is not None:
            engine = coerce_enum("engine", named, Engine)
            config["version"] = 1 if engine is Engine.FSDP1 else 2
        arguments = {"fsdp": self.values.get("fsdp"), "fsdp_config": config}
        try:
            values = accelerate_values(arguments, "no")
        except ConfigError as error:
            msg = f"{self.source}: {error}"
            raise ConfigError(msg) from None
        return EngineFile(values=values, source=f"{self.source}: fsdp_config")

    def _with_accelerate(self, found: dict[str, object], file: EngineFile) -> TrainingSetup:
        from memplan.sources.accelerate_config import accelerate_fields

        # The Trainer tells accelerate its own flags, and accelerate's file stands without any.
        halves = self._halves()
        config = {**file.values, "mixed_precision": halves[0]} if halves else file.values
        names = ("engine", "num_gpus", "num_nodes", "zero_stage")
        given: dict[str, object] = {
            name: self.given[name] for name in names if self.given.get(name) is not None
        }
        given["micro_batch_size"] = self._per_device()
        read = accelerate_fields(config, given, source=file.source, folder=self.folder)
        fields = dict(read.fields)
        # How the weights are loaded is said where the answer names its precision.
        self.notes += [note for note in read.notes if not note.startswith("mixed_precision")]
        if self.half_weights and not halves and fields.get("precision") == "fp32":
            fields["precision"] = Precision.BF16
        if self.half_weights and fields.get("precision") == Precision.BF16_AMP.value:
            fields["precision"] = Precision.BF16_AUTOCAST
        if found["checkpointing"] is Recomputation.FULL:
            fields["checkpointing"] = Recomputation.FULL
        options = dict(fields["engine_options"])  # type: ignore[call-overload]
        if fields.get("engine") != Engine.DEEPSPEED.value:
            options |= self._synchronization()
        if fields.get("engine") == Engine.FSDP1.value and self._is_reentrant():
            options["reentrant_checkpointing"] = True
        fields["micro_batch_size"] = found["micro_batch_size"]
        missing = (*found["left_out"], *fields.get("left_out", ()))  # type: ignore[misc]
        return self._made({**found, **fields, "left_out": missing}, options)

    def _made(self, found: dict[str, object], options: dict[str, object]) -> TrainingSetup:
        chosen = self._given_precision()
        if chosen is not None:
            found["precision"] = chosen
        for name in ("num_gpus", "num_nodes"):
            if self.given.get(name) is not None:
                found[name] = self.given[name]
        if options or "engine_options" in found:
            found["engine_options"] = options
        return replace(self.base, **found)  # type: ignore[arg-type]

    # -- values ----------------------------------------------------------------------------------

    def _per_device(self) -> int:
        return self.count("per_device_train_batch_size", default=8)

    def _given(self, name: str, default: object) -> object:
        value = self.given.get(name)
        return default if value is None else value

    def _accumulation(self) -> int:
        steps = self.count("gradient_accumulation_steps", default=1)
        more = self._accumulation_options().get("num_steps")
        if more in (None, 1, steps):
            return steps
        where = "accelerator_config.gradient_accumulation_kwargs.num_steps"
        if steps > 1 or isinstance(more, bool) or not isinstance(more, int) or more < 1:
            self.refuse(where, "write gradient_accumulation_steps instead")
        return more

    def _accumulation_options(self) -> Mapping[str, object]:
        config = self.nested("accelerator_config") or {}
        self._check_options("accelerator_config", config, _ACCELERATOR_OPTIONS)
        if config.get("split_batches"):
            advice = "is not modelled; write the batch of one GPU and leave it out"
            self.refuse("accelerator_config.split_batches", advice)
        kwargs = config.get("gradient_accumulation_kwargs") or {}
        where = "accelerator_config.gradient_accumulation_kwargs"
        if not isinstance(kwargs, Mapping):
            self.refuse(where, "write a mapping")
        self._check_options(where, kwargs, _ACCUMULATION_OPTIONS)
        return kwargs

    def _check_options(
        self, where: str, options: Mapping[str, object], known: tuple[str, ...]
    ) -> None:
        for name in options:
            if name not in known:
                guess = did_you_mean(str(name), known)
                self.refuse(f"{where}.{name}", f"there is no such setting.{guess}")

    def _compilation(self) -> Compilation:
        """The whole model, by inductor; ``eager`` and ``aot_eager`` write every tensor as eager does."""
        backend = self.values.get("torch_compile_backend") or "inductor"
        if backend not in ("inductor", "eager"):
            self.refuse(
                "torch_compile_backend", f"{shown(backend)} is not modelled; inductor is, and eager"
            )
        return Compilation.MODEL if backend == "inductor" else Compilation.NONE

    def _graphs(self) -> tuple[str, ...]:
        """Modes of torch.compile that record CUDA graphs, which have a pool of their own."""
        mode = self.values.get("torch_compile_mode")
        if mode in (None, "", "default", "max-autotune-no-cudagraphs"):
            return ()
        return (f"torch_compile_mode {mode} (CUDA graphs' own pool)",)

    def _compiles(self) -> bool:
        """Naming a backend or a mode turns it on (``__post_init__``)."""
        named = ("torch_compile_backend", "torch_compile_mode")
        return self.flag("torch_compile") or any(self.values.get(key) for key in named)

    def _checkpointing(self) -> Recomputation:
        """transformers 5.23 renamed it, and the new name goes first (``__post_init__``)."""
        named = "activation_checkpointing"
        key = named if self.values.get(named) is not None else "gradient_checkpointing"
        if not self.flag(key, default=self.trl is not None):
            return Recomputation.NONE
        if key not in self.values:
            self.notes.append(f"gradient_checkpointing is on: {self.trl}'s default")
        options = self.nested(f"{key}_kwargs") or {}
        self._check_options(f"{key}_kwargs", options, _CHECKPOINT_OPTIONS)
        if options.get("every_n_layers") not in (None, 1):
            self.refuse(
                f"{key}_kwargs.every_n_layers", "changes memory and is not modelled; remove it"
            )
        return Recomputation.FULL

    def _offloading(self) -> dict[str, object]:
        """What goes to CPU RAM between the passes: by TRL's hooks, or inputs of checkpointed layers
        (transformers 5.23, modeling_utils.py, ``_activation_checkpointing_enable``)."""
        if self.trl is not None and self.flag("activation_offloading"):
            return {"offload_activations": ActivationOffload.STREAMED}
        for name in ("gradient", "activation"):
            options = self.nested(f"{name}_checkpointing_kwargs") or {}
            if options.get("offload") and self._checkpointing() is not Recomputation.NONE:
                return {"offload_activations": ActivationOffload.CHECKPOINTS}
        return {}

    def _is_reentrant(self) -> bool:
        """Whether layers are checkpointed as transformers before 5 did it where nothing was said."""
        options = [
            self.nested(f"{name}_checkpointing_kwargs") or {} for name in ("gradient", "activation")
        ]
        return any(each.get("use_reentrant") is True for each in options)

    def _given_precision(self) -> Precision | None:
        """A precision that was named beside the file, which goes over its flags."""
        named = self.given.get("precision")
        value = getattr(named, "value", named)
        return next((each for each in Precision if each.value == value), None)

    def _halves(self) -> list[str]:
        """The flag that is on, in the Trainer's words."""
        chosen = self._given_precision()
        if chosen is not None:
            plain = chosen in (Precision.FP32, Precision.BF16)
            return [] if plain else [chosen.value[:4]]
        halves = [name for name in ("bf16", "fp16") if self.flag(name)]
        if len(halves) == 2:
            self.refuse("fp16", "and bf16 are both true; the Trainer takes one")
        if self.trl is not None and not halves and self.values.get("bf16") is None:
            self.notes.append(f"bf16 is on: {self.trl}'s default")
            return ["bf16"]
        return halves

    def _precision(self, engine: Engine) -> Precision:
        halves = self._halves()
        if self.half_weights and engine is Engine.DDP:
            return Precision.BF16_AUTOCAST if halves else Precision.BF16
        return _PRECISIONS[(halves[0], engine)] if halves else Precision.FP32
