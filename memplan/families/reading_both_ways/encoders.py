"""What encoders that are no classes yet share with BERT: VisualBERT, and LXMERT's text.

That is an embedding of tokens, positions and types, layers with attention and a feed-forward
network of biased linear layers, a pooler, a masked-LM head on the token table.
"""

from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import (
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
"""``torch.nn.LayerNorm`` with weight and bias."""

TASKS = (Task.PRETRAINING, Task.BASE)
"""Those that are written down of VisualBERT and LXMERT."""


def read_encoder(reader: ConfigReader, request: ReadRequest, *, spare_bias: bool) -> ModelSpec:
    """Read a config with BERT's names for its sizes.

    ``spare_bias``: the head's bias is its own, tied to the output matrix's where their weights are tied.
    """
    require_flag(reader, "is_decoder", value=False, problem="only the encoder is supported")
    task = reject_task(reader, request, *TASKS)
    hidden_size = reader.integer("hidden_size")
    attention = encoder_attention(reader, hidden_size)
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
    )
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=reader.layers("num_hidden_layers"), layer=layer),),
        embedding=encoder_embedding(reader, hidden_size),
        final_norm=None,
    )
    return encoder_model(
        reader, request, stack,
        task=task, hidden_size=hidden_size,
        head=encoder_head(reader, hidden_size, spare_bias=spare_bias),
        context_length=reader.integer("max_position_embeddings"),
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


def positions_behind_padding(reader: ConfigReader) -> int:
    """Positions that tokens can take: those up to the padding token's own are skipped."""
    key = "max_position_embeddings"
    positions = reader.integer(key)
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


def encoder_attention(reader: ConfigReader, hidden_size: int) -> AttentionSpec:
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
        dropout=reader.number("attention_probs_dropout_prob"),
        fp32_softmax=False,
        names_weights=False,
        padding_mask=True,
    )


def encoder_embedding(reader: ConfigReader, embedding_size: int) -> EmbeddingSpec:
    """The tables that are summed up, and the norm behind them."""
    return EmbeddingSpec(
        embedding_size=embedding_size,
        num_positions=reader.integer("max_position_embeddings"),
        num_token_types=reader.optional_integer("type_vocab_size") or 0,
        own_module=True,
        norm=LAYER_NORM,
        dropout=reader.number("hidden_dropout_prob"),
        dropout_module=True,
    )


def encoder_head(reader: ConfigReader, embedding_size: int, *, spare_bias: bool) -> HeadSpec:
    """The masked-LM head and the pooler."""
    return HeadSpec(
        tied=reader.flag("tie_word_embeddings", default=True),
        bias=True,
        transform=FeedForwardSpec(
            intermediate_size=embedding_size, activation=read_activation(reader, "hidden_act")
        ),
        transform_norm=LAYER_NORM,
        spare_bias=spare_bias,
        pooler_tasks=TASKS,
    )
