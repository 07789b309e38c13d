"""The table of optimizers, from their rows: bytes a parameter, what a step takes, names elsewhere."""

from memplan.dtypes import DType
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import (
    Act,
    ActKind,
    OptimizerRow,
    Options,
    Script,
    Stepped,
    TensorRole,
    acts_of,
    states_of,
)
from memplan.training.optimizers.spellings import TRANSFORMERS
from memplan.training.optimizers.table import all_rows, chosen

SHAPE = (4096, 4096)
PLACES = {ActKind.MANAGED: "managed", ActKind.HOST: "CPU"}


def document() -> str:
    """All of it, as Markdown."""
    head = (
        "| optimizer | in `TrainingArguments` | states, bf16 | states, fp32 | step, bf16 | step, fp32 "
        "| `optimizer_options` | source |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    return "\n".join([head, *(_row(optimizer) for optimizer in all_rows())])


def _row(optimizer: Optimizer) -> str:
    row, options = chosen(optimizer, ())
    names = ", ".join(
        f"`{name}`" for name, each in TRANSFORMERS.items() if each.optimizer is optimizer
    )
    cells = [f"`{optimizer.value}`", names]
    cells += [_states(row, options, dtype) for dtype in (DType.BF16, DType.FP32)]
    cells += [_step(row, options, dtype) for dtype in (DType.BF16, DType.FP32)]
    cells.append(", ".join(f"`{key}` {_plain(value)}" for key, value in row.options.items()))
    cells.append(row.source)
    return f"| {' | '.join(cells)} |"


def _tensor(dtype: DType) -> Stepped:
    return Stepped(SHAPE, dtype, TensorRole.LINEAR, "mlp.up_proj")


def _states(row: OptimizerRow, options: Options, dtype: DType) -> str:
    """Bytes a parameter of a large matrix, by place."""
    tensor = _tensor(dtype)
    totals: dict[str, int] = {}
    for act in states_of(row, options, tensor):
        place = PLACES.get(act.kind, "")
        totals[place] = totals.get(place, 0) + act.num_bytes
    parts = [f"{size / tensor.numel:.3g} {place}".strip() for place, size in totals.items()]
    return " + ".join(parts) or "0"


def _step(row: OptimizerRow, options: Options, dtype: DType) -> str:
    """Bytes an element of a later step: of all tensors, or of the one that is stepped."""
    tensor = _tensor(dtype)
    if row.update_all is not None:
        script = Script(options, first=False)
        row.update_all(script, [tensor])
        size, of = _most(script.acts), "all"
    else:
        acts = acts_of(row, options, tensor, init=False, update=True, first=False)
        size, of = _most(acts), "the largest"
    found = f"{size / tensor.numel:.2g}"
    return f"{found} x {of}" if size * 100 > tensor.numel else "0"


def _most(acts: "tuple[Act, ...] | list[Act]") -> int:
    """The most that a script holds at once [bytes]."""
    held: dict[str, int] = {}
    highest = 0
    for act in acts:
        if act.kind in (ActKind.LET, ActKind.LET_WEIGHT):
            highest = max(highest, sum(held.values()) + act.num_bytes)
            held[act.name] = act.num_bytes
        elif act.kind is ActKind.DROP:
            held.pop(act.name, None)
        elif act.kind is ActKind.RENAME:
            name, _, new = act.name.partition(">")
            held[new] = held.pop(name, 0)
        elif act.kind in (ActKind.GRADIENT, ActKind.WEIGHT):
            held.pop(act.name, None)
    return highest


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
