"""Encoders: BERT, RoBERTa and their relatives.

They share an embedding of tokens, positions and types, layers with attention and a feed-forward
network of biased linear layers, a pooler, a masked-LM head on the token table, and classification
heads. What sets the types apart is a row of ``VARIATIONS``.
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.llama import Variation as DecoderVariation
from memplan.families.llama import read_activation, read_attention
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec, QueryScaling, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.distances import DistanceSpec
from memplan.model.heads import ClassifierSpec, HeadSpec, Pooling
from memplan.model.layers import (
    ConvolutionSpec,
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec, NetworkPlace
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
"""``torch.nn.LayerNorm`` with weight and bias, as every one of them has it but EuroBERT."""

TASKS = (
    Task.MASKED_LM,
    Task.BASE,
    Task.SEQUENCE_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """How one type differs from BERT (transformers 5.23, the class's modelling file)."""

    positions: bool = True
    """A learned table of positions; without it they are rotary, or none."""
    positions_from_ids: bool = False
    """Positions are counted from the ids and start behind the padding token's."""
    token_type_buffer: bool = True
    placement: NormPlacement = NormPlacement.POST
    feed_forward_place: NetworkPlace = NetworkPlace.MODULE
    final_norm: bool = False
    fp32_softmax: bool = False
    padding_mask: bool = False
    attention_bias: bool = True
    gated: bool = False
    pooler_tasks: tuple[Task, ...] = (Task.BASE, Task.SEQUENCE_CLASSIFICATION)
    """Tasks whose class has the pooler."""
    names_weights: bool = True
    names_attended: bool = False
    head_activation: Activation | None = Activation.GELU
    """Of the masked-LM head; None for the config's own."""
    classifier_dense: Activation | None = None
    """The activation of a dense layer in the classification head, which then has no pooler."""
    classifier_first_dropout: bool = False
    classifier_dropout_key: str = "classifier_dropout"
    spare_bias: bool = True
    """The head's bias is its own, tied to the output matrix's where their weights are tied."""
    discriminator: bool = False
    """Its pretraining tells which tokens were replaced (ELECTRA)."""
    attention_dropout_only: bool = False
    attends: bool = True
    """Its config has heads; FNet's has none."""
    tasks: tuple[Task, ...] = TASKS


_BASE_ONLY = (Task.BASE,)

ROBERTA = Variation(
    positions_from_ids=True,
    pooler_tasks=_BASE_ONLY,
    classifier_dense=Activation.TANH,
    classifier_first_dropout=True,
)

VARIATIONS: dict[str, Variation] = {
    "bert": Variation(head_activation=None),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "xlm-roberta-xl": Variation(
        positions_from_ids=True,
        placement=NormPlacement.PRE,
        feed_forward_place=NetworkPlace.NESTED,
        final_norm=True,
        attention_dropout_only=True,
        pooler_tasks=_BASE_ONLY,
        classifier_dense=Activation.TANH,
        classifier_first_dropout=True,
    ),
    "layoutlm": Variation(
        token_type_buffer=False,
        fp32_softmax=True,
        names_weights=False,
        padding_mask=True,
        head_activation=None,
        pooler_tasks=TASKS,
        classifier_dropout_key="hidden_dropout_prob",
    ),
    "electra": Variation(
        pooler_tasks=(),
        classifier_dense=Activation.GELU,
        classifier_first_dropout=True,
        spare_bias=False,
        discriminator=True,
        tasks=(*TASKS, Task.PRETRAINING),
    ),
    "jina_embeddings_v3": Variation(
        names_attended=True,
        positions=False,
        token_type_buffer=False,
        pooler_tasks=_BASE_ONLY,
        classifier_dense=Activation.TANH,
        classifier_first_dropout=True,
    ),
    "nomic_bert": Variation(
        positions=False,
        token_type_buffer=False,
        attention_bias=False,
        gated=True,
        pooler_tasks=(Task.SEQUENCE_CLASSIFICATION,),
        names_attended=True,
        head_activation=None,
        tasks=tuple(task for task in TASKS if task is not Task.QUESTION_ANSWERING),
    ),
}


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``VARIATIONS``, or of one with a reader of its own."""
    own = OWN_READERS.get(request.model_type)
    if own is not None:
        return own(reader, request)
    return read_encoder(reader, request, VARIATIONS[request.model_type])


def read_encoder(reader: ConfigReader, request: ReadRequest, variation: Variation) -> ModelSpec:
    """Read a config with BERT's names for its sizes."""
    require_flag(reader, "is_decoder", value=False, problem="only the encoder is supported")
    task = reject_task(reader, request, *variation.tasks)
    hidden_size = reader.integer("hidden_size")
    embedding_size = hidden_size
    if reader.has("embedding_size") or "embedding_size" in reader.defaults:
        embedding_size = reader.integer("embedding_size")
    attention = encoder_attention(reader, variation, hidden_size)
    layer = LayerSpec(
        attention=attention,
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            gated=variation.gated,
            bias=not variation.gated,
            place=variation.feed_forward_place,
        ),
        norm=LAYER_NORM,
        placement=variation.placement,
        dropout=reader.number("hidden_dropout_prob"),
        dropout_modules=True,
        attention_dropout_only=variation.attention_dropout_only,
        names_attended=variation.names_attended,
    )
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=reader.layers("num_hidden_layers"), layer=layer),),
        embedding=encoder_embedding(reader, variation, embedding_size),
        final_norm=LAYER_NORM if variation.final_norm else None,
    )
    return encoder_model(
        reader, request, stack,
        task=task, hidden_size=hidden_size,
        head=encoder_head(reader, variation, embedding_size),
        context_length=positions_for_tokens(reader, variation),
    )  # fmt: skip


