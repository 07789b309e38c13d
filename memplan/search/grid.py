"""A grid of training setups: one base, and for some of its fields every value to try.

An axis that an engine does not have (DeepSpeed's stages under FSDP) is left out for that engine, so
that ``engine x zero_stage x fsdp_strategy`` gives each engine's own variants once. A combination
that contradicts itself is no error of the grid: it comes out as an ``Impossible``.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice, product

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass, field, replace
from memplan.search.pipelined import STEPS, fewest_steps
from memplan.search.quantity import MAX, OF_SETUP, Quantity
from memplan.text import shown
from memplan.training.choices import Offload
from memplan.training.precision import Engine, Precision, engines_with
from memplan.training.setup import SETUP_FIELDS, TrainingSetup, unknown_field
from memplan.training.setup_derived import usual_engine

AxisValues = Mapping[str, object]
"""Field of ``TrainingSetup`` -> its value, or a list of values."""

_NESTING = (
    "kernels", "attention", "norm", "mlp", "rotary", "scan", "loss", "packing", "dropout", "freeze", "quantize", "precision", "seq_len",
    "target_seq_len", "checkpointing", "micro_batch_size", "gradient_accumulation_steps",
    "optimizer", "num_gpus", "num_nodes", "engine", "zero_stage", "fsdp_strategy",
    "offload_optimizer", "offload_param",
)  # fmt: skip
"""How axes nest, outermost first; others come last. Engines share the walk of a model's
activations, so what changes activations is outside what does not."""

_OWNERS: dict[str, frozenset[Engine]] = {
    "zero_stage": frozenset({Engine.DEEPSPEED}),
    "fsdp_strategy": frozenset({Engine.FSDP, Engine.FSDP1}),
}
"""Axes that belong to some engines only."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """A combination of a grid that cannot be trained."""

    reason: str


@dataclass(frozen=True, slots=True)
class Open:
    """A combination of which one value is the largest that fits."""

    setup: TrainingSetup
    quantity: Quantity
    global_batch_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Setups to sweep over.

    ``max`` as the one value of ``micro_batch_size`` or ``seq_len`` stands for the largest that fits. Raises
    ``SetupError`` for an axis that ``TrainingSetup`` does not have, or an empty one.

    >>> grid = Grid(axes={"num_gpus": [8, 16], "zero_stage": [2, 3], "micro_batch_size": 4})
    >>> grid.num_combinations
    4
    >>> [(setup.num_gpus, setup.zero_stage.value) for setup in grid.setups()]
    [(8, 2), (8, 3), (16, 2), (16, 3)]
    """

    axes: AxisValues = field(default_factory=dict)
    """What varies: a field of ``TrainingSetup``, and the values it takes (or one value)."""
    base: TrainingSetup = TrainingSetup()
    """Everything else."""
    global_batch_size: int | None = None
    """Sequences of one optimizer step over all ranks: fixes ``gradient_accumulation_steps``."""
    exclude: tuple[AxisValues, ...] = ()
    """Setups to leave out: each entry names fields and values that all have to match."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", ordered_axes(self.axes, self.base))
        object.__setattr__(self, "exclude", tuple(_excluded(each) for each in self.exclude))
        if self.global_batch_size is not None:
            _check_global_batch(self.global_batch_size, self.axes)

    @property
    def num_combinations(self) -> int:
        """Combinations of all axes, impossible ones and repetitions included."""
        total = 1
        for values in _tuples(self.axes).values():
            total *= len(values)
        return total

    @property
    def looked_for(self) -> Quantity | None:
        """What each setup has the largest of that fits."""
        found = [name for name, values in self.axes.items() if values == (MAX,)]
        return Quantity(found[0]) if found else None

    def combinations(
        self, start: int = 0, stop: int | None = None
    ) -> "Iterator[TrainingSetup | Open | Impossible | None]":
        """Every combination in a stable order, or those from one number to another; None for one that is excluded or a repetition."""
        quantity = self.looked_for
        for each in self._given(start, stop):
            if quantity is not None and isinstance(each, TrainingSetup):
                yield Open(each, quantity, self.global_batch_size)
            else:
                yield each

    def _given(
        self, start: int = 0, stop: int | None = None
    ) -> "Iterator[TrainingSetup | Impossible | None]":
        """What is given of every combination."""
        axes = {name: values for name, values in _tuples(self.axes).items() if values != (MAX,)}
        names = tuple(axes)
        for values in islice(product(*axes.values()), start, stop):
            yield self._combine(dict(zip(names, values, strict=True)), axes)

    def setups(self) -> Iterator[TrainingSetup]:
        """The setups that can be trained, in a stable order."""
        for each in self._given():
            if isinstance(each, TrainingSetup):
                yield each

    def _combine(
        self, values: dict[str, object], axes: Mapping[str, tuple[object, ...]]
    ) -> TrainingSetup | Impossible | None:
        engine = _engine(self.base, values)
        values["engine"] = engine
        for name, owners in _OWNERS.items():
            if engine not in owners:
                if name in values and values[name] != axes[name][0]:
                    return None
                values[name] = None
        if STEPS not in values and self.base.gradient_accumulation_steps == 1:
            values[STEPS] = self._fewest_steps(values)
        try:
            setup = replace(self.base, **values)  # type: ignore[arg-type]
            if self.global_batch_size is not None:
                setup = with_global_batch(setup, self.global_batch_size)
        except SetupError as error:
            return Impossible(str(error))
        return None if self._is_excluded(setup) else setup

    def _fewest_steps(self, values: Mapping[str, object]) -> int:
        """Of a pipeline, where nobody says how many micro-batches a step has."""
        names = ("pipeline_parallel", "pipeline_schedule")
        return fewest_steps({name: getattr(self.base, name) for name in names} | dict(values))

    def _is_excluded(self, setup: TrainingSetup) -> bool:
        return any(
            all(_value(setup, name) in values for name, values in _tuples(entry).items())
            for entry in self.exclude
        )


def ordered_axes(axes: AxisValues, base: TrainingSetup) -> dict[str, tuple[object, ...]]:
    """The axes as tuples without repetitions, in the order they nest.

    Raises ``SetupError`` for names and values that ``base`` cannot take.
    """
    found: dict[str, tuple[object, ...]] = {}
    for name in sorted(axes, key=_nesting):
        if name not in SETUP_FIELDS:
            raise unknown_field(name)
        values = _as_tuple(axes[name])
        if not values:
            msg = f"{name}: the axis has no values"
            raise SetupError(msg)
        if MAX in values and name in OF_SETUP:
            _check_looked_for(name, values, found)
            found[name] = (MAX,)
            continue
        found[name] = tuple(dict.fromkeys(_coerced(name, value) for value in values))
    if "engine" not in found and base.engine is None:
        engines = _implied_engines(found)
        if engines:
            found["engine"] = engines
            found = {name: found[name] for name in sorted(found, key=_nesting)}
    return found


def _check_looked_for(
    name: str, values: tuple[object, ...], others: Mapping[str, tuple[object, ...]]
) -> None:
    """Raise ``SetupError`` for other values beside ``max``, and for two axes of it."""
    if len(set(values)) > 1:
        msg = f"{name}: max stands alone: leave out the other values, or ask twice"
        raise SetupError(msg)
    if (MAX,) in others.values():
        other = next(each for each, found in others.items() if found == (MAX,))
        msg = f"{name}: one value can be max, and {other} is: give this one"
        raise SetupError(msg)


def _nesting(name: str) -> tuple[int, str]:
    return (_NESTING.index(name) if name in _NESTING else len(_NESTING), name)


def _as_tuple(values: object) -> tuple[object, ...]:
    if isinstance(values, Sequence) and not isinstance(values, str):
        return tuple(values)
    return (values,)


def _tuples(axes: AxisValues) -> dict[str, tuple[object, ...]]:
    return {name: _as_tuple(values) for name, values in axes.items()}


_LONE_FIELDS = frozenset({
    "engine", "precision", "optimizer", "attention", "norm", "mlp", "rotary", "scan", "loss", "packing", "kernels",
    "checkpointing", "dropout", "freeze", "quantize", "offload_optimizer", "offload_param", "micro_batch_size",
    "gradient_accumulation_steps", "seq_len", "target_seq_len",
})  # fmt: skip
"""Fields whose value can be judged without the others."""


def _coerced(name: str, value: object) -> object:
    """The value as the setup holds it, so that equal ones are seen to be equal."""
    if name == "zero_stage":
        setup = TrainingSetup(num_gpus=2, engine=Engine.DEEPSPEED, zero_stage=value)  # type: ignore[arg-type]
        return setup.zero_stage
    if name == "fsdp_strategy":
        made = TrainingSetup(num_gpus=2, engine=Engine.FSDP, fsdp_strategy=value)  # type: ignore[arg-type]
        return made.fsdp_strategy
    if name in ("offload_optimizer", "offload_param"):
        sharded = TrainingSetup(num_gpus=2, engine=Engine.FSDP, **{name: value})  # type: ignore[arg-type]
        return getattr(sharded, name)
    if name == "precision":
        return _precision(value)
    if name == "engine_options":
        return TrainingSetup(engine_options=value).engine_options  # type: ignore[arg-type]
    if isinstance(value, Mapping | list | set):
        msg = f"{name}: each value of an axis must be a single one, got {shown(value)}"
        raise SetupError(msg)
    if name in _LONE_FIELDS:
        return getattr(TrainingSetup(**{name: value}), name)  # type: ignore[arg-type]
    return value


def _precision(value: object) -> object:
    from memplan.training.coercion import coerce_enum

    return None if value is None else coerce_enum("precision", value, Precision)


def _implied_engines(axes: Mapping[str, tuple[object, ...]]) -> tuple[Engine, ...]:
    """The engines that the other axes speak of."""
    engines = []
    if "zero_stage" in axes:
        engines.append(Engine.DEEPSPEED)
    if "fsdp_strategy" in axes:
        engines.append(Engine.FSDP)
    moved = [
        value
        for name in ("offload_optimizer", "offload_param")
        for value in axes.get(name, ())
        if value is not Offload.NONE
    ]
    if moved and not engines:
        engines.append(Engine.DEEPSPEED)
    return tuple(engines)


def _engine(base: TrainingSetup, values: Mapping[str, object]) -> Engine | None:
    """The engine of one combination: named, or the usual one that has the precision."""
    named = values.get("engine", base.engine)
    if isinstance(named, Engine):
        return named
    precision = values.get("precision", base.precision)
    num_gpus = values.get("num_gpus", base.num_gpus)
    degree = values.get("tensor_parallel", base.tensor_parallel)
    usual = base.chosen_engine
    stages = values.get("pipeline_parallel", base.pipeline_parallel)
    if isinstance(num_gpus, int) and isinstance(degree, int) and isinstance(stages, int):
        usual = usual_engine(num_gpus, degree * stages)  # else the setup itself refuses them
    if isinstance(precision, Precision) and usual not in engines_with(precision):
        return min(engines_with(precision), key=lambda each: each.value)
    return usual


def with_global_batch(setup: TrainingSetup, global_batch_size: int) -> TrainingSetup:
    """The setup with as many accumulation steps as make up the global batch.

    Raises ``SetupError`` where the batch is not a multiple of what all ranks take at once.

    >>> with_global_batch(TrainingSetup(num_gpus=8, micro_batch_size=4), 256)
    ... # doctest: +ELLIPSIS
    TrainingSetup(num_gpus=8, ... gradient_accumulation_steps=8, ...)
    """
    at_once = setup.micro_batch_size * setup.data_parallel
    if global_batch_size % at_once:
        msg = (
            f"global_batch_size: {global_batch_size} is not a multiple of micro_batch_size x "
            f"data-parallel ranks = {setup.micro_batch_size} x {setup.data_parallel} = {at_once}"
        )
        raise SetupError(msg)
    return replace(setup, gradient_accumulation_steps=global_batch_size // at_once)


def _check_global_batch(global_batch_size: object, axes: AxisValues) -> None:
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int):
        msg = f"global_batch_size: expected a whole number, got {global_batch_size!r}"
        raise SetupError(msg)
    if global_batch_size < 1:
        msg = f"global_batch_size: must be at least 1, got {global_batch_size}"
        raise SetupError(msg)
    if "gradient_accumulation_steps" in axes:
        msg = (
            "gradient_accumulation_steps: follows from global_batch_size; give one of the two, "
            "not both"
        )
        raise SetupError(msg)


def _excluded(entry: AxisValues) -> dict[str, tuple[object, ...]]:
    for name in entry:
        if name not in SETUP_FIELDS:
            raise unknown_field(name)
    if not entry:
        msg = "exclude: an entry names no field, and would leave out everything"
        raise SetupError(msg)
    return {
        name: tuple(_plain(value) for value in _as_tuple(values)) for name, values in entry.items()
    }


def _value(setup: TrainingSetup, name: str) -> object:
    if name == "engine":
        return setup.chosen_engine.value
    if name == "precision":
        return setup.chosen_precision.value
    if name == "num_nodes":
        return setup.nodes
    return _plain(getattr(setup, name))


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return str(value) if type(value).__name__ == "FrozenParts" else value
