"""ESM: BERT for proteins, with norms before and rotary or learned positions."""

from dataclasses import replace

from memplan.families.encoders import (
    LAYER_NORM,
    TASKS,
    Variation,
    encoder_attention,
    encoder_head,
    encoder_model,
    positions_for_tokens,
    require_flag,
)
from memplan.families.request import ReadRequest, reject_task
from memplan.model.attention import QueryScaling
from memplan.model.config import ConfigReader
from memplan.model.layers import (
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.spec import ModelSpec, Task


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """ESM: norms before, rotary or learned positions, its own GELU, a contact head."""
    require_flag(
        reader, "is_folding_model", value=False, problem="the folding trunk is not supported"
    )
    position_type = reader.text("position_embedding_type")
    known = ("absolute", "rotary")
    rotary = reader.choice("position_embedding_type", position_type, known) == "rotary"
    variation = Variation(
        positions=not rotary,
        positions_from_ids=True,
        placement=NormPlacement.PRE,
        pooler_tasks=(Task.BASE,),
        head_activation=Activation.GELU_PYTHON,
        classifier_dense=Activation.TANH,
        classifier_first_dropout=True,
        classifier_dropout_key="hidden_dropout_prob",
        spare_bias=False,
        names_weights=False,
    )
    hidden_size = reader.integer("hidden_size")
    attention = encoder_attention(reader, variation, hidden_size)
    if attention.rotary is not None:
        attention = replace(attention, rotary=replace(attention.rotary, upcast=True))
    layer = LayerSpec(
        attention=replace(attention, query_scaling=QueryScaling.LAST),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=Activation.GELU_PYTHON,
            bias=True,
        ),
        norm=LAYER_NORM,
        placement=NormPlacement.PRE,
        dropout=reader.number("hidden_dropout_prob"),
    )
    num_layers = reader.layers("num_hidden_layers")
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=num_layers, layer=layer),),
        embedding=_esm_embedding(reader, hidden_size, rotary=rotary),
        final_norm=LAYER_NORM,
    )
    head = encoder_head(reader, variation, hidden_size)
    tasks = tuple(task for task in TASKS if task is not Task.QUESTION_ANSWERING)
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *tasks), hidden_size=hidden_size,
        head=replace(
            head, bias_added=True, contact_features=num_layers * attention.num_heads
        ),
        context_length=positions_for_tokens(reader, variation),
    )  # fmt: skip


def _esm_embedding(reader: ConfigReader, hidden_size: int, *, rotary: bool) -> EmbeddingSpec:
    return EmbeddingSpec(
        embedding_size=hidden_size,
        num_positions=0 if rotary else reader.integer("max_position_embeddings"),
        positions_from_ids=True,
        token_dropout=reader.flag("token_dropout"),
        own_module=True,
        norm=LAYER_NORM if reader.flag("emb_layer_norm_before") else None,
    )
