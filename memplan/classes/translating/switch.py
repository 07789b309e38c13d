"""Switch Transformers: T5's blocks, of which some have experts of a limited capacity.

(transformers 5.23, models/switch_transformers/modeling_switch_transformers.py)
"""

from memplan.classes.translating.t5 import (
    BlockKind,
    DenseActDense,
    T5Block,
    T5LayerNorm,
    T5Model,
    T5Stack,
)
from memplan.dtypes import DType
from memplan.families.llama import named_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import ExpertShare, Parameter
from memplan.graph.modules.basic import ActivationModule, Dropout, Linear
from memplan.graph.modules.functional import add_rows, index, jittered, linear, made_from, softmax
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.masks import padded_mask
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.spec import Tying
from memplan.units import ceil_div

MOST_PRODUCTS = 16
"""Experts that are written down one by one; of more, as many at a time as make so many products."""


class ExpertLinear(Linear):
    """A linear layer of one expert, or those of ``at_once`` experts side by side."""

    at_once = 1

    def __init__(self, in_features: int, out_features: int, num_experts: int) -> None:
        super().__init__(in_features, out_features)
        self.share = ExpertShare(num_experts, 1)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """The matrices of so many experts."""
        rows, columns = weight.shape
        made = self.run.matrix(name, self.at_once * rows, columns, role=weight.role)
        made.experts, made.num_modules = self.share, self.at_once
        return made

    def forward(self, x: Handle) -> Handle:
        if self.at_once == 1:
            return linear(x, self, self.weight)
        run, rows = self.run, x.shape[0]
        factor = run.cast_weight(self.parameter(self.weight))
        x = x if run.autocast is None else x.to(run.autocast)
        made = empty(run, (rows, self.out_features), x.dtype)
        run.record(
            OperationKind.LINEAR, (x.record, factor), (made.record,), saves=(factor, x.record),
            gradients=(Gradient.FRESH, Gradient.VIEW),
            flops=2 * made.numel * self.in_features,
        )  # fmt: skip
        return made


class SwitchTransformersDenseActDense(DenseActDense):
    """Never gated."""

    def __init__(self, config: ConfigReader, num_experts: int = 0) -> None:
        hidden, inner = config.integer("d_model"), config.integer("d_ff")
        key = "dense_act_fn"
        kind = named_activation(config, key, config.text(key, default="relu"))
        self.spec = FeedForwardSpec(intermediate_size=inner, activation=kind)
        if num_experts:
            self.wi = ExpertLinear(hidden, inner, num_experts)
            self.wo = ExpertLinear(inner, hidden, num_experts)
        else:
            self.wi, self.wo = Linear(hidden, inner), Linear(inner, hidden)
        self.dropout = Dropout(config.number("dropout_rate"))
        self.act = ActivationModule(kind)


