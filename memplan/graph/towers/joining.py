"""What towers give, on its way into a language model.

``get_image_features`` and ``forward`` of transformers' vision-language models.
"""

from memplan.errors import SetupError
from memplan.graph.core.tape import Tape
from memplan.model.joining import Joining
from memplan.model.spec import ModelSpec

MERGE = "merge"
"""The segment that writes what towers give over the embeddings of the tokens that stand for it."""


def tokens_seen(t: Tape, model: ModelSpec) -> int:
    """Tokens of each sequence that stand for what a model sees or hears."""
    features = next(each.input for each in t.segments if each.name == MERGE)
    assert features is not None
    return features.numel // model.hidden_size // t.options.batch_size


def check_shown_nothing(model: ModelSpec) -> None:
    """Refuse to give text alone to a model whose layers attend to a picture.

    transformers' vision-language models call their towers where ``pixel_values`` are given
    (``if pixel_values is not None``), so that no gradient reaches the towers otherwise.
    Raises ``SetupError``.
    """
    if len(model.stacks) != 1 or (model.join is not None and model.join.joining is Joining.CROSSED):
        msg = (
            f"images_per_sample: {model.name} given text alone is not modelled: its layers attend to what it "
            "sees; give 1 or more"
        )
        raise SetupError(msg)
