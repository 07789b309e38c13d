"""Quantized bases: what is kept, what passes, what a config says, and what is refused."""

from typing import Any

import pytest

from memplan.compute.flops import count_flops
from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.estimator.estimate import Estimate
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.model import record_model
from memplan.sources.emitters import Framework, emit
from memplan.sources.models import load_model
from memplan.training.quantization import Quantization, QuantizationKind
from memplan.training.setup import TrainingSetup

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
FOUR_BIT = (QuantizationKind.NF4, QuantizationKind.FP4)
ADAPTER = {"lora": {"rank": 8, "targets": "all-linear"}}


def answer(config: dict[str, Any] = LLAMA, **settings: Any) -> Estimate:
    settings = {"adapter": ADAPTER, "seq_len": 512, **settings}
    return estimate(load_model(config), TrainingSetup(**settings))


def tape(kind: str, *, checkpointed: float = 0.0, **fields: Any) -> Tape:
    how = Quantization(kind=QuantizationKind(kind), **fields)
    options = TapeOptions(
        seq_len=512, compute=DType.BF16, quantization=how, quantized_from=DType.BF16,
        checkpointed_layers=checkpointed,
    )  # fmt: skip
    return record_model(load_model(LLAMA), options)


def test_parameters_are_those_of_the_model() -> None:
    plain, packed = answer(), answer(quantize="nf4")
    assert plain.num_params == packed.num_params
    assert plain.trainable_params == packed.trainable_params


def test_what_is_stored() -> None:
    found = {
        name: answer(quantize=name).phases["forward"].components["parameters"]
        for name in ("none", "nf4", "int8")
    }
    linear = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    assert found["none"] - found["nf4"] == 2 * linear - linear // 2
    assert found["none"] - found["int8"] == linear


@pytest.mark.parametrize(("compute", "cast"), [("bf16", True), ("fp32", False)])
def test_adapters_come_in_the_format_that_four_bits_compute_in(compute: str, cast: bool) -> None:
    """peft 0.21 moves them to that of the layer below, and casts each to fp32 when all are there."""
    options = {"compute_dtype": compute}
    load = answer(quantize="nf4", engine_options=options).phases["load"].components
    last_two = 2 * 8 * (512 + 256)
    """The peak is where the last adapter's first matrix is cast: it and the second lie there in 16 bits."""
    assert load.get("temporaries", 0) == (last_two if cast else 0)


def test_the_head_and_the_embedding_stay() -> None:
    packed = {
        parameter.name
        for segment in tape("nf4", compute_dtype="bf16").segments
        for parameter in segment.parameters
        if parameter.packed is not None
    }
    assert "lm_head.weight" not in packed
    assert len(packed) == 7


def test_four_bit_products_keep_nothing() -> None:
    for segment in tape("nf4", compute_dtype="bf16").segments:
        for operation in segment.operations:
            if operation.kind is OperationKind.LINEAR_4BIT:
                assert not operation.saved
                assert not operation.keeps


@pytest.mark.parametrize("kind", list(QuantizationKind), ids=lambda kind: kind.value)
def test_products_are_as_many_however_weights_are_stored(kind: QuantizationKind) -> None:
    model = load_model(LLAMA)
    plain = record_model(model, TapeOptions(seq_len=512, compute=DType.BF16))
    fields = {"compute_dtype": DType.BF16} if kind in FOUR_BIT else {}
    found = count_flops(tape(kind.value, **fields), model)
    assert found.forward == count_flops(plain, model).forward
    # A frozen base has the gradients of its inputs alone.
    assert found.backward < found.forward * 1.5


def test_int8_holds_its_inputs_past_checkpointing() -> None:
    """``ctx.tensors`` is out of reach of the hooks of a checkpoint."""
    plain = answer(quantize="nf4", checkpointing="full")
    held = answer(quantize="int8", checkpointing="full")
    # Of each layer two normed inputs, attention's output and the gate's product, in 16 bits.
    inputs = 512 * (3 * 256 + 512) * 2
    assert held.activations_bytes - plain.activations_bytes >= 4 * inputs


