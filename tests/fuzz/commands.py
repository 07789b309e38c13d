"""Commands that work, and what can go wrong with one: a file or an option that is not as it was."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command and the files it reads; ``{name}`` in an argument is the path of a file."""

    arguments: tuple[str, ...]
    files: dict[str, Any]
    """Name of a file -> what it holds: a value, or bytes as they are."""


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 64, "hidden_act": "silu",
    "attention_dropout": 0.0, "tie_word_embeddings": False, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2,
    "num_decoder_layers": 2, "vocab_size": 128, "relative_attention_num_buckets": 32,
    "dropout_rate": 0.1, "feed_forward_proj": "gated-gelu", "id2label": {"0": "a", "1": "b"},
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
QWEN_VL = {
    "model_type": "qwen2_vl", "text_config": {**LLAMA, "model_type": "qwen2_vl_text"},
    "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 4, "mlp_ratio": 4, "patch_size": 14},
}  # fmt: skip
SETUP = {
    "num_gpus": 8, "engine": "deepspeed", "zero_stage": 3, "micro_batch_size": 2, "seq_len": 64,
    "precision": "bf16-master", "optimizer": "adamw-fused", "checkpointing": "full",
    "offload_optimizer": "cpu", "kernels": "hf", "attention": "sdpa", "dropout": 0.1,
    "freeze": "embeddings", "engine_options": {"overlap_comm": True, "reduce_bucket_size": 1000},
}  # fmt: skip
SWEEP: dict[str, Any] = {
    "version": 1, "model": {"name": "gpt2"},
    "hardware": {"gpu": ["h100", "v100-32gb"], "gpu_memory": "46GiB"},
    "setup": {"num_gpus": 8, "seq_len": 64},
    "axes": {"zero_stage": [1, 2], "micro_batch_size": "1..4", "checkpointing": ["none", 0.5]},
    "constraints": {"global_batch_size": 64}, "exclude": [{"zero_stage": 1, "micro_batch_size": 4}],
}  # fmt: skip
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999]}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "reduce_bucket_size": "auto", "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 1000,
    },
}  # fmt: skip
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
    "num_machines": 1, "num_processes": 8, "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True, "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": True, "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    },
}  # fmt: skip
TRAINING_ARGUMENTS = {
    "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "bf16": True, "gradient_checkpointing": True, "optim": "adamw_torch_fused",
    "learning_rate": 1e-4, "fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 1},
}  # fmt: skip
CARD = {
    "name": "half", "memory_gib": 39.5, "vendor": "NVIDIA", "compute_capability": 9.0,
    "bandwidth_gb_s": 1000, "dense_tflops": {"bf16": 400}, "link": {"kind": "NVLink", "gb_s": 450},
}  # fmt: skip
BASELINE = {
    "schema_version": 1, "memplan_version": "0.1.0", "model_fingerprint": "00", "assumptions": [],
    "rows": [{"task": "causal-lm", "gpu": "h100-sxm-80gb", "num_gpus": 1, "num_nodes": 1,
              "engine": "ddp", "num_params": 1000, "peak_bytes": 12345, "verdict": "fits"}],
}  # fmt: skip

