"""``max``: the value fits by an estimate of its own, and the next one does not."""

import random
from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.search.depth import with_layers
from memplan.search.largest import largest, largest_setup, size_of, with_size
from memplan.search.quantity import Quantity
from tests.cli.test_hints import rows_of

LORA = memplan.Lora(rank=8, targets="all-linear")
CARDS = ("t4", "l4", "v100-16gb", "4090")
MODELS = ("gpt2", "qwen2.5-0.5b", "bert-base-uncased", "t5-small", "llama-3.2-1b")


def fits(model: Any, setup: Any, card: Any, quantity: Quantity, size: int) -> bool:
    if quantity is Quantity.LAYERS:
        answer = memplan.estimate(with_layers(model, size), setup, gpu=card)
    else:
        answer = memplan.estimate(model, with_size(setup, quantity, size), gpu=card)
    return answer.verdict is memplan.Verdict.FITS


@pytest.mark.parametrize("quantity", Quantity, ids=lambda each: each.value)
def test_the_value_fits_and_the_next_one_does_not(quantity: Quantity) -> None:
    chance, seen = random.Random(quantity.value), []
    for _ in range(4):
        model = memplan.load_model(chance.choice(MODELS))
        card = memplan.load_gpu(chance.choice(CARDS))
        setup = memplan.TrainingSetup(
            seq_len=chance.choice((128, 512)), micro_batch_size=chance.choice((1, 4)),
            checkpointing=chance.choice(("none", "full")),
            adapter=LORA if quantity is Quantity.RANK else None,
        )  # fmt: skip
        found = largest_setup(model, setup, card, quantity)
        seen.append(found.fits)
        assert found.fits == fits(model, setup, card, quantity, found.size)
        if not found.fits:
            continue
        if found.next_size is not None:
            assert not fits(model, setup, card, quantity, found.next_size)
        answer = largest(model, setup, card, quantity)
        assert answer is not None
        assert size_of(answer, quantity) == found.size
    assert any(seen)


def test_positions_end_a_sequence() -> None:
    found = largest_setup(
        memplan.load_model("gpt2"), memplan.TrainingSetup(), memplan.load_gpu("h100"), Quantity.SEQ_LEN
    )  # fmt: skip
    assert (found.size, found.next_size) == (1024, None)


def test_a_global_batch_is_made_up() -> None:
    """Of 96 sequences over two GPUs each takes 48: micro-batches that divide them."""
    model, card = memplan.load_model("gpt2"), memplan.load_gpu("t4")
    setup = memplan.TrainingSetup(num_gpus=2, seq_len=256)
    found = largest_setup(model, setup, card, Quantity.MICRO_BATCH, global_batch_size=96)
    assert found.setup.micro_batch_size * found.setup.gradient_accumulation_steps == 48
    assert found.next_size is not None
    assert 48 % found.next_size == 0
    larger = memplan.TrainingSetup(
        num_gpus=2, seq_len=256, micro_batch_size=found.next_size,
        gradient_accumulation_steps=48 // found.next_size,
    )  # fmt: skip
    assert memplan.estimate(model, found.setup, gpu=card).verdict is memplan.Verdict.FITS
    assert memplan.estimate(model, larger, gpu=card).verdict is not memplan.Verdict.FITS


def test_sequences_that_ranks_share_grow_by_what_can_be_shared() -> None:
    setup = memplan.TrainingSetup(num_gpus=4, engine="fsdp", context_parallel=4, seq_len=1024)
    found = largest_setup(
        memplan.load_model("qwen2.5-0.5b"), setup, memplan.load_gpu("l4"), Quantity.SEQ_LEN
    )
    assert found.fits
    assert found.size % 8 == 0
    assert found.next_size == found.size + 8


def test_none_fits() -> None:
    model, card = memplan.load_model("llama-3-70b"), memplan.load_gpu("4090")
    assert memplan.largest(model, gpu=card) is None
    found = largest_setup(model, memplan.TrainingSetup(), card, Quantity.MICRO_BATCH)
    assert (found.fits, found.size) == (False, 1)


def test_there_is_no_rank_without_lora() -> None:
    with pytest.raises(SetupError, match="no LoRA"):
        memplan.largest("gpt2", of="rank", gpu="t4")


def test_estimate_answers_max(run: Any) -> None:
    (row,) = rows_of(
        run("estimate", "gpt2", "--batch-size", "max", "--gpu", "t4", "--format", "json")
    )
    assert row["verdict"] == "fits"
    assert row["micro_batch_size"] == row["largest_micro_batch"]
    printed = run("estimate", "gpt2", "--lora", "max", "--gpu", "t4", "--seq-len", "512").stdout
    assert "--lora 768 is all there is" in printed
    (row,) = rows_of(
        run("estimate", "gpt2", "--num-layers", "3", "--gpu", "t4", "--format", "json")
    )
    assert row["num_params"] == 60_648_960  # 124,439,808 - 9 x 7,087,872


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch-size", "max"), "--batch-size max: is the largest that fits one card: name it"),
        (
            ("--seq-len", "max", "--gpu", "t4,l4"),
            "--seq-len max: is the largest that fits one card",
        ),
        (("--seq-len", "max", "--batch-size", "max", "--gpu", "t4"), "only one value can be max"),
        (("--batch-size", "mx", "--gpu", "t4"), "'mx' is not a whole number, nor max"),
    ],
)
def test_what_is_no_question(options: tuple[str, ...], said: str, run: Any) -> None:
    outcome = run("estimate", "gpt2", *options)
    assert outcome.exit_code == 2
    assert said in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_nothing_fits_is_an_answer(run: Any) -> None:
    outcome = run("estimate", "llama-3-70b", "--batch-size", "max", "--gpu", "4090")
    assert outcome.exit_code == 0
    assert "nothing fits RTX4090, not even 1" in outcome.stdout


def test_a_sweep_finds_the_largest_of_each_setup(run: Any, tmp_path: Any) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "version: 1\nmodel: gpt2\nhardware: {gpu: t4}\n"
        "axes: {micro_batch_size: max, seq_len: [128, 512], checkpointing: [none, full]}\n"
    )
    rows = rows_of(run("sweep", str(file), "--format", "json"))
    typed = ("--batch-size", "max", "--seq-len", "128,512", "--checkpointing", "none,full")
    assert rows == rows_of(run("sweep", "gpt2", *typed, "--gpu", "t4", "--format", "json"))
    assert len({row["micro_batch_size"] for row in rows}) == 4
    for row in rows:
        setup = memplan.TrainingSetup(seq_len=row["seq_len"], checkpointing=row["checkpointing"])
        found = memplan.largest("gpt2", setup, gpu="t4")
        assert found is not None
        assert found.setup.micro_batch_size == row["micro_batch_size"]
    outcome = run("sweep", "gpt2", "--batch-size", "max")
    assert outcome.exit_code != 0
    assert "name one" in outcome.stderr
