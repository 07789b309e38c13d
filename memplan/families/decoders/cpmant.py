"""CPM-Ant: a decoder with trained prompts, segments and a position bias."""

from dataclasses import replace

from memplan.families.decoders.hybrids import Hybrid, read_hybrid
from memplan.families.request import ReadRequest
from memplan.model.attention import AttentionForm, AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec, PromptSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

NORM = NormSpec(kind=NormKind.RMS_T5)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a CPM-Ant config; its class checkpoints nothing and knows no other attention."""
    model = read_hybrid(reader, request, CPMANT)
    return replace(
        model,
        head=replace(model.head, plain_loss=True),
        recomputes=False,
        eager_attention_only=True,
    )


def _kinds(reader: ConfigReader) -> list[str]:
    return ["layer"] * reader.layers("num_hidden_layers")


def _layer(reader: ConfigReader, _: str) -> LayerSpec:
    heads, rate = reader.integer("num_attention_heads"), reader.number("dropout_p")
    return LayerSpec(
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=reader.integer("dim_head"),
            form=AttentionForm.SEGMENTS,
            dropout=rate,
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("dim_ff"),
            activation=Activation.GELU,
            gated=True,
            activation_dropout=rate,
        ),
        norm=NORM,
        dropout=rate,
    )


def _prompts(reader: ConfigReader) -> PromptSpec:
    return PromptSpec(
        num_types=reader.integer("prompt_types"),
        length=reader.integer("prompt_length"),
        num_segments=reader.integer("segment_types"),
        num_buckets=reader.integer("position_bias_num_buckets"),
    )


CPMANT = Hybrid(
    kinds=_kinds,
    layer=_layer,
    final_norm=NORM,
    never_tied=True,
    prompts=_prompts,
    tasks=(Task.CAUSAL_LM, Task.BASE),
)
"""The class ties nothing, whatever the config says: the tables differ in their rows."""
