"""Parts of a model that are counted but not written down."""

from memplan.dtypes import DType
from memplan.graph.tape import Gradient, Tape
from memplan.model.parameters import ParameterBlock


def record_tables(t: Tape, blocks: tuple[ParameterBlock, ...]) -> None:
    """Declare the blocks' weights, each with a gradient that appears in backward.

    They stand before the rest of the model, as the towers of vision-language models do.
    """
    for block in blocks:
        t.begin(block.name, repeat=block.count)
        weights = [
            t.parameter(f"{each.module}.{each.name}", *each.shape, module=each.module)
            for each in block.parameters
        ]
        out = t.tensor(0, DType.FP32)
        t.record("counted", weights, (out,), gradients=(Gradient.FRESH,) * len(weights))
        t.end(out)
