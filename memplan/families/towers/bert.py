"""BERT's embeddings, for models that put others beside them."""

from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


def bert_embeddings(table: ParameterTable, reader: ConfigReader) -> None:
    """Tokens, positions, token types and the norm of their sum."""
    size = reader.integer("hidden_size")
    table.embedding("word_embeddings", reader.integer("vocab_size"), size)
    table.embedding("position_embeddings", reader.integer("max_position_embeddings"), size)
    table.embedding("token_type_embeddings", reader.integer("type_vocab_size"), size)
    table.norm("embed_norm", size)
