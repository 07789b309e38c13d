"""The setup that a file of arguments makes under the engine that it is launched with."""

from collections.abc import Mapping
from dataclasses import replace

from memplan.errors import ConfigError
from memplan.memory.ddp import DEFAULT_BUCKET_CAP_MB
from memplan.sources.trainer.keys import left_out
from memplan.sources.trainer.launch import EngineFile
from memplan.sources.trainer.optimizer import read_optimizer
from memplan.sources.trainer.trl import TrlFlags
from memplan.training.choices import Recomputation
from memplan.training.coercion import coerce_enum
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.engines import has_cpu_form
from memplan.training.optimizers.table import row_of
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup

_CPU_FORMS = {Optimizer.BNB_LION: Optimizer.LION_FUSED}
"""What accelerate makes DeepSpeed's own of otherwise than CPU Adam."""


_PLAIN_TORCH = (Optimizer.TORCHAO_ADAMW_8BIT, Optimizer.TORCHAO_ADAMW_4BIT)
"""Optimizers of torch's own operations, which run on either processor (torchao, ``optim/adam.py``)."""


def _steps_on_cpu(fields: Mapping[str, object]) -> bool:
    """Whether states are offloaded, which are stepped where they lie."""
    return fields.get("offload_optimizer") not in (None, "none")


class Arguments(TrlFlags):
    """One file of arguments, as a whole."""

    def setup(self, deepspeed: EngineFile | None, accelerate: EngineFile | None) -> TrainingSetup:
        """The setup that the arguments and the base make together."""
        found: dict[str, object] = {
            "micro_batch_size": self.count("per_device_train_batch_size", default=8),
            "gradient_accumulation_steps": self.accumulation(),
        }
        found["checkpointing"] = self.checkpointing()
        if self.given.get("evaluation") is None:
            found["evaluation"] = self.evaluation()
        found |= self.offloading()
        found |= read_optimizer(self)
        found |= self.liger()
        if self.compiles():
            found["compile"] = self.compilation()
        found["left_out"] = (*self.base.left_out, *left_out(self.values), *self.graphs())
        if self.trl is not None:
            self.read_trl(found)
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

    def _alone(self, found: dict[str, object]) -> TrainingSetup:
        """Without an engine of its own: plain DDP, or the engine that was named beside the file."""
        named = self.given.get("engine")
        engine = Engine.DDP if named is None else coerce_enum("engine", named, Engine)
        found["engine"] = engine
        found["precision"] = self.precision(engine)
        options: dict[str, object] = {}
        if engine is Engine.DDP:
            # accelerate copies the outputs of a mixed-precision model to fp32 (``prepare_model``).
            found["upcast_outputs"] = bool(self.halves())
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
        kwargs = self.accumulation_options()
        if kwargs.get("sync_each_batch") is None:
            return {}
        where = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
        if not isinstance(kwargs["sync_each_batch"], bool):
            self.refuse(where, "write true or false")
        return {"sync_each_batch": kwargs["sync_each_batch"]}

    def _with_deepspeed(self, found: dict[str, object], file: EngineFile) -> TrainingSetup:
        from memplan.sources.deepspeed_config import deepspeed_fields

        precision = self.precision(Engine.DEEPSPEED)
        given = {
            "num_gpus": self.given_or("num_gpus", self.base.num_gpus),
            "micro_batch_size": self.per_device(),
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
        if "optimizer" not in file.values and _steps_on_cpu(read.fields):
            is_forced = file.values.get("zero_force_ds_cpu_optimizer", True) is not False
            self._take_cpu_form(found, is_forced=is_forced)
        if "optimizer" in file.values:
            for name in ("optimizer_options", "optimizer_in_backward"):
                found.pop(name, None)
        made = {**found, "precision": precision, **read.fields}
        made["micro_batch_size"] = found["micro_batch_size"]
        return self._made(made, dict(read.fields["engine_options"]))  # type: ignore[call-overload]

    def _take_cpu_form(self, found: dict[str, object], *, is_forced: bool) -> None:
        """DeepSpeed's CPU Adam, of which accelerate makes one for every optimizer that has no form for the CPU.

        ``zero_force_ds_cpu_optimizer: false`` leaves each as it is.

        (accelerate 1.14, accelerator.py: ``_prepare_deepspeed``; utils/deepspeed.py: ``map_pytorch_optim_to_deepspeed``)
        """
        named = found["optimizer"]
        assert isinstance(named, Optimizer)
        if has_cpu_form(row_of(named)) or not (is_forced or named in _PLAIN_TORCH):
            return
        made = _CPU_FORMS.get(named, Optimizer.ADAMW_FUSED)
        found["optimizer"] = made
        found.pop("optimizer_options", None)
        if not is_forced:
            self.notes.append(
                f"optim: {named.value} runs on the CPU, where states are offloaded: counted as {made.value} there, an upper bound "
                "of CPU RAM"
            )
            return
        self.notes.append(
            f"optim: of {named.value} accelerate makes DeepSpeed's {made.value} on the CPU, where states are offloaded"
        )

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
        from memplan.sources.trainer.fsdp import accelerate_values

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
        halves = self.halves()
        config = {**file.values, "mixed_precision": halves[0]} if halves else file.values
        names = ("engine", "num_gpus", "num_nodes", "zero_stage")
        given: dict[str, object] = {
            name: self.given[name] for name in names if self.given.get(name) is not None
        }
        given["micro_batch_size"] = self.per_device()
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
        if fields.get("engine") == Engine.FSDP1.value and self.is_reentrant():
            options["reentrant_checkpointing"] = True
        fields["micro_batch_size"] = found["micro_batch_size"]
        missing = (*found["left_out"], *fields.get("left_out", ()))  # type: ignore[misc]
        return self._made({**found, **fields, "left_out": missing}, options)

    def _made(self, found: dict[str, object], options: dict[str, object]) -> TrainingSetup:
        chosen = self.given_precision()
        if chosen is not None:
            found["precision"] = chosen
        for name in ("num_gpus", "num_nodes"):
            if self.given.get(name) is not None:
                found[name] = self.given[name]
        if options or "engine_options" in found:
            found["engine_options"] = options
        return replace(self.base, **found)  # type: ignore[arg-type]
