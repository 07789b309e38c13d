"""Encoders of text: what every base model and every layer says, and what the base model returns."""

from typing import NamedTuple

from memplan.classes.base import Base
from memplan.graph.modules.basic import Embedding, Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ModelPart

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
"""What others read of ``torch.nn.LayerNorm``."""


class Encoded(NamedTuple):
    """What a base model returns."""

    last_hidden_state: Handle
    pooler_output: Handle | None = None


class EncoderLayer(Module):
    """A layer that says what others read of it."""

    def facts(self) -> LayerSpec:
        """Its heads, widths, norms and dropouts."""
        raise NotImplementedError


class Encoder(Base):
    """A base model whose tokens see one another."""

    eager_only = False
    """The class has no other attention than the one written out in Python."""
    recomputes = True
    """Its layers can be checkpointed."""
    classifier_dropout_key = "classifier_dropout"
    """What the config calls the dropout before classes."""
    classifier_pooling = ""
    """What its classifier of sequences makes of their tokens, where the config says it."""
    is_declared_last = False
    """Tasks' classes declare their heads before it."""
    num_regions = 0
    """Regions of a picture that stand beside its tokens."""
    ties_output = True
    """The output matrix can be the token table."""
    ties = True
    """The output matrix is the token table where the config says nothing of it."""

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        raise NotImplementedError

    @property
    def token_table(self) -> Embedding:
        """The table that tokens are looked up in."""
        found = next(each for _, each in self.modules() if isinstance(each, Embedding))
        return found

    @property
    def layer_list(self) -> LayerList:
        """Its layers."""
        return next(each for _, each in self.modules() if isinstance(each, LayerList))

    @property
    def num_positions(self) -> int:
        """Rows of its table of positions; 0 where it has none."""
        names = dict(self.modules())
        table = names.get("position_embeddings")
        return table.weight.shape[0] if isinstance(table, Embedding) else 0

    def leave_unread(self, sequence_output: Handle) -> list[Handle]:  # noqa: ARG002
        """Declare what it has that no loss reads, or run it, once the rest has returned: its own names are gone
        by then. Returns names of what is kept of it."""
        return []

    def hidden_size(self, config: ConfigReader) -> int:
        """Width of what it returns."""
        return config.integer("hidden_size")

    def last_norm(self) -> NormSpec | None:
        """The norm behind its layers, where it has one."""
        return None

    def context_length(self, config: ConfigReader) -> int:
        """Positions that tokens can take."""
        return config.integer("max_position_embeddings")


class Unpadding(Module):
    """``x[:, :-padding_len]``: what the head reads of padded sequences, where it begins."""

    segment = "head", ModelPart.HEAD

    def forward(self, x: Handle, length: int) -> Handle:
        """Tokens that were given."""
        return x.narrow(length, dim=1)

    def of(self, x: Handle, length: int) -> Handle:
        """The same of what may be whole, or behind what the head has begun with."""
        if x.shape[1] == length:
            return x
        if self.run.segment.part is ModelPart.HEAD:
            return self.forward(x, length)
        made: Handle = self(x, length)
        return made


def read_no_decoder(config: ConfigReader) -> None:
    """Refuse the same class as a decoder."""
    require_flag(config, "is_decoder", value=False, problem="only the encoder is supported")


def require_flag(config: ConfigReader, key: str, *, value: bool, problem: str) -> None:
    """Refuse a config whose flag is not the one that is supported."""
    if config.flag(key, default=value) is not value:
        error = config.fail(key, f"{problem}; set it to {str(value).lower()}")
        raise error


def first_token(x: Handle) -> Handle:
    """``x[:, 0]``."""
    run, (batch, _, width) = x.run, x.shape
    made = run.slice(x.record, batch * width)
    return x.leads_to(Handle(run, made, (batch, width), x.strides[::2]), in_rows(x.shape))


def idle(module: Module) -> None:
    """Declare what no loss reads: of it only autocast's copies are kept to the end of the forward pass."""
    from memplan.graph.counted import idle_linear  # only for such parts

    run = module.run
    for each in (module, *(inner for _, inner in module.modules())):
        found = [each.parameter(weight) for weight in each.weights.values()]
        for parameter in found:
            parameter.unused = True
            run.cast_weight(parameter)
        if isinstance(each, Linear):
            idle_linear(run, found[0])
