"""Snapshots that torch wrote, and what only they hold."""

from pathlib import Path
from typing import Any

import pytest

from memplan.errors import InputError
from memplan.memory.snapshots.parting import UNKNOWN_PLACE, Parting, place_of
from memplan.memory.snapshots.recorded import Frame, Recording, RunPart, part_of, read_recording
from memplan.sources.snapshot_file import read_snapshot

RECORDED = Path(__file__).parent.parent / "data" / "snapshots" / "llama-1-layer.pickle"
"""Two steps of a Llama of one layer (hidden 256, MLP 512, vocabulary 1,000, 4 heads; batch 2 x 128 tokens,
bf16, fused AdamW), as torch 2.13's CUDA build dumped them; paths of files are shortened."""
FORWARD = [{"filename": "model.py", "line": 3, "name": "forward"}]


def event(action: str, addr: int, size: int, frames: Any = FORWARD) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": frames}


def segment(*blocks: tuple[int, str], address: int = 0) -> dict[str, Any]:
    return {
        "device": 0, "address": address, "total_size": sum(size for size, _ in blocks),
        "blocks": [
            {"size": size, "requested_size": size, "state": state, "frames": []}
            for size, state in blocks
        ],
    }  # fmt: skip


def recording(trace: list[dict[str, Any]], *segments: dict[str, Any]) -> Recording:
    return read_recording(
        {"segments": list(segments), "device_traces": [[], trace, []][1:2]}, source="run.pickle"
    )


def test_a_real_snapshot_is_read():
    found = read_recording(read_snapshot(RECORDED), source="run.pickle")
    assert found.reserved_bytes == 35651584
    assert found.earlier_bytes == 0
    assert set(found.part_bytes) == set(RunPart)
    assert found.part_bytes[RunPart.LOAD] < found.part_bytes[RunPart.STEP] < found.allocated_bytes
    assert sum(block.num_bytes for block in found.alive) == found.allocated_bytes


def test_what_was_there_before_counts():
    """One block is freed that was never seen to come, another is still there at the end."""
    trace = [event("alloc", 4096, 512), event("free_requested", 0, 1024)]
    found = recording(
        trace, segment((1024, "inactive"), (3072, "active_allocated"), (512, "active_allocated"))
    )
    assert found.earlier_bytes == 1024 + 3072
    assert found.allocated_bytes == 1024 + 3072 + 512
    assert found.reserved_bytes == 4608


def test_reserved_is_followed_backward_from_the_end():
    trace = [event("segment_alloc", 8192, 2048), event("segment_free", 8192, 2048)]
    assert recording(trace, segment((4096, "inactive"))).reserved_bytes == 6144


def test_only_what_differs_is_told():
    both = [event("alloc", 0, 512), event("alloc", 512, 512)]
    more = [
        *both,
        event(
            "alloc", 1024, 2048, [{"filename": "/a/site-packages/x/y.py", "line": 7, "name": "f"}]
        ),
    ]
    parting = Parting(predicted=recording(both), recorded=recording(more))
    assert [each.surplus_bytes for each in parting.size_classes] == [2048, 0]
    (lone,) = parting.lone_blocks
    assert (lone.num_bytes, lone.count, lone.place, lone.recorded) == (2048, 1, "x/y.py:7 f", True)


def test_a_run_and_itself_do_not_part():
    found = read_recording(read_snapshot(RECORDED), source="run.pickle")
    parting = Parting(predicted=found, recorded=found)
    assert not parting.lone_blocks
    assert all(level.predicted_bytes == level.recorded_bytes for level in parting.parts)


def test_without_stacks_phases_are_not_told_apart():
    found = recording([event("alloc", 0, 512, [])])
    assert not found.part_bytes
    assert not Parting(predicted=found, recorded=found).parts
    assert place_of(found.alive[0].stack) == UNKNOWN_PLACE


@pytest.mark.parametrize(
    ("stack", "before", "part"),
    [
        ((Frame("train.py", 3, "to"),), RunPart.LOAD, RunPart.LOAD),
        ((Frame("model.py", 3, "forward"),), RunPart.LOAD, RunPart.FORWARD),
        ((), RunPart.FORWARD, RunPart.BACKWARD),
        ((), RunPart.LOAD, RunPart.LOAD),
        (
            (Frame("model.py", 3, "forward"), Frame("a/torch/utils/checkpoint.py", 9, "unpack_hook")),
            RunPart.BACKWARD,
            RunPart.BACKWARD,
        ),
        ((Frame("a/torch/optim/adam.py", 9, "step"),), RunPart.BACKWARD, RunPart.STEP),
    ],
)  # fmt: skip
def test_frames_tell_the_part(stack: tuple[Frame, ...], before: RunPart, part: RunPart):
    assert part_of(stack, before) is part


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        ([], "expected a memory snapshot, a dict with device_traces, got a list"),
        ({"segments": []}, "device_traces: is missing"),
        ({"device_traces": 3, "segments": []}, "device_traces: expected a list, got 3"),
        ({"device_traces": [[]], "segments": []}, "no events were recorded: call torch.cuda"),
        ({"device_traces": [[event("alloc", 0, 1)]]}, "segments: is missing"),
        ({"device_traces": [[3]], "segments": []}, r"device_traces\[0\]\[0\]: expected a dict, got 3"),
        (
            {"device_traces": [[event("alloc", 0, -1)]], "segments": []},
            r"device_traces\[0\]\[0\].size: expected a whole number from 0 up, got -1",
        ),
        (
            {"device_traces": [[event("alloc", 0, 1, [{"filename": "a", "line": 1}])]], "segments": []},
            r"device_traces\[0\]\[0\].frames\[0\]: expected filename and name as text, got a mapping",
        ),
        (
            {"device_traces": [[event("alloc", 0, 1)]], "segments": [{"device": 0}]},
            r"segments\[0\].total_size: expected a whole number",
        ),
    ],
)  # fmt: skip
def test_another_form_is_refused_with_its_place(snapshot: object, message: str):
    with pytest.raises(InputError, match=message):
        read_recording(snapshot, source="run.pickle")
