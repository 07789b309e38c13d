"""What bounds and speeds need of a model: how many parameters, and of which kind."""

from typing import NamedTuple

from memplan.fast_dataclass import dataclass
from memplan.graph.core.options import TapeOptions
from memplan.graph.model import record_model
from memplan.model.attention import AttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.mixtures import MixtureSpec
from memplan.model.spec import ModelSpec
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """A model's parameters by what splits them, and the widths of what is sent."""

    num_params: int
    expert_params: int = 0
    """Those of routed experts, of ``num_params``."""
    active_params: int
    """Those that one token passes."""
    num_layers: int
    hidden_size: int
    expert_layers: int = 0
    """Layers with routed experts."""
    experts_per_token: int = 0
    num_experts: int = 0
    layer_params: int = 0
    """Of the largest layer."""
    layer_expert_params: int = 0
    """Those of its routed experts."""
    key_value_size: int = 0
    """Numbers of one token's keys and values in one layer."""

    def local_params(self, setup: TrainingSetup) -> float:
        """What one rank has of them before anything is sharded over data; at least.

        Equation: ``(dense + experts / ep) / (tp * pp)``.
        """
        whole = _split(self.num_params, self.expert_params, setup)
        return whole / setup.pipeline_parallel

    def local_layer(self, setup: TrainingSetup) -> float:
        """What one rank has of the largest layer; at least."""
        return _split(self.layer_params, self.layer_expert_params, setup)


def _split(num_params: int, experts: int, setup: TrainingSetup) -> float:
    return (num_params - experts + experts / setup.expert_parallel) / setup.tensor_parallel


def model_sizes(model: ModelSpec) -> ModelSizes:
    """Read off the model's tape and its layers.

    >>> from memplan.sources.models import load_model
    >>> found = model_sizes(load_model("mixtral-8x7b"))
    >>> found.num_experts, found.experts_per_token, found.expert_layers
    (8, 2, 32)
    """
    counted = _counted(model)
    layers = [(run.count, run.layer) for stack in model.stacks for run in stack.runs]
    mixtures = [
        (count, each)
        for count, layer in layers
        if isinstance(each := layer.feed_forward, MixtureSpec)
    ]
    return ModelSizes(
        num_params=counted.total,
        expert_params=counted.routed,
        active_params=counted.active,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        expert_layers=sum(count for count, _ in mixtures),
        experts_per_token=max((each.num_experts_per_token for _, each in mixtures), default=0),
        num_experts=max((each.num_experts for _, each in mixtures), default=0),
        layer_params=counted.largest,
        layer_expert_params=counted.largest_routed,
        key_value_size=max((_key_value_size(layer.attention) for _, layer in layers), default=0),
    )


class _Counted(NamedTuple):
    """Weights of a tape."""

    total: int
    routed: int
    """Of experts."""
    active: int
    """That a token passes."""
    largest: int
    """Of the largest layer."""
    largest_routed: int


def _counted(model: ModelSpec) -> _Counted:
    tape = record_model(model, TapeOptions())
    total = routed = active = 0
    largest = (0, 0)
    for segment in tape.segments:
        if segment.layer is not None:
            own = sum(parameter.num_weights for parameter in segment.parameters)
            of_experts = (
                each.num_weights for each in segment.parameters if each.experts is not None
            )
            largest = max(largest, (own, sum(of_experts)))
        for parameter in segment.parameters:
            count = parameter.num_weights * segment.num_copies
            total += count
            active += parameter.active_numel * segment.num_copies
            if parameter.experts is not None:
                routed += count
    return _Counted(total, routed, active, *largest)


def _key_value_size(spec: object) -> int:
    if isinstance(spec, LatentAttentionSpec):
        spec = spec.scores
    if not isinstance(spec, AttentionSpec):
        return 0
    values = spec.head_dim if spec.value_head_dim is None else spec.value_head_dim
    return spec.num_kv_heads * (spec.head_dim + values)
