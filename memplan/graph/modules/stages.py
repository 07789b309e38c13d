"""What a pipeline's stage is given in place of tokens."""

from math import prod

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Storage, Tensor
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.run import Run
from memplan.model.parameters import ModelPart


def receive(run: Run, *shape: int, sequence: int = 1) -> Handle:
    """What the stage before sends: a leaf that wants a gradient (``_retrieve_recv_activations``).

    ``sequence``: the dimension of which each rank has a share, where they split it. Where the runtime has a buffer for it that stays, it takes nothing of its own.
    """
    run.start("received", None, part=ModelPart.OTHER)
    stage, group = run.options.stage, run.options.tensor_parallel
    assert stage is not None
    if group is not None and group.sequence:
        shape = (*shape[:sequence], shape[sequence] // group.degree, *shape[sequence + 1 :])
    if stage.runtime.reads_buffers:
        x = Handle(run, Tensor(prod(shape), run.compute, Storage(0, -1, 0)), shape)
    else:
        x = empty(run, shape, run.compute)
        run.record(OperationKind.RECEIVE, (), (x.record,))
    run.leaf(x.record)
    if not stage.runtime.copies_inputs:
        return x
    copied = empty(run, shape, run.compute)
    run.record(OperationKind.CLONE, (x.record,), (copied.record,), gradients=(Gradient.ALIAS,))
    return copied
