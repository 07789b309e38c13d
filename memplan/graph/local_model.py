"""A rank's own model: the heads, network widths and vocabulary rows that it has of a split one."""

from dataclasses import replace

from memplan.errors import SetupError
from memplan.graph.options import TapeOptions
from memplan.model.attention import (
    AttentionForm,
    AttentionSpec,
    OutputGate,
    PositionBias,
    Projection,
)
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, NormPlacement
from memplan.model.networks import FeedForwardSpec
from memplan.model.spec import ModelSpec, Task
from memplan.training.parallelism import TensorParallel

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
    divided(model.num_outputs, group.degree, f"{model.name}'s vocabulary")
    divided(model.vocab_size, group.degree, f"{model.name}'s vocabulary")
    if group.sequence:
        what = "seq_len, of which sequence_parallel gives each rank a share,"
        divided(options.seq_len, group.degree, what)
    stack = model.stacks[0]
    runs = tuple(_local_run(model, run, group) for run in stack.runs)
    return replace(model, stacks=(replace(stack, runs=runs),))


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
    """Refuse what is not one decoder over a plain token table."""
    if len(model.stacks) != 1 or model.task is not Task.CAUSAL_LM:
        _refuse(
            model, f"only decoders with a language model's head are, and this is {model.task.value}"
        )
    stack = model.stacks[0]
    if model.tables or stack.convolution is not None or stack.projected_out:
        _refuse(model, "it has parts beside a decoder's layers")
    spec = stack.embedding
    if spec is None or not _is_plain(spec):
        _refuse(model, "its embedding is more than a token table")
    elif group.sequence and spec.num_positions:
        _refuse(model, "sequence_parallel has no rule for its learned positions")


def _is_plain(spec: EmbeddingSpec) -> bool:
    odd = (
        spec.own_module,
        spec.prompts,
        spec.position_source,
        spec.patch_features,
        spec.extra_rows,
    )
    return not any(odd)


def _local_run(model: ModelSpec, run: LayerRun, group: TensorParallel) -> LayerRun:
    return replace(run, layer=_local_layer(model, run.layer, group))


def _local_layer(model: ModelSpec, layer: LayerSpec, group: TensorParallel) -> LayerSpec:
    attention, network = layer.attention, layer.feed_forward
    if layer.placement not in SPLIT_PLACEMENTS or layer.cross_attention is not None:
        _refuse(model, "its layers are not attention and a network side by side or in turn")
    if not isinstance(attention, AttentionSpec) or not _splits_by_head(attention):
        _refuse(model, "its attention is not one of heads that are independent of one another")
    if not isinstance(network, FeedForwardSpec):
        _refuse(model, "its feed-forward networks are no dense ones")
    assert isinstance(attention, AttentionSpec)
    assert isinstance(network, FeedForwardSpec)
    if attention.projection is not Projection.SEPARATE or network.fused_gate_up:
        _refuse(model, "matrices that are several in one do not split by heads or columns of each")
    return replace(
        layer,
        attention=_local_attention(model, attention, group),
        feed_forward=_local_network(model, network, group),
    )


def _splits_by_head(spec: AttentionSpec) -> bool:
    """Whether each head's scores are its own, from what it was projected to alone."""
    rows_normed = spec.query_key_norm is not None and not spec.query_key_norm_per_head
    odd = (
        spec.form is not AttentionForm.INTERFACE, spec.distances, spec.sinks, spec.own_eager,
        spec.output_gate is not OutputGate.NONE, spec.position_bias is not PositionBias.NONE,
        spec.fills_cache, rows_normed, spec.query_key_norm_weight_per_head,
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
