"""Batches as scripts make them whose runs are recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from memplan.graph.core.recording import Recording
from memplan.graph.modules import batch
from tests.forgetting import forget_everything


@contextmanager
def one_batch() -> Iterator[None]:
    """Token ids that are handed over once more as labels are one tensor, where a collator makes a copy."""
    forget_everything()
    with mock.patch.object(batch, "label_blocks", return_value=[]):
        yield
    forget_everything()


@contextmanager
def positions_in_tables() -> Iterator[None]:
    """Layers are handed rotary tables and no position ids, so that a checkpoint keeps none.

    What records show, whose script is not at hand: 8 bytes a token are missing from what checkpointed layers keep, and
    no batch is larger for it. Where a rank embeds a share of the tokens, a script cannot leave positions to transformers'
    model: it counts as many as there are in the share, and its tables do not fit the gathered queries (tried).
    """
    forget_everything()
    with mock.patch.object(Recording, "be_handed"):
        yield
    forget_everything()
