"""The table of every engine's own options, from the dataclasses that read them."""

import ast
import inspect
from dataclasses import MISSING, fields
from enum import Enum
from types import ModuleType
from typing import Any

from memplan.dtypes import DType
from memplan.memory import ddp
from memplan.memory.deepspeed import options as deepspeed
from memplan.memory.fsdp1 import options as fsdp1
from memplan.memory.fsdp2 import options as fsdp2
from memplan.memory.megatron import options as megatron_states
from memplan.training import quantization, quantize_setting
from memplan.training.splitting import megatron as megatron_layers
from memplan.training.splitting import parallelism

ENGINES: dict[str, tuple[str, ModuleType, Any]] = {
    "ddp": ("DDP, and one GPU", ddp, ddp.DdpOptions),
    "fsdp": ("FSDP2 (`fsdp`)", fsdp2, fsdp2.Fsdp2Options),
    "fsdp1": ("FSDP1", fsdp1, fsdp1.Fsdp1Options),
    "megatron states": (
        "Megatron (`megatron`): data parallelism and optimizer",
        megatron_states,
        megatron_states.MegatronStates,
    ),
    "megatron layers": (
        "Megatron: layers",
        megatron_layers,
        megatron_layers.MegatronLayers,
    ),
}
"""Engines whose fields are their options: a title, the module, the dataclass."""


LOADING = {
    "device_map": (
        "as `quantize` says",
        """transformers loads the weights right onto this GPU (`from_pretrained(device_map=...)`): one block as
large as all of them is asked for and given back first, so that they are parts of one segment, and adapters
come behind them, in the base's format until all are there. False: as `model.to` moves what is in CPU RAM, or
as another loader takes a quantized base, torchtune's or LitGPT's. A quantized base is loaded so unless this
is false, any other where it is true: the files of TRL (one GPU), axolotl, LLaMA-Factory and unsloth say
it.""".replace("\n", " "),
    )
}
"""The option of whole weights, whatever the engine: its default, and what it means."""


def document() -> str:
    """All of it, as Markdown."""
    parts = [_section(title, rows(kind)) for title, _, kind in ENGINES.values()]
    parts.append(_section("DeepSpeed", deepspeed_rows()))
    known = rows(parallelism.PipelineParallel)
    options = {"return_outputs": known["returns_outputs"]}
    parts.append(_section("torch's pipelines (`pipeline_parallel`), with DDP and FSDP2", options))
    parts.append(_section("A quantized base (`quantize`), with any engine", quantization_rows()))
    parts.append(_section("How weights come to the GPU, with DDP, one GPU and ZeRO 0-2", LOADING))
    parts.append(
        "Taken, and without effect on memory worth counting: "
        + ", ".join(f"`{name}`" for name in sorted(deepspeed.WITHOUT_EFFECT))
        + "."
    )
    parts.append(
        "Not modelled; the answer names them where they are set to anything but the value given here: "
        + ", ".join(f"`{name}` ({_plain(value)})" for name, value in deepspeed.UNMODELLED.items())
        + "."
    )
    return "\n\n".join(parts)


def rows(kind: Any) -> dict[str, tuple[str, str]]:
    """Of each field: its default, and what it means."""
    meanings = documented(kind)
    return {
        each.name: (_default(each), _meaning(meanings.get(each.name, ""), each.default))
        for each in fields(kind)
    }


def deepspeed_rows() -> dict[str, tuple[str, str]]:
    """The same under DeepSpeed's names."""
    known = rows(deepspeed.DeepSpeedOptions)
    return {name: known[field] for name, (field, _) in deepspeed.MODELLED.items()}


def quantization_rows() -> dict[str, tuple[str, str]]:
    """Those that say how a base is quantized."""
    known = rows(quantization.Quantization)
    return {name: known[field] for name, field in quantize_setting.OPTION_FIELDS.items()}


def documented(kind: Any) -> dict[str, str]:
    """The text under each field or member of a class."""
    (body,) = (
        node.body for node in ast.walk(ast.parse(inspect.getsource(kind)))
        if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    found, name = {}, ""
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
            name = ""
        else:
            name = ""
    return found


def _meaning(text: str, default: object) -> str:
    """What an option means, and what each of its values does."""
    parts = [text] if text else []
    if isinstance(default, Enum) and not isinstance(default, DType):
        said = documented(type(default))
        values = (
            f"`{member.value}`" + (f": {said[member.name]}" if member.name in said else "")
            for member in type(default)
        )
        parts.append("; ".join(value.rstrip(".") for value in values) + ".")
    return " ".join(parts).replace("``", "`").replace("|", "\\|")


def _default(each: Any) -> str:
    value = each.default if each.default is not MISSING else None
    return _plain(value)


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, DType):
        return value.label
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ", ".join(_plain(each) for each in value)
    if value == deepspeed.UNLIMITED:
        return "no limit"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _section(title: str, found: dict[str, tuple[str, str]]) -> str:
    lines = [f"## {title}", "", "| option | default | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {default} | {text} |" for name, (default, text) in found.items()]
    return "\n".join(lines)
