"""What a model sees and hears: pictures and clips, and their sizes."""

from collections.abc import Iterator

from memplan.graph.towers.images import picture_size
from memplan.model.pictures import PictureSpec
from memplan.model.sounds import SoundSpec
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.joining import Joining
from memplan.model.towers.compared.queried import InstructionBody
from memplan.model.towers.gridded.nets import PixelsBody
from memplan.model.towers.patches import PatchesBody
from memplan.model.towers.sounds import SignalBody
from memplan.model.towers.tiles import TilesBody

MEANT: tuple[tuple[type, str], ...] = (
    (InstructionBody, "the whole text as the instruction that the Q-Former reads, too"),
)
"""The step that is meant where a class leaves it open, or has no loss of its own, by what it is made of."""
VECTORS = "the sum of all vectors as the loss: the class has none"
"""The same of retrievers (``ColPaliForRetrieval``)."""
TEXT_ALONE = "text alone: nothing runs through what sees or hears, nor does a gradient reach it"
UNSEEN = "no source picture: what is drawn is given as tokens"
"""What GLM-Image is not shown."""


def _bodies(model: ModelSpec) -> Iterator[TowerBody]:
    for block in model.tables:
        body = block.body
        if isinstance(body, ChainBody):
            yield from body.parts
        elif body is not None:
            yield body


def _is_known(model: ModelSpec) -> bool:
    return model.join is not None or not (model.stacks or model.activations_left_out)


def pictures_of(
    model: ModelSpec,
) -> PatchesBody | PixelsBody | TilesBody | PictureSpec | None:
    """How a model's pictures become tokens; None where it sees none, or that is not known."""
    if model.picture is not None and model.picture.channels and _is_known(model):
        return model.picture
    found = (
        each for each in _bodies(model) if isinstance(each, PatchesBody | PixelsBody | TilesBody)
    )
    return next(found, None) if _is_known(model) else None


def tiles_of(model: ModelSpec) -> int:
    """Tiles or crops that each picture comes in."""
    pictures = pictures_of(model)
    return pictures.crops if isinstance(pictures, PatchesBody | TilesBody) else 1


def sees(model: ModelSpec) -> bool:
    """Whether a model takes pictures, and their operations are known."""
    return pictures_of(model) is not None


def sound_of(model: ModelSpec) -> SignalBody | SoundSpec | None:
    """How a model's clips are read; None where it hears none, or that is not known."""
    if model.sound is not None:
        return model.sound if _is_known(model) and model.sound.channels else None
    found = (each for each in _bodies(model) if isinstance(each, SignalBody) and each.channels)
    return next(found, None) if _is_known(model) else None


def media_words(
    model: ModelSpec, image_size: int | None, audio_seconds: int | None, images_per_sample: int
) -> tuple[str, ...]:
    """What was taken for granted of pictures and clips, in words."""
    words: list[str] = []
    pictures, sound = pictures_of(model), sound_of(model)
    if not images_per_sample and model.join is not None:
        return (TEXT_ALONE,)
    if pictures is not None:
        height, width = picture_size(image_size, pictures)
        num_crops = tiles_of(model)
        crops = f", in {num_crops} crops of this size" if num_crops > 1 else ""
        given = "" if image_size else " (default)"
        each = f", {images_per_sample} a sequence" if model.join is not None else ""
        words.append(f"pictures of {height}x{width} pixels{given}{crops}{each}")
    if isinstance(sound, SoundSpec) and sound.rate:
        seconds = audio_seconds or sound.length // sound.rate
        words.append(f"clips of {seconds} s{'' if audio_seconds else ' (default)'}")
    elif sound is not None:
        words.append("clips of 30 s, to which all are padded")
    if model.join is not None and model.join.joining is Joining.UNSEEN:
        return (UNSEEN,)
    words += [
        said for kind, said in MEANT if any(isinstance(each, kind) for each in _bodies(model))
    ]
    if model.picture is not None and model.picture.meant:
        words.append(model.picture.meant)
    if model.head.vector_size:
        words.append(VECTORS)
    if words:
        words.append("workspaces of convolutions not counted")
    return tuple(words)
