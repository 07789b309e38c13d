"""What every word of a table means: ``--legend``.

Words that only memplan uses have to be here (a test looks through components, verdicts, precisions and the
headers of tables).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.report.terminal.blocks import hanging

if TYPE_CHECKING:
    from memplan.report.terminal.console import Console

ANSWER_WORDS: Mapping[str, str] = {
    "GiB": "2^30 bytes",
    "needs": "what PyTorch's caching allocator must have of the card to complete the run, with NCCL and the "
    "CUDA context, as a range. The run is played out, and replayed through the allocator's rules until a "
    "step leaves it as the one before did",
    "fits": "the card holds the high end of what is needed",
    "tight": "its memory is inside the range",
    "OOM, does not fit": "it does not hold the low end",
    "states fit": "something is left out of the figures, and the rest fits",
    "with, from": "the simplest of these setups that fits, least offloading, then least sharding; from: all "
    "below it fit too",
    "batch": "the largest micro-batch (sequences of one GPU in one pass) that fits, all else as here",
    "to fit": "the least change that was found to help, as options to type",
}
TABLE_WORDS: Mapping[str, str] = {
    "setup": "engine and sharding: ZeRO-0 to ZeRO-3 (DeepSpeed's stages), DDP, FSDP2, FSDP1, Megatron; what is "
    "offloaded; TP, PP, CP, EP: GPUs that split tensors, layers, sequences, experts",
    "allocated, peak": "what PyTorch has handed out at the fullest moment; where cards differ by under 2 %, "
    "the higher figure",
    "in phase": "which phase decides: load, forward, backward, step (the optimizer's), evaluation, save",
    "reserved": "what the allocator holds on a card with room: nvidia-smi's figure without context and NCCL",
    "allocator's rest": "held in its segments and not handed out",
    "CPU": "RAM of one node, all its ranks together, in GiB",
    "left": "of the card beyond what is needed",
    "checkpointing": "which layers are run again in backward in place of keeping what they made",
    "accum.": "micro-batches of one optimizer step",
    "speed": "relative to the fastest here",
    "given up": "what --allow let go to make it fit",
    "step, tokens/s": "expected time of an optimizer step, and tokens of one GPU or of all in a second",
    "TFLOP/s, MFU, HFU": "model FLOPs a second and GPU, and their share of the data sheet's rate; HFU counts "
    "what is computed again too",
    "GPUs, #": "in all; rank in the list",
}
COMPONENT_WORDS: Mapping[str, str] = {
    "parameters, gradients": "of this GPU: shards where they are sharded",
    "master weights": "an fp32 copy that the optimizer steps",
    "optimizer states": "Adam's two moments, and what else it keeps",
    "other models": "beside the trained one: reference, teacher, critic, reward",
    "averaged weights": "an exponential average (--ema)",
    "rollout engine": "a generator's share of the card, or its cache of keys and values",
    "buffers": "tables that the model keeps beside its weights",
    "inputs": "token ids and labels",
    "activations": "kept from forward to backward",
    "logits and loss": "the output matrix's product, and what the loss keeps",
    "gathered parameters": "whole for the moment, of what is sharded",
    "communication buffers": "into which gradients and parameters are copied to be sent",
    "temporaries": "inside an operation, or between two",
    "others": "components that two decimals of a GiB show as nothing",
    "kernel scratch": "cuBLAS workspaces (--no-kernel-scratch leaves them out)",
    "long, medium, short": "held the whole run, from forward to backward, within operations",
}
PRECISION_WORDS: Mapping[str, str] = {
    "fp32, bf16, fp16": "weights, gradients and states in this format; fp16: the engine's form of it",
    "bf16-autocast": "16-bit weights under autocast",
    "bf16-amp, fp16-amp": "fp32 weights, autocast to 16 bit (DDP)",
    "bf16-mixed, fp16-mixed": "fp32 shards, gathered in 16 bit (FSDP)",
    "bf16-master, fp16-master": "16-bit weights, an fp32 master copy (DeepSpeed, Megatron)",
}
LEGEND: Mapping[str, Mapping[str, str]] = {
    "The answer": ANSWER_WORDS, "Tables": TABLE_WORDS, "Components": COMPONENT_WORDS,
    "Precision": PRECISION_WORDS,
}  # fmt: skip
"""By where the words stand."""


def print_legend(console: "Console") -> None:
    """Print every word and what it means."""
    from memplan.report.terminal.console import Text

    for title, words in LEGEND.items():
        console.print(Text(title, style="bold"))
        for word, meaning in words.items():
            for line in hanging(f"  {word}: {meaning}", console.width):
                console.print(Text(line, style="dim"), soft_wrap=True)


def words_of_legend() -> frozenset[str]:
    """Each word by itself."""
    words = (word for group in LEGEND.values() for entry in group for word in entry.split(", "))
    return frozenset(words)
