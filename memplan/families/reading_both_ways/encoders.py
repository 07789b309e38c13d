"""What encoders that are no classes yet share with BERT.

That is an embedding of tokens, positions and types, layers with attention and a feed-forward
network of biased linear layers, a pooler, a masked-LM head on the token table, and classification
heads. What sets the types apart is a ``Variation``.
"""

from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import ClassifierSpec, HeadSpec, Pooling
from memplan.model.layers import (
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
"""``torch.nn.LayerNorm`` with weight and bias."""

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

    positions_from_ids: bool = False
    """Positions are counted from the ids and start behind the padding token's."""
    token_type_buffer: bool = True
    padding_mask: bool = False
    pooler_tasks: tuple[Task, ...] = (Task.BASE, Task.SEQUENCE_CLASSIFICATION)
    """Tasks whose class has the pooler."""
    names_weights: bool = True
    head_activation: Activation | None = Activation.GELU
    """Of the masked-LM head; None for the config's own."""
    classifier_dense: Activation | None = None
    """The activation of a dense layer in the classification head, which then has no pooler."""
    classifier_first_dropout: bool = False
    classifier_dropout_key: str = "classifier_dropout"
    spare_bias: bool = True
    """The head's bias is its own, tied to the output matrix's where their weights are tied."""
    tasks: tuple[Task, ...] = TASKS


_BASE_ONLY = (Task.BASE,)

ROBERTA = Variation(
    positions_from_ids=True,
    pooler_tasks=_BASE_ONLY,
    classifier_dense=Activation.TANH,
    classifier_first_dropout=True,
)


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
            bias=True,
        ),
        norm=LAYER_NORM,
        placement=NormPlacement.POST,
        dropout=reader.number("hidden_dropout_prob"),
        dropout_modules=True,
    )
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=reader.layers("num_hidden_layers"), layer=layer),),
        embedding=encoder_embedding(reader, variation, embedding_size),
        final_norm=None,
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
    num_heads = reader.integer("num_attention_heads")
    head_dim = reader.divide("hidden_size", hidden_size, "num_attention_heads", num_heads)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
        causal=False,
        output_apart=True,
        dropout=reader.number("attention_probs_dropout_prob"),
        fp32_softmax=False,
        names_weights=variation.names_weights,
        padding_mask=variation.padding_mask,
    )


def encoder_embedding(
    reader: ConfigReader, variation: Variation, embedding_size: int
) -> EmbeddingSpec:
    """The tables that are summed up, and the norm behind them."""
    return EmbeddingSpec(
        embedding_size=embedding_size,
        num_positions=reader.integer("max_position_embeddings"),
        positions_from_ids=variation.positions_from_ids,
        num_token_types=reader.optional_integer("type_vocab_size") or 0,
        token_type_buffer=variation.token_type_buffer,
        own_module=True,
        norm=LAYER_NORM,
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
        pooler_tasks=variation.pooler_tasks,
        classifier=ClassifierSpec(
            pooling=Pooling.FIRST if variation.classifier_dense else Pooling.POOLER,
            dense=variation.classifier_dense,
            first_dropout=dropout if variation.classifier_first_dropout else 0.0,
            dropout=dropout,
            token_dropout=dropout,
        ),
    )
