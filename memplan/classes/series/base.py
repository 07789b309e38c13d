"""What models of time series are given, how it is scaled and cut, and what their classes forecast.

(transformers 5.23: models/patchtst, models/patchtsmixer)
"""

from typing import Any

from memplan.classes.pictures.base import PictureModel, PictureTask
from memplan.classes.sensed.counted import Parts
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind as Kinds
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import attention_function, in_heads, unwidened_attention
from memplan.graph.modules.basic import Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.grids import BatchNorm
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, WeightRole

PREDICTION, PRETRAINING, REGRESSION = "ForPrediction", "ForPretraining", "ForRegression"
PARAMETERS_OF = {"student_t": 3, "normal": 2, "negative_binomial": 2}
"""Numbers that each distribution needs (``transformers.time_series_utils``)."""


def num_patches(config: ConfigReader) -> int:
    """Patches of a series."""
    length = config.integer("patch_length")
    whole = max(config.integer("context_length"), length)
    return (whole - length) // config.integer("patch_stride") + 1


class SeriesModel(PictureModel):
    """A base model that is given series of several channels."""

    prefix = "model"

    def __init__(self, config: ConfigReader) -> None:
        self.width, self.context = config.integer("d_model"), num_patches(config)
        self.channels = config.integer("num_input_channels")
        self.length, self.patch = (
            config.integer(key) for key in ("context_length", "patch_length")
        )
        scaling = config.raw("scaling")
        self.scaling = "std" if scaling is True else scaling
        # Classes that forecast the values themselves are written down.
        self.forecasts = config.text("loss", default="mse") == "mse"

    def inputs(self) -> Handle:
        """The batch's series, in fp32 where autocast casts."""
        run = self.run
        shape = run.options.batch_size, self.length, self.channels
        dtype = DType.FP32 if run.autocast is not None else run.compute
        numel = shape[0] * self.length * self.channels
        return Handle(run, from_batch(run, numel, dtype), shape)

    def scaled(self, data: Handle, observed: Handle) -> tuple[Handle, Handle, Handle]:
        """Series less their means, over their deviations, and both of these."""
        batch, _, channels = data.shape
        each, dtype = (batch, 1, channels), data.dtype
        if self.scaling not in ("std", "mean"):
            loc, scale = (made_from(Kinds.MEAN, each, dtype, observed) for _ in range(2))
            return data, loc, scale
        denominator = made_from(Kinds.SUM, each, dtype, observed)
        product = data.apart(Kinds.MUL, observed)
        loc = made_from(Kinds.SUM, each, dtype, product)
        del product
        if self.scaling == "mean":
            scale = loc.apart(Kinds.WHERE, denominator)
            return data.apart(Kinds.DIV, scale), loc, scale
        moved = data.apart(Kinds.SUB, loc)
        product = moved.apart(Kinds.MUL, observed)
        del moved
        squared = product.apart(Kinds.POW)
        del product
        variance = made_from(Kinds.SUM, each, dtype, squared)
        del squared
        scale = variance.apart(Kinds.SQRT)
        return data.apart(Kinds.SUB, loc).apart(Kinds.DIV, scale), loc, scale

    def observed(self, data: Handle) -> Handle:
        """``torch.ones_like(data)``."""
        return made_by(self.run, Kinds.ONES, data.shape, data.dtype)

    def patches(self, data: Handle) -> Handle:
        """A copy in patches, by channels."""
        shape = data.shape[0], self.channels, self.context, self.patch
        return made_from(Kinds.CLONE, shape, data.dtype, data)


def positions(config: ConfigReader, rows: int, size: int) -> Weight:
    """Sinusoids are a parameter that is not trained."""
    kind = config.text("positional_encoding_type", default="sincos")
    return Weight(rows, size, trainable=kind != "sincos")


class Turned(Module):
    """A batch norm of each channel of tokens."""

    def __init__(self, size: int) -> None:
        self.batchnorm = BatchNorm(size)

    def forward(self, inputs: Handle) -> Handle:
        output = inputs.transpose(1, 2)
        output = self.batchnorm(output)
        return output.transpose(1, 2)


def norm_of(size: int, *, batch: bool) -> Module:
    """Of tokens."""
    return Turned(size) if batch else LayerNorm(size)


class SeriesAttention(Module):
    """Between tokens of three dimensions."""

    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, heads_key: str, dropout: float) -> None:
        size, heads = config.integer("d_model"), config.integer(heads_key, default=1)
        self.head_dim, self.rate = config.divide("d_model", size, heads_key, heads), dropout
        self.k_proj = Linear(size, size, bias=True, role=WeightRole.QUERY_KEY)
        self.v_proj = Linear(size, size, bias=True)
        self.q_proj = Linear(size, size, bias=True, role=WeightRole.QUERY_KEY)
        self.out_proj = Linear(size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT)

    def forward(self, x: Handle) -> tuple[Handle, Handle | None]:
        query, key, value = (
            in_heads(each(x), self.head_dim) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = attention_function(self.run, unwidened_attention, causal=False)
        attn_output, attn_weights = attend(query, key, value, None, self.rate)
        attn_output = attn_output.reshape(*x.shape[:2], -1)
        attn_output = self.out_proj(attn_output)
        return attn_output, attn_weights


def projection(config: ConfigReader, features: int, out: int) -> Module:
    """A linear layer to the values, or one for each parameter of their distribution.

    The mean of squares is the loss where the config names none.
    """
    if config.text("loss", default="mse") == "mse":
        return Linear(features, out, bias=True)
    kind = config.text("distribution_output", default="student_t")
    count = PARAMETERS_OF[config.choice("distribution_output", kind, PARAMETERS_OF)]
    layers = {str(index): Linear(features, out, bias=True) for index in range(count)}
    return Parts(proj=Parts(**layers))


class SeriesTask(PictureTask):
    """Its operations are not written down."""

    is_counted = True

    def add_head(self, config: ConfigReader) -> None:
        """A linear layer of this name."""
        name, *sizes = self.sizes(config)
        setattr(self, "head", Parts(**{name: Linear(*sizes, bias=True)}))  # noqa: B010

    def sizes(self, config: ConfigReader) -> tuple[Any, ...]:
        """How its layer is called, what it reads and gives."""
        raise NotImplementedError


class ForPrediction(PictureTask):
    """Coming values, scaled back by each series' own statistics, and the mean of their squared errors."""

    def forecast(self, embedding: Handle) -> Handle:
        """Of each channel."""
        raise NotImplementedError

    def loss_of(self, patch_input: Handle, *others: Handle) -> Tensor:
        loc, scale, last_hidden_state = others
        run = self.run
        y_hat = self.forecast(last_hidden_state).transpose(1, 2)
        y_hat_out = y_hat * scale + loc
        del y_hat, patch_input
        run.returned.append(y_hat_out.record)
        run.give_out(y_hat_out.record)
        wanted, loss = (
            from_batch(run, y_hat_out.numel, y_hat_out.dtype),
            run.tensor(1, y_hat_out.dtype),
        )
        run.record(
            Kinds.MSE_LOSS, (y_hat_out.record, wanted), (loss,), saves=(y_hat_out.record, wanted),
            gradients=(Gradient.FRESH, Gradient.NONE),
        )  # fmt: skip
        return loss


def dropped(config: ConfigReader, key: str) -> Dropout:
    """Where the config says nothing nothing is dropped."""
    return Dropout(config.number(key, default=0.0))
