"""How an operation's weight is split over the ranks of a tensor-parallel group."""

from enum import Enum

from memplan.fast_dataclass import dataclass


class Split(Enum):
    """What of a linear layer one rank has, as the layer's own block declares it."""

    WHOLE = "whole"
    """All of it."""
    COLUMN = "column"
    """Some of its outputs: heads, or a share of a network's width; each rank reads all inputs."""
    COLUMN_JOINED = "column_joined"
    """The same, but what the ranks have is joined at once: the model's sizes stay whole."""
    ROW = "row"
    """Some of its inputs, those that the rank's columns gave; the ranks' results are added up."""
    ROW_CUT = "row_cut"
    """The same of inputs that every rank has whole: it cuts its own out."""
    ROW_PARTIAL = "row_partial"
    """Some of its inputs; somebody else adds the ranks' results up."""
    VOCABULARY = "vocabulary"
    """Some of the vocabulary's rows: columns, whose results are joined unless the loss is split too."""


class Sharing(Enum):
    """How the ranks of a group share a part of a layer: its attention, its network, its experts."""

    SPLIT = "split"
    """Columns first and rows last; between them each rank has heads or a width of its own."""
    JOINED = "joined"
    """Columns that are joined before anything reads them, and rows that are cut out again."""
    PARTIAL = "partial"
    """The same as split, within a part whose results are added up at its end."""
    WHOLE = "whole"
    """Every rank has all of it, and computes it."""

    __hash__ = object.__hash__

    @property
    def columns(self) -> Split:
        """How the part's first linear layers are split."""
        return _COLUMNS[self]

    @property
    def rows(self) -> Split:
        """How its last one is."""
        return _ROWS[self]


_COLUMNS = {
    Sharing.SPLIT: Split.COLUMN,
    Sharing.JOINED: Split.COLUMN_JOINED,
    Sharing.PARTIAL: Split.COLUMN,
    Sharing.WHOLE: Split.WHOLE,
}
_ROWS = {
    Sharing.SPLIT: Split.ROW,
    Sharing.JOINED: Split.ROW_CUT,
    Sharing.PARTIAL: Split.ROW_PARTIAL,
    Sharing.WHOLE: Split.WHOLE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPlan:
    """What of a model's layers the ranks of a group share, and how."""

    attention: Sharing = Sharing.SPLIT
    network: Sharing = Sharing.SPLIT
    """Dense feed-forward networks."""
    shared: Sharing = Sharing.SPLIT
    """The expert of a mixture that every token passes."""
    experts: Sharing = Sharing.SPLIT
    """A mixture's routed experts."""
    mixer: Sharing = Sharing.WHOLE
    """What stands in attention's place in some layers: where it is joined, all its linear layers are columns."""
    table: Sharing = Sharing.SPLIT
    """The token table."""


PLAIN_SPLIT = SplitPlan()
"""Everything by heads and widths."""
