"""A predicted run in PyTorch's snapshot format."""

import pickle
import pickletools
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.estimator.named_run import named_run
from memplan.memory.replaying.replay import replay
from memplan.memory.snapshots.recorded import read_recording
from memplan.memory.snapshots.snapshot import snapshot_of
from memplan.sources.models import load_model
from memplan.sources.snapshot_file import snapshot_pickle
from memplan.training.setup import TrainingSetup

SETUPS = [
    pytest.param({}, False, id="one GPU"),
    pytest.param({}, True, id="expandable segments"),
    pytest.param({"num_gpus": 4, "engine": "fsdp"}, False, id="fsdp"),
    pytest.param({"num_gpus": 4, "engine": "fsdp"}, True, id="fsdp, expandable segments"),
    pytest.param({"num_gpus": 4, "engine": "deepspeed", "zero_stage": 2}, False, id="zero2"),
]
PLAIN = (dict, list, tuple, str, int, float, bool)
VIEWER_OPERATIONS = {
    "PROTO", "FRAME", "APPEND", "APPENDS", "TUPLE2", "TUPLE3", "TUPLE", "TUPLE1", "EMPTY_TUPLE",
    "NEWTRUE", "NEWFALSE", "NONE", "BINGET", "LONG_BINGET", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "EMPTY_DICT", "EMPTY_LIST", "MARK", "MEMOIZE", "SETITEM", "SETITEMS", "STOP",
    "SHORT_BINUNICODE", "BINUNICODE",
}  # fmt: skip
"""What torch/utils/viz/MemoryViz.js reads of a pickle (torch 2.13)."""


def snapshot(options: dict[str, Any], expandable: bool) -> Any:
    found = estimate(load_model("gpt2"), TrainingSetup(seq_len=64, **options))
    return snapshot_of(named_run(found), expandable=expandable)


@pytest.mark.parametrize(("options", "expandable"), SETUPS)
def test_the_viewer_can_read_it(options: dict[str, Any], expandable: bool):
    data = snapshot_pickle(snapshot(options, expandable))
    used = {operation.name for operation, _, _ in pickletools.genops(data)}
    assert used <= VIEWER_OPERATIONS
    assert len(data) < 4 << 20


def test_the_viewer_can_read_what_sorts():
    """An embedding's gradient sorts its tokens: a size that knows more than its bytes is written as these alone."""
    found = estimate(load_model("t5-small"), TrainingSetup(seq_len=64))
    data = snapshot_pickle(snapshot_of(named_run(found), expandable=False))
    assert {each.name for each, _, _ in pickletools.genops(data)} <= VIEWER_OPERATIONS


@pytest.mark.parametrize(("options", "expandable"), SETUPS)
def test_it_is_whole(options: dict[str, Any], expandable: bool):
    """Blocks fill their segments, and what the events leave alive is in them."""
    made = snapshot(options, expandable)
    alive: dict[int, int] = {}
    for entry in made["device_traces"][0]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry["size"]
            assert [set(frame) for frame in entry["frames"]] == [{"name", "filename", "line"}] * 2
        elif entry["action"] == "free_completed":
            del alive[entry["addr"]]
    for segment in made["segments"]:
        blocks = segment["blocks"]
        assert sum(block["size"] for block in blocks) == segment["total_size"]
        used = [block for block in blocks if block["state"] == "active_allocated"]
        assert sum(block["size"] for block in used) == segment["allocated_size"]
        for block in used:
            assert alive.pop(block["address"]) == block["requested_size"]
    assert not alive


def test_it_reads_back_as_the_replay_has_it():
    run = named_run(estimate(load_model("gpt2"), TrainingSetup(seq_len=64)))
    peaks = replay(run.ledger.events, run.ledger.streams)
    found = read_recording(snapshot_of(run), source="the prediction")
    assert found.allocated_bytes == peaks.requested_bytes
    assert found.reserved_bytes == peaks.reserved_bytes
    assert found.earlier_bytes == 0
    assert sum(block.num_bytes for block in found.alive) == found.allocated_bytes
    assert max(found.part_bytes.values()) == found.allocated_bytes


def test_a_card_too_small_ends_it_with_an_oom():
    run = named_run(estimate(load_model("gpt2"), TrainingSetup(seq_len=64)))
    made: Any = snapshot_of(run, capacity_bytes=1 << 30)
    last = made["device_traces"][0][-1]
    assert last["action"] == "oom"
    assert last["frames"]


@pytest.mark.integration
@pytest.mark.parametrize(("options", "expandable"), SETUPS)
def test_torch_opens_it(options: dict[str, Any], expandable: bool):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    made = pickle.loads(snapshot_pickle(snapshot(options, expandable)))
    assert "cudaMalloc" in viewer.trace(made) or expandable
    assert "segments: " in viewer.segsum(made)
    drawn: list[str] = []
    viewer.memory(made, format_flamegraph=drawn.append)
    viewer.segments(made, format_flamegraph=drawn.append)
    assert "embed_tokens.weight [parameters]" in drawn[0] or "flat weights" in drawn[0]
    assert "<html>" in viewer.trace_plot(made)
    assert "<html>" in viewer.segment_plot(made)
