"""Options of adapters, optimizers, lengths and jobs as people mistype and combine them."""

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--lora 0", "--lora: rank: must be a whole number from 1 to 1000000, got 0"),
        ("--lora-dropout 0", "--lora-dropout: means nothing without --lora"),
        ("--lora 8 --lora-targets ,", "--lora: targets: expected names of modules, or all-linear"),
        ("--lengths ,", "--lengths: give a histogram"),
        ("--lengths 512:60%,512:40%", "--lengths: 512: is given twice: add its shares up"),
        ("--lengths 512:100%,packed,padded", "--lengths: packed and padded: give one"),
        ("--lengths 0:100%", "--lengths: 0: expected a number of tokens"),
        ("--gpus 8 --optim muon --optim-args rank=3", "muon has no option 'rank'"),
        ("--gpus 8 --zero 1 --optim galore_adamw", "galore-adamw steps whole matrices"),
        ("--gpus 8 --optimizer-in-backward", "is modelled on one GPU without an engine"),
    ],
)
def test_what_cannot_be_is_one_line(run: Run, options: str, expected: str) -> None:
    done = run("estimate", "gpt2", "--gpu", "h100", *options.split())
    assert done.exit_code in (2, 3)
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_an_empty_text_is_no_file(run: Run) -> None:
    done = run("estimate", "gpt2", "--gpu", "h100", "--lengths", "")
    assert done.exit_code == 3
    assert done.stderr.startswith("memplan: error: --lengths: give a histogram")


@pytest.mark.parametrize(
    ("options", "shown", "not_shown"),
    [
        ("--optim galore_adamw", "DDP", "ZeRO-2"),
        ("--optim muon", "ZeRO-0", "ZeRO-1"),
        ("--fp8 torchao-rowwise", "ZeRO-2", "ZeRO-3"),
        ("--lora 8 --quantize int8", "ZeRO-2", "ZeRO-3"),
    ],
)
def test_engines_that_nobody_named_are_compared_where_they_can_be(
    run: Run, options: str, shown: str, not_shown: str
) -> None:
    done = run("estimate", "gpt2", "--gpu", "h100", "--gpus", "8", *options.split())
    assert done.exit_code == 0, done.stderr
    assert shown in done.stdout
    assert not_shown not in done.stdout


@pytest.mark.parametrize(
    "options", ["--optim galore_adamw", "--optimizer-in-backward", "--fp8 torchao-rowwise"]
)
def test_what_does_not_fit_is_advised_of_what_can_be(run: Run, options: str) -> None:
    """A change that cannot be is passed over, and the next one tried."""
    done = run("estimate", "llama-3.1-8b", "--gpu", "a100", *options.split())
    assert done.exit_code == 0, done.stderr
    assert "OOM" in done.stdout
