"""Sizes of pictures."""

from memplan.errors import SetupError
from memplan.model.pictures import PictureSpec


def picture_size(side: int | None, picture: PictureSpec) -> tuple[int, int]:
    """Height and width of a picture, as the setup or the model says.

    Raises ``SetupError`` for one that is smaller than a patch.
    """
    if side is None:
        return picture.image
    if picture.fixed and (side, side) != picture.image:
        msg = f"image_size: {side}: this model's class takes pictures of {picture.image[0]} pixels a side alone"
        raise SetupError(msg)
    if side < max(picture.patch):
        msg = f"image_size: {side} pixels are less than a patch, which has {max(picture.patch)}"
        raise SetupError(msg)
    return side, side
