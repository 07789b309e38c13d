"""What every base model offers the heads of its tasks."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from memplan.graph.modules.basic import Embedding
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.spec import ModelSpec

Joiner = Callable[[Handle], tuple[Handle, ...]] | None
"""What is made of embeddings, and what the first layers are given beside it."""


class Base(Module):
    """The model that every task of a type shares."""

    begins_names = True
    prefix = "model"
    """What the classes of tasks call it (``base_model_prefix``)."""
    table = "embed_tokens"
    """What it calls its token table."""
    classifies_tokens = True
    """The type has a class for tokens, as most decoders' is."""
    classifies = True
    """It has one for sequences."""
    speaks = True
    """It has one with a language model's head."""
    tied_by_default = True
    """Its matrix of logits is the token table where the config is silent."""

    ties = True
    """Its matrix of logits can be the token table."""

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:  # noqa: ARG002
        """Whether it is, of a config that says so by the usual key."""
        return self.ties and tied

    is_joined = False
    """It is a text model with towers beside it."""

    @property
    def text_part(self) -> Any:
        """Its text model: itself, where it is no more than that."""
        return self

    has_two_stacks = False
    """It is an encoder and a decoder."""

    inner = ""
    """What its class calls the module that has all of it, where that is not the class itself."""
    context_keys: tuple[str, ...] = ("max_position_embeddings",)
    """What its config calls the longest sequence."""

    part_types: tuple[str, ...] = ()
    """The types of nested configs that have classes of their own."""
    tasks: ClassVar[Mapping[Task, type[Any]]] = {}
    """The classes of its tasks, the usual one first, where they are not those that all decoders share."""

    def __init__(self, config: ConfigReader) -> None:
        raise NotImplementedError

    @classmethod
    def named_task(cls, config: ConfigReader, model: ModelSpec) -> type[Any] | None:  # noqa: ARG003
        """The class that ``architectures`` name, where a task has several."""
        return None

    @classmethod
    def text_config(cls, config: ConfigReader) -> ConfigReader:
        """What of a config its sizes stand in."""
        return config

    def joined(self, embeds: Handle) -> tuple[Handle, ...]:
        """The embeddings, with what towers give in the place of the tokens that stand for it, and what the
        first layers are given beside it."""
        return (embeds,) if self.joiner is None else self.joiner(embeds)

    joiner: Joiner = None
    """What does so; None: it is a model by itself."""

    def declare_unseen(self) -> None:
        """Declare what stands before it and nothing runs through."""

    @property
    def token_table(self) -> Embedding | None:
        """The table that tokens are looked up in; None on a pipeline's stage that has none."""
        found = self.children.get(self.table)
        return found if isinstance(found, Embedding) else None

    def before_head(self, x: Handle) -> Handle:
        """What the class does with the hidden states that its logits are made of."""
        return x

    def adjusted(self, logits: Handle) -> Handle:
        """What the class does with its logits."""
        return logits

    def keep_logits(self) -> None:
        """What a loss on all layers' routers keeps."""


def joined_in(model: Module) -> Base | None:
    """What of a model is a text model with towers beside it; None: nothing."""
    found = (model, *(each for _, each in model.modules()))
    return next((each for each in found if isinstance(each, Base) and each.is_joined), None)


def text_of(model: Module) -> Module:
    """The text model of one that sees or hears; any other model is one."""
    found = joined_in(model)
    return model if found is None else found.text_part


def without_towers(model: Module) -> Iterator[tuple[str, Module]]:
    """All modules in a model, each with its own name, but what stands beside its text model."""
    for name, each in model.children.items():
        yield name, each
        if isinstance(each, Base) and each.is_joined:
            yield from each.text_part.modules()
        else:
            yield from without_towers(each)
