"""What ``--help`` shows: a page that fits a screen, the rest by topic, each of them a page too.

An option stands on its topic's page by its ``rich_help_panel``; the first page of a command names the ones
that most people use, in words that take one line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from memplan.cli.top_help import rows
from memplan.fast_dataclass import dataclass

EVERYTHING = "all"
"""The topic that holds all others."""
TOPICS = {
    "Hardware": "hardware",
    "Goal": "goal",
    "Training": "training",
    "Engine": "engine",
    "Parallel": "parallel",
    "Kernels": "kernels",
    "Data": "data",
    "Files": "files",
    "Adapters": "adapters",
    "Job": "job",
    "Model": "model",
    "What is compared": "pair",
    "Published formulas": "formulas",
    "DeepSpeed's own tables": "deepspeed",
    "Output": "output",
    "Time and cost": "time",
    "Checks (exit code 5 when one fails)": "checks",
}
"""A group's heading and the word that asks for its page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Common:
    """Some of the options that most people use."""

    title: str
    example: str
    """What follows ``memplan``."""
    options: Mapping[str, str]
    """An option with its value, and what it is about, in a line of 80 columns."""


_CARDS = "cards to judge by: `memplan gpus`, 46GiB, a100@60GiB (left)"
_CHECK = {"--check [all|any]": "exit code 5 where one does not fit, for CI"}
_FORMAT = {"--format FORMAT": "table, json, csv or markdown"}
_SETUP = {
    "--engine NAMES": "ddp, deepspeed, fsdp, fsdp1 or megatron",
    "--zero STAGES": "DeepSpeed's ZeRO stages: 3, or 1-3",
    "--batch-size N": "sequences of one micro-batch on one GPU",
    "--seq-len N": "tokens of a sequence: 4096 or 4k",
    "--checkpointing WHAT": "none, full, selective, or layers: 0.5, 8, 0-7,12",
    "--lora [RANK]": "train LoRA adapters of this rank (16), the model frozen",
}

COMMON: Mapping[str, tuple[Common, ...]] = {
    "estimate": (
        Common(
            title="What it runs on",
            example="estimate llama-3.1-8b --gpus 8 --gpu h100",
            options={"--gpus N": "GPUs in all, over all nodes", "--gpu NAMES": _CARDS},
        ),
        Common(
            title="How it trains",
            example="estimate llama-3.1-8b --gpus 8 --zero 3 --seq-len 4k",
            options=_SETUP | {"--precision NAME": "bf16, fp16, fp32, or the engine's word for one"},
        ),
        Common(
            title="What is printed",
            example="estimate t5-3b --gpu a100 --check",
            options=_CHECK | _FORMAT | {"--assumptions": "everything that was taken for granted"},
        ),
    ),
    "sweep": (
        Common(
            title="What it runs on",
            example="sweep llama-3.1-8b --gpus 8..64 --gpu a100,h100",
            options={"--gpus LIST": "numbers of GPUs: 8,16 or 8..64", "--gpu NAMES": _CARDS},
        ),
        Common(
            title="What varies",
            example="sweep llama-3.1-8b --zero 1-3 --batch-size 1..8",
            options={
                "--engine NAMES": "ddp, deepspeed, fsdp, fsdp1, megatron",
                "--zero LIST": "DeepSpeed's ZeRO stages: 1-3",
                "--batch-size LIST": "sequences of one micro-batch: 1..32",
                "--seq-len LIST": "tokens of a sequence: 2k..8k",
                "--checkpointing NAMES": "none,full,selective, or shares: 0.5",
                "--lora [RANK]": "train LoRA adapters of this rank (16), the model frozen",
                "--setup FILE": "a whole setup, or a grid, as a file",
            },
        ),
        Common(
            title="What is printed",
            example="sweep t5-3b --gpus 8 --pivot peak,zero,batch",
            options={"--pivot NAMES": "two axes as a matrix: peak,zero,batch"}
            | _CHECK
            | {"--format FORMAT": "table, json, jsonl, csv or markdown"},
        ),
    ),
    "plan": (
        Common(
            title="What it runs on",
            example="plan llama-3.1-8b --gpus 8 --gpu h100",
            options={"--gpus LIST": "numbers of GPUs: 8, or 8..64", "--gpu NAMES": _CARDS},
        ),
        Common(
            title="What is wanted",
            example="plan llama-3.1-70b --gpus 8..64 --gpu h100 --objective gpus",
            options={
                "--objective WHAT": "what comes first: speed, cost, gpus or batch",
                "--maximize WHAT": "the largest batch, seq-len or layers that fit",
                "--seq-len N": "tokens of a sequence: 4096 or 4k",
                "--global-batch-size N": "sequences of one step over all GPUs",
                "--allow NAMES": "what may be given up: 8bit, lora, qlora",
                "--lora [RANK]": "train LoRA adapters of this rank (16), the model frozen",
            },
        ),
        Common(
            title="What is printed",
            example="plan llama-3.1-8b --gpus 8 --gpu h100 --emit deepspeed",
            options={
                "--limit N": "setups to show",
                "--emit KIND": "write the first as a file: deepspeed, accelerate, ...",
                "--tokens N": "tokens of the whole run, 300B: its days and GPU-hours",
                "--format FORMAT": "table, json, jsonl, csv or markdown",
            },
        ),
    ),
    "explain": (
        Common(
            title="What it runs on",
            example="explain llama-3.1-8b --gpus 8 --gpu h100",
            options={"--gpus N": "GPUs in all, over all nodes", "--gpu NAME": _CARDS},
        ),
        Common(
            title="How it trains",
            example="explain llama-3.1-8b --gpus 8 --zero 3 --seq-len 4k",
            options=_SETUP,
        ),
        Common(
            title="What is shown",
            example="explain llama-3.1-8b --component activations",
            options={
                "--component NAMES": "the arithmetic of one component, or of several",
                "--timeline": "the step over time, drawn",
                "--full": "every phase, every component, every tensor",
                "--report FILE": "a page to open in a browser: report.html",
            },
        ),
    ),
    "compare": (
        Common(
            title="What is compared",
            example='compare llama-3.1-8b --gpus 8 --zero 2 --vs "--zero 3"',
            options={
                "--vs OPTIONS": "the same with these options",
                "--setup FILE FILE": "two files, each with a whole setup",
                "--preset NAME NAME": "two training stacks' defaults",
                "--formulas": "memplan beside published formulas",
            },
        ),
        Common(
            title="How it trains",
            example="compare llama-3.1-8b mistral-7b --gpu a100 --lora 16",
            options={
                "--gpus N": "GPUs in all, over all nodes",
                "--gpu NAME": "the card to judge by",
                **_SETUP,
            },
        ),
    ),
    "verify": (
        Common(
            title="What it runs on",
            example="verify gpt2 --fake --gpu a100",
            options={
                "--gpus N": "GPUs in all; under torchrun as many as it started",
                "--fake": "follow the code on fake tensors: no GPU is needed",
                "--gpu NAME": "the card to pretend where there is none",
            },
        ),
        Common(
            title="How it trains",
            example="verify gpt2 --batch-size 4 --seq-len 512",
            options=_SETUP,
        ),
        Common(
            title="What is measured",
            example="verify gpt2 --record my-card.json",
            options={
                "--steps N": "optimizer steps; the last is measured",
                "--record FILE": "write the measurement down, for others",
                "--within SHARE": "how far a peak may be off",
            },
        ),
    ),
    "flops": (
        Common(
            title="How it trains",
            example="flops llama-3.1-8b --batch-size 4 --seq-len 4k",
            options={
                "--gpus N": "GPUs in all, over all nodes",
                **{
                    name: text
                    for name, text in _SETUP.items()
                    if name.startswith(("--batch", "--seq", "--check"))
                },
                "--attention NAME": "eager, sdpa, flash or flash3",
            },
        ),
        Common(
            title="What is counted",
            example="flops llama-3.1-8b --scores causal",
            options={"--scores WHAT": "every score, or what a causal mask lets through"} | _FORMAT,
        ),
    ),
}
"""The first page of each command; one that is not here has so few options that all are on it."""


