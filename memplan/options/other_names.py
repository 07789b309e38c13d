"""Options as people know them from other tools: taken for what they mean here, or told that it is not modelled."""

from collections.abc import Container, Sequence

RENAMED = {
    **dict.fromkeys(
        ("tensor-parallel-size", "tensor-model-parallel-size", "tp-size"), "--tensor-parallel"
    ),
    **dict.fromkeys(
        ("pipeline-parallel-size", "pipeline-model-parallel-size", "pp-size"),
        "--pipeline-parallel",
    ),
    **dict.fromkeys(
        ("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"),
        "--virtual-stages",
    ),
    **dict.fromkeys(("pp-schedule",), "--pipeline-schedule"),
    **dict.fromkeys(("sp",), "--sequence-parallel"),
    **dict.fromkeys(
        ("context-parallel-size", "context-parallel-degree", "cp-size"), "--context-parallel"
    ),
    **dict.fromkeys(
        ("expert-parallel-size", "expert-parallel-degree", "expert-model-parallel-size", "ep-size"),
        "--expert-parallel",
    ),
    **dict.fromkeys(("capacity-factor", "moe-expert-capacity-factor"), "--expert-imbalance"),
    **dict.fromkeys(("cp-kind", "cp-comm-type"), "--context-parallel-kind"),
    **dict.fromkeys(("lora-r", "lora-rank", "peft", "use-peft"), "--lora"),
    **dict.fromkeys(("quantization",), "--quantize"),
    **dict.fromkeys(("load-in-4bit", "4bit", "nf4"), "--quantize nf4"),
    **dict.fromkeys(("load-in-8bit", "8bit", "int8"), "--quantize int8"),
    "qlora": "--quantize nf4 --lora",
    **{kind: f"--job {kind}" for kind in ("dpo", "grpo", "ppo", "orpo", "kto", "sft", "reward")},
    **dict.fromkeys(
        ("trainer", "task-type", "training-type", "method", "rl", "objective"), "--job"
    ),
    **{kind: f"--format {kind}" for kind in ("json", "csv", "markdown", "jsonl")},
    "md": "--format markdown",
    **dict.fromkeys(("write-setup", "save", "save-setup", "export", "write"), "--emit"),
    **dict.fromkeys(("html", "plot", "pdf"), "--report"),
    **dict.fromkeys(("config", "config-file", "yaml", "axolotl"), "--setup"),
    "training-arguments": "--training-args",
    **dict.fromkeys(("lora-target-modules", "target-modules"), "--lora-targets"),
    **dict.fromkeys(("adapter-config", "peft-config"), "--adapter"),
    **dict.fromkeys(
        ("num-gpus", "ngpus", "n-gpus", "nproc", "nproc-per-node", "world-size"), "--gpus"
    ),
    **dict.fromkeys(("num-nodes", "nnodes"), "--nodes"),
    **dict.fromkeys(("vram", "gpu-ram", "gpu-mem"), "--gpu-memory"),
    **dict.fromkeys(("ram", "cpu-ram", "cpu-mem", "host-memory"), "--cpu-memory"),
    **dict.fromkeys(
        ("micro-batch-size", "micro-batch", "per-device-train-batch-size",
         "train-micro-batch-size-per-gpu", "bs"),
        "--batch-size",
    ),
    **dict.fromkeys(("train-batch-size", "total-batch-size"), "--global-batch-size"),
    **dict.fromkeys(
        ("gradient-accumulation-steps", "grad-accum", "accumulation"), "--gradient-accumulation"
    ),
    **dict.fromkeys(
        ("max-length", "max-seq-length", "max-seq-len", "sequence-length", "context-length",
         "context", "seqlen"),
        "--seq-len",
    ),
    **dict.fromkeys(
        ("gradient-checkpointing", "activation-checkpointing", "recompute"), "--checkpointing full"
    ),
    **dict.fromkeys(("zero-stage", "stage"), "--zero"),
    **dict.fromkeys(("samples", "num-samples", "num-examples", "dataset-size"), "--examples"),
    **dict.fromkeys(("num-epochs", "num-train-epochs"), "--epochs"),
    **dict.fromkeys(("num-tokens", "total-tokens", "train-tokens"), "--tokens"),
    **dict.fromkeys(("cost", "gpu-price", "gpu-cost", "hourly-price", "price-per-hour"), "--price"),
    **dict.fromkeys(("optimiser",), "--optimizer"),
    **dict.fromkeys(("dtype", "mixed-precision", "torch-dtype"), "--precision"),
    **dict.fromkeys(("fp16", "float16", "half"), "--precision fp16"),
    **dict.fromkeys(("flash-attention", "flash-attn", "fa2"), "--attention flash"),
    **dict.fromkeys(("attn-implementation",), "--attention"),
    **dict.fromkeys(("flash-attention-3", "fa3"), "--attention flash3"),
    **dict.fromkeys(("padding-free", "packed", "sample-packing"), "--packing padding_free"),
    **dict.fromkeys(("rope",), "--rotary"),
    **dict.fromkeys(("cce", "cut-cross-entropy"), "--loss cut"),
    **dict.fromkeys(("torch-compile",), "--compile model"),
    **dict.fromkeys(("offload-optimizer", "cpu-offload"), "--offload cpu"),
    **dict.fromkeys(("liger", "use-liger-kernel"), "--kernels liger"),
    **dict.fromkeys(("fsdp",), "--engine fsdp"),
    **dict.fromkeys(("ddp",), "--engine ddp"),
}  # fmt: skip
"""Name -> the option, with its value where the name says one; several options, the last without its own."""

YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")
"""What a name that says its value may be given, as the Hugging Face Trainer's flags are."""
WORDS = {"--offload": ("none", "cpu", "nvme")}
"""What it may be given instead, by the option."""

TOLD = {
    **dict.fromkeys(
        ("quiet", "short", "brief", "summary"),
        "the first line is the answer (| head -1), and --check says it in the exit code",
    ),
    **dict.fromkeys(
        ("amp", "use-amp", "autocast"),
        "every engine mixes precisions by default; --precision bf16-amp or fp16-amp is torch.amp over fp32 weights",
    ),
    **dict.fromkeys(
        ("max", "max-batch", "max-batch-size", "find-batch-size", "auto-find-batch-size"),
        "the first line says the largest micro-batch; `memplan plan MODEL --maximize seq-len` finds another largest",
    ),
    **dict.fromkeys(
        ("disk", "checkpoint-size", "storage"),
        "a job's request says what its checkpoints take on disk: --emit slurm",
    ),
    "output": "a page is written with --report, and estimate and plan write a setup with --emit",
    "phase": "--component NAME says what each phase has of one, --full lists all of them",
    "versus": 'two setups are compared by `memplan compare MODEL --vs "--zero 3"`',
    **dict.fromkeys(
        ("bf16", "bfloat16"),
        "bf16 is what every engine takes by default; --precision bf16 leaves out fp32 weights, too",
    ),
    **dict.fromkeys(
        ("inference", "serve", "generate", "kv-cache", "vllm"),
        "memplan is about training: what a server needs is not modelled",
    ),
}
"""Options that are not there, and what is to be said instead."""


VALUED_ELSEWHERE = {"--deepspeed": "given with --deepspeed-config, where it is DeepSpeed's file"}
"""Options without a value that take one in the Hugging Face Trainer: how that is given here."""


def own_words(name: str, known: Container[str]) -> list[str]:
    """The options that a name from elsewhere stands for, with their values; none where the command has no such.

    >>> own_words("--gradient-checkpointing", {"--checkpointing"}), own_words("--max_length", {"--seq-len"})
    (['--checkpointing', 'full'], ['--seq-len'])
    """
    plain = _plain(name)
    if f"--{plain}" in known:
        return [f"--{plain}"]
    own = RENAMED.get(plain, "").split()
    return own if all(each in known for each in own if each.startswith("--")) else []


def with_word(own: Sequence[str], says: str) -> list[str]:
    """Options that say their value, with what was said beside them: nothing of what was denied.

    >>> with_word(["--offload", "cpu"], "nvme"), with_word(["--checkpointing", "full"], "false")
    (['--offload', 'nvme'], [])
    """
    if says.lower() in NO:
        return []
    return [*own[:-1], says] if says in WORDS.get(own[0], ()) else list(own)


def is_word_of(own: Sequence[str], word: str) -> bool:
    """Whether a word belongs to such options, and is no MODEL."""
    return word.lower() in (*YES, *NO, *WORDS.get(own[0], ()))


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def other_name(option: str, known: tuple[str, ...]) -> str:
    """What to say of an option that a command does not have; nothing where nothing is known.

    >>> other_name("--ep-size", ("--expert-parallel",))
    "it is called '--expert-parallel'"
    >>> other_name("--max-length", ("--seq-len",)), other_name("--max-length", ())
    ("it is called '--seq-len'", '')
    >>> other_name("--versus", ())
    'two setups are compared by `memplan compare MODEL --vs "--zero 3"`'
    """
    name = _plain(option)
    if name in TOLD:
        return TOLD[name]
    renamed = RENAMED.get(name, "")
    return f"it is called {renamed!r}" if renamed.partition(" ")[0] in known else ""
