"""Experts beside a dense network, each behind norms of its own (``Gemma4TextDecoderLayer``).

The dense network is given the normed residual stream, as anywhere; router and experts are given the
stream itself, which the experts norm for themselves.
"""

from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.experts.mixture import run_experts
from memplan.graph.experts.routing import route
from memplan.graph.feed_forward import feed_forward
from memplan.graph.operations.norms import norm
from memplan.graph.stack_context import StackContext
from memplan.model.mixtures import BesideDenseSpec


def beside_dense(t: Tape, x: Tensor, spec: BesideDenseSpec, context: StackContext) -> Tensor:
    """The dense network, the router, the experts, the sum of both."""
    hidden = context.hidden_size
    stream = context.residual
    assert stream is not None
    fed = feed_forward(t, x, spec.dense, hidden)
    dense = norm(t, fed, spec.norm, "post_feedforward_layernorm_1", hidden)
    flat = t.flatten(stream)
    weights, chosen, logits = route(t, flat, spec.mixture, hidden)
    t.touch(logits)
    given = norm(t, flat, spec.norm, "pre_feedforward_layernorm_2", hidden)
    made = run_experts(t, given, weights, chosen, spec.mixture, hidden)
    t.touch(given)
    sparse = norm(t, made, spec.norm, "post_feedforward_layernorm_2", hidden)
    out = t.add(dense, sparse)
    t.touch(fed, weights, chosen)
    return out
