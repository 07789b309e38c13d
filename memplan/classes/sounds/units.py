"""What SeamlessM4T speaks with, at most when it generates: from text to units, from units to waves. Nothing of it runs.

(transformers 5.23: models/seamless_m4t, seamless_m4t_v2)
"""

from collections.abc import Callable

from memplan.classes.sensed.counted import Parts
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader

DILATIONS: list[object] = [1, 3, 5]
"""Of each length of convolution, where the file does not say (the config class)."""
UNIT_KERNEL, EDGE_KERNEL = 7, 7
"""Of version 2's unit decoder's convolutions, and of the first and last of HiFi-GAN."""


def variance_predictor(inputs: int, width: int, kernel: int) -> Parts:
    """How long each unit sounds."""
    return Parts(
        conv1=Conv1d(inputs, width, kernel), ln1=LayerNorm(width),
        conv2=Conv1d(width, width, kernel), ln2=LayerNorm(width), proj=Linear(width, 1, bias=True),
    )  # fmt: skip


class HifiGan(Module):
    """Units, speaker and language to a signal, upsampled step by step."""

    def __init__(self, config: ConfigReader, inputs: int) -> None:
        channels = config.integer("upsample_initial_channel")
        self.conv_pre = Conv1d(inputs, channels, EDGE_KERNEL)
        blocks = self.blocks(config)
        for index, kernel in enumerate(config.integers("upsample_kernel_sizes", minimum=1)):
            turned = Weight(channels, channels // 2, kernel)
            channels //= 2
            made = Parts(weight=turned, bias=Weight(channels))
            setattr(self, f"upsampler.{index}", made)
            for place, (size, count) in enumerate(blocks, index * len(blocks)):
                for each in [f"convs{half}.{at}" for half in (1, 2) for at in range(count)]:
                    setattr(self, f"resblocks.{place}.{each}", Conv1d(channels, channels, size))
        self.conv_post = Conv1d(channels, 1, EDGE_KERNEL)

    def blocks(self, config: ConfigReader) -> list[tuple[int, int]]:
        """Of each length of convolution, how many dilations it has."""
        key = "resblock_dilation_sizes"
        kernels = config.integers("resblock_kernel_sizes", minimum=1)
        dilations = config.sequence(key) or [DILATIONS] * len(kernels)
        if len(dilations) != len(kernels):
            error = config.fail(key, "needs one list for each kernel size")
            raise error
        found = []
        for kernel, steps in zip(kernels, dilations, strict=True):
            if not isinstance(steps, list):
                error = config.fail(key, "expected a list of lists")
                raise error
            found.append((kernel, len(steps)))
        return found


class CodeHifiGan(Module):
    """HiFi-GAN, and what it is given."""

    def __init__(self, config: ConfigReader) -> None:
        units, kernel = config.integer("unit_embed_dim"), "variance_predictor_kernel_size"
        speaker, language = config.integer("spkr_embed_dim"), config.integer("lang_embed_dim")
        self.dur_predictor = variance_predictor(units, units, config.integer(kernel))
        self.unit_embedding = Embedding(config.integer("unit_hifi_gan_vocab_size"), units)
        self.speaker_embedding = Embedding(config.integer("vocoder_num_spkrs"), speaker)
        self.language_embedding = Embedding(config.integer("vocoder_num_langs"), language)
        self.hifi_gan = HifiGan(config, units + speaker + language)


class UnitDecoderLayer(Module):
    """Version 2's, with convolutions for a network."""

    def __init__(self, config: ConfigReader, attention: Callable[..., Module]) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = attention(config, "t2u_decoder")
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.conv1 = Conv1d(hidden, hidden, UNIT_KERNEL)
        self.conv2 = Conv1d(hidden, hidden, UNIT_KERNEL)
        self.conv_layer_norm = LayerNorm(hidden)
