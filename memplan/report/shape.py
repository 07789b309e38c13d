"""A model in the few sizes that published formulas ask for."""

from memplan.errors import UnsupportedOperationError
from memplan.formulas.flops import FormulaShape
from memplan.model.attention import AttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import LayerSpec
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.spec import ModelSpec


def formula_shape(model: ModelSpec) -> FormulaShape:
    """The model as a decoder of equal layers: the kind of layer that it has most of.

    Raises ``UnsupportedOperationError`` where no layer has attention and a feed-forward network.
    """
    attention, network = _common_parts(model)
    mixture = network if isinstance(network, MixtureSpec) else None
    dense = network.expert if isinstance(network, MixtureSpec) else network
    shared = mixture.shared.intermediate_size if mixture and mixture.shared else 0
    return FormulaShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        value_head_dim=attention.value_head_dim or attention.head_dim,
        intermediate_size=0 if mixture else dense.intermediate_size,
        gated=dense.gated,
        vocab_size=model.vocab_size,
        num_experts=mixture.num_experts if mixture else 0,
        experts_per_token=mixture.num_experts_per_token if mixture else 0,
        expert_size=dense.intermediate_size if mixture else 0,
        shared_size=shared,
    )


def common_layer(model: ModelSpec) -> LayerSpec:
    """The layer of the longest run."""
    runs = [run for stack in model.stacks for run in stack.runs]
    return max(runs, key=lambda run: run.count).layer


def _common_parts(model: ModelSpec) -> tuple[AttentionSpec, FeedForwardSpec | MixtureSpec]:
    """Attention and network of the longest run that has both written down."""
    runs = [run for stack in model.stacks for run in stack.runs]
    for run in sorted(runs, key=lambda each: -each.count):
        attention, network = scores_of(run.layer), run.layer.feed_forward
        if attention is not None and isinstance(network, FeedForwardSpec | MixtureSpec):
            return attention, network
    msg = (
        f"{model.source}: {model.family}: has no layer of attention and feed-forward network, "
        "which is what the published formulas are about"
    )
    raise UnsupportedOperationError(msg)


def scores_of(layer: LayerSpec) -> AttentionSpec | None:
    """What a layer's scores are made of; None where it has none that are written down."""
    attention = layer.attention
    if not isinstance(attention, AttentionSpec | LatentAttentionSpec):
        return None
    return attention.scores if isinstance(attention, LatentAttentionSpec) else attention


def shape_notes(model: ModelSpec) -> tuple[str, ...]:
    """Where the model is not what the formulas mean."""
    notes = []
    if len(model.stacks) > 1:
        notes.append("both stacks are counted as equal layers without cross-attention")
    kinds = {run.layer for stack in model.stacks for run in stack.runs}
    if len(model.stacks) == 1 and len(kinds) > 1:
        notes.append("its layers differ: the commonest one stands for all")
    return tuple(notes)
