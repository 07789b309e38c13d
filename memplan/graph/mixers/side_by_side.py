"""Attention and Mamba's second mixer side by side on one input (``FalconH1DecoderLayer``)."""

from memplan.graph.attention.self_attention import self_attention
from memplan.graph.mixers.mamba2 import mamba2_mixer
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.mixers import SideBySideSpec
from memplan.model.parameters import LayerBlock


def side_by_side(t: Tape, x: Tensor, spec: SideBySideSpec, context: StackContext) -> Tensor:
    """The mixer, then attention; a constant multiplies what each is given and gives."""
    t.block = LayerBlock.MIXER
    mixed = t.scale(mamba2_mixer(t, x, spec.mixer, context))
    t.block = LayerBlock.ATTENTION
    attended = t.scale(self_attention(t, t.scale(x), spec.scores, context))
    out = t.add(mixed, attended)
    t.touch(x, mixed, attended)
    return out
