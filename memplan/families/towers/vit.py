"""How many patches a picture has."""

from memplan.families.towers.sizes import pair
from memplan.model.config import ConfigReader


def num_patches(reader: ConfigReader) -> int:
    """Patches of an image."""
    height, width = pair(reader, "image_size")
    patch_height, patch_width = pair(reader, "patch_size")
    count = (height // patch_height) * (width // patch_width)
    if not count:
        error = reader.fail("image_size", "is smaller than patch_size")
        raise error
    return count
