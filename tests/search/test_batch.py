from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.estimator import Verdict, estimate
from memplan.search.batch import LargestFit, largest_micro_batch, largest_of
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup


@pytest.mark.parametrize(
    ("model", "gpu", "setup"),
    [
        pytest.param("gpt2", "v100-16gb", {"seq_len": 512}, id="one GPU"),
        pytest.param(
            "llama-3.2-1b", "a100-40gb", {"num_gpus": 8, "zero_stage": 2, "seq_len": 1024},
            id="ZeRO-2",
        ),
        pytest.param(
            "llama-3.2-1b", "h100", {"num_gpus": 8, "engine": "fsdp", "checkpointing": "full"},
            id="FSDP",
        ),
        pytest.param(
            "t5-base", "t4", {"num_gpus": 4, "zero_stage": 3, "precision": "fp16-master"},
            id="ZeRO-3",
        ),
        pytest.param("llama-3.1-8b", "v100", {"seq_len": 512}, id="nothing fits"),
    ],
)  # fmt: skip
def test_it_is_the_last_that_fits(model: str, gpu: str, setup: dict[str, Any]) -> None:
    spec, card, base = load_model(model), load_gpu(gpu), TrainingSetup(**setup)
    largest = largest_micro_batch(spec, base, card)

    def verdict(size: int) -> Verdict | None:
        return estimate(spec, replace(base, micro_batch_size=size), card).verdict

    assert largest == 0 or verdict(largest) is Verdict.FITS
    assert verdict(largest + 1) is not Verdict.FITS
    start = replace(base, micro_batch_size=3)
    known = estimate(spec, start, card)
    assert largest_micro_batch(spec, start, card, known=known) == largest


@given(
    st.integers(0, 3000), st.integers(1, 500), st.integers(0, 500), st.integers(1, 300),
    st.one_of(st.none(), st.integers(1, 400)), st.one_of(st.none(), st.integers(1, 500)),
)  # fmt: skip
def test_any_rising_need_is_searched_right(
    capacity: int, slope: int, bend: int, first: int, told: int | None, ram_slope: int | None
) -> None:
    """A need that is flat at first and then rises, as one of a step and a backward pass is; of RAM in steps."""

    def rooms(size: Any) -> tuple[int, ...]:
        card = capacity - max(bend, slope * size // 7)
        return (card,) if ram_slope is None else (card, 2500 - ram_slope * size // 7 // 300 * 300)

    def room(size: Any) -> int:
        return min(rooms(size))

    search = LargestFit(lambda size: size, rooms=rooms, limit=400, first=first)
    if told is not None:
        search.tell(told, told)  # type: ignore[arg-type]
    expected = max((size for size in range(1, 401) if room(size) >= 0), default=0)
    assert search.run() == expected


@given(st.lists(st.integers(1, 99), unique=True).map(sorted), st.integers(0, 100))
def test_the_largest_of_a_list(sizes: list[int], limit: int) -> None:
    expected = max((size for size in sizes if size <= limit), default=None)
    assert largest_of(sizes, lambda size: size <= limit) == expected


def test_a_range_of_expert_shares_fits_at_its_high_end() -> None:
    """The largest micro-batch fits where the fullest GPU's experts are given more than an even share."""
    setup = TrainingSetup(
        num_gpus=16,
        engine="fsdp",
        expert_parallel=8,
        seq_len=2048,
        expert_imbalance="1-1.5",  # type: ignore[arg-type]
    )
    model, gpu = load_model("mixtral-8x7b"), load_gpu("h100")
    size = largest_micro_batch(model, setup, gpu)
    assert size
    found, larger = (
        estimate(model, replace(setup, micro_batch_size=each), gpu) for each in (size, size + 1)
    )
    assert found.verdict is Verdict.FITS
    assert larger.verdict is not Verdict.FITS
    assert found.fullest.peak_bytes > found.peak_bytes


def test_no_size_far_beyond_the_largest_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that autocast casts to nothing say nothing of how much a batch may grow: 65,536 sequences were asked."""
    asked: list[int] = []

    def estimated(model: Any, setup: TrainingSetup, gpu: Any) -> Any:
        asked.append(setup.micro_batch_size)
        return estimate(model, setup, gpu)

    monkeypatch.setattr("memplan.search.batch.bare_estimate", estimated)
    setup = TrainingSetup(
        adapter={"lora": {"rank": 8}}, checkpointing="full", precision="bf16-autocast", seq_len=1024,  # type: ignore[arg-type]
    )  # fmt: skip
    largest = largest_micro_batch(load_model("llama-3.1-8b"), setup, load_gpu("l4"))
    assert largest
    assert max(asked) <= 4 * largest
