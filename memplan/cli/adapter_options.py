"""Options that lay an adapter over a model, and the adapter made of them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from memplan.training.adapters import Adapter

ADAPTER_PANEL = "Adapters"


def _option(name: str, help_text: str, metavar: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help_text, rich_help_panel=ADAPTER_PANEL)


LoraOption = Annotated[
    int | None,
    _option("--lora", "Train LoRA adapters of this rank; the model's weights are frozen.", "RANK"),
]
LoraTargetsOption = Annotated[
    str | None,
    _option(
        "--lora-targets",
        "Modules that have one: q_proj,v_proj or all-linear. [default: peft's for the model type]",
        "NAMES",
    ),
]
LoraDropoutOption = Annotated[
    float | None, _option("--lora-dropout", "Dropout on what the adapters are given.", "P")
]
LoraDtypeOption = Annotated[
    str | None,
    _option("--lora-dtype", "The adapters' weights: fp32, as peft makes them, or bf16.", "NAME"),
]
DoraOption = Annotated[
    bool,
    typer.Option(
        "--dora",
        help="Each output has a trained magnitude too (DoRA).",
        rich_help_panel=ADAPTER_PANEL,
    ),
]
AdapterOption = Annotated[
    str | None,
    _option("--adapter", "peft's adapter_config.json, or the folder that holds it.", "FILE|DIR"),
]

ADAPTER_NAMES = ("lora", "lora_targets", "lora_dropout", "lora_dtype", "dora", "adapter")
"""The commands' parameters."""


def adapter_of(
    lora: int | None = None,
    *,
    lora_targets: str | None = None,
    lora_dropout: float | None = None,
    lora_dtype: str | None = None,
    dora: bool = False,
    adapter: str | None = None,
) -> "Adapter | None":
    """The adapter that the command's options describe; None where there is none.

    Raises ``UsageError`` for details of an adapter that is not there, and for two adapters.
    """
    from memplan.errors import UsageError

    options: dict[str, Any] = {
        "lora": lora, "lora_targets": lora_targets, "lora_dropout": lora_dropout,
        "lora_dtype": lora_dtype, "dora": dora, "adapter": adapter,
    }  # fmt: skip
    given = {
        name: value for name in ADAPTER_NAMES if (value := options.get(name)) not in (None, False)
    }
    if not given:
        return None
    path = given.pop("adapter", None)
    details = " and ".join(f"--{name.replace('_', '-')}" for name in given)
    if path is not None:
        if given:
            msg = f"--adapter says all that {details} say{'s' * (len(given) == 1)}: give one"
            raise UsageError(msg)
        from memplan.sources.adapter_config import read_adapter_config

        return read_adapter_config(path).adapter
    if "lora" not in given:
        msg = f"{details}: means nothing without --lora: add that, or leave it out"
        raise UsageError(msg)
    from memplan.training.adapters import ALL_LINEAR, Lora

    targets = given.get("lora_targets")
    return Lora(
        rank=given["lora"],
        targets=_names(targets) if targets is not None and targets != ALL_LINEAR else targets,
        dropout=given.get("lora_dropout", 0.0),
        dtype=given.get("lora_dtype", "fp32"),
        dora="dora" in given,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
