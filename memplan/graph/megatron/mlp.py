"""Dense networks, and the sum behind each part of a layer.

Megatron-core 0.16.1, core/transformer/mlp.py, core/activations.py, core/fusions/fused_bias_dropout.py.
"""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.megatron.config import Backend, MegatronModule, TransformerConfig
from memplan.graph.megatron.layers import WithBias
from memplan.graph.megatron.recomputation import recompute_into_product
from memplan.graph.modules.basic import dropout
from memplan.graph.modules.fused import megatron
from memplan.graph.modules.handles import Handle
from memplan.graph.operations.elementwise import dropout_probability
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormSpec
from memplan.training.splitting.megatron import RecomputeModule


class MLP(MegatronModule):
    words = "feed-forward network"
    """What messages call it."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: FeedForwardSpec,
        backend: Backend,
        norm: NormSpec | None = None,
    ) -> None:
        self.config, self.gated_linear_unit = config, spec.gated
        self.is_gelu = spec.activation is not Activation.RELU_SQUARED
        width = config.share(spec.intermediate_size, f"the width of {config.name}'s {self.words}")
        column = backend.column if norm is None else backend.normed_column
        self.linear_fc1 = column(
            config, config.hidden_size, width * (1 + spec.gated), bias=spec.bias, norm=norm
        )
        self.linear_fc2 = backend.network_row(config, width, config.hidden_size, bias=spec.bias)

    def forward(self, hidden_states: Handle) -> WithBias:
        intermediate_parallel, bias_parallel = self.linear_fc1(hidden_states)
        if self.is_fused(bias_parallel):
            intermediate_parallel = self.bias_activation(intermediate_parallel, bias_parallel)
        else:
            if bias_parallel is not None:
                intermediate_parallel = intermediate_parallel + bias_parallel
            if self.gated_linear_unit:
                intermediate_parallel = self.glu(intermediate_parallel)
            else:
                intermediate_parallel = self.activation_func(intermediate_parallel)
        output, output_bias = self.linear_fc2(intermediate_parallel)
        return output, output_bias

    def is_fused(self, bias: Handle | None) -> bool:
        """Whether one kernel adds the bias and activates: of GELU it is there with a bias alone."""
        if self.gated_linear_unit:
            return self.config.settings.bias_swiglu_fusion
        return self.is_gelu and bias is not None and self.config.settings.bias_gelu_fusion

    def bias_activation(self, x: Handle, bias: Handle | None) -> Handle:
        if self.gated_linear_unit:
            return megatron.bias_swiglu(x, bias)
        assert bias is not None
        return megatron.bias_gelu(x, bias)

    def glu(self, x: Handle) -> Handle:
        """``silu(gate) * (up + glu_linear_offset)``."""
        x_glu, x_linear = x.split(x.shape[-1] // 2, x.shape[-1] // 2)
        return x_glu.unary(OperationKind.SILU) * (x_linear + 0.0)

    def activation_func(self, x: Handle) -> Handle:
        """torch's GELU, or a squared ReLU that is compiled for itself and keeps its input."""
        return x.unary(OperationKind.GELU if self.is_gelu else OperationKind.RELU2)


class KwaiMLP(MLP):
    """Gate and product in torch's steps, which the second product may compute again itself.

    (kwai/Megatron-Kwai at its tag atc24ae, model/transformer.py, ``ParallelMLP``)
    """

    def forward(self, hidden_states: Handle) -> WithBias:
        run = self.run
        intermediate_parallel, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            intermediate_parallel = intermediate_parallel + bias
        start = len(run.segment.operations)
        output, output_bias = self.linear_fc2(self.activated(intermediate_parallel))
        if self.config.settings.recomputes(RecomputeModule.MLP_ACT):
            recompute_into_product(run, start)
        return output, output_bias

    def activated(self, x: Handle) -> Handle:
        if not self.gated_linear_unit:
            return self.activation_func(x)
        gate, up = x.split(x.shape[-1] // 2, x.shape[-1] // 2)
        return gate.unary(OperationKind.SILU) * up


def bias_dropout_add(
    config: TransformerConfig, x_with_bias: WithBias, residual: Handle, probability: float
) -> Handle:
    """``residual + dropout(x + bias)``, as one kernel or in its steps."""
    x, bias = x_with_bias
    run = x.run
    if config.settings.bias_dropout_fusion and not run.decomposed:
        drops = dropout_probability(run, probability) > 0.0
        return megatron.bias_dropout_add(x, bias, residual, drops=drops)
    if bias is not None:
        x = x + bias
    out = dropout(x, probability)
    out = residual + out
    return out
