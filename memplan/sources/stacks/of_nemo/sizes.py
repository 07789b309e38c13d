"""GPUs, micro-batches, stages and lengths of NeMo AutoModel's files."""

from collections.abc import Mapping
from math import lcm

from memplan.sources.stacks.common.found import Found, micro_batches
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import num_layers
from memplan.sources.stacks.common.stages import dealt_layers
from memplan.training.setup_derived import GPUS_PER_NODE
from memplan.units import ceil_div

NAME = "NeMo AutoModel"
_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved-1f1b",
    "interleaved_1f1b": "interleaved-1f1b", "loopedbfs": "looped-bfs", "looped_bfs": "looped-bfs",
    "zbvzerobubble": "zbv", "interleavedzerobubble": "interleaved-zero-bubble",
    "dualpipev": "dualpipev",
}  # fmt: skip
_ONE_STAGE = ("1f1b", "gpipe")
_FLASH = ("flash", "flash3")
_LENGTHS = (
    "dataset.seq_length", "dataset.seq_len", "dataset.max_length", "packed_sequence.max_length",
    "dataloader.collate_fn.max_length",
)  # fmt: skip
"""What sequences are cut to, or padded to (``recipes/_typed_config.py``)."""
TRAY = 4
"""GPUs of a compute tray of NVIDIA's GB200 and GB300 NVL72, which is a node of theirs."""


