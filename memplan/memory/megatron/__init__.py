"""What Megatron holds beside its layers: its options, and the buffers of its data parallelism."""
