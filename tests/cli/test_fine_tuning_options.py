"""Options of adapters, optimizers, lengths and jobs as people mistype and combine them."""

import re
from collections.abc import Callable
from pathlib import Path
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
        ("--engine-option foo=1", "--engine-option: ddp has no option 'foo'"),
        ("--job orpo:log_probabilities=fused", "orpo has no fused ones; it is a setting of dpo"),
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
    done = run("estimate", "llama-3.1-8b", "--gpu", "h100", *options.split())
    assert done.exit_code == 0, done.stderr
    assert "does not fit" in done.stdout


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ("--optimizer-in-backward", ["v100-sxm2-32gb"]),
        ("--optim lomo", ["v100-sxm2-32gb"]),
        ("--fp8 torchao-rowwise", ["v100-sxm2-32gb", "a100-sxm4-80gb"]),
        ("--attention flash3", ["v100-sxm2-32gb", "a100-sxm4-80gb"]),
    ],
)
def test_usual_cards_that_cannot_run_it_are_left_out(
    run: Run, options: str, left_out: list[str]
) -> None:
    done = run("estimate", "gpt2", *options.split())
    assert done.exit_code == 0, done.stderr
    assert re.findall(r"memplan: (\S+) is left out", done.stderr) == left_out
    assert "H100-80" in done.stdout


def test_where_no_usual_card_runs_it_one_is_asked_for(run: Run) -> None:
    done = run("estimate", "gpt2", "--fp8", "te-mxfp8")
    assert done.exit_code == 2
    assert "name one with --gpu, such as b200" in done.stderr
    assert run("estimate", "gpt2", "--fp8", "te-mxfp8", "--gpu", "b200").exit_code == 0


def test_a_setup_file_holds_the_optimizer_s_own_settings(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text("{optimizer: galore_adamw, optimizer_options: {rank: 64}}", encoding="utf-8")
    done = run("estimate", "gpt2", "--gpu", "h100", "--setup", str(path))
    assert done.exit_code == 0, done.stderr
    assert "galore-adamw (rank 64)" in " ".join(done.stdout.split())


def test_an_adapter_is_named_with_all_that_it_was_given(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    lora = (
        "rank: 4, exclude: [c_fc], targets: all-linear, rank_pattern: {c_attn: 8}, lora_bias: true"
    )
    path.write_text(f"adapter: {{lora: {{{lora}}}}}", encoding="utf-8")
    done = run("estimate", "gpt2", "--gpu", "h100", "--setup", str(path), "--assumptions")
    text = " ".join(done.stdout.split())
    for words in ("but not c_fc", "rank 8 on c_attn", "B with a bias"):
        assert words in text


def test_the_peak_of_a_timeline_fits_a_narrow_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = run("explain", "mixtral-8x7b", "--gpu", "h100", "--freeze", "layers.0-1")
    assert all(len(line) <= 40 for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "asked",
    [
        ("gpt2", "--gpus", "4", "--pp", "4", "--gradient-accumulation", "8"),
        ("mixtral-8x7b", "--gpus", "16", "--engine", "fsdp", "--ep", "8"),
    ],
    ids=["stages", "experts"],
)
def test_split_models_are_answered_on_usual_cards(run: Run, asked: tuple[str, ...]) -> None:
    result = run("estimate", *asked)
    assert result.exit_code == 0, result.stderr
    assert "H100-80" in result.stdout
