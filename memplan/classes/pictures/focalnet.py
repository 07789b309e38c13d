"""FocalNet: surroundings of each position, gated and added up, in place of attention.

(transformers 5.23, models/focalnet/modeling_focalnet.py)
"""

from memplan.classes.pictures.parts import InOrder, drop_paths
from memplan.classes.pictures.patches import (
    Embeddings,
    PatchEmbeddings,
    Stage,
    StagedEncoder,
    StagedModel,
)
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import MAX_PARTS, each_stage, ratio
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear, scaled
from memplan.graph.modules.grids import Conv2d, DropPath, mean_along
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock

STEM = 7, 4, 2
"""Kernel, stride and padding of the first convolution where patches overlap."""
BETWEEN = 3, 2, 1
"""The same of those between stages."""


class FocalNetModulation(Module):
    """Each level's window is two wider than the one's before."""

    block = LayerBlock.MIXER

    def __init__(self, config: ConfigReader, index: int, size: int) -> None:
        count = len(config.integers("depths", minimum=1))
        levels = each_stage(config, "focal_levels", count, minimum=0, maximum=MAX_PARTS)[index]
        window = each_stage(config, "focal_windows", count)[index]
        self.normalize_modulator = config.flag("normalize_modulator")
        self.focal_level = levels
        self.projection_in = Linear(size, 2 * size + levels + 1, bias=True)
        self.projection_context = Conv2d(size, size, 1)
        self.activation = ActivationModule(Activation.GELU)
        self.projection_out = Linear(size, size, bias=True)
        self.projection_dropout = Dropout(config.number("hidden_dropout_prob", default=0.0))
        for level in range(levels):
            kernel = 2 * level + window
            convolution = Conv2d(size, size, kernel, padding=kernel // 2, groups=size, bias=False)
            setattr(self, f"focal_layers.{level}.0", convolution)
        if config.flag("use_post_layernorm_in_modulation"):
            self.layernorm = LayerNorm(size)

    def focal_layer(self, level: int, ctx: Handle) -> Handle:
        """A convolution of every channel by itself, and GELU."""
        ctx = self.children[f"focal_layers.{level}.0"](ctx)
        return self.activation(ctx)

    def forward(self, hidden_state: Handle, height: int, width: int) -> Handle:
        batch, _, size = hidden_state.shape
        x = self.projection_in(hidden_state).view(batch, height, width, -1)
        x = x.permute(0, 3, 1, 2).contiguous()
        q, ctx, gates = x.split(size, size, self.focal_level + 1, dim=1)
        ctx_all: Handle | float = 0.0
        for level in range(self.focal_level):
            ctx = self.focal_layer(level, ctx)
            ctx_all = ctx * gates.narrow(1, 1) + ctx_all
        ctx_global = self.activation(mean_along(mean_along(ctx, 2), 3))
        ctx_all = ctx_global * gates.narrow(1, 1) + ctx_all
        if self.normalize_modulator:
            ctx_all = ctx_all / (self.focal_level + 1)
        modulator = self.projection_context(ctx_all)
        x_out = q * modulator
        x_out = x_out.permute(0, 2, 3, 1).contiguous().view(batch, height * width, size)
        if "layernorm" in self.children:
            x_out = self.layernorm(x_out)
        x_out = self.projection_out(x_out)
        x_out = self.projection_dropout(x_out)
        return x_out


def focal_network(config: ConfigReader, size: int) -> InOrder:
    """``FocalNetMlp``."""
    inner = int(size * ratio(config, "mlp_ratio", default=4))
    drop = config.number("hidden_dropout_prob", default=0.0)
    network = InOrder(
        fc1=Linear(size, inner, bias=True),
        activation=ActivationModule(tower_activation(config, "hidden_act")),
        drop=Dropout(drop),
        fc2=Linear(inner, size, bias=True),
        drop_again=Dropout(drop),
    )
    network.block = LayerBlock.NETWORK
    return network


class FocalNetLayer(Module):
    def __init__(self, config: ConfigReader, index: int, size: int, drop_path: float) -> None:
        self.use_post_layernorm = config.flag("use_post_layernorm")
        self.norm1 = LayerNorm(size)
        self.modulation = FocalNetModulation(config, index, size)
        self.drop_path = DropPath(drop_path)
        self.norm2 = LayerNorm(size)
        self.mlp = focal_network(config, size)
        if config.flag("use_layerscale"):
            self.gamma_1, self.gamma_2 = Weight(size), Weight(size)

    def scaled(self, name: str, x: Handle) -> Handle:
        """``self.gamma * x``, a weight or the number one."""
        weight = self.weights.get(name)
        return x * 1.0 if weight is None else scaled(self, weight, x)

    def forward(self, hidden_state: Handle, height: int, width: int) -> Handle:
        shortcut = hidden_state
        if not self.use_post_layernorm:
            hidden_state = self.norm1(hidden_state)
        hidden_state = self.modulation(hidden_state, height, width)
        if self.use_post_layernorm:
            hidden_state = self.norm1(hidden_state)
        hidden_state = shortcut + self.drop_path(self.scaled("gamma_1", hidden_state))
        hidden_state = hidden_state + self.drop_path(self.scaled("gamma_2", self.fed(hidden_state)))
        return hidden_state

    def fed(self, hidden_state: Handle) -> Handle:
        """The network, behind or before its norm."""
        if self.use_post_layernorm:
            return self.norm2(self.mlp(hidden_state))
        return self.mlp(self.norm2(hidden_state))


class FocalNetPatchEmbeddings(PatchEmbeddings):
    """Between stages, with a norm."""

    def __init__(self, size: int, *, overlapping: bool) -> None:
        super().__init__(size, 2 * size, (2, 2), BETWEEN if overlapping else None)
        self.norm = LayerNorm(2 * size)

    def forward(self, pixel_values: Handle) -> tuple[Handle, tuple[int, int]]:
        embeddings, output_dimensions = super().forward(pixel_values)
        embeddings = self.norm(embeddings)
        return embeddings, output_dimensions


class FocalNetStage(Stage):
    def __init__(
        self, config: ConfigReader, index: int, rates: list[float], *, is_last: bool
    ) -> None:
        size = config.integer("embed_dim") * 2**index
        for number, rate in enumerate(rates):
            setattr(self, f"layers.{number}", FocalNetLayer(config, index, size, rate))
        self.depth = len(rates)
        if not is_last:
            overlapping = config.flag("use_conv_embed")
            self.downsample = FocalNetPatchEmbeddings(size, overlapping=overlapping)

    def narrowed(self, height: int, width: int) -> tuple[int, int]:
        """Positions that it gives."""
        if "downsample" not in self.children:
            return height, width
        _, _, *kernel = self.downsample.projection.weight.shape
        return self.downsample.projection.fewer(height + height % 2, width + width % 2, *kernel)

    def forward(
        self, hidden_states: Handle, input_dimensions: tuple[int, int]
    ) -> tuple[Handle, Handle]:
        height, width = input_dimensions
        for number in range(self.depth):
            hidden_states = self.children[f"layers.{number}"](hidden_states, height, width)
        hidden_states_before_downsampling = hidden_states
        if "downsample" in self.children:
            batch, _, size = hidden_states.shape
            hidden_states = hidden_states.transpose(1, 2).reshape(batch, size, height, width)
            hidden_states, _ = self.downsample(hidden_states)
        return hidden_states, hidden_states_before_downsampling


class FocalNetModel(StagedModel):
    """``hidden_sizes`` are not read: each stage is twice as wide as the one before."""

    prefix = "focalnet"

    def embedded(self, config: ConfigReader) -> Embeddings:
        """Patches that may overlap."""
        return Embeddings(config, STEM if config.flag("use_conv_embed") else None)

    def encoded(self, config: ConfigReader, depths: list[int]) -> StagedEncoder:
        """All stages."""
        rates, last = drop_paths(config, sum(depths)), len(depths) - 1

        def stage(index: int) -> FocalNetStage:
            before = sum(depths[:index])
            own = rates[before : before + depths[index]]
            return FocalNetStage(config, index, own, is_last=index == last)

        return StagedEncoder("stages", LayerList("stages", range(len(depths)), stage))
