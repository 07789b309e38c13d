"""LongT5 and Switch Transformers: T5's layers with another attention, or with experts.

Both are counted: LongT5's attention in blocks and Switch's routing by capacity are not written
down as operations.
"""

from memplan.families.counted import attention, counted_model, feed_forward, shared_table
from memplan.families.request import ReadRequest, reject_task
from memplan.families.t5 import read_feed_forward
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task, Tying


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a model, as the config gives them."""

    vocab_size: int
    hidden_size: int
    width: int
    """Of all heads together."""
    num_heads: int
    num_buckets: int
    """Rows of a table of relative positions."""
    inner_size: int
    gated: bool
    num_layers: int
    num_decoder_layers: int
    tied: bool
    global_attention: bool = False
    """LongT5's encoder sees a summary of each block beside its neighbours."""
    experts: "Experts | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Switch Transformers' mixtures."""

    num_experts: int
    router_bias: bool
    encoder_step: int
    """Every how many layers of the encoder there is one; 0 for none."""
    decoder_step: int

    def sparse(self, index: int, *, decoder: bool) -> bool:
        """Whether a layer has experts (``SwitchTransformersStack.__init__``)."""
        step = self.decoder_step if decoder else self.encoder_step
        return step == 1 or (step > 0 and index % step == 1)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of LongT5 or Switch Transformers."""
    task = reject_task(reader, request, Task.SEQ2SEQ_LM, Task.BASE)
    num_layers = reader.layers("num_layers")
    num_decoder_layers = reader.layers("num_decoder_layers", default=num_layers)
    num_heads = reader.integer("num_heads")
    # LongT5's class ties whatever the file says, as T5's does.
    tied = reader.flag("tie_word_embeddings", default=True)
    shape = Shape(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("d_model"),
        width=num_heads * reader.integer("d_kv"),
        num_heads=num_heads,
        num_buckets=reader.integer("relative_attention_num_buckets"),
        inner_size=reader.integer("d_ff"),
        gated=request.model_type == "longt5" and read_feed_forward(reader, 0.0).gated,
        num_layers=num_layers,
        num_decoder_layers=num_decoder_layers,
        tied=tied or request.model_type == "longt5",
        global_attention=_sees_summaries(reader, request),
        experts=_experts(reader, num_layers, num_decoder_layers),
    )

    def declare(table: ParameterTable, task: Task) -> None:
        _declare(table, shape, task)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        context_length=reader.integer("n_positions", "max_position_embeddings", default=512),
        tied=shape.tied,
        tying=Tying.CLEAR if tied is shape.tied else Tying.AMBIGUOUS,
    )  # fmt: skip


def _sees_summaries(reader: ConfigReader, request: ReadRequest) -> bool:
    if request.model_type != "longt5":
        return False
    key = "encoder_attention_type"
    return reader.choice(key, reader.text(key), ("local", "transient-global")) != "local"


def _experts(reader: ConfigReader, num_layers: int, num_decoder_layers: int) -> Experts | None:
    if reader.raw("num_experts") is None:
        return None
    return Experts(
        num_experts=reader.integer("num_experts"),
        router_bias=reader.flag("router_bias"),
        encoder_step=_step(reader, "encoder", num_layers),
        decoder_step=_step(reader, "decoder", num_decoder_layers),
    )


def _step(reader: ConfigReader, name: str, num_layers: int) -> int:
    """Derived from the number of sparse layers, unless the file says it: that comes last and wins
    (``SwitchTransformersConfig.__post_init__``)."""
    given = reader.optional_integer(f"{name}_sparse_step", minimum=0)
    if given is not None:
        return given
    sparse = reader.integer(f"num_sparse_{name}_layers", minimum=0)
    return num_layers // sparse if sparse else num_layers


def _declare(table: ParameterTable, shape: Shape, task: Task) -> None:
    stacks = ("encoder", "decoder")
    shared_table(table, shape.vocab_size, shape.hidden_size, stacks, tied=shape.tied)
    _declare_stack(table, shape, shape.num_layers, decoder=False)
    _declare_stack(table, shape, shape.num_decoder_layers, decoder=True)
    if task is not Task.BASE:
        with table.block("head"):
            table.tied("lm_head", "shared.weight", shape.vocab_size, shape.hidden_size)


def _declare_stack(table: ParameterTable, shape: Shape, count: int, *, decoder: bool) -> None:
    """Tables of relative positions in the first layer only; then the layers, dense and sparse."""
    name = "decoder" if decoder else "encoder"
    summaries = shape.global_attention and not decoder
    with table.block(f"{name}.positions"):
        table.embedding("self_attn.relative_bias", shape.num_buckets, shape.num_heads)
        if summaries:
            table.embedding("self_attn.global_bias", shape.num_buckets, shape.num_heads)
    with table.block(f"{name}.layers", count=count):
        attention(table, "self_attn", shape.hidden_size, width=shape.width, bias=False)
        table.norm("self_attn_layer_norm", shape.hidden_size, bias=False)
        if summaries:
            table.norm("self_attn.global_norm", shape.hidden_size, bias=False)
        if decoder:
            attention(table, "cross_attn", shape.hidden_size, width=shape.width, bias=False)
            table.norm("cross_attn_layer_norm", shape.hidden_size, bias=False)
        table.norm("final_layer_norm", shape.hidden_size, bias=False)
    experts, sparse = shape.experts, 0
    if experts is not None:
        sparse = sum(experts.sparse(index, decoder=decoder) for index in range(count))
        _declare_experts(table, shape, experts, sparse, name)
    with table.block(f"{name}.mlp", count=count - sparse):
        _declare_feed_forward(table, shape, "mlp", gated=shape.gated)
    with table.block(f"{name}.norm"):
        table.norm("final_layer_norm", shape.hidden_size, bias=False)


def _declare_experts(
    table: ParameterTable, shape: Shape, experts: Experts, count: int, name: str
) -> None:
    """One expert of each layer is passed by a token, the others are idle; none is gated."""
    with table.block(f"{name}.router", count=count):
        table.linear("mlp.router", shape.hidden_size, experts.num_experts, bias=experts.router_bias)
    with table.block(f"{name}.experts", count=count):
        _declare_feed_forward(table, shape, "mlp.experts", gated=False)
    idle = count * (experts.num_experts - 1)
    with table.block(f"{name}.idle_experts", count=idle, idle=True):
        _declare_feed_forward(table, shape, "mlp.experts", gated=False)


def _declare_feed_forward(table: ParameterTable, shape: Shape, name: str, *, gated: bool) -> None:
    hidden, inner = shape.hidden_size, shape.inner_size
    feed_forward(table, hidden, inner, name=name, bias=False, gated=gated)
