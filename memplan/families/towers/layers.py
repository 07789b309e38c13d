"""Nonlinearities of towers."""

from memplan.model.config import ConfigReader
from memplan.model.networks import Activation


def tower_activation(reader: ConfigReader, key: str, *, default: str = "gelu") -> Activation:
    """A tower's nonlinearity, by transformers' name."""
    known = {each.value: each for each in Activation}
    name = reader.text(key, default=default)
    return known[reader.choice(key, _ACTIVATION_NAMES.get(name, name), known)]


_ACTIVATION_NAMES = {"gelu_pytorch": "gelu", "swish": "silu"}
