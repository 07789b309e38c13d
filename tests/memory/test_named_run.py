"""A named run is the plain run, and every block of it has a name."""

from collections import Counter
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.estimator.named_run import named_run
from memplan.estimator.recording import record_and_walk, shared_options, tape_options
from memplan.memory.account import ComponentKind
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger, Part
from memplan.memory.snapshots.named import NamedRun
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

SETUPS = [
    pytest.param("gpt2", {}, id="one GPU, amp"),
    pytest.param("gpt2", {"precision": "bf16", "checkpointing": "full"}, id="checkpointing"),
    pytest.param("t5-small", {"gradient_accumulation_steps": 2}, id="encoder and decoder"),
    pytest.param("gpt2", {"num_gpus": 2, "engine": "ddp"}, id="ddp"),
    pytest.param("gpt2", {"num_gpus": 4, "engine": "fsdp"}, id="fsdp"),
    pytest.param("gpt2", {"num_gpus": 4, "engine": "deepspeed", "zero_stage": 2}, id="zero2"),
    pytest.param("gpt2", {"num_gpus": 4, "engine": "deepspeed", "zero_stage": 1}, id="zero1"),
    pytest.param("gpt2", {"num_gpus": 4, "engine": "deepspeed", "zero_stage": 0}, id="zero0"),
    pytest.param(
        "gpt2",
        {
            "num_gpus": 4, "engine": "deepspeed", "zero_stage": 0, "optimizer": "adamw-foreach",
            "engine_options": {"torch_adam": True, "communication_data_type": "fp32"},
        },
        id="zero0, masters apart, cast",
    ),
    pytest.param(
        "gpt2",
        {
            "num_gpus": 4, "engine": "deepspeed", "zero_stage": 1,
            "engine_options": {"grad_accum_dtype": "fp32"},
        },
        id="zero1, fp32 gradients",
    ),
    pytest.param(
        "gpt2",
        {
            "num_gpus": 4, "engine": "deepspeed", "zero_stage": 2, "offload_optimizer": "cpu",
            "gradient_accumulation_steps": 2,
            "engine_options": {"reduce_bucket_size": 1_000_000, "overlap_comm": False},
        },
        id="zero2, offloaded",
    ),
    pytest.param("gpt2", {"num_gpus": 4, "engine": "deepspeed", "zero_stage": 3}, id="zero3"),
    pytest.param(
        "gpt2",
        {
            "num_gpus": 4, "engine": "deepspeed", "zero_stage": 3, "precision": "fp16-master",
            "engine_options": {"zero_init": False, "contiguous_gradients": False},
        },
        id="zero3, fp16",
    ),
    pytest.param(
        "gpt2",
        {
            "num_gpus": 4, "engine": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu",
            "offload_param": "cpu",
        },
        id="zero3, offloaded",
    ),
    pytest.param("gpt2", {"num_gpus": 4, "engine": "fsdp1"}, id="fsdp1"),
    pytest.param(
        "gpt2",
        {"num_gpus": 4, "engine": "fsdp1", "gradient_accumulation_steps": 2, "offload_param": "cpu"},
        id="fsdp1, offloaded",
    ),
    pytest.param(
        "gpt2", {"num_gpus": 4, "engine": "fsdp1", "fsdp_strategy": "no_shard"}, id="fsdp1, no_shard"
    ),
]  # fmt: skip


def run_of(model: str, options: dict[str, Any]) -> NamedRun:
    return named_run(estimate(load_model(model), TrainingSetup(seq_len=64, **options)))


class PlayedOut(Ledger):
    """A ledger of which every step is played out."""

    __slots__ = ()

    def recurs(self) -> bool:
        return False


@pytest.mark.parametrize(("model", "options"), SETUPS)
def test_a_named_run_has_the_events_of_a_plain_one(model: str, options: dict[str, Any]):
    spec = load_model(model)
    found = estimate(spec, TrainingSetup(seq_len=64, **options))
    tape, passes = record_and_walk(spec, shared_options(spec, tape_options(found.setup, None)))
    plain = PlayedOut()
    given = RankInput(tape=tape, passes=passes, setup=found.setup)
    workspace = named_run(found).ledger
    size = next(
        workspace.events[block]
        for block, label in named_run(found).labels.items()
        if label.kind is ComponentKind.KERNEL_SCRATCH and "workspace" in label.name
    )
    program = program_of(given, plain, workspace_bytes=size)
    assert program is not None
    program.run()
    assert plain.events == workspace.events
    assert plain.streams == workspace.streams


