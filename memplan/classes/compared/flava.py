"""FLAVA: towers for texts, for pictures and for both; pretraining adds a codebook and five heads. It is counted.

(transformers 5.23: models/flava)
"""

from typing import ClassVar

from memplan.classes.compared.clip import patches_across
from memplan.classes.encoders.tables import TableParts
from memplan.classes.pictures.base import PictureModel, PictureTask
from memplan.classes.sensed.counted import Parts
from memplan.graph.modules.basic import LayerNorm, Linear
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole


def square(size: int, *, bias: bool = True) -> Linear:
    """From a width to itself."""
    return Linear(size, size, bias=bias)


def flava_layer(part: ConfigReader) -> Module:
    """Norms before each half; no bias of the queries', keys' and values' where ``qkv_bias`` says so."""
    size, inner = part.integer("hidden_size"), part.integer("intermediate_size")
    part.divide("hidden_size", size, "num_attention_heads", part.integer("num_attention_heads"))
    heads = {name: square(size, bias=part.flag("qkv_bias")) for name in ("query", "key", "value")}
    output = Parts(dense=Linear(size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT))
    return Parts(
        attention=Parts(attention=Parts(**heads), output=output),
        intermediate=Parts(dense=Linear(size, inner, bias=True)),
        output=Parts(dense=Linear(inner, size, bias=True)),
        layernorm_before=LayerNorm(size), layernorm_after=LayerNorm(size),
    )  # fmt: skip


class FlavaImageEmbeddings(Module):
    def __init__(self, part: ConfigReader) -> None:
        size, patch = part.integer("hidden_size"), part.integer("patch_size")
        self.cls_token, self.mask_token = Weight(1, 1, size), Weight(1, 1, size)
        self.position_embeddings = Weight(1, patches_across(part) ** 2 + 1, size)
        projection = Conv2d(part.integer("num_channels"), size, patch, stride=patch, bias=True)
        self.patch_embeddings = Parts(projection=projection)


class FlavaTower(Module):
    """Layers, a norm and a pooler behind what is embedded."""

    def __init__(self, part: ConfigReader, name: str, embeddings: Module | None) -> None:
        self.size = part.integer("hidden_size")
        if embeddings is not None:
            self.embeddings = embeddings
        elif part.flag("use_cls_token"):
            self.cls_token = Weight(1, 1, self.size)
        kinds = [None] * part.layers("num_hidden_layers")
        self.encoder = Parts(layer=LayerList(f"{name}.layers", kinds, lambda _: flava_layer(part)))
        self.layernorm, self.pooler = LayerNorm(self.size), Parts(dense=square(self.size))


CODEBOOK_WIDTHS = (1, 2, 4, 8)
"""What each of the codebook's four groups multiplies its hidden size by."""


class FlavaImageCodebook(Module):
    """DALL-E's encoder of images, which is frozen unless the config says otherwise."""

    def __init__(self, part: ConfigReader) -> None:
        hidden = before = part.integer("hidden_size")
        part.divide("hidden_size", hidden, "the bottleneck's factor", 4)
        made = {"input": Conv2d(part.integer("input_channels"), hidden, 7, bias=True)}
        for group, factor in enumerate(CODEBOOK_WIDTHS, 1):
            size = factor * hidden
            for index in range(1, part.layers("num_blocks_per_group") + 1):
                name, narrow = f"group_{group}.group.block_{index}", size // 4
                if before != size:
                    made[f"{name}.id_path"] = Conv2d(before, size, 1, bias=True)
                for number, (inputs, outputs, kernel) in enumerate(
                    (
                        (before, narrow, 3),
                        (narrow, narrow, 3),
                        (narrow, narrow, 3),
                        (narrow, size, 1),
                    ),
                    1,
                ):
                    convolution = Conv2d(inputs, outputs, kernel, bias=True)
                    made[f"{name}.res_path.path.conv_{number}"] = convolution
                before = size
        made["output.conv"] = Conv2d(before, part.integer("vocab_size"), 1, bias=True)
        self.blocks = Parts(**made)
        for each in self.parameters():
            each.trainable = not part.flag("freeze")


class FlavaMaskedPredictionHead(Module):
    """No matrix is tied; what ``tie_word_embeddings`` ties are the two biases."""

    def __init__(self, part: ConfigReader, *, tied: bool) -> None:
        size, rows = part.integer("hidden_size"), part.integer("vocab_size")
        self.transform = Parts(dense=square(size), LayerNorm=LayerNorm(size))
        self.decoder, self.bias = Linear(size, rows, bias=True), Weight(rows)
        if tied:
            self.decoder.bias = self.bias


class FlavaForPreTraining(PictureTask):
    def add_head(self, config: ConfigReader) -> None:
        """What is masked of pictures, of texts and of both, and whether they belong together."""
        parts = flava_parts(config)
        if config.flag("init_codebook"):
            codebook = config.child("image_codebook_config", "flava_image_codebook")
            self.image_codebook = FlavaImageCodebook(codebook)
        tied = config.flag("tie_word_embeddings")
        for name, part in (
            ("mim", "image"),
            ("mlm", "text"),
            ("mmm_image", "image"),
            ("mmm_text", "text"),
        ):
            setattr(self, f"{name}_head", FlavaMaskedPredictionHead(parts[part], tied=tied))
        size = config.integer("hidden_size")
        pooler = Parts(dense=square(size))
        self.itm_head = Parts(pooler=pooler, seq_relationship=Linear(size, 2, bias=True))


def flava_parts(config: ConfigReader) -> dict[str, ConfigReader]:
    """The towers' configs."""
    names = "text", "image", "multimodal"
    return {name: config.child(f"{name}_config", f"flava_{name}_model") for name in names}


class FlavaModel(PictureModel):
    prefix = "flava"
    part_types = (
        "flava_text_model", "flava_image_model", "flava_multimodal_model", "flava_image_codebook",
    )  # fmt: skip
    endings: ClassVar[dict[str, type[PictureTask]]] = {"ForPreTraining": FlavaForPreTraining}

    def __init__(self, config: ConfigReader) -> None:
        text, image, both = flava_parts(config).values()
        self.text_model = FlavaTower(text, "text_model", TableParts(text))
        self.image_model = FlavaTower(image, "image_model", FlavaImageEmbeddings(image))
        self.multimodal_model = FlavaTower(both, "multimodal_model", None)
        self.width, shared = self.text_model.size, config.integer("projection_dim")
        self.vocab = text.integer("vocab_size")
        self.context = text.integer("max_position_embeddings")
        for name, tower in (("image", self.image_model), ("text", self.text_model)):
            setattr(self, f"{name}_projection", Linear(tower.size, shared, bias=True))
            joint = Linear(tower.size, self.multimodal_model.size, bias=True)
            setattr(self, f"{name}_to_mm_projection", joint)
        self.logit_scale = Weight()
        side = image.integer("image_size")
        self.picture = self.described(side, channels=image.integer("num_channels"))

    def left_out(self, ending: str) -> bool:
        """Its operations are not written down."""
        del ending
        return True
