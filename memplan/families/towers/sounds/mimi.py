"""Mimi, a codec of speech: SEANet with a transformer in each half, and two quantizers."""

import math

from memplan.families.towers.blocks import perceptron
from memplan.families.towers.sounds.seanet import (
    SeanetKind,
    plain,
    plain_transposed,
    seanet,
    upsampling_ratios,
)
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

MIMI_KIND = SeanetKind(
    convolution=plain, transposed=plain_transposed, lstm=False, ratios=(8, 6, 5, 4)
)
SAMPLING_RATE = 24_000
"""Where the config says none (``MimiConfig``) [Hz]."""
MAX_RATE = 1e6


def mimi_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``MimiModel``; the codebooks are buffers."""
    size = reader.integer("hidden_size")
    seanet(table, name, reader, MIMI_KIND)
    for half in ("encoder", "decoder"):
        with table.block(f"{name}{half}.layers", count=reader.layers("num_hidden_layers")):
            _layer(table, reader, size)
    stride = _latent_stride(reader)
    with table.block(f"{name}resampling"):
        if stride:
            groups = reader.integer("upsample_groups")
            narrow = reader.divide("hidden_size", size, "upsample_groups", groups)
            table.convolution("downsample", size, size, 2 * stride, bias=False)
            table.parameter("upsample", "weight", size, narrow, 2 * stride)
    width = reader.integer("vector_quantization_hidden_dimension")
    with table.block(f"{name}quantizer"):
        for part in ("semantic", "acoustic"):
            if width != size:
                table.convolution(f"{part}.input_proj", size, width, 1, bias=False)
                table.convolution(f"{part}.output_proj", width, size, 1, bias=False)


def _layer(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", default=size // heads)
    narrow = reader.integer("num_key_value_heads", default=heads) * head_dim
    bias = reader.flag("attention_bias")
    table.linear("self_attn.q_proj", size, heads * head_dim, bias=bias)
    table.linear("self_attn.k_proj", size, narrow, bias=bias)
    table.linear("self_attn.v_proj", size, narrow, bias=bias)
    table.linear("self_attn.o_proj", heads * head_dim, size, bias=bias)
    perceptron(table, "mlp", size, reader.integer("intermediate_size"), bias=False)
    table.norm("input_layernorm", size)
    table.norm("post_attention_layernorm", size)
    table.parameter("self_attn_layer_scale", "scale", size)
    table.parameter("mlp_layer_scale", "scale", size)


def _latent_stride(reader: ConfigReader) -> int:
    """How many of SEANet's frames make one of the codec's; 0 where they are the same.

    Without ``frame_rate`` there are half as many (``MimiConfig.frame_size``).
    """
    rate = reader.number("sampling_rate", default=SAMPLING_RATE, maximum=MAX_RATE)
    hop = math.prod(upsampling_ratios(reader, MIMI_KIND))
    inner = math.ceil(rate / hop)
    outer = reader.number("frame_rate", maximum=MAX_RATE) or rate / (2 * hop)
    return 0 if inner == outer else int(inner / outer)