def encoder_model(
    reader: ConfigReader,
    request: ReadRequest,
    stack: StackSpec,
    *,
    task: Task,
    hidden_size: int,
    head: HeadSpec,
    context_length: int,
    recomputes: bool = True,
    eager_attention_only: bool = False,
    num_labels: int | None = None,
) -> ModelSpec:
    """An encoder around its one stack."""
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=context_length,
        stacks=(stack,),
        head=head,
        num_labels=request.labels(reader) if num_labels is None else num_labels,
        checkpoint_dtype=checkpoint_dtype(reader),
        recomputes=recomputes,
        eager_attention_only=eager_attention_only,
        source=reader.source,
    )


def positions_for_tokens(reader: ConfigReader, variation: Variation) -> int:
    """Positions that tokens can take: those up to the padding token's own are skipped."""
    key = "max_position_embeddings"
    positions = reader.integer(key)
    if not variation.positions_from_ids:
        return positions
    skipped = padding_id(reader) + 1
    if positions <= skipped:
        raise reader.fail(key, f"{positions} leaves none behind the padding token's")
    return positions - skipped


def require_flag(reader: ConfigReader, key: str, *, value: bool, problem: str) -> None:
    """Refuse a config whose flag is not the one that is supported."""
    if reader.flag(key, default=value) is not value:
        raise reader.fail(key, f"{problem}; set it to {str(value).lower()}")


def padding_id(reader: ConfigReader) -> int:
    """The padding token's id; RoBERTa's classes have 1."""
    return reader.integer("pad_token_id", default=1, minimum=0)


def encoder_attention(
    reader: ConfigReader, variation: Variation, hidden_size: int
) -> AttentionSpec:
    """As many heads for keys as for queries, with a bias on everything."""
    if not variation.attends:
        return AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=hidden_size, causal=False)
    num_heads = reader.integer("num_attention_heads")
    head_dim = reader.divide("hidden_size", hidden_size, "num_attention_heads", num_heads)
    bias = variation.attention_bias
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=bias,
        rotary=None if variation.positions else RotarySpec(dim=head_dim),
        causal=False,
        output_apart=not variation.names_attended,
        dropout=reader.number("attention_probs_dropout_prob"),
        fp32_softmax=variation.fp32_softmax,
        names_weights=variation.names_weights,
        padding_mask=variation.padding_mask,
    )


