"""Decoders whose layers differ, and whose kinds a function names."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.llama import (
    DECODER_TASKS,
    decoder_model,
    join_runs,
)
from memplan.families.request import ReadRequest, reject_task
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, StackSpec
from memplan.model.mixers import (
    CountedSpec,
)
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec

NORM = NormSpec(kind=NormKind.RMS)

MAX_SOFTCAP = 1e9
"""No cap on logits is larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hybrid:
    """What one type's class fixes."""

    kinds: Callable[[ConfigReader], list[str]]
    """What each layer is, in order; equal words mean equal layers."""
    layer: Callable[[ConfigReader, str], LayerSpec]
    """The layer for one of those words."""
    left_out: str = ""
    """Whose activations are left out, in words."""
    embedding_scaled: bool = False
    chunked_mask: bool = False
    """Windows are chunks, whose mask is made for every sequence."""
    upcasts_logits: bool = False
    """The class makes fp32 logits itself."""
    softcap_key: str = ""
    """Which key, above 0, caps the logits."""
    final_norm: NormSpec = NORM
    embedding_norm: NormSpec | None = None
    """Of what the token table looks up, inside it."""
    router_loss: bool = False
    """It adds the routers' loss where ``output_router_logits`` is set."""
    mixed_masks: bool = False
    """The class makes the full mask even where every layer has a window."""
    local_rotary: bool = False
    """Layers with a window have rotary tables of their own."""
    extra_rows: Callable[[ConfigReader], int] = lambda _: 0
    """Rows of the token table beside the vocabulary's."""


def read_hybrid(reader: ConfigReader, request: ReadRequest, kind: Hybrid) -> ModelSpec:
    """A decoder of layers that differ."""
    hidden_size = reader.integer("hidden_size")
    made: dict[str, LayerSpec] = {}
    layers = []
    for each in kind.kinds(reader):
        if each not in made:
            made[each] = kind.layer(reader, each)
        layers.append(made[each])
    stack = StackSpec(
        name="decoder",
        runs=join_runs(layers),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            norm=kind.embedding_norm,
            norm_in_table=kind.embedding_norm is not None,
            scaled=kind.embedding_scaled,
            extra_rows=kind.extra_rows(reader),
        ),
        final_norm=kind.final_norm,
        chunked_mask=kind.chunked_mask,
        mixed_masks=kind.mixed_masks,
        local_rotary=kind.local_rotary,
    )
    head = HeadSpec(
        router_loss=kind.router_loss and reader.flag("output_router_logits"),
        upcast=kind.upcasts_logits,
        softcap=bool(kind.softcap_key) and reader.number(kind.softcap_key, maximum=MAX_SOFTCAP) > 0,
        capped_at_once=bool(kind.softcap_key),
    )
    request = replace(request, task=reject_task(reader, request, *DECODER_TASKS))
    model = decoder_model(reader, request, stack, hidden_size=hidden_size, head=head)
    return replace(
        model,
        activations_left_out=f"activations of {kind.left_out}" if kind.left_out else "",
    )


def counted(declare: Callable[[ParameterTable], None]) -> CountedSpec:
    """Weights that a function declares."""
    table = ParameterTable()
    declare(table)
    return CountedSpec(parameters=table.shapes())
