"""SEANet, the encoder and decoder of sound codecs: EnCodec's with LSTMs, Mimi's without."""

from collections.abc import Callable

from memplan.families.towers.sizes import few
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

DeclareConvolution = Callable[[ParameterTable, str, int, int, int], None]
"""Declares a convolution: name, channels in and out, kernel size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeanetKind:
    """How a codec's convolutions are normalized, and what stands between the halves."""

    convolution: DeclareConvolution
    transposed: DeclareConvolution
    lstm: bool
    ratios: tuple[int, ...] = (8, 5, 4, 2)
    """What its class takes where the config has no ``upsampling_ratios``."""


def plain(table: ParameterTable, name: str, before: int, after: int, kernel: int) -> None:
    """A convolution without a norm."""
    table.convolution(name, before, after, kernel)


def plain_transposed(
    table: ParameterTable, name: str, before: int, after: int, kernel: int
) -> None:
    """A transposed one."""
    table.parameter(name, "weight", before, after, kernel)
    table.parameter(name, "bias", after)


def weight_normed(table: ParameterTable, name: str, before: int, after: int, kernel: int) -> None:
    """A length and a direction for each outgoing channel."""
    table.parameter(name, "bias", after)
    table.parameter(f"{name}.weight_norm", "original0", after, 1, 1)
    table.parameter(f"{name}.weight_norm", "original1", after, before, kernel)


def weight_normed_transposed(
    table: ParameterTable, name: str, before: int, after: int, kernel: int
) -> None:
    """The same of a transposed one: its first dimension is of the incoming channels."""
    table.parameter(name, "bias", after)
    table.parameter(f"{name}.weight_norm", "original0", before, 1, 1)
    table.parameter(f"{name}.weight_norm", "original1", before, after, kernel)


def group_normed(table: ParameterTable, name: str, before: int, after: int, kernel: int) -> None:
    """A norm over all channels behind it."""
    table.convolution(name, before, after, kernel)
    table.norm(f"{name}.norm", after)


def group_normed_transposed(
    table: ParameterTable, name: str, before: int, after: int, kernel: int
) -> None:
    """The same of a transposed one."""
    plain_transposed(table, name, before, after, kernel)
    table.norm(f"{name}.norm", after)


def upsampling_ratios(reader: ConfigReader, kind: SeanetKind) -> list[int]:
    """How many times longer the signal becomes in each stage of the decoder."""
    return reader.integers("upsampling_ratios", minimum=1) or list(kind.ratios)


def seanet(table: ParameterTable, name: str, reader: ConfigReader, kind: SeanetKind) -> None:
    """Both halves, which mirror each other."""
    filters = reader.integer("num_filters")
    ratios = upsampling_ratios(reader, kind)
    widest = filters * 2 ** len(ratios)
    channels, size = reader.integer("audio_channels"), reader.integer("hidden_size")
    kernel, last = reader.integer("kernel_size"), reader.integer("last_kernel_size")
    with table.block(f"{name}encoder"):
        kind.convolution(table, "first", channels, filters, kernel)
        width = filters
        for index, times in enumerate(reversed(ratios)):
            _residual_blocks(table, f"stages.{index}", reader, kind, width)
            kind.convolution(table, f"stages.{index}.conv", width, 2 * width, 2 * times)
            width *= 2
        _lstm(table, reader, kind, widest)
        kind.convolution(table, "last", widest, size, last)
    with table.block(f"{name}decoder"):
        kind.convolution(table, "first", size, widest, kernel)
        _lstm(table, reader, kind, widest)
        for index, times in enumerate(ratios):
            width //= 2
            kind.transposed(table, f"stages.{index}.conv", 2 * width, width, 2 * times)
            _residual_blocks(table, f"stages.{index}", reader, kind, width)
        kind.convolution(table, "last", filters, channels, last)


def _residual_blocks(
    table: ParameterTable, name: str, reader: ConfigReader, kind: SeanetKind, width: int
) -> None:
    """Two convolutions, narrower between, beside a shortcut that may be one too."""
    narrow = width // reader.integer("compress")
    kernel = reader.integer("residual_kernel_size")
    for index in range(few(reader, "num_residual_layers")):
        block = f"{name}.block.{index}"
        kind.convolution(table, f"{block}.0", width, narrow, kernel)
        kind.convolution(table, f"{block}.1", narrow, width, 1)
        if reader.flag("use_conv_shortcut", default=kind.lstm):
            kind.convolution(table, f"{block}.shortcut", width, width, 1)


def _lstm(table: ParameterTable, reader: ConfigReader, kind: SeanetKind, size: int) -> None:
    """``torch.nn.LSTM``: one module owns the four gates of all its layers."""
    if not kind.lstm:
        return
    for index in range(few(reader, "num_lstm_layers")):
        table.parameter("lstm", f"weight_ih_l{index}", 4 * size, size)
        table.parameter("lstm", f"weight_hh_l{index}", 4 * size, size)
        table.parameter("lstm", f"bias_ih_l{index}", 4 * size)
        table.parameter("lstm", f"bias_hh_l{index}", 4 * size)
