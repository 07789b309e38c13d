"""Small rules of torch's order that decide where blocks come to lie; each seen in a real run's events."""

from typing import Any

import pytest

from memplan.estimator.recording import record_and_walk, tape_options
from memplan.graph.core.segments import RESULT, Gradient, Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter
from memplan.memory.deepspeed.modules import Act, find_stops
from memplan.memory.deepspeed.partition import model_weights
from memplan.memory.programs.program import Program
from memplan.memory.programs.weights import buffers_before, weights_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.snapshots.named import NamedLedger, block_labels
from memplan.memory.walks.walk import ForwardWalk
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000,
    "tie_word_embeddings": False,
}  # fmt: skip
BART: dict[str, Any] = {
    "model_type": "bart", "d_model": 256, "encoder_layers": 3, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512, "vocab_size": 800, "max_position_embeddings": 128,
}  # fmt: skip


def given_for(config: dict[str, Any], task: str = "causal-lm", **fields: Any) -> RankInput:
    model = load_model(config, task)
    setup = TrainingSetup(
        **{"seq_len": 64, "micro_batch_size": 2, "kernel_scratch": False, **fields}
    )
    resolved = setup.resolve(model.context_length)
    tape, passes = record_and_walk(model, tape_options(resolved, None))
    return RankInput(tape=tape, passes=passes, setup=resolved)


def layer_names(tape: Tape) -> list[str]:
    layer = next(segment for segment in tape.segments if segment.is_layer)
    return [operation.name for operation in layer.operations]


def test_turned_heads_hand_their_gradient_back_in_rows() -> None:
    names = layer_names(given_for(LLAMA).tape)
    assert names.count("view") == 2, "queries and keys, not values"


def test_qwen3_norms_queries_before_it_projects_keys() -> None:
    tape = given_for({**LLAMA, "model_type": "qwen3", "head_dim": 64}).tape
    layer = next(segment for segment in tape.segments if segment.is_layer)
    modules = [
        tensor.module
        for operation in layer.operations
        for tensor in operation.inputs
        if isinstance(tensor, Parameter)
    ]
    expected = ["q_proj", "q_norm", "k_proj", "k_norm", "v_proj"]
    assert [name.rpartition(".")[2] for name in modules[1:6]] == expected


def test_weights_stand_as_they_are_declared() -> None:
    weights = [weight.name for weight, copy in weights_of(given_for(LLAMA).tape) if copy == 0]
    assert weights.index("input_layernorm.weight") > weights.index("mlp.down_proj.weight")


@pytest.mark.parametrize(("name", "first"), [("grouped_mm", 1), ("cat", 0)])
def test_the_second_gradient_of_a_product_is_computed_first(name: str, first: int) -> None:
    tape = given_for(LLAMA).tape
    layer = next(segment for segment in tape.segments if segment.is_layer)
    tensors = [operation.outputs[0] for operation in layer.operations[:3]]
    gradients = (Gradient.FRESH, Gradient.FRESH, Gradient.NONE)
    operation = Operation(name, tensors, (), (), gradients)
    assert operation.backward_order()[0][0] is tensors[first]


def test_what_an_encoder_returns_goes_when_its_backward_pass_is_over() -> None:
    """Its gradient is handed over, and it is the last layer's output that the decoder kept."""
    program = Program(given_for(BART, "seq2seq-lm"), Ledger())
    program.run(num_steps=2)
    events = program.ledger.events
    freed = [~event for event in events if event < 0]
    assert len(freed) == len(set(freed))
    assert not program.playback.shared
    assert program.playback.flow is None


STABLELM: dict[str, Any] = {
    "model_type": "stablelm", "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8000,
}  # fmt: skip
DEBERTA: dict[str, Any] = {
    "model_type": "deberta", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 800, "max_position_embeddings": 128,
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False,
}  # fmt: skip


