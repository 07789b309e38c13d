"""Adapters on the tape: what is trained, what is kept, and which modules are meant."""

import pytest

from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.estimator.recording import record_and_walk, tape_options
from memplan.memory.deepspeed.partition import model_weights
from memplan.memory.programs.program import Program
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.sources.models import load_model
from memplan.training.adapters import Lora
from memplan.training.setup import TrainingSetup

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


def trained(adapter: Lora) -> int:
    return estimate(load_model(LLAMA), TrainingSetup(adapter=adapter)).trainable_params


@pytest.mark.parametrize(
    ("adapter", "count"),
    [
        pytest.param(Lora(rank=8), 4 * 8 * (256 + 256 + 256 + 128), id="peft's targets"),
        pytest.param(Lora(rank=8, targets=("k_proj",)), 4 * 8 * (256 + 128), id="one"),
        pytest.param(Lora(rank=8, targets=r".*\.[13]\.self_attn\.k_proj"), 2 * 8 * 384, id="pattern"),
        pytest.param(Lora(rank=8, targets=("k_proj",), layers=(0,)), 8 * 384, id="one layer"),
        pytest.param(Lora(rank=8, targets=("k_proj",), layers=(0, 1)), 2 * 8 * 384, id="the first two"),
        pytest.param(Lora(rank=8, targets=("k_proj",), layers=(1, 2)), 2 * 8 * 384, id="two between"),
        pytest.param(Lora(rank=8, targets="linear-names", layers=(3,)), 8 * 4096, id="the last"),
        pytest.param(Lora(rank=8, targets=("k_proj",), layers=(0, 2)), 2 * 8 * 384, id="every second"),
        pytest.param(
            Lora(rank=8, targets=("k_proj",), rank_pattern={r"layers\.0\.self_attn\.k_proj": 2}),
            (3 * 8 + 2) * 384, id="a rank of its own",
        ),
        pytest.param(
            Lora(rank=8, targets=("k_proj",), modules_to_save=("lm_head",)),
            4 * 8 * 384 + 256000, id="the head whole",
        ),
        pytest.param(
            Lora(rank=1, targets="all-linear"),
            4 * (2 * 512 + 2 * 384 + 3 * 768), id="all linear layers",
        ),
    ],
)  # fmt: skip
def test_what_is_trained(adapter: Lora, count: int) -> None:
    assert trained(adapter) == count


def test_layers_that_serve_nothing_have_adapters_too() -> None:
    """peft looks at modules alone: those of a global attention that no token has are some of a layer's seven of a width."""
    width, inner, layers = 64, 96, 3
    config = {
        "model_type": "longformer", "hidden_size": width, "intermediate_size": inner, "num_attention_heads": 4,
        "num_hidden_layers": layers, "vocab_size": 500, "attention_window": [16] * layers,
        "max_position_embeddings": 130,
    }  # fmt: skip
    setup = TrainingSetup(seq_len=64, adapter=Lora(rank=2, targets="all-linear"))
    found = estimate(load_model(config, "masked-lm"), setup)
    head = 2 * width
    assert found.trainable_params == 2 * (layers * (7 * 2 * width + 2 * (width + inner)) + head)


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (Lora(targets=("q_prj",)), "Did you mean 'q_proj'? It has down_proj"),
        (Lora(targets=("input_layernorm",)), "neither a linear layer nor an embedding"),
        (Lora(modules_to_save=("lm_heads",)), "Did you mean 'lm_head'?"),
        (Lora(targets="("), "is no pattern"),
        (Lora(layers=(7,)), "nothing of"),
        (Lora(targets="all-linear", layers=(0,)), "beside a list of targets"),
    ],
)
def test_modules_that_are_not_there(adapter: Lora, words: str) -> None:
    with pytest.raises(SetupError) as caught:
        trained(adapter)
    assert words in str(caught.value)


def test_a_frozen_linear_layer_keeps_no_input() -> None:
    whole = estimate(load_model(LLAMA), TrainingSetup(precision="bf16"))  # type: ignore[arg-type]
    setup = TrainingSetup(
        precision="bf16",
        adapter=Lora(rank=1, targets=("q_proj",), dtype="bf16"),  # type: ignore[arg-type]
    )
    frozen = estimate(load_model(LLAMA), setup)
    assert frozen.activations_bytes < whole.activations_bytes


def test_the_answer_names_the_modules_that_peft_chooses() -> None:
    found = estimate(load_model(LLAMA), TrainingSetup(adapter=Lora(rank=8)))
    assert any(
        "LoRA rank 8 on q_proj, v_proj (peft's choice)" in each for each in found.assumptions
    )


