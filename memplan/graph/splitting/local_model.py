"""A rank's own model: the heads, network widths and vocabulary rows that it has of a split one."""

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.splits import PLAIN_SPLIT, Sharing
from memplan.graph.splitting.tensor_plans import PLANS, has_plan
from memplan.model.attention import (
    AttentionForm,
    AttentionSpec,
    OutputGate,
    Projection,
)
from memplan.model.joining import Joining
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, NormPlacement
from memplan.model.mixers import MixerSpec
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.spec import ModelSpec, Task
from memplan.training.choices_of_kernels.kernels import ExpertKernel
from memplan.training.splitting.parallelism import TensorParallel, TensorParallelKind
from memplan.units import ceil_div

SPLIT_PLACEMENTS = frozenset(
    {
        NormPlacement.PRE, NormPlacement.SANDWICH, NormPlacement.OUTPUT, NormPlacement.PARALLEL,
        NormPlacement.PARALLEL_SHARED,
    }
)  # fmt: skip
"""Layers whose two parts begin and end in the residual stream."""


def local_model(model: ModelSpec, options: TapeOptions, group: TensorParallel) -> ModelSpec:
    """The model with each split size divided by the degree; its vocabulary is divided where it is read.

    Raises ``SetupError`` for a degree that does not divide a size, with both, and for a model of which
    it is not modelled how its parts are split.

    >>> import memplan
    >>> llama = memplan.load_model("llama-3.1-8b")
    >>> local = local_model(llama, TapeOptions(), TensorParallel(degree=4))
    >>> local.stacks[0].runs[0].layer.attention.num_kv_heads
    2
    """
    _check_whole(model, group)
    stack = model.stacks[0]
    runs = tuple(_local_run(model, run, options, group) for run in stack.runs)
    for size in (model.num_outputs, model.vocab_size):
        _check_vocabulary(model, size, group)
    if group.sequence:
        what = "seq_len, of which sequence_parallel gives each rank a share,"
        divided(options.seq_len, group.degree, what)
    return replace(model, stacks=(replace(stack, runs=runs),))


def _check_vocabulary(model: ModelSpec, size: int, group: TensorParallel) -> None:
    """DTensor gives the last ranks fewer rows, or none; a split loss and AutoTP take equal parts here."""
    uneven = group.kind is TensorParallelKind.DTENSOR and not group.loss
    if not uneven or (group.degree - 1) * ceil_div(size, group.degree) >= size:
        divided(size, group.degree, f"{model.name}'s vocabulary")


def divided(size: int, degree: int, what: str) -> int:
    """A rank's share of a size; refused with the arithmetic where there is none."""
    share, rest = divmod(size, degree)
    if rest:
        msg = (
            f"tensor_parallel: {what} is {size}, which {degree} ranks cannot share evenly: "
            f"{size} = {degree} x {share} + {rest}"
        )
        raise SetupError(msg)
    return share


def _check_whole(model: ModelSpec, group: TensorParallel) -> None:
    """Refuse what is not one decoder over a plain token table; towers beside it every rank has whole (no plan names them)."""
    if len(model.stacks) != 1 or model.task is not Task.CAUSAL_LM:
        _refuse(
            model, f"only decoders with a language model's head are, and this is {model.task.value}"
        )
    if group.kind is TensorParallelKind.AUTOTP:
        _check_autotp(model, group)
    stack = model.stacks[0]
    crossed = model.join is not None and model.join.joining is Joining.CROSSED
    if (
        stack.projected_out
        or crossed
        or (model.has_towers and group.kind is not TensorParallelKind.DTENSOR)
    ):
        _refuse(model, "it has parts beside a decoder's layers")
    if model.has_towers and group.sequence:
        _refuse(model, "sequence_parallel has no rule for what its towers give")
    spec = stack.embedding
    if spec is None or not _is_plain(spec):
        _refuse(model, "its embedding is more than a token table")
    elif group.sequence and spec.num_positions:
        _refuse(model, "sequence_parallel has no rule for its learned positions")


