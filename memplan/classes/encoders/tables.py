"""Tables of tokens, positions and types, and what stands behind their sum.

(transformers 5.23: models/bert/modeling_bert.py, models/roberta/modeling_roberta.py, which most encoders copy)
"""

from collections.abc import Callable
from typing import Any

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Dropout, Embedding, LayerNorm, Linear, Norm
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import positions_past_padding
from memplan.graph.modules.module import Module
from memplan.graph.modules.run import Run
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole


def token_rows(
    table: Embedding, batch: int, length: int, input_ids: Handle | None = None
) -> Handle:
    """Rows of the token table, of which an adapter may want a gradient; None: the batch's own ids."""
    x: Handle = table((batch, length), input_ids)
    table.run.embedded(x.record, table.run.parameters[table.weight])
    return x


def counted_ids(module: Module, batch: int, length: int) -> Handle:
    """``torch.gather`` of a buffer."""
    return made_by(module.run, OperationKind.INDICES, (batch, length), DType.INT64)


def zero_ids(module: Module, batch: int, length: int) -> Handle:
    """Zeros made anew for each token."""
    return made_by(module.run, OperationKind.ZEROS, (batch, length), DType.INT64)


def hold_ids(run: Run, num_positions: int, num_buffers: int = 1) -> None:
    """Buffers that no file has (``persistent=False``): left out where fake tensors are followed, as rotary frequencies are."""
    if not run.decomposed:
        for _ in range(num_buffers):
            run.buffer(num_positions, DType.INT64)


class TableParts(Module):
    """Tables of tokens, positions and types, a norm, dropout."""

    width_key = "hidden_size"
    dropout_key = "hidden_dropout_prob"
    normed = True
    norm_class: Callable[[int], Norm] = LayerNorm
    num_buffers = 2
    """Buffers of a number for each position: those that count them, and types."""

    def __init__(self, config: ConfigReader) -> None:
        self.num_positions = config.integer("max_position_embeddings", default=0)
        width = config.integer(self.width_key)
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.word_embeddings = Embedding(rows, width, role=role)
        self.add_tables(config, width)
        if self.normed:
            self.LayerNorm = self.norm_class(width)
        self.dropout = Dropout(config.number(self.dropout_key))

    def __call__(self, *args: Any) -> Any:
        """Run it; its buffers stand behind all of its tables."""
        made = super().__call__(*args)
        hold_ids(self.run, self.num_positions, self.num_buffers)
        return made

    def add_tables(self, config: ConfigReader, width: int) -> None:
        """Declare what stands between the tokens' table and the norm."""
        self.add_positions(config, width)
        self.add_types(config, width)

    def add_positions(self, config: ConfigReader, width: int) -> None:
        """Declare the table of positions."""
        self.position_embeddings = Embedding(config.integer("max_position_embeddings"), width)

    def add_types(self, config: ConfigReader, width: int) -> None:
        """Declare the table of types."""
        self.token_type_embeddings = Embedding(config.integer("type_vocab_size"), width)


class Embeddings(TableParts):
    """BERT's."""

    adds_in_place = False
    """Positions are added in place."""
    projection: Linear | None = None
    """What FNet puts before the dropout."""

    def position_ids(self, batch: int, length: int) -> Handle | None:  # noqa: ARG002
        """A buffer's, of one sequence for all."""
        return None

    def token_type_ids(self, batch: int, length: int) -> Handle | None:  # noqa: ARG002
        """``torch.gather`` of a buffer of zeros."""
        return counted_ids(self, 1, length)

    def forward(self, batch: int, length: int, token_type_ids: Handle | None = None) -> Handle:
        position_ids = self.position_ids(batch, length)
        if token_type_ids is None:
            token_type_ids = self.token_type_ids(batch, length)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = inputs_embeds + token_type_embeddings
        rows = (1, length) if position_ids is None else (batch, length)
        position_embeddings = self.position_embeddings(rows, position_ids)
        if self.adds_in_place:
            embeddings += position_embeddings
        else:
            embeddings = embeddings + position_embeddings
        if self.normed:
            embeddings = self.LayerNorm(embeddings)
        if self.projection is not None:
            embeddings = self.projection(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class TypesLast(Embeddings):
    """Positions are looked up and added before types."""

    def forward(
        self,
        batch: int,
        length: int,
        token_type_ids: Handle | None = None,
        input_ids: Handle | None = None,
    ) -> Handle:
        position_ids = self.position_ids(batch, length)
        if token_type_ids is None:
            token_type_ids = self.token_type_ids(batch, length)
        inputs_embeds = token_rows(self.word_embeddings, batch, length, input_ids)
        rows = (1, length) if position_ids is None else (batch, length)
        position_embeddings = self.position_embeddings(rows, position_ids)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = inputs_embeds + position_embeddings + token_type_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class CountedEmbeddings(Embeddings):
    """RoBERTa's: positions are counted from the ids, start behind the padding token's, and are declared last."""

    cached = True
    """Its function that counts adds the tokens that a cache has."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.add_positions(config, config.integer(self.width_key))

    def add_tables(self, config: ConfigReader, width: int) -> None:
        self.add_types(config, width)

    def position_ids(self, batch: int, length: int) -> Handle | None:
        return positions_past_padding(self.run, (batch, length), cached=self.cached)

    def token_type_ids(self, batch: int, length: int) -> Handle:
        return counted_ids(self, batch, length)


class NarrowEmbeddings(Embeddings):
    """As wide as ``embedding_size`` says."""

    width_key = "embedding_size"


def positions_behind_padding(config: ConfigReader) -> int:
    """Positions that tokens can take: those up to the padding token's own are skipped."""
    key = "max_position_embeddings"
    positions = config.integer(key)
    skipped = config.integer("pad_token_id", default=1, minimum=0) + 1
    if positions <= skipped:
        error = config.fail(key, f"{positions} leaves none behind the padding token's")
        raise error
    return positions - skipped
