"""Which keys a training stack's files may have, read from the stack's own classes without running them.

``python benchmarks/stack_keys.py STACK FOLDER`` looks at the source of an installed or fetched version and says
which of its keys ``memplan/data/stacks/STACK.yaml`` does not sort yet, and which that file has beside them.
With ``--write VERSION`` it also writes them to ``tests/data/stack_keys/STACK.json``, by the file that declares them:
``tests/sources/test_stack_keys.py`` then says which are not sorted. A stack joins as a row of ``STACKS``.

A key is a field of a class (dataclass or pydantic), or a parameter of a function; one whose type is such a class again is a
section, whose keys follow behind a dot. What stands in a list has no key of its own.
"""

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
DECLARED = ROOT / "tests" / "data" / "stack_keys"
_CLOSED = frozenset({
    "list", "List", "tuple", "Tuple", "Sequence", "Iterable", "dict", "Dict", "Mapping", "Literal",
})  # fmt: skip
"""Types in whose subscript no section stands."""
_MOST_DEEP = 12


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key, and where it is declared."""

    name: str
    file: str


class Code:
    """The classes and functions of a folder, by name; files are looked through in order."""

    def __init__(self, folder: Path, *files: str) -> None:
        self.folder = folder
        self.classes: dict[str, tuple[ast.ClassDef, str]] = {}
        self.functions: dict[tuple[str, str], ast.FunctionDef] = {}
        self.aliases: dict[str, ast.expr] = {}
        for path in sorted({each for file in files for each in folder.glob(file)}):
            self._look_through(path)

    def _look_through(self, path: Path) -> None:
        file = path.relative_to(self.folder).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, (node, file))
            elif isinstance(node, ast.FunctionDef):
                self.functions[(file, node.name)] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.aliases.setdefault(node.targets[0].id, node.value)

    def fields(self, name: str, prefix: str = "", seen: tuple[str, ...] = ()) -> Iterator[Key]:
        """The keys of a class, its bases' first."""
        node, file = self.classes[name]
        for base in node.bases:
            called = _last(base)
            if called in self.classes and called not in seen:
                yield from self.fields(called, prefix, (*seen, name))
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                hidden = each.target.id.startswith("_") or _is_made(each.value)
                if hidden or "ClassVar" in ast.unparse(each.annotation):
                    continue
                for spelled in (each.target.id, *_aliases(each.value)):
                    yield from self._key(
                        spelled, each.annotation, file, prefix=prefix, seen=(*seen, name)
                    )

    def parameters(self, file: str, name: str, prefix: str = "") -> Iterator[Key]:
        """The keys of a function that is called with them, or of a class's method ``Class.__init__``."""
        owner, _, method = name.rpartition(".")
        if owner:
            node, file = self.classes[owner]
            inside = (each for each in node.body if isinstance(each, ast.FunctionDef))
            function = next(each for each in inside if each.name == method)
        else:
            function = self.functions[(file, name)]
        for each in (*function.args.args, *function.args.kwonlyargs):
            if each.arg not in ("self", "cls"):
                annotation = each.annotation or ast.Constant(None)
                yield from self._key(each.arg, annotation, file, prefix=prefix, seen=())

    def _key(
        self, key: str, annotation: ast.expr, file: str, *, prefix: str, seen: tuple[str, ...]
    ) -> Iterator[Key]:
        inner = [each for each in self._sections(annotation) if each not in seen]
        if not inner or len(seen) > _MOST_DEEP:
            yield Key(name=f"{prefix}{key}", file=file)
        for each in inner:
            yield from self.fields(each, f"{prefix}{key}.", seen)

    def _sections(self, annotation: ast.expr) -> Iterator[str]:
        """Classes with keys that an annotation names outside of lists; a string is an annotation too."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.Subscript):
            kind, inner = _last(annotation.value), annotation.slice
            if kind == "Annotated" and isinstance(inner, ast.Tuple):
                inner = inner.elts[0]
            if kind not in _CLOSED:
                yield from self._sections(inner)
        elif isinstance(annotation, ast.Tuple):
            for each in annotation.elts:
                yield from self._sections(each)
        elif isinstance(annotation, ast.BinOp):
            yield from self._sections(annotation.left)
            yield from self._sections(annotation.right)
        elif isinstance(annotation, ast.Name | ast.Attribute):
            name = _last(annotation)
            if name in self.classes and self._has_keys(name):
                yield name
            elif name in self.aliases and not isinstance(self.aliases[name], ast.Name):
                yield from self._sections(self.aliases[name])

    def _has_keys(self, name: str) -> bool:
        node, _ = self.classes[name]
        bases = {_last(base) for base in node.bases}
        if any("Enum" in base for base in bases):
            return False
        own = any(isinstance(each, ast.AnnAssign) for each in node.body)
        return own or any(base in self.classes and self._has_keys(base) for base in bases)


def _last(node: ast.expr) -> str:
    """The last part of a dotted name; what stands before a subscript."""
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_made(value: ast.expr | None) -> bool:
    """Whether a dataclass's field is no argument (``init=False``)."""
    return isinstance(value, ast.Call) and any(
        each.arg == "init" and isinstance(each.value, ast.Constant) and each.value.value is False
        for each in value.keywords
    )