def _check_autotp(model: ModelSpec, group: TensorParallel) -> None:
    """Refuse what DeepSpeed itself does: plans with styles that it has no layer for.

    (deepspeed 0.19.8, module_inject/tp_plan_converter.py, ``SUPPORTED_STYLES``)
    """
    plan = PLANS.get(model.family)
    layers = [run.layer for run in model.stacks[0].runs]
    dense = all(isinstance(each.feed_forward, FeedForwardSpec) for each in layers)
    by_head = all(isinstance(each.attention, AttentionSpec) for each in layers)
    if plan is None:
        _refuse(model, "transformers has no tp_plan for AutoTP to go by")
    elif replace(plan, table=PLAIN_SPLIT.table) != PLAIN_SPLIT or not (dense and by_head):
        _refuse(model, "AutoTP refuses its tp_plan, whose styles are more than columns and rows")
    if model.head.tied:
        _refuse(model, "AutoTP's joint split of a tied token table is not written down")
    if group.sequence or group.loss:
        name = "sequence_parallel" if group.sequence else "loss_parallel"
        _refuse(model, f"AutoTP has no {name}")


def _is_plain(spec: EmbeddingSpec) -> bool:
    odd = (spec.own_module, spec.patch_features, spec.extra_rows)
    return not any(odd)


def _local_run(
    model: ModelSpec, run: LayerRun, options: TapeOptions, group: TensorParallel
) -> LayerRun:
    return replace(run, layer=_local_layer(model, run.layer, options, group))


def _local_layer(
    model: ModelSpec, layer: LayerSpec, options: TapeOptions, group: TensorParallel
) -> LayerSpec:
    """The layer with a rank's heads and widths, as the model's plan shares its two parts."""
    plan = options.split_plan
    if layer.placement not in SPLIT_PLACEMENTS or layer.cross_attention is not None:
        _refuse(model, "its layers are not attention and a network side by side or in turn")
    attention, network = layer.attention, layer.feed_forward
    if isinstance(attention, AttentionSpec):
        attention = _shared_attention(model, attention, plan.attention, group)
    elif isinstance(attention, LatentAttentionSpec):
        attention = _local_latent(model, attention, plan.attention, group)
    elif isinstance(attention, MixerSpec) and has_plan(model) and not group.sequence:
        attention = _local_mixer(model, attention, plan.attention, group)
    else:
        _refuse(model, "its attention is not one of heads that are independent of one another")
    if isinstance(network, FeedForwardSpec):
        network = _shared_network(model, network, plan.network, group)
    elif isinstance(network, MixtureSpec):
        network = _local_mixture(model, network, options, group)
    else:
        _refuse(model, "its feed-forward networks are not written down")
    return replace(layer, attention=attention, feed_forward=network)


def _local_mixer(
    model: ModelSpec, spec: MixerSpec, sharing: Sharing, group: TensorParallel
) -> MixerSpec:
    """What is no attention has its sizes whole: its linear layers' columns are joined, or not split."""
    if spec.scores is None:
        return spec
    return replace(spec, scores=_shared_attention(model, spec.scores, sharing, group))


def _shared_attention(
    model: ModelSpec, spec: AttentionSpec, sharing: Sharing, group: TensorParallel
) -> AttentionSpec:
    if sharing is Sharing.WHOLE:
        return spec
    if spec.form is not AttentionForm.INTERFACE or spec.output_gate not in _GATES_BY_HEAD:
        _refuse(model, "its class computes its attention in steps of its own")
    if sharing is Sharing.JOINED:
        _check_joined(model, spec.num_heads * spec.head_dim, group, "queries")
        _check_joined(model, spec.num_kv_heads * spec.head_dim, group, "keys")
        return spec
    if spec.projection_clamped and not group.sequence:
        _refuse(
            model,
            "its class clamps queries in place, which torch forbids on what DTensor hands out",
        )
    if not _splits_by_head(spec):
        _refuse(model, "its attention is not one of heads that are independent of one another")
    if spec.projection not in SPLIT_BY_HEAD:
        _refuse(model, "matrices that are several in one do not split by heads or columns of each")
    return _local_attention(model, spec, group)


