"""What a weight is: rules ask its role and block, and no name of anything moves a byte or a FLOP."""

import pytest

import memplan
from memplan.compute.flops import count_flops
from memplan.dtypes import DType
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.model import record_model
from memplan.memory.accounts import rank_account
from memplan.memory.programs.stepping import role_of
from memplan.memory.rank import RankInput
from memplan.memory.step import StepWalk
from memplan.training.optimizers.script import TensorRole
from memplan.training.setup import TrainingSetup

TITAN = {
    "num_gpus": 4, "engine": "fsdp", "optimizer": "adamw-foreach",
    "engine_options": {"wrapping": "torchtitan"},
}  # fmt: skip
MODEL = "mixtral-8x7b"


def renamed(tape: Tape) -> Tape:
    """The same tape with names that say nothing."""
    numbers = iter(range(10**6))
    for segment in tape.segments:
        segment.name = f"x{next(numbers)}"
        for parameter in segment.parameters:
            parameter.module = f"y{next(numbers)}"
            parameter.name = f"{parameter.module}.z"
    return tape


@pytest.mark.parametrize(
    "fields",
    [
        {"num_gpus": 1, "engine": "ddp", "optimizer": "adamw-8bit"},
        {"num_gpus": 1, "engine": "ddp", "optimizer": "muon"},
        {"num_gpus": 4, "engine": "fsdp"},
        TITAN,
    ],
    ids=lambda fields: str(fields.get("optimizer", fields["engine"])),
)
def test_names_move_no_byte_and_no_flop(fields: dict[str, object]) -> None:
    model = memplan.load_model(MODEL)
    setup = TrainingSetup(**{"seq_len": 64, **fields}).resolve(64)  # type: ignore[arg-type]
    options = TapeOptions(seq_len=64, compute=DType.BF16)
    accounts, flops = [], []
    for change in (lambda tape: tape, renamed):
        tape = change(record_model(model, options))
        given = RankInput(tape=tape, passes=StepWalk(tape).run(), setup=setup)
        account = rank_account(given, rank=0)
        accounts.append([(each.name, each.peak_bytes) for each in account.phases])
        flops.append(count_flops(tape, model).components)
    assert accounts[0] == accounts[1]
    assert flops[0] == flops[1]


def test_roles_are_what_the_weights_are() -> None:
    tape = record_model(memplan.load_model("qwen1.5-moe-a2.7b"), TapeOptions(seq_len=8))
    found = {each.name: role_of(each) for segment in tape.segments for each in segment.parameters}
    assert found["embed_tokens.weight"] is TensorRole.EMBEDDING
    assert found["lm_head.weight"] is TensorRole.HEAD
    assert found["self_attn.k_proj.weight"] is TensorRole.QUERY_KEY
    assert found["self_attn.v_proj.weight"] is TensorRole.LINEAR
    assert found["mlp.shared_expert_gate.weight"] is TensorRole.LINEAR
    assert found["mlp.experts.gate_up_proj"] is TensorRole.OTHER
