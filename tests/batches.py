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
    """A script turns positions into rotary tables itself: layers are handed these alone, and a checkpoint keeps no more.

    A rank that has a share of the embedded tokens needs that: transformers' model counts as many positions as there are
    of these, and its tables do not fit the gathered queries.
    """
    forget_everything()
    with mock.patch.object(Recording, "be_handed"):
        yield
    forget_everything()