ROUTER_DTYPES = {"float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16}


class Classifier(Module):
    """The router's ``torch.nn.Linear``, held in the router's format from the first step on."""

    def __init__(self, config: ConfigReader, num_experts: int, dtype: DType) -> None:
        hidden = config.integer("d_model")
        self.weight = Weight(
            num_experts, hidden, role=WeightRole.ROUTER, of_linear=True, dtype=dtype
        )
        if config.flag("router_bias"):
            self.bias = Weight(num_experts, role=WeightRole.OTHER, dtype=dtype)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """It is never packed."""
        return self.run.parameter(name, *weight.shape, role=weight.role, dtype=weight.dtype)

    def forward(self, x: Handle) -> Handle:
        return linear(x, self, self.weight, self.weights.get("bias"))


class SwitchTransformersTop1Router(Module):
    def __init__(self, config: ConfigReader) -> None:
        key = "router_dtype"
        name = config.choice(key, config.text(key, default="float32"), ROUTER_DTYPES)
        self.num_experts, self.dtype = config.integer("num_experts"), ROUTER_DTYPES[name]
        self.classifier = Classifier(config, self.num_experts, self.dtype)
        self.jitter_noise = config.number("router_jitter_noise")

    def forward(self, x: Handle) -> tuple[Handle, Handle, Handle]:
        shape = *x.shape[:-1], self.num_experts
        input_dtype = x.dtype
        x = x.to(self.dtype)
        if self.jitter_noise > 0:
            x = jittered(x)
        router_logits = self.classifier(x)
        router_probs = softmax(router_logits, dtype=self.dtype).to(input_dtype)
        expert_index = made_from(OperationKind.GUMBEL, shape[:-1], DType.INT64, router_probs)
        expert_index = made_from(OperationKind.SCATTER, shape, DType.INT64, expert_index)
        token_priority = expert_index.apart(OperationKind.CUMSUM)
        expert_capacity_mask = token_priority.apart(OperationKind.LE, dtype=DType.BOOL)
        expert_index = expert_index.apart(OperationKind.MUL, expert_capacity_mask)
        router_probs = greatest(router_probs)
        return expert_index, router_probs, router_logits


def greatest(x: Handle) -> Handle:
    """``torch.max(x, dim=-1).values.unsqueeze(-1)``: keeps where they are."""
    run, shape = x.run, (*x.shape[:-1], 1)
    values, places = empty(run, shape, x.dtype), empty(run, shape, DType.INT64)
    run.record(
        OperationKind.TOPK, (x.record,), (values.record, places.record), saves=(places.record,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return values


class SwitchTransformersExperts(Module):
    """Each, a module, takes the rows of its tokens, which are taken as equally many up to its capacity."""

    block = LayerBlock.EXPERTS

    def __init__(self, config: ConfigReader) -> None:
        self.num_experts = config.integer("num_experts")
        self.capacity = config.integer("expert_capacity")
        for number in range(self.num_experts):
            expert = SwitchTransformersDenseActDense(config, self.num_experts)
            setattr(self, f"expert_{number}", expert)

    def forward(
        self, x: Handle, selected_experts: Handle, routing_weights: Handle, batch: int
    ) -> Handle:
        run, (tokens, width) = self.run, x.shape
        final_hidden_states = made_by(run, OperationKind.ZEROS, x.shape, x.dtype)
        expert_hit = made_by(run, OperationKind.GT, (self.num_experts,), DType.INT64)
        rows = min(ceil_div(tokens, self.num_experts), self.capacity * batch)
        for number, count in self.turns():
            found = made_from(OperationKind.INDEX, (count * tokens,), DType.INT64, selected_experts)
            found = made_from(OperationKind.SORT, (2 * count * rows,), DType.INT64, found)
            current_state = index(x.seen_as(1, tokens, width), found, (count * rows, width))
            current_hidden_states = self.expert(number, count)(current_state) * index(
                routing_weights, found, (count * rows, 1)
            )
            final_hidden_states = add_rows(
                final_hidden_states, current_hidden_states.to(x.dtype), found
            )
        del expert_hit
        return final_hidden_states

    def turns(self) -> list[tuple[int, int]]:
        """The first and the number of those that are written down at once: one where each has an adapter or is packed."""
        run, count = self.run, self.num_experts
        apart = run.options.quantizer is not None or run.adaptation is not None
        step = 1 if apart else ceil_div(count, MOST_PRODUCTS)
        return [(first, min(step, count - first)) for first in range(0, count, step)]

    def expert(self, number: int, count: int) -> Module:
        """One of them, for as many as stand behind it."""
        found = self.children[f"expert_{number}"]
        for each in found.children.values():
            if isinstance(each, ExpertLinear):
                each.at_once = count
        return found


class SwitchTransformersSparseMLP(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.router = SwitchTransformersTop1Router(config)
        self.experts = SwitchTransformersExperts(config)

    def facts(self, expert: FeedForwardSpec) -> MixtureSpec:
        """What others read of it."""
        return MixtureSpec(
            num_experts=self.router.num_experts,
            num_experts_per_token=1,
            expert=expert,
            in_own_way=True,
        )

    def forward(self, x: Handle) -> Handle:
        batch, length, hidden_dim = x.shape
        selected_experts, routing_weights, _ = self.router(x)
        x = x.seen_as(-1, hidden_dim)
        routing_weights = routing_weights.view(-1, 1)
        x = self.experts(x, selected_experts, routing_weights, batch)
        return x.reshape(batch, length, hidden_dim)


class SwitchTransformersLayerFF(Module):
    def __init__(self, config: ConfigReader, *, is_sparse: bool) -> None:
        made = SwitchTransformersSparseMLP if is_sparse else SwitchTransformersDenseActDense
        self.mlp: Module = made(config)
        self.layer_norm = T5LayerNorm(config.integer("d_model"))
        self.dropout = Dropout(config.number("dropout_rate"))

    def forward(self, x: Handle) -> Handle:
        forwarded_states = self.layer_norm(x)
        forwarded_states = self.mlp(forwarded_states)
        output = x + self.dropout(forwarded_states)
        return output


class SwitchTransformersBlock(T5Block):
    def network(self, config: ConfigReader, kind: BlockKind) -> Module:
        """Experts in some layers."""
        return SwitchTransformersLayerFF(config, is_sparse=kind.sparse)

    def network_facts(self) -> FeedForwardSpec | MixtureSpec:
        """What others read of them."""
        dense = super().network_facts()
        assert isinstance(dense, FeedForwardSpec)
        mixtures = (e for _, e in self.modules() if isinstance(e, SwitchTransformersSparseMLP))
        return next((each.facts(dense) for each in mixtures), dense)


class SwitchTransformersStack(T5Stack):
    block_class = SwitchTransformersBlock

    def kinds(self, config: ConfigReader, count: int) -> list[BlockKind]:
        """Every how many layers there are experts; 0: never.

        Derived from the number of sparse layers, unless the file says it: that comes last and wins
        (``SwitchTransformersConfig.__post_init__``).
        """
        step = config.optional_integer(f"{self.name}_sparse_step", minimum=0)
        if step is None:
            sparse = config.integer(f"num_sparse_{self.name}_layers", minimum=0)
            step = count // sparse if sparse else count
        return [
            BlockKind(number == 0, sparse=step == 1 or (step > 0 and number % step == 1))
            for number in range(count)
        ]

    def mask(self, batch: int, length: int, memory: Handle | None) -> Handle | None:
        """Both are made of ones for the padding, though nothing is padding."""
        if memory is not None:
            return padded_mask(self.run, batch, length)
        return made_by(self.run, OperationKind.MASK, (batch, 1, 1, length), self.run.compute)


class SwitchTransformersModel(T5Model):
    prefix = "switch_transformers"
    always_tied = False
    eager_only = True
    stack_class = SwitchTransformersStack

    @property
    def tying(self) -> Tying:
        """The class does as the file says."""
        return Tying.CLEAR
