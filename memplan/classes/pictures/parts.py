"""What classes of pictures write out alike: tokens as pictures, scores, shares of dropped samples."""

from memplan.graph.modules.attention import matmul
from memplan.graph.modules.basic import Dropout
from memplan.graph.modules.functional import softmax
from memplan.graph.modules.handles import Handle
from memplan.model.config import ConfigReader


def as_picture(tokens: Handle, height: int, width: int) -> Handle:
    """``tokens.permute(0, 2, 1).reshape(batch, channels, height, width)``."""
    batch, _, size = tokens.shape
    return tokens.permute(0, 2, 1).reshape(batch, size, height, width)


def as_tokens(picture: Handle) -> Handle:
    """``picture.reshape(batch, channels, -1).permute(0, 2, 1)``."""
    batch, size, height, width = picture.shape
    return picture.reshape(batch, size, height * width).permute(0, 2, 1)


def laid_as_picture(tokens: Handle, height: int, width: int) -> Handle:
    """``tokens.reshape(batch, height, width, -1).permute(0, 3, 1, 2).contiguous()``: a copy."""
    batch, _, size = tokens.shape
    return tokens.reshape(batch, height, width, size).permute(0, 3, 1, 2).contiguous()


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
