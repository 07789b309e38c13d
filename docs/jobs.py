"""Writes the blocks of the how-to pages: what people ask, the command, what it answers, and where to go from it.

``docs/jobs.md`` lists them, each has a page of its own, ``docs/how-to-PAGE.md``. The pages are made by cog; a test
runs every command again and compares.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """One question."""

    page: str
    """``how-to-PAGE.md``."""
    question: str
    command: str
    words: str
    """How to read the answer."""
    more: tuple[str, ...]
    """Where to go from it, a line each."""
    line: str
    """How the line begins that answers."""
    exit_code: int = 0

    @property
    def file(self) -> str:
        """Of the page, beside the list."""
        return f"how-to-{self.page}.md"


JOBS = (
    Job(
        page="fit",
        question="Does a full fine-tune of an 8B model fit on eight A100s",
        command="memplan estimate llama-3.1-8b --gpus 8 --gpu a100",
        line="A100-80",
        words="The first line is the answer: ZeRO-1 and everything below it in the table fits.",
        more=(
            "`--zero 3` or `--engine fsdp`: the account of that setup, phase by phase.",
            "`--check`: exit code 5 where nothing, or not everything, fits.",
            "[An estimate, line by line](estimate.md) says what each line means.",
        ),
    ),
    Job(
        page="make-it-fit",
        question="Why does it run out of memory, and what is the smallest change that helps",
        command="memplan estimate llama-3.2-3b --gpu rtx4090 --seq-len 1k",
        line="to fit:",
        words="The flags after `to fit:` can be typed as they stand.",
        more=(
            "`--allow 8bit,lora,qlora`: what may be given up so that it fits.",
            "`memplan explain` with the same options: the arithmetic of every figure, tensor by tensor.",
            "[Fine-tuning](fine-tuning.md) has LoRA, QLoRA and preference training.",
        ),
    ),
    Job(
        page="find-the-largest",
        question="What is the longest sequence that fits",
        command="memplan plan llama-3.2-3b --gpus 4 --gpu a100 --engine fsdp --checkpointing full "
        "--maximize seq-len --limit 3",
        line="Longest",
        words="Found, not swept: the search tries lengths in steps of 128 tokens.",
        more=(
            "`--maximize batch` and `--maximize layers` do the same for these.",
            (
                "`memplan estimate` takes `max` as a value, for the setup that you name: `--batch-size max`, "
                "`--seq-len max`, `--lora max`."
            ),
        ),
    ),
    Job(
        page="count-the-gpus",
        question="How many GPUs does a 70B model take",
        command="memplan plan llama-3.1-70b --gpus 8..64 --gpu h100 --objective gpus --engine deepspeed "
        "--checkpointing full --limit 4",
        line="Fewest",
        words="Offloading needs CPU RAM, which has a column; `--cpu-memory 1TiB` leaves out what a node cannot "
        "hold. Without `--engine` every engine and every split of the model is tried.",
        more=(
            "`--emit deepspeed` or `--emit accelerate` writes the first line down as a configuration.",
            "`--objective speed` and `--objective cost` put something else first.",
            "[Over many GPUs](parallelism.md) says what to split.",
        ),
    ),
    Job(
        page="choose-a-card",
        question="Which card is the cheapest for my fine-tuning",
        command="memplan plan gemma-2-2b --lora 16 --engine ddp --gpus 1 --gpu l4,a100 --objective cost "
        "--price l4=0.80,a100=1.90",
        line="A100-80",
        words="Prices are of one GPU's hour, typed or in a YAML file. The cheapest card comes first; without prices "
        "the GPU-hours of each are told, and that prices are wanted.",
        more=(
            "`memplan gpus 48GB` lists the cards with as much memory or more.",
            (
                "`--gpu a100@60GiB` is a card of which others leave 60 GiB, `--gpu 46GiB` one that is in no catalog, "
                "`--gpu local` the one at hand."
            ),
        ),
    ),
    Job(
        page="price-a-run",
        question="What do 100 million tokens take, and what do they cost",
        command="memplan estimate llama-3.1-8b --gpus 8 --zero 3 --offload none --gpu h100 --tokens 100M --price 2.5",
        line="100M tokens",
        words="The second line is the run: its time with a range, GPU-hours, energy, cost.",
        more=(
            "`--examples 50k --epochs 3` in place of tokens.",
            "`--measured-step 3.1s`: one measured step says how fast the machines are.",
            "[Time and cost](time.md) says how step times come about.",
        ),
    ),
    Job(
        page="write-a-recipe",
        question="How does a setup become a file that trains",
        command="memplan estimate llama-3.1-8b --gpus 8 --gpu a100 --engine fsdp --checkpointing full --seq-len 4k --emit axolotl",
        line="base_model:",
        words="The file goes to standard output; what it cannot say, and how it is launched, to standard error. Read back by `--setup FILE` it is the "
        "same setup.",
        more=(
            "`--emit trl-sft`, `llama-factory`, `torchtune`, `unsloth`, `torchtitan`, `megatron`, `training-args`, `accelerate`, `deepspeed`: other stacks.",
            "`memplan plan ... --emit KIND` writes the best setup of a plan; `--output FILE` where it goes.",
            "[Ask a scheduler for it](schedulers.md) writes the request for the machines.",
        ),
    ),
    Job(
        page="let-strangers-ask",
        question="What happens when somebody asks nonsense, or means harm",
        command="memplan admit configs/admission/request.yaml --pools configs/pools/platform.yaml --pool ../../etc/passwd",
        line="memplan: error",
        words="Whatever is wrong is one line on standard error that names what, where, and what to do, and an exit code: 2 how it was asked, 3 what a file "
        "says, 4 the hub, 5 a check that failed. Nothing that a file says is run, and files are read below `--root` alone where a stranger asks.",
        more=(
            "[Pools and admission](pools-and-admission.md) has the exit codes of a webhook.",
            "[Let an agent ask](agents.md): paths only below a folder, no network unless allowed, short answers.",
            "A plug-in that fails is named in a line and left out ([plug-ins](plug-ins.md)); a torn row is dropped and said ([large sweeps](large-sweeps.md)).",
        ),
        exit_code=3,
    ),
    Job(
        page="use-another-makers-card",
        question="Does it fit a Mac, an Intel card, Gaudi, Ascend, a TPU or Trainium",
        command="memplan estimate llama-3.2-1b --gpu m2-ultra --engine ddp --seq-len 1k",
        line="M2-ULTRA",
        words="The low end is what is allocated at once, the high end what PyTorch on CUDA would reserve for the same requests: the allocator is "
        "another one, and no run on it was compared. Step times go by the maker's rates; none was measured.",
        more=(
            "`memplan gpus m2-ultra`: its figures, where they were read, and which nobody read again.",
            "`--gpu card.yaml` with `allocator: mps` (or `xpu`, `npu`, `hpu`, `xla`, `neuron`) describes any other.",
            "`--gpu local` on a Mac: this one, with what Metal recommends of its memory.",
        ),
    ),
    Job(
        page="check-cpu-ram",
        question="Is there enough CPU RAM to load and to offload",
        command="memplan estimate llama-3.1-8b --gpus 8 --zero 2,3 --gpu a100-40gb --cpu-memory 160GiB",
        line="A100-40",
        words="Each rank may load a copy of its own, and a GPU's answer is of no use where the node "
        "cannot hold them: such a setup is not recommended.",
        more=("Without `--cpu-memory` plans and hints judge by a usual node of the card.",),
    ),
    Job(
        page="draw-a-grid",
        question="Which micro-batch and which sequence length go together",
        command="memplan sweep llama-3.2-1b --batch-size 1..16 --seq-len 1k..8k --gpu a100-40gb --precision "
        "bf16 --pivot total,seq-len,batch",
        line="A100-40",
        words="`!` is out of memory and `~` tight, in colour where the terminal has it.",
        more=(
            "Without `--pivot` it is a table with a line for each setup, with `--format csv` a file for a spreadsheet.",
            "`--report heat.svg` draws the map, `--report heat.html` makes a page of it.",
            "[Sweep and plan](sweep-and-plan.md) has files that describe a grid.",
        ),
    ),
    Job(
        page="compare",
        question="Where does the memory go between two setups",
        command='memplan compare llama-3.2-1b --gpu v100 --vs "--seq-len 1024"',
        line="--seq-len 1024 needs",
        words="Why 1,024 tokens fit and 2,048 do not, component by component; any options may "
        'differ: `--vs "--zero 3 --gpus 8"`.',
        more=(
            "Two models, two `--setup` files or two `--preset`s are compared the same way.",
            "`memplan explain --against run.pickle`: a recorded run beside the prediction.",
        ),
    ),
    Job(
        page="read-my-files",
        question="What will my ds_config.json take",
        command="memplan estimate mistral-7b --gpus 8 --deepspeed-config configs/files/zero3-offload.json "
        "--gpu a100-40gb",
        line="A100-40",
        words="Every key is read, named in the answer or refused.",
        more=(
            "accelerate's YAML and `TrainingArguments` go the same way: `--accelerate-config`, `--training-args`.",
            (
                "A stack's own file is taken whole with `--setup`: axolotl, TRL, LLaMA-Factory, torchtune, torchtitan, "
                "and [others](stack-keys.md). A model named beside it goes before the file's own: `memplan estimate deepseek-v3 "
                "--setup script.sh`."
            ),
            (
                "torchtitan's Python configurations by the name of the function that returns one, which is read and not run: "
                "`--setup torchtitan/models/llama3/config_registry.py:llama3_8b`. What would have to be run to be known "
                "(another file's function, a loop) is refused with its line."
            ),
        ),
    ),
    Job(
        page="describe-a-card",
        question="What fits a card that is in no catalog",
        command="memplan estimate gpt2-xl --gpu-memory 20GiB --seq-len 512 --freeze embeddings,layers.0-39",
        line="20GiB",
        words="A slice of a card (MIG), or one to come. Here most layers are frozen: they have no gradients and no "
        "optimizer states.",
        more=("A YAML file like those in `configs/gpus` says more of a card: `--gpu card.yaml`.",),
    ),
    Job(
        page="stop-in-ci",
        question="How does CI stop a change that no longer fits",
        command="memplan sweep llama-3.1-8b --gpus 8,16 --zero 3 --batch-size 2,4 --gpu a100-40gb --check",
        line="A100-40",
        words="Exit code 5: a check failed.",
        more=(
            "`--format json` writes the answer down, `--baseline FILE --tolerance 2%` fails where a peak grew since.",
            "`--fail-on tight` fails where nobody can promise that it fits.",
            "Each trainer's file can be checked as it is: `--setup axolotl.yml --check`.",
        ),
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


def _printed(job: Job) -> str:
    from shown import answer  # beside this file

    return "".join(answer(job.command, exit_code=job.exit_code)).rstrip()


def document() -> str:
    """The list of all, with the line of each that answers."""
    rows = [
        f"| [{job.question}?]({job.file}) | `{job.command}` | `{answering_line(job, _printed(job))}` |"
        for job in JOBS
    ]
    return "\n".join(["| question | command | answer |", "| --- | --- | --- |", *rows])


def page(name: str) -> str:
    """One question's page below its heading."""
    (job,) = (each for each in JOBS if each.page == name)
    more = "\n".join(f"* {text}" for text in job.more)
    return f"```console\n$ {job.command}\n{_printed(job)}\n```\n\n{job.words}\n\n{more}"
