"""An accelerate configuration file, read into the fields of a ``TrainingSetup``.

What is read is what ``accelerate launch`` (1.15) makes of the file: keys that are absent take the
launcher's defaults, and what accelerate adds of its own is added (autocast and fp32 outputs on top of
FSDP1's mixed precision, ``prepare_model``; not on FSDP2, ``_prepare_fsdp2``; ``no_sync`` on all
micro-batches but the last). ``deepspeed_config`` becomes the ``ds_config`` that accelerate makes of it
(``DeepSpeedPlugin``), or names one, whose path is relative to the file's folder or one above it. A key that accelerate does not have is refused, and so is one that
changes memory in a way that is not modelled. A value that contradicts an option given beside the file
is refused too.
"""

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import NoReturn

from memplan.errors import ConfigError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.memory.engine_options import FP8_ALL_GATHER
from memplan.sources.deepspeed_keys import is_comment
from memplan.text import shown
from memplan.training.choices_of_kernels.kernels import ATTENTION_NAMES
from memplan.training.compilation import Compilation

_IGNORED = frozenset({
    "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank",
    "main_training_function", "rdzv_backend", "same_network", "gpu_ids", "main_process_ip",
    "main_process_port", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone",
    "command_file", "commands", "tpu_vm", "mpirun_config", "mixed_precision", "num_machines",
    "num_processes", "distributed_type", "fsdp_config", "parallelism_config", "dynamo_config",
    "dynamo_backend", "use_cpu", "deepspeed_config", "fp8_config",
})  # fmt: skip
"""Keys that are read below, or change no memory."""

_REFUSED = ("megatron_lm_config",)
"""Sections that are not modelled from this file, unless they are empty."""

_FP8_BACKENDS = {"TE": "te-delayed", "AO": "torchao-tensorwise"}
"""``fp8_config.backend``, and the recipe that it is by default (accelerate 1.15, ``FP8BackendType``)."""
_FP8_KEYS = (
    "backend", "use_autocast_during_eval", "margin", "interval", "format",
    "amax_history_length", "amax_history_len", "amax_compute_algorithm", "amax_compute_algo",
    "override_linear_precision", FP8_ALL_GATHER, "pad_inner_dim",
)  # fmt: skip
"""Its keys: how scales are found changes no memory worth a byte."""

_FSDP_KEYS = (
    "version", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "min_num_params",
    "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "offload_params",
    "state_dict_type", "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states",
    "activation_checkpointing", "activation_checkpointing_offload", "limit_all_gathers",
    "ignored_modules",
)  # fmt: skip
_LAYER_CLASS = re.compile(r"(?!.*(?:MoE|Moe|Expert)s?Block$)\w*(?:Layer|Block)")
"""Names of classes that are whole layers: not ``MixtralSparseMoeBlock``, nor ``LlamaMLP``."""
_DEEPSPEED_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Keys of ``deepspeed_config``, and those of a ds_config that they stand for."""
_DEEPSPEED_LAUNCH_KEYS = (
    "deepspeed_config_file", "zero3_init_flag", "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter", "transformer_moe_cls_names",
    "seq_parallel_communication_data_type",
)  # fmt: skip
"""Its other keys; the last is DeepSpeed's own, which ``accelerate launch`` hands to nobody."""
_PARALLEL_KEYS = (
    "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_comm_strategy",
    "cp_backend", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation",
)  # fmt: skip