MIXTRAL = {
    **LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
ATTENTION = 2 * 512 + 2 * 384
GATE_UP, DOWN, ROUTER = 4 * (256 + 1024), 4 * (512 + 256), 256 + 4


@pytest.mark.parametrize(
    ("adapter", "per_layer"),
    [
        pytest.param(
            Lora(rank=2, targets="all-linear"),
            2 * (ATTENTION + 2 * GATE_UP + DOWN + ROUTER), id="all linear layers",
        ),
        pytest.param(Lora(rank=2, targets=("w1", "w3")), 2 * 2 * GATE_UP, id="gate and up"),
        pytest.param(Lora(rank=2, targets=r".*\.(w2|q_proj)"), 2 * (DOWN + 512), id="pattern"),
        pytest.param(
            Lora(rank=2, targets=("q_proj",), parameters=("experts.gate_up_proj",)),
            2 * (512 + GATE_UP), id="a weight by its own name",
        ),
    ],
)  # fmt: skip
def test_stacked_experts(adapter: Lora, per_layer: int) -> None:
    found = estimate(load_model(MIXTRAL), TrainingSetup(adapter=adapter))
    assert found.trainable_params == 4 * per_layer


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (Lora(targets=("w1",)), "w1 of mixtral is in one weight with w3"),
        (Lora(targets="all-linear", dropout=0.1), "dropout: peft has none for adapters on weights"),
        (Lora(targets="all-linear", dora=True), "dora: peft has none for adapters on weights"),
        (Lora(targets=("q_proj",), parameters=("experts.up_proj",)), "Did you mean 'experts.gate_up_proj'"),
        (Lora(targets=("q_proj",), parameters=("q_proj.weight",)), "is a target too"),
        (Lora(targets=("q_proj",), parameters=("embed_tokens.weight",)), "outside of embeddings"),
        (Lora(), "peft has no targets of its own for mixtral"),
    ],
)  # fmt: skip
def test_stacked_experts_that_peft_refuses(adapter: Lora, words: str) -> None:
    with pytest.raises(SetupError) as caught:
        estimate(load_model(MIXTRAL), TrainingSetup(adapter=adapter))
    assert words in str(caught.value)


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "fsdp1", "zero2", "zero3"])
def test_stacked_experts_under_engines(engine: str) -> None:
    fields = {"zero_stage": int(engine[-1])} if engine.startswith("zero") else {"engine": engine}
    adapter = Lora(rank=2, targets="all-linear")
    setup = TrainingSetup(adapter=adapter, num_gpus=8, **fields)  # type: ignore[arg-type]
    found = estimate(load_model(MIXTRAL), setup)
    assert found.trainable_params == 4 * 2 * (ATTENTION + 2 * GATE_UP + DOWN + ROUTER)


def test_linear_layers_of_a_class_of_its_own() -> None:
    setup = TrainingSetup(adapter=Lora(rank=8, targets="all-linear"))
    assert estimate(load_model("falcon-7b"), setup).trainable_params == 16318464


@pytest.mark.parametrize(
    ("model", "targets", "count"),
    [
        ("gpt2", ("c_attn",), 294912),
        ("t5-small", ("q", "v"), 294912),
        ("bert-base-uncased", ("query", "value"), 294912),
    ],
)
def test_modules_go_by_transformers_names(model: str, targets: tuple[str, ...], count: int) -> None:
    setup = TrainingSetup(adapter=Lora(rank=8, targets=targets), seq_len=64)
    assert estimate(load_model(model), setup).trainable_params == count


def test_what_is_merely_counted_is_adapted_too() -> None:
    config = {
        "model_type": "siglip",
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    }
    setup = TrainingSetup(adapter=Lora(rank=1, targets=("q_proj",)))
    # Two towers of two layers each.
    assert estimate(load_model(config), setup).trainable_params == 2 * 2 * (64 + 64)


def test_a_module_that_is_called_twice_has_one_adapter() -> None:
    config = {
        "model_type": "deberta-v2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100, "relative_attention": True, "share_att_key": True,
        "pos_att_type": ["c2p", "p2c"], "position_buckets": 8,
    }  # fmt: skip
    setup = TrainingSetup(adapter=Lora(rank=1, targets=("query_proj",)), seq_len=64)
    assert estimate(load_model(config), setup).trainable_params == 2 * (64 + 64)


