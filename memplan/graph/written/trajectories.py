"""Decision Transformer: GPT-2's layers over returns, states and actions, three tokens for each step.

Its class returns predictions and has no loss; what is meant is the paper's, the mean squared error of the
actions (arXiv:2106.01345, section 3). Predictions of states and returns are made, and lead to nothing
(transformers 5.23, models/decision_transformer/modeling_decision_transformer.py).
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.lookups import embedding
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import from_batch
from memplan.model.layers import TOKENS_PER_STEP, EmbeddingSpec, TrajectorySpec
from memplan.model.networks import Activation
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import WeightRole
from memplan.model.spec import ModelSpec

_NORM = NormSpec(kind=NormKind.LAYER, bias=True)


def trajectory_embeddings(
    t: Tape, model: ModelSpec, spec: EmbeddingSpec, trajectory: TrajectorySpec
) -> tuple[Tensor, Parameter]:
    """Each kind projected and given its step's vector, the three in turn; a norm; position zero."""
    hidden, batch = model.hidden_size, t.options.batch_size
    tokens = batch * t.options.seq_len
    steps = tokens // TOKENS_PER_STEP
    table = t.parameter("wte.weight", model.vocab_size, hidden, role=WeightRole.TABLE)
    table.unused = True
    kinds = (("state", trajectory.state), ("action", trajectory.action), ("return", 1))
    from_batch(t, steps, t.compute)  # rewards, which nothing reads
    made = [
        linear(t, from_batch(t, steps * width, t.compute), f"embed_{name}", width, hidden, bias=True)
        for name, width in kinds
    ]  # fmt: skip
    numbers, mask = from_batch(t, steps, DType.INT64), from_batch(t, steps, DType.INT64)
    time = embedding(t, "embed_timestep", trajectory.num_steps, hidden, steps, numbers)
    timed = []
    for each in made:
        timed.append(t.add(each, time))
        t.touch(each)
        t.hold(timed[-1])
    t.hold(time)
    stacked = t.concatenate(*timed)
    laid = t.scale(stacked, OperationKind.CLONE)
    t.touch(stacked)
    x = norm(t, laid, _NORM, "embed_ln", hidden)
    t.hold(x)
    longer = t.tensor(tokens, DType.INT64)
    t.record(OperationKind.REPEAT, (mask,), (longer,))
    t.hold(longer)
    zeros = t.tensor(tokens, DType.INT64)
    t.record(OperationKind.ZEROS, (), (zeros,))
    added = embedding(t, "wpe", spec.num_positions, hidden, tokens, zeros)
    t.hold(added)
    return dropout(t, t.add(x, added), spec.dropout), table


def predicted_actions(t: Tape, model: ModelSpec, x: Tensor, trajectory: TrajectorySpec) -> Tensor:
    """Returns, states and actions that follow; the squared error of the actions."""
    steps = t.options.batch_size * t.options.seq_len // TOKENS_PER_STEP
    hidden = model.hidden_size
    parts = [t.slice(x, steps * hidden) for _ in range(2)]
    for name, width in (("return", 1), ("state", trajectory.state)):
        idle = Tensor(parts[0].numel, x.dtype, x.storage)
        t.give_out(_predicted(t, idle, f"predict_{name}", hidden, width, idle=True))
    found = _predicted(t, parts[1], "predict_action.0", hidden, trajectory.action)
    if trajectory.squashed:
        raw = found
        found = activation(t, raw, Activation.TANH)
        t.touch(raw)
    error = t.tensor(found.numel, found.dtype)
    t.record(OperationKind.SUB, (found,), (error,), gradients=(Gradient.ALIAS,))
    squared = t.square(error)
    loss = t.tensor(1, squared.dtype)
    t.record(
        OperationKind.MEAN, (squared,), (loss,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(RESULT,),
    )  # fmt: skip
    t.give_out(found)
    return loss


def _predicted(
    t: Tape, x: Tensor, name: str, hidden: int, width: int, *, idle: bool = False
) -> Tensor:
    """A linear layer on rows that do not follow one another: a product, then a sum."""
    declared = len(t.segment.parameters)
    start = len(t.segment.operations)
    made = linear(t, x, name, hidden, width)
    bias = t.parameter(f"{name}.bias", width, role=WeightRole.OTHER)
    out = t.add(made, t.cast_weight(bias))
    t.touch(made)
    if idle:
        for operation in t.segment.operations[start:]:
            operation.forget()
        for weight in t.segment.parameters[declared:]:
            weight.unused = True
        out.requires_grad = False
    return out
