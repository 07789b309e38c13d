"""Whether what ``--emit`` writes is taken by the parsers of the packages it is written for.

Random setups, those of ``tests/sources/test_round_trips.py``, are written for a framework and handed to its own
package: ``python benchmarks/parsers.py [KIND ...] [--setups N]``. It needs the packages (torch's CPU build does), and says of each
setup that is refused what the package said. Versions looked at: deepspeed 0.19.8, accelerate 1.15.0, transformers 5.24, TRL 1.16,
axolotl 0.19.0, LLaMA-Factory 0.9.5, torchtune 0.6.1, Unsloth 2026.10.9, torchtitan 0.3.0.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_BUILD_OPS", "0")
os.environ.setdefault("DISABLE_VERSION_CHECK", "1")

from memplan.sources.emitters import Emitted
from tests.sources import test_round_trips

Parse = Callable[[Emitted, Path], object]
"""Hands what is written to a package; raises whatever that raises."""


def deepspeed(made: Emitted, _folder: Path) -> object:
    """DeepSpeed's own reader, which checks every section by its class; ``auto`` is the Trainer's."""
    from deepspeed.runtime.config import DeepSpeedConfig

    values = without_auto(json.loads(made.json))
    values.pop("train_batch_size", None)  # of all ranks, and here is one
    return DeepSpeedConfig(values)


def without_auto(values: dict[str, Any]) -> dict[str, Any]:
    """The values that the Trainer does not fill in.

    >>> without_auto({"a": "auto", "b": {"c": "auto", "d": 1}})
    {'b': {'d': 1}}
    """
    return {
        name: without_auto(each) if isinstance(each, dict) else each
        for name, each in values.items()
        if each != "auto"
    }


def accelerate(made: Emitted, folder: Path) -> object:
    """``accelerate launch``'s reader of its file."""
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(written(made.yaml, folder, "accelerate.yaml"))


def training_args(made: Emitted, folder: Path) -> object:
    """transformers' argument parser."""
    from transformers import HfArgumentParser, TrainingArguments

    values = {**json.loads(made.json), "use_cpu": True, "bf16": False, "fp16": False}
    values.pop("tf32", None)  # asks whether the card has it
    return HfArgumentParser(TrainingArguments).parse_dict({"output_dir": str(folder), **values})


def trl_sft(made: Emitted, folder: Path) -> object:
    """``trl sft --config``."""
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

    path = written(f"{made.yaml}\nuse_cpu: true\n", folder, "trl.yaml")
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    data = ["--dataset_name", "a/b", "--output_dir", str(folder)]
    on_cpu = ["--bf16", "false", "--fp16", "false"]
    return parser.parse_args_and_config(["--config", path, *data, *on_cpu])


def axolotl(made: Emitted, _folder: Path) -> object:
    """axolotl's pydantic schema."""
    import yaml
    from axolotl.utils.schemas.config import AxolotlInputConfig

    values = yaml.safe_load(made.yaml)
    own = {"datasets": [{"path": "a/b", "type": "alpaca"}], "learning_rate": 1e-4}
    return AxolotlInputConfig(**{**own, **values})


def llama_factory(made: Emitted, folder: Path) -> object:
    """LLaMA-Factory's dataclasses, as its command reads a file."""
    import yaml
    from llamafactory.hparams import (
        DataArguments,
        FinetuningArguments,
        GeneratingArguments,
        ModelArguments,
        TrainingArguments,
    )
    from transformers import HfArgumentParser

    classes = (
        ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments,
    )  # fmt: skip
    values = {**yaml.safe_load(made.yaml), "use_cpu": True, "bf16": False, "fp16": False}
    data = {"dataset": "alpaca_en_demo", "output_dir": str(folder)}
    return HfArgumentParser(classes).parse_dict({**data, **values})


def torchtune(made: Emitted, _folder: Path) -> object:
    """``tune validate``: every component is there and takes what it is given."""
    from omegaconf import OmegaConf
    from torchtune import config

    values = OmegaConf.create(made.yaml)
    config.validate(values)
    return values


def unsloth(made: Emitted, folder: Path) -> object:
    """``unsloth train --config``, which imports nothing that needs a card."""
    from unsloth_cli.config import load_config

    return load_config(Path(written(made.yaml, folder, "unsloth.yaml")))


def torchtitan(made: Emitted, _folder: Path) -> object:
    """torchtitan's command line over one of its own configurations."""
    from torchtitan.config import ConfigManager

    words = made.flags.replace("\\\n", " ").split()
    return ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b", *words])


def written(text: str, folder: Path, name: str) -> str:
    """The path of a file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


PARSERS: dict[str, Parse] = {
    "deepspeed": deepspeed, "accelerate": accelerate, "training-args": training_args,
    "trl-sft": trl_sft, "axolotl": axolotl, "llama-factory": llama_factory,
    "torchtune": torchtune, "torchtitan": torchtitan, "unsloth": unsloth,
}  # fmt: skip


def refused(kind: str, num_setups: int) -> list[str]:
    """What a package says of the setups that it does not take."""
    test_round_trips.SETUPS = num_setups
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for setup, made in test_round_trips.setups(kind, seed=1):
            try:
                PARSERS[kind](made, Path(folder))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a package raises is its answer
                found.append(f"{type(error).__name__}: {error}\n  {setup}\n  {dict(made.values)}")
    return found


def main() -> int:
    """Write setups of each kind and hand them over; 1 where one is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*PARSERS, []], default=[])
    parser.add_argument("--setups", type=int, default=20, help="of each kind")
    asked = parser.parse_args()
    failed = 0
    for kind in asked.kinds or PARSERS:
        problems = refused(kind, asked.setups)
        print(f"{kind}: {asked.setups - len(problems)} of {asked.setups} taken")
        for problem in problems:
            print(f"  {problem}")
        failed += len(problems)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
