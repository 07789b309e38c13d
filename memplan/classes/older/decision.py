"""Decision Transformer: GPT-2's layers over returns, states and actions, three tokens for each step.

Its class returns predictions and has no loss; what is meant is the paper's, the mean squared error of the
actions (arXiv:2106.01345, section 3). Predictions of states and returns are made, and lead to nothing.

(transformers 5.23, models/decision_transformer/modeling_decision_transformer.py)
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from memplan.classes.heads import MakeBase, Task, finish
from memplan.classes.older.gpt2 import GPT2Model, hidden_size
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import ActivationModule, Embedding, LayerNorm, Linear, spare
from memplan.graph.modules.functional import add_in_place, linear
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Site
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.run import Run
from memplan.graph.modules.unread import UnreadGraph
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.networks import Activation

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec

TOKENS_PER_STEP = 3
"""A return, a state and an action."""


def given(run: Run, *shape: int, dtype: DType | None = None) -> Handle:
    """What a batch holds."""
    numel = 1
    for size in shape:
        numel *= size
    return Handle(run, from_batch(run, numel, dtype or run.compute), shape)


class DecisionTransformer(Task):
    """``DecisionTransformerModel``, and the loss that is meant."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, base)
        hidden = hidden_size(config)
        sizes = self.base
        assert isinstance(sizes, DecisionTransformerGPT2Model)
        self.state_dim, self.act_dim = sizes.state_dim, sizes.act_dim
        self.embed_timestep = Embedding(sizes.max_ep_len, hidden)
        self.embed_return = Linear(1, hidden, bias=True)
        self.embed_state = Linear(self.state_dim, hidden, bias=True)
        self.embed_action = Linear(self.act_dim, hidden, bias=True)
        self.embed_ln = LayerNorm(hidden)
        self.predict_state = Linear(hidden, self.state_dim, bias=True)
        self.predict_action = Predicting(hidden, self.act_dim, squashed=config.flag("action_tanh"))
        self.predict_return = Linear(hidden, 1, bias=True)

    def forward(self, batch: int, length: int, received: Handle | None) -> None:  # noqa: ARG002
        run = self.run
        spare(self.base.children["wte"])
        stacked_inputs, *_embeddings = self.stacked(batch, length)
        x = self.base(batch, TOKENS_PER_STEP * length, stacked_inputs)
        self.begin_head(x)
        x = x.view(batch, length, TOKENS_PER_STEP, x.shape[-1]).permute(0, 2, 1, 3)
        graph = UnreadGraph(run)
        with graph:
            return_preds = apart(self.predict_return, x.select(1))
            state_preds = apart(self.predict_state, x.select(1))
        action_preds = self.predict_action(x.select(1))
        loss = squared_error(action_preds)
        for each in (self.predict_return, self.predict_state):
            for weight in each.parameters():
                run.parameters[weight].unused = True
        finish(self, loss)
        del return_preds, state_preds

    def stacked(self, batch: int, length: int) -> list[Handle]:
        """Each kind projected and given its step's vector, the three in turn, a norm; what has a name beside it."""
        run = self.run
        run.inputs.clear()  # there are no tokens
        states, actions = (
            given(run, batch, length, self.state_dim),
            given(run, batch, length, self.act_dim),
        )
        _rewards, returns = given(run, batch, length, 1), given(run, batch, length, 1)
        timesteps, _mask = (given(run, batch, length, dtype=DType.INT64) for _ in range(2))
        state_embeddings = self.embed_state(states)
        action_embeddings = self.embed_action(actions)
        returns_embeddings = self.embed_return(returns)
        time_embeddings = self.embed_timestep((batch, length), timesteps)
        state_embeddings = state_embeddings + time_embeddings
        action_embeddings = action_embeddings + time_embeddings
        returns_embeddings = returns_embeddings + time_embeddings
        kinds = returns_embeddings, state_embeddings, action_embeddings
        stacked_inputs = concatenate(*(each.unsqueeze(1) for each in kinds), dim=1)
        stacked_inputs = stacked_inputs.permute(0, 2, 1, 3).reshape(
            batch, TOKENS_PER_STEP * length, self.spec.hidden_size
        )
        stacked_inputs = self.embed_ln(stacked_inputs)
        return [stacked_inputs, *kinds, time_embeddings]


class Predicting(Module):
    """``predict_action``: a linear layer, and a tanh where the config says so."""

    def __init__(self, hidden: int, width: int, *, squashed: bool) -> None:
        setattr(self, "0", Linear(hidden, width, bias=True))
        if squashed:
            setattr(self, "1", ActivationModule(Activation.TANH))

    def forward(self, x: Handle) -> Handle:
        """One after the other."""
        first, *rest = self.children.values()
        assert isinstance(first, Linear)
        x = apart(first, x)
        for each in rest:
            x = each(x)
        return x


def apart(layer: Linear, x: Handle) -> Handle:
    """A linear layer on rows that do not follow one another: a product, then a sum."""
    made = linear(x, layer, layer.weight)
    addend = layer.run.cast_weight(layer.parameter(layer.bias))
    return add_in_place(made, Handle(layer.run, addend, layer.bias.shape))


def squared_error(predicted: Handle) -> Tensor:
    """``((predicted - target) ** 2).mean()``."""
    run, error = predicted.run, predicted.run.tensor(predicted.numel, predicted.dtype)
    run.record(OperationKind.SUB, (predicted.record,), (error,), gradients=(Gradient.ALIAS,))
    squared = run.square(error)
    loss = run.tensor(1, squared.dtype)
    run.record(
        OperationKind.MEAN, (squared,), (loss,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(RESULT,),
    )  # fmt: skip
    return loss


class DecisionTransformerGPT2Model(GPT2Model):
    prefix = "encoder"
    steps = True
    checkpoints = False
    tasks: ClassVar[Mapping[TaskKind, type[Any]]] = {TaskKind.BASE: DecisionTransformer}

    def __init__(self, config: ConfigReader) -> None:
        key = "add_cross_attention"
        if config.flag(key):
            problem = "true is not modelled: nothing is given to attend to; set it to false"
            raise config.fail(key, problem)
        super().__init__(config)
        self.state_dim, self.act_dim = config.integer("state_dim"), config.integer("act_dim")
        self.max_ep_len = config.integer("max_ep_len")

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """Its tables stand in one segment with modules of the class around it."""
        owns = super().attach(site, path, within)
        for name in (self.table, self.positions):
            self.children[name].attach(site, f"{path}.{name}", f"{path}.{name}")
        return owns

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        inputs_embeds = received
        assert inputs_embeds is not None
        run, shape = self.run, (batch, length)
        stacked = made_by(run, OperationKind.REPEAT, shape, DType.INT64)
        ids = made_by(run, OperationKind.ZEROS, shape, DType.INT64)
        mask = self.masks(batch, length)[None]
        position_embeds = self.wpe(shape, ids)
        x = inputs_embeds + position_embeds
        x = self.drop(x)
        for layer in self.h:
            x = layer(x, mask)
        x = self.ln_f(x)
        del stacked
        return x
