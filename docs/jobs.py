"""Writes the blocks of docs/jobs.md: what people ask, the command, and what it answers.

The page is made by cog; a test runs every command again and compares.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """One question."""

    question: str
    command: str
    words: str
    """How to read the answer, and where to go from it."""
    line: str
    """How the line begins that answers."""
    exit_code: int = 0

    @property
    def anchor(self) -> str:
        """What the site and GitHub make of the heading."""
        kept = "".join(each for each in self.question.lower() if each.isalnum() or each in " -_")
        return "-".join(kept.split())


JOBS = (
    Job(
        question="Does a full fine-tune of an 8B model fit on eight A100s",
        command="memplan estimate llama-3.1-8b --gpus 8 --gpu a100",
        line="A100-80",
        words="The first line is the answer: ZeRO-1 and everything below it in the table fits. With "
        "`--zero 3` or `--engine fsdp` you get the account of that setup, phase by phase.",
    ),
    Job(
        question="Why does it run out of memory, and what is the smallest change that helps",
        command="memplan estimate llama-3.2-3b --gpu rtx4090 --seq-len 1k",
        line="to fit:",
        words="The flags after `to fit:` can be typed as they stand. `memplan explain` with the same "
        "options shows the arithmetic of every figure, tensor by tensor.",
    ),
    Job(
        question="What is the longest sequence that fits",
        command="memplan plan llama-3.1-8b --gpus 8 --gpu a100 --maximize seq-len --limit 5",
        line="Longest",
        words="Found, not swept: the search tries lengths in steps of 128 tokens. `--maximize batch` "
        "and `--maximize layers` do the same for these.",
    ),
    Job(
        question="How many GPUs does a 70B model take",
        command="memplan plan llama-3.1-70b --gpus 8..64 --gpu h100 --objective gpus --limit 4",
        line="Fewest",
        words="Offloading needs CPU RAM, which has a column; `--cpu-memory 1TiB` leaves out what a node cannot "
        "hold. `--emit deepspeed` or `--emit accelerate` writes the first line down as a configuration.",
    ),
    Job(
        question="Is there enough CPU RAM to load and to offload",
        command="memplan estimate llama-3.1-8b --gpus 8 --zero 2,3 --gpu a100-40gb --cpu-memory 160GiB",
        line="A100-40",
        words="Each rank may load a copy of its own, and a GPU's answer is of no use where the node "
        "cannot hold them: such a setup is not recommended.",
    ),
    Job(
        question="Which micro-batch and which sequence length go together",
        command="memplan sweep llama-3.2-1b --batch-size 1..16 --seq-len 1k..8k --gpu a100-40gb --precision "
        "bf16 --pivot total,seq-len,batch",
        line="A100-40",
        words="`!` is out of memory and `~` tight, in colour where the terminal has it. Without `--pivot` "
        "it is a table with a line for each setup, with `--format csv` a file for a spreadsheet.",
    ),
    Job(
        question="Where does the memory go between two setups",
        command='memplan compare llama-3.2-1b --gpu v100 --vs "--seq-len 1024"',
        line="--seq-len 1024 needs",
        words="Why 1,024 tokens fit and 2,048 do not, component by component; any options may "
        'differ: `--vs "--zero 3 --gpus 8"`.',
    ),
    Job(
        question="What will my ds_config.json take",
        command="memplan estimate mistral-7b --gpus 8 --deepspeed-config configs/files/zero3-offload.json "
        "--gpu a100-40gb",
        line="A100-40",
        words="Every key is read, named in the answer or refused; accelerate's YAML and "
        "`TrainingArguments` go the same way (`--accelerate-config`, `--training-args`).",
    ),
    Job(
        question="What fits a card that is in no catalog",
        command="memplan estimate gpt2-xl --gpu-memory 20GiB --seq-len 512 --freeze embeddings,layers.0-39",
        line="20GiB",
        words="A slice of a card (MIG), or one to come; a YAML file like those in `configs/gpus` says "
        "more of it. Here most layers are frozen: they have no gradients and no optimizer states.",
    ),
    Job(
        question="How does CI stop a change that no longer fits",
        command="memplan sweep llama-3.1-8b --gpus 8,16 --zero 3 --batch-size 2,4 --gpu a100-40gb --check",
        line="A100-40",
        words="Exit code 5: a check failed. `--baseline` compares with an answer written before; the "
        "action and the pre-commit hook of this repository run the same.",
        exit_code=5,
    ),
)


def answering_line(job: Job, printed: str) -> str:
    """The line that answers, and what continues it."""
    lines = printed.splitlines()
    starts = [row for row, line in enumerate(lines) if line.strip().startswith(job.line)]
    if not starts:
        msg = f"{job.command}: no line begins with {job.line!r}"
        raise SystemExit(msg)
    found, *rest = lines[starts[0] :]
    for line in rest:
        is_open = found.endswith(", ") or found.count("(") > found.count(")")
        if not is_open and _indent(line) <= _indent(found):
            break
        found += f" {line.strip()}"
    return " ".join(found.split())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else 0


def document() -> str:
    """The page below its first words."""
    from shown import answer  # beside this file

    answers = [
        (job, "".join(answer(job.command, exit_code=job.exit_code)).rstrip()) for job in JOBS
    ]
    rows = [
        f"| [{job.question}?](#{job.anchor}) | `{job.command}` | `{answering_line(job, printed)}` |"
        for job, printed in answers
    ]
    parts = ["\n".join(["| question | command | answer |", "| --- | --- | --- |", *rows])]
    parts += [
        f"## {job.question}?\n\n```console\n$ {job.command}\n{printed}\n```\n\n{job.words}"
        for job, printed in answers
    ]
    return "\n\n".join(parts)
