"""What a pipeline's stage is given in place of tokens."""

from math import prod

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Storage, Tensor
from memplan.graph.modules.functional import summed_over
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


def receive_beside(run: Run, *shape: int) -> Handle:
    """What is sent beside hidden states: in fp32, since torch's stages want a gradient of all that they receive, and in a
    buffer of its own."""
    carried = Handle(run, Tensor(prod(shape), DType.FP32, Storage(0, -1, 0)), shape)
    run.leaf(carried.record)
    return carried


def linked(run: Run, x: Handle, carried: Tensor) -> Handle:
    """``x + (carried.float().sum() * 0.0).to(x.dtype)``: what was received beside ``x`` has a gradient, of zeros."""
    zero = empty(run, (1,), DType.FP32)
    # A number that is spread, and copied where a leaf gathers its gradient (``clone_obey_contract``).
    run.record(OperationKind.SUM, (carried,), (zero.record,), gradients=(Gradient.FRESH,))
    return x + (zero * 0.0).to(x.dtype)


def send_beside(run: Run, x: Handle, values: Handle, carried: Tensor | None) -> None:
    """End a stage with ``x`` and, beside it, ``values`` without a gradient, in fp32 and linked to ``x`` so that they have one."""
    run.start("sent", x.record, part=ModelPart.OTHER)
    total = summed_over(x.float().seen_as(-1), 0)
    sent = values.apart(OperationKind.TO, dtype=DType.FP32) + total * 0.0
    if carried is not None:
        x = linked(run, x, carried)
    run.hold(sent.record)
    run.finish(x.record, further=(sent.record,))
