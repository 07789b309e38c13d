"""Options that describe how a model is trained, and the setup made from them.

``estimate`` takes each as one value; a sweep takes lists of the same names.
"""

from typing import Annotated, Any

import typer

from memplan.cli.options import TRAINING_PANEL


def _option(name: str, help_text: str, metavar: str = "NAME") -> Any:
    return typer.Option(name, metavar=metavar, help=help_text, rich_help_panel=TRAINING_PANEL)


def read_tokens(text: str | int) -> int:
    """Read a number of tokens, such as 8192 or 8k.

    >>> read_tokens("8k")
    8192
    """
    from memplan.units import parse_count

    count = text if isinstance(text, int) else parse_count(text)
    if count is None:
        msg = f"{text!r} is not a whole number of tokens, such as 8192 or 8k"
        raise ValueError(msg)
    return count


def _tokens_option(name: str, help_text: str) -> Any:
    return typer.Option(
        name, metavar="N", help=help_text, rich_help_panel=TRAINING_PANEL, parser=read_tokens
    )


EngineOption = Annotated[
    str | None,
    _option(
        "--engine",
        "ddp, deepspeed, fsdp (FSDP2) or fsdp1, or several. [default: all that are compared]",
        "NAMES",
    ),
]
ZeroOption = Annotated[
    str | None, _option("--zero", "DeepSpeed's ZeRO stages, such as 2 or 1-3.", "STAGES")
]
OffloadOption = Annotated[
    str | None, _option("--offload", "Only setups that offload so: none, cpu or nvme.")
]
OffloadParamOption = Annotated[
    str | None,
    _option("--offload-param", "Only setups whose parameters are so: none, cpu or nvme."),
]
FsdpStrategyOption = Annotated[
    str | None,
    _option("--fsdp-strategy", "FSDP's: full_shard, shard_grad_op, hybrid or no_shard."),
]
BatchSizeOption = Annotated[
    int, _option("--batch-size", "Sequences of one micro-batch on one GPU.", "N")
]
GradientAccumulationOption = Annotated[
    int, _option("--gradient-accumulation", "Micro-batches for each optimizer step.", "N")
]
SeqLenOption = Annotated[
    int | None,
    _tokens_option("--seq-len", "Tokens of a sequence, 8k. [default: the context, at most 2048]"),
]
TargetSeqLenOption = Annotated[
    int | None,
    _tokens_option("--target-seq-len", "Tokens of a target sequence. [default: as --seq-len]"),
]
PrecisionOption = Annotated[
    str | None,
    _option(
        "--precision",
        "fp32, bf16, bf16-autocast, bf16-amp, bf16-mixed, bf16-master, or fp16: what the engine "
        "calls so (fp16-amp, fp16-mixed, fp16-master). "
        "[default: the engine's]",
    ),
]
OptimizerOption = Annotated[
    str, _option("--optimizer", "adamw-fused, adamw-foreach, sgd or sgd-momentum.")
]
CheckpointingOption = Annotated[
    str,
    _option(
        "--checkpointing",
        "none, full, selective, or layers: a share (0.5), the first 8, or 0-7,12.",
        "WHAT",
    ),
]
KernelsOption = Annotated[
    str, _option("--kernels", "Whose kernels: hf, torchtitan, megatron or liger.")
]
AttentionOption = Annotated[
    str | None, _option("--attention", "Attention kernel: eager, sdpa, flash or flash3.")
]
NormOption = Annotated[
    str | None,
    _option("--norm", "Norm kernel: eager, fused (torch's), liger (in place) or liger_apart."),
]
MlpOption = Annotated[
    str | None, _option("--mlp", "Feed-forward kernel: eager or fused (Liger's SwiGLU, GeGLU).")
]
RotaryOption = Annotated[
    str | None,
    _option("--rotary", "Rotary kernel: eager, liger (in place) or complex (torchtitan's)."),
]
LossOption = Annotated[
    str | None,
    _option(
        "--loss",
        "Loss kernel: eager, shifted, shifted_uncast, fused (Megatron's), liger, flash_attn, foak, "
        "unsloth; or one that is given the output matrix: fused_linear (Liger's), cut (Apple's), "
        "chunked (torchtitan's), torchtune.",
    ),
]
PackingOption = Annotated[
    str,
    _option(
        "--packing",
        "How sequences lie in rows: none (padded), documents (several in a row) or padding_free "
        "(all in one row).",
        "HOW",
    ),
]
DropoutOption = Annotated[
    float | None, _option("--dropout", "Replaces every dropout of the config.", "P")
]
FreezeOption = Annotated[
    str, _option("--freeze", "Parts that are not trained: embeddings,layers.0-7.", "PARTS")
]
OutputsHeldOption = Annotated[
    bool,
    typer.Option(
        "--outputs-held",
        help="The loop keeps the logits until after backward.",
        rich_help_panel=TRAINING_PANEL,
    ),
]
UpcastOutputsOption = Annotated[
    bool,
    typer.Option(
        "--upcast-outputs",
        help="Count accelerate's fp32 copy of the logits (HF Trainer, bf16=True).",
        rich_help_panel=TRAINING_PANEL,
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="torch.compile is used: it is not modelled, and the answer says so.",
        rich_help_panel=TRAINING_PANEL,
    ),
]
EngineOptionOption = Annotated[
    list[str] | None,
    _option("--engine-option", "A setting of the engine's own; repeatable.", "KEY=VALUE"),
]
AllocatorOption = Annotated[
    str,
    _option(
        "--allocator",
        "PyTorch's allocator: default, or expandable (expandable_segments:True).",
        "KIND",
    ),
]
KernelScratchOption = Annotated[
    bool,
    typer.Option(
        "--kernel-scratch/--no-kernel-scratch",
        help="Count cuBLAS workspaces and scratch inside kernels.",
        rich_help_panel=TRAINING_PANEL,
    ),
]
SetupFileOption = Annotated[
    str | None, _option("--setup", "A YAML file that holds a whole training setup.", "FILE")
]
TrainingArgumentsOption = Annotated[
    str | None,
    _option(
        "--training-args", "Hugging Face TrainingArguments or a TRL config, JSON or YAML.", "FILE"
    ),
]
DeepSpeedConfigOption = Annotated[
    str | None, _option("--deepspeed-config", "DeepSpeed's ds_config.json.", "FILE")
]
AccelerateConfigOption = Annotated[
    str | None,
    _option("--accelerate-config", "accelerate's YAML: FSDP, DeepSpeed or plain.", "FILE"),
]


def parse_engine_options(pairs: list[str] | tuple[str, ...] | None) -> dict[str, object]:
    """Read ``KEY=VALUE`` pairs; numbers, true and false become what they say.

    Raises ``UsageError`` for a pair without ``=``.

    >>> parse_engine_options(["overlap_comm=true", "reduce_bucket_size=5e8"])
    {'overlap_comm': True, 'reduce_bucket_size': 500000000}
    """
    from memplan.errors import UsageError

    found: dict[str, object] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            msg = f"--engine-option: {pair!r} is not KEY=VALUE, such as overlap_comm=true"
            raise UsageError(msg)
        found[key] = _plain_value(value)
    return found


def _plain_value(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number
