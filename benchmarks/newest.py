"""What moved in the newest torch, transformers and DeepSpeed that memplan says something of.

``python benchmarks/newest.py`` looks at the packages that are installed, writes a report in Markdown to stdout
(and to the file that ``GITHUB_STEP_SUMMARY`` names), and exits 1 where training steps followed on fake tensors are
further off than 0.1 %, or a recorded run than 1 %. Everything else is news: it moves no figure by itself.
``.github/workflows/newest.yml`` runs it once a week.
"""

import datetime
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DATA = ROOT / "memplan" / "data"
TYPES = ROOT / "tests" / "data" / "transformers_types.json"
SENT = ROOT / "tests" / "measured" / "sent"
FOLLOWS = {"torch": "2.13", "transformers": "5.23", "deepspeed": "0.19"}
"""The releases that memplan's figures were read and recorded with."""
FAKE_BAR, RECORDED_BAR = 0.001, 0.01
OLD_DAYS = 180
"""Since the catalog of GPUs was last looked through."""
MOST_NAMED = 20
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1408, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt2", {"seq_len": 512}),
    ("gpt2", {"seq_len": 512, "precision": "bf16", "checkpointing": "full"}),
    ("t5-small", {"seq_len": 256}),
    ("bert-base-uncased", {"seq_len": 256, "micro_batch_size": 4}),
    ("llama", {"seq_len": 1024}),
    ("llama", {"seq_len": 512, "precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach"}),
    ("llama", {"seq_len": 512, "num_gpus": 8, "engine": "fsdp"}),
    ("qwen2.5-0.5b", {"seq_len": 512, "precision": "bf16"}),
    ("olmoe-1b-7b", {"seq_len": 256, "precision": "bf16"}),
    ("gemma-2-2b", {"seq_len": 256, "precision": "bf16"}),
    ("phi-2", {"seq_len": 256, "precision": "bf16", "optimizer": "sgd-momentum"}),
)  # fmt: skip


def versions() -> Iterator[str]:
    """What is installed, and what memplan follows."""
    yield "| package | installed | memplan follows |"
    yield "| --- | --- | --- |"
    for name, followed in FOLLOWS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        yield f"| {name} | {found} | {followed} |"


def steps() -> tuple[list[str], bool]:
    """Training steps on fake tensors beside the estimate, and whether all are within the bar."""
    from memplan.errors import MemplanError
    from memplan.estimator import estimate
    from memplan.estimator.measured import figures_of
    from memplan.sources.about_models.found_config import local_config
    from memplan.sources.cards.catalog import load_gpu
    from memplan.sources.models import load_model
    from memplan.training.setup import TrainingSetup
    from memplan.verify.on_torch.measuring import follow
    from memplan.verify.run import Run

    gpu = load_gpu("a100-80gb")
    lines, good = ["| model | setup | worst figure | off by |", "| --- | --- | --- | ---: |"], True
    for name, values in STEPS:
        config = LLAMA if name == "llama" else dict(local_config(name)[1])
        model = load_model(config)
        setup = TrainingSetup(kernel_scratch=False, **values).resolve(
            model.context_length, family=model.family
        )
        run = Run(config=config, name=name, task=model.task, setup=setup, num_steps=2)
        words = ", ".join(f"{key}={each}" for key, each in values.items())
        try:
            figures = figures_of(estimate(model, setup, gpu), follow(run, gpu))
        except MemplanError as error:
            lines.append(f"| {name} | {words} | does not run: {error} | |")
            good = False
            continue
        worst = max(figures, key=lambda each: abs(each.error))
        good &= abs(worst.error) <= FAKE_BAR
        mark = "" if abs(worst.error) <= FAKE_BAR else " **moved**"
        lines.append(
            f"| {name} | {words} | {worst.part} {worst.what} | {100 * worst.error:+.4f} %{mark} |"
        )
    return lines, good


def recorded() -> tuple[str, bool]:
    """Every measurement that was sent, predicted once more; those whose error is known and named do not judge."""
    from memplan.report.verify import summary_line
    from memplan.verify.replay import replayed

    named = json.loads(SENT.with_name("sent_off.json").read_text(encoding="utf-8"))
    paths = sorted(SENT.glob("*.json"))
    runs = [replayed(path) for path in paths]
    errors = [
        abs(each)
        for path, run in zip(paths, runs, strict=True)
        if path.name not in named
        for each in run.peak_errors
    ]
    good = max(errors, default=0.0) <= RECORDED_BAR and all(run.is_agreed for run in runs)
    return f"Recorded on real cards: {summary_line(runs)}", good


