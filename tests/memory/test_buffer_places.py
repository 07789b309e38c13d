"""Tables beside the weights: where among them an engine loads them, and in which format it leaves them."""

import pytest

from memplan.estimator import estimate
from memplan.estimator.named_run import named_run
from memplan.memory.account import ComponentKind
from memplan.memory.replaying.ledger import Part
from memplan.memory.snapshots.named import Label
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

M2M = {
    "model_type": "m2m_100", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "vocab_size": 512, "max_position_embeddings": 128, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip
"""Its encoder's and its decoder's positions are buffers, each read before that part's first layer."""


def asked_for(**setup: object) -> list[tuple[int, Label]]:
    """Blocks of a run of two GPUs, with what each is for."""
    model = load_model(M2M, "seq2seq-lm")
    fields = {"num_gpus": 2, "seq_len": 32, "micro_batch_size": 2, "checkpointing": "full"}
    run = named_run(estimate(model, TrainingSetup(**{**fields, **setup}), None, rank=0))  # type: ignore[arg-type]
    return [(run.ledger.events[block], label) for block, label in sorted(run.labels.items())]


@pytest.mark.parametrize(
    "setup",
    [
        {"engine": "ddp", "num_gpus": 1},
        *({"engine": "deepspeed", "zero_stage": stage, "engine_options": {"zero_init": False}} for stage in (1, 2, 3)),
        *({"engine": "fsdp", "engine_options": {"init_device": place}} for place in ("to_empty", "cuda")),
    ],
    ids=lambda setup: "-".join(map(str, [*setup.values()][:2])),
)  # fmt: skip
def test_a_buffer_is_loaded_where_its_module_stands(setup: dict[str, object]) -> None:
    """``Module.to`` and ``to_empty`` go module by module (torch 2.13, ``Module._apply``)."""
    loaded = [label for _, label in asked_for(**setup) if label.part is Part.LOAD]
    places = [n for n, each in enumerate(loaded) if each.kind is ComponentKind.BUFFERS]
    assert len(places) == 2
    encoder, decoder = places
    # The shared table stands before the encoder's positions, and the decoder's behind all of the encoder.
    assert encoder == 1
    before, behind = loaded[decoder - 1], loaded[decoder + 1]
    assert (before.place, behind.place) == ("encoder.norm", "decoder.layers.0")


def test_fsdp2_leaves_buffers_in_fp32_and_casts_what_the_first_layer_is_handed() -> None:
    """``MixedPrecisionPolicy`` casts weights as it gathers them, and arguments as a unit begins."""
    blocks = asked_for(engine="fsdp", precision="bf16-mixed")
    embedded = [
        (label.name, size)
        for size, label in blocks
        if label.part is Part.FORWARD and label.step == 0 and label.place == "encoder.embed"
    ]
    numel = 2 * 32 * 64
    assert ("index_select", 4 * numel) in embedded
    assert ("add", 4 * numel) in embedded
    assert embedded[-1] == ("to", 2 * numel)
    whole = asked_for(engine="ddp", num_gpus=1, precision="bf16")
    assert ("index_select", 2 * numel) in [(label.name, size) for size, label in whole]


CONFORMER = {
    "model_type": "wav2vec2-conformer", "architectures": ["Wav2Vec2ConformerForCTC"], "hidden_size": 1024,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "mask_time_prob": 0.0, "vocab_size": 32,
    "position_embeddings_type": "relative", "feat_proj_dropout": 0.1,
}  # fmt: skip


def conformer_blocks(
    precision: str = "bf16", **fields: object
) -> list[tuple[int, int, int, Label]]:
    """When each block of a run is made and when it is freed, its bytes, and what it is for."""
    setup = TrainingSetup(micro_batch_size=2, precision=precision, num_gpus=1, engine="ddp")
    run = named_run(estimate(load_model({**CONFORMER, **fields}), setup, None, rank=0))
    freed = {~each: n for n, each in enumerate(run.ledger.events) if each < 0}
    return [
        (block, freed.get(block, -1), run.ledger.events[block], label)
        for block, label in sorted(run.labels.items())
    ]


def test_positions_of_a_conformer_come_before_its_convolution() -> None:
    """``embed_positions`` is its encoder's first module (transformers 5.23, ``Wav2Vec2ConformerEncoder``)."""
    loaded = [label for *_, label in conformer_blocks() if label.part is Part.LOAD]
    place = next(n for n, each in enumerate(loaded) if "tables" in each.name)
    assert loaded[place + 1].name.startswith("encoder.pos_conv_embed")


def test_what_enters_a_conformer_is_its_models_variable() -> None:
    """``hidden_states`` in ``Wav2Vec2ConformerModel.forward`` names something else once the encoder returned."""
    blocks = [
        each for each in conformer_blocks() if each[-1].part is Part.FORWARD and not each[-1].step
    ]
    # The mask of the dropout before it lives until backward.
    entered = min(
        freed
        for _, freed, _, label in blocks
        if label.place == "feature_projection" and label.name == "dropout"
    )
    last = max(made for made, *_, label in blocks if label.place == "encoder.layers.1")
    head = min(made for made, *_, label in blocks if label.place == "head")
    assert last < entered < head


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


WHOLE, READ = 2 * 5000 - 1, 2 * 1499 - 1
"""Rows that the table has at first, and those that 30 seconds of sound read."""


@pytest.mark.parametrize(
    ("precision", "fields", "loaded_bytes", "made_bytes"),
    [
        pytest.param("bf16-amp", {}, 4 * WHOLE * 1024, 2 * WHOLE * 1024, id="another format"),
        pytest.param("bf16-amp", {"max_source_positions": 100}, 4 * 199 * 1024, 2 * READ * 1024, id="longer"),
        pytest.param("bf16-amp", {"position_embeddings_type": "rotary"}, 0, 2 * 2 * 1499 * 256, id="its own"),
        pytest.param("bf16", {}, 2 * WHOLE * 1024, 0, id="as it was"),
    ],
)  # fmt: skip
def test_a_table_is_made_anew_by_the_first_forward_pass(
    precision: str, fields: dict[str, object], loaded_bytes: int, made_bytes: int
) -> None:
    """``self.pe = self.extend_pe(hidden_states, self.pe)``, ``cached_rotary_positional_embedding``.

    The new one is there before the old one goes, and stays (transformers 5.23, modeling_wav2vec2_conformer.py).
    """
    tables = [
        (label.part, size, made, freed)
        for made, freed, size, label in conformer_blocks(precision, **fields)
        if label.kind is ComponentKind.BUFFERS and size > 4096
    ]
    sizes = [(Part.LOAD, rounded(loaded_bytes)), (Part.FORWARD, rounded(made_bytes))]
    assert [each[:2] for each in tables] == [each for each in sizes if each[1]]
    assert tables[-1][3] == -1
    if loaded_bytes and made_bytes:
        assert tables[0][3] == tables[1][2] + 1


def test_statistics_of_a_batch_norm_stand_behind_its_weights() -> None:
    loaded = [label.name for *_, label in conformer_blocks() if label.part is Part.LOAD]
    place = loaded.index("conv_module.batch_norm.bias")
    assert ["tables" in each for each in loaded[place + 1 : place + 5]] == [True] * 3 + [False]
