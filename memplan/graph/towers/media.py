"""What a model sees and hears: pictures and clips, and their sizes."""

from memplan.graph.towers.images import picture_size
from memplan.model.joining import Joining
from memplan.model.pictures import PictureSpec
from memplan.model.sounds import SoundSpec
from memplan.model.spec import ModelSpec

VECTORS = "the sum of all vectors as the loss: the class has none"
"""The same of retrievers (``ColPaliForRetrieval``)."""
TEXT_ALONE = "text alone: nothing runs through what sees or hears, nor does a gradient reach it"
UNSEEN = "no source picture: what is drawn is given as tokens"
"""What GLM-Image is not shown."""


def _is_known(model: ModelSpec) -> bool:
    return model.join is not None or not (model.stacks or model.activations_left_out)


def pictures_of(model: ModelSpec) -> PictureSpec | None:
    """How a model's pictures become tokens; None where it sees none, or that is not known."""
    picture = model.picture
    return picture if picture is not None and picture.channels and _is_known(model) else None


def tiles_of(model: ModelSpec) -> int:
    """Tiles or crops that each picture comes in."""
    picture = pictures_of(model)
    return 1 if picture is None else picture.crops


def sees(model: ModelSpec) -> bool:
    """Whether a model takes pictures, and their operations are known."""
    return pictures_of(model) is not None


def sound_of(model: ModelSpec) -> SoundSpec | None:
    """How a model's clips are read; None where it hears none, or that is not known."""
    sound = model.sound
    return sound if sound is not None and sound.channels and _is_known(model) else None


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
    if sound is not None and sound.rate:
        seconds = audio_seconds or sound.length // sound.rate
        words.append(f"clips of {seconds} s{'' if audio_seconds else ' (default)'}")
    elif sound is not None:
        words.append("clips of 30 s, to which all are padded")
    if model.join is not None and model.join.joining is Joining.UNSEEN:
        return (UNSEEN,)
    if model.picture is not None and model.picture.meant:
        words.append(model.picture.meant)
    if model.head.vector_size:
        words.append(VECTORS)
    if words:
        words.append("workspaces of convolutions not counted")
    return tuple(words)