def types_news(
    known: Mapping[str, Any], before: Collection[str], installed: Mapping[str, Any]
) -> Iterator[str]:
    """Types that transformers has anew, and defaults of its classes that are other than memplan's.

    ``before``: the types that there were; ``installed``: the defaults of each type's class.
    """
    yield from names_news("types", set(before), set(installed))
    for name, row in known.items():
        for key, value in row.get("defaults", {}).items():
            found = installed.get(name, {}).get(key, value)
            # What a class makes of None it says elsewhere.
            if found is not None and json.dumps(found) != json.dumps(value):
                yield f"{name}: `{key}` is {found!r} now, and was {value!r}"


def installed_types() -> dict[str, dict[str, Any]]:
    """What every config class of the transformers that is installed writes down as its defaults."""
    from dataclasses import MISSING, fields, is_dataclass

    mapping: Any = importlib.import_module("transformers").CONFIG_MAPPING
    found: dict[str, dict[str, Any]] = {}
    for name in mapping:
        found[name] = {}
        try:
            kind = mapping[name]
        except (ImportError, AttributeError):  # it asks for a package
            continue
        if is_dataclass(kind):
            found[name] = {
                each.name: each.default for each in fields(kind) if each.default is not MISSING
            }
    return found


def names_news(what: str, known: set[str], installed: set[str]) -> Iterator[str]:
    """Names that came and went."""
    for word, names in (("new", installed - known), ("gone", known - installed)):
        if names:
            told = ", ".join(f"`{each}`" for each in sorted(names)[:MOST_NAMED])
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            yield f"{what}, {word}: {told}{more}"


def options_news() -> Iterator[str]:
    """Of TrainingArguments, and of DeepSpeed's ``zero_optimization``."""
    from dataclasses import fields

    known = json.loads((DATA / "training_arguments.json").read_text(encoding="utf-8"))
    arguments: Any = importlib.import_module("transformers").TrainingArguments
    own = {each.name for each in fields(arguments) if each.init}
    yield from names_news("TrainingArguments", set(known["training_arguments"]), own)
    try:
        zero: Any = importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    except ImportError:
        return
    from memplan.memory.deepspeed.options import OPTION_NAMES

    installed = {each.alias or name for name, each in zero.model_fields.items()}
    yield from names_news("zero_optimization", set(OPTION_NAMES) & installed, installed)


STACK_PACKAGES = {
    "axolotl": "axolotl", "llama_factory": "llamafactory", "litgpt": "litgpt",
    "training_arguments": "trl", "unsloth": "unsloth_cli",
}  # fmt: skip
"""Tables of keys, and the package that is looked at where it is installed."""


def stacks_news() -> Iterator[str]:
    """Keys of the training stacks that are installed and that their tables do not sort."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from stack_keys import declared, unsorted_keys

    for stack, package in STACK_PACKAGES.items():
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            continue
        missing = unsorted_keys(stack, declared(stack, Path(found.origin).parent.parent))
        if missing:
            yield f"{package}: keys that memplan/data/stacks/{stack}.yaml does not sort: {', '.join(missing)}"


def catalog_news(catalog: Mapping[str, Any], today: datetime.date) -> Iterator[str]:
    """How old the catalog is, and which cards have figures that nobody has read again.

    >>> old = {"as_of": "2026-01-01", "gpus": {"x": {"unverified": ["torch_total_mib"]}}}
    >>> for line in catalog_news(old, datetime.date(2026, 12, 1)):
    ...     print(line)
    the catalog of GPUs was last looked through 334 days ago: are there new cards?
    figures that nobody has read again: x
    """
    age = (today - datetime.date.fromisoformat(catalog["as_of"])).days
    if age > OLD_DAYS:
        yield f"the catalog of GPUs was last looked through {age} days ago: are there new cards?"
    unread = [name for name, card in catalog["gpus"].items() if card.get("unverified")]
    if unread:
        yield f"figures that nobody has read again: {', '.join(unread)}"


def main() -> int:
    """Write the report."""
    lines = ["# What moved", "", *versions(), "", "## Training steps on fake tensors", ""]
    table, steps_good = steps()
    summary, recorded_good = recorded()
    lines += [*table, "", summary, ""]
    known = json.loads((DATA / "config_defaults.json").read_text(encoding="utf-8"))["types"]
    before = json.loads(TYPES.read_text(encoding="utf-8"))["types"]
    catalog = json.loads((DATA / "gpus.json").read_text(encoding="utf-8"))
    for title, news in (
        ("transformers' classes", types_news(known, before, installed_types())),
        ("options", options_news()),
        ("training stacks", stacks_news()),
        ("catalog of GPUs", catalog_news(catalog, datetime.datetime.now(datetime.UTC).date())),
    ):
        told = list(news)
        lines += [
            f"## {title[0].upper()}{title[1:]}",
            "",
            *(f"* {each}" for each in told or ["nothing moved"]),
            "",
        ]
    text = "\n".join(lines)
    sys.stdout.write(f"{text}\n")
    summary_file = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary_file:
        with Path(summary_file).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    return 0 if steps_good and recorded_good else 1


if __name__ == "__main__":
    sys.exit(main())
