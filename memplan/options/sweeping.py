"""What ``sweep`` is asked: a model, a grid of setups, the GPUs to judge them by."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass, replace
from memplan.options.asked import Asked
from memplan.options.axes import read_axes
from memplan.options.rows.settings import group_fields, setting_axes

if TYPE_CHECKING:
    from memplan.hardware.gpu import GpuSpec
    from memplan.model.spec import ModelSpec
    from memplan.search.grid import Grid
    from memplan.sources.sweep_file import ModelChoice, SweepFile
    from memplan.training.setup import TrainingSetup

AXES = {
    "num_gpus": "gpus", "num_nodes": "nodes", "engine": "engine", "zero_stage": "zero",
    "fsdp_strategy": "fsdp_strategy", "offload_optimizer": "offload",
    "offload_param": "offload_param", "precision": "precision",
}  # fmt: skip
"""Fields that may vary beside those of ``SETTING_OPTIONS`` -> the option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepQuestion:
    """What is to be swept over."""

    model: "ModelSpec"
    grid: "Grid"
    gpus: "list[GpuSpec]"
    """Empty where none is to be judged by."""
    node_memory_bytes: int | None
    """CPU RAM of a node, where it is judged too."""


def sweep_question(asked: Asked, *, judges: bool, remark: Callable[[str], None]) -> SweepQuestion:
    """Make the question of the options; of a file, where the model's name is that of a sweep.

    ``judges``: by the usual GPUs where none is named. Raises a ``MemplanError`` for options that do
    not go together.
    """
    from memplan.options.hardware import chosen_gpus

    values = asked.values
    named = {field: (f"--{name.replace('_', '-')}", values[name]) for field, name in AXES.items()}
    axes = read_axes({**named, **setting_axes(values)})
    file = _read_file(values["model"])
    grid = _grid(file, _base(asked, file, remark), axes, values["global_batch_size"])
    names = values["gpu"] or (file.gpus if file else None)
    memory = values["gpu_memory"] or _file_memory(file, asked)
    gpus = []
    if judges or names or memory is not None:
        attention = values["attention"]
        gpus = chosen_gpus(
            names, memory, attention=attention if isinstance(attention, str) else "", remark=remark
        )
    node = asked.node_memory_bytes()
    if node is None and file is not None:
        node = file.node_memory_bytes
    return SweepQuestion(model=_model(asked, file), grid=grid, gpus=gpus, node_memory_bytes=node)


def _base(asked: Asked, file: "SweepFile | None", remark: Callable[[str], None]) -> "TrainingSetup":
    """What every setup of the grid starts from."""
    from memplan.options.engine_options import parse_engine_options
    from memplan.options.setup_files import base_setup

    values = asked.values
    base = file.grid.base if file is not None else None
    places = (values["setup"], values["training_args"], values["preset"])
    if base is None or any(place is not None for place in places):
        base = base_setup(*places, remark=remark, model=values["model"])
    if values["engine_option"]:
        base = replace(base, engine_options=parse_engine_options(values["engine_option"]))
    return replace(base, **group_fields(values))  # type: ignore[arg-type]


def _model(asked: Asked, file: "SweepFile | None") -> "ModelSpec":
    named = _named_model(file, asked.values["model"])
    values = dict(asked.values)
    for name in ("task", "family", "num_labels", "revision"):
        values[name] = values[name] or getattr(named, name)
    return replace(asked, values=values).model(named.name)


def _named_model(file: "SweepFile | None", model: str) -> "ModelChoice":
    from memplan.errors import ConfigError
    from memplan.sources.sweep_file import ModelChoice

    if file is None:
        return ModelChoice(name=model)
    if file.model is None:
        msg = f"{model}: model: is missing: name the model to train"
        raise ConfigError(msg)
    return file.model


def _read_file(path: object) -> "SweepFile | None":
    """The sweep file, where MODEL is one."""
    if not isinstance(path, str) or not path.lower().endswith((".yaml", ".yml")):
        return None
    from memplan.sources.sweep_file import is_sweep_file, read_sweep

    return read_sweep(path) if is_sweep_file(path) else None


def _file_memory(file: "SweepFile | None", asked: Asked) -> str | None:
    return file.gpu_memory if file is not None and not asked.values["gpu"] else None


def _grid(
    file: "SweepFile | None",
    base: "TrainingSetup",
    axes: Mapping[str, object],
    global_batch_size: int | None,
) -> "Grid":
    """The grid of the options, laid over that of the file."""
    from memplan.search.grid import Grid

    if file is None:
        return Grid(axes=axes, base=base, global_batch_size=global_batch_size)
    known = dict(file.grid.axes)
    if "gradient_accumulation_steps" in axes:
        global_batch = global_batch_size
    else:
        global_batch = global_batch_size or file.grid.global_batch_size
    return Grid(
        axes={**known, **axes},
        base=base,
        global_batch_size=global_batch,
        exclude=file.grid.exclude,
    )
