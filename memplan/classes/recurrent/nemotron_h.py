"""Nemotron-H: layers of one part each, which is a mixer, attention, a network or a mixture.

(transformers 5.23: models/nemotron_h)
"""

from typing import NamedTuple

from memplan.classes.llama import DecoderLayer, MistralAttention, PlainMLP, Window
from memplan.classes.llama import LayerKind as AttentionKind
from memplan.classes.mixed.deepseek import DeepseekV3TopkRouter
from memplan.classes.mixed.experts import PlainExperts
from memplan.classes.mixed.mixtures import MixtureBlock
from memplan.classes.recurrent.hybrids import LEGACY_KINDS
from memplan.classes.recurrent.mamba import MambaModel
from memplan.classes.recurrent.mamba2 import Mamba2Mixer, Sizes
from memplan.families.llama import read_activation
from memplan.fast_dataclass import replace
from memplan.graph.modules.basic import ActivationModule, Linear, Norm, UpcastRMSNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import position_ids
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.mixtures import MixtureSpec
from memplan.model.parameters import LayerBlock

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""Letters of ``hybrid_override_pattern``, by default one of each."""


class BlockKind(NamedTuple):
    """What a layer's only part is."""

    name: str
    window: Window = None
    turned: bool = False


class NemotronHMamba2Mixer(Mamba2Mixer):
    def read_sizes(self, config: ConfigReader) -> Sizes:
        heads = config.integer("mamba_num_heads")
        return Sizes(
            inner=heads * config.integer("mamba_head_dim"), heads=heads,
            groups=config.integer("mamba_n_groups", "n_groups"),
            state=config.integer("ssm_state_size"),
            kernel=config.integer("mamba_d_conv", "conv_kernel"),
            chunk=config.integer("mamba_chunk_size", "chunk_size"),
            activation=read_activation(config, "mamba_hidden_act"), bias=config.flag("use_bias"),
            convolution_bias=config.flag("mamba_conv_bias", "use_conv_bias"),
        )  # fmt: skip


class NemotronHMLP(PlainMLP):
    def __init__(self, config: ConfigReader, intermediate_size: int | None = None) -> None:
        hidden, bias = config.integer("hidden_size"), config.flag("mlp_bias")
        inner = intermediate_size or config.integer("intermediate_size")
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.act_fn = ActivationModule(read_activation(config, "mlp_hidden_act"))


class NemotronHSharedMLP(NemotronHMLP):
    block = LayerBlock.SHARED_EXPERT


class NemotronHMoE(MixtureBlock):
    """Experts without a gate, behind a narrower projection where ``moe_latent_size`` says so."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, bias = config.integer("hidden_size"), config.flag("mlp_bias")
        self.experts = PlainExperts(config)
        self.gate = DeepseekV3TopkRouter(config)
        inner = config.integer("moe_shared_expert_intermediate_size")
        self.shared_experts = NemotronHSharedMLP(config, inner)
        self.latent = config.optional_integer("moe_latent_size") or 0
        if self.latent:
            self.fc1_latent_proj = Linear(hidden, self.latent, bias=bias)
            self.fc2_latent_proj = Linear(self.latent, hidden, bias=bias)

    def forward(self, hidden_states: Handle) -> Handle:
        residuals = hidden_states
        orig_shape = hidden_states.shape
        _, topk_weights, topk_indices = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        if self.latent:
            hidden_states = self.fc1_latent_proj(hidden_states)
        hidden_states = self.experts(hidden_states, topk_indices, topk_weights)
        if self.latent:
            hidden_states = self.fc2_latent_proj(hidden_states)
        hidden_states = hidden_states.view(*orig_shape)
        hidden_states = hidden_states + self.shared_experts(residuals)
        return hidden_states

    def facts(self) -> MixtureSpec:
        return replace(super().facts(), latent=self.latent)


PARTS = {
    "linear_attention": NemotronHMamba2Mixer,
    "moe": NemotronHMoE,
    "mlp": NemotronHMLP,
}
"""What stands where a layer does not attend."""


class NemotronHBlock(DecoderLayer):
    placement = NormPlacement.SINGLE

    def __init__(self, config: ConfigReader, kind: BlockKind) -> None:
        self.norm = UpcastRMSNorm(config.integer("hidden_size"))
        self.attends = kind.name == "full_attention"
        self.mixer = (
            MistralAttention(config, AttentionKind(turned=False))
            if self.attends
            else PARTS[kind.name](config)
        )

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x = self.norm(x.to(self.run.compute))
        if self.attends:
            x, _ = self.mixer(x, (), mask)
        else:
            x = self.mixer(x)
        x = residual + x
        return x


class NemotronHModel(MambaModel):
    prefix = "model"
    layer_class = NemotronHBlock
    norm_class: type[Norm] = UpcastRMSNorm
    ties = False

    def kinds(self, config: ConfigReader) -> list[BlockKind]:
        """The layers by name or by letter; ``num_hidden_layers`` is not looked at."""
        found = [LEGACY_KINDS.get(each, each) for each in config.texts("layers_block_type")]
        pattern = config.text("hybrid_override_pattern")
        if not found and pattern:
            found = [PATTERN.get(letter, letter) for letter in pattern]
        for each in found:
            config.choice("layers_block_type", each, tuple(PATTERN.values()))
        return list(map(BlockKind, found or PATTERN.values()))

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        x = embeds
        positions = position_ids(self.run, batch, length)
        mask = self.masks(batch, length)[None]
        for mixer_block in self.layers:
            x = mixer_block(x, mask, unread=positions)
        x = self.norm_f(x)
        return x

    def before_head(self, x: Handle) -> Handle:
        return x
