"""Two ledgers, one program: what is added up spot by spot is what is played out block by block.

To the byte, in every part of a step, for every engine.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator.recording import record_and_walk, shared_options, tape_options
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.account import ComponentKind
from memplan.memory.accounts import rank_account
from memplan.memory.likeness import MICRO_BATCHES, asked_of
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger, Part
from memplan.memory.tally import Tally
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

pytestmark = pytest.mark.long

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 9, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 700, "vocab_size": 4001,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (LLAMA, "causal-lm"),
    "tied": ({**LLAMA, "tie_word_embeddings": True}, "causal-lm"),
    "gpt2": (
        {
            "model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 4001,
            "n_positions": 512,
        },
        "causal-lm",
    ),
    "t5": (
        {
            "model_type": "t5", "d_model": 256, "d_kv": 64, "d_ff": 700, "num_layers": 3,
            "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 4001,
            "feed_forward_proj": "gated-gelu",
        },
        "seq2seq-lm",
    ),
    "olmo2": (
        {
            "model_type": "olmo2", "hidden_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 700,
            "vocab_size": 4001,
        },
        "causal-lm",
    ),
    "mixtral": (
        {
            "model_type": "mixtral", "hidden_size": 256, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 704,
            "vocab_size": 4001, "num_local_experts": 4,
        },
        "causal-lm",
    ),
}  # fmt: skip
HANDS_ON: dict[str, tuple[dict[str, Any], str]] = {
    "rembert": ({"model_type": "rembert", "num_hidden_layers": 2, "vocab_size": 500}, "masked-lm"),
    "longt5": (
        {"model_type": "longt5", "d_model": 256, "d_ff": 700, "num_layers": 2, "num_heads": 4, "vocab_size": 500},
        "seq2seq-lm",
    ),
}  # fmt: skip
"""Layers give more than hidden states to the next, which the base model's variable holds until it returns."""
ENGINES: dict[str, dict[str, Any]] = {
    "one GPU": {"engine": "ddp"},
    "ddp": {"engine": "ddp", "num_gpus": 8},
    "ddp views": {
        "engine": "ddp", "num_gpus": 4, "engine_options": {"gradient_as_bucket_view": True},
    },
    "fsdp alone": {"engine": "fsdp"},
    "fsdp": {"engine": "fsdp", "num_gpus": 8},
    "fsdp offloaded": {"engine": "fsdp", "num_gpus": 2, "offload_param": "cpu"},
    "fsdp1": {"engine": "fsdp1", "num_gpus": 8},
    "fsdp1 offloaded": {"engine": "fsdp1", "num_gpus": 2, "offload_param": "cpu"},
    "zero0": {"engine": "deepspeed", "zero_stage": 0, "num_gpus": 2},
    "zero1": {"engine": "deepspeed", "zero_stage": 1, "num_gpus": 4},
    "zero1, small buckets": {
        "engine": "deepspeed", "zero_stage": 1, "num_gpus": 4,
        "engine_options": {"reduce_bucket_size": 300_000},
    },
    "bf16 optimizer": {
        "engine": "deepspeed", "zero_stage": 1, "num_gpus": 4,
        "engine_options": {"grad_accum_dtype": "fp32"},
    },
    "zero2": {"engine": "deepspeed", "zero_stage": 2, "num_gpus": 8},
    "zero2, overlapping": {
        "engine": "deepspeed", "zero_stage": 2, "num_gpus": 8,
        "engine_options": {"overlap_comm": True, "reduce_bucket_size": 300_000},
    },
    "zero2 offloaded": {
        "engine": "deepspeed", "zero_stage": 2, "num_gpus": 2, "offload_optimizer": "cpu",
    },
    "zero3": {"engine": "deepspeed", "zero_stage": 3, "num_gpus": 8},
    "zero3, nothing kept": {
        "engine": "deepspeed", "zero_stage": 3, "num_gpus": 2,
        "engine_options": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
    },
    "zero3 offloaded": {
        "engine": "deepspeed", "zero_stage": 3, "num_gpus": 2, "offload_optimizer": "cpu",
        "offload_param": "cpu",
    },
}  # fmt: skip
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full"},
    {"checkpointing": 0.5, "gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 4, "optimizer": "adamw-fused"},
    {"precision": "fp32", "dropout": 0.1},
    {"precision": "bf16-amp", "checkpointing": "full"},
    {"micro_batch_size": 3, "seq_len": 40},
)


def given_for(model: str, fields: dict[str, Any]) -> RankInput:
    spec = load_model(*(MODELS | HANDS_ON)[model])
    resolved = TrainingSetup(**{"seq_len": 96, **fields}).resolve()
    tape, passes = record_and_walk(spec, shared_options(spec, tape_options(resolved, None)))
    return RankInput(tape=tape, passes=passes, setup=resolved)


NOT_FULLER = 1.005
"""A first step that no account shows: where it accumulates under stage 3, small parameters come in flat
buffers until the step, after which they stay."""