def test_gptq_keeps_unpacked_weights_unless_checkpointed() -> None:
    held = answer(quantize="gptq").activations_bytes
    less = answer(quantize="nf4").activations_bytes
    linear = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256
    assert held - less >= 3 * 2 * linear


def test_loading_passes_each_weight_in_full() -> None:
    config = {**LLAMA, "num_hidden_layers": 1, "intermediate_size": 4096, "vocab_size": 8}
    load = answer(config, quantize="fp4").phases["load"]
    stored = answer({**config, "quantization_config": {"load_in_4bit": True}}).phases["load"]
    assert load.peak_bytes - stored.peak_bytes > 256 * 4096
    assert load.components["temporaries"] == 2 * 256 * 4096


def test_kbit_preparation_is_in_fp32() -> None:
    plain = answer(quantize="nf4").phases["load"].components["parameters"]
    options = {"prepare_for_kbit": True}
    prepared = (
        answer(quantize="nf4", engine_options=options).held_bytes
        - answer(quantize="nf4").held_bytes
    )
    rest = 2 * 1000 * 256 + 9 * 256
    assert prepared == 2 * rest
    assert plain


def test_the_model_s_own_config_counts() -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    found = answer(config)
    assert any("as the config's quantization_config says" in each for each in found.assumptions)
    assert found.held_bytes < answer().held_bytes
    kept = answer(config, quantize="none")
    assert kept.held_bytes == answer().held_bytes


def test_without_an_adapter_its_weights_are_counted_unpacked() -> None:
    config = {**LLAMA, "quantization_config": {"load_in_8bit": True}}
    found = answer(config, adapter=None)
    assert found.held_bytes == answer(adapter=None).held_bytes
    assert any("counted unpacked" in each for each in found.assumptions)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantize": "nf4", "adapter": None}, "cannot be trained"),
        ({"engine_options": {"double_quant": True}}, "nothing is quantized"),
        (
            {"quantize": "nf4", "engine_options": {"skip_modules": "q_prj"}},
            "no module 'q_prj'. Did you mean 'q_proj'?",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError) as error:
        answer(**settings)
    assert words in str(error.value)


def test_a_format_that_is_not_modelled_is_refused_under_an_adapter() -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(SetupError, match="stored in mxfp4"):
        answer(config)
    assert answer(config, quantize="nf4").held_bytes == answer(quantize="nf4").held_bytes
    assert answer(config, adapter=None).held_bytes == answer(adapter=None).held_bytes


def test_a_frozen_base_under_a_trained_head() -> None:
    found = answer(quantize="nf4", adapter=None, freeze="embeddings,layers,norm")
    assert found.trainable_params == 1000 * 256


