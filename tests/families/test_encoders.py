"""BERT's kin: counts for every task, what a config may leave out, and how the parts are used."""

from collections.abc import Mapping

import pytest

from memplan.dtypes import DType
from memplan.errors import ConfigError, SetupError
from memplan.families import read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.memory.step import StepWalk
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models.defaults import class_defaults
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels
from tests.plain_step import plain_step

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
         "num_hidden_layers": 24}  # fmt: skip
BUCKETS = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
           "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False}  # fmt: skip
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1}
SMALL = {"model_type": "bert", "hidden_size": 64, "intermediate_size": 128,
         "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000}  # fmt: skip
ALBERT = {**SMALL, "model_type": "albert", "embedding_size": 32}
DEBERTA = {**SMALL, "model_type": "deberta", "relative_attention": True,
           "pos_att_type": "c2p|p2c", "position_biased_input": False}  # fmt: skip


def read(
    config: Mapping[str, object], task: Task | None = None, num_labels: int | None = None
) -> ModelSpec:
    return read_model(
        config, source="config.json", name="x", defaults=class_defaults(), task=task,
        num_labels=num_labels,
    )  # fmt: skip


def record(config: Mapping[str, object], task: Task | None = None, **changes: DType) -> Tape:
    options = TapeOptions(batch_size=2, seq_len=32, **changes)  # type: ignore[arg-type]
    return record_model(read(config, task), options)


def saved_bytes(model: ModelSpec, kernels: Kernels) -> int:
    tape = record_model(model, TapeOptions(batch_size=2, seq_len=128, kernels=kernels))
    return plain_step(StepWalk(tape).run()).after_forward.total_bytes


# Sizes from the models' configs; counts from transformers 5.23.
@pytest.mark.parametrize(
    ("model_type", "sizes", "task", "total", "base", "largest"),
    [
        pytest.param(
            "bert", {"vocab_size": 119_547}, Task.MASKED_LM,
            177_974_523, 177_853_440, 91_931_643, id="bert-multilingual",
        ),
        pytest.param(
            "bert", {}, Task.SEQUENCE_CLASSIFICATION,
            109_483_778, 109_482_240, 23_440_896, id="bert-classifier",
        ),
        pytest.param(
            "roberta", {**LARGE, **ROBERTA}, Task.MASKED_LM,
            355_412_057, 355_359_744, 51_521_625, id="roberta-large",
        ),
        pytest.param(
            "xlm-roberta", {**ROBERTA, "vocab_size": 250_002}, Task.MASKED_LM,
            278_295_186, 278_043_648, 192_251_538, id="xlm-roberta-base",
        ),
        pytest.param(
            "xlm-roberta", {**LARGE, **ROBERTA, "vocab_size": 250_002, "num_labels": 3},
            Task.SEQUENCE_CLASSIFICATION,
            559_893_507, 559_890_432, 256_002_048, id="xlm-roberta-large-xnli",
        ),
        pytest.param(
            "xlm-roberta-xl", {}, Task.MASKED_LM,
            3_482_741_760, 3_482_485_760, 642_503_680, id="xlm-roberta-xl",
        ),
        pytest.param(
            "camembert", {**LARGE, **ROBERTA, "vocab_size": 32_005}, Task.MASKED_LM,
            336_695_557, 336_661_504, 32_805_125, id="camembert-large",
        ),
        pytest.param(
            "distilbert", {}, Task.SEQUENCE_CLASSIFICATION,
            66_955_010, 66_362_880, 23_440_896, id="distilbert-classifier",
        ),
        pytest.param(
            "distilbert", {}, Task.QUESTION_ANSWERING,
            66_364_418, 66_362_880, 23_440_896, id="distilbert-spans",
        ),
        pytest.param(
            "electra", {"embedding_size": 768}, Task.MASKED_LM,
            33_740_602, 33_511_168, 23_471_418, id="electra-generator",
        ),
        pytest.param(
            "electra", {}, Task.PRETRAINING,
            13_549_057, 13_483_008, 3_906_816, id="electra-discriminator",
        ),
        pytest.param(
            "layoutlm", {}, Task.MASKED_LM,
            113_250_618, 112_627_968, 23_471_418, id="layoutlm-base",
        ),
        pytest.param(
            "esm",
            {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 33,
             "num_attention_heads": 20, "vocab_size": 33, "position_embedding_type": "rotary"},
            Task.MASKED_LM, 651_043_254, 651_040_661, 6_558_720, id="esm2-650m",
        ),
        pytest.param(
            "jina_embeddings_v3", {}, Task.MASKED_LM,
            559_616_146, 559_364_096, 256_252_050, id="jina-embeddings-v3",
        ),
        pytest.param(
            "nomic_bert", {}, Task.MASKED_LM,
            137_354_304, 136_731_648, 23_476_032, id="nomic-bert",
        ),
        pytest.param(
            "eurobert",
            {"hidden_size": 1152, "intermediate_size": 4096, "num_attention_heads": 18,
             "num_key_value_heads": 6, "num_hidden_layers": 26},
            Task.MASKED_LM, 755_625_600, 607_874_688, 147_750_912, id="eurobert-610m",
        ),
        pytest.param(
            "albert", {}, Task.MASKED_LM,
            206_368_944, 222_595_584, 67_125_248, id="albert-xxlarge",
        ),
        pytest.param(
            "deberta",
            {"relative_attention": True, "pos_att_type": "c2p|p2c", "num_labels": 3,
             "position_biased_input": False},
            Task.SEQUENCE_CLASSIFICATION,
            139_194_627, 138_601_728, 38_603_520, id="deberta-mnli",
        ),
        pytest.param(
            "deberta-v2", {**LARGE, **BUCKETS}, Task.MASKED_LM,
            435_191_908, 434_012_160, 131_302_500, id="deberta-v3-large",
        ),
        pytest.param(
            "deberta-v2", {**BUCKETS, "conv_kernel_size": 3, "conv_act": "gelu"}, Task.MASKED_LM,
            887_085_156, 884_593_152, 196_889_700, id="deberta-v2-xlarge",
        ),
    ],
)  # fmt: skip
def test_counts(
    model_type: str, sizes: dict[str, object], task: Task, total: int, base: int, largest: int
) -> None:
    counts = count_parameters(read({"model_type": model_type, **sizes}, task))
    assert (counts.total, counts.base, counts.largest_layer) == (total, base, largest)


def test_a_bare_name_is_bert_base() -> None:
    assert count_parameters(read({"model_type": "bert"}, Task.BASE)).total == 109_482_240


@pytest.mark.parametrize(
    ("model_type", "positions", "context"),
    [("bert", 512, 512), ("xlm-roberta", 514, 512), ("esm", 1026, 1024), ("distilbert", 512, 512)],
)
def test_context_leaves_the_padding_token_out(
    model_type: str, positions: int, context: int
) -> None:
    config = {"model_type": model_type, "vocab_size": 100, "max_position_embeddings": positions}
    assert read(config).context_length == context


def test_the_discriminator_says_what_it_was_trained_for() -> None:
    config = {**SMALL, "architectures": ["ElectraForPreTraining"]}
    assert read({**config, "model_type": "electra"}).task is Task.PRETRAINING
    assert read(config).task is Task.MASKED_LM
    assert read({**config, "model_type": "electra"}, Task.MASKED_LM).task is Task.MASKED_LM


def test_an_untied_matrix_has_its_own_weight_and_bias() -> None:
    tied, untied = (
        count_parameters(read({**SMALL, "tie_word_embeddings": flag})).total
        for flag in (True, False)
    )
    assert untied - tied == 1000 * 64 + 1000


def test_labels_are_counted_and_overruled() -> None:
    config = {**SMALL, "id2label": {"0": "a", "1": "b", "2": "c"}}
    three = count_parameters(read(config, Task.TOKEN_CLASSIFICATION)).total
    nine = count_parameters(read(config, Task.TOKEN_CLASSIFICATION, 9)).total
    assert nine - three == 6 * 65


def test_layouts_pooler_is_owned_but_never_trained() -> None:
    tape = record({**SMALL, "model_type": "layoutlm"}, Task.MASKED_LM)
    unused = {each.name for segment in tape.segments for each in segment.parameters if each.unused}
    assert unused == {"layoutlm.pooler.dense.weight", "layoutlm.pooler.dense.bias"}


def test_alberts_layers_share_one_set_of_parameters() -> None:
    one, four = (
        count_parameters(read({**ALBERT, "num_hidden_layers": count})).total for count in (1, 4)
    )
    assert one == four
    layers = [each for each in record(ALBERT).segments if each.name == "encoder.layers"]
    assert len(layers) == 2
    assert not layers[1].parameters


def test_albert_cannot_checkpoint() -> None:
    with pytest.raises(SetupError, match="albert cannot checkpoint"):
        record_model(read(ALBERT), TapeOptions(checkpointed_layers=1.0))


def test_alberts_groups_have_one_each() -> None:
    one, two = (
        count_parameters(read({**ALBERT, "num_hidden_groups": count})).total for count in (1, 2)
    )
    attention = 4 * (64 * 64 + 64)
    assert two - one == attention + 2 * 64 * 128 + 128 + 64 + 4 * 64


def test_a_projection_under_autocast_sets_the_first_layer_apart() -> None:
    config = {**SMALL, "model_type": "electra", "embedding_size": 32}
    tape = record(config, autocast=DType.BF16)
    repeats = [each.repeat for each in tape.segments if each.name == "encoder.layers"]
    assert repeats == [1, 1]
    tape = record(config)
    repeats = [each.repeat for each in tape.segments if each.name == "encoder.layers"]
    assert repeats == [2]


def test_eager_attention_keeps_the_scores() -> None:
    model = read(SMALL)
    eager = saved_bytes(model, Kernels(attention=AttentionKernel.EAGER))
    fused = saved_bytes(model, Kernels(attention=AttentionKernel.SDPA))
    # Softmax, dropout's result and its mask for 2 sequences, 4 heads, 128 x 128 pairs, 2 layers;
    # against it the log-sum-exp that sdpa's kernel keeps.
    scores = 2 * 2 * 4 * 128 * 128
    assert eager - fused == scores * (4 + 4 + 1) - 2 * (2 * 4 * 128 * 4)


def test_deberta_knows_no_other_attention_than_eager() -> None:
    model = read(DEBERTA)
    kernels = [Kernels(attention=kernel) for kernel in AttentionKernel]
    assert len({saved_bytes(model, each) for each in kernels}) == 1


def test_distances_have_a_table_and_two_projections() -> None:
    with_them, without = (
        count_parameters(read({**DEBERTA, "relative_attention": flag})).total
        for flag in (True, False)
    )
    assert with_them - without == 2 * 512 * 64 + 2 * (2 * 64 * 64 + 64)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        pytest.param({**SMALL, "num_attention_heads": 5}, "64 is not divisible", id="heads"),
        pytest.param({**SMALL, "is_decoder": True}, "is_decoder: only the encoder", id="decoder"),
        pytest.param(
            {**SMALL, "model_type": "roberta", "max_position_embeddings": 2},
            "leaves none behind the padding", id="positions",
        ),
        pytest.param({**ALBERT, "inner_group_num": 2}, "only 1 layer a group", id="inner-groups"),
        pytest.param(
            {**ALBERT, "num_hidden_groups": 3}, "must be from 1 to 2", id="more-groups-than-layers"
        ),
        pytest.param({**DEBERTA, "legacy": False}, "legacy: the other head", id="deberta-head"),
        pytest.param(
            {**SMALL, "model_type": "esm", "position_embedding_type": "relative"},
            "known are absolute, rotary", id="positions-of-no-known-kind",
        ),
        pytest.param(
            {**SMALL, "model_type": "esm", "is_folding_model": True}, "folding trunk", id="folding"
        ),
        pytest.param(
            {**SMALL, "model_type": "eurobert", "classifier_pooling": "max"},
            "known are bos, late, mean", id="pooling",
        ),
        pytest.param({**SMALL, "hidden_act": "swoosh"}, "'swoosh' is not known", id="activation"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(config: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(config)


@pytest.mark.parametrize("model_type", ["nomic_bert", "esm", "eurobert"])
def test_no_class_for_spans(model_type: str) -> None:
    with pytest.raises(ConfigError, match="has no task 'question-answering'"):
        read({**SMALL, "model_type": model_type}, Task.QUESTION_ANSWERING)
