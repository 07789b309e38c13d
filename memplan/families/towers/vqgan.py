"""VQGAN: images to a code book's words and back, as Janus draws with (``JanusVQVAE``)."""

from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

KERNEL = 3
"""Of every convolution but those between equal places."""


def vqgan(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Encoder, code book, decoder."""
    latent, width = reader.integer("latent_channels"), reader.integer("embed_dim")
    _encoder(table, f"{name}.encoder", reader, latent)
    with table.block(f"{name}.code_book"):
        code_book(table, reader)
        table.convolution("quant_conv", latent, width, 1, 1)
        table.convolution("post_quant_conv", width, latent, 1, 1)
    _decoder(table, f"{name}.decoder", reader, latent)


def code_book(table: ParameterTable, reader: ConfigReader) -> None:
    """A table of the words."""
    rows, width = reader.integer("num_embeddings"), reader.integer("embed_dim")
    table.embedding("quantize.embedding", rows, width)


def _widths(reader: ConfigReader) -> list[int]:
    """Channels at each resolution, the finest first."""
    base = reader.integer("base_channels")
    factors = reader.integers("channel_multiplier", minimum=1)
    if not factors:
        error = reader.fail("channel_multiplier", "is empty")
        raise error
    return [base * factor for factor in factors]


def _encoder(table: ParameterTable, name: str, reader: ConfigReader, latent: int) -> None:
    widths = _widths(reader)
    inputs = reader.integer("base_channels")
    with table.block(f"{name}.in"):
        _convolution(table, "conv_in", reader.integer("in_channels"), inputs)
    for level, width in enumerate(widths):
        last = level == len(widths) - 1
        for number in range(reader.integer("num_res_blocks")):
            _step(table, f"{name}.down{level}.{number}", inputs, width, attends=last)
            inputs = width
        if not last:
            with table.block(f"{name}.down{level}.downsample"):
                _convolution(table, "downsample.conv", width, width)
    outputs = 2 * latent if reader.flag("double_latent") else latent
    with table.block(f"{name}.out"):
        _middle(table, inputs)
        _end(table, inputs, outputs)


def _decoder(table: ParameterTable, name: str, reader: ConfigReader, latent: int) -> None:
    widths = _widths(reader)
    inputs = widths[-1]
    with table.block(f"{name}.in"):
        _convolution(table, "conv_in", latent, inputs)
        _middle(table, inputs)
    for level in reversed(range(len(widths))):
        width = widths[level]
        for number in range(reader.integer("num_res_blocks") + 1):
            attends = level == len(widths) - 1
            _step(table, f"{name}.up{level}.{number}", inputs, width, attends=attends)
            inputs = width
        if level:
            with table.block(f"{name}.up{level}.upsample"):
                _convolution(table, "upsample.conv", width, width)
    with table.block(f"{name}.out"):
        _end(table, inputs, reader.integer("out_channels"))


def _convolution(table: ParameterTable, name: str, inputs: int, outputs: int) -> None:
    table.convolution(name, inputs, outputs, KERNEL, KERNEL)


def _step(table: ParameterTable, name: str, inputs: int, outputs: int, *, attends: bool) -> None:
    with table.block(name):
        _residual(table, "block", inputs, outputs)
        if attends:
            _attention(table, "attn", outputs)


def _residual(table: ParameterTable, name: str, inputs: int, outputs: int) -> None:
    """Two normed convolutions, and a plain one where the width changes."""
    table.norm(f"{name}.norm1", inputs)
    _convolution(table, f"{name}.conv1", inputs, outputs)
    table.norm(f"{name}.norm2", outputs)
    _convolution(table, f"{name}.conv2", outputs, outputs)
    if inputs != outputs:
        table.convolution(f"{name}.nin_shortcut", inputs, outputs, 1, 1)


def _attention(table: ParameterTable, name: str, width: int) -> None:
    table.norm(f"{name}.norm", width)
    for projection in ("q", "k", "v", "proj_out"):
        table.convolution(f"{name}.{projection}", width, width, 1, 1)


def _middle(table: ParameterTable, width: int) -> None:
    _residual(table, "mid.block_1", width, width)
    _attention(table, "mid.attn_1", width)
    _residual(table, "mid.block_2", width, width)


def _end(table: ParameterTable, inputs: int, outputs: int) -> None:
    table.norm("norm_out", inputs)
    _convolution(table, "conv_out", inputs, outputs)
