"""Options that people type and that are not there: under which name they are, or that it is not modelled."""

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
    **dict.fromkeys(
        ("quantization", "load-in-4bit", "load-in-8bit", "4bit", "8bit", "nf4", "int8"),
        "--quantize",
    ),
    "qlora": "--lora 16 --quantize nf4",
    **dict.fromkeys(("dpo", "grpo", "ppo", "orpo", "kto", "sft"), "--job"),
    **dict.fromkeys(("trainer", "task-type", "training-type", "method", "rl"), "--job"),
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
    **dict.fromkeys(("optimiser",), "--optimizer"),
    **dict.fromkeys(("dtype", "mixed-precision", "torch-dtype"), "--precision"),
    **dict.fromkeys(("bf16", "bfloat16"), "--precision bf16-amp"),
    **dict.fromkeys(("fp16", "float16", "half"), "--precision fp16-amp"),
    **dict.fromkeys(("flash-attention", "flash-attn", "fa2"), "--attention flash"),
    **dict.fromkeys(("attn-implementation",), "--attention"),
    **dict.fromkeys(("flash-attention-3", "fa3"), "--attention flash3"),
    **dict.fromkeys(("padding-free", "packed", "sample-packing"), "--packing padding_free"),
    **dict.fromkeys(("rope",), "--rotary"),
    **dict.fromkeys(("cce", "cut-cross-entropy"), "--loss cut"),
    **dict.fromkeys(("torch-compile",), "--compile"),
    **dict.fromkeys(("offload-optimizer", "cpu-offload"), "--offload cpu"),
    **dict.fromkeys(("liger", "use-liger-kernel"), "--kernels liger"),
    **dict.fromkeys(("fsdp",), "--engine fsdp"),
    **dict.fromkeys(("ddp",), "--engine ddp"),
}  # fmt: skip
"""Name -> the option, with its value where the name says one."""


TOLD = {
    "output": "a page is written with --report, and estimate and plan write a setup with --emit",
    "versus": 'two setups are compared by `memplan compare MODEL --vs "--zero 3"`',
    **dict.fromkeys(
        ("inference", "serve", "generate", "kv-cache", "vllm"),
        "memplan is about training: what a server needs is not modelled",
    ),
}
"""Options that are not there, and what is to be said instead."""


VALUED_ELSEWHERE = {"--deepspeed": "given with --deepspeed-config, where it is DeepSpeed's file"}
"""Options without a value that take one in the Hugging Face Trainer: how that is given here."""


def other_name(option: str, known: tuple[str, ...]) -> str:
    """What to say of an option that a command does not have; nothing where nothing is known.

    >>> other_name("--ep-size", ("--expert-parallel",))
    "it is called '--expert-parallel'"
    >>> other_name("--max-length", ("--seq-len",)), other_name("--max-length", ())
    ("it is called '--seq-len'", '')
    >>> other_name("--versus", ())
    'two setups are compared by `memplan compare MODEL --vs "--zero 3"`'
    """
    name = option.lstrip("-").replace("_", "-").lower()
    if name in TOLD:
        return TOLD[name]
    renamed = RENAMED.get(name, "")
    return f"it is called {renamed!r}" if renamed.partition(" ")[0] in known else ""
