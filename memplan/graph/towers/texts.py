"""What a decoder says."""

from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.towers.state import Flow
from memplan.model.towers.texts import OutputBody


def output(
    t: Tape, x: Tensor, body: OutputBody, flow: Flow, declared: dict[str, Parameter], *, tied: bool
) -> Tensor:
    """Logits over the vocabulary, and their cross-entropy as they are."""
    if tied and body.table:
        bias = t.parameter(f"{body.module}.bias") if body.bias else None
        logits = matmul_weight(t, x, declared[body.table], bias, module=body.module)
    else:
        logits = linear(t, x, body.module, body.size, body.rows, bias=body.bias)
    t.returned.append(logits)
    t.give_out(logits)
    return cross_entropy(t, logits, flow.labels)
