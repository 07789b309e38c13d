"""What several stacks say alike, as fields of ``TrainingSetup``."""

ALL_LINEAR = "all-linear"
EVERY_LINEAR = "every-linear"
"""The output matrix too."""


def lora(
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: tuple[str, ...] | str | None,
    dtype: str = "fp32",
    modules_to_save: tuple[str, ...] = (),
    rslora: bool = False,
    dora: bool = False,
    layers: tuple[int, ...] = (),
    exclude: tuple[str, ...] | str = (),
    parameters: tuple[str, ...] = (),
) -> dict[str, object]:
    """An adapter as a setup file writes it; what does nothing is left out.

    >>> lora(rank=16, alpha=32, dropout=0.0, targets="all-linear")
    {'lora': {'rank': 16, 'alpha': 32, 'targets': 'all-linear'}}
    """
    settings: dict[str, object] = {
        "rank": rank, "alpha": alpha, "dropout": dropout, "targets": targets,
        "dtype": "" if dtype == "fp32" else dtype, "modules_to_save": modules_to_save,
        "rslora": rslora, "dora": dora, "layers": layers, "exclude": exclude,
        "parameters": parameters,
    }  # fmt: skip
    return {"lora": {name: value for name, value in settings.items() if value}}


def adapter_dtype(*, halves: bool) -> str:
    """What an adapter's weights are held in."""
    return "bf16" if halves else "fp32"
