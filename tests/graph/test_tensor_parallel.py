"""A model split over tensor-parallel ranks: what a rank has of it, and which collectives run."""

from collections import Counter
from typing import Any

import pytest

import memplan
from memplan.compute.flops import count_flops
from memplan.errors import SetupError
from memplan.families import supported_families
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.counts import total_parameters, trainable_parameters
from memplan.graph.model import record_model
from memplan.graph.splitting.tensor_plans import PLANS
from memplan.training.splitting.parallelism import TensorParallel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
PLAIN = TensorParallel(degree=4)
WHOLE = TensorParallel(degree=4, sequence=True, loss=True)
COLLECTIVES = (
    OperationKind.ALL_GATHER, OperationKind.ALL_REDUCE, OperationKind.REDUCE_SCATTER,
    OperationKind.COPY_TO_RANKS,
)  # fmt: skip


def tape_of(group: TensorParallel | None, **config: Any) -> Tape:
    model = memplan.load_model({**LLAMA, **config})
    return record_model(model, TapeOptions(seq_len=64, tensor_parallel=group))


def shapes(tape: Tape) -> dict[str, tuple[int, ...]]:
    return {each.name: each.shape for segment in tape.segments for each in segment.parameters}


def test_a_rank_has_its_heads_columns_rows_and_words() -> None:
    found = shapes(tape_of(PLAIN))
    assert found["embed_tokens.weight"] == found["lm_head.weight"] == (250, 256)
    assert found["self_attn.q_proj.weight"] == (64, 256)
    assert found["self_attn.k_proj.weight"] == (32, 256)
    assert found["self_attn.o_proj.weight"] == (256, 64)
    assert found["mlp.up_proj.weight"] == (128, 256)
    assert found["mlp.down_proj.weight"] == (256, 128)
    assert found["norm.weight"] == (256,)


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_counted_whole(tied: bool) -> None:
    whole, rank = (tape_of(group, tie_word_embeddings=tied) for group in (None, WHOLE))
    assert total_parameters(rank) == total_parameters(whole)
    assert trainable_parameters(rank) == trainable_parameters(whole)


@pytest.mark.parametrize("tied", [True, False])
def test_an_uneven_vocabulary_gives_the_first_ranks_a_row_more(tied: bool) -> None:
    """DTensor pads the shorter columns, joins them, and cuts the padding off in one more copy."""
    tape = tape_of(PLAIN, vocab_size=1001, tie_word_embeddings=tied)
    assert shapes(tape)["embed_tokens.weight"] == (251, 256)
    whole = tape_of(None, vocab_size=1001, tie_word_embeddings=tied)
    assert total_parameters(tape) == total_parameters(whole)
    assert tape.returned[0].numel == 64 * 1001


def test_the_ranks_share_the_flops() -> None:
    """What all have whole, all compute: DeepSeek-V3's attention."""
    model = memplan.load_model(LLAMA)
    whole, rank = (count_flops(tape_of(group), model).total for group in (None, PLAIN))
    assert rank * 4 == whole
    v3 = {**LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
          "n_group": 1, "topk_group": 1}  # fmt: skip
    whole, rank = (count_flops(tape_of(group, **v3), model).total for group in (None, PLAIN))
    assert whole < rank * 4 < whole * 4


def collectives(tape: Tape, segment: int) -> Counter[OperationKind]:
    kinds = [operation.kind for operation in tape.segments[segment].operations]
    return Counter(kind for kind in kinds if kind in COLLECTIVES)


def test_each_split_layer_adds_up_by_itself() -> None:
    """Five columns read the same tensor on every rank, two rows are added up."""
    found = collectives(tape_of(PLAIN), 1)
    assert found == {OperationKind.COPY_TO_RANKS: 5, OperationKind.ALL_REDUCE: 2}


def test_with_shares_of_the_sequence_each_block_gathers_once() -> None:
    found = collectives(tape_of(WHOLE), 1)
    assert found == {OperationKind.ALL_GATHER: 2, OperationKind.REDUCE_SCATTER: 2}


@pytest.mark.parametrize(("group", "gathers"), [(PLAIN, 1), (WHOLE, 1)])
def test_logits_are_joined_unless_the_loss_is_split(group: TensorParallel, gathers: int) -> None:
    """With both, what is gathered is the sequence, before the output matrix."""
    tape = tape_of(group)
    assert collectives(tape, -1)[OperationKind.ALL_GATHER] == gathers
    assert tape.returned[0].numel == 64 * (250 if group.loss else 1000)


def test_the_gradient_of_the_table_is_whole() -> None:
    table = tape_of(PLAIN).segments[0].parameters[0]
    assert (table.numel, table.gradient_numel) == (250 * 256, 1000 * 256)
    tied = tape_of(PLAIN, tie_word_embeddings=True).segments[0].parameters[0]
    assert tied.gradient_numel == tied.numel


