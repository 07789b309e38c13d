"""Jobs that people come with, each a command: the first three lines answer, the first 25 show why.

Whoever asks knows the README. A job's words are what has to be read there, as regular expressions; a
terminal has 80 columns.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

Run = Callable[..., Any]
ANSWER_LINES, SCREEN_LINES, COLUMNS = 3, 25, 80

NEEDS = r"needs [\d.,]+-[\d.,]+ of [\d.,]+ GiB"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One question."""

    question: str
    command: str
    answer: str
    """Within the first three lines."""
    words: tuple[str, ...] = ()
    """Within the first 25."""
    exit_code: int = 0


JOBS = (
    Job(question="does a full fine-tune of 8B fit on one H100",
        command="estimate llama-3.1-8b --gpu h100",
        answer=rf"^H100-80  does not fit +{NEEDS}", words=("to fit: --", "activations", "peak")),
    Job(question="and on eight", command="estimate llama-3.1-8b --gpus 8 --gpu h100",
        answer=rf"^H100-80  fits from ZeRO-1 +{NEEDS} +batch <= \d", words=("ZeRO-3", "FSDP2")),
    Job(question="which of the usual cards", command="estimate t5-3b --gpus 8",
        answer=r"^V100-32  fits from ZeRO-1", words=("A100-80  fits", "H100-80  fits", "DDP +53")),
    Job(question="with my stage", command="estimate llama-3.1-8b --gpus 8 --zero 3 --offload none --gpu a100",
        answer=rf"^A100-80  fits +{NEEDS} +batch <= \d", words=("gathered parameters", r"^ peak")),
    Job(question="with FSDP and LoRA", command="estimate llama-3.1-8b --gpus 2 --engine fsdp --lora 16 --gpu 4090",
        answer=rf"^RTX4090  .*{NEEDS}", words=(r"8\.03B, 6\.82M trained", "FSDP2")),
    Job(question="QLoRA on 24 GB",
        command="estimate llama-3.1-8b --gpu 24GiB --quantize nf4 --lora 16 --checkpointing full --precision bf16",
        answer=rf"^24GiB  fits +{NEEDS}", words=("parameters", "logits and loss")),
    Job(question="the largest batch",
        command="estimate llama-3.2-1b --gpu a100-40gb --precision bf16 --batch-size max",
        answer=rf"^A100-40  fits +{NEEDS}", words=(r"micro-batch \d+",)),
    Job(question="the longest sequence",
        command="estimate llama-3.2-1b --gpu a100-40gb --precision bf16 --seq-len max",
        answer=rf"^A100-40  fits +{NEEDS}", words=(r"\d,\d{3} tokens",)),
    Job(question="a card that is in no list", command="estimate gpt2-xl --gpu-memory 20GiB --seq-len 512 --lora 8",
        answer=rf"^20GiB  fits +{NEEDS}", words=("activations",)),
    Job(question="is there enough CPU RAM",
        command="estimate llama-3.1-8b --gpus 8 --zero 2 --offload cpu --gpu a100-40gb --cpu-memory 100GiB",
        answer=r"^A100-40  fits, but not the CPU RAM", words=(r"CPU RAM [\d.]+ of 100\.0 GiB",)),
    Job(question="my ds_config.json",
        command="estimate mistral-7b --gpus 8 --deepspeed-config configs/files/zero3-offload.json --gpu a100-40gb",
        answer=rf"^A100-40  fits +{NEEDS}", words=("cpu optimizer", "ZeRO-3")),
    Job(question="my accelerate file",
        command="estimate llama-3.2-3b --gpus 8 --accelerate-config configs/files/accelerate-fsdp2.yaml --gpu h100",
        answer=rf"^H100-80  fits +{NEEDS}", words=("FSDP2",)),
    Job(question="what a stack does by default", command="estimate llama-3.2-1b --preset unsloth --gpu a100",
        answer=rf"^A100-80  fits +{NEEDS}", words=("preset unsloth fills in", "checkpointing full")),
    Job(question="how long does a step take", command="estimate llama-3.2-1b --gpu h100 --time",
        answer=rf"^H100-80  fits +{NEEDS}", words=(r"Step on H100-80: [\d.]+ ms", "tokens/s per GPU")),
    Job(question="what does the run cost",
        command="estimate llama-3.2-1b --gpus 8 --zero 2 --offload none --gpu h100 --tokens 10B --price 2.5",
        answer=rf"^H100-80  fits +{NEEDS}", words=(r"10B tokens: [\d.]+", "GPU-hours", r"cost [\d,]+")),
    Job(question="what does every word mean", command="estimate gpt2 --gpu t4 --legend",
        answer=rf"^T4  fits +{NEEDS}", words=("peak",)),
    Job(question="is it so under DeepSpeed's formula", command="estimate t5-3b --gpus 8 --deepspeed",
        answer="DeepSpeed's estimate for ZeRO-2", words=("per CPU",)),
    Job(question="does it fit, in CI", command="estimate llama-3.1-8b --gpu h100 --check",
        answer=r"^H100-80  does not fit", exit_code=5),
    Job(question="why so many bytes", command="explain llama-3.1-8b --gpus 8 --zero 3 --gpu h100",
        answer=rf"^H100-80  fits +{NEEDS}",
        words=(r"activations +12\.32 +\d+% █+", "optimizer states", "By phase: load", "More: --component")),
    Job(question="what are the activations", command="explain llama-3.1-8b --gpu h100 --component activations",
        answer=r"^H100-80  does not fit", words=("activations: ", r"decoder\.layers x 32 = 32 x [\d,]+ B")),
    Job(question="two of them", command="explain llama-3.1-8b --gpu h100 --component gradients,optimizer_states",
        answer=r"^H100-80  does not fit", words=("gradients: ", "optimizer states: ", "B x 8,030,261,248")),
    Job(question="the step over time", command="explain llama-3.2-1b --gpu h100 --timeline",
        answer=rf"^H100-80  fits +{NEEDS}", words=("▼ peak", "backward")),
    Job(question="what does an operation keep", command="explain --operation softmax",
        answer="softmax", words=("MiB",)),
    Job(question="what does checkpointing change",
        command='compare llama-3.2-1b --gpu v100 --vs "--checkpointing full"',
        answer=rf"^as given +V100-32  .*{NEEDS}",
        words=("--checkpointing full needs [\\d.]+ GiB less", r"activations +[\d.]+ +[\d.]+ +-")),
    Job(question="ZeRO-2 or ZeRO-3", command='compare llama-3.1-8b --gpus 8 --zero 2 --gpu h100 --vs "--zero 3"',
        answer=r"^--vs +H100-80  fits", words=("a token then takes|tokens then come|no slower", "gathered parameters")),
    Job(question="one model or the other", command="compare llama-3.1-8b mistral-7b --lora 16",
        answer=r"^mistral-7b +A100-80  fits", words=("logits and loss",)),
    Job(question="what do the formulas say", command="compare llama-3.1-8b --formulas",
        answer=r"memplan: [\d.]+ GiB", words=("rule of thumb",)),
    Job(question="does this grid fit",
        command="sweep llama-3.1-8b --gpus 8 --zero 1-3 --batch-size 1..4 --gpu h100",
        answer=rf"^H100-80  6 of 9 fit, 3 do not fit +{NEEDS}", words=(r"ZeRO-3 +33\.1 fits",)),
    Job(question="batch against length",
        command="sweep llama-3.2-1b --batch-size 1..8 --seq-len 1k..4k --gpu a100-40gb --precision bf16 "
        "--pivot total,seq-len,batch",
        answer=r"^A100-40  \d+ of \d+ fit", words=("Everywhere: ",)),
    Job(question="how many FLOPs", command="flops llama-3.1-8b",
        answer=r"^98\.81 TFLOP a micro-batch, 48\.25 GFLOP a token", words=("feed-forward up",)),
    Job(question="which models are there", command="models llama", answer=r"^\d+ models", words=("llama-7b",)),
    Job(question="where are a model's parameters", command="models llama-3.2-1b",
        answer=r"^llama-3.2-1b: 1\.24B, 1,235,814,400 parameters", words=("feed-forward", "embeddings")),
    Job(question="which cards are there", command="gpus", answer=r"^\d+ cards", words=("v100-sxm2-32gb",)),
    Job(question="what is a card", command="gpus h100", answer=r"79\.18 GiB usable", words=("bandwidth",)),
    Job(question="how right is it", command="verify --replay tests/measured/sent/h100-bigbirdpeg.json",
        answer=r"^peak predicted [\d.]+ GiB, measured [\d.]+ GiB \([+-][\d.]+%\)", words=("H100",)),
    Job(question="a name that is nearly right", command="estimate lama-3.1-8b",
        answer="Did you mean 'llama-3.1-8b'", exit_code=3),
    Job(question="an option that is nearly right", command="estimate gpt2 --batchsize 4",
        answer="Did you mean '--batch-size'", exit_code=2),
    Job(question="what can I ask", command="estimate --help",
        answer="^  Estimate the memory", words=("--gpus N", r"\$ memplan estimate llama-3.1-8b --gpus 8")),
    Job(question="QLoRA of 7B on 12 GB",
        command="estimate qwen2.5-7b --gpu rtx3060 --quantize nf4 --lora 16 --seq-len 1k",
        answer=rf"^RTX3060  does not fit +{NEEDS}", words=("to fit: --", "activations")),
    Job(question="LoRA of 70B, the largest batch",
        command="estimate llama-3.1-70b --gpus 4 --engine fsdp --lora 16 --gpu a100 --kernels liger --batch-size max",
        answer=rf"^A100-80  fits +{NEEDS}", words=(r"micro-batch \d+",)),
    Job(question="eager attention or not",
        command='compare llama-3.2-1b --gpu a100 --seq-len 8k --vs "--attention eager"',
        answer=r"^--vs +A100-80  does not fit", words=("activations .* more", r"[\d.]+ times as long")),
    Job(question="BERT on a T4", command="estimate bert-large-uncased --gpu t4 --batch-size 64 --precision fp16",
        answer=rf"^T4  does not fit +{NEEDS} +batch <= \d+", words=("to fit: --batch-size",)),
    Job(question="a vision transformer", command="estimate vit-large --gpu a100 --batch-size 256",
        answer=rf"^A100-80  fits +{NEEDS}", words=("samples/s per GPU",)),
    Job(question="DPO, and does its reference model count", command="estimate mistral-7b --gpus 8 --zero 3 --gpu a100 --job dpo",
        answer=r"dpo with a reference model", words=(rf"^A100-80  fits with ZeRO-3 +{NEEDS}",)),
    Job(question="an epoch's hours and price",
        command="estimate llama-3.1-8b --gpus 8 --zero 3 --gpu h100 --tokens 100M --price 2.5",
        answer=r"100M tokens: [\d.]+ minutes .*", words=(r"GPU-hours, .* cost [\d.]+", "run +GPU- +cost")),
    Job(question="AMD", command="estimate llama-3.1-8b --gpus 8 --gpu mi300x --zero 2,3",
        answer=rf"^MI300X  fits with ZeRO-2 +{NEEDS}|^MI300X  fits from ZeRO-2 +{NEEDS}", words=("ZeRO-3",)),
    Job(question="how the peak grows with length", command="sweep llama-3.1-8b --gpus 8 --zero 3 --seq-len 4k..16k --gpu h100",
        answer=r"^H100-80  1 of 3 fit, 2 do not fit", words=(r"4,096 +ZeRO-3 +[\d.]+ fits", r"16,384 +ZeRO-3 +[\d.]+ OOM")),
    Job(question="others have a part of the card", command="estimate llama-3.2-1b --gpu a100-40gb@29GiB",
        answer=r"^A100-40  fits +needs [\d.]+-[\d.]+ of 29\.0 GiB", words=("activations",)),
    Job(question="cards of 48 GB or more", command="gpus 48GB", answer=r"^\d+ cards with 48GB or more", words=("a40-48gb", "a100-sxm4-80gb")),
    Job(question="the last layers alone", command="estimate llama-3.1-8b --gpu 4090 --freeze embeddings,layers.0-29",
        answer=rf"^RTX4090  does not fit +{NEEDS}", words=("961.56M trained", "to fit: --")),
    Job(question="experts over two nodes", command="estimate mixtral-8x7b --gpus 16 --gpu a100 --zero 3 --checkpointing full",
        answer=rf"^A100-80  fits with ZeRO-3 +{NEEDS}", words=("on 2 nodes",)),
    Job(question="QLoRA as others say it", command="estimate llama-3.2-1b --gpu rtx3060 --qlora --gradient-checkpointing",
        answer=rf"^RTX3060  fits +{NEEDS}", words=("LoRA 16", "checkpointing full")),
    Job(question="the largest batch of each setup", command="estimate t5-3b --gpus 8 --zero 3 --gpu a100-40gb --batch-size max",
        answer=rf"^A100-40  fits with ZeRO-3 +{NEEDS} +batch <= \d", words=(r"micro-batch \d+-\d+", r"optimizer\+params")),
    Job(question="the longest sequence of each", command="estimate llama-3.2-1b --gpus 4 --zero 2,3 --offload none --gpu a100-40gb --seq-len max",
        answer=rf"^A100-40  fits with ZeRO-2 +{NEEDS}", words=(r"^ setup +tokens", r"ZeRO-3 +\d+,\d{3} ")),
    Job(question="stages of a pipeline, and nothing said of steps", command="estimate llama-3.2-1b --gpus 4 --pp 4 --gpu a100-40gb",
        answer=rf"^A100-40  fits +{NEEDS}", words=("micro-batch 1 x 4",)),
    Job(question="a global batch over a pipeline", command="estimate llama-3.2-1b --gpus 8 --pp 4 --global-batch-size 64 --engine fsdp --gpu a100-40gb",
        answer=rf"^A100-40  fits +{NEEDS}", words=("micro-batch 1 x 32",)),
    Job(question="models whose names are long, whole", command="models deepseek-r1-", answer=r"^\d+ models",
        words=("^ deepseek-r1-distill-qwen-1.5b +",)),
    Job(question="one ds_config.json or the other", command="compare gpt2 --gpus 2 --gpu t4 --zero 2 "
        '--vs "--deepspeed-config configs/files/zero3-offload.json"', answer="^--vs +T4  .*",
        words=(r"zero3-offload\.json needs [\d.]+ GiB (less|more)",)),
    Job(question="every optimizer", command="estimate gpt2 --optimizer list", answer="adafactor.*te-adamw", exit_code=3),
    Job(question="a stack's file, in CI", command="estimate --setup configs/files/axolotl-qlora.yaml --gpu 8GiB --check",
        answer=r"^8GiB  does not fit", exit_code=5),
)  # fmt: skip


