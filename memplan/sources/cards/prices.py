"""Prices of a GPU's hour: one for all, or a YAML file with one for each kind."""

import re
from collections.abc import Mapping

from memplan.errors import ConfigError
from memplan.text import shown

CURRENCIES = "$€£"
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")


def read_prices(text: str) -> Mapping[str, float] | float:
    """A number, with or without a currency sign; several behind GPUs' names; or a file that maps these to numbers.

    Raises ``ConfigError`` for a file that cannot be read, another form, a GPU that is not listed, and a
    price that is not above 0.

    >>> read_prices("2.50"), read_prices("$3")
    (2.5, 3.0)
    >>> read_prices("l4=0.80,a100=1.90")
    {'l4-24gb': 0.8, 'a100-sxm4-80gb': 1.9}
    """
    plain = text.strip().lstrip(CURRENCIES)
    try:
        return _price(float(plain), text)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
    from memplan.sources.cards.catalog import load_gpu
    from memplan.sources.files import read_mapping

    found = _typed(text) if "=" in text else read_mapping(text)
    prices: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            msg = f"{text}: {name}: expected a number, got {shown(value)}"
            raise ConfigError(msg)
        prices[load_gpu(str(name)).gpu_id] = _price(float(value), f"{text}: {name}")
    return prices


def _typed(text: str) -> dict[str, object]:
    """``l4=0.80,a100=1.90``; what is no number is left as it is."""
    parts = (each.partition("=") for each in text.split(","))
    found: dict[str, object] = {}
    for name, _, value in parts:
        plain = value.strip().lstrip(CURRENCIES)
        found[name.strip()] = float(plain) if _NUMBER.fullmatch(plain) else value
    return found


def _price(value: float, where: str) -> float:
    if not 0 < value < float("inf"):
        msg = f"{where}: a price must be above 0: what one GPU costs in an hour"
        raise ConfigError(msg)
    return value