def comings_and_goings(tape: Tape) -> list[str]:
    """First results of a layer's operations as they come and, with a minus, as they go."""
    layer = next(segment for segment in tape.segments if segment.is_layer)
    made = {
        operation.outputs[0].storage: f"{operation.name} {position}"
        for position, operation in enumerate(layer.operations)
        if operation.outputs[0].storage not in {each.storage for each in operation.inputs}
    }
    events = ForwardWalk(layer, keep=False).run().events
    return [("" if size else "-") + made[key] for key, size in events if key in made]


def test_stablelm_lets_the_second_norm_go_before_the_sum() -> None:
    order = comings_and_goings(given_for(STABLELM).tape)
    first, second = [name for name in order if name.startswith("layer_norm")]
    last_sum = [name for name in order if name.startswith("add")][-1]
    assert order.index(f"-{second}") < order.index(last_sum) < order.index(f"-{first}")


def test_deberta_looks_for_distances_between_products() -> None:
    """Those of keys once queries are multiplied by them, those of queries before keys are."""
    names = layer_names(given_for(DEBERTA, "masked-lm").tape)
    order = [name for name in names if name in ("matmul", "clamp", "gather")]
    assert order[1:7] == ["matmul", "clamp", "gather", "clamp", "matmul", "gather"]


QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe", "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 800, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


def test_a_product_of_flat_rows_hands_back_no_view() -> None:
    """So that what arrives next is added to it in place: the gate of the shared expert comes first."""
    tape = given_for(QWEN2_MOE, precision="bf16").tape
    layer = next(segment for segment in tape.segments if segment.is_layer)
    kinds = {
        tensor.name: operation.gradients[0]
        for operation in layer.operations
        for tensor in operation.inputs
        if isinstance(tensor, Parameter) and operation.name == "linear"
    }
    assert kinds["mlp.shared_expert_gate.weight"] == Gradient.FRESH
    assert kinds["self_attn.o_proj.weight"] == Gradient.VIEW


PEGASUS: dict[str, Any] = {**BART, "model_type": "pegasus"}


def test_what_bart_hands_to_its_network_goes_with_the_activation() -> None:
    """Its activation and first product are one expression, and the result takes the name."""
    order = comings_and_goings(given_for(PEGASUS, "seq2seq-lm", precision="bf16").tape)
    norm = [name for name in order if name.startswith("layer_norm")][-1]
    activation = next(name for name in order if name.startswith(("gelu", "relu")))
    product = [name for name in order if name.startswith("linear")][-1]
    assert order.index(activation) < order.index(f"-{norm}") < order.index(product)


def test_a_layer_of_xlm_roberta_xl_holds_what_its_modules_are_handed() -> None:
    """The first norm until attention and its sum are done, the activations until the last sum."""
    config = {
        "model_type": "xlm-roberta-xl", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 800,
        "max_position_embeddings": 130, "hidden_dropout_prob": 0.0,
    }  # fmt: skip
    order = comings_and_goings(given_for(config, "masked-lm", precision="bf16").tape)
    norm, other = [name for name in order if name.startswith("layer_norm")]
    first_sum, last_sum = [name for name in order if name.startswith("add")]
    activation = next(name for name in order if name.startswith("gelu"))
    assert order.index(first_sum) < order.index(f"-{norm}") < order.index(other)
    assert order.index(f"-{other}") < order.index(last_sum) < order.index(f"-{activation}")


def test_every_buffer_is_a_block_of_its_own() -> None:
    config = {
        "model_type": "openai-gpt", "n_embd": 256, "n_head": 4, "n_layer": 3, "vocab_size": 800,
        "n_positions": 256,
    }  # fmt: skip
    tape = given_for(config).tape
    places = buffers_before(tape)
    sizes = {weight: [each.num_bytes for each in found] for weight, found in places.items()}
    tables = [weight for weight, found in sizes.items() if 256 * 256 * 4 in found]
    assert [copy for _, copy in tables] == [0, 1, 2]
    assert tape.buffers_bytes == sum(map(sum, sizes.values()))


