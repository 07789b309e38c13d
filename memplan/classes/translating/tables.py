"""Tables of tokens and positions of BART and its kin.

(transformers 5.23: models/bart, pegasus, blenderbot, m2m_100)
"""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Parameter
from memplan.graph.modules.basic import Embedding
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import counted_positions, positions_past_padding
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader


class WordEmbedding(Embedding):
    """``torch.nn.Embedding``, of whose rows an adapter may want a gradient."""

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        made = super().forward(shape, ids)
        self.run.embedded(made.record, self.run.parameters[self.weight])
        return made


class ScaledWordEmbedding(Embedding):
    """``BartScaledWordEmbedding``."""

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        made = super().forward(shape, ids) * 1.0
        self.run.embedded(made.record, self.run.parameters[self.weight])
        return made


class LearnedPositions(Embedding):
    """``BartLearnedPositionalEmbedding``: rows for positions, which begin behind an offset."""

    offset = 2
    rows_key = "max_position_embeddings"
    """What its config calls the number of positions."""

    def __init__(self, config: ConfigReader) -> None:
        rows = config.integer(self.rows_key) + self.offset
        super().__init__(rows, config.integer("d_model"))

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        """Of each sequence of the batch; where there is one, of all. ``ids``: the caller has counted them."""
        position_ids = counted_positions(self.run, shape[-1]) if ids is None else ids
        return super().forward(shape, position_ids.apart(OperationKind.ADD_SCALAR, shape=shape))


class PositionsWithoutOffset(LearnedPositions):
    """Blenderbot's, which take the positions of one sequence."""

    offset = 0

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        """One row for all sequences, which has no dimension for them."""
        position_ids = counted_positions(self.run, shape[-1]) if ids is None else ids
        return Embedding.forward(self, shape[-1:], position_ids)


class FixedPositions(PositionsWithoutOffset):
    """``PegasusSinusoidalPositionalEmbedding``: a table that is not trained."""

    def declare(self, name: str, weight: Weight) -> Parameter:
        """Put it on the tape."""
        return self.run.parameter(name, *weight.shape, trainable=False, role=weight.role)


class PositionBuffer(Module):
    """``M2M100SinusoidalPositionalEmbedding``: rows of a buffer, for every sequence of the batch."""

    offset = 2

    def __init__(self, config: ConfigReader) -> None:
        self.rows = config.integer("max_position_embeddings") + self.offset
        self.width = config.integer("d_model")

    def forward(self, shape: tuple[int, ...]) -> Handle:
        """Of each sequence."""
        run = self.run
        position_ids = positions_past_padding(run, shape)
        run.hold_buffer(self.rows * self.width, run.options.weights)
        return made_from(
            OperationKind.INDEX_SELECT, (*shape, self.width), run.buffer_dtype, position_ids
        )
