"""Lists and ranges of whole numbers, as options and sweep files take them.

``1,2,4`` is a list, ``0-3`` every integer from 0 to 3, ``1..32`` doubles from 1 to 32; they mix:
``1,4..16``. ``8k`` is 8,192.
"""

from memplan.errors import UsageError
from memplan.units import parse_count

MAX_VALUES = 1024
"""The longest list that a range may stand for: a sweep is a product of such lists, and one typing
error (``1-1000000``) should not start a run of hours."""

MAX_DIGITS = 18
"""Digits of one number: beyond it nothing counted here exists (10^18 tokens, GPUs, layers)."""

_FORMS = "write a list (1,2,4), a range (0-3) or doublings (1..32)"


def parse_range(text: str, *, option: str = "value", minimum: int = 0) -> list[int]:
    """Read a list of whole numbers, each once, in the order written.

    ``option`` is named in the message. Raises ``UsageError`` for anything that is not such a list,
    for numbers below ``minimum``, and for more than ``MAX_VALUES`` numbers.

    >>> parse_range("1,2,4"), parse_range("0-3"), parse_range("1..32")
    ([1, 2, 4], [0, 1, 2, 3], [1, 2, 4, 8, 16, 32])
    """
    values: dict[int, None] = {}
    for part in text.split(","):
        values.update(dict.fromkeys(_expand(part.strip(), option)))
        if len(values) > MAX_VALUES:
            raise _error(option, text, f"stands for more than {MAX_VALUES} numbers: shorten it")
    least = min(values)
    if least < minimum:
        raise _error(option, text, f"holds {least}, and {minimum} is the least that makes sense")
    return list(values)


def _expand(part: str, option: str) -> range | list[int]:
    """Read ``4``, ``0-3`` or ``1..32``."""
    for separator, expand in (("..", _doublings), ("-", _every)):
        first, found, last = part.partition(separator)
        if found:
            low, high = _number(first, part, option), _number(last, part, option)
            if low > high:
                raise _error(option, part, f"runs backwards: write {high}{separator}{low}")
            return expand(low, high, option)
    return [_number(part, part, option)]


def _every(low: int, high: int, option: str) -> range:
    if high - low >= MAX_VALUES:
        part = f"{low}-{high}"
        raise _error(option, part, f"stands for more than {MAX_VALUES} numbers: shorten it")
    return range(low, high + 1)


def _doublings(low: int, high: int, option: str) -> list[int]:
    """Double from ``low`` while that does not pass ``high``."""
    if low < 1:
        raise _error(option, f"{low}..{high}", "doubles from 0 for ever: start at 1")
    return [low << step for step in range((high // low).bit_length())]


def _number(text: str, part: str, option: str) -> int:
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) > MAX_DIGITS:
        raise _error(option, part, f"is absurd: {MAX_DIGITS} digits are the most")
    count = parse_count(digits)
    if count is None:
        raise _error(option, part, f"is not one: {_FORMS}")
    return count


def _error(option: str, text: str, what: str) -> UsageError:
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    return UsageError(f"{option}: the list of numbers {shown!r} {what}")
