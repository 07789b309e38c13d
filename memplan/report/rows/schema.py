"""What each name in an estimate's row means: the documented schema of JSON and CSV."""

from memplan.memory.account import COMPONENT_LABELS

COLUMN_MEANINGS: dict[str, str] = {
    "model": "name of the model",
    "task": "what it is trained for",
    "num_params": "all parameters, shared ones once",
    "trainable_params": "those that are trained",
    "gpu": "id of the GPU in the catalog",
    "gpu_capacity_bytes": "memory that torch reports for it",
    "num_gpus": "GPUs of the job",
    "num_nodes": "nodes they are in",
    "engine": "ddp, deepspeed, fsdp or fsdp1",
    "zero_stage": "DeepSpeed's stage, 0-3",
    "fsdp_strategy": "what FSDP shards",
    "offload_optimizer": "none, cpu or nvme",
    "offload_param": "none, cpu or nvme",
    "micro_batch_size": "sequences of one forward pass on one GPU",
    "gradient_accumulation_steps": "micro-batches for each optimizer step",
    "seq_len": "tokens of a sequence",
    "target_seq_len": "tokens of a target sequence (encoder-decoders)",
    "precision": "name of the combination of formats",
    "optimizer": "name of the optimizer",
    "checkpointing": "none, full, selective, a share of layers, or their numbers",
    "freeze": "parts that are not trained",
    "other_settings": "every other setting that is not what it is by default",
    "attention_kernel": "what computes the scores: cudnn, flash, efficient, math or eager",
    "peak_bytes": "fullest moment of a training step, as max_memory_allocated counts it",
    "peak_phase": "forward, backward or step",
    "worst_bytes": "fullest moment of the whole run, loading and saving included",
    "deciding_phase": "the phase of that moment, which the verdict rests on",
    "held_bytes": "between steps, once optimizer states exist",
    "kept_after_forward_bytes": "what the forward pass leaves for the backward pass",
    "host_bytes": "CPU RAM of one node, all its ranks together",
    "reserved_bytes": "segments of the allocator on a card with room",
    "required_bytes": "least memory for segments from which on every larger one is enough",
    "fragmentation_bytes": "of that, what is beyond what is asked for",
    "context_bytes": "CUDA context, at the most",
    "nccl_bytes": "NCCL's buffers, at the most",
    "total_low_bytes": "peak with the runtime's overhead, low end",
    "total_high_bytes": "the same, high end",
    "all_gpus_low_bytes": "the same for all GPUs together, each as full as the fullest, low end",
    "all_gpus_high_bytes": "the same, high end",
    "verdict": "fits, tight, OOM, or states fit",
    "load_peak_bytes": "peak while the model is loaded and the engine set up",
    "first_step_peak_bytes": "peak of the first step, where it is fuller than all later ones",
    "generation_peak_bytes": "peak while completions are generated and scored; null where none are",
    "forward_peak_bytes": "peak of the forward pass",
    "backward_peak_bytes": "peak of the backward pass",
    "step_peak_bytes": "peak of the optimizer step",
    "evaluation_peak_bytes": "peak of evaluation between steps; null where there is none",
    "save_peak_bytes": "peak while a checkpoint is saved",
    **{
        f"{label}_bytes": f"{label.replace('_', ' ')} at the peak of the step"
        for label in COMPONENT_LABELS
    },
    "left_out": "what the figures do not hold; empty when nothing is left out",
}
"""Version 1 (``schema_version``), in the order of the row."""

LARGEST_MICRO_BATCH = "largest_micro_batch"
ESTIMATE_MEANINGS: dict[str, str] = {
    LARGEST_MICRO_BATCH: "the most sequences of a micro-batch that fit; 0: none, null: no verdict",
}
"""What the rows of ``memplan estimate`` have besides."""
HOST_MEANINGS: dict[str, str] = {
    "node_memory_bytes": "CPU RAM of one node, as given by --cpu-memory",
    "host_verdict": "fits, or OOM where host_bytes is more",
}
"""What all rows have besides where ``--cpu-memory`` says how much CPU RAM there is."""
PIPELINE_MEANINGS: dict[str, str] = {
    "rank": "the rank whose figures they are: the fullest, or the one asked for",
    "stages": "numbers of its stages, from 0",
}
"""What rows of a pipeline have besides."""
HINT_MEANINGS: dict[str, str] = {
    "gpu": "id of a GPU that no row fits",
    "row": "number of the row that lacks least, from 0",
    "missing_bytes": "by how much the low end of its range exceeds the GPU",
    "change": "what would make it fit, in words; null where nothing was found",
    "options": "the same as options of the command line",
    "saved_bytes": "what that saves",
    "verdict": "of the changed setup: fits, tight or states fit",
    "time_factor": "how many times as long a token takes then; null where that is not known",
}
"""What each of the ``hints`` of ``memplan estimate`` says."""
