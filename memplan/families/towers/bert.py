"""BERT as a tower for texts, and its embeddings for models that put others beside them."""

from memplan.families.towers.layers import text_transformer
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.compared.pooling import PoolerBody, TowerPooling
from memplan.model.towers.texts import TypedTokensBody


def bert_embeddings(table: ParameterTable, reader: ConfigReader) -> None:
    """Tokens, positions, token types and the norm of their sum."""
    size = reader.integer("hidden_size")
    table.embedding("word_embeddings", reader.integer("vocab_size"), size)
    table.embedding("position_embeddings", reader.integer("max_position_embeddings"), size)
    table.embedding("token_type_embeddings", reader.integer("type_vocab_size"), size)
    table.norm("embed_norm", size)


def bert_text(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    *,
    pooled: bool = True,
    counted: bool = False,
    fp32_softmax: bool = False,
    sums_in_place: bool = False,
) -> None:
    """``BertModel``, with its pooler or without; ``counted`` is RoBERTa's, whose ids count positions."""
    size = reader.integer("hidden_size")
    tokens = TypedTokensBody(
        size=size, num_positions=reader.integer("max_position_embeddings"), counted=counted,
        sums_in_place=sums_in_place, dropout=reader.number("hidden_dropout_prob", default=0.1),
    )  # fmt: skip
    with table.block(f"{name}.embed", body=tokens):
        bert_embeddings(table, reader)
    text_transformer(table, f"{name}.encoder", reader, fp32_softmax=fp32_softmax)
    if pooled:
        first = PoolerBody(
            pooling=TowerPooling.FIRST, size=size, linear="pooler.dense", outputs=size,
            activation=Activation.TANH,
        )  # fmt: skip
        with table.block(f"{name}.pooler", body=first):
            table.linear("pooler.dense", size, size)


def roberta_text(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``RobertaModel`` with its pooler."""
    bert_text(table, name, reader, counted=True)
