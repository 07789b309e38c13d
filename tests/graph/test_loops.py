"""Loops of which some turns are recorded are the tape that all turns would have written."""

from collections.abc import Hashable, Iterator
from typing import Any

import pytest

import memplan
from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Operation, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.model import record_model
from memplan.graph.modules import loops

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "vocab_size": 500, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 500,
    "intermediate_size": 256, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
    },
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"seq_len": 1024},
    "padded rows": {"seq_len": 1000, "batch_size": 2},
    "autocast": {"seq_len": 640, "weights": DType.FP32, "autocast": DType.BF16},
    "checkpointed": {"seq_len": 640, "checkpointed_layers": 1.0},
    "as many as are recorded": {"seq_len": 64 * (loops.FIRST + loops.LAST)},
    "one more": {"seq_len": 64 * (loops.FIRST + loops.LAST) + 64},
}


class _Numbered:
    """Things by the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __call__(self, thing: object) -> int:
        return self._numbers.setdefault(id(thing), len(self._numbers))


def _written(operation: Operation, number: _Numbered) -> Iterator[Hashable]:
    yield operation.kind
    for each in (*operation.inputs, *operation.outputs):
        yield number(each), number(each.storage), each.numel, each.dtype, each.requires_grad
        yield each.by_channel, each.by_column, each.by_head, each.is_flat
    yield from (number(each) for each in (*operation.held, *operation.outside))
    yield tuple(operation.gradients)
    yield tuple(operation.forward_scratch), tuple(operation.backward_scratch), operation.flops
    yield operation.keeps, operation.keeps_weight, operation.saves_output


def _of_storages(segment: Segment, number: _Numbered) -> Iterator[Hashable]:
    found = {tensor.storage for each in segment.operations for tensor in each.outputs}
    yield from sorted(
        (number(each), each.last_read, each.held, each.kept_by_maker) for each in found
    )
    # Of those that go at one place, which goes first.
    yield [number(each) for each in sorted(found, key=lambda each: each.touched) if each.touched]  # type: ignore[misc]


def _described(tape: Tape) -> list[object]:
    number, found = _Numbered(), list[object]()
    for segment in tape.segments:
        found += [[*_written(each, number)] for each in segment.operations]
        found += _of_storages(segment, number)
        found += [segment.entered, segment.left, segment.input_let_go, segment.repeat]
    return found


@pytest.mark.parametrize("config", [QWEN, KIMI], ids=["qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_some_turns_stand_for(
    config: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memplan.load_model(dict(config))
    options = replace(TapeOptions(), **settings)
    short = record_model(model, options)
    monkeypatch.setattr(loops, "FIRST", 10**6)
    whole = record_model(model, options)
    assert _described(short) == _described(whole)


def test_a_turn_stands_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing were compared."""
    repeated: list[int] = []
    repeat = loops.repeat
    monkeypatch.setattr(
        "memplan.graph.modules.run.repeat",
        lambda segment, loop: (repeated.append(loop.more), repeat(segment, loop)),
    )
    record_model(memplan.load_model(dict(QWEN)), replace(TapeOptions(), seq_len=1024))
    assert repeated == [1024 // 64 - loops.FIRST - loops.LAST]
