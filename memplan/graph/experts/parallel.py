"""Experts spread over ranks, as torchtitan runs them.

torchtitan 0.3.0, models/common/token_dispatcher.py (``AllToAllTokenDispatcher``) and moe.py
(``GroupedExperts``): pairs of token and expert are sorted, sent to the ranks that have the experts,
put in the experts' order, run through three grouped products in bf16, and sent back. The router is the
model's own. How many pairs a rank is sent is an assumption: ``ExpertParallel.imbalance``.
"""

from math import ceil

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ExpertShare, Parameter, Tensor, allocated_bytes
from memplan.graph.experts.products import grouped_matmul
from memplan.graph.experts.routing import take
from memplan.graph.operations.activations import activation
from memplan.model.mixers import NOTHING
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.spec import ModelSpec
from memplan.training.splitting.exchange import ExchangeKind, Group, both_ways
from memplan.training.splitting.expert_parallel import ExpertParallel


def mixtures_of(model: ModelSpec) -> list[MixtureSpec]:
    """The mixtures of a model's layers."""
    networks = [run.layer.feed_forward for stack in model.stacks for run in stack.runs]
    return [each for each in networks if isinstance(each, MixtureSpec)]


def check_has_experts(model: ModelSpec) -> None:
    """Refuse a whole model without experts, or with other ones; stages of one that has some may have none.

    Raises ``SetupError``.
    """
    networks = [run.layer.feed_forward for stack in model.stacks for run in stack.runs]
    mixtures = mixtures_of(model)
    others = [
        each
        for each in networks
        if not isinstance(each, MixtureSpec | FeedForwardSpec) and each != NOTHING
    ]
    if others or any(spec.in_turn or spec.router.table_rows for spec in mixtures):
        msg = (
            f"expert_parallel: is not modelled for {model.name} ({model.family}), whose class runs its experts "
            "in a way of its own; the nearest that is: sharding over all GPUs, engine='fsdp' or zero_stage=3"
        )
        raise SetupError(msg)
    if not mixtures:
        msg = f"expert_parallel: {model.name} ({model.family}) has no experts: leave it out"
        raise SetupError(msg)


def check_spread(model: ModelSpec, group: ExpertParallel) -> None:
    """Refuse experts that do not divide, or are not modelled.

    Raises ``SetupError``.
    """
    for spec in mixtures_of(model):
        share, rest = divmod(spec.num_experts, group.degree)
        if rest:
            msg = (
                f"expert_parallel: {model.name} has {spec.num_experts} experts, which {group.degree} ranks "
                f"cannot share evenly: {spec.num_experts} = {group.degree} x {share} + {rest}"
            )
            raise SetupError(msg)
        if model.blueprint is None and (not spec.expert.gated or spec.expert.bias):
            msg = (
                f"expert_parallel: is modelled for experts of three plain matrices, and those of {model.name} "
                f"({model.family}) are not: leave it out"
            )
            raise SetupError(msg)


def dispatched_experts(
    t: Tape,
    group: ExpertParallel,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    spec: MixtureSpec,
    hidden_size: int,
) -> Tensor:
    """``RoutedExperts.forward``."""
    pairs = chosen.numel
    tokens = x.numel // hidden_size
    counts = token_counts(t, chosen, tokens * spec.num_experts)
    order = sorted_pairs(t, chosen, spec.num_experts)
    scores = take(t, weights, order, pairs)
    sources = t.tensor(pairs, DType.INT64)
    t.record(OperationKind.FLOOR_DIVIDE, (order,), (sources,))
    routed = take(t, x, sources, pairs * hidden_size)
    given = ceil(pairs * group.imbalance.low)
    received = sent(t, routed, given * hidden_size)
    places = places_of(t, given)
    permuted = take(t, received, places, received.numel)
    out = _products(t, group, permuted, counts, spec, hidden_size)
    ordered = put_back(t, out, places)
    result = _combined(t, x, sent(t, ordered, pairs * hidden_size), scores, sources)
    t.touch(*counts, permuted, out, scores, sources, places)
    return result


def token_counts(t: Tape, chosen: Tensor, pairs: int) -> tuple[Tensor, ...]:
    """Which token goes to which expert, and how many go to each: counted in 64 bits."""
    routing = t.tensor(pairs, DType.BOOL)
    t.record(OperationKind.SCATTER, (chosen,), (routing,), gradients=(Gradient.NONE,))
    counts = t.tensor(1, DType.INT64)
    t.record(
        OperationKind.SUM, (routing,), (counts,), gradients=(Gradient.NONE,),
        forward_scratch_bytes=(RESULT, allocated_bytes(pairs, DType.INT64)),
    )  # fmt: skip
    return routing, counts