def test_a_broadcast_summand_is_summed_by_the_engine() -> None:
    """Its formula hands the sum's own gradient on; rows are summed when its shape is checked."""
    config = {
        "model_type": "falcon", "hidden_size": 256, "num_hidden_layers": 2, "bias": True,
        "num_attention_heads": 4, "vocab_size": 800, "new_decoder_architecture": False,
        "multi_query": False, "parallel_attn": False,
    }  # fmt: skip
    tape = given_for(config, precision="bf16").tape
    layer = next(segment for segment in tape.segments if segment.is_layer)
    kinds = {
        kind
        for operation in layer.operations
        for tensor, kind in zip(operation.inputs, operation.gradients, strict=False)
        if isinstance(tensor, Parameter) and operation.name == "add"
    }
    assert kinds == {Gradient.SUMMED}


def gone_before(order: list[str], first: str, then: str) -> bool:
    """Whether one thing happens before another in a layer's forward pass."""
    return order.index(first) < order.index(then)


def test_the_first_attentions_weights_go_when_the_second_ones_come() -> None:
    """``hidden_states, _ = self.encoder_attn(...)`` binds the name again, before dropout and sum."""
    given = given_for(
        {**BART, "dropout": 0.1}, "seq2seq-lm", precision="bf16", attention="eager",
        checkpointing="full",
    )  # fmt: skip
    layers = [segment for segment in given.tape.segments if segment.name == "decoder.layers"]
    operations = layers[0].operations
    made = {each.outputs[0].storage: index for index, each in enumerate(operations)}
    first, second = [index for index, each in enumerate(operations) if each.name == "softmax"]
    weights = operations[first].outputs[0].storage
    assert made[weights] == first
    last = operations[weights.last_read]
    assert second < weights.last_read
    assert any(
        isinstance(each, Parameter) and each.module == "encoder_attn.out_proj"
        for each in last.inputs
    )


def test_what_enters_a_residual_sum_stays_until_the_norm_behind_it() -> None:
    given = given_for(BART, "seq2seq-lm", precision="bf16")
    layer = next(each for each in given.tape.segments if each.name == "decoder.layers")
    norms = [each for each in layer.operations if each.name == "layer_norm"]
    entered = norms[0].outputs[0].storage
    assert layer.operations[entered.last_read] is norms[1]


@pytest.mark.parametrize("batch", [1, 2])
def test_the_gradient_of_keys_is_copied_by_their_projection_alone(batch: int) -> None:
    """It lies dimension by dimension in each head: rows of one sequence by a view, of several by a copy."""
    model = load_model(BART, "seq2seq-lm")
    setup = TrainingSetup(
        seq_len=64, micro_batch_size=batch, precision="bf16", attention="eager",
        kernel_scratch=False,
    ).resolve(model.context_length)  # fmt: skip
    tape, _ = record_and_walk(model, tape_options(setup, None))
    layer = next(each for each in tape.segments if each.name == "encoder.layers")
    operations = layer.operations
    modules = [
        next((each.module for each in one.inputs if isinstance(each, Parameter)), one.name)
        for one in operations
    ]
    keys = modules.index("self_attn.k_proj")
    behind = operations[keys + 1]
    assert (behind.name == "view" and behind.gradients == (Gradient.FRESH,)) == (batch > 1)


def test_masks_are_made_before_what_is_added_to_the_tokens() -> None:
    """And of every sequence, since the class takes a mask of ones where it is given none.

    Positions are counted before that, and looked up behind it (transformers 5.23,
    models/bart/modeling_bart.py:621, :627, :634, :648).
    """
    given = given_for(BART, "seq2seq-lm", precision="bf16", attention="eager")
    embed = next(each for each in given.tape.segments if each.name == "decoder.embed")
    names = [operation.name for operation in embed.operations]
    counted, masked = names.index("arange"), names.index("where")
    assert names[counted : counted + 3] == ["arange", "add_scalar", "ones"]
    assert counted < masked
    assert names[masked + 1 :][:3] == ["add_scalar", "embedding", "add"]
    assert names.count("bitwise_and") == 2


