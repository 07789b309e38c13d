from hypothesis import given
from hypothesis import strategies as st

from memplan.graph.model import record_model
from memplan.graph.options import TapeOptions
from memplan.memory.deepspeed.job import written_out
from memplan.memory.deepspeed.partition import FlatBuffer, FlatPartition
from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.recording import (
    Keyed,
    Recording,
    candidates,
    highest,
    upper_hull,
)
from memplan.memory.deepspeed.reduction import ReductionSettings, reduce_while_backward
from memplan.memory.deepspeed.timeline import BackwardTimeline
from memplan.memory.step import StepWalk
from memplan.sources.models import load_model

MODEL = load_model("llama-3.2-1b")
POINTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10**6)), min_size=1, max_size=60)


@given(POINTS, st.integers(-(10**5), 10**5))
def test_no_slope_lifts_a_point_above_the_hull(points: list[tuple[int, int]], slope: int) -> None:
    numbered = [(place, size, order) for order, (place, size) in enumerate(points)]

    def height(point: tuple[int, int, int]) -> tuple[int, int, int]:
        return (point[1] + slope * point[0], -point[0], -point[2])

    assert max(upper_hull(numbered), key=height) == max(numbered, key=height)


def walked(batch_size: int, seq_len: int, *, checkpointed: float) -> tuple[object, ...]:
    options = TapeOptions(batch_size=batch_size, seq_len=seq_len, checkpointed_layers=checkpointed)
    tape = record_model(MODEL, options)
    passes = StepWalk(tape).run()
    return (tape, passes, *written_out(Keyed(tape), Keyed(passes)))


@given(
    st.integers(1, 40), st.integers(1, 9), st.integers(1, 500), st.booleans(),
    st.integers(1, 64), st.integers(10**5, 10**9), st.booleans(),
)  # fmt: skip
def test_a_recording_of_one_batch_gives_the_peak_of_any_other(
    batch: int, other: int, seq_len: int, checkpointed: bool, ranks: int, bucket: int, keeps: bool
) -> None:
    settings = ReductionSettings(
        bucket_numel=bucket, num_buckets=1 + keeps, element_bytes=2, communication_bytes=2,
        casts=False, keeps_all=keeps, offloads=False, scatters=True, compact=not keeps,
        owned_element_bytes=2 * keeps, owned_part_bytes=2 * 10**8 * (not keeps),
    )  # fmt: skip
    *_, weights, recorded, shape = walked(other, 64, checkpointed=float(checkpointed))
    *_, timeline, same_shape = walked(batch, seq_len, checkpointed=float(checkpointed))
    assert shape is same_shape
    buffer = FlatBuffer(weights, num_ranks=ranks, round_robin=keeps)
    alone = FlatPartition(buffer, ranks // 2).alone

    def replay(moments: BackwardTimeline, peak: Peak) -> None:
        reduce_while_backward(
            moments, settings, buffer, alone, carries_owned=False, carried_bytes=0,
            carried_buckets_bytes=0, peak=peak,
        )  # fmt: skip

    recording, direct = Recording(recorded), Peak()
    replay(recorded, recording)
    replay(timeline, direct)
    assert highest(candidates(recording, recorded), timeline) == direct
