"""Batches of unequal lengths: how probable each is, and its peak."""

from pathlib import Path

import pytest

from memplan.errors import ConfigError
from memplan.estimator import Verdict, estimate
from memplan.search.lengths import _percent, batch_lengths, batch_peaks, with_batches
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.lengths_file import read_lengths
from memplan.sources.models import load_model
from memplan.training.lengths import MAX_POINTS, Lengths
from memplan.training.setup import TrainingSetup

GPT2 = load_model("gpt2")


def setup_of(lengths: str, **fields: object) -> TrainingSetup:
    return TrainingSetup(lengths=lengths, precision="bf16", **fields)  # type: ignore[arg-type]


def test_a_batch_is_as_long_as_its_longest() -> None:
    setup = setup_of("128:90%,1024:10%", micro_batch_size=4)
    found = dict(batch_lengths(GPT2, setup))
    assert found[128] == pytest.approx(0.9**4)
    assert found[1024] == pytest.approx(1 - 0.9**4)


def test_pairs_are_two_draws() -> None:
    found = dict(batch_lengths(GPT2, setup_of("128:90%,1024:10%", job="dpo")))
    assert found[1024] == pytest.approx(1 - 0.9**2)


def test_cut_and_padded() -> None:
    found = batch_lengths(GPT2, setup_of("100:50%,120:30%,900:20%,multiple=128", seq_len=512))
    assert found == [(128, pytest.approx(0.8)), (512, pytest.approx(0.2))]


def test_packed_rows_are_full() -> None:
    assert batch_lengths(GPT2, setup_of("100:50%,900:50%,packed", seq_len=512)) == [(512, 1.0)]


def test_peaks_and_probabilities() -> None:
    setup = setup_of(
        "128:99.9%,1024:0.1%", micro_batch_size=8, num_gpus=8, engine="ddp",
        gradient_accumulation_steps=2,
    )  # fmt: skip
    peaks = batch_peaks(GPT2, setup, load_gpu("t4"))
    assert peaks.worst.seq_len == 1024
    assert peaks.percentile(0.5) == peaks.batches[0].peak_bytes
    assert peaks.percentile(1.0) == peaks.worst.peak_bytes
    assert peaks.batches_of_step == 16
    assert peaks.over_steps(peaks.worst.probability, 1000) == pytest.approx(1.0)
    assert peaks.probability_of(*Verdict) == pytest.approx(1.0)


def test_what_is_probable_is_noted() -> None:
    found = with_batches(
        estimate(GPT2, setup_of("128:99%,1024:1%", micro_batch_size=16), load_gpu("t4"))
    )
    text = " ".join(found.notes)
    assert "Worst batch: 1,024 tokens" in text
    assert "p99" in text


def test_many_lengths_become_few() -> None:
    found = Lengths.of(range(1, 2001))
    assert len(found.shares) <= MAX_POINTS
    assert found.longest == 2000
    assert sum(share for _, share in found.shares) == pytest.approx(1)
    # No sequence counts as shorter than it is.
    for length, _ in found.shares:
        assert found.share_up_to(length) <= length / 2000 + 1e-9


def test_half_of_those_beyond_each_length_that_is_kept_are_beyond_the_next() -> None:
    """Of 2,048 lengths as many as there are: each is counted as the next longer one that is kept, the longest exactly."""
    found = Lengths.of(range(1, 2049))
    beyond = [1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 0]
    assert [length for length, _ in found.shares] == [2048 - each for each in beyond]
    assert [2048 * share for _, share in found.shares] == [*beyond[:-1], 1]
    assert all(found.share_up_to(length) == length / 2048 for length, _ in found.shares)


def test_sixteen_lengths_stay_as_they_are() -> None:
    few = range(1, MAX_POINTS + 1)
    assert Lengths.of(few).shares == tuple((length, 1 / MAX_POINTS) for length in few)
    assert len(Lengths.of([*few, MAX_POINTS + 1]).shares) < MAX_POINTS


def test_lengths_from_files(tmp_path: Path) -> None:
    counts = tmp_path / "counts.txt"
    counts.write_text("10\n10\n30\n40\n", encoding="utf-8")
    assert read_lengths(str(counts)) == Lengths.of([10, 10, 30, 40])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"length": 10}\n{"input_ids": [1, 2, 3]}\n', encoding="utf-8")
    found = read_lengths(f"{rows},multiple=8")
    assert found is not None
    assert found.shares == ((3, 0.5), (10, 0.5))
    assert found.pad_to_multiple_of == 8
    rows.write_text("ten\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=":1: expected a length"):
        read_lengths(str(rows))


@pytest.mark.parametrize(
    ("probability", "text"),
    [
        (0.0, "0.00%"), (5e-5, "5.0e-05"), (0.0001, "0.01%"), (0.125, "12.50%"), (0.99985, "99.98%"),
        (0.99995, "99.9950%"), (1 - 1e-9, "100%"), (1.0, "100%"),
    ],
)  # fmt: skip
def test_a_probability_is_written_as_long_as_it_takes_to_tell_it(
    probability: float, text: str
) -> None:
    assert _percent(probability) == text
