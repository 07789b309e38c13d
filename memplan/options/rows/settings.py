"""Options that set one field of the training setup each, as a table.

Adding an option is adding a row: ``estimate`` and ``explain`` take one value of it, a sweep and a plan
several where the row says how they are asked for.
"""

from memplan.options.panels import DATA_PANEL, KERNELS_PANEL, PARALLEL_PANEL
from memplan.options.rows.adapters import ADAPTERS
from memplan.options.rows.jobs import JOB_PANEL, JOBS
from memplan.options.rows.optimizer_arguments import OPTIMIZER_ARGUMENTS
from memplan.options.table import Option, OptionGroup, Values


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


SETTING_OPTIONS: tuple[Option, ...] = (
    Option(
        flag="--batch-size", field="micro_batch_size", kind=int, default=1, metavar="N",
        help_text="Sequences of one micro-batch on one GPU.",
        axis_help="Sequences of one micro-batch: 1..32, or max: the largest that fits.",
    ),
    Option(
        flag="--gradient-accumulation", field="gradient_accumulation_steps", kind=int, default=1,
        metavar="N",
        help_text="Micro-batches for each optimizer step.",
        axis_help="Micro-batches for each optimizer step.",
    ),
    Option(
        flag="--seq-len", field="seq_len", kind=int | None, metavar="N", parser=read_tokens,
        help_text="Tokens of a sequence, 8k. [default: the context, at most 2048]",
        axis_help="Tokens of a sequence: 2k..8k, or max.",
    ),
    Option(
        flag="--target-seq-len", panel=DATA_PANEL, field="target_seq_len", kind=int | None, metavar="N",
        parser=read_tokens,
        help_text="Tokens of a target sequence. [default: as --seq-len]",
        axis_help="Tokens of a target sequence.",
    ),
    Option(
        flag="--images-per-sample", panel=DATA_PANEL, field="images_per_sample", kind=int, default=1, metavar="N",
        help_text="Pictures in a sequence, where the model sees; --seq-len counts their tokens too. 0: text alone.",
    ),
    Option(
        flag="--image-size", panel=DATA_PANEL, field="image_size", kind=int | None, metavar="PIXELS",
        help_text="Height and width of each. [default: the config's]",
    ),
    Option(
        flag="--image-width", panel=DATA_PANEL, field="image_width", kind=int | None, metavar="PIXELS",
        help_text="Width of each, where --image-size is the height alone: of models that make pictures.",
    ),
    Option(
        flag="--num-frames", panel=DATA_PANEL, field="num_frames", kind=int | None, metavar="N",
        help_text="Frames of each clip, of models that make video. [default: the config's]",
    ),
    Option(
        flag="--audio-seconds", panel=DATA_PANEL, field="audio_seconds", kind=int | None, metavar="N",
        help_text="Length of each clip of sound. [default: 30]",
    ),
    Option(
        flag="--tensor-parallel", panel=PARALLEL_PANEL, also=("--tp",), field="tensor_parallel", kind=int, default=1,
        metavar="N",
        help_text="GPUs that split each layer between them: as Megatron does with its engine, else as "
        "DTensor does, with --engine fsdp, or ddp where they are all.",
        axis_help="GPUs that split each layer between them: 1,2,4,8.",
    ),
    Option(
        flag="--sequence-parallel", panel=PARALLEL_PANEL, field="sequence_parallel", kind=bool, default=False,
        metavar=None,
        help_text="Between the split blocks each of them has a share of every sequence.",
        axis_help="Whether they share sequences between the split blocks: true,false.",
    ),
    Option(
        flag="--loss-parallel", panel=PARALLEL_PANEL, field="loss_parallel", kind=bool, default=False, metavar=None,
        help_text="The logits stay split over the vocabulary.",
    ),
    Option(
        flag="--context-parallel", panel=PARALLEL_PANEL, also=("--cp",), field="context_parallel", kind=int, default=1,
        metavar="N",
        help_text="GPUs that share each sequence, with --engine fsdp, ddp or deepspeed.",
        axis_help="GPUs that share each sequence: 1,2,4,8.",
    ),
    Option(
        flag="--context-parallel-kind", panel=PARALLEL_PANEL, field="context_parallel_kind", kind=str | None,
        metavar="KIND",
        help_text="How: ring (torch's, accelerate's cp_size) or all-to-all (DeepSpeed-Ulysses, its "
        "sp_size). [default: all-to-all under deepspeed, else ring]",
        axis_help="ring, all-to-all.",
    ),
    Option(
        flag="--expert-parallel", panel=PARALLEL_PANEL, also=("--ep",), field="expert_parallel", kind=int, default=1,
        metavar="N",
        help_text="GPUs of which each has other experts of a mixture, with --engine fsdp or megatron.",
        axis_help="GPUs of which each has other experts: 1,2,4,8.",
    ),
    Option(
        flag="--expert-imbalance", panel=PARALLEL_PANEL, field="expert_imbalance", kind=str | None, metavar="X",
        help_text="Tokens that the experts of the fullest GPU are given, over an even share: 1.5, or a "
        "range, 1-1.5, over which the answer is one. [default: 1-1.25]",
    ),
    Option(
        flag="--pipeline-parallel", panel=PARALLEL_PANEL, also=("--pp",), field="pipeline_parallel", kind=int, default=1,
        metavar="N",
        help_text="GPUs over which the layers are spread in stages; the micro-batches of a step are "
        "those of --gradient-accumulation.",
        axis_help="GPUs over which the layers are spread in stages: 1,2,4,8.",
    ),
    Option(
        flag="--pipeline-schedule", panel=PARALLEL_PANEL, field="pipeline_schedule", kind=str | None, metavar="NAME",
        help_text="gpipe, 1f1b, interleaved-1f1b, looped-bfs, interleaved-zero-bubble, zbv or "
        "dualpipev. [default: 1f1b]",
        axis_help="gpipe, 1f1b, interleaved-1f1b, looped-bfs, ...",
    ),
    Option(
        flag="--virtual-stages", panel=PARALLEL_PANEL, field="virtual_stages", kind=int, default=1, metavar="N",
        help_text="Stages of each GPU of a pipeline, under a schedule with several.",
        axis_help="Stages of each GPU of a pipeline: 1,2,4.",
    ),
    Option(
        flag="--layers-per-stage", panel=PARALLEL_PANEL, field="layers_per_stage", kind=str | None, metavar="N,N,...",
        help_text="Layers of each stage, the first one's first: 7,9,9,7. [default: as many in each]",
    ),
    Option(
        flag="--fp8", panel=KERNELS_PANEL, field="fp8", default="none", metavar="RECIPE",
        help_text="Linear layers in fewer bits: torchao-tensorwise, torchao-rowwise, "
        "torchao-rowwise-with-gw-hp, te-delayed, te-current, te-mxfp8 or te-nvfp4.",
        axis_help="none, torchao-tensorwise, torchao-rowwise, te-delayed, te-mxfp8, ...",
    ),
    Option(
        flag="--optimizer", also=("--optim",), field="optimizer", default="adamw-fused",
        help_text="adamw-fused, adamw-foreach, sgd, adafactor, muon, bnb-adamw-8bit, ..., or a name "
        "of TrainingArguments.optim (docs/optimizers.md).",
        axis_help="adamw-fused, sgd, adafactor, bnb-adamw-8bit, paged_adamw_8bit, ...",
    ),
    Option(
        flag="--optimizer-in-backward", field="optimizer_in_backward", kind=bool, default=False,
        metavar=None,
        help_text="Step each gradient as soon as it is there, and let it go.",
    ),
    Option(
        flag="--checkpointing", field="checkpointing", default="none", metavar="WHAT",
        help_text="none, full, selective, or layers: a share (0.5), the first 8, or 0-7,12.",
        axis_help="none, full, selective, or layers: 0.5, 8, 0-7+12.",
    ),
    Option(
        flag="--offload-activations", field="offload_activations", default="none", metavar="HOW",
        help_text="To CPU RAM between the passes: none, save-on-cpu (torch), streamed (TRL), "
        "blocking (TRL without streams), torchtune, checkpoints (inputs of checkpointed layers), or chunks (passes of a pipeline).",
        axis_help="none, save-on-cpu, streamed, blocking, torchtune, checkpoints, chunks.",
    ),
    Option(
        flag="--offload-activations-ratio", field="offload_activations_ratio", kind=float,
        default=1.0, metavar="SHARE",
        help_text="Share of each pass's activations that goes, with chunks: 0 to 1.",
        axis_help="Share of each pass's activations that goes: 0,0.5,1.",
    ),
    Option(
        flag="--kernels", panel=KERNELS_PANEL, field="kernels", default="hf",
        help_text="Whose kernels: hf, torchtitan, megatron, liger or unsloth.",
        axis_help="hf, torchtitan, megatron, liger, unsloth.",
    ),
    Option(
        flag="--attention", panel=KERNELS_PANEL, field="attention", kind=str | None,
        help_text="Attention kernel: eager, sdpa, flash or flash3.",
        axis_help="eager, sdpa, flash, flash3.",
    ),
    Option(
        flag="--norm", panel=KERNELS_PANEL, field="norm", kind=str | None,
        help_text="Norm kernel: eager, fused (torch's), liger (in place) or liger_apart.",
    ),
    Option(
        flag="--mlp", panel=KERNELS_PANEL, field="mlp", kind=str | None,
        help_text="Feed-forward kernel: eager or fused (Liger's SwiGLU, GeGLU).",
    ),
    Option(
        flag="--mlp-tiles", panel=KERNELS_PANEL, field="mlp_tiles", kind=int, default=1, metavar="N",
        help_text="Tiles in which feed-forward networks run (ALST's tiled MLP); 0: as many as its "
        "recipes have, tokens over hidden size.",
        axis_help="Tiles of feed-forward networks: 1,0,8.",
    ),
    Option(
        flag="--rotary", panel=KERNELS_PANEL, field="rotary", kind=str | None,
        help_text="Rotary kernel: eager, liger (in place), unsloth or complex (torchtitan's).",
    ),
    Option(
        flag="--scan", panel=KERNELS_PANEL, field="scan", kind=str | None,
        help_text="Mamba's scans: eager (transformers' own) or package (mamba-ssm, causal-conv1d).",
    ),
    Option(
        flag="--loss", panel=KERNELS_PANEL, field="loss", kind=str | None,
        help_text="Loss kernel: eager, shifted, shifted_uncast, fused (Megatron's), liger, "
        "flash_attn, foak, unsloth; or one that is given the output matrix: fused_linear (Liger's), "
        "unsloth_fused, cut (Apple's), chunked (torchtitan's), trl, torchtune, tiled or "
        "tiled_gradients (ALST's).",
        axis_help="eager, fused_linear, liger, cut, chunked, tiled, foak, ...",
    ),
    Option(
        flag="--loss-tiles", panel=KERNELS_PANEL, field="loss_tiles", kind=int, default=0, metavar="N",
        help_text="Tiles of the losses tiled, tiled_gradients (0: a GiB of fp32 logits in each) and "
        "chunked (0: eighths).",
    ),
    Option(
        flag="--packing", panel=DATA_PANEL, field="packing", default="none", metavar="HOW",
        help_text="How sequences lie in rows: none (padded), documents (several in a row) or "
        "padding_free (all in one row).",
        axis_help="none, documents, padding_free.",
    ),
    Option(
        flag="--dropout", field="dropout", kind=float | None, metavar="P",
        help_text="Replaces every dropout of the config.",
    ),
    Option(
        flag="--freeze", field="freeze", default="", metavar="PARTS",
        help_text="Parts that are not trained: embeddings,layers.0-7.",
        axis_help="Parts not trained: embeddings,layers.0-7.",
    ),
    Option(
        flag="--quantize", field="quantize", kind=str | None, metavar="FORMAT",
        help_text="The base under an adapter: nf4, fp4, int8, gptq, awq, none. [default: the config's]",
        axis_help="none, nf4, fp4, int8, gptq, awq.",
    ),
    Option(
        flag="--outputs-held", panel=JOB_PANEL, field="outputs_held", kind=bool, default=False, metavar=None,
        help_text="The loop keeps the logits until after backward.",
    ),
    Option(
        flag="--gradients-held", panel=JOB_PANEL, field="gradients_held", kind=bool, default=False, metavar=None,
        help_text="The loop drops gradients after the next forward pass (Lightning).",
    ),
    Option(
        flag="--upcast-outputs", panel=JOB_PANEL, field="upcast_outputs", kind=bool, default=False, metavar=None,
        help_text="Count accelerate's fp32 copy of the logits (HF Trainer, bf16=True).",
    ),
    Option(
        flag="--compile", panel=KERNELS_PANEL, field="compile", default="none", metavar="WHAT",
        help_text="torch.compile: none, layer (each layer on its own) or model (with its loss).",
        axis_help="none, layer, model.",
    ),
    Option(
        flag="--allocator", panel=KERNELS_PANEL, field="allocator", default="default", metavar="KIND",
        help_text="PyTorch's allocator: default, or expandable (expandable_segments:True).",
    ),
    Option(
        flag="--kernel-scratch/--no-kernel-scratch", panel=KERNELS_PANEL, field="kernel_scratch", kind=bool,
        default=True, metavar=None,
        help_text="Count cuBLAS workspaces and scratch inside kernels.",
    ),
)  # fmt: skip
"""Every option that is one field's value, in the order of the help."""

