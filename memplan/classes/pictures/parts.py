"""What classes of pictures write out alike: modules in order, tokens as pictures, scores, dropped samples."""

from collections.abc import Callable, Sequence
from typing import Any

from memplan.graph.modules.attention import matmul
from memplan.graph.modules.basic import Dropout, Linear
from memplan.graph.modules.functional import in_rows_again, read_as, softmax
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock


class InOrder(Module):
    """``torch.nn.Sequential``, and a class that calls its modules in the order in which it names them."""

    def __init__(self, **named: Module) -> None:
        for name, each in named.items():
            setattr(self, name.removeprefix("_"), each)

    def forward(self, x: Handle) -> Handle:
        for each in self.children.values():
            x = each(x)
        return x


class Stages(InOrder):
    """The same, of stages; what each was given is collected where somebody reads it."""

    def forward(self, x: Handle, collected: list[Handle] | None = None) -> Handle:
        for stage_module in self.children.values():
            if collected is not None:
                collected.append(x)
            x = stage_module(x)
        return x


class RowsLinear(Linear):
    """A linear layer whose gradient may come as a picture's does, and is put into rows first."""

    def forward(self, x: Handle) -> Handle:
        return in_rows_again(super().forward(x))


class Projected(Module):
    """Attention, which the class calls by a name of its own, and the layer behind it."""

    block = LayerBlock.ATTENTION

    def __init__(self, name: str, inner: Module, size: int, dropout: float) -> None:
        self.name = name
        setattr(self, name, inner)
        self.output = InOrder(dense=RowsLinear(size, size, bias=True), dropout=Dropout(dropout))

    def forward(self, hidden_states: Handle, *beside: Any) -> Handle:
        self_outputs = self.children[self.name](hidden_states, *beside)
        attention_output: Handle = self.output(self_outputs)
        return attention_output


def read_as_picture(tokens: Handle) -> Handle:
    """Tokens whose gradient comes as a picture's, channel by channel, and stays so from layer to layer."""
    _, count, size = tokens.shape
    return read_as(tokens, (count * size, 1, count))


def stage_layers(
    name: str, rates: Sequence[float], make: Callable[[float], Module], *, behind: bool
) -> LayerList:
    """A stage's layers, which differ in whether they drop anything. The first one of a stage ``behind`` another lets go
    of what that returned, which the encoder's ``layer_outputs`` names until then, and so stands by itself."""
    kinds = [(rate > 0, behind and not at) for at, rate in enumerate(rates)]
    return LayerList(name, kinds, lambda kind: make(float(kind[0])))


def as_picture(tokens: Handle, height: int, width: int) -> Handle:
    """``tokens.permute(0, 2, 1).reshape(batch, channels, height, width)``: a view of rows."""
    batch, _, size = tokens.shape
    turned, shape = tokens.permute(0, 2, 1), (batch, size, height, width)
    return turned.seen_as(*shape) if tokens.is_contiguous else turned.reshape(*shape)


def as_tokens(picture: Handle) -> Handle:
    """``picture.reshape(batch, channels, -1).permute(0, 2, 1)``."""
    batch, size, height, width = picture.shape
    return picture.reshape(batch, size, height * width).permute(0, 2, 1)


def laid_as_picture(tokens: Handle, height: int, width: int) -> Handle:
    """``tokens.reshape(batch, height, width, -1).permute(0, 3, 1, 2).contiguous()``: a copy."""
    batch, _, size = tokens.shape
    return tokens.seen_as(batch, height, width, size).permute(0, 3, 1, 2).contiguous()


def mixed_by_scores(
    query_layer: Handle, key_layer: Handle, value_layer: Handle, dropout: Dropout
) -> Handle:
    """Scores over the root of a head's width, a softmax that names no format, the weighted values."""
    attention_scores = matmul(query_layer, key_layer.transpose(2, 3))
    attention_scores = attention_scores / 2.0
    attention_probs = softmax(attention_scores)
    attention_probs = dropout(attention_probs)
    context_layer = matmul(attention_probs, value_layer)
    context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
    batch, tokens, heads, width = context_layer.shape
    return context_layer.view(batch, tokens, heads * width)


def drop_paths(config: ConfigReader, depth: int) -> list[float]:
    """``torch.linspace(0, drop_path_rate, depth)``."""
    rate = config.number("drop_path_rate", default=0.0)
    return [rate * number / max(1, depth - 1) for number in range(depth)]
