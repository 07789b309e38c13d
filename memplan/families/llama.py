"""Keys that the configs of decoders have in common: heads, networks, windows, tying."""

from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.fast_dataclass import replace
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import StackSpec
from memplan.model.networks import Activation
from memplan.model.spec import ModelSpec, Task

DECODER_TASKS = (Task.CAUSAL_LM, Task.BASE, Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
"""What a decoder's classes are trained for."""


def decoder_model(
    reader: ConfigReader,
    request: ReadRequest,
    stack: StackSpec,
    *,
    hidden_size: int,
    head: HeadSpec | None = None,
    tied_by_default: bool = True,
    context_keys: tuple[str, ...] = ("max_position_embeddings",),
) -> ModelSpec:
    """A decoder-only model around its one stack."""
    tied = reader.flag("tie_word_embeddings", default=tied_by_default)
    head = replace(head or HeadSpec(), tied=tied)
    if reader.raw("classifier_dropout") is not None:
        own = reader.number("classifier_dropout")
        head = replace(head, token_dropout=own)
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, request, *DECODER_TASKS),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=reader.integer(*context_keys, default=2048),
        stacks=(stack,),
        head=head,
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        source=reader.source,
    )


def read_activation(reader: ConfigReader, *keys: str) -> Activation:
    """An activation by transformers' name."""
    return named_activation(reader, keys[0], reader.text(*keys, default="silu"))


def named_activation(reader: ConfigReader, key: str, name: str) -> Activation:
    """An activation by transformers' name.

    Raises ``ConfigError`` for one that is not known.
    """
    known = {each.value: each for each in Activation}
    return known[reader.choice(key, ACTIVATION_NAMES.get(name, name), known)]


ACTIVATION_NAMES = {"swish": "silu", "gelu_pytorch": "gelu", "gelu_python": "gelu"}
"""Other names of the same function (transformers' ACT2FN)."""


def has_long_frequencies(reader: ConfigReader) -> bool:
    """Whether rotary frequencies are switched by how long a sequence is (``longrope``)."""
    kinds = ("longrope", "su")
    given = (reader.mapping("rope_scaling") or reader.mapping("rope_parameters") or {}).items()
    return any(key in ("type", "rope_type") and kind in kinds for key, kind in given)


def rotated_dim(reader: ConfigReader, head_dim: int, share: float) -> int:
    """Dimensions of a head that are turned: ``partial_rotary_factor``, wherever it stands."""
    share = reader.number("partial_rotary_factor", default=share)
    for key in ("rope_scaling", "rope_parameters"):
        nested = reader.nested(reader.mapping(key) or {}, f"{reader.path}{key}.")
        share = nested.number("partial_rotary_factor", default=share)
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim:
        error = reader.fail("partial_rotary_factor", f"leaves {dim} of {head_dim} dimensions")
        raise error
    return dim