def encoder_embedding(
    reader: ConfigReader, variation: Variation, embedding_size: int
) -> EmbeddingSpec:
    """The tables that are summed up; XLM-RoBERTa-XL alone has no norm behind them."""
    boxes = reader.optional_integer("max_2d_position_embeddings")
    return EmbeddingSpec(
        embedding_size=embedding_size,
        num_positions=reader.integer("max_position_embeddings") if variation.positions else 0,
        positions_from_ids=variation.positions_from_ids,
        num_token_types=reader.optional_integer("type_vocab_size") or 0,
        token_type_buffer=variation.token_type_buffer,
        num_box_positions=boxes or 0,
        own_module=True,
        norm=None if variation.placement is NormPlacement.PRE else LAYER_NORM,
        dropout=reader.number("hidden_dropout_prob"),
        dropout_module=True,
    )


def encoder_head(reader: ConfigReader, variation: Variation, embedding_size: int) -> HeadSpec:
    """The masked-LM head, the pooler and the classification head."""
    hidden_dropout = reader.number("hidden_dropout_prob")
    dropout = reader.number(variation.classifier_dropout_key, default=hidden_dropout)
    return HeadSpec(
        tied=reader.flag("tie_word_embeddings", default=True),
        bias=True,
        transform=FeedForwardSpec(
            intermediate_size=embedding_size,
            activation=variation.head_activation or read_activation(reader, "hidden_act"),
        ),
        transform_norm=LAYER_NORM,
        spare_bias=variation.spare_bias,
        discriminator=read_activation(reader, "hidden_act") if variation.discriminator else None,
        pooler_tasks=variation.pooler_tasks,
        classifier=ClassifierSpec(
            pooling=Pooling.FIRST if variation.classifier_dense else Pooling.POOLER,
            dense=variation.classifier_dense,
            first_dropout=dropout if variation.classifier_first_dropout else 0.0,
            dropout=dropout,
            token_dropout=dropout,
        ),
    )


def read_distilbert(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """DistilBERT: no token types, no pooler, names of its own."""
    hidden_size = reader.integer("dim")
    num_heads = reader.integer("n_heads")
    head_dim = reader.divide("dim", hidden_size, "n_heads", num_heads)
    act = read_activation(reader, "activation")
    dropout = reader.number("dropout")
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            query_bias=True,
            key_bias=True,
            value_bias=True,
            output_bias=True,
            causal=False,
            dropout=reader.number("attention_dropout"),
            fp32_softmax=False,
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("hidden_dim"), activation=act, bias=True
        ),
        norm=LAYER_NORM,
        placement=NormPlacement.POST,
        dropout=dropout,
        feed_forward_dropout_only=True,
    )
    positions = reader.integer("max_position_embeddings")
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=reader.layers("n_layers"), layer=layer),),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            num_positions=positions,
            own_module=True,
            norm=LAYER_NORM,
            dropout=dropout,
        ),
        final_norm=None,
    )
    head = HeadSpec(
        tied=reader.flag("tie_word_embeddings", default=True),
        bias=True,
        transform=FeedForwardSpec(intermediate_size=hidden_size, activation=act),
        transform_norm=LAYER_NORM,
        classifier=ClassifierSpec(
            dense=Activation.RELU,
            dropout=reader.number("seq_classif_dropout"),
            token_dropout=dropout,
            span_dropout=reader.number("qa_dropout"),
        ),
    )
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *TASKS), hidden_size=hidden_size, head=head,
        context_length=positions,
    )  # fmt: skip


