"""Weights of recurrent token mixers, as their modules declare them (transformers 5.23).

Their operations are not written down: selective scans run in kernels of other packages
(mamba-ssm, causal-conv1d) where those are installed, and in long loops where they are not.
"""

from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.mixers import Mamba2Spec
from memplan.model.parameters import ParameterTable

MAX_EXPANSION = 1024.0
"""No mixer is wider than this many times the hidden size."""


def expanded(reader: ConfigReader, key: str, hidden_size: int) -> int:
    """The mixer's inner width: a multiple of the hidden size, rounded down."""
    factor = reader.number(key, default=2.0, maximum=MAX_EXPANSION)
    width = int(factor * hidden_size)
    if width < 1:
        raise reader.fail(key, f"{factor} of {hidden_size} leaves no width")
    return width


def automatic(reader: ConfigReader, key: str, derived: int) -> int:
    """A whole number, or what the class derives where the config says ``auto`` or nothing."""
    value = reader.raw(key)
    if value is None or value == "auto":
        return derived
    return reader.integer(key)


def time_step_rank(reader: ConfigReader, key: str, hidden_size: int) -> int:
    """Width of Mamba's narrow vector of time steps: a sixteenth of the hidden size, rounded up."""
    return automatic(reader, key, -(-hidden_size // 16))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba:
    """Sizes of Mamba's first mixer."""

    hidden_size: int
    inner: int
    state: int
    rank: int
    kernel: int
    bias: bool
    convolution_bias: bool


def mamba_heads(table: ParameterTable, name: str, sizes: Mamba, heads: int) -> None:
    """Zamba's mixer: Mamba's, in heads whose projections are weights of the mixer itself."""
    inner, width = sizes.inner, sizes.inner // heads
    table.parameter(name, "x_proj_weight", heads, sizes.rank + 2 * sizes.state, width)
    table.parameter(name, "dt_proj_weight", heads, width, sizes.rank)
    table.parameter(name, "dt_proj_bias", heads, width)
    table.parameter(name, "A_log", heads, width, sizes.state)
    table.parameter(name, "D", heads, width)
    table.convolution(
        f"{name}.conv1d", inner, inner, sizes.kernel, groups=inner, bias=sizes.convolution_bias
    )
    table.linear(f"{name}.in_proj", sizes.hidden_size, 2 * inner, bias=sizes.bias)
    table.linear(f"{name}.out_proj", inner, sizes.hidden_size, bias=sizes.bias)


def mamba2(table: ParameterTable, name: str, sizes: Mamba2Spec, hidden_size: int) -> None:
    """Mamba's second mixer (``Zamba2MambaMixer``)."""
    inner, heads = sizes.inner, sizes.heads
    channels = inner + 2 * sizes.groups * sizes.state
    for weight in ("dt_bias", "A_log", "D"):
        table.parameter(name, weight, heads)
    table.convolution(
        f"{name}.conv1d", channels, channels, sizes.kernel,
        groups=channels, bias=sizes.convolution_bias,
    )  # fmt: skip
    table.linear(f"{name}.in_proj", hidden_size, inner + channels + heads, bias=sizes.bias)
    table.norm(f"{name}.norm", inner, bias=False)
    table.linear(f"{name}.out_proj", inner, hidden_size, bias=sizes.output_bias)


def check_heads(
    reader: ConfigReader, heads_key: str, heads: int, head_dim: int, inner: int
) -> None:
    """Refuse heads that do not fill the mixer, as the config classes do."""
    if heads * head_dim != inner:
        raise reader.fail(heads_key, f"{heads} heads of {head_dim} do not make {inner}")