SPLIT_BY_HEAD = frozenset(
    {Projection.SEPARATE, Projection.FUSED_INTERLEAVED, Projection.FUSED_SELECTED}
)
"""Where a share of the rows is all that some heads have: queries, keys and values."""


_GATES_BY_HEAD = frozenset({OutputGate.NONE, OutputGate.QUERIES})
"""No gate, or one that the queries' matrix gives beside each head."""


def _check_joined(model: ModelSpec, width: int, group: TensorParallel, what: str) -> None:
    divided(width, group.degree, f"the width of {model.name}'s {what}")


def _local_latent(
    model: ModelSpec, spec: LatentAttentionSpec, sharing: Sharing, group: TensorParallel
) -> LatentAttentionSpec:
    if sharing is Sharing.WHOLE:
        return spec
    heads = divided(spec.num_heads, group.degree, f"{model.name}'s number of heads")
    return replace(spec, num_heads=heads)


def _shared_network(
    model: ModelSpec, spec: FeedForwardSpec, sharing: Sharing, group: TensorParallel
) -> FeedForwardSpec:
    if sharing is Sharing.WHOLE:
        return spec
    if sharing is Sharing.JOINED:
        _check_joined(model, spec.intermediate_size, group, "feed-forward network")
        return spec
    if spec.normed_inside:
        _refuse(model, "a norm inside its feed-forward networks reads all of their width")
    if spec.fused_gate_up:
        _refuse(model, "matrices that are several in one do not split by heads or columns of each")
    return _local_network(model, spec, group)


def _local_mixture(
    model: ModelSpec, spec: MixtureSpec, options: TapeOptions, group: TensorParallel
) -> MixtureSpec:
    """Every expert with a share of its width: gate and up are split each (``packed_colwise``).

    Experts that are spread over ranks are whole.
    """
    shared = spec.shared
    if shared is not None:
        shared = _shared_network(model, shared, options.split_plan.shared, group)
    if options.expert_parallel is not None:
        return replace(spec, shared=shared)
    if not has_plan(model):
        _refuse(model, "transformers has no plan of how to split its mixture of experts")
    if options.kernels.experts is ExpertKernel.MODULES or spec.expert.bias:
        _refuse(model, "experts that are modules of their own, or have biases, are not split")
    return replace(spec, expert=_local_network(model, spec.expert, group), shared=shared)


def _splits_by_head(spec: AttentionSpec) -> bool:
    """Whether each head's scores are its own, from what it was projected to alone."""
    rows_normed = spec.query_key_norm is not None and not spec.query_key_norm_per_head
    odd = (
        spec.form is not AttentionForm.INTERFACE, spec.sinks,
        spec.output_gate not in _GATES_BY_HEAD,
        spec.inner_norm, rows_normed, spec.query_key_norm_weight_per_head,
    )  # fmt: skip
    return not any(odd)


def _local_attention(model: ModelSpec, spec: AttentionSpec, group: TensorParallel) -> AttentionSpec:
    degree = group.degree
    heads = divided(spec.num_heads, degree, f"{model.name}'s number of heads")
    kv_heads = divided(spec.num_kv_heads, degree, f"{model.name}'s number of key/value heads")
    return replace(spec, num_heads=heads, num_kv_heads=kv_heads)


def _local_network(
    model: ModelSpec, spec: FeedForwardSpec, group: TensorParallel
) -> FeedForwardSpec:
    width = divided(
        spec.intermediate_size, group.degree, f"the width of {model.name}'s feed-forward network"
    )
    return replace(spec, intermediate_size=width)


def _refuse(model: ModelSpec, why: str) -> None:
    msg = (
        f"tensor_parallel: is not modelled for {model.name} ({model.family}): {why}; the nearest that "
        "is: sharding it over all GPUs, engine='fsdp' or zero_stage=3"
    )
    raise SetupError(msg)
