"""Training loops that somebody wrote for a course or a report."""

from typing import Any

from tests.measured.runs import Record, Run, basics, card_of, llama_like

CS336_SIZES: dict[str, Any] = {
    "layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "vocab": 10000,
    "tied": False,
}  # fmt: skip
"""The course's "medium" (assignment 2, table 1): RMSNorm, rotary positions, SwiGLU."""


def cs336(record: Record) -> Run:
    """Stanford CS336's assignment: softmax attention written out, bf16 autocast over fp32 weights."""
    setup = basics(record) | {
        "precision": "bf16-amp",
        "optimizer": "adamw-foreach",
        "attention": "eager",
    }
    return Run(
        model=llama_like(CS336_SIZES),
        gpu=card_of(record),
        setup=setup,
        cited=("stanford-cs336/assignment2-systems: table of sizes; cs336_basics/model.py",),
    )
