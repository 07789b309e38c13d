"""Megatron-core's embedding and local layers, block by block, as its own code asks for them on PyTorch's CUDA build.

Recorded with Megatron-core 0.16.1 and torch 2.13: the second step of two layers 256 wide, sequences of 256 tokens, fusions off.
"""

import json
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator.recording import record_and_walk, tape_options
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.passes import StepPasses
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

RECORDS = json.loads((Path(__file__).parents[1] / "data" / "megatron_events.json").read_text())
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model_type": "gpt2", "n_embd": 256, "n_head": 8, "n_layer": 2, "n_positions": 512,
        "vocab_size": 1024, "tie_word_embeddings": False, "architectures": ["GPT2LMHeadModel"],
    },
    "llama": {
        "model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024,
        "architectures": ["LlamaForCausalLM"],
    },
}  # fmt: skip
FUSIONS = (
    "gradient_accumulation_fusion", "bias_gelu_fusion", "bias_swiglu_fusion", "bias_dropout_fusion",
    "masked_softmax_fusion", "apply_rope_fusion", "wrap_with_ddp",
)  # fmt: skip


def passes_of(record: dict[str, Any]) -> StepPasses:
    options: dict[str, Any] = dict.fromkeys(FUSIONS, False)
    options |= {"transformer_impl": "local", "make_vocab_size_divisible_by": 1}
    if record["recompute_modules"]:
        options["recompute_granularity"] = "selective"
        options["recompute_modules"] = record["recompute_modules"].split(",")
    setup = TrainingSetup(
        num_gpus=1, engine="megatron", seq_len=256, micro_batch_size=record["batch"],  # type: ignore[arg-type]
        precision="bf16", dropout=record["dropout"], engine_options=options,  # type: ignore[arg-type]
    )  # fmt: skip
    model = load_model(MODELS[record["model"]], "causal-lm")
    return record_and_walk(model, tape_options(setup.resolve(None), load_gpu("h100")))[1]


def events_of(passes: StepPasses, way: str) -> list[int]:
    """Blocks of 512 bytes that come, and negative ones that go, but for the head's."""
    found: list[int] = []
    for each in getattr(passes, way):
        if each.segment.name not in ("embedding", "decoder.layers"):
            continue
        profile = each.profile
        intervals = [profile] if way == "forward" else profile.intervals
        events = [event for interval in intervals for event in interval.events]
        for _ in range(each.repeats):
            sizes: dict[object, int] = {}
            for key, size in events:
                if size:
                    sizes[key] = size
                gone = sizes.pop(key, 0) or getattr(key, "num_bytes", 0) if not size else 0
                found += [units for units in ((size - gone) // ALLOCATION_ROUNDING,) if units]
    return found


@pytest.mark.parametrize(
    "record", RECORDS, ids=lambda each: f"{each['model']} {each['recompute_modules']}"
)
def test_layers_ask_as_megatron_core_does(record: dict[str, Any]) -> None:
    """To the event, but where attention alone is run again: a gradient that is no leaf's own layout is copied there."""
    passes = passes_of(record)
    assert events_of(passes, "forward") == record["forward"]
    mine, theirs = events_of(passes, "backward"), record["backward"]
    blocks = SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
    elsewhere = max(len(mine), len(theirs)) - sum(block.size for block in blocks)
    assert elsewhere == (6 if record["recompute_modules"] == "core_attn" else 0)