class MarkedLedger(Ledger):
    """Notes where the parts of a run begin."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[int, Part, int]] = []

    def enter(self, part: Part, step: int = 0) -> None:
        """A part begins."""
        self.marks.append((len(self.events), part, step))


def played(given: RankInput, rank: int) -> dict[str, int]:
    """The highest sum of blocks in loading, in each part of the second step, and in the first [bytes]."""
    ledger = MarkedLedger()
    program = program_of(given, ledger, workspace_bytes=0, rank=rank)
    num_micro_batches = min(given.setup.gradient_accumulation_steps, MICRO_BATCHES)
    program.start()
    for step in range(2):
        program.train(step, num_micro_batches=num_micro_batches)
    return heights(ledger)


def heights(ledger: MarkedLedger) -> dict[str, int]:
    """The highest sum of blocks in every part of it [bytes]."""
    found: dict[str, int] = {}
    ends = [*(start for start, _, _ in ledger.marks[1:]), len(ledger.events)]
    sizes: dict[int, int] = {}
    alive = 0
    for (start, part, step), end in zip(ledger.marks, ends, strict=True):
        changes = []
        for number, event in enumerate(ledger.events[start:end], start):
            if event > 0:
                changes.append(event + -event % ALLOCATION_ROUNDING)
                sizes[number] = changes[-1]
            elif event < 0:
                changes.append(-sizes.pop(~event))
        highest = max(accumulate(changes, initial=alive))
        alive += sum(changes)
        name = part.value if part is Part.LOAD or step == 1 else Part.FIRST_STEP.value
        found[name] = max(found.get(name, 0), highest)
        if part is not Part.EVALUATION:
            found["held"] = alive
    return found


@pytest.mark.parametrize(
    ("model", "engine"),
    [*product(MODELS, ENGINES), *product(HANDS_ON, ("one GPU", "fsdp", "zero3"))],
)
def test_what_is_added_up_is_what_is_played_out(model: str, engine: str) -> None:
    ways = list(answered_ways(model, ENGINES[engine]))
    assert len(ways) >= 3
    for fields, given in ways:
        for rank in sorted({0, given.setup.num_gpus - 1}):
            account = rank_account(given, rank=rank)
            peaks = {each.name: each.peak_bytes for each in account.phases if each.name != "save"}
            expected = played(given, rank)
            if Part.FIRST_STEP.value not in peaks:
                first = expected.pop(Part.FIRST_STEP.value)
                assert first <= NOT_FULLER * max(peaks.values()), (fields, rank)
            assert {**peaks, "held": account.held_bytes} == expected, (fields, rank)


def test_what_rises_last_in_the_first_step_is_of_it() -> None:
    """States are made in its optimizer's step, behind which nothing but the steady step comes."""
    tally = Tally(asked_of(given_for("gpt2", ENGINES["one GPU"])).spots)
    tally.enter(Part.STEP)
    tally.free(
        tally.allocate(9 * ALLOCATION_ROUNDING, 0, ComponentKind.OPTIMIZER_STATES, "scratch")
    )
    tally.end_first_step()
    tally.allocate(ALLOCATION_ROUNDING, 0, ComponentKind.OPTIMIZER_STATES, "states")
    points = tally.close({}).points
    most = {
        part: max(each.most_bytes for each in visits) for part, visits in points.items() if visits
    }
    assert most[Part.FIRST_STEP] == 9 * ALLOCATION_ROUNDING
    assert most[Part.FORWARD] == ALLOCATION_ROUNDING


def answered_ways(model: str, engine: dict[str, Any]) -> Iterator[tuple[dict[str, Any], RankInput]]:
    """Those ways to train that an engine does not refuse, each recorded once."""
    for way in WAYS:
        fields = {**engine, **way}
        try:
            given = given_for(model, fields)
            rank_account(given, rank=0)
        except SetupError:
            continue
        yield fields, given


def test_one_outline_serves_every_batch() -> None:
    """What is remembered of one batch is what another one finds anew."""
    from memplan.memory import accounts

    for fields in ENGINES.values():
        small = given_for("t5", {**fields, "micro_batch_size": 2})
        for batch, length in ((3, 200), (7, 96), (4, 1000)):
            setup = replace(small.setup, micro_batch_size=batch, seq_len=length)
            large = given_for("t5", {**fields, "micro_batch_size": batch, "seq_len": length})
            accounts._outlined.cache_clear()
            alone = rank_account(large, rank=0)
            accounts._outlined.cache_clear()
            rank_account(small, rank=0)
            assert rank_account(large, rank=0) == alone, setup
            assert accounts._outlined.cache_info().misses == 1


@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero2"])
def test_checkpointing_alone_asks_for_no_outline_of_its_own(engine: str) -> None:
    from memplan.memory import accounts

    fields = ENGINES[engine]
    accounts._outlined.cache_clear()
    rank_account(given_for("llama", fields), rank=0)
    rank_account(given_for("llama", {**fields, "checkpointing": "full"}), rank=0)
    assert accounts._outlined.cache_info().misses == 1


@pytest.mark.parametrize(("model", "outlines"), [("llama", 1), ("t5", 2)])
def test_formats_of_a_width_share_an_outline_of_stage_3(model: str, outlines: int) -> None:
    """fp16 looks for overflow besides. T5 clamps in it too, between two modules' hooks: the next is fetched later."""
    from memplan.memory import accounts

    fields = ENGINES["zero3"]
    accounts._outlined.cache_clear()
    for precision in ("bf16-master", "fp16-master"):
        given = given_for(model, {**fields, "precision": precision})
        account = rank_account(given, rank=0)
        peaks = {phase.name: phase.peak_bytes for phase in account.phases}
        expected = played(given, 0)
        assert {name: expected[name] for name in ("forward", "backward", "step")} == {
            name: peaks[name] for name in ("forward", "backward", "step")
        }
    assert accounts._outlined.cache_info().misses == outlines
