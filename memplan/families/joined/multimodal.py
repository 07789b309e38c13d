"""Language models that see or hear: a text model, its towers, and what joins them.

The text model is read by the family of its own ``model_type``; towers and projectors are counted
(``memplan.families.towers``). What sets the types apart is a row of ``MULTIMODALS``.
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.index import family_module
from memplan.families.joined.multimodal_types import MULTIMODALS
from memplan.families.multimodal_spec import Multimodal, Ties, Whole
from memplan.families.nesting import Part, read_part
from memplan.families.request import ReadRequest, checkpoint_dtype
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import StackSpec
from memplan.model.parameters import ParameterBlock, ParameterTable
from memplan.model.spec import ModelSpec, Task
from memplan.model.towers.parts import SpareBody


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``MULTIMODALS``."""
    return read_whole(reader, request, MULTIMODALS[request.model_type])


def read_whole(reader: ConfigReader, request: ReadRequest, kind: Multimodal) -> ModelSpec:
    """Read the text model, then what stands beside it."""
    part = read_part(reader, kind.text)
    text = read_text(part, request)
    tied = _tied(reader, kind, text)
    head = replace(
        text.head,
        tied=tied,
        attended_loss=kind.attended_loss,
        loss_upcast=kind.own_output or (text.head.loss_upcast and not kind.plain_logits),
    )
    whole = Whole(reader=reader, request=request, text=text)
    towers = declared(kind.declare, whole)
    base = text.tables if text.base_tables is None else text.base_tables
    base_head = _base_head(text, head) if kind.head_in_base and not tied else ()
    written = kind.join is not None and all(block.body is not None for block in towers)
    # Of two stacks only Florence-2's are known to be joined: InstructBLIP's T5 has a class of its own inside.
    fits = len(text.stacks) == 1 or kind.own_output
    join = kind.join if towers and written and fits and not text.tables else None
    towers_out = "" if join is not None or not towers else f"activations of {kind.left_out}"
    left_out = [towers_out, text.activations_left_out]
    asked = bool(kind.window_masks_key) and part.reader.raw(kind.window_masks_key) == "vision"
    if kind.block_masks or asked:
        text = replace(
            text, stacks=tuple(_block_masked(stack, window=asked) for stack in text.stacks)
        )
    return replace(
        text,
        family=request.model_type,
        head=head,
        tables=(*towers, *text.tables),
        base_tables=(*towers, *base, *base_head),
        checkpoint_dtype=checkpoint_dtype(reader if _says_dtype(reader) else part.reader),
        join=join,
        activations_left_out="; ".join(each for each in left_out if each),
    )


def _block_masked(stack: StackSpec, *, window: bool) -> StackSpec:
    return replace(stack, block_masks=not window, window_block_masks=window)


def declared(
    declare: Callable[[ParameterTable, Whole], None], whole: Whole
) -> tuple[ParameterBlock, ...]:
    """The blocks that a function declares."""
    table = ParameterTable()
    declare(table, whole)
    return table.blocks()


def read_text(part: Part, request: ReadRequest) -> ModelSpec:
    """Read the text model by the family of its type.

    ``ForConditionalGeneration`` is said of any text model that towers feed, so it asks for the
    text family's usual task.
    """
    module = family_module(part.model_type)
    if module is None:
        error = part.reader.fail(
            "model_type", f"{part.model_type!r}: no such text model can be read yet"
        )
        raise error
    task = None if request.task in {Task.SEQ2SEQ_LM, Task.OTHER} else request.task
    return module.read(part.reader, replace(request, model_type=part.model_type, task=task))


def _tied(reader: ConfigReader, kind: Multimodal, text: ModelSpec) -> bool:
    """Whether input and output matrix are one."""
    return text.head.tied if kind.ties is Ties.INNER else reader.flag("tie_word_embeddings")


def _base_head(text: ModelSpec, head: HeadSpec) -> tuple[ParameterBlock, ...]:
    table = ParameterTable()
    with table.block("output", body=SpareBody()):
        rows = head.num_rows or text.vocab_size
        table.linear("lm_head", text.hidden_size, rows, bias=False)
    return table.blocks()


def _says_dtype(reader: ConfigReader) -> bool:
    return reader.raw("dtype", "torch_dtype") is not None
