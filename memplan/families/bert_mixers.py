"""BERT's kin that mix tokens otherwise: LUKE, LiLT, FNet, SqueezeBERT and BigBird.

Each is BERT as ``memplan.families.encoders`` reads it, with its layers replaced (transformers 5.23, the
class's modelling file). Tasks that BERT's heads do not cover are counted, as ``counted_encoders`` does.
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.families import counted_encoders
from memplan.families.counted import CLASSIFIED
from memplan.families.encoders import LAYER_NORM, ROBERTA, TASKS, Variation, read_encoder
from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest, reject_task
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionForm, AttentionSpec, BlockSparseSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import (
    LanguageAdaptersSpec,
    LayerSpec,
    LayoutStreamSpec,
    LayoutTablesSpec,
    NormPlacement,
)
from memplan.model.mixers import (
    ChannelsFirstNetworkSpec,
    ChannelsFirstSpec,
    ConvolvedHeadsSpec,
    FourierSpec,
    GroupedNetworkSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Kin:
    """One type: how its embeddings and heads differ from BERT's, and what its layers are."""

    variation: Variation
    adjusted: Callable[[ConfigReader, ModelSpec], ModelSpec]


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``KIN``."""
    kin = KIN[request.model_type]
    counted = counted_encoders.FORMS.get(request.model_type)
    tasks = kin.variation.tasks if counted is None else counted.tasks
    if reject_task(reader, request, *tasks) not in kin.variation.tasks:
        return counted_encoders.read(reader, request)
    return kin.adjusted(reader, read_encoder(reader, request, kin.variation))


def with_layers(model: ModelSpec, adjusted: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
    """The same model with each of its layers replaced."""
    stack = model.stacks[0]
    runs = tuple(replace(run, layer=adjusted(run.layer)) for run in stack.runs)
    return replace(model, stacks=(replace(stack, runs=runs),))


def with_plain_scores(model: ModelSpec) -> ModelSpec:
    """Attention that the class writes out itself, always with a mask of all pairs of tokens."""

    def adjusted(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        return replace(layer, attention=replace(attention, form=AttentionForm.PLAIN_SCORES))

    model = with_layers(model, adjusted)
    stack = replace(model.stacks[0], spare_mask=True)
    return replace(model, stacks=(stack,), eager_attention_only=True)


def _luke(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """Tables, queries and predictions of entities serve nothing where a batch has none."""
    table, hidden = ParameterTable(), model.hidden_size
    count, width = reader.integer("entity_vocab_size"), reader.integer("entity_emb_size")
    with table.block("entities.embed"):
        _idle(table, "entity_embeddings", (count, width), bias=0)
        if width != hidden:
            _idle(table, "entity_embedding_dense", (hidden, width), bias=0)
        _idle(
            table,
            "position_embeddings",
            (reader.integer("max_position_embeddings"), hidden),
            bias=0,
        )
        _idle(table, "token_type_embeddings", (reader.integer("type_vocab_size"), hidden), bias=0)
        _idle(table, "embed_norm", (hidden,), bias=hidden)
    base = table.blocks()
    if model.task is Task.MASKED_LM:
        with table.block("entities.predictions"):
            _idle(table, "entity_predictions.transform.dense", (width, hidden), bias=width)
            _idle(table, "entity_predictions.transform.norm", (width,), bias=width)
            if not model.head.tied:
                _idle(table, "entity_predictions.decoder", (count, width), bias=0)
            _idle(table, "entity_predictions", (), bias=count)
    model = with_plain_scores(model)
    model = with_layers(model, _with_last_queries)
    if reader.flag("use_entity_aware_attention"):
        model = with_layers(model, _with_entity_queries)
    stack = model.stacks[0]
    assert stack.embedding is not None
    embedding = replace(stack.embedding, types_last=True)
    model = replace(model, stacks=(replace(stack, embedding=embedding),))
    # The words' output matrix is never tied (``_tied_weights_keys``).
    head = replace(model.head, tied=False, spare_bias=not model.head.tied)
    return replace(model, head=head, tables=table.blocks(), base_tables=base)


def _with_last_queries(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.attention, AttentionSpec)
    return replace(layer, attention=replace(layer.attention, query_projected_last=True))


def _with_entity_queries(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.attention, AttentionSpec)
    names = ("w2e_query", "e2w_query", "e2e_query")
    return replace(layer, attention=replace(layer.attention, idle_projections=names))


def _idle(table: ParameterTable, module: str, shape: tuple[int, ...], *, bias: int) -> None:
    if shape:
        table.parameter(module, "weight", *shape, unused=True)
    if bias:
        table.parameter(module, "bias", bias, unused=True)


def _lilt(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """A narrow stream of boxes beside the text's, with attention that adds both streams' scores."""
    hidden, shrink = model.hidden_size, reader.integer("channel_shrink_ratio")
    width = reader.divide("hidden_size", hidden, "channel_shrink_ratio", shrink)
    inner = reader.integer("intermediate_size")
    inner = reader.divide("intermediate_size", inner, "channel_shrink_ratio", shrink)
    reader.divide("hidden_size", hidden, "the coordinates of a box and its sides", 6)

    def adjusted(layer: LayerSpec) -> LayerSpec:
        scores, network = layer.attention, layer.feed_forward
        assert isinstance(scores, AttentionSpec)
        assert isinstance(network, FeedForwardSpec)
        head_dim = reader.divide("hidden_size", width, "num_attention_heads", scores.num_heads)
        layout = LayoutStreamSpec(
            width=width, head_dim=head_dim, network=replace(network, intermediate_size=inner)
        )
        return replace(layer, layout=layout)

    model = with_layers(model, adjusted)
    stack = model.stacks[0]
    assert stack.embedding is not None
    rows = reader.integer("max_2d_position_embeddings")
    positions = reader.integer("max_position_embeddings")
    tables = LayoutTablesSpec(
        num_rows=rows, num_positions=positions, width=width,
        norm=LAYER_NORM, dropout=stack.embedding.dropout,
    )  # fmt: skip
    embedding = replace(stack.embedding, layout=tables, positions_in_place=True)
    stack = replace(stack, embedding=embedding, spare_mask=True)
    return replace(model, stacks=(stack,), eager_attention_only=True)


def _fnet(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """A Fourier transform in place of attention, without dropout; a projection of the embeddings."""
    del reader

    def adjusted(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=FourierSpec(), feed_forward_dropout_only=True)

    model = with_layers(model, adjusted)
    stack = model.stacks[0]
    assert stack.embedding is not None
    embedding = replace(stack.embedding, projected_first=True)
    return replace(model, stacks=(replace(stack, embedding=embedding),))


def _squeezebert(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """Every linear layer is a grouped convolution; the class cannot checkpoint."""
    hidden, inner = model.hidden_size, reader.integer("intermediate_size")
    if reader.integer("embedding_size") != hidden:
        key = "embedding_size"
        raise reader.fail(key, f"must be the hidden_size ({hidden}) in this class")

    def groups(key: str, *sizes: int) -> int:
        found = reader.integer(key)
        for size in sizes:
            reader.divide(key, size, key, found)
        return found

    attention = ChannelsFirstSpec(
        num_heads=reader.integer("num_attention_heads"),
        groups=(groups("q_groups", hidden), groups("k_groups", hidden), groups("v_groups", hidden)),
        output_groups=groups("post_attention_groups", hidden),
        dropout=reader.number("attention_probs_dropout_prob"),
    )

    def adjusted(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.feed_forward, FeedForwardSpec)
        network = ChannelsFirstNetworkSpec(
            intermediate_size=inner,
            activation=layer.feed_forward.activation,
            up_groups=groups("intermediate_groups", hidden, inner),
            down_groups=groups("output_groups", hidden, inner),
        )
        return replace(layer, attention=attention, feed_forward=network)

    model = with_layers(model, adjusted)
    stack = replace(model.stacks[0], spare_mask=True)
    return replace(model, stacks=(stack,), recomputes=False, eager_attention_only=True)


def _big_bird(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """Blocks, or all pairs of tokens as ``attention_type`` says; ``use_bias`` is not the output's."""
    key, bias = "attention_type", reader.flag("use_bias")
    kind = reader.choice(key, reader.text(key), ("block_sparse", "original_full"))

    def biased(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        attention = replace(
            layer.attention,
            query_bias=bias,
            key_bias=bias,
            value_bias=bias,
            hands_on_weights=False,
        )
        return replace(layer, attention=attention)

    model = with_plain_scores(with_layers(model, biased))
    stack = model.stacks[0]
    assert stack.embedding is not None
    embedding = replace(stack.embedding, positions_in_place=True, dropout_first=True)
    model = replace(model, stacks=(replace(stack, embedding=embedding),))
    if kind == "original_full":
        return model

    def sparse(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        blocks = BlockSparseSpec(
            full=layer.attention,
            block_size=reader.integer("block_size"),
            num_random_blocks=reader.integer("num_random_blocks"),
        )
        return replace(layer, attention=blocks)

    model = with_layers(model, sparse)
    stack = replace(model.stacks[0], spare_mask=False)
    return replace(model, stacks=(stack,))


def _convbert(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """Half of the heads convolve; with ``num_groups``, networks of grouped linear layers."""
    hidden, inner = model.hidden_size, reader.integer("intermediate_size")
    heads = max(reader.integer("num_attention_heads") // reader.integer("head_ratio"), 1)
    size = reader.divide("hidden_size", hidden, "num_attention_heads", heads) // 2
    if 2 * size * heads != hidden:
        key = "hidden_size"
        raise reader.fail(key, f"{hidden} is odd, but its heads are halved")
    groups = reader.integer("num_groups")
    for name, number in (("hidden_size", hidden), ("intermediate_size", inner)):
        reader.divide(name, number, "num_groups", groups)

    def adjusted(layer: LayerSpec) -> LayerSpec:
        scores = layer.attention
        assert isinstance(scores, AttentionSpec)
        assert isinstance(layer.feed_forward, FeedForwardSpec)
        halved = ConvolvedHeadsSpec(
            scores=replace(scores, num_heads=heads, num_kv_heads=heads, head_dim=size),
            kernel=reader.integer("conv_kernel_size"),
        )
        if groups == 1:
            return replace(layer, attention=halved)
        network = GroupedNetworkSpec(
            intermediate_size=inner, activation=layer.feed_forward.activation, groups=groups
        )
        return replace(layer, attention=halved, feed_forward=network)

    model = with_layers(model, adjusted)
    stack = replace(model.stacks[0], spare_mask=True)
    return replace(model, stacks=(stack,), eager_attention_only=True)


def _xmod(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """Every layer has an adapter for each language; the norms as three flags say."""
    factor = reader.integer("adapter_reduction_factor")
    width = model.hidden_size // factor
    if not width:
        key = "adapter_reduction_factor"
        raise reader.fail(key, f"leaves nothing of {model.hidden_size} dimensions")
    own = reader.flag("adapter_layer_norm")
    adapters = LanguageAdaptersSpec(
        num_languages=len(counted_encoders.languages(reader)),
        width=width,
        activation=read_activation(reader, "hidden_act"),
        own_norm=own,
        norm_reused=not own and reader.flag("adapter_reuse_layer_norm"),
        norm_first=reader.flag("ln_before_adapter"),
    )
    if not reader.flag("pre_norm"):
        return with_layers(model, lambda layer: replace(layer, adapters=adapters))
    before = NormPlacement.PRE
    model = with_layers(model, lambda layer: replace(layer, adapters=adapters, placement=before))
    return replace(model, stacks=(replace(model.stacks[0], final_norm=LAYER_NORM),))


KIN: dict[str, Kin] = {
    "xmod": Kin(variation=ROBERTA, adjusted=_xmod),
    "lilt": Kin(
        variation=replace(ROBERTA, token_type_buffer=False, tasks=(Task.BASE, *CLASSIFIED)),
        adjusted=_lilt,
    ),
    "convbert": Kin(
        variation=Variation(
            pooler_tasks=(),
            classifier_dense=Activation.GELU,
            classifier_first_dropout=True,
            spare_bias=False,
        ),
        adjusted=_convbert,
    ),
    "big_bird": Kin(
        variation=Variation(
            head_activation=None,
            pooler_tasks=tuple(task for task in Task if task is not Task.QUESTION_ANSWERING),
            classifier_dense=Activation.GELU,
            classifier_first_dropout=True,
            tasks=(
                Task.MASKED_LM,
                Task.BASE,
                Task.SEQUENCE_CLASSIFICATION,
                Task.TOKEN_CLASSIFICATION,
                Task.PRETRAINING,
            ),
        ),
        adjusted=_big_bird,
    ),
    "luke": Kin(
        variation=Variation(
            positions_from_ids=True,
            names_weights=False,
            pooler_tasks=(Task.BASE, Task.SEQUENCE_CLASSIFICATION, Task.MASKED_LM),
            head_activation=Activation.GELU,
        ),
        adjusted=_luke,
    ),
    "fnet": Kin(
        variation=Variation(
            head_activation=None,
            pooler_tasks=tuple(Task),
            attends=False,
            tasks=(*TASKS, Task.PRETRAINING),
        ),
        adjusted=_fnet,
    ),
    "squeezebert": Kin(
        variation=Variation(
            token_type_buffer=False,
            head_activation=None,
            pooler_tasks=tuple(Task),
            names_weights=False,
        ),
        adjusted=_squeezebert,
    ),
}