@pytest.mark.parametrize(("model", "options"), SETUPS)
def test_every_block_has_a_name(model: str, options: dict[str, Any]):
    run = run_of(model, options)
    blocks = [number for number, event in enumerate(run.ledger.events) if event > 0]
    assert list(run.labels) == blocks
    assert not [label for label in run.labels.values() if label.name == "engine"]
    found = {label.part for label in run.labels.values()}
    if "cpu" in options.values():
        found.add(Part.STEP)  # whose update may be the CPU's alone
    only_of_some = {Part.FIRST_STEP, Part.OVERFLOW, Part.GENERATION, Part.EVALUATION}
    assert found == set(Part) - only_of_some - {Part.SAVE}


@pytest.mark.parametrize("job", ["dpo", "kto", "distillation", "ppo", "grpo:reference=same", "sft"])
def test_every_block_of_a_job_has_a_name(job: str):
    run = run_of("gpt2", {"precision": "bf16", "job": job, "evaluation": "2:batches_kept=3"})
    assert not [label for label in run.labels.values() if label.name == "engine"]
    found = {label.kind for label in run.labels.values()}
    assert (ComponentKind.OTHER_MODELS in found) is not job.startswith("sft")


def test_blocks_are_named_after_what_made_them():
    run = run_of("gpt2", {"precision": "bf16"})
    names = {label.name for label in run.labels.values() if label.place == "decoder.layers.3"}
    assert "mlp.c_proj.weight" in names
    assert "linear mlp.c_proj" in names
    assert "backward of linear mlp.c_proj" in names
    sizes: Counter[ComponentKind] = Counter()
    for block, label in run.labels.items():
        if label.step == 0:
            sizes[label.kind] += run.ledger.events[block]
    spec = load_model("gpt2")
    weights = estimate(spec, TrainingSetup(precision="bf16")).num_params * 2
    assert sizes[ComponentKind.PARAMETERS] == pytest.approx(weights)
    assert sizes[ComponentKind.GRADIENTS] >= weights
    assert sizes[ComponentKind.OPTIMIZER_STATES] == pytest.approx(2 * weights, rel=4e-4)


HANDING_ON: list[dict[str, Any]] = [
    {"model_type": "gpt2", "n_layer": 2},
    {"model_type": "t5", "num_layers": 2},
    {"model_type": "t5", "num_layers": 2, "architectures": ["T5ForConditionalGeneration"]},
    {"model_type": "longt5", "num_layers": 2, "architectures": ["LongT5ForConditionalGeneration"]},
    {"model_type": "lilt", "num_hidden_layers": 2, "architectures": ["LiltForTokenClassification"]},
    {"model_type": "rembert", "num_hidden_layers": 2, "architectures": ["RemBertForMaskedLM"]},
    {"model_type": "rembert", "num_hidden_layers": 2},
]
"""But for the first: layers give more than hidden states to the next, which a variable of the model's holds until it
returns."""


@pytest.mark.parametrize("config", HANDING_ON, ids=lambda each: "-".join(map(str, each.values())))
@pytest.mark.parametrize("precision", ["bf16", "bf16-amp"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_stays_for_backward_is_the_accounts_activations(
    config: dict[str, Any], precision: str, checkpointing: str
):
    """At the end of the forward pass, the blocks by name are what the account's walk keeps."""
    setup = TrainingSetup(
        seq_len=64, precision=precision, checkpointing=checkpointing, dropout=0.0, engine="ddp"
    )
    found = estimate(load_model(config), setup)
    run = named_run(found)
    end = next(
        stretch.start
        for stretch in run.ledger.stretches
        if stretch.part is Part.BACKWARD and stretch.step == 0
    )
    alive: dict[int, int] = {}
    for number, event in enumerate(run.ledger.events[:end]):
        if event > 0:
            alive[number] = event
        elif event < 0:
            del alive[~event]
    of_the_model = (
        ComponentKind.ACTIVATIONS, ComponentKind.LOGITS_AND_LOSS,
        ComponentKind.TEMPORARIES,  # what the last to read it was to let go, and an outer variable holds
    )  # fmt: skip
    kept = sum(size for block, size in alive.items() if run.labels[block].kind in of_the_model)
    assert kept == found.activations_bytes


def test_an_empty_tensor_asks_for_nothing():
    """Parts of a model whose weights alone are counted leave a tensor of no bytes."""
    config = {
        "model_type": "kosmos-2.5",
        "text_config": {
            "embed_dim": 64, "ffn_dim": 128, "layers": 2, "attention_heads": 4, "vocab_size": 128,
            "max_position_embeddings": 64,
        },
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_num_patches": 16,
        },
        "latent_query_num": 8,
    }  # fmt: skip
    setup = TrainingSetup(num_gpus=2, engine="fsdp", seq_len=64)
    answer = estimate(load_model(config), setup)
    assert answer.unmodelled
    events = named_run(answer).ledger.events
    assert 0 not in events
