"""What towers over patches share: how many there are, and the convolution that makes vectors of them."""

from memplan.families.towers.sizes import pair
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


def num_patches(reader: ConfigReader) -> int:
    """Patches of an image."""
    height, width = pair(reader, "image_size")
    patch_height, patch_width = pair(reader, "patch_size")
    count = (height // patch_height) * (width // patch_width)
    if not count:
        error = reader.fail("image_size", "is smaller than patch_size")
        raise error
    return count


def patch_projection(table: ParameterTable, reader: ConfigReader, size: int, *frames: int) -> None:
    """The convolution that makes a vector of each patch, over ``frames`` of a video at once."""
    channels = reader.integer("num_channels")
    kernel = (*frames, *pair(reader, "patch_size"))
    table.convolution("patch_embeddings", channels, size, *kernel)