def read_deberta(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """DeBERTa: attention to contents and distances, layer norms written out."""
    require_flag(reader, "legacy", value=True, problem="the other head is not supported")
    require_flag(reader, "talking_head", value=False, problem="is not supported")
    hidden_size = reader.integer("hidden_size")
    second = request.model_type == "deberta-v2"
    norm = LAYER_NORM if second else NormSpec(kind=NormKind.LAYER_DIVIDED, bias=True)
    convolution = _convolution(reader, hidden_size) if second else None
    dropout = reader.number("hidden_dropout_prob")
    variation = Variation(pooler_tasks=(), head_activation=None, fp32_softmax=False)
    layer = LayerSpec(
        attention=replace(
            encoder_attention(reader, variation, hidden_size),
            distances=_bucketed(reader, dropout) if second else _distances(reader, dropout),
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            bias=True,
        ),
        norm=norm,
        placement=NormPlacement.POST,
        dropout=dropout,
    )
    positions = reader.integer("max_position_embeddings")
    stack = StackSpec(
        name="encoder",
        runs=_runs(layer, reader.layers("num_hidden_layers"), first_apart=convolution is not None),
        convolution=convolution,
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            num_positions=positions if reader.flag("position_biased_input") else 0,
            num_token_types=reader.integer("type_vocab_size", minimum=0),
            zeros_for_positions=True,
            padding_product=True,
            own_module=True,
            norm=norm,
            dropout=dropout,
        ),
        final_norm=None,
    )
    head = replace(
        encoder_head(reader, variation, hidden_size),
        classifier=ClassifierSpec(
            dense=read_activation(reader, "pooler_hidden_act"),
            first_dropout=reader.number("pooler_dropout"),
            dropout=reader.number("cls_dropout", default=dropout),
            token_dropout=dropout,
        ),
    )
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *TASKS), hidden_size=hidden_size, head=head,
        context_length=positions, eager_attention_only=True,
    )  # fmt: skip


def _convolution(reader: ConfigReader, hidden_size: int) -> ConvolutionSpec | None:
    """DeBERTa-v2's beside the first layer; its tanh and single group are ``ConvLayer``'s own."""
    kernel_size = reader.integer("conv_kernel_size", default=0, minimum=0)
    if not kernel_size:
        return None
    groups = reader.integer("conv_groups", default=1)
    reader.divide("hidden_size", hidden_size, "conv_groups", groups)
    activation = Activation.TANH
    if reader.has("conv_act"):
        activation = read_activation(reader, "conv_act")
    return ConvolutionSpec(
        kernel_size=kernel_size,
        groups=groups,
        activation=activation,
        norm=LAYER_NORM,
        dropout=reader.number("hidden_dropout_prob"),
    )


def _runs(layer: LayerSpec, count: int, *, first_apart: bool) -> tuple[LayerRun, ...]:
    if not first_apart or count == 1:
        return (LayerRun(count=count, layer=layer),)
    return LayerRun(count=1, layer=layer), LayerRun(count=count - 1, layer=layer)


def _bucketed(reader: ConfigReader, dropout: float) -> DistanceSpec:
    """DeBERTa-v2's distances, of which far ones share a row."""
    plain = _distances(reader, dropout)
    buckets = reader.optional_integer("position_buckets", minimum=-1) or -1
    if not plain.content_to_position or not plain.position_to_content:
        plain = replace(plain, max_distance=0)
    elif buckets > 0:
        plain = replace(plain, max_distance=buckets)
    normed = "layer_norm" in reader.text("norm_rel_ebd", default="none").lower()
    return replace(
        plain,
        norm=LAYER_NORM if normed else None,
        flat_heads=True,
        shared_projections=reader.flag("share_att_key"),
    )