_STRATEGIES = {
    "FULL_SHARD": "full_shard", "1": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op", "2": "shard_grad_op",
    "NO_SHARD": "no_shard", "3": "no_shard",
    "HYBRID_SHARD": "hybrid", "4": "hybrid",
}  # fmt: skip
_PREFETCH = {
    "BACKWARD_PRE": "backward_pre", "1": "backward_pre",
    "BACKWARD_POST": "backward_post", "2": "backward_post",
    "NO_PREFETCH": "no_prefetch", "3": "no_prefetch",
}  # fmt: skip
_STATE_DICTS = {
    "FULL_STATE_DICT": "full_state_dict", "1": "full_state_dict",
    "LOCAL_STATE_DICT": "sharded_state_dict", "2": "sharded_state_dict",
    "SHARDED_STATE_DICT": "sharded_state_dict", "3": "sharded_state_dict",
}  # fmt: skip
_OPTION_KEYS = {"init_device": "cpu_ram_efficient_loading"}
"""Engine options that a key of another name says."""
_OWN_WAYS = frozenset({
    "wrapping", "autocast", "sync_each_batch", "init_device", "state_dict_type",
    "reshard_after_forward", "backward_prefetch", "forward_prefetch", "use_orig_params",
})  # fmt: skip
"""What accelerate does by itself where no key says it: options given beside the file say otherwise."""
_TRUE = ("true", "1", "yes", "y", "t", "on")
_FALSE = ("false", "0", "no", "n", "f", "off")
_WRAP_POLICIES = {
    "TRANSFORMER_BASED_WRAP": "layers",
    "NO_WRAP": "none",
    "SIZE_BASED_WRAP": "size",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AccelerateFile:
    """What a configuration file says, in memplan's words."""

    fields: dict[str, object]
    """Fields of ``TrainingSetup`` that the file decides; ``engine_options`` among them, those given
    beside the file included."""
    notes: tuple[str, ...] = ()
    """Keys that may change memory and that the answer should name."""


def read_accelerate_config(
    path: str | Path, given: Mapping[str, object] | None = None
) -> AccelerateFile:
    """Read an accelerate YAML (or JSON) file.

    ``given`` are the fields of ``TrainingSetup`` that were given beside it. Raises ``ConfigError``
    where the file cannot be read, has a key that is unknown or not modelled, or contradicts
    ``given``.
    """
    from memplan.sources.files import read_mapping

    values = read_mapping(path)
    return accelerate_fields(values, given or {}, source=str(path), folder=Path(path).parent)


def accelerate_fields(
    config: Mapping[str, object],
    given: Mapping[str, object],
    *,
    source: str,
    folder: Path = Path(),
) -> AccelerateFile:
    """The same from a mapping; ``source`` names it in errors, ``folder`` is where it was read.

    >>> config = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
    >>> accelerate_fields(config, {}, source="a.yaml").fields["precision"]
    'bf16-amp'
    """
    return _Reader(config, given, source, folder).read()


@dataclass(slots=True)
class _Reader:
    config: Mapping[str, object]
    given: Mapping[str, object]
    source: str
    folder: Path
    fields: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self) -> AccelerateFile:
        self._check_keys()
        kind = str(self.config.get("distributed_type", "NO")).upper()
        self._read_sizes(kind)
        if kind == "FSDP":
            self._read_fsdp()
        elif kind == "DEEPSPEED":
            self._read_deepspeed()
        elif kind in ("NO", "MULTI_GPU", *_OTHER_CARDS):
            self._set("engine", "ddp", "distributed_type")
            self._read_precision("amp", upcasts=True)
            if kind in _OTHER_CARDS:
                self.notes.append(f"distributed_type {kind}: DDP on {_OTHER_CARDS[kind]}: name one")
        else:
            guess = did_you_mean(kind, [each.lower() for each in _KINDS])
            self._refuse("distributed_type", f"{kind[:40]} is not read from this file.{guess}")
        for section in ("fsdp_config", "deepspeed_config"):
            if self.config.get(section) and kind != section.removesuffix("_config").upper():
                self.notes.append(f"{section} does nothing with distributed_type {kind}")
        self._read_parallelism()
        self._read_compilation()
        if kind != "DEEPSPEED":
            self._add_given_options()
        self.fields["engine_options"] = self.options
        return AccelerateFile(fields=self.fields, notes=tuple(self.notes))

    # -- keys ------------------------------------------------------------------------------------

    def _check_keys(self) -> None:
        known = [*_IGNORED, *_REFUSED]
        for key, value in self.config.items():
            if is_comment(key):
                continue
            if key in _REFUSED and value:
                self._refuse(key, "is not modelled from this file; leave it out")
            if key not in known:
                guess = did_you_mean(str(key), known)
                self._refuse(str(key), f"accelerate has no such key.{guess}")
        if self._truth("use_cpu", self.config.get("use_cpu"), default=False):
            self._refuse("use_cpu", "there is no GPU memory to plan on a CPU")

    def _section(self, name: str, prefix: str, known: tuple[str, ...]) -> dict[str, object]:
        section = self.config.get(name) or {}
        if not isinstance(section, Mapping):
            self._refuse(name, "expected a mapping")
        found = {}
        for key, value in section.items():
            if is_comment(key):
                continue
            short = str(key).removeprefix(prefix)
            if short not in known:
                self._refuse(
                    f"{name}.{key}", f"accelerate has no such key.{did_you_mean(short, known)}"
                )
            found[short] = value
        return found

    # -- FSDP ------------------------------------------------------------------------------------

    def _read_fsdp(self) -> None:
        section = self._section("fsdp_config", "fsdp_", _FSDP_KEYS)
        version = str(section.get("version", 1))
        if version not in ("1", "2"):
            self._refuse("fsdp_config.fsdp_version", f"is 1 or 2, not {version}")
        if section.get("ignored_modules"):
            self._refuse("fsdp_config.fsdp_ignored_modules", "is not modelled; leave it out")
        self._read_shared(section, version)
        self._check_units(section)
        if version == "1":
            self._read_version_1(section)
        else:
            self._read_version_2(section)

    def _check_units(self, section: Mapping[str, object]) -> None:
        """Name units that are parts of layers: what is beside them is gathered with the root, whole."""
        for key in ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"):
            value = section.get(key) or ()
            names = value.split(",") if isinstance(value, str) else value
            if not isinstance(names, list | tuple):
                self._refuse(f"fsdp_config.fsdp_{key}", f"is a list of classes, not {shown(value)}")
            classes = [str(each).strip() for each in names if str(each).strip()]
            if classes and not any(_LAYER_CLASS.fullmatch(each) for each in classes):
                text = f"fsdp_{key} {','.join(classes)} (what is beside these parts of layers lies whole in the root's unit)"
                self.fields["left_out"] = (text,)

    def _read_shared(self, section: Mapping[str, object], version: str) -> None:
        if self._flag(section, "offload_params", default=False):
            self._set("offload_param", "cpu", "fsdp_config.fsdp_offload_params")
            self._set("offload_optimizer", "cpu", "fsdp_config.fsdp_offload_params")
        if self._flag(section, "activation_checkpointing", default=False):
            self._set("checkpointing", "full", "fsdp_config.fsdp_activation_checkpointing")
        if self._flag(section, "activation_checkpointing_offload", default=False):
            key = "fsdp_config.fsdp_activation_checkpointing_offload"
            if version == "1" or not self._flag(section, "activation_checkpointing", default=False):
                self._refuse(key, "needs fsdp_version 2 and fsdp_activation_checkpointing: true")
            self._set("offload_activations", "checkpoints", key)
        usual = "FULL_STATE_DICT" if version == "1" else "SHARDED_STATE_DICT"
        self.options["state_dict_type"] = self._choice(
            section, "state_dict_type", usual, _STATE_DICTS
        )
        efficient = self._flag(section, "cpu_ram_efficient_loading", default=True)
        self.options["init_device"] = "meta" if efficient else "cpu"

    def _read_version_1(self, section: Mapping[str, object]) -> None:
        self._set("engine", "fsdp1", "fsdp_config.fsdp_version")
        named = "sharding_strategy" if "sharding_strategy" in section else "reshard_after_forward"
        strategy = self._choice(section, named, "FULL_SHARD", _STRATEGIES)
        self._set("fsdp_strategy", strategy, f"fsdp_config.fsdp_{named}")
        self.options["wrapping"] = self._wrap_policy(section)
        prefetch = dict(section)
        prefetch.setdefault("backward_prefetch", section.get("backward_prefetch_policy"))
        self.options["backward_prefetch"] = self._choice(
            prefetch, "backward_prefetch", "NO_PREFETCH", _PREFETCH
        )
        self.options["forward_prefetch"] = self._flag(section, "forward_prefetch", default=False)
        self.options["use_orig_params"] = self._flag(section, "use_orig_params", default=True)
        self.options["sync_each_batch"] = False
        if self._read_precision("mixed", upcasts=True):
            self.options["autocast"] = True

    def _read_version_2(self, section: Mapping[str, object]) -> None:
        self._set("engine", "fsdp", "fsdp_config.fsdp_version")
        if "sharding_strategy" in section:
            self.notes.append("fsdp_sharding_strategy: FSDP2 goes by fsdp_reshard_after_forward")
        if self._wrap_policy(section) != "layers":
            self._refuse(
                "fsdp_config.fsdp_auto_wrap_policy",
                "FSDP2 without a unit for each layer is not modelled; use TRANSFORMER_BASED_WRAP",
            )
        if self._flag(section, "forward_prefetch", default=False):
            self._refuse("fsdp_config.fsdp_forward_prefetch", "accelerate refuses it with FSDP2")
        self.options["reshard_after_forward"] = self._flag(
            section, "reshard_after_forward", default=True
        )
        self.options["wrapping"] = "accelerate"
        self._read_precision("mixed", upcasts=False)

    # -- DeepSpeed -------------------------------------------------------------------------------

    def _read_deepspeed(self) -> None:
        """As ``DeepSpeedPlugin`` does: make a ds_config, or fill in the file that is named."""
        from memplan.sources.deepspeed_config import deepspeed_fields

        section = self._section("deepspeed_config", "", (*_DEEPSPEED_KEYS, *_DEEPSPEED_LAUNCH_KEYS))
        path = section.get("deepspeed_config_file")
        if path in (None, "none", ""):
            config, source = self._made_config(section), f"{self.source}: deepspeed_config"
        else:
            config, source = self._named_config(section, path)
        self._add_half(config)
        self._add_leaves(config, section)
        shared = self._section("parallelism_config", "parallelism_config_", _PARALLEL_KEYS)
        if shared.get("sp_size") not in (None, 1):
            config.setdefault("sequence_parallel_size", shared["sp_size"])
        sizes = {name: self.fields[name] for name in ("num_gpus",) if name in self.fields}
        given = {**sizes, **{name: each for name, each in self.given.items() if each is not None}}
        read = deepspeed_fields(config, given, source=source)
        self.fields |= read.fields
        self.options = dict(read.fields["engine_options"])  # type: ignore[call-overload]
        self.notes += read.notes
        self._read_zero_init(section)

    def _add_leaves(self, config: dict[str, object], section: Mapping[str, object]) -> None:
        """Mixtures that stage 3 gathers at once (``DeepSpeedPlugin.set_moe_leaf_modules``)."""
        named = (
            section.get(f"{each}_cls_names") for each in ("deepspeed_moe_layer", "transformer_moe")
        )
        classes = [name.strip() for each in named if each for name in str(each).split(",")]
        zero = config.get("zero_optimization")
        if classes and isinstance(zero, Mapping):
            config["zero_optimization"] = {**zero, "leaf_module": {"classes": classes}}

    def _read_zero_init(self, section: Mapping[str, object]) -> None:
        """``zero3_init_flag`` decides whether the model is built in shards; stage 3 alone can."""
        flag = section.get("zero3_init_flag")
        key = "deepspeed_config.zero3_init_flag"
        if flag is None or self.fields.get("zero_stage") != ZERO_3:
            return
        wanted = self._truth(key, flag, default=True)
        if self.options.setdefault("zero_init", wanted) is not wanted:
            self._refuse(key, f"the file says {wanted}, the options say {not wanted}")

    def _made_config(self, section: Mapping[str, object]) -> dict[str, object]:
        zero: dict[str, object] = {"stage": section.get("zero_stage", 2)}
        for part in ("optimizer", "param"):
            device = section.get(f"offload_{part}_device")
            zero[f"offload_{part}"] = {"device": "none" if device is None else device}
        saves = section.get("zero3_save_16bit_model")
        if saves is not None:
            zero["stage3_gather_16bit_weights_on_model_save"] = saves
        return {
            "gradient_accumulation_steps": section.get("gradient_accumulation_steps", "auto"),
            "zero_optimization": zero,
        }

    def _named_config(
        self, section: Mapping[str, object], path: object
    ) -> tuple[dict[str, object], str]:
        """The file that is named, with what it leaves to ``"auto"`` filled in."""
        from memplan.sources.files import read_mapping
        from memplan.sources.launched_from import launched_from

        key = "deepspeed_config.deepspeed_config_file"
        if not isinstance(path, str):
            self._refuse(key, "write the path of a file")
        named = launched_from(self.folder, path)
        config = dict(read_mapping(named))
        if not isinstance(config.get("zero_optimization"), Mapping):
            self._refuse(key, f"{path} has no zero_optimization, and accelerate asks for it")
        config.setdefault("gradient_accumulation_steps", 1)
        for name, place in _DEEPSPEED_KEYS.items():
            if section.get(name) is not None:
                _fill(config, place.split("."), section[name])
                if not _is_filled(config, place.split("."), section[name]):
                    self._refuse(
                        f"deepspeed_config.{name}", f"{path} has its own {place}; give one"
                    )
        return config, str(named)

    def _add_half(self, config: dict[str, object]) -> None:
        """``set_mixed_precision``: the section of the format is added where there is none."""
        name = str(self.config.get("mixed_precision") or "no").lower()
        if name not in ("no", "false", "bf16", "fp16"):
            msg = f"{name} is not modelled with DeepSpeed; use no, fp16 or bf16"
            self._refuse("mixed_precision", msg)
        for half in ("bf16", "fp16"):
            wanted = half == name
            section = config.setdefault(half, {"enabled": wanted})
            if isinstance(section, Mapping) and section.get("enabled") == "auto":
                config[half] = {**section, "enabled": wanted}

    def _wrap_policy(self, section: Mapping[str, object]) -> str:
        policy = self._choice(section, "auto_wrap_policy", "NO_WRAP", _WRAP_POLICIES)
        if policy == "size":
            self._refuse(
                "fsdp_config.fsdp_auto_wrap_policy",
                "units by size are not modelled; use TRANSFORMER_BASED_WRAP",
            )
        return policy

    # -- the rest --------------------------------------------------------------------------------

    def _read_precision(self, suffix: str, *, upcasts: bool) -> bool:
        """Set the precision; says whether autocast would be on."""
        name = str(self.config.get("mixed_precision") or "no").lower()
        if name in ("no", "false"):
            if "precision" not in self.given:
                self.fields["precision"] = "fp32"
                self.notes.append("mixed_precision: no: the model is taken to be loaded in fp32")
            return False
        if name not in ("bf16", "fp16", "fp8"):
            self._refuse("mixed_precision", f"{name} is not modelled; use no, fp16, bf16 or fp8")
        if name == "fp8":
            self._read_fp8()
            name = "bf16"
        self._set("precision", f"{name}-{suffix}", "mixed_precision")
        if upcasts and self.given.get("upcast_outputs") is None:
            self.fields["upcast_outputs"] = True
        return True

    def _read_fp8(self) -> None:
        """Which linear layers take the place of torch's; what is not narrow is under bf16 autocast."""
        section = self._section("fp8_config", "fp8_", _FP8_KEYS)
        backend = str(section.get("backend") or "").upper()
        if backend not in _FP8_BACKENDS:
            known = " or ".join(_FP8_BACKENDS)
            self._refuse("fp8_config.backend", f"{backend or 'none'} is not modelled; use {known}")
        if section.get("override_linear_precision") not in (None, False, [False] * 3):
            self._refuse("fp8_config.override_linear_precision", "is not modelled; leave it out")
        self._set("fp8", _FP8_BACKENDS[backend], "fp8_config.backend")
        is_fsdp2 = self.fields.get("engine") == "fsdp"
        gathers = self._truth(FP8_ALL_GATHER, section.get(FP8_ALL_GATHER), default=True)
        if is_fsdp2 and gathers and backend == "AO":
            self.options[FP8_ALL_GATHER] = True

    def _read_sizes(self, kind: str) -> None:
        processes = self._processes(kind)
        if processes is not None:
            self._set("num_gpus", processes if kind != "NO" else 1, "num_processes")
        machines = self._count("num_machines")
        if machines is not None:
            self._set("num_nodes", machines, "num_machines")

    def _processes(self, kind: str) -> int | None:
        """As many as are said, or as cards are named; else as the machine has, which no file says."""
        found = self._count("num_processes")
        cards = self.config.get("gpu_ids")
        if found is None and cards not in (None, "all", ""):
            found = len([each for each in str(cards).split(",") if each.strip()])
        if found is None and kind != "NO" and self.given.get("num_gpus") is None:
            self.notes.append(
                "num_processes is not said: accelerate takes every GPU it finds; counted is 1: give num_gpus"
            )
        return found

    def _read_parallelism(self) -> None:
        section = self._section("parallelism_config", "parallelism_config_", _PARALLEL_KEYS)
        for key in ("tp_size", "cp_size", "sp_size", "dp_replicate_size", "dp_shard_size"):
            value = section.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                self._refuse(f"parallelism_config.{key}", f"expected a whole number, got {value!r}")
        for key, name in (("tp_size", "tensor_parallel"), ("cp_size", "context_parallel")):
            if section.get(key) not in (None, 1):
                self._set(name, section[key], f"parallelism_config.{key}")
        method = section.get("cp_comm_strategy")
        if method not in (None, "allgather") and section.get("cp_size") not in (None, 1):
            self.options["context_parallel_rotate_method"] = method
        if section.get("sp_size") not in (None, 1):
            self._set("context_parallel", section["sp_size"], "parallelism_config.sp_size")
            self.fields["context_parallel_kind"] = "all-to-all"
            if section.get("sp_attn_implementation") is not None:
                self._read_ulysses_attention(section["sp_attn_implementation"])
        if section.get("dp_replicate_size") not in (None, 1):
            if str(self.fields.get("engine")) not in ("fsdp", "fsdp1"):
                self._refuse("parallelism_config.dp_replicate_size", "is read with FSDP alone")
            self.options["data_parallel_replicate_degree"] = section["dp_replicate_size"]
            if self.fields.get("engine") == "fsdp1":
                self._refuse("parallelism_config.dp_replicate_size", "needs fsdp_version 2")

    def _read_ulysses_attention(self, named: object) -> None:
        """The model's own: DeepSpeed puts itself around the kernel of this name alone (``register_with_transformers``)."""
        key = "parallelism_config.sp_attn_implementation"
        kernel = ATTENTION_NAMES.get(str(named))
        if kernel in (None, "eager"):
            self._refuse(key, f"{named!r:.40} is none of {', '.join(list(ATTENTION_NAMES)[1:])}")
        self._set("attention", kernel, key)

    def _read_compilation(self) -> None:
        section = self.config.get("dynamo_config") or {}
        if not isinstance(section, Mapping):
            self._refuse("dynamo_config", "expected a mapping")
        backend = section.get("dynamo_backend", self.config.get("dynamo_backend", "NO"))
        if str(backend).upper() in ("NO", "NONE", "EAGER"):
            return
        if str(backend).upper() != "INDUCTOR":
            self._refuse(
                "dynamo_config.dynamo_backend", f"{backend} is not modelled; inductor is, and eager"
            )
        key = "dynamo_use_regional_compilation"
        regional = self._truth(f"dynamo_config.{key}", section.get(key), default=False)
        scope = Compilation.LAYER if regional else Compilation.MODEL
        self._set("compile", value=scope, key="dynamo_config.dynamo_backend")

    def _add_given_options(self) -> None:
        beside = self.given.get("engine_options") or {}
        options = dict(beside.items() if isinstance(beside, Mapping) else beside)  # type: ignore[call-overload]
        section = self.config.get("fsdp_config")
        keys = section if isinstance(section, Mapping) else {}
        said = {str(key).removeprefix("fsdp_") for key in keys}
        for name, value in options.items():
            is_said = _OPTION_KEYS.get(name, name) in said or name not in _OWN_WAYS
            if is_said and name in self.options and self.options[name] != value:
                self._refuse(name, f"the file says {self.options[name]}, the options say {value}")
            self.options[name] = value

    # -- values ----------------------------------------------------------------------------------

    def _set(self, name: str, value: object, key: str) -> None:
        if name in self.given:
            beside = self.given[name]
            plain = getattr(beside, "value", beside)
            if plain is not None and plain != value:
                self._refuse(key, f"the file says {name} {value}, the options say {plain}")
        self.fields[name] = value

    def _count(self, key: str) -> int | None:
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(key, f"expected a whole number, got {value!r}")
        if value < 1:
            self._refuse(key, f"write a whole number from 1 up, not {value}")
        return value

    def _flag(self, section: Mapping[str, object], key: str, *, default: bool) -> bool:
        return self._truth(f"fsdp_config.fsdp_{key}", section.get(key), default=default)

    def _truth(self, key: str, value: object, *, default: bool) -> bool:
        if value is None:
            return default
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE):
            self._refuse(key, f"expected true or false, got {value!r:.60}")
        return text in _TRUE

    def _choice(
        self, section: Mapping[str, object], key: str, usual: str, known: Mapping[str, str]
    ) -> str:
        value = section.get(key)
        name = usual if value is None else str(value).upper()
        if name not in known:
            names = [each for each in known if not each.isdigit()]
            self._refuse(
                f"fsdp_config.fsdp_{key}",
                f"{value!r} is not one of {', '.join(names)}.{did_you_mean(name, names)}",
            )
        return known[name]

    def _refuse(self, key: str, problem: str) -> NoReturn:
        msg = f"{self.source}: {key}: {problem}"
        raise ConfigError(msg)


ZERO_3 = 3
_OTHER_CARDS = {
    "MULTI_XPU": "Intel's cards", "MULTI_NPU": "Huawei's cards", "MULTI_HPU": "Intel's Gaudi",
}  # fmt: skip
"""What is DDP on other makers' cards (``DistributedType``)."""
_KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", *_OTHER_CARDS)
"""Values of ``distributed_type`` that are read."""


def _fill(config: dict[str, object], place: list[str], value: object) -> None:
    """Put the value where the file says ``"auto"``."""
    *folders, last = place
    for name in folders:
        inner = config.get(name)
        if not isinstance(inner, Mapping):
            return
        config[name] = inner = dict(inner)
        config = inner
    if config.get(last) == "auto":
        config[last] = value


def _is_filled(config: Mapping[str, object], place: list[str], value: object) -> bool:
    """Whether the file now says the same, or says nothing."""
    *folders, last = place
    for name in folders:
        inner = config.get(name)
        if not isinstance(inner, Mapping):
            return True
        config = inner
    return last not in config or config[last] == value
