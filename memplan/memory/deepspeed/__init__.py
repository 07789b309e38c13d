"""DeepSpeed ZeRO 0-3 as the engine (0.19.8) really behaves."""

from memplan.memory.deepspeed.account import deepspeed_account, rank_kinds

__all__ = ["deepspeed_account", "rank_kinds"]
