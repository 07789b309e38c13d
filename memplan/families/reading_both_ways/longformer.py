"""Longformer: RoBERTa as ``memplan.families.reading_both_ways.encoders`` reads it, with windows in the place of its attention."""

from dataclasses import replace

from memplan.families.llama import join_runs
from memplan.families.reading_both_ways import counted_encoders
from memplan.families.reading_both_ways.encoders import ROBERTA, read_encoder
from memplan.families.reading_both_ways.long_documents import read_windows
from memplan.families.request import ReadRequest, reject_task
from memplan.model.attention import SlidingChunksSpec
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.spec import ModelSpec, Task

VARIATION = replace(
    ROBERTA,
    tasks=(Task.MASKED_LM, Task.BASE, Task.TOKEN_CLASSIFICATION),
    head_activation=Activation.GELU,
)
"""Its classes for these tasks give no token global attention by themselves."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of Longformer."""
    task = reject_task(reader, request, *counted_encoders.FORMS["longformer"].tasks)
    if task not in VARIATION.tasks:
        return counted_encoders.read(reader, request)
    return _longformer(reader, read_encoder(reader, request, VARIATION))


def _longformer(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """A window for each layer, to a multiple of whose widest the class pads sequences."""
    stack = model.stacks[0]
    layer, count = stack.runs[0].layer, stack.num_layers
    windows = read_windows(reader, count)
    heads = reader.integer("num_attention_heads")
    dropout = reader.number("attention_probs_dropout_prob")
    layers = [
        replace(layer, attention=SlidingChunksSpec(num_heads=heads, window=window, dropout=dropout))
        for window in windows
    ]
    stack = replace(stack, runs=join_runs(layers), multiple_of=max(windows), spare_mask=True)
    return replace(model, stacks=(stack,), eager_attention_only=True)
