"""Requests for schedulers, judged by the schedulers' own packages: Kubernetes' schemas, SkyPilot's and Ray's parsers.

Not a part of CI, which has neither. ``make schedulers`` installs them and runs it; it prints what each refused and exits 1 where
one did. Slurm has no package: ``tests/sources/test_requests.py`` holds its grammar, ``slurm.sh`` asks a real one.
"""

import ast
import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

SETUPS = (
    "gpt2 --gpu t4 --gpus 1 --engine ddp",
    "llama-3.2-1b --gpu a10g --gpus 4 --engine ddp --lora 16",
    "t5-small --gpu v100 --gpus 8 --zero 2 --offload none",
    "llama-3.2-1b --gpu a100-40gb --gpus 8 --zero 3 --offload cpu --offload-param cpu",
    "llama-3.2-1b --gpu h100 --gpus 16 --engine fsdp --allocator expandable",
    "llama-3.2-1b --gpu h200 --gpus 16 --engine megatron --tp 2",
    "gpt2 --gpu l40s --gpus 8 --engine fsdp",
    "bert-base-uncased --gpu a100 --gpus 2 --engine ddp",
    "llama-3.1-8b --gpu b200 --gpus 8 --engine fsdp --tokens 1B",
    "mixtral-8x7b --gpu h100 --gpus 32 --engine fsdp --tokens 10B",
    "llama-3.2-1b --gpu gaudi3 --gpus 8 --engine ddp",
    "llama-3.2-1b --gpu mi325x --gpus 16 --engine fsdp",
)
"""Twelve jobs, as ``memplan estimate`` takes them."""


def emitted(setup: str, kind: str) -> str:
    """What memplan writes."""
    command = [sys.executable, "-m", "memplan", "estimate", *setup.split(), "--emit", kind]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def kubernetes(text: str) -> None:
    """Each manifest against the schema of its kind."""
    import yaml

    validate = importlib.import_module("kubernetes_validate").validate
    for manifest in yaml.safe_load_all(text):
        validate(manifest, "1.31", strict=True)


def skypilot(text: str) -> None:
    """The task against SkyPilot's schema of tasks."""
    import yaml

    schemas = importlib.import_module("sky.utils.schemas")
    jsonschema = importlib.import_module("jsonschema")
    jsonschema.validate(yaml.safe_load(text), schemas.get_task_schema())


def ray(text: str) -> None:
    """The calls take what they are given; ``ray.train.torch`` is there where torch is, and is not asked for here."""
    tree = ast.parse(text)
    names: dict[str, object] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and each.module == "ray.train":
            module = importlib.import_module(each.module)
            names.update({alias.name: getattr(module, alias.name) for alias in each.names})
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in (
            "ScalingConfig",
            "RunConfig",
        ):
            made = names[call.func.id]  # type: ignore[attr-defined]
            assert callable(made)
            made(**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})


JUDGES: dict[str, Callable[[str], None]] = {
    "kubernetes": kubernetes, "kueue": kubernetes, "skypilot": skypilot, "ray": ray,
}  # fmt: skip


def refusals(texts: list[tuple[str, str, str]]) -> Iterator[str]:
    """Each text that its scheduler's package does not take, with what it says."""
    for setup, kind, text in texts:
        try:
            JUDGES[kind](text)
        except Exception as error:  # noqa: BLE001  # whatever a package raises is a refusal
            yield f"{kind}: {setup}: {type(error).__name__}: {error}"


def main(action: str, file: Path) -> int:
    """Write all to a file, or judge what a file has: the packages need not stand beside memplan."""
    if action == "write":
        kinds = itertools.product(SETUPS, JUDGES)
        file.write_text(json.dumps([(setup, kind, emitted(setup, kind)) for setup, kind in kinds]))
        return 0
    texts = [tuple(each) for each in json.loads(file.read_text())]
    found = list(refusals(texts))
    sys.stdout.write("".join(f"{each}\n" for each in found))
    sys.stdout.write(f"{len(texts) - len(found)} of {len(texts)} taken\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