_ON = ("--gpus", "8")
CASES = (
    *(
        Case(arguments=(*command, "{config.json}", *more), files={"config.json": config})
        for config in (LLAMA, T5, MIXTRAL, QWEN_VL)
        for command, more in (
            (("estimate",), _ON),
            (("models",), ()),
            (("explain",), ("--engine", "fsdp", "--gpus", "2")),
        )
    ),
    Case(arguments=("estimate", "{spec.yaml}"), files={"spec.yaml": {**LLAMA, "name": "mine"}}),
    Case(
        arguments=("estimate", "gpt2", "--setup", "{setup.yaml}", "--gpu", "h100"),
        files={"setup.yaml": SETUP},
    ),
    Case(arguments=("sweep", "{sweep.yaml}", "--format", "json"), files={"sweep.yaml": SWEEP}),
    Case(
        arguments=("estimate", "gpt2", *_ON, "--deepspeed-config", "{ds.json}"),
        files={"ds.json": DS_CONFIG},
    ),
    Case(
        arguments=("estimate", "gpt2", *_ON, "--accelerate-config", "{accelerate.yaml}"),
        files={"accelerate.yaml": ACCELERATE},
    ),
    Case(
        arguments=("estimate", "gpt2", *_ON, "--training-args", "{args.json}"),
        files={"args.json": TRAINING_ARGUMENTS},
    ),
    Case(arguments=("estimate", "gpt2", "--gpu", "{card.yaml}"), files={"card.yaml": CARD}),
    Case(
        arguments=("estimate", "gpt2", "--gpu", "h100", "--baseline", "{old.json}"),
        files={"old.json": BASELINE},
    ),
    Case(
        arguments=(
            "sweep", "gpt2", "--gpus", "4..8", "--zero", "2-3", "--batch-size", "1,2", "--seq-len",
            "64..128", "--checkpointing", "none,0.5", "--precision", "bf16-master", "--format",
            "csv", "--gpu", "h100,v100-32gb", "--global-batch-size", "64", "--check", "any",
        ),
        files={},
    ),
    Case(
        arguments=(
            "estimate", "gpt2", "--gpus", "8", "--nodes", "2", "--engine", "fsdp", "--batch-size",
            "2", "--seq-len", "64", "--engine-option", "reshard_after_forward=false", "--dropout",
            "0.1", "--freeze", "embeddings,layers.0-3", "--gpu-memory", "46GiB", "--optimizer",
            "sgd", "--kernels", "liger", "--attention", "eager", "--format", "markdown",
        ),
        files={},
    ),
    Case(
        arguments=("plan", "gpt2", "--gpus", "8", "--gpu", "h100", "--global-batch-size", "64",
                   "--headroom", "5%", "--seq-len", "64", "--format", "jsonl"),
        files={},
    ),
    Case(
        arguments=("estimate", "--deepspeed", "--params", "2851e6", "--largest-layer", "32e6",
                   "--gpus", "8", "--format", "json"),
        files={},
    ),
    Case(arguments=("flops", "{config.json}", "--seq-len", "64"), files={"config.json": LLAMA}),
    Case(arguments=("compare", "{config.json}", *_ON), files={"config.json": LLAMA}),
    Case(
        arguments=("estimate", "gpt2", "--zero", "3", *_ON, "--emit", "accelerate"), files={},
    ),
    Case(arguments=("gpus", "h100", "--format", "csv"), files={}),
)  # fmt: skip
"""Each of these answers, or is refused in one line."""


