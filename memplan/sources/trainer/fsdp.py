"""What the Trainer tells accelerate of FSDP, out of its arguments ``fsdp`` and ``fsdp_config``."""

from collections.abc import Mapping

from memplan.errors import ConfigError, did_you_mean


def accelerate_values(arguments: Mapping[str, object], half: str) -> dict[str, object]:
    """What the Trainer tells accelerate with the training arguments ``fsdp`` and ``fsdp_config``.

    ``half`` is ``bf16``, ``fp16`` or ``no``. Source: transformers 5.23, ``training_args.py``,
    ``_process_fsdp_args`` and ``_apply_legacy_fsdp_to_config``: FSDP2 unless another version is
    named, a unit for each layer, no loading on one rank alone, full state dicts; words in ``fsdp``
    are the older form. Raises ``ConfigError`` for words that are none.
    """
    given = arguments.get("fsdp_config")
    config: dict[str, object] = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
    }
    for key, value in given.items() if isinstance(given, Mapping) else ():
        if key not in _PASSED_OVER:
            config[str(key).removeprefix("fsdp_")] = value
    words = _words(arguments.get("fsdp"))
    if config.pop("cpu_offload", False) or "offload" in words:
        config["offload_params"] = True
    strategy = next((word for word in words if word in _WORDS), "full_shard")
    if str(config["version"]) == "2":
        if strategy in _FIRST_ONLY:
            msg = f"fsdp: FSDP2 has no {strategy}: set fsdp_config.version to 1, which has it"
            raise ConfigError(msg)
        config.setdefault("reshard_after_forward", strategy != "shard_grad_op")
    else:
        named = config.pop("reshard_after_forward", strategy)
        config["sharding_strategy"] = str(named).upper()
    if not config.get("min_num_params", True):
        del config["min_num_params"]
    return {"distributed_type": "FSDP", "mixed_precision": half, "fsdp_config": config}


_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")
_FIRST_ONLY = ("no_shard", "hybrid_shard")
"""Words that FSDP1 alone knows."""
_PASSED_OVER = frozenset({"xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"})
"""Keys for other devices."""


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        words = value.replace(",", " ").split()
    elif isinstance(value, list):
        words = [str(each) for each in value]
    else:
        words = []
    known = [*_WORDS, "auto_wrap", "offload"]
    for word in words:
        if word not in known:
            msg = f"fsdp: {word!r} is none of {', '.join(known)}.{did_you_mean(word, known)}"
            raise ConfigError(msg)
    return words