def test_named_modules_stay() -> None:
    less = answer(quantize="nf4", engine_options={"skip_modules": "down_proj"})
    more = less.phases["load"].components["parameters"]
    all_packed = answer(quantize="nf4").phases["load"].components["parameters"]
    assert more - all_packed == 4 * (2 * 512 * 256 - 512 * 256 // 2)


def test_early_bitsandbytes_held_every_input() -> None:
    """Of what nothing else holds: the product before down_proj (and o_proj's is attention's own)."""
    kept, freed = (
        answer(
            quantize="nf4", checkpointing="none", seq_len=512, loss="cut", precision="bf16",
            engine_options={"quant_keeps_inputs": held},
        ).phases["forward"].components["activations"]
        for held in (True, False)
    )  # fmt: skip
    assert kept - freed > 512 * 512 * 2
    with pytest.raises(SetupError, match="quant_keeps_inputs: int8 has none"):
        answer(quantize="int8", engine_options={"quant_keeps_inputs": True})


@pytest.mark.parametrize(
    "engine",
    [
        {"engine": "ddp", "precision": "bf16-autocast"}, {"zero_stage": 0}, {"zero_stage": 2},
        {"zero_stage": 3}, {"engine": "fsdp"}, {"engine": "fsdp1"},
    ],
    ids=str,
)  # fmt: skip
def test_engines_hold_codes(engine: dict[str, Any]) -> None:
    """Sharded or whole; what unpacking needs is whole on each rank."""
    adapter = {"lora": {"rank": 8, "targets": "all-linear", "dtype": "bf16"}}
    plain, packed = (
        answer(num_gpus=2, quantize=name, adapter=adapter, **engine).held_bytes
        for name in ("none", "nf4")
    )
    linear = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    ranks = 1 if engine.get("zero_stage") in (0, 2) or engine.get("engine") == "ddp" else 2
    scales = 4 * (2 * 4096 + 2 * 2048 + 3 * 8192) + 4 * 7 * 512
    saved = (2 * linear - linear // 2) // ranks - scales
    if engine.get("zero_stage") == 3:
        # Other parameters are small enough to persist on every rank.
        assert plain - packed > saved
    else:
        assert plain - packed == pytest.approx(saved, rel=0.002)


def test_what_peft_casts_an_engine_casts_back() -> None:
    for engine in ({"engine": "fsdp"}, {"engine": "fsdp1"}, {"zero_stage": 2}):
        with pytest.raises(SetupError, match="casts to bf16 again"):
            answer(num_gpus=2, quantize="nf4", engine_options={"prepare_for_kbit": True}, **engine)


def test_zero_3_loads_a_quantized_base_whole() -> None:
    with pytest.raises(SetupError, match="zero_init: a quantized base is loaded whole"):
        answer(num_gpus=2, zero_stage=3, quantize="nf4", engine_options={"zero_init": True})


def test_int8_says_what_it_holds() -> None:
    assert any("LLM.int8" in note for note in answer(quantize="int8", checkpointing="full").notes)
    assert not answer(quantize="int8").notes


@pytest.mark.parametrize("engine", ["fsdp", "fsdp1"])
@pytest.mark.parametrize("place", [None, "meta", "cpu"])
def test_a_packed_base_is_said_to_lie_whole_where_it_does(engine: str, place: str | None) -> None:
    options = {} if place is None else {"init_device": place}
    found = answer(quantize="nf4", engine=engine, num_gpus=8, engine_options=options)
    assert any("lies whole on each GPU" in note for note in found.notes) is (place is None)
    load = found.phases["load"].peak_bytes
    least = answer(quantize="nf4", engine=engine, num_gpus=8, engine_options={"init_device": "cpu"})
    assert (load > least.phases["load"].peak_bytes) is (place is None)


def test_experts_stay_and_it_is_said() -> None:
    config = {
        **LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    attention = {"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}
    found = answer(config, quantize="nf4", adapter=attention)
    assert any("experts are no linear layers" in note for note in found.notes)
    experts = 4 * 4 * 3 * 512 * 256
    assert found.phases["load"].components["parameters"] > 2 * experts


def test_a_model_without_linear_layers_of_torch_is_refused() -> None:
    config = {
        "model_type": "falcon", "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 800,
    }  # fmt: skip
    with pytest.raises(SetupError, match="quantizes no layer of"):
        answer(config, quantize="nf4", adapter=None, freeze="embeddings,layers,norm")


def test_what_is_written_for_a_framework_says_how_to_load_the_base() -> None:
    setup = TrainingSetup(
        num_gpus=2, engine="fsdp", quantize="nf4", adapter=ADAPTER,  # type: ignore[arg-type]
        engine_options={"double_quant": True},
    )  # fmt: skip
    made = emit(setup, Framework.ACCELERATE)
    assert any("load the base quantized: nf4" in note for note in made.notes)
    assert made.setup.chosen_quantization == setup.chosen_quantization


@pytest.mark.parametrize("kind", ["ia3", "prompt"])
@pytest.mark.parametrize("base", ["nf4", "int8", "gptq"])
def test_other_adapters_are_of_the_same_size(kind: str, base: str) -> None:
    plain, packed = (answer(adapter=kind, quantize=name) for name in ("none", base))
    assert plain.trainable_params == packed.trainable_params
    assert plain.num_params == packed.num_params
