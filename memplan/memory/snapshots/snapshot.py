"""A predicted run in PyTorch's memory-snapshot format: plain containers, as its viewers read them.

The form is that of ``torch.cuda.memory._snapshot`` (torch 2.13, torch/cuda/memory.py and
torch/csrc/cuda/memory_snapshot.cpp). A stack of frames is written as the viewers show one, the
innermost first: the operation in its layer, then the part of the run.
"""

from memplan.memory.replaying.ledger import Block
from memplan.memory.replaying.tracing import (
    Action,
    AllocatorTrace,
    PlacedBlock,
    PlacedSegment,
    trace,
)
from memplan.memory.snapshots.named import Label, NamedRun

OWN_FILE = "memplan"
"""What stands for a file's name in the outermost frame, whose line is the step's number."""
NO_LAYER = "between layers"
"""What stands for a file's name where no layer runs."""

Frames = list[dict[str, object]]
Snapshot = dict[str, object]


def snapshot_of(
    run: NamedRun, *, expandable: bool = False, capacity_bytes: int | None = None
) -> Snapshot:
    """Replay a run and write down what torch would have; with a capacity, until it is exhausted."""
    ledger = run.ledger
    found = trace(
        ledger.events, ledger.streams, expandable=expandable, capacity_bytes=capacity_bytes
    )
    frames = _frames(run.labels)
    return {
        "segments": [_segment(segment, frames) for segment in found.segments],
        "device_traces": [_entries(found, run, frames)],
        "allocator_settings": _settings(expandable=expandable),
        "external_annotations": [],
    }


def _frames(labels: dict[Block, Label]) -> dict[Block, Frames]:
    """The frames of each block; those that are alike are one object, and so written once."""
    known: dict[Label, Frames] = {}
    for label in labels.values():
        if label not in known:
            known[label] = _label_frames(label)
    return {block: known[label] for block, label in labels.items()}


def _label_frames(label: Label) -> Frames:
    return [
        {
            "name": f"{label.name} [{label.kind.label}]",
            "filename": label.place or NO_LAYER,
            "line": label.position,
        },
        {"name": label.part.value, "filename": OWN_FILE, "line": label.step + 1},
    ]


def _entries(found: AllocatorTrace, run: NamedRun, frames: dict[Block, Frames]) -> list[Snapshot]:
    entries: list[Snapshot] = []
    for number, entry in enumerate(found.entries):
        made: Snapshot = {
            "action": entry.action.value,
            "addr": entry.address,
            "size": int(entry.num_bytes),  # a plain one: the viewer knows no class of ours
            "stream": entry.stream,
            # A run that never took place has no clock: what is counted are the entries.
            "time_us": number,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
            "frames": frames.get(entry.block, []),
        }
        label = run.labels.get(entry.block)
        # The viewer colours by category, and wants one that is unknown among them.
        made["category"] = "unknown"
        if label is not None and entry.action is Action.ALLOC:
            made["category"] = label.kind.label
        if entry.action is Action.OOM:
            made["device_free"] = 0
        entries.append(made)
    return entries


def _segment(segment: PlacedSegment, frames: dict[Block, Frames]) -> Snapshot:
    used = [block for block in segment.blocks if block.block is not None]
    in_use = sum(block.num_bytes for block in used)
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.num_bytes,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(block.requested_bytes for block in used),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [_block(block, frames) for block in segment.blocks],
    }


def _block(block: PlacedBlock, frames: dict[Block, Frames]) -> Snapshot:
    return {
        "address": block.address,
        "size": int(block.num_bytes),
        "requested_size": int(block.requested_bytes),
        "state": "inactive" if block.block is None else "active_allocated",
        "frames": [] if block.block is None else frames.get(block.block, []),
    }


def _settings(*, expandable: bool) -> Snapshot:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if expandable else "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": expandable,
    }