def read_gpus(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """As many as ``dp_size`` and the degrees make, or as the nodes that the file names have; else a node's
    (``components/launcher/interactive.py``, ``determine_local_world_size(nproc_per_node="gpu")``)."""
    shared = 1
    for field in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        shared *= degree_of(found, field)
    ranks = keys.take("distributed.dp_size")
    nodes = keys.count("benchmark.num_nodes") or keys.count("ci.nodes")
    nodes, on_each = keys.count("nnodes") or nodes, keys.count("ci.nproc_per_node")
    on_each = keys.count("nproc_per_node") or on_each  # what a script's torchrun is told
    launched = _launched(keys)
    if launched is not None:
        nodes, on_each = launched
    if on_each is not None:
        nodes = nodes or 1
    on_each = on_each or (TRAY if _is_tray(keys.text("ci.cluster_tag")) else GPUS_PER_NODE)
    if given.get("num_gpus") is not None:
        return
    stages = degree_of(found, "pipeline_parallel")
    fewest = stages * lcm(shared // stages, degree_of(found, "expert_parallel"))
    if isinstance(ranks, int) and ranks > 0:
        found.fields["num_gpus"] = ranks * shared
    elif nodes is not None and not nodes * on_each % fewest:
        found.fields |= {"num_gpus": nodes * on_each, "num_nodes": nodes}
        nodes_words = "1 node" if nodes == 1 else f"{nodes} nodes"
        gpus_words = "1 GPU" if on_each == 1 else f"{on_each} GPUs"
        found.notes.append(f"{nodes_words} of {gpus_words}, unless you say others")
    elif fewest > on_each:
        found.fields["num_gpus"] = fewest
        found.notes.append(
            f"{fewest} GPUs, the fewest that its degrees need, unless you say others"
        )
    elif keys.values:
        found.fields["num_gpus"] = count = ceil_div(on_each, fewest) * fewest
        found.notes.append(
            f"{count} GPUs, a node's, on each of which its launcher starts a process, unless you say others"
        )


def _is_tray(cluster: str | None) -> bool:
    return (cluster or "").lower().startswith("gb")


def _launched(keys: Keys) -> tuple[int, int] | None:
    """Nodes that SkyPilot is asked for, and the GPUs of each, ``H100:8`` (``components/launcher/skypilot``)."""
    nodes, cards = keys.count("skypilot.num_nodes"), keys.text("skypilot.accelerators")
    if not keys.has("skypilot"):
        return None
    count = (cards or "").rpartition(":")[2]
    return nodes or 1, int(count) if count.isdecimal() else 1


def degree_of(found: Found, field: str) -> int:
    """Ranks of one kind of parallelism; 1 where none was found."""
    degree = found.fields.get(field, 1)
    assert isinstance(degree, int)
    return degree


def read_sizes(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Micro-batch and how many of them make a step."""
    local = keys.count("step_scheduler.local_batch_size") or 1
    whole = keys.count("step_scheduler.global_batch_size")
    found.fields["micro_batch_size"] = local
    gpus = given.get("num_gpus") or found.fields.get("num_gpus", 1)
    assert isinstance(gpus, int)
    for field in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        gpus = max(1, gpus // degree_of(found, field))
    whole = local * gpus if whole is None else whole
    # ``components/training/step_scheduler.py`` raises
    batches = micro_batches(found, batch=whole, micro=local, ranks=gpus, stack=NAME)
    found.fields["gradient_accumulation_steps"] = batches
    if "pipeline_parallel" in found.fields:
        _read_pipeline(keys, found, local=local, batches=batches)


def _read_pipeline(keys: Keys, found: Found, *, local: int, batches: int) -> None:
    """Micro-batches are cut out of one local batch, and a run of the schedule takes it whole."""
    key = "distributed.pipeline.pp_microbatch_size"
    micro = keys.count(key) or 1
    count, rest = divmod(local, micro)
    if rest:
        keys.refuse(key, f"{local} sequences are no whole number of micro-batches of {micro}")
    found.fields |= {"micro_batch_size": micro, "gradient_accumulation_steps": count}
    if batches > 1:
        found.notes.append(
            f"a step is {batches} runs of the pipeline over {count} micro-batches each, of which one is counted"
        )
    schedule = (keys.text("distributed.pipeline.pp_schedule") or "1f1b").lower()
    if schedule not in _SCHEDULES:
        keys.refuse("distributed.pipeline.pp_schedule", f"{schedule!r:.40} is not modelled")
    found.fields["pipeline_schedule"] = _SCHEDULES[schedule]
    each = keys.count("distributed.pipeline.layers_per_stage")
    rounded = keys.text("distributed.pipeline.round_virtual_stages_to_pp_multiple")
    chunks = 1
    if schedule not in _ONE_STAGE:
        chunks = _virtual_stages(keys, found, each=each, rounded=rounded)
        found.fields["virtual_stages"] = chunks
    layers = None if found.model is None else num_layers(found.model)
    if layers is not None:
        dealt = dealt_layers(layers, chunks * degree_of(found, "pipeline_parallel"))
        found.fields["layers_per_stage"] = dealt


def _virtual_stages(keys: Keys, found: Found, *, each: int | None, rounded: str | None) -> int:
    """Stages of a rank (``calculate_virtual_stages``): as many layers as said make one."""
    if each is None:
        return 2
    layers = None if found.model is None else num_layers(found.model)
    ranks = degree_of(found, "pipeline_parallel")
    if layers is None:
        found.notes.append(
            "layers_per_stage: the model is not known here: counted as 2 stages a rank"
        )
        return 2
    stages = -(-layers // each)
    if stages % ranks and rounded is None:
        keys.refuse(
            "distributed.pipeline.layers_per_stage",
            f"{layers} layers are {stages} stages, no multiple of pp_size {ranks}",
        )
    stages += ranks - stages % ranks if rounded == "up" and stages % ranks else -(stages % ranks)
    return max(2, stages // ranks)


def read_length(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Tokens of a row, and whether several documents lie in it."""
    sizes = [keys.take(f"packed_sequence.{name}") for name in ("packed_sequence_size", "pack_size")]
    packed = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    length = None
    for name in _LENGTHS:
        value = keys.take(name)
        length = length or (value if isinstance(value, int) and value > 0 else None)
    if keys.has(
        "dataset.max_sentence_len"
    ):  # and a mark of its end (``components/datasets/llm/mock.py``)
        length = (keys.count("dataset.max_sentence_len") or 0) + 1
    padded = keys.count("packed_sequence.collate_max_length")
    multiple = keys.count("dataloader.collate_fn.pad_seq_len_divisible") or 1
    if packed is None and length is not None:
        length = ceil_div(length, multiple) * multiple
    if packed is not None:
        found.fields["packing"] = "documents"
        length = padded or packed
        own = "model.backend.attn" in keys.values
        if degree_of(found, "context_parallel") > 1:
            # Each rank has its share of every document, and is told where they begin (``make_cp_batch_for_te``).
            found.fields["packing"] = "none"
            found.notes.append(
                f"packed_sequence beside cp_size: counted as one sequence of {length} tokens"
            )
        elif sizes[0] == packed and not own and found.fields.get("attention") not in _FLASH:
            # ``_apply_preload_overrides``: rows of several documents go through flash attention alone.
            found.fields["attention"] = "flash"
    found.fields["seq_len"] = length
    if length is None and "seq_len" not in given:
        found.notes.append("dataset.seq_length is not set: sequences are not cut; give a length")
