"""Falcon-H1: attention and Mamba's second mixer side by side, and constants that multiply what they are given.

(transformers 5.23: models/falcon_h1)
"""

from collections.abc import Callable

from memplan.classes.llama import (
    MLP,
    DecoderLayer,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
)
from memplan.classes.recurrent.hybrids import BambaMixer
from memplan.classes.recurrent.mamba2 import MambaRMSNormGated
from memplan.graph.modules.functional import activated
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation


class FalconH1RMSNormGated(MambaRMSNormGated):
    norm_before_gate = False

    def forward(self, x: Handle, gate: Handle) -> Handle:
        shape, dtype = x.shape, x.dtype
        if not self.norm_before_gate:
            x = x * activated(gate.float(), Activation.SILU)
        x = x.float()
        x = x.view(*shape[:-1], self.groups, -1)
        variance = x.pow(2).mean()
        x = x * (variance + 1e-6).rsqrt()
        x = self.operand(self.weight).view(self.groups, -1) * x
        x = x.view(*shape)
        if self.norm_before_gate:
            x = x * activated(gate.float(), Activation.SILU)
        return x.to(dtype)


class FalconH1Mixer(BambaMixer):
    def inner(self, config: ConfigReader) -> int:
        if "mamba_d_ssm" in config.config and config.config["mamba_d_ssm"] is None:
            return super().inner(config)
        return config.integer("mamba_d_ssm")

    def output_bias(self, config: ConfigReader) -> bool:
        return config.flag("projectors_bias")

    def add_norm(self, config: ConfigReader) -> None:
        if config.flag("mamba_rms_norm"):
            self.norm = FalconH1RMSNormGated(self.sizes.inner, self.sizes.groups)
            self.norm.norm_before_gate = config.flag("mamba_norm_before_gate")

    def projected(self, x: Handle) -> Handle:
        run = self.run
        x = x * 1.0
        projected_states = self.in_proj(x)
        mup_vector = run.buffer(projected_states.shape[-1], run.options.weights)
        return projected_states.like(run.mul(projected_states.record, mup_vector))

    def gated(self, x: Handle, gate: Handle) -> Handle:
        if self.norm is None:
            return x * activated(gate, Activation.SILU)
        return self.norm(x, gate)


class FalconH1Attention(LlamaAttention):
    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2) * 1.0
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        return query, key, value


class FalconH1MLP(LlamaMLP):
    def forward(self, x: Handle) -> Handle:
        y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * 1.0)
        y = self.down_proj(y) * 1.0
        return y


class FalconH1DecoderLayer(LlamaDecoderLayer):
    mlp_class: Callable[[ConfigReader], MLP] = FalconH1MLP

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.feed_forward = self.network(config, kind)
        self.mamba = FalconH1Mixer(config)
        self.self_attn = FalconH1Attention(config, kind)
        self.input_layernorm = self.norm_class(hidden)
        self.pre_ff_layernorm = self.norm_class(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        mamba_hidden_states = self.mamba(x)
        mamba_hidden_states = mamba_hidden_states * 1.0
        attention_hidden_states, _ = self.self_attn(x * 1.0, tables, mask)
        attention_hidden_states = attention_hidden_states * 1.0
        x = mamba_hidden_states + attention_hidden_states
        x = residual + x
        residual = x
        x = self.pre_ff_layernorm(x)
        x = self.feed_forward(x)
        x = residual + x
        return x


class FalconH1Model(LlamaModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = FalconH1DecoderLayer
    last = "final_layernorm"

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) * 1.0 if received is None else received
        embeds, *_ = self.joined(embeds)
        x = embeds
        positions = position_ids(self.run, batch, length)
        mask = self.masks(batch, length)[None]
        tables = self.rotary_emb(x, positions)
        for layer in self.layer_list:
            x = layer(x, tables, mask, unread=positions)
        x = self.children[self.last](x)
        return x

    def adjusted(self, logits: Handle) -> Handle:
        return logits * 1.0
