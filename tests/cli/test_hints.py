"""Every hint keeps its promise: its options are typed, and the answer is what it said.

Jobs are drawn at random, always the same ones; a job counts where it runs out of memory.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NUM_JOBS = 200
NUM_IN_CI = 4
MODELS = (
    "gpt2-xl", "t5-3b", "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b", "mixtral-8x7b",
    "bert-large-uncased", "gemma-2-9b", "llama-3.1-70b", "xlm-roberta-xxl",
)  # fmt: skip
GPUS = ("t4", "v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100", "b200", "l4")
CHOICES: dict[str, tuple[str, ...]] = {
    "--gpus": ("1", "2", "4", "8", "16"),
    "--batch-size": ("1", "2", "8", "32", "50"),
    "--seq-len": ("128", "512"),
    "--checkpointing": ("none", "none", "full", "0.5"),
}
ENGINES: tuple[tuple[str, ...], ...] = (
    (), ("--zero", "0"), ("--zero", "1"), ("--zero", "2"), ("--zero", "3"),
    ("--zero", "2", "--offload", "cpu"), ("--zero", "3", "--offload", "none"),
    ("--engine", "fsdp"), ("--engine", "ddp"), ("--engine", "ddp", "--precision", "fp16"),
    ("--engine", "fsdp", "--fsdp-strategy", "shard_grad_op"), ("--engine", "fsdp1"),
    ("--precision", "fp16"), ("--engine", "ddp", "--precision", "fp32"), ("--precision", "bf16"),
    ("--zero", "2", "--engine-option", "overlap_comm=false"),
    ("--engine", "ddp", "--engine-option", "gradient_as_bucket_view=true"),
)  # fmt: skip
HINT = re.compile(
    r"^ +(?:(?:to fit|nearest): (?P<flags>.+) \()?"
    r"(?P<missing>[\d.,]+) GiB more needed: "
    r"(?:no change .* gives that|(?P<change>.+) saves? (?P<saved>[\d.,]+) GiB"
    r"(?P<outcome>, [\w ]+)?(?P<time>; [\w .]+)?\))$",
    re.MULTILINE,
)
GIB = 2**30


def jobs() -> Iterator[list[str]]:
    """Command lines, always the same ones."""
    chance = random.Random(52)
    while True:
        job = [chance.choice(MODELS), "--gpu", chance.choice(GPUS), *chance.choice(ENGINES)]
        for option, values in CHOICES.items():
            job += [option, chance.choice(values)]
        yield job


def changed(job: list[str], flags: str) -> list[str]:
    """A command line with a hint's options instead of its own."""
    given, _, left = flags.partition(", without ")
    dropped = left.split(" and ") if left else []
    words = given.split()
    new = [(words[i], words[i + 1]) for i in range(0, len(words), 2)]
    single = {name for name, _ in new} - {"--engine-option"}
    kept = job[:1]
    for name, value in zip(job[1::2], job[2::2], strict=True):
        text = f"{name} {value.partition('=')[0]}" if name == "--engine-option" else name
        if name not in single and text not in dropped:
            kept += [name, value]
    return kept + [word for pair in new for word in pair]


def check(job: list[str], run: Callable[..., Any]) -> re.Match[str] | None:
    """What is said of a job that runs out of memory, tried if it is a change; None: it does not."""
    told = run("estimate", *job)
    assert told.exit_code in (0, 3), told.stderr
    found = HINT.search(told.stdout)
    assert (found is not None) == ("more needed" in told.stdout), told.stdout
    if found is None:
        return None
    rows = rows_of(run("estimate", *job, "--format", "json"))
    assert all(row["verdict"] in ("OOM", "tight") for row in rows)
    if any(row["verdict"] == "tight" for row in rows):
        return found
    before = min(row["total_low_bytes"] for row in rows)
    missing = before - rows[0]["gpu_capacity_bytes"]
    assert missing / GIB == pytest.approx(number(found["missing"]), abs=0.06)
    if found["flags"] is None:
        return found
    new = changed(job, found["flags"])
    after = rows_of(run("estimate", *new, "--format", "json"))
    promised = "tight" if found["outcome"] else "fits"
    wanted = number(found["saved"])
    saved = [(before - row["total_low_bytes"]) / GIB for row in after if row["verdict"] == promised]
    if any(each == pytest.approx(wanted, abs=0.06) for each in saved):
        return found
    pytest.fail(f"{' '.join(job)}\n{found[0]}\n{saved}")


def rows_of(outcome: Any) -> list[dict[str, Any]]:
    assert outcome.exit_code == 0, outcome.stderr
    rows: list[dict[str, Any]] = json.loads(outcome.stdout)["rows"]
    return rows


def number(text: str) -> float:
    return float(text.replace(",", ""))


def check_jobs(run: Callable[..., Any], *, start: int, stop: int) -> None:
    seen = 0
    for job in jobs():
        if seen >= stop:
            return
        if seen < start:
            seen += "more needed" in run("estimate", *job).stdout
        else:
            seen += check(job, run) is not None


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.mark.long
def test_hints_do_what_they_say(run: Callable[..., Any]) -> None:
    check_jobs(run, start=0, stop=NUM_IN_CI)


@pytest.mark.fuzz
def test_all_hints_do_what_they_say(run: Callable[..., Any]) -> None:
    check_jobs(run, start=0, stop=NUM_JOBS)


@pytest.mark.long
def test_deepseek_v3_on_512_gpus_is_not_given_up(run: Callable[..., Any]) -> None:
    told = HINT.search(run("estimate", "deepseek-v3", "--gpus", "512", "--gpu", "h100").stdout)
    assert told is not None
    assert told["flags"] is not None
