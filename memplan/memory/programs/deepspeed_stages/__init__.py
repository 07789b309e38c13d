"""DeepSpeed's allocations, stage by stage (0.19.8)."""
