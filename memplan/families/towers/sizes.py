"""Sizes of towers as configs write them: pairs, ratios, one number for each stage."""

from memplan.model.config import MAX_SIZE, ConfigReader

PICTURE = (672, 672)
"""Height and width of a picture where nothing says them: processors keep each one's own [pixels]."""
MAX_RATIO = 1e6
"""No layer is so many times wider than another."""
MAX_PARTS = 1000
"""No module has so many small parts: what exceeds it is a slip of the keyboard."""


def pair(reader: ConfigReader, *keys: str) -> tuple[int, int]:
    """A height and a width, given as one number or as two."""
    if not isinstance(reader.raw(*keys), list):
        size = reader.integer(*keys)
        return size, size
    sizes = reader.integers(*keys, minimum=1)
    if len(sizes) != 2:
        raise reader.fail(keys[0], f"expected a height and a width, got {len(sizes)} numbers")
    return sizes[0], sizes[1]


def ratio(reader: ConfigReader, key: str, *, default: float = 0.0) -> float:
    """How many times wider one layer is than another."""
    return reader.number(key, default=default, maximum=MAX_RATIO)


def at_least_one(reader: ConfigReader, key: str) -> list[int]:
    """Whole numbers from 1 on, and not an empty list of them."""
    numbers = reader.integers(key, minimum=1)
    if not numbers:
        raise reader.fail(key, "must name at least one whole number")
    return numbers


def each_stage(
    reader: ConfigReader,
    key: str,
    num_stages: int,
    *,
    minimum: int = 1,
    maximum: int = MAX_SIZE,
) -> list[int]:
    """One whole number for each stage of a tower."""
    sizes = reader.integers(key, minimum=minimum)
    if len(sizes) < num_stages:
        raise reader.fail(key, f"has {len(sizes)} numbers for {num_stages} stages")
    if max(sizes, default=0) > maximum:
        raise reader.fail(key, f"must be {maximum} or less, got {max(sizes)}")
    return sizes[:num_stages]


def few(reader: ConfigReader, key: str) -> int:
    """How many small parts a module is made of, 0 for none."""
    return reader.integer(key, minimum=0, maximum=MAX_PARTS)


def stage_ratios(reader: ConfigReader, key: str, num_stages: int) -> list[float]:
    """One real number for each stage of a tower."""
    values = reader.sequence(key)
    numbers = [float(each) for each in values if isinstance(each, int | float)]
    if len(numbers) < num_stages or not all(0 <= each <= MAX_RATIO for each in numbers):
        raise reader.fail(key, f"expected {num_stages} numbers from 0 on, one for each stage")
    return numbers[:num_stages]


def stage_flags(reader: ConfigReader, key: str, num_stages: int) -> list[bool]:
    """True or false for each stage of a tower."""
    values = reader.sequence(key)
    flags = [each for each in values if isinstance(each, bool)]
    if len(flags) < num_stages:
        raise reader.fail(key, f"expected true or false for each of {num_stages} stages")
    return flags[:num_stages]