OPTION_GROUPS: tuple[OptionGroup, ...] = (ADAPTERS, OPTIMIZER_ARGUMENTS, *JOBS)
"""Options of which several make one field; a sweep takes one value of each."""

GROUPED_OPTIONS = tuple(option for group in OPTION_GROUPS for option in group.options)
SETTING_PARAMETERS = frozenset(option.parameter for option in (*SETTING_OPTIONS, *GROUPED_OPTIONS))
"""Their names as parameters of a command."""
FIELD_PARAMETERS: dict[str, str] = {
    option.field: option.parameter for option in (*reversed(GROUPED_OPTIONS), *SETTING_OPTIONS)
} | {"engine_options": "engine_option"}
"""The parameter that sets a field."""


def setting_fields(settings: Values) -> dict[str, object]:
    """The setup's fields that such a command's parameters set."""
    found = {
        option.field: settings[option.parameter]
        for option in SETTING_OPTIONS
        if option.parameter in settings
    }
    return found | group_fields(settings)


def group_fields(settings: Values) -> dict[str, object]:
    """Those that several of its parameters make, where any of them is given."""
    made = {
        group.field: group.make(settings)
        for group in OPTION_GROUPS
        if not group.parameters.isdisjoint(settings)
    }
    return {field: value for field, value in made.items() if value is not None}


def setting_axes(settings: Values) -> dict[str, tuple[str, str | None]]:
    """For each field that may have several values, the option's name and the text that was given."""
    return {
        option.field: (option.flag, settings[option.parameter])
        for option in SETTING_OPTIONS
        if option.parameter in settings
    }


def changed_fields(given: Values, settings: Values) -> dict[str, object]:
    """The fields that some parameters change, of a command that was given them all."""
    groups = {group.field: group for group in OPTION_GROUPS}
    found = {}
    for option in (*SETTING_OPTIONS, *GROUPED_OPTIONS):
        if option.parameter in given:
            group = groups.get(option.field)
            found[option.field] = group.make(settings) if group else given[option.parameter]
    return found
