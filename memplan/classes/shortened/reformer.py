"""Reformer: reversible layers, attention by hashing or in chunks, axial positions. It is counted.

(transformers 5.23: models/reformer)
"""

from typing import ClassVar

from memplan.classes.pictures.base import PictureModel, PictureTask
from memplan.classes.sensed.counted import Parts
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole

HASHED, LOCAL = "lsh", "local"


class ReformerEmbeddings(Module):
    """Positions are a table along each axis, side by side in the columns, or one plain table."""

    def __init__(self, config: ConfigReader, hidden: int) -> None:
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.word_embeddings = Embedding(rows, hidden, role=role)
        if not config.flag("axial_pos_embds"):
            positions = Embedding(config.integer("max_position_embeddings"), hidden)
            self.position_embeddings = Parts(embedding=positions)
            return
        lengths = config.integers("axial_pos_shape", minimum=1)
        widths = config.integers("axial_pos_embds_dim", minimum=1)
        if len(lengths) != len(widths) or sum(widths) != hidden:
            problem = f"must have one entry for each axis and sum to the hidden_size ({hidden})"
            error = config.fail("axial_pos_embds_dim", problem)
            raise error
        tables = {
            f"weights.{axis}": Weight(length, *(1,) * (len(widths) - 1), width)
            for axis, (length, width) in enumerate(zip(lengths, widths, strict=True))
        }
        self.position_embeddings = Parts(**tables)


def reformer_layer(config: ConfigReader, hidden: int, kind: str) -> Module:
    """Hashed attention has one projection for queries and keys; no projection has a bias."""
    width = config.integer("num_attention_heads") * config.integer("attention_head_size")
    inner = config.integer("feed_forward_size")
    names = ("query_key", "value") if kind == HASHED else ("query", "key", "value")
    return Parts(
        attention=Parts(
            layer_norm=LayerNorm(hidden),
            self_attention=Parts(**{name: Linear(hidden, width) for name in names}),
            output=Parts(dense=Linear(width, hidden, role=WeightRole.ATTENTION_OUTPUT)),
        ),
        feed_forward=Parts(
            layer_norm=LayerNorm(hidden), dense=Parts(dense=Linear(hidden, inner, bias=True)),
            output=Parts(dense=Linear(inner, hidden, bias=True)),
        ),
    )  # fmt: skip


class ReformerForCausalLM(PictureTask):
    """The output matrix is never tied, and its bias is the head's (``ReformerModelWithLMHead``)."""

    def add_head(self, config: ConfigReader) -> None:
        del config
        decoder = Linear(2 * self.model.width, self.spec.vocab_size, role=WeightRole.OUTPUT)
        self.lm_head = Parts(decoder=decoder, bias=Weight(self.spec.vocab_size))


class ReformerForSequenceClassification(PictureTask):
    def add_head(self, config: ConfigReader) -> None:
        del config
        hidden = self.model.width
        dense = Linear(2 * hidden, hidden, bias=True)
        out_proj = Linear(hidden, self.spec.num_labels, bias=True)
        self.classifier = Parts(dense=dense, out_proj=out_proj)


class ReformerForQuestionAnswering(PictureTask):
    def add_head(self, config: ConfigReader) -> None:
        del config
        self.qa_outputs = Linear(2 * self.model.width, self.spec.num_labels, bias=True)


class ReformerModel(PictureModel):
    """What the layers return is twice as wide as the hidden size."""

    prefix = "reformer"
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "ForCausalLM": ReformerForCausalLM,
        "ForMaskedLM": ReformerForCausalLM,
        "ForSequenceClassification": ReformerForSequenceClassification,
        "ForQuestionAnswering": ReformerForQuestionAnswering,
    }

    def __init__(self, config: ConfigReader) -> None:
        hidden = self.width = config.integer("hidden_size")
        self.vocab, self.context = (
            config.integer(key) for key in ("vocab_size", "max_position_embeddings")
        )
        kinds = config.texts("attn_layers")
        for kind in kinds:
            config.choice("attn_layers", kind, (HASHED, LOCAL))
        if not kinds:
            error = config.fail("attn_layers", "is empty")
            raise error
        self.embeddings = ReformerEmbeddings(config, hidden)
        layers = LayerList("layers", kinds, lambda kind: reformer_layer(config, hidden, kind))
        self.encoder = Parts(layers=layers, layer_norm=LayerNorm(2 * hidden))
        self.picture = self.described(0, channels=0)

    def left_out(self, ending: str) -> bool:
        """Its operations are not written down."""
        del ending
        return True