def deep(levels: int) -> list[Any]:
    """A list in a list in a list ..."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 7, -1, 0.5, -0.0, 1.5, 2**31, 2**40, 10**18, 10**400, 1e308,
    -1e308, 1e-308, float("inf"), float("-inf"), float("nan"), "", " ", "auto", "none", "true", "1",
    "1e9", "x" * 10_000, "a\nb", "\x1b[2J\x07", "=1+1", "\u202eevil", "\ud800", "\0", "0-3", "1..8",
    "llama", "cpu", "bf16", "deepspeed", "h100", [], {}, [None], [[]], [1], ["a"], {"a": 1}, {"": None},
    {True: 1}, {None: 1}, {1.5: 2}, {1: 2}, [{}, {}], deep(90), deep(150), list(range(3000)),
)  # fmt: skip
"""Values that nobody means, and some that somebody means elsewhere."""

WORDS: tuple[str, ...] = (
    "", " ", "0", "-1", "1", "2", "3", "7", "1e9", "1e400", "nan", "inf", "0.5", "-0.5", "5%", "150%",
    "1,2", "0-3", "3-0", "1..8", "8..1", "1..1e9", "0-999999999", "1,,2", ",", "..", "-", "--", "=",
    "a=b", "overlap_comm=[1]", "x" * 5000, "\0", "\x1b[2J", "\u202e", "\ud800", "none", "cpu", "auto",
    "all", "fsdp", "ddp", "megatron", "deepspeed", "bf16", "fp16", "fp32", "full", "selective", "h100",
    "json", "csv", "t5-3b", "46GiB", "1B", "99999999999999999999GiB", ".", "/", "/dev/null", "*",
    "999999", "1000000000000", "layers.0-999999999", "2147483648",
)  # fmt: skip
"""Words for an option."""


def mutated(case: Case, random_: random.Random) -> Case:
    """The case with one to three things that are not as they were."""
    files, arguments = copy.deepcopy(case.files), list(case.arguments)
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        name = random_.choice([*files, ""])
        if not name:
            _change_arguments(arguments, random_)
        elif isinstance(files[name], bytes):
            files[name] = _damaged(files[name], random_)
        elif random_.random() < 0.08:
            files[name] = _damaged(written(name, files[name]), random_)
        else:
            files[name] = _changed(files[name], random_)
    return Case(arguments=tuple(arguments), files=files)


def _change_arguments(arguments: list[str], random_: random.Random) -> None:
    if not arguments:
        return
    position = random_.randrange(len(arguments))
    kind = random_.random()
    if kind < 0.7:
        arguments[position] = random_.choice(WORDS)
    elif kind < 0.85:
        del arguments[position]
    else:
        arguments.insert(position, random_.choice((*WORDS, *arguments)))


def _changed(value: Any, random_: random.Random) -> Any:
    """The value with one place in it changed."""
    places = _places(value) if isinstance(value, dict | list) else []
    if not places or random_.random() < 0.02:
        return random_.choice(NASTY)
    container, key = random_.choice(places)
    random_.choice(_CHANGES)(container, key, random_)
    return value


def _places(value: Any) -> "list[tuple[Any, Any]]":
    found = []
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list) and len(found) < 200:
            found += _places(value[key])
    return found


def _replace(container: Any, key: Any, random_: random.Random) -> None:
    container[key] = copy.deepcopy(random_.choice(NASTY))


def _delete(container: Any, key: Any, random_: random.Random) -> None:  # noqa: ARG001
    del container[key]


def _rename(container: Any, key: Any, random_: random.Random) -> None:
    if isinstance(container, dict):
        value = container.pop(key)
        text = str(key)
        new = random_.choice(
            (text[:-1], text + "s", text.upper(), f"_{text}", True, None, 1, "x" * 999)
        )
        container[new] = value


def _multiply(container: Any, key: Any, random_: random.Random) -> None:
    value = container[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        container[key] = value * random_.choice((-1, 0, 2, 3, 0.5, 10**6, 10**12))


def _wrap(container: Any, key: Any, random_: random.Random) -> None:
    value = container[key]
    container[key] = random_.choice(([value], {"value": value}, str(value), [value, value]))


_CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    _replace, _replace, _replace, _delete, _rename, _multiply, _multiply, _wrap,
)  # fmt: skip


def _damaged(data: bytes, random_: random.Random) -> bytes:
    """The bytes with some of them changed."""
    found = bytearray(data)
    for _ in range(random_.randrange(1, 4)):
        position = random_.randrange(len(found) + 1)
        found[position : position + random_.randrange(3)] = random_.choice(
            (
                b"",
                b"\0",
                b"{",
                b"}",
                b"[",
                b'"',
                b":",
                b"\xff",
                b"&a",
                b"*a",
                b"!!",
                b"- ",
                b"on",
                b"9",
            )
        )
    return bytes(found)


def written(name: str, value: Any) -> bytes:
    """What a file of this name holds."""
    if isinstance(value, bytes):
        return value
    if name.endswith(".yaml"):
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    else:
        text = json.dumps(value, default=str)
    return text.encode("utf-8", errors="surrogatepass")