def _aliases(value: ast.expr | None) -> Iterator[str]:
    """Other spellings that pydantic's ``Field`` takes."""
    if isinstance(value, ast.Call):
        for each in value.keywords:
            if each.arg in ("alias", "validation_alias"):
                for part in ast.walk(each.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def taken(folder: Path, *files: str, names: tuple[str, ...] = ("cfg", "config")) -> Iterator[Key]:
    """Keys that scripts take from a mapping: ``cfg.a.b`` and ``cfg.get("a", ...)``."""
    for path in sorted({each for file in files for each in folder.glob(file)}):
        file = path.relative_to(folder).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            key = _taken(node, names)
            if key is not None:
                yield Key(name=key, file=file)


def _taken(node: ast.AST, names: tuple[str, ...]) -> str | None:
    """The dotted key of one such expression; None where it is another."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        first = node.args[0] if node.args else None
        if node.func.attr in ("get", "pop") and isinstance(first, ast.Constant):
            place = _place(node.func.value, names)
            return None if place is None else ".".join((*place, str(first.value)))
    if isinstance(node, ast.Attribute) and node.attr not in (
        "get",
        "pop",
        "copy",
        "items",
        "update",
    ):
        place = _place(node, names)
        return None if not place else ".".join(place)
    return None


def _place(node: ast.expr, names: tuple[str, ...]) -> tuple[str, ...] | None:
    if isinstance(node, ast.Name):
        return () if node.id in names else None
    if isinstance(node, ast.Attribute):
        place = _place(node.value, names)
        return None if place is None else (*place, node.attr)
    return None


# -- the stacks ----------------------------------------------------------------------------------


def _classes(folder: Path, files: tuple[str, ...], roots: tuple[str, ...]) -> Iterator[Key]:
    code = Code(folder, *files)
    for root in roots:
        yield from code.fields(root)


def _axolotl(folder: Path) -> Iterator[Key]:
    """The schema, and those of the plugins."""
    code = Code(folder, "axolotl/utils/schemas/**/*.py", "axolotl/integrations/*/args.py")
    yield from code.fields("AxolotlInputConfig")
    for name, (_, file) in code.classes.items():
        if file.startswith("axolotl/integrations/") and name.endswith("Args"):
            yield from code.fields(name)


def _litgpt(folder: Path) -> Iterator[Key]:
    """Each command is a function, whose parameters are the keys of its files."""
    code = Code(
        folder, "litgpt/args.py", "litgpt/finetune/*.py", "litgpt/pretrain.py", "litgpt/config.py"
    )
    scripts = (
        "finetune/full",
        "finetune/lora",
        "finetune/adapter",
        "finetune/adapter_v2",
        "pretrain",
    )
    for script in scripts:
        yield from code.parameters(f"litgpt/{script}.py", "setup")


def _torchtune(folder: Path) -> Iterator[Key]:
    """Recipes take keys one by one; builders of models and their like are functions."""
    methods = ("instantiate", "parse", "log_config", "model")
    for key in taken(folder, "recipes/*finetune*.py", "recipes/*dpo*.py", "recipes/*distillation*.py",
                     "recipes/qat*.py"):  # fmt: skip
        if key.name not in methods:
            yield key


def _arguments(folder: Path) -> Iterator[Key]:
    """transformers' class, and TRL's that are made of it."""
    code = Code(folder, "transformers/training_args.py", "trl/trainer/*_config.py")
    yield from code.fields("TrainingArguments")
    for name in [each for each in code.classes if each.endswith("Config")]:
        if name != "ModelConfig":
            yield from code.fields(name)


def _hf_trainer(folder: Path) -> Iterator[Key]:
    """What TRL's parser reads beside a trainer's arguments, and the scripts of two recipe books.

    The folder holds the packages ``trl``, ``alignment`` and ``open_r1``, or folders with these.
    """
    own = Code(folder, "**/trl/trainer/model_config.py", "**/trl/scripts/utils.py")
    for name in ("ModelConfig", "ScriptArguments", "DatasetMixtureConfig"):
        yield from own.fields(name)
    for book in ("alignment", "open_r1"):
        code = Code(folder, f"**/{book}/configs.py")
        for name in code.classes:
            if name.endswith(("ScriptArguments", "TConfig", "OConfig")):
                yield from code.fields(name)


def _lightning(folder: Path) -> Iterator[Key]:
    """The trainer's parameters, and those of the strategies that are read."""
    code = Code(folder, "lightning/pytorch/trainer/trainer.py", "lightning/pytorch/strategies/*.py")
    yield from code.parameters("", "Trainer.__init__", "trainer.")
    strategies = ("FSDPStrategy", "DeepSpeedStrategy", "DDPStrategy", "ModelParallelStrategy")
    for name in strategies:
        yield from code.parameters("", f"{name}.__init__", "trainer.strategy.init_args.")


_NEMO = {
    "FSDP2Config": "distributed.", "DDPConfig": "distributed.", "ParallelismSizes": "distributed.",
    "PipelineConfig": "distributed.pipeline.", "MoEParallelizerConfig": "distributed.moe.",
    "PeftConfig": "peft.", "StepSchedulerConfig": "step_scheduler.", "FusedAdamConfig": "optimizer.",
    "AdamWConfig": "optimizer.", "BackendConfig": "model.backend.",
}  # fmt: skip
_NEMO_METHODS = ("build", "dataset_builds_on_all_ranks")
"""Of the typed view over a file, and no keys of it."""
_NEMO_FILES = (
    "distributed/config", "distributed/mesh", "distributed/pipelining/config", "_peft/lora",
    "training/step_scheduler", "optim/optimizer", "models/common/utils",
)  # fmt: skip
"""AutoModel's classes, and the section of a file that each is made of."""


def _nemo(folder: Path) -> Iterator[Key]:
    """Classes by their sections, and keys that the recipe takes one by one."""
    code = Code(folder, *(f"nemo_automodel/components/{name}.py" for name in _NEMO_FILES))
    for name, prefix in _NEMO.items():
        yield from code.fields(name, prefix)
    for key in taken(folder, "nemo_automodel/recipes/llm/train_ft.py"):
        if key.name not in _NEMO_METHODS:
            yield key


def _verl(folder: Path) -> Iterator[Key]:
    """The configuration that its trainer prints, with every default filled in."""
    import yaml

    name = "verl/trainer/config/_generated_ppo_trainer.yaml"
    for key in _leaves(yaml.safe_load((folder / name).read_text(encoding="utf-8"))):
        yield Key(name=key, file=name)


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


STACKS: Mapping[str, Callable[[Path], Iterator[Key]]] = {
    "axolotl": _axolotl,
    "llama_factory": partial(
        _classes, files=("llamafactory/hparams/*.py",),
        roots=("ModelArguments", "DataArguments", "FinetuningArguments", "GeneratingArguments",
               "TrainingArguments"),
    ),
    "llama_factory_v1": partial(
        _classes, files=("src/llamafactory/v1/config/*.py",),
        roots=("ModelArguments", "DataArguments", "TrainingArguments", "SampleArguments"),
    ),
    "lightning": _lightning,
    "litgpt": _litgpt,
    "nemo": _nemo,
    "prime_rl": partial(
        _classes, files=tuple(
            f"packages/prime-rl-configs/src/prime_rl/configs/{name}.py"
            for name in ("shared", "monitors", "trainer", "sft")
        ),
        roots=("SFTConfig", "TrainerConfig"),
    ),
    "torchtitan": partial(
        _classes, files=("torchtitan/config/job_config.py",), roots=("JobConfig",)
    ),
    "verl": _verl,
    "unsloth": partial(_classes, files=("unsloth_cli/config.py",), roots=("Config",)),
    "nanotron": partial(_classes, files=("src/nanotron/config/*.py",), roots=("Config",)),
    "torchtune": _torchtune,
    "hf_trainer": _hf_trainer,
    "training_arguments": _arguments,
}  # fmt: skip
"""By the name of its table: how its keys are read from a folder that holds its source."""


def declared(stack: str, folder: Path) -> dict[str, list[str]]:
    """The keys of a stack, by the file that declares them; each once."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for key in STACKS[stack](folder):
        if key.name not in seen:
            seen.add(key.name)
            found.setdefault(key.file, []).append(key.name)
    return {file: sorted(names) for file, names in sorted(found.items())}


def unsorted_keys(stack: str, keys: Mapping[str, list[str]]) -> list[str]:
    """Those that the stack's table does not sort."""
    from memplan.sources.key_tables import key_table

    table = key_table(stack)
    return [name for names in keys.values() for name in names if table.fate(name)[1] is None]


def more_keys(stack: str, keys: Mapping[str, list[str]]) -> list[str]:
    """Those that the table has and this version does not: older ones, or mistaken ones."""
    from memplan.sources.key_tables import key_table

    known = {name for names in keys.values() for name in names}
    parts = {name[: len(each)] for name in known for each in _prefixes(name)}
    return [name for name in key_table(stack).fates if "*" not in name and name not in parts]


def _prefixes(name: str) -> Iterator[str]:
    """A key and the sections that it stands in."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def main() -> int:
    """Say what is not sorted; 1 where something is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stack", choices=sorted(STACKS))
    parser.add_argument("folder", type=Path, help="what holds the package or the repository")
    parser.add_argument("--write", metavar="VERSION", help="keep them as the newest version's")
    options = parser.parse_args()
    keys = declared(options.stack, options.folder)
    if options.write:
        text = json.dumps({"source": options.write, "keys": keys}, indent=1)
        (DECLARED / f"{options.stack}.json").write_text(f"{text}\n", encoding="utf-8")
    missing = unsorted_keys(options.stack, keys)
    out = sys.stdout.write
    out(f"{sum(map(len, keys.values()))} keys, of which {len(missing)} are not sorted\n")
    out("".join(f"  {name}\n" for name in missing))
    out("".join(f"  older or mistaken: {name}\n" for name in more_keys(options.stack, keys)))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