def test_norms_have_a_part_of_a_sum_on_shares_of_the_sequence() -> None:
    for group, expected in ((PLAIN, False), (WHOLE, True)):
        layer = tape_of(group).segments[1]
        assert {each.added_up for each in layer.parameters if "norm" in each.name} == {expected}
        assert not any(each.added_up for each in layer.parameters if "proj" in each.name)


@pytest.mark.parametrize(
    ("config", "group", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 384}, PLAIN,
         "number of heads is 6, which 4 ranks cannot share evenly: 6 = 4 x 1 + 2"),
        ({"num_key_value_heads": 2}, PLAIN, "key/value heads is 2, which 4 ranks"),
        ({"intermediate_size": 510}, PLAIN, "510 = 4 x 127 + 2"),
        ({"vocab_size": 1001}, WHOLE, "vocabulary is 1001, which 4 ranks"),
        ({"vocab_size": 5}, PLAIN, "vocabulary is 5, which 4 ranks"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 384,
          "intermediate_size": 768}, TensorParallel(degree=3, loss=True), "1000 = 3 x 333 + 1"),
        ({"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 1024},
         TensorParallel(degree=128, sequence=True), "seq_len"),
    ],
)  # fmt: skip
def test_a_degree_that_does_not_divide_is_refused(
    config: dict[str, Any], group: TensorParallel, words: str
) -> None:
    with pytest.raises(SetupError) as error:
        tape_of(group, **config)
    assert words in str(error.value)


MIXTURE: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 8, "topk_method": "greedy",
}  # fmt: skip


def test_a_rank_has_a_share_of_every_experts_width() -> None:
    found = shapes(tape_of(PLAIN, **MIXTURE))
    assert found["mlp.gate.weight"] == (8, 256)
    assert found["mlp.experts.gate_up_proj"] == (8, 256, 256)
    assert found["mlp.experts.down_proj"] == (8, 256, 128)


def test_a_rank_has_its_heads_of_latent_attention() -> None:
    found = shapes(tape_of(PLAIN, **LATENT))
    assert found["self_attn.q_a_proj.weight"] == (48, 256)
    assert found["self_attn.q_b_proj.weight"] == (2 * 48, 48)
    assert found["self_attn.kv_a_proj_with_mqa.weight"] == (48, 256)
    assert found["self_attn.kv_b_proj.weight"] == (2 * 64, 32)
    assert found["mlp.shared_experts.up_proj.weight"] == (16, 256)
    v3 = {**LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
          "n_group": 1, "topk_group": 1}  # fmt: skip
    assert shapes(tape_of(PLAIN, **v3))["self_attn.q_b_proj.weight"] == (8 * 48, 48)


def test_rows_normed_as_a_whole_are_joined() -> None:
    """OLMo 2: three products are joined at once, and its output's rows cut out again."""
    tape = tape_of(PLAIN, model_type="olmo2", architectures=["Olmo2ForCausalLM"])
    found = collectives(tape, 1)
    assert found[OperationKind.ALL_GATHER] == 3
    assert shapes(tape)["self_attn.q_proj.weight"] == (64, 256)
    assert shapes(tape)["self_attn.q_norm.weight"] == (256,)
    assert shapes(tape)["self_attn.o_proj.weight"] == (256, 64)


@pytest.mark.parametrize("config", [MIXTURE, LATENT])
def test_every_plan_counts_the_model_whole(config: dict[str, Any]) -> None:
    whole = total_parameters(tape_of(None, **config))
    assert total_parameters(tape_of(PLAIN, **config)) == whole
    assert total_parameters(tape_of(WHOLE, **config)) == whole


def test_with_shares_of_the_sequence_a_mixture_is_added_up_once() -> None:
    """Its routed and its shared experts together, and what is whole has parts of its gradients."""
    tape = tape_of(WHOLE, **LATENT)
    found = collectives(tape, 2)
    assert found == {OperationKind.ALL_GATHER: 2, OperationKind.REDUCE_SCATTER: 2}
    parts = {each.name: each.added_up for each in tape.segments[2].parameters}
    assert parts["mlp.gate.weight"]
    assert parts["self_attn.q_a_proj.weight"]
    assert not parts["self_attn.q_b_proj.weight"]
    assert not parts["mlp.experts.down_proj"]


def test_plans_are_of_types_that_are_read() -> None:
    assert set(supported_families()) >= set(PLANS)


def test_what_torch_itself_does_not_run_is_refused() -> None:
    with pytest.raises(SetupError, match="clamps queries in place"):
        tape_of(PLAIN, model_type="olmo", architectures=["OlmoForCausalLM"], clip_qkv=8.0)


@pytest.mark.parametrize("name", ["t5-small", "gpt2", "bert-base-uncased", "falcon-7b"])
def test_what_is_not_split_is_refused_by_name(name: str) -> None:
    with pytest.raises(SetupError, match="tensor_parallel: is not modelled for"):
        record_model(memplan.load_model(name), TapeOptions(seq_len=64, tensor_parallel=PLAIN))