def test_what_an_encoder_returns_goes_with_the_last_that_keeps_it() -> None:
    """The first decoder layer's keys, whose self-attention is still to come."""
    mbart = {**BART, "model_type": "mbart"}
    program = Program(given_for(mbart, "seq2seq-lm", precision="bf16"), NamedLedger())
    program.run(num_steps=1)
    ledger = program.ledger
    assert isinstance(ledger, NamedLedger)
    labels = block_labels(ledger, program.given.tape, program.given.passes, [])
    spans = {
        (label.place, label.name): number
        for number, label in labels.items()
        if label.part == "forward"
    }
    block = spans["encoder.norm", "layer_norm encoder.layer_norm"]
    # The result is the first of the norm's three.
    block = min(
        number for number in (block, block - 1, block - 2) if labels[number].place == "encoder.norm"
    )
    gone = ledger.events.index(~block)
    reached = [labels[each].name for each in range(gone) if ledger.events[each] > 0]
    last = [name for name in reached if name.startswith("backward of linear")][-1]
    assert last == "backward of linear encoder_attn.k_proj"


def test_a_table_beside_the_weights_stands_before_the_first_that_is_declared() -> None:
    m2m = {**BART, "model_type": "m2m_100"}
    tape = given_for(m2m, "seq2seq-lm").tape
    anchors = [anchor[0].name for anchor in buffers_before(tape) if anchor is not None]
    assert anchors == ["self_attn.k_proj.weight"] * 2


def test_a_weights_gradient_is_summed_before_it_is_cast() -> None:
    """OLMo 2 multiplies in fp32: rows are summed in fp32, and the engine casts the sum."""
    config = {**LLAMA, "model_type": "olmo2", "hidden_size": 768}
    program = Program(given_for(config, precision="bf16"), Ledger())
    program.run(num_steps=1)
    events = program.ledger.events
    summed = [number for number, event in enumerate(events) if event == 768 * 4]
    cast = [events[number + 2] for number in summed]
    assert len(summed) == 2 * 3 + 1, "of queries and behind each layer's parts, and the last one"
    assert set(cast) == {768 * 2}
    assert all(~number in events[number + 3 :] for number in summed)


def test_the_gradient_of_a_reciprocal_root_has_two_blocks_beside_it() -> None:
    tape = given_for(LLAMA, kernel_scratch=True).tape
    layer = next(segment for segment in tape.segments if segment.is_layer)
    roots = [each for each in layer.operations if each.name == "rsqrt"]
    size = roots[0].outputs[0].storage.num_bytes
    assert len(roots) == 2
    assert all(each.backward_scratch == (size, size, RESULT) for each in roots)


def test_the_bias_that_a_head_owns_is_gathered_around_it() -> None:
    """RoBERTa's ``lm_head`` owns the bias of its ``decoder``, and is entered before all inside it."""
    config = {
        "model_type": "roberta", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 800,
        "max_position_embeddings": 130,
    }  # fmt: skip
    tape = given_for(config, "masked-lm", num_gpus=4, engine="deepspeed", zero_stage=3).tape
    found, head = find_stops(tape)[-1], tape.segments[-1]
    weights = model_weights(tape)
    (bias,) = [each for each in head.parameters if each.name == "lm_head.bias"]
    fetched = [number for act, number in found.stops.forward[0] if act is Act.FETCH]
    assert found.modules[fetched[0]].weights == [(weights.owners[bias], 0)]
    product = next(index for index, each in enumerate(head.operations) if bias in each.inputs)
    (decoder,) = [number for act, number in found.stops.forward[product] if act is Act.FETCH]
    assert found.modules[decoder].weights == [(0, 0)], "the token table alone"
