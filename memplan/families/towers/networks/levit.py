"""LeViT's stages: every linear layer has a batch norm for its bias, and scores get trained offsets."""

from itertools import pairwise

from memplan.families.towers.sizes import at_least_one, each_stage
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import CallBody, ChainBody, ResidualBody, TowerBody
from memplan.model.towers.gridded.grids import (
    ForgottenBody,
    NamedBody,
    NormedLinearBody,
    OffsetAttentionBody,
    SampleFactorsBody,
)
from memplan.model.towers.gridded.nets import BatchNormBody, ConvolutionBody, PixelsBody
from memplan.model.towers.parts import ActivationBody

ACTIVE = ActivationBody(activation=Activation.HARDSWISH)


def levit_stages(table: ParameterTable, reader: ConfigReader, sizes: list[int]) -> None:
    """The stem and all stages."""
    depths = at_least_one(reader, "depths")
    _stem(table, reader, sizes[0])
    resolution = reader.integer("image_size") // reader.integer("patch_size")
    for index, depth in enumerate(depths):
        with table.block(f"stages.{index}.layers", count=depth):
            _layer(table, reader, index, len(depths), resolution)
        if index + 1 < len(depths):
            with table.block(f"stages.{index}.downsample"):
                resolution = _downsample(table, reader, sizes, index, resolution)


def _stem(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """Four convolutions, each with twice the channels of the one before."""
    kernel, side = reader.integer("kernel_size"), reader.integer("image_size")
    channels = [reader.integer("num_channels"), *(size // 2**step for step in (3, 2, 1, 0))]
    parts: list[TowerBody] = [PixelsBody(channels=channels[0], image=(side, side), fixed=True)]
    with table.block("embed"):
        for index, (before, after) in enumerate(pairwise(channels)):
            name = f"embedding_layer_{index + 1}"
            table.convolution(name, before, after, kernel, kernel, bias=False)
            table.norm(f"{name}.batch_norm", after)
            if index:
                parts.append(ACTIVE)
            fewer = ConvolutionBody(
                module=name, kernel=kernel, stride=reader.integer("stride", default=2),
                padding=2 * reader.integer("padding", default=1, minimum=0),
            )  # fmt: skip
            parts += [fewer, BatchNormBody(module=f"{name}.batch_norm", channels=after)]
        # The model's variable holds what its embedding gave.
        table.computes(ChainBody(parts=(*parts, NamedBody())))


def _normed_linear(table: ParameterTable, name: str, size: int, out: int) -> None:
    table.linear(f"{name}.linear", size, out, bias=False)
    table.norm(f"{name}.batch_norm", out)


def _added(reader: ConfigReader, part: TowerBody) -> ResidualBody:
    """``LevitResidualLayer``."""
    drops = reader.number("drop_path_rate", default=0.0) > 0
    branch = (part, SampleFactorsBody()) if drops else (part,)
    return ResidualBody(branch=branch)


def _network(size: int, times: int, *, copies: bool) -> CallBody:
    inner = size * times
    return CallBody(
        parts=(
            NormedLinearBody(module="mlp.linear_up", inputs=size, outputs=inner, copies=copies),
            ACTIVE,
            NormedLinearBody(module="mlp.linear_down", inputs=inner, outputs=size),
        )
    )


def _layer(
    table: ParameterTable, reader: ConfigReader, index: int, num_stages: int, resolution: int
) -> None:
    size = each_stage(reader, "hidden_sizes", num_stages)[index]
    key = each_stage(reader, "key_dim", num_stages)[index]
    heads = each_stage(reader, "num_attention_heads", num_stages)[index]
    ratio = each_stage(reader, "attention_ratio", num_stages)[index]
    values = ratio * key * heads
    _normed_linear(table, "attn.queries_keys_values", size, values + 2 * key * heads)
    _normed_linear(table, "attn.projection", values, size)
    table.parameter("attn", "attention_biases", heads, resolution**2)
    # Behind the stem positions lie channel by channel, and sums keep that until a stage ends.
    mixed = OffsetAttentionBody(
        module="attn", size=size, outputs=size, num_heads=heads, key_size=key,
        value_size=ratio * key, copies=index == 0,
    )  # fmt: skip
    times = each_stage(reader, "mlp_ratio", num_stages, minimum=0)[index]
    parts: tuple[TowerBody, ...] = (_added(reader, mixed),)
    if times:
        parts += (_added(reader, _network(size, times, copies=index == 0)),)
    _perceptron(table, size, times)
    table.computes(ChainBody(parts=parts))


def _perceptron(table: ParameterTable, size: int, times: int) -> None:
    if times:
        _normed_linear(table, "mlp.linear_up", size, size * times)
        _normed_linear(table, "mlp.linear_down", size * times, size)


def _downsample(
    table: ParameterTable, reader: ConfigReader, sizes: list[int], index: int, resolution: int
) -> int:
    """``LevitAttentionSubsample`` as ``down_ops`` say; gives the resolution behind it.

    Where the config has none, ``LevitConfig`` makes heads of the stage's key width, four times as
    wide values, a network twice as wide and a stride of two.
    """
    before, after = sizes[index], sizes[index + 1]
    key, heads, times, wider, stride = _down_operation(reader, sizes, index)
    values = times * key * heads
    _normed_linear(table, "attn.keys_values", before, values + key * heads)
    _normed_linear(table, "attn.queries", before, key * heads)
    _normed_linear(table, "attn.projection", values, after)
    table.parameter("attn", "attention_biases", heads, resolution**2)
    _perceptron(table, after, wider)
    mixed = OffsetAttentionBody(
        module="attn", size=before, outputs=after, num_heads=heads, key_size=key,
        value_size=times * key, stride=stride, copies=index == 0,
    )  # fmt: skip
    parts: tuple[TowerBody, ...] = (mixed,)
    if wider:
        parts += (_added(reader, _network(after, wider, copies=False)),)
    # The encoder's variable holds what a stage reads until it returns.
    passed = (ForgottenBody(), NamedBody()) if index else (NamedBody(),)
    table.computes(ChainBody(parts=(*parts, *passed)))
    return (resolution - 1) // stride + 1


def _down_operation(reader: ConfigReader, sizes: list[int], index: int) -> list[int]:
    given = reader.sequence("down_ops")
    if not given:
        key = each_stage(reader, "key_dim", len(sizes))[0]
        return [key, sizes[index] // key, 4, 2, 2]
    row = given[index] if index < len(given) else None
    if not isinstance(row, list) or len(row) != 6 or row[0] != "Subsample":
        error = reader.fail("down_ops", f"row {index} must be 'Subsample' and five whole numbers")
        raise error
    numbers = [each for each in row[1:] if isinstance(each, int) and each >= 0]
    if len(numbers) != 5 or not (numbers[0] and numbers[1] and numbers[4]):
        error = reader.fail("down_ops", f"row {index} must be 'Subsample' and five whole numbers")
        raise error
    return numbers
