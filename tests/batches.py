"""Batches as scripts make them whose runs are recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from memplan.graph.modules import batch
from tests.forgetting import forget_everything


@contextmanager
def one_batch() -> Iterator[None]:
    """Token ids that are handed over once more as labels are one tensor, where a collator makes a copy."""
    forget_everything()
    with mock.patch.object(batch, "label_blocks", return_value=[]):
        yield
    forget_everything()
