"""LXMERT, VisualBERT and FLAVA: BERT's layers on text and on images; of VisualBERT all but its
question-answering tasks is written down, the rest is counted."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.counted import (
    attention,
    classifier,
    counted_model,
    encoder_layer,
    feed_forward,
    masked_lm_head,
    square,
)
from memplan.families.llama import read_activation
from memplan.families.reading_both_ways.encoders import LAYER_NORM, TASKS, read_encoder
from memplan.families.request import ReadRequest, reject_task
from memplan.model.attention import AttentionForm, AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import FEATURES, RegionHeadSpec
from memplan.model.layers import CrossedSpec, LayerSpec, RegionsSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

WORDS = "word_embeddings"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``READERS``."""
    return READERS[request.model_type](reader, request)


def _embeddings(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    table.embedding(WORDS, reader.integer("vocab_size"), hidden)
    table.embedding("position_embeddings", reader.integer("max_position_embeddings"), hidden)
    table.embedding("token_type_embeddings", reader.integer("type_vocab_size"), hidden)
    table.norm("embed_norm", hidden)


# -- LXMERT ----------------------------------------------------------------------------------------


def read_lxmert(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Layers of text, layers of regions, and layers in which each reads the other."""
    task = reject_task(reader, request, Task.PRETRAINING, Task.BASE, Task.QUESTION_ANSWERING)
    hidden = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    reader.divide("hidden_size", hidden, "num_attention_heads", heads)

    if task in TASKS:
        text = read_encoder(_as_layers(reader), request, spare_bias=False)
        return _lxmert(reader, task, text)

    def declare(table: ParameterTable, task: Task) -> None:
        _lxmert_body(table, reader, hidden)
        with table.block("head"):
            square(table, "pooler.dense", hidden)
            if task is Task.PRETRAINING:
                _lxmert_pretraining(table, reader, hidden)
            elif task is Task.QUESTION_ANSWERING:
                _answers(table, reader, hidden)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=reader.integer("vocab_size"), hidden_size=hidden,
        context_length=reader.integer("max_position_embeddings"),
        tied=reader.flag("tie_word_embeddings", default=True),
    )  # fmt: skip


def _as_layers(reader: ConfigReader) -> ConfigReader:
    """The config with the layers of text as its layers."""
    config = {**reader.config, "num_hidden_layers": reader.layers("l_layers")}
    return reader.nested(
        config, reader.path, model_type=reader.model_type,
        defaults=reader.defaults, renamed=reader.renamed,
    )  # fmt: skip


def _lxmert(reader: ConfigReader, task: Task, model: ModelSpec) -> ModelSpec:
    """BERT's layers of text, then those of regions and of both; losses as the ``task_`` flags say."""
    model = with_plain_layers(model)
    pretrains = task is Task.PRETRAINING
    losses = []
    if pretrains and reader.flag("task_obj_predict"):
        losses = [
            (loss, reader.integer(key))
            for loss, key in REGION_LOSSES
            if reader.flag(f"visual_{loss}_loss")
        ]
    regions = RegionHeadSpec(
        activation=read_activation(reader, "hidden_act"),
        norm=LAYER_NORM,
        losses=tuple(losses),
        num_answers=reader.integer("num_qa_labels") if reader.flag("task_qa") else 0,
    )
    crossed = CrossedSpec(
        regions=RegionsSpec(num_features=reader.integer("visual_feat_dim")),
        num_sides=reader.integer("visual_pos_dim"),
        region_layers=reader.layers("r_layers"),
        crossed_layers=reader.layers("x_layers"),
        read_in_the_end=bool(losses),
    )
    stack = replace(model.stacks[0], crossed=crossed)
    head = replace(model.head, regions=regions if pretrains else None, bias_added=True)
    return replace(model, stacks=(stack,), head=head, recomputes=False, eager_attention_only=True)


REGION_LOSSES = (
    ("obj", "num_object_labels"),
    ("attr", "num_attr_labels"),
    (FEATURES, "visual_feat_dim"),
)
"""What is predicted of regions, and the key that says how many numbers it is."""


def _lxmert_body(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    inner = reader.integer("intermediate_size")
    with table.block("embed"):
        _embeddings(table, reader, hidden)
    with table.block("regions.embed"):
        for name in ("feat", "pos"):
            table.linear(f"{name}_projection", reader.integer(f"visual_{name}_dim"), hidden)
            table.norm(f"{name}_norm", hidden)
    for name in ("l", "r"):
        with table.block(f"encoder.{name}_layers", count=reader.layers(f"{name}_layers")):
            encoder_layer(table, hidden, inner)
    with table.block("encoder.x_layers", count=reader.layers("x_layers")):
        attention(table, "cross_attn", hidden)
        table.norm("cross_attn_layer_norm", hidden)
        for name in ("language", "regions"):
            attention(table, f"{name}.self_attn", hidden)
            table.norm(f"{name}.self_attn_layer_norm", hidden)
            feed_forward(table, hidden, inner, name=f"{name}.mlp")
            table.norm(f"{name}.final_layer_norm", hidden)


def _lxmert_pretraining(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    rows = reader.integer("vocab_size")
    square(table, "predictions.transform.dense", hidden)
    table.norm("predictions.transform.norm", hidden)
    table.tied("predictions.decoder", f"{WORDS}.weight", rows, hidden)
    table.parameter("predictions", "bias", rows)
    table.linear("seq_relationship", hidden, 2)
    if reader.flag("task_obj_predict"):
        square(table, "objects.transform.dense", hidden)
        table.norm("objects.transform.norm", hidden)
        for loss, key in REGION_LOSSES:
            if reader.flag(f"visual_{loss}_loss"):
                table.linear(f"objects.{loss}", hidden, reader.integer(key))
    if reader.flag("task_qa"):
        _answers(table, reader, hidden)


def _answers(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    table.linear("answers.dense", hidden, 2 * hidden)
    table.norm("answers.norm", 2 * hidden)
    table.linear("answers.out_proj", 2 * hidden, reader.integer("num_qa_labels"))


# -- VisualBERT ------------------------------------------------------------------------------------


def read_visual_bert(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """BERT with projected image features behind its tokens; ``other`` is visual reasoning."""
    tasks = (Task.BASE, Task.OTHER, Task.QUESTION_ANSWERING, Task.MULTIPLE_CHOICE)
    task = reject_task(reader, request, Task.PRETRAINING, *tasks)
    hidden, labels = reader.integer("hidden_size"), request.labels(reader)
    heads = reader.integer("num_attention_heads")
    reader.divide("hidden_size", hidden, "num_attention_heads", heads)
    if task in TASKS and not reader.flag("bypass_transformer"):
        return _visual_bert(reader, read_encoder(reader, request, spare_bias=True))

    def declare(table: ParameterTable, task: Task) -> None:
        _visual_bert_body(table, reader, hidden)
        with table.block("head"):
            square(table, "pooler.dense", hidden)
            if task is Task.PRETRAINING:
                masked_lm_head(
                    table, hidden, reader.integer("vocab_size"), f"{WORDS}.weight",
                    spare_bias=not reader.flag("tie_word_embeddings", default=True),
                )  # fmt: skip
                table.linear("seq_relationship", hidden, 2)
            elif task is not Task.BASE:
                classifier(table, task, hidden, labels)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=reader.integer("vocab_size"), hidden_size=hidden,
        context_length=reader.integer("max_position_embeddings"),
        tied=reader.flag("tie_word_embeddings", default=True),
    )  # fmt: skip


def with_plain_layers(model: ModelSpec) -> ModelSpec:
    """Attention that the class writes out itself."""

    def adjusted(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        return replace(layer, attention=replace(attention, form=AttentionForm.PLAIN_SCORES))

    stack = model.stacks[0]
    runs = tuple(replace(run, layer=adjusted(run.layer)) for run in stack.runs)
    return replace(model, stacks=(replace(stack, runs=runs),))


def _visual_bert(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """BERT with a picture's regions behind the tokens."""
    model = with_plain_layers(model)
    stack = model.stacks[0]
    assert stack.embedding is not None
    regions = RegionsSpec(
        num_features=reader.integer("visual_embedding_dim"),
        num_positions=reader.integer("max_position_embeddings"),
        num_types=reader.integer("type_vocab_size"),
    )
    embedding = replace(stack.embedding, regions=regions, positions_in_place=True)
    stack = replace(stack, embedding=embedding)
    return replace(model, stacks=(stack,), eager_attention_only=True)


def _visual_bert_body(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    inner = reader.integer("intermediate_size")
    with table.block("embed"):
        _embeddings(table, reader, hidden)
    with table.block("visual.embed"):
        rows = reader.integer("max_position_embeddings")
        table.embedding("visual_position_embeddings", rows, hidden)
        types = reader.integer("type_vocab_size")
        table.embedding("visual_token_type_embeddings", types, hidden)
        table.linear("visual_projection", reader.integer("visual_embedding_dim"), hidden)
    # With ``bypass_transformer`` images pass one more layer only.
    count = reader.layers("num_hidden_layers") + reader.flag("bypass_transformer")
    with table.block("encoder.layers", count=count):
        encoder_layer(table, hidden, inner)


# -- FLAVA -----------------------------------------------------------------------------------------

FLAVA_PARTS = ("text", "image", "multimodal")


def read_flava(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Three towers: text, image, both; pretraining adds a codebook and five heads."""
    task = reject_task(reader, request, Task.PRETRAINING, Task.BASE)
    parts = {name: reader.child(f"{name}_config", f"flava_{name}_model") for name in FLAVA_PARTS}
    codebook = reader.child("image_codebook_config", "flava_image_codebook")
    text = parts["text"]

    def declare(table: ParameterTable, task: Task) -> None:
        for name, part in parts.items():
            _flava_tower(table, part, name)
        _flava_projections(table, reader, parts)
        if task is Task.BASE:
            return
        if reader.flag("init_codebook"):
            _codebook(table, codebook)
        with table.block("head"):
            spare = not reader.flag("tie_word_embeddings", default=True)
            for name in ("mim", "mmm_image"):
                _flava_predictions(table, parts["image"], name, spare_bias=spare)
            for name in ("mlm", "mmm_text"):
                _flava_predictions(table, text, name, spare_bias=spare)
            hidden = reader.integer("hidden_size")
            square(table, "itm_head.pooler.dense", hidden)
            table.linear("itm_head.seq_relationship", hidden, 2)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=text.integer("vocab_size"), hidden_size=text.integer("hidden_size"),
        context_length=text.integer("max_position_embeddings"), tied=False,
    )  # fmt: skip


def _flava_predictions(
    table: ParameterTable, part: ConfigReader, name: str, *, spare_bias: bool
) -> None:
    """No output matrix is tied; what ``tie_word_embeddings`` ties are the heads' two biases."""
    masked_lm_head(
        table, part.integer("hidden_size"), part.integer("vocab_size"), "",
        name=f"{name}_head", spare_bias=spare_bias,
    )  # fmt: skip


def _flava_tower(table: ParameterTable, part: ConfigReader, name: str) -> None:
    """Norms before each half of a layer, one more and a pooler behind; no bias of the queries',
    keys' and values' where ``qkv_bias`` says so."""
    hidden, inner = part.integer("hidden_size"), part.integer("intermediate_size")
    heads = part.integer("num_attention_heads")
    part.divide("hidden_size", hidden, "num_attention_heads", heads)
    with table.block(f"{name}.embed"):
        if name == "text":
            _embeddings(table, part, hidden)
        elif name == "image":
            _patches(table, part, hidden)
        elif part.flag("use_cls_token"):
            table.parameter(name, "cls_token", 1, 1, hidden)
    with table.block(f"{name}.layers", count=part.layers("num_hidden_layers")):
        attention(table, "self_attn", hidden, bias=part.flag("qkv_bias"), output_bias=True)
        table.norm("self_attn_layer_norm", hidden)
        feed_forward(table, hidden, inner)
        table.norm("final_layer_norm", hidden)
    with table.block(f"{name}.norm"):
        table.norm("layer_norm", hidden)
        square(table, "pooler.dense", hidden)


def _patches(table: ParameterTable, part: ConfigReader, hidden: int) -> None:
    side, patch = part.integer("image_size"), part.integer("patch_size")
    table.parameter("embeddings", "cls_token", 1, 1, hidden)
    table.parameter("embeddings", "mask_token", 1, 1, hidden)
    rows = (side // patch) ** 2 + 1
    table.parameter("embeddings", "position_embeddings", 1, rows, hidden)
    table.convolution("patches", part.integer("num_channels"), hidden, patch, patch)


def _flava_projections(
    table: ParameterTable, reader: ConfigReader, parts: dict[str, ConfigReader]
) -> None:
    shared = reader.integer("projection_dim")
    joint = parts["multimodal"].integer("hidden_size")
    with table.block("projections"):
        table.parameter("flava", "logit_scale")
        for name in ("image", "text"):
            hidden = parts[name].integer("hidden_size")
            table.linear(f"{name}_projection", hidden, shared)
            table.linear(f"{name}_to_mm_projection", hidden, joint)


CODEBOOK_WIDTHS = (1, 2, 4, 8)
"""What each of the codebook's four groups multiplies its hidden size by."""


def _codebook(table: ParameterTable, part: ConfigReader) -> None:
    """DALL-E's encoder of images, which is frozen unless the config says otherwise."""
    hidden = part.integer("hidden_size")
    part.divide("hidden_size", hidden, "the bottleneck's factor", 4)
    frozen = part.flag("freeze")
    with table.block("codebook"):
        for name, inputs, outputs, kernel in _codebook_convolutions(part, hidden):
            if frozen:
                table.untrained(name, "weight", outputs, inputs, kernel, kernel)
                table.untrained(name, "bias", outputs)
            else:
                table.convolution(name, inputs, outputs, kernel, kernel)


def _codebook_convolutions(part: ConfigReader, hidden: int) -> list[tuple[str, int, int, int]]:
    """Name, channels in and out, and side of each: four groups, each block with a bypass."""
    found = [("input", part.integer("input_channels"), hidden, 7)]
    inputs = hidden
    for group, factor in enumerate(CODEBOOK_WIDTHS):
        outputs = factor * hidden
        for index in range(part.layers("num_blocks_per_group")):
            name, narrow = f"{group}.{index}", outputs // 4
            if inputs != outputs:
                found.append((f"{name}.bypass", inputs, outputs, 1))
            found += [
                (f"{name}.conv1", inputs, narrow, 3),
                (f"{name}.conv2", narrow, narrow, 3),
                (f"{name}.conv3", narrow, narrow, 3),
                (f"{name}.conv4", narrow, outputs, 1),
            ]
            inputs = outputs
    return [*found, ("output", inputs, part.integer("vocab_size"), 1)]


READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "lxmert": read_lxmert,
    "visual_bert": read_visual_bert,
    "flava": read_flava,
}
