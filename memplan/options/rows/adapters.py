"""Options that lay an adapter over a model, and the adapter made of them."""

from typing import TYPE_CHECKING, Any

from memplan.options.table import Option, OptionGroup, Values

if TYPE_CHECKING:
    from memplan.training.adapters import Adapter

ADAPTER_PANEL = "Adapters"


def adapter_of(values: Values) -> "Adapter | None":
    """The adapter that the command's options describe; None where there is none.

    Raises ``UsageError`` for details of an adapter that is not there, and for two adapters.
    """
    from memplan.errors import UsageError

    given: dict[str, Any] = {
        option.parameter: values[option.parameter]
        for option in ADAPTER_OPTIONS
        if values.get(option.parameter) is not None and values[option.parameter] is not False
    }
    if not given:
        return None
    path = given.pop("adapter", None)
    details = " and ".join(f"--{name.replace('_', '-')}" for name in given)
    if path is not None:
        if given:
            msg = f"--adapter says all that {details} say{'s' * (len(given) == 1)}: give one"
            raise UsageError(msg)
        if not isinstance(path, str):
            return path  # type: ignore[no-any-return]
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


ADAPTER_OPTIONS = (
    Option(
        flag="--lora", field="adapter", panel=ADAPTER_PANEL, kind=int | None, metavar="[RANK]",
        help_text="Train LoRA adapters of this rank, 16 where none is said; the model's weights are frozen.",
    ),
    Option(
        flag="--lora-targets", field="adapter", panel=ADAPTER_PANEL, kind=str | None, metavar="NAMES",
        help_text="Modules that have one: q_proj,v_proj or all-linear. [default: peft's for the model "
        "type]",
    ),
    Option(
        flag="--lora-dropout", field="adapter", panel=ADAPTER_PANEL, kind=float | None, metavar="P",
        help_text="Dropout on what the adapters are given.",
    ),
    Option(
        flag="--lora-dtype", field="adapter", panel=ADAPTER_PANEL, kind=str | None,
        help_text="The adapters' weights: fp32, as peft makes them, or bf16.",
    ),
    Option(
        flag="--dora", field="adapter", panel=ADAPTER_PANEL, kind=bool, default=False, metavar=None,
        help_text="Each output has a trained magnitude too (DoRA).",
    ),
    Option(
        flag="--adapter", field="adapter", panel=ADAPTER_PANEL, kind=str | None, metavar="FILE|DIR",
        help_text="peft's adapter_config.json, or the folder that holds it.",
    ),
)  # fmt: skip
ADAPTERS = OptionGroup(field="adapter", options=ADAPTER_OPTIONS, make=adapter_of)
