"""What a batch holds on the card: token ids, labels, positions."""

from memplan.dtypes import DType
from memplan.graph.core.tape import Tape
from memplan.model.heads import WHOLE_SEQUENCES
from memplan.model.spec import ModelSpec, Task
from memplan.training.splitting.context_parallel import ContextParallelKind


def input_blocks(t: Tape, model: ModelSpec) -> list[int]:
    """Token ids and labels, each tensor's [bytes].

    Where ranks share sequences, shifted labels and positions too. Of a ring a rank's share of each lies
    in a storage of the whole (``resize_``); DeepSpeed's loader hands out shares, in place of the labels.
    """
    group = t.options.context_parallel
    if group is not None and group.kind is ContextParallelKind.ALL_TO_ALL:
        return 3 * [ids_bytes(t, t.options.batch_size * t.options.seq_len)]
    if group is not None:
        return 4 * [ids_bytes(t, t.options.batch_size * t.options.seq_len * group.degree)]
    return [ids_bytes(t, t.options.batch_size * t.options.seq_len), *label_blocks(t, model)]


def label_blocks(t: Tape, model: ModelSpec) -> list[int]:
    """Labels of the batch: one a token, one a sequence, or a span's two ends [bytes]."""
    batch = t.options.batch_size
    if model.task in WHOLE_SEQUENCES:
        return [ids_bytes(t, batch)]
    if model.task is Task.QUESTION_ANSWERING:
        return 2 * [ids_bytes(t, batch)]
    two = len(model.stacks) > 1
    return [ids_bytes(t, batch * (t.options.target_seq_len if two else t.options.seq_len))]


def ids_bytes(t: Tape, count: int) -> int:
    """So many numbers of 64 bits [bytes]."""
    return t.tensor(count, DType.INT64).storage.num_bytes
