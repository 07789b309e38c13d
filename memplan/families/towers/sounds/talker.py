"""What Qwen2.5-Omni speaks with: a talker, and the model that makes waves of its codes.

Classes of transformers 5.23: ``Qwen2_5OmniTalkerForConditionalGeneration``,
``Qwen2_5OmniToken2WavDiTModel``, ``Qwen2_5OmniToken2WavBigVGANModel``.
"""

from memplan.families.towers.blocks import TowerLayer, declare_layers, perceptron
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import each_stage, ratio
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

TIME_FEATURES = 256
"""Sinusoids that tell a step of the diffusion (``DiTTimestepEmbedding``)."""
WAVE_KERNEL = 7
"""Of the first and the last convolution of the vocoder."""


def talker(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """A Qwen2 over codes of sound, fed with the thinker's hidden states."""
    size, given = reader.integer("hidden_size"), reader.integer("embedding_size")
    words = reader.integer("vocab_size")
    head_size = reader.integer("head_dim")
    with table.block(f"{name}.embed"):
        table.linear("thinker_to_talker_proj", given, size)
        table.embedding("embed_tokens", words, given)
    layer = TowerLayer(
        hidden_size=size,
        intermediate_size=reader.integer("intermediate_size"),
        width=reader.integer("num_attention_heads") * head_size,
        key_value_width=reader.integer("num_key_value_heads") * head_size,
        output_bias=False,
        norm_bias=False,
        gated=True,
        bias=False,
    )
    declare_layers(table, f"{name}.layers", reader.layers("num_hidden_layers"), layer)
    with table.block(f"{name}.head"):
        table.norm("norm", size, bias=False)
        table.linear("codec_head", size, words, bias=False)


def diffusion(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """A diffusion transformer from codes to spectra."""
    size, mel = reader.integer("hidden_size"), reader.integer("mel_dim")
    width = reader.integer("head_dim") * reader.integer("num_attention_heads")
    codes, speaker = reader.integer("emb_dim"), reader.integer("enc_dim")
    with table.block(f"{name}.embed"):
        perceptron(table, "time_embed", TIME_FEATURES, size, size)
        table.embedding("codec_embed", reader.integer("num_embeds") + 1, codes)
        inputs = mel + speaker + reader.integer("enc_emb_dim") + codes
        table.linear("input_embed.proj", inputs, size)
    _speaker(table, f"{name}.speaker", reader, mel)
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers")):
        table.linear("attn_norm.linear", size, 6 * size)
        attention(table, "attn", size, inner=width)
        perceptron(table, "ff", size, int(size * ratio(reader, "ff_mult")))
    with table.block(f"{name}.out"):
        table.linear("norm_out.linear", size, 2 * size)
        table.linear("proj_out", size, mel)


def _speaker(table: ParameterTable, name: str, reader: ConfigReader, mel: int) -> None:
    """ECAPA-TDNN: who speaks, told from a spectrum (``ECAPA_TimeDelayNet``)."""
    widths = reader.integers("enc_channels", minimum=1)
    kernels = each_stage(reader, "enc_kernel_sizes", len(widths))
    squeezed, parts = reader.integer("enc_se_channels"), reader.integer("enc_res2net_scale")
    with table.block(f"{name}.embed"):
        table.convolution("blocks.0.conv", mel, widths[0], kernels[0])
    for number in range(1, len(widths) - 1):
        inputs, width = widths[number - 1], widths[number]
        with table.block(f"{name}.block{number}"):
            table.convolution("tdnn1.conv", inputs, width, 1)
            part = width // parts
            for each in range(parts - 1):
                table.convolution(f"res2net.{each}.conv", part, part, kernels[number])
            table.convolution("tdnn2.conv", width, width, 1)
            table.convolution("se.conv1", width, squeezed, 1)
            table.convolution("se.conv2", squeezed, width, 1)
    last, attended = widths[-1], reader.integer("enc_attention_channels")
    with table.block(f"{name}.pooling"):
        table.convolution("mfa.conv", last, last, kernels[-1])
        table.convolution("asp.tdnn.conv", 3 * last, attended, 1)
        table.convolution("asp.conv", attended, last, 1)
        table.convolution("fc", 2 * last, reader.integer("enc_dim"), 1)


def vocoder(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """BigVGAN: spectra to waves, each layer longer and half as wide."""
    width = reader.integer("upsample_initial_channel")
    rates = reader.integers("upsample_rates", minimum=1)
    steps = each_stage(reader, "upsample_kernel_sizes", len(rates))
    kernels = reader.integers("resblock_kernel_sizes", minimum=1)
    with table.block(f"{name}.in"):
        table.convolution("conv_pre", reader.integer("mel_dim"), width, WAVE_KERNEL)
    for number, step in enumerate(steps):
        narrow = width // 2
        with table.block(f"{name}.up{number}"):
            table.parameter(f"ups.{number}", "weight", width, narrow, step)
            table.parameter(f"ups.{number}", "bias", narrow)
        for kernel in kernels:
            with table.block(f"{name}.up{number}.kernel{kernel}", count=2 * DILATIONS):
                table.convolution("conv", narrow, narrow, kernel)
                _snake(table, narrow)
        width = narrow
    with table.block(f"{name}.out"):
        _snake(table, width)
        table.convolution("conv_post", width, 1, WAVE_KERNEL, bias=False)


DILATIONS = 3
"""Of a residual block's convolutions, each of which has another behind it
(``Qwen2_5OmniAMPBlock``)."""


def _snake(table: ParameterTable, width: int) -> None:
    table.parameter("activation", "alpha", width)
    table.parameter("activation", "beta", width)
