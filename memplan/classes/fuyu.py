"""Fuyu, trained on text: Persimmon, and a linear layer for image patches that no text reaches.

Its published configs are flat; newer ones nest Persimmon's keys in ``text_config``.

(transformers 5.23, models/fuyu: ``FuyuConfig.__post_init__``, ``FuyuModel``)
"""

from collections.abc import Mapping

from memplan.classes.gpt_neox import PersimmonAttention, PersimmonDecoderLayer, PersimmonModel
from memplan.classes.llama import LlamaAttention, LlamaDecoderLayer
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import Linear, spare
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Site
from memplan.model.config import ConfigReader

TEXT_KEYS = (
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "hidden_act", "qk_layernorm", "hidden_dropout",
    "attention_dropout", "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
"""What a flat config says about the text model."""


class FuyuAttention(PersimmonAttention):
    """Its inner config asks for a cache, unless layers are checkpointed (``DynamicCache.update``)."""

    def remembered(self, key: Handle, value: Handle) -> tuple[Handle, Handle]:
        if self.run.options.checkpointed_layers:
            return key, value
        return cached(key, key.dtype), cached(value, key.dtype)


def cached(x: Handle, dtype: DType) -> Handle:
    """Joined to an empty tensor of the keys' format; the outputs hold it."""
    joined = empty(x.run, x.shape, dtype)
    gradient = Gradient.ALIAS if x.dtype is dtype else Gradient.FRESH
    x.run.record(OperationKind.CAT, (x.record,), (joined.record,), gradients=(gradient,))
    x.run.cache(joined.record)
    return x.leads_to(joined, in_rows(x.shape))


class FuyuDecoderLayer(PersimmonDecoderLayer):
    attention_class: type[LlamaAttention] = FuyuAttention


class FuyuModel(PersimmonModel):
    prefix = "model.language_model"
    inner = "language_model"
    part_types = ("persimmon",)
    layer_class: type[LlamaDecoderLayer] = FuyuDecoderLayer

    def __init__(self, config: ConfigReader) -> None:
        text, patch = self.text_config(config), config.integer("patch_size")
        super().__init__(text)
        self.patch_features = patch * patch * config.integer("num_channels")
        width = text.integer("hidden_size")
        self.vision_embed_tokens = Linear(self.patch_features, width, bias=True)

    @classmethod
    def text_config(cls, config: ConfigReader) -> ConfigReader:
        nested = config.mapping("text_config")
        found = nested
        if found is None:
            found = {key: config.config[key] for key in TEXT_KEYS if key in config.config}
        row = config.all_defaults.get("persimmon", {})
        defaults = row.get("defaults")
        return config.nested(
            found,
            "" if nested is None else "text_config.",
            model_type="persimmon",
            defaults=defaults if isinstance(defaults, Mapping) else {},
        )

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:  # noqa: ARG002
        """The outer config says so."""
        return config.flag("tie_word_embeddings")

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """Its tables stand in two modules of the class."""
        owns = super().attach(site, path, within)
        outer = path.removesuffix(self.inner)
        table = f"{self.inner}.{self.table}"
        self.children[self.table].attach(site, f"{outer}{table}", table)
        name = "vision_embed_tokens"
        self.children[name].attach(site, f"{outer}{name}", name)
        return owns

    def embedded(self, batch: int, length: int) -> Handle:
        found = super().embedded(batch, length)
        spare(self.vision_embed_tokens)
        return found
