"""``max`` in the place of a number: the largest with which a setup fits the card that is named."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.hardware.gpu import GpuSpec
    from memplan.model.spec import ModelSpec
    from memplan.search.largest import Found
    from memplan.search.quantity import Quantity
    from memplan.training.setup import TrainingSetup

MAX = "max"
LEAST = {"batch_size": 1, "seq_len": None, "lora": 1, "num_layers": None}
"""Parameters that may be ``max`` -> where they stand until it is found."""
_QUANTITIES = {
    "batch_size": "micro_batch_size", "seq_len": "seq_len", "lora": "rank",
    "num_layers": "num_layers",
}  # fmt: skip


def or_max(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A reader of numbers that takes ``max`` too.

    >>> or_max(int)("max"), or_max(int)("8")
    ('max', 8)
    """

    def read_either(value: Any) -> Any:
        return MAX if value == MAX else read(value)

    return read_either


def read_whole(value: str | float) -> int:
    """Read a whole number. Raises ``ValueError``.

    >>> read_whole("16")
    16
    """
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        msg = f"{value!r} is not a whole number, nor max"
        raise ValueError(msg) from None


def looked_for(params: Values) -> "Quantity | None":
    """What one of the command's parameters asks the largest of.

    Raises ``UsageError`` where two of them do.
    """
    asked = [name for name in LEAST if params.get(name) == MAX]
    if not asked:
        return None
    if len(asked) > 1:
        from memplan.errors import UsageError

        first, second = (f"--{name.replace('_', '-')}" for name in asked[:2])
        msg = f"{second}: only one value can be max, and {first} is: give a number here"
        raise UsageError(msg)
    from memplan.search.quantity import Quantity

    return Quantity(_QUANTITIES[asked[0]])


def without_max(params: Values) -> dict[str, Any]:
    """The parameters, the one that is looked for at its least."""
    return {
        name: LEAST[name] if name in LEAST and value == MAX else value
        for name, value in params.items()
    }


def filled(
    quantity: "Quantity",
    model: "ModelSpec",
    setups: "list[TrainingSetup]",
    gpus: "list[GpuSpec]",
    *,
    is_named: bool,
    global_batch_size: int | None,
) -> "list[Found]":
    """Each setup with the largest value that fits the one card.

    Raises ``UsageError`` for several cards, where none was named, and for several setups that would each be of
    another model.
    """
    from memplan.errors import UsageError
    from memplan.search.largest import largest_setup
    from memplan.search.quantity import Quantity

    option = _OPTIONS[quantity.value]
    if not is_named or len(gpus) > 1:
        msg = f"{option} max: is the largest that fits one card: name it, such as --gpu h100"
        raise UsageError(msg)
    if len(setups) > 1 and quantity is Quantity.LAYERS:
        msg = (
            f"{option} max: {len(setups)} setups are compared, and each would be of another model: "
            "name one whole (--zero 2 --offload none), or use memplan plan --maximize layers"
        )
        raise UsageError(msg)
    return [
        largest_setup(model, each, gpus[0], quantity, global_batch_size=global_batch_size)
        for each in setups
    ]


def found_note(found: "Found", quantity: "Quantity", gpu: "GpuSpec") -> str:
    """What was found, in a line."""
    option, card = _OPTIONS[quantity.value], gpu.short_name
    if not found.fits:
        return f"{option} max: nothing fits {card}, not even {found.size:,}, of which these figures are"
    if found.next_size is None:
        return f"{option} {found.size:,} is all there is, and fits {card}"
    return f"{option} {found.size:,} is the largest that fits {card}: {found.next_size:,} does not"


_OPTIONS = {value: f"--{name.replace('_', '-')}" for name, value in _QUANTITIES.items()}