def _distances(reader: ConfigReader, dropout: float) -> DistanceSpec:
    """Which scores of distances there are; ``pos_att_type`` is a list or joined by bars."""
    if not reader.flag("relative_attention"):
        return DistanceSpec(max_distance=0)
    given = reader.raw("pos_att_type")
    kinds = given.lower().split("|") if isinstance(given, str) else reader.texts("pos_att_type")
    largest = reader.optional_integer("max_relative_positions", minimum=-1) or -1
    return DistanceSpec(
        max_distance=largest if largest > 0 else reader.integer("max_position_embeddings"),
        content_to_position="c2p" in kinds,
        position_to_content="p2c" in kinds,
        dropout=dropout,
    )


def read_albert(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """ALBERT: groups of layers that share their parameters, behind a projection."""
    key = "inner_group_num"
    if reader.integer(key) != 1:
        raise reader.fail(key, "only 1 layer a group is supported")
    variation = Variation(head_activation=None, classifier_dropout_key="classifier_dropout_prob")
    hidden_size = reader.integer("hidden_size")
    embedding_size = reader.integer("embedding_size")
    layer = LayerSpec(
        attention=encoder_attention(reader, variation, hidden_size),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            bias=True,
        ),
        norm=LAYER_NORM,
        placement=NormPlacement.POST,
        dropout=reader.number("hidden_dropout_prob"),
        attention_dropout_only=True,
    )
    embedding = encoder_embedding(reader, variation, embedding_size)
    stack = StackSpec(
        name="encoder",
        runs=tuple(
            LayerRun(count=count, layer=layer, shared=True) for count in _group_sizes(reader)
        ),
        embedding=replace(embedding, projection_in_encoder=True),
        final_norm=None,
    )
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *TASKS), hidden_size=hidden_size,
        head=encoder_head(reader, variation, embedding_size),
        context_length=reader.integer("max_position_embeddings"),
        recomputes=False,
    )  # fmt: skip


def _group_sizes(reader: ConfigReader) -> list[int]:
    """How many layers run with each group's parameters (``AlbertTransformer.forward``)."""
    num_layers = reader.layers("num_hidden_layers")
    num_groups = reader.integer("num_hidden_groups", maximum=num_layers)
    sizes = [0] * num_groups
    for index in range(num_layers):
        sizes[int(index / (num_layers / num_groups))] += 1
    return sizes


def read_esm(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
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
        pooler_tasks=_BASE_ONLY,
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


def read_eurobert(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """EuroBERT: Llama's layers, looking both ways."""
    hidden_size = reader.integer("hidden_size")
    norm = NormSpec(kind=NormKind.RMS)
    attention = read_attention(reader, DecoderVariation(), hidden_size)
    bias = reader.flag("mlp_bias")
    layer = LayerSpec(
        attention=replace(attention, causal=False),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            gated=True,
            bias=bias,
        ),
        norm=norm,
    )
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=reader.layers("num_hidden_layers"), layer=layer),),
        embedding=EmbeddingSpec(embedding_size=hidden_size),
        final_norm=norm,
    )
    pooling = reader.choice("classifier_pooling", reader.text("classifier_pooling"), POOLINGS)
    head = HeadSpec(
        tied=reader.flag("tie_word_embeddings"),
        bias=bias,
        loss_upcast=True,
        classifier=ClassifierSpec(pooling=POOLINGS[pooling], dense=Activation.GELU),
    )
    tasks = tuple(task for task in TASKS if task is not Task.QUESTION_ANSWERING)
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *tasks), hidden_size=hidden_size, head=head,
        context_length=reader.integer("max_position_embeddings"),
    )  # fmt: skip


POOLINGS = {"bos": Pooling.FIRST, "mean": Pooling.MEAN, "late": Pooling.MEAN_LOGITS}
"""EuroBERT's names."""

OWN_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "distilbert": read_distilbert,
    "albert": read_albert,
    "deberta": read_deberta,
    "deberta-v2": read_deberta,
    "esm": read_esm,
    "eurobert": read_eurobert,
}
"""Types with names or parts of their own."""
