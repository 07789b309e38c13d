"""DeepSpeed ZeRO 0-3 as the engine (0.19.8) really behaves."""
