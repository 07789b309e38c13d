"""The tables of kernels, from the enums and tables that choose them."""

import ast
import inspect
from enum import Enum

from memplan.training.choices_of_kernels import kernels
from memplan.training.choices_of_kernels.kernels import KERNEL_PRESETS, LossKernel
from memplan.training.choices_of_kernels.liger import LIGER_MODELS, LIGER_VERSION
from memplan.training.choices_of_kernels.losses import LOSS_FORMS

CHOICES: dict[str, type[Enum]] = {
    "--attention": kernels.AttentionKernel,
    "--norm": kernels.NormKernel,
    "--mlp": kernels.FeedForwardKernel,
    "--rotary": kernels.RotaryKernel,
    "--scan": kernels.ScanKernel,
    "--packing": kernels.Packing,
}
"""Options of one kernel each, and their values."""


def document() -> str:
    """All of it, as Markdown."""
    parts = [_presets()]
    for flag, kind in CHOICES.items():
        rows = [f"| `{value}` | {said} |" for value, said in docstrings(kind).items()]
        parts.append("\n".join([f"## `{flag}`", "", "| value | what it is |", "|---|---|", *rows]))
    return "\n\n".join([*parts, _losses(), _liger()])


def docstrings(kind: type[Enum]) -> dict[str, str]:
    """Each value of an enum, and what stands below it."""
    found: dict[str, str] = {}
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    name = None
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            found[str(kind[name].value)] = ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[str(kind[name].value)] = " ".join(
                str(node.value.value).replace("``", "`").split()
            )
            name = None
    return found


def _presets() -> str:
    head = [
        "## `--kernels`",
        "",
        "| preset | attention | norm | mlp | rotary | loss |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for preset, chosen in KERNEL_PRESETS.items():
        parts = (chosen.attention, chosen.norm, chosen.feed_forward, chosen.rotary, chosen.loss)
        rows.append(
            f"| `{preset.value}` | " + " | ".join(f"`{each.value}`" for each in parts) + " |"
        )
    return "\n".join([*head, *rows])


def _losses() -> str:
    said = docstrings(LossKernel)
    rows = [
        f"| `{kernel.value}` | {said[kernel.value]} | {form.source} |"
        for kernel, form in LOSS_FORMS.items()
    ]
    return "\n".join(
        ["## `--loss`", "", "| value | what it is | read in |", "|---|---|---|", *rows]
    )


def _liger() -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, each in LIGER_MODELS.items():
        key = (each.norm.value, each.mlp.value, each.rotary.value, each.loss.value, each.beside)
        rows.setdefault(key, []).append(f"`{name}`")
    lines = [
        f"| {', '.join(names)} | " + " | ".join(f"`{each}`" for each in key[:4]) + f" | {key[4]} |"
        for key, names in rows.items()
    ]
    head = [
        f"## Liger {LIGER_VERSION}, by model type", "",
        "Of other types transformers' own kernels stay, and the answer says so.", "",
        "| model types | norm | mlp | rotary | loss | counted as the class's own |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join([*head, *lines])