def sorted_pairs(t: Tape, chosen: Tensor, num_experts: int) -> Tensor:
    """``torch.argsort(stable=True)``: values and a copy go at once."""
    order = t.tensor(chosen.numel, DType.INT64)
    size = order.storage.num_bytes
    sorting = t.sort_scratch_bytes(chosen.numel, largest_key=num_experts - 1)
    t.record(
        OperationKind.SORT, (chosen,), (order,), gradients=(Gradient.NONE,),
        forward_scratch_bytes=(size, RESULT, size, *((sorting,) if sorting else ())),
    )  # fmt: skip
    return order


def places_of(t: Tape, pairs: int) -> Tensor:
    """Where each segment of a rank and an expert begins, and each pair in it."""
    places = t.tensor(pairs, DType.INT64)
    index = places.storage.num_bytes
    t.record(
        OperationKind.ARANGE, (), (places,),
        forward_scratch_bytes=(index, index, index, index, ~0, ~1, RESULT),
    )  # fmt: skip
    return places


def put_back(t: Tape, x: Tensor, places: Tensor) -> Tensor:
    """Rows in the order in which they came."""
    ordered = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.SCATTER, (x, places), (ordered,), saves=(places,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return ordered


def sent(t: Tape, x: Tensor, numel: int) -> Tensor:
    """``all_to_all_single``, and the same the other way in backward."""
    out = t.tensor(numel, x.dtype)
    size = max(x.numel, numel) * x.dtype.num_bytes
    t.record(
        OperationKind.ALL_TO_ALL, (x,), (out,), gradients=(Gradient.FRESH,),
        sends=both_ways(ExchangeKind.ALL_TO_ALL, size, Group.SPREAD),
    )  # fmt: skip
    return out


def _products(
    t: Tape,
    group: ExpertParallel,
    x: Tensor,
    counts: tuple[Tensor, ...],
    spec: MixtureSpec,
    hidden_size: int,
) -> Tensor:
    """``GroupedExperts.forward``: gate, up and down, each a weight of its own."""
    inner = spec.expert.intermediate_size
    offsets = t.tensor(spec.num_experts // group.degree, DType.INT32)
    t.record(OperationKind.CUMSUM, counts, (offsets,), gradients=())
    shapes = {"w1": (inner, hidden_size), "w2": (hidden_size, inner), "w3": (inner, hidden_size)}
    matrices = {
        name: _matrix(t, group, f"mlp.experts.{name}", spec, shape)
        for name, shape in shapes.items()
    }
    dtype = x.dtype
    gate = grouped_matmul(t, x, matrices["w1"], offsets, matrices["w1"])
    activated = activation(t, gate, spec.expert.activation)
    up = grouped_matmul(t, x, matrices["w3"], offsets, matrices["w3"])
    middle = t.mul(activated, up)
    return t.cast(grouped_matmul(t, middle, matrices["w2"], offsets, matrices["w2"]), dtype)


def _matrix(
    t: Tape, group: ExpertParallel, name: str, spec: MixtureSpec, shape: tuple[int, int]
) -> Parameter:
    own = spec.num_experts // group.degree
    split = t.options.tensor_parallel
    share = ExpertShare(
        own, spec.num_experts_per_token, spread=group.degree,
        splitting=1 if split is None else split.degree,
    )  # fmt: skip
    weight = t.parameter(name, own, *shape, module="mlp.experts", experts=share)
    weight.ranks = group.degree
    weight.is_distributed = split is not None
    return weight


def _combined(t: Tape, x: Tensor, back: Tensor, scores: Tensor, sources: Tensor) -> Tensor:
    """Each pair weighted in fp32, and added up where its token is (``deterministic_scatter_add``)."""
    zeros = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.ZEROS, (), (zeros,))
    weighted = t.cast(t.mul(t.cast(back, DType.FP32), scores), back.dtype)
    t.touch(back)
    out = added_up_rows(t, zeros, sources, weighted)
    t.touch(zeros, weighted)
    return out


def added_up_rows(t: Tape, zeros: Tensor, sources: Tensor, weighted: Tensor) -> Tensor:
    """``deterministic_scatter_add``: it sorts where each row goes."""
    out = t.tensor(zeros.numel, zeros.dtype)
    index = sources.storage.num_bytes
    sorting = t.sort_scratch_bytes(sources.numel, largest_key=zeros.numel)
    t.record(
        OperationKind.SCATTER, (zeros, sources, weighted), (out,), saves=(sources,),
        gradients=(Gradient.NONE, Gradient.NONE, Gradient.FRESH),
        forward_scratch_bytes=() if t.decomposed else (
            RESULT, *(index,) * 4, *((sorting,) if sorting else ()),
        ),
    )  # fmt: skip
    return out
