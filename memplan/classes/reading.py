"""A config read by the class of its type: what others read of the model, and the class itself."""

from memplan.classes.base import Base
from memplan.classes.registry import base_class
from memplan.families.request import ReadRequest
from memplan.model.config import ConfigReader
from memplan.model.spec import ModelSpec


def read_class(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of a model whose type has a class.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    base = base_class(request.model_type)(reader)
    if base.is_joined:
        from memplan.classes.joined.base import JoinedModel  # only for those
        from memplan.classes.joined.facts import read_joined

        assert isinstance(base, JoinedModel)
        return read_joined(base, reader, request, facts_of)
    return facts_of(base, reader, request)


def facts_of(base: Base, reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The same of a class that has been made, and has no towers beside it."""
    if base.has_two_stacks:
        from memplan.classes.translating.facts import read_two_stacks  # only for two stacks
        from memplan.classes.translating.stacks import TwoStacks

        assert isinstance(base, TwoStacks)
        return read_two_stacks(base, reader, request)
    from memplan.classes.facts import read_decoder  # not for two stacks
    from memplan.classes.llama import Decoder

    if isinstance(base, Decoder):
        return read_decoder(base, reader, request)
    from memplan.classes.denoising.base import Denoiser  # only for those

    if isinstance(base, Denoiser):
        from memplan.classes.denoising.facts import read_denoiser

        return read_denoiser(base, reader, request)
    from memplan.classes.sensed.base import SensedModel  # only for those

    if isinstance(base, SensedModel):
        from memplan.classes.sensed.facts import read_sensed

        return read_sensed(base, reader, request)
    from memplan.classes.encoders.base import Encoder  # only for encoders
    from memplan.classes.encoders.facts import read_encoder

    assert isinstance(base, Encoder)
    return read_encoder(base, reader, request)
