"""Janus: SigLIP's tower in its own words to see with, and a VQGAN to draw with, which a shown picture leaves idle.

(transformers 5.23, models/janus/modeling_janus.py)
"""

from memplan.classes.compared.clip import CLIPEncoderLayer, SiglipVisionModel
from memplan.classes.joined.internvl import InternVLVisionAttention
from memplan.classes.joined.plain import ProjectedModel
from memplan.classes.pictures.parts import InOrder
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import ratio
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.grids import Conv2d, GroupNorm
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock

DRAWING = "vqgan"
"""How segments' names begin of what draws."""
GROUPS = 32
"""Of channels that are normed together, where the class writes them down."""


class JanusVisionAttention(InternVLVisionAttention):
    norm_class = LayerNorm


class JanusVisionEncoderLayer(CLIPEncoderLayer):
    def __init__(self, config: ConfigReader, size: int) -> None:
        self.layer_norm1 = LayerNorm(size)
        self.self_attn = JanusVisionAttention(config, size)
        self.layer_norm2 = LayerNorm(size)
        inner = int(size * ratio(config, "mlp_ratio"))
        chance = config.number("hidden_dropout_rate", default=0.0)
        self.mlp = InOrder(
            fc1=Linear(size, inner, bias=True),
            activation_fn=ActivationModule(tower_activation(config, "hidden_act")),
            dropout1=Dropout(chance), fc2=Linear(inner, size, bias=True), dropout2=Dropout(chance),
        )  # fmt: skip
        self.mlp.block = LayerBlock.NETWORK


class JanusVisionModel(SiglipVisionModel):
    pools = False

    def layer(self, config: ConfigReader) -> CLIPEncoderLayer:
        return JanusVisionEncoderLayer(config, self.width)


def aligner(config: ConfigReader, inputs: int, depth: int) -> InOrder:
    """``JanusVisionAlignerMLP``: linear layers with an activation between any two."""
    outputs = config.integer("projection_dim")
    active = tower_activation(config, "hidden_act")
    found: dict[str, Module] = {"fc1": Linear(inputs, outputs, bias=True)}
    for number in range(depth - 1):
        found[f"activation_fn.{number}"] = ActivationModule(active)
        found[f"hidden_layers.{number}"] = Linear(outputs, outputs, bias=True)
    return InOrder(**found)


class ResnetBlock(Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        self.norm1 = GroupNorm(GROUPS, inputs)
        self.conv1 = Conv2d(inputs, outputs, 3)
        self.norm2 = GroupNorm(GROUPS, outputs)
        self.conv2 = Conv2d(outputs, outputs, 3)
        if inputs != outputs:
            self.nin_shortcut = Conv2d(inputs, outputs, 1)


class AttnBlock(Module):
    def __init__(self, channels: int) -> None:
        self.norm = GroupNorm(GROUPS, channels)
        self.q, self.k, self.v, self.proj_out = (Conv2d(channels, channels, 1) for _ in range(4))


class Levels(Module):
    """One half of a VQGAN: blocks at each size of the picture, of which those at the smallest attend."""

    def __init__(self, config: ConfigReader, *, up: bool) -> None:
        base, factors = (
            config.integer("base_channels"),
            config.integers("channel_multiplier", minimum=1),
        )
        if not factors:
            error = config.fail("channel_multiplier", "is empty")
            raise error
        latent = config.integer("latent_channels")
        levels = [*enumerate(factors)]
        given = latent if up else config.integer("in_channels")
        channels = base * factors[-1] if up else base
        self.conv_in = Conv2d(given, channels, 3)
        if up:
            self.mid = middle(channels)
        for place, (level, factor) in enumerate(reversed(levels) if up else levels):
            name, is_last = f"{'up' if up else 'down'}.{place}", level == len(factors) - 1
            count = config.integer("num_res_blocks") + up
            for number in range(count):
                setattr(self, f"{name}.block.{number}", ResnetBlock(channels, base * factor))
                channels = base * factor
            for number in range(count * is_last):
                setattr(self, f"{name}.attn.{number}", AttnBlock(channels))
            if level if up else not is_last:
                resized = f"{name}.{'upsample' if up else 'downsample'}.conv"
                setattr(self, resized, Conv2d(channels, channels, 3))
        if not up:
            self.mid = middle(channels)
        made = 2 * latent if config.flag("double_latent") else latent
        self.norm_out = GroupNorm(GROUPS, channels)
        self.conv_out = Conv2d(channels, config.integer("out_channels") if up else made, 3)


def middle(channels: int) -> InOrder:
    """``JanusVQVAEMidBlock``."""
    return InOrder(
        block_1=ResnetBlock(channels, channels), attn_1=AttnBlock(channels),
        block_2=ResnetBlock(channels, channels),
    )  # fmt: skip


class JanusVQVAE(Module):
    def __init__(self, config: ConfigReader) -> None:
        latent, width = config.integer("latent_channels"), config.integer("embed_dim")
        self.encoder = Levels(config, up=False)
        self.quantize = InOrder(embedding=Embedding(config.integer("num_embeddings"), width))
        self.quant_conv = Conv2d(latent, width, 1)
        self.post_quant_conv = Conv2d(width, latent, 1)
        self.decoder = Levels(config, up=True)


class JanusModel(ProjectedModel):
    sees, leads = "vision_model", "aligner"
    unseen = "vqmodel", "generation_embeddings", "generation_aligner", "generation_head"

    def __init__(self, config: ConfigReader) -> None:
        vision = read_part(config, PartSpec(key="vision_config")).reader
        tower = self.add_tower(config)
        self.aligner = aligner(vision, tower.width, vision.integer("depth"))
        self.add_drawing(read_part(config, PartSpec(key="vq_config")).reader)
        self.add_text(config)

    def add_drawing(self, config: ConfigReader) -> None:
        """The VQGAN, and perceptrons between its words and the text model."""
        words, width = config.integer("num_embeddings"), config.integer("embed_dim")
        inner = config.integer("projection_dim")
        self.vqmodel = JanusVQVAE(config)
        self.generation_embeddings = Embedding(words, width)
        self.generation_aligner = aligner(config, width, config.integer("num_hidden_layers"))
        self.generation_head = InOrder(
            proj_out=Linear(config.integer("image_token_embed_dim"), inner, bias=True),
            vision_head=Linear(inner, words, bias=True),
        )

    def segment_of(self, child: str) -> str:
        return DRAWING if child in self.unseen else super().segment_of(child)