def help_topic(args: Sequence[str], known: Sequence[str]) -> tuple[list[str], str]:
    """The command line without the topic behind ``--help``, and the topic.

    Raises ``UsageError`` for a word that is nearly one.

    >>> help_topic(["t5-3b", "--help", "parallel"], ("parallel",))
    (['t5-3b', '--help'], 'parallel')
    """
    place = next((number for number, word in enumerate(args) if word in ("--help", "-h")), None)
    if place is None or place + 1 >= len(args):
        return list(args), ""
    word = args[place + 1].lower()
    if word not in known:
        from memplan.errors import UsageError, did_you_mean

        if hint := did_you_mean(word, tuple(known)):
            msg = f"--help: there is no topic {word!r}.{hint}"
            raise UsageError(msg)
        return list(args), ""
    return [*args[: place + 1], *args[place + 2 :]], word


def topics_of(params: Sequence[Any]) -> dict[str, list[Any]]:
    """A command's options by topic, in the order of ``TOPICS``."""
    found: dict[str, list[Any]] = {word: [] for word in TOPICS.values()}
    for param in params:
        title = getattr(param, "rich_help_panel", None)
        if title is not None:
            found[TOPICS[title]].append(param)
    return {word: options for word, options in found.items() if options}


def write_first_page(formatter: Any, name: str, topics: Mapping[str, Sequence[Any]]) -> None:
    """Write the options that most people use, an example of each group, and where the others are."""
    widest = max(len(option) for each in COMMON[name] for option in each.options)
    for each in COMMON[name]:
        with formatter.section(each.title):
            write_rows(formatter, list(each.options.items()), least=widest)
            formatter.write(f"  $ memplan {each.example}\n")
    with formatter.section("More, by topic"):
        listed = ", ".join(f"{word} ({len(options)})" for word, options in topics.items())
        formatter.write_text(f"memplan {name} --help TOPIC: {listed}, {EVERYTHING}")


def write_rows(formatter: Any, named: Sequence[tuple[str, str]], *, least: int = 0) -> None:
    """Write names and what each is about side by side."""
    for line in rows(named, formatter.width - formatter.current_indent, least=least):
        formatter.write(f"{line}\n")
