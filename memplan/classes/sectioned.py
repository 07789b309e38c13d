"""Rotary tables of three axes, in the place of a text model's own."""

from memplan.graph.attention.rotary import sectioned_tables
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import RotaryEmbedding, Tables


class SectionedRotaryEmbedding(RotaryEmbedding):
    """Tables of time, height and width for each sequence, of which one is put together.

    (transformers 5.23, models/qwen2_vl/modeling_qwen2_vl.py, ``Qwen2VLRotaryEmbedding``)
    """

    def forward(self, x: Handle, positions: Handle, window: int | None = None) -> Tables:
        """Of all positions, in the format of ``x``."""
        del positions, window
        run, (batch, length, _) = self.run, x.shape
        self.hold_frequencies(self.width)
        cos, sin = sectioned_tables(run, batch * length, self.width, x.dtype)
        shape = batch, length, self.width
        for each in (cos, sin):
            each.storage.held = False  # names hold them
        return Handle(run, cos, shape), Handle(run, sin, shape)