def test_peft_refuses_what_mambas_kernels_read() -> None:
    adapter = Lora(targets=("in_proj", "out_proj"))
    with pytest.raises(SetupError, match="peft refuses out_proj of mamba"):
        estimate(load_model("mamba-130m"), TrainingSetup(adapter=adapter))
    found = estimate(
        load_model("mamba-130m"), TrainingSetup(adapter=Lora(rank=1, targets=("in_proj",)))
    )
    assert found.trainable_params == 24 * (768 + 3072)


LED = {
    "model_type": "led", "d_model": 64, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "vocab_size": 1000, "max_encoder_position_embeddings": 256,
    "max_decoder_position_embeddings": 128, "attention_window": 32,
}  # fmt: skip


def test_shared_embeddings_are_no_linear_layer() -> None:
    encoder, decoder = 7 * 128 + 2 * 192, 8 * 128 + 2 * 192
    found = estimate(
        load_model(LED), TrainingSetup(adapter=Lora(rank=1, targets="all-linear"), seq_len=64)
    )
    assert found.trainable_params == 2 * encoder + decoder


def test_a_pooler_that_no_loss_reaches_is_adapted_too() -> None:
    config = {
        "model_type": "layoutlm", "architectures": ["LayoutLMForMaskedLM"], "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 1000, "max_position_embeddings": 128,
    }  # fmt: skip
    found = estimate(
        load_model(config), TrainingSetup(adapter=Lora(rank=1, targets="all-linear"), seq_len=64)
    )
    # Four projections, two of the network, the head's transform, and the pooler.
    assert found.trainable_params == 6 * 128 + 2 * 192


def test_a_type_whose_linear_layers_are_not_all_known_is_refused() -> None:
    config = {
        "model_type": "reformer", "hidden_size": 64, "attn_layers": ["local"], "vocab_size": 320,
        "num_attention_heads": 2, "attention_head_size": 32, "feed_forward_size": 128,
        "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16], "is_decoder": True,
    }  # fmt: skip
    with pytest.raises(SetupError, match="does not know each linear layer of reformer"):
        estimate(load_model(config), TrainingSetup(adapter=Lora(targets="all-linear")))


def test_making_dora_layers_takes_each_weight_three_times() -> None:
    """peft takes every weight's norm with the adapter's product added, before the first step.

    In the order of PyTorch's CUDA build: the product, cuBLAS's workspace, the product scaled, the sum.
    """
    model = load_model("llama-3.2-1b")
    adapter = {"lora": {"rank": 8, "targets": ["q_proj"], "dora": True}}
    setup = TrainingSetup(adapter=adapter, precision="bf16", seq_len=128)  # type: ignore[arg-type]
    resolved = setup.resolve(model.context_length, has_bf16=True)
    tape, passes = record_and_walk(model, tape_options(resolved, None))
    given = RankInput(tape=tape, passes=passes, setup=resolved)
    program = Program(given, Ledger(), workspace_bytes=12345 * 512)
    program.load()
    weight, workspace = 2048 * 2048 * 2, 12345 * 512
    events = program.ledger.events
    product = events.index(workspace) - 1
    scaled, total = product + 2, product + 3
    assert events[product : product + 7] == [
        weight, workspace, weight, weight, ~scaled, ~total, ~product
    ]  # fmt: skip
    assert events[product + 7 : product + 10] == [weight] * 3, "the next layer's"


@pytest.mark.parametrize("layers", [(0,), (0, 1), (1, 2)])
def test_a_pass_without_gradients_has_the_same_weights(layers: tuple[int, ...]) -> None:
    """ZeRO-3 gathers an evaluation's weights by their numbers in the trained model."""
    setup = TrainingSetup(
        num_gpus=8, engine="deepspeed", zero_stage=3, seq_len=64,  # type: ignore[arg-type]
        adapter=Lora(rank=8, targets=("k_proj",), layers=layers), evaluation=4,  # type: ignore[arg-type]
    )  # fmt: skip
    source = estimate(load_model(LLAMA), setup).run_source
    given = source.record()
    (evaluation,) = given.beside.models
    weights, evaluated = (model_weights(each) for each in (given.tape, evaluation.tape))
    assert evaluated.numels == weights.numels


def test_every_linear_layer_of_a_mixture_is_no_stack_of_experts() -> None:
    """NeMo's ``match_all_linear``: attention's four and the output matrix, and no experts, which are one weight each.

    The router is a parameter of its own in transformers' class."""
    setup = TrainingSetup(num_gpus=8, engine="fsdp", adapter=Lora(rank=8, targets="every-linear"))
    found = estimate(load_model("qwen3-30b-a3b"), setup, None)
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    assert found.trainable_params == 8 * (48 * attention + 2048 + 151_936)