def test_there_are_thirty_jobs() -> None:
    assert len(JOBS) >= 30
    assert len({job.command for job in JOBS}) == len(JOBS)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.question)
def test_the_first_lines_answer(
    run: Run, monkeypatch: pytest.MonkeyPatch, checkout: Path, job: Job
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.chdir(checkout)
    done = run(*shlex.split(job.command))
    assert done.exit_code == job.exit_code, done.stderr
    lines = (done.stdout or done.stderr).splitlines()
    if done.stdout:
        assert max(map(len, lines)) <= COLUMNS, max(lines, key=len)
    first, screen = "\n".join(lines[:ANSWER_LINES]), "\n".join(lines[:SCREEN_LINES])
    assert re.search(job.answer, first, re.MULTILINE), first
    for words in job.words:
        assert re.search(words, screen, re.MULTILINE), (words, screen)


PLANS = (
    Job(question="what should I run", command="plan llama-3.1-8b --gpus 8 --gpu h100 --checkpointing none",
        answer="FSDP2|ZeRO-3", words=("tokens/s", "micro-batch")),
    Job(question="how many GPUs", command="plan llama-3.2-3b --gpus 1..8 --gpu a100-40gb --objective gpus "
        "--checkpointing none --engine fsdp", answer="FSDP2"),
    Job(question="which card is cheapest", command="plan gpt2 --lora 8 --engine ddp --gpus 1 --gpu t4,a100 "
        "--checkpointing full --objective cost --price t4=0.35,a100=1.90",
        answer="^A100-80  Cheapest: ", words=(r"GPU-hours for 1B tokens, cost\s+[\d.]+", "^T4  plain training")),
    Job(question="and without prices", command="plan gpt2 --lora 8 --engine ddp --gpus 1 --gpu t4,a100 "
        "--checkpointing full --objective cost",
        answer="^T4  Cheapest: ", words=(r"Which card is cheapest\? --price t4=",)),
    Job(question="on my nodes", command="plan gpt2 --nodes 2 --gpu t4 --engine ddp --checkpointing none",
        answer="^Fastest: DDP on 16 GPUs"),
    Job(question="the longest sequence, and nothing said of targets", command="plan gpt2 --gpus 1 --gpu t4 "
        "--maximize seq-len --engine ddp", answer="^Longest sequence: 1,024 tokens"),
)  # fmt: skip


@pytest.mark.parametrize("job", PLANS, ids=lambda job: job.question)
def test_a_plan_answers_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, checkout: Path, job: Job
) -> None:
    test_the_first_lines_answer(run, monkeypatch, checkout, job)
