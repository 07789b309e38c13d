"""Published formulas of what layers keep."""

from memplan.formulas.activations import (
    layer_activation_bytes,
    layer_elements_bytes,
    layer_parts,
    masked_scores_bytes,
    square_root_bytes,
)
from memplan.formulas.flops import FormulaShape
from memplan.report.formulas.case import TEXTBOOK_LAYER, Case, MethodRow


def activation_rows(case: Case, shape: FormulaShape) -> list[MethodRow]:
    """The textbook's layer, whole, in the forms that go around, and part by part."""
    p = case.precision
    sixteen = layer_activation_bytes(
        shape.hidden_size,
        num_heads=shape.num_heads,
        seq_len=case.seq_len,
        batch_size=case.batch_size,
    )
    elements = layer_elements_bytes(
        shape.hidden_size,
        num_heads=shape.num_heads,
        seq_len=case.seq_len,
        batch_size=case.batch_size,
        precision=p,
    )
    return [
        _layer_row(case, "16-bit", sixteen, "sbh(34 + 5as/h)", "arXiv:2205.05198, equation 2"),
        _layer_row(
            case, f"p = {p}", case.layer_bytes(shape), "psbh(16 + 2/p + 2as/h + as/(ph))",
            "arXiv:2205.05198 with p bytes a number",
        ),
        _activations_row(
            TEXTBOOK, "as printed", elements // p, "(2sa + 16h)·sb",
            "a form that calculators use: for each GPU, without L and p",
            f"all layers but one, bytes of a number, dropout masks, {TEXTBOOK_LAYER}",
        ),
        _layer_row(
            case, "no masks", elements, "p(2sa + 16h)·sb", "the same for all layers, in bytes",
            f"dropout masks, {TEXTBOOK_LAYER}",
        ),
        *_part_rows(case, shape),
    ]  # fmt: skip


def _part_rows(case: Case, shape: FormulaShape) -> list[MethodRow]:
    """The textbook's layer part by part, and a form of its scores that calculators have."""
    parts = layer_parts(
        shape.hidden_size,
        num_heads=shape.num_heads,
        seq_len=case.seq_len,
        batch_size=case.batch_size,
        precision=case.precision,
    )
    masked = masked_scores_bytes(
        num_heads=shape.num_heads, seq_len=case.seq_len, batch_size=case.batch_size
    )
    source = "arXiv:2205.05198, section 4.1, with p bytes a number; without p: dropout masks"
    return [
        *(
            _layer_row(
                case, part.name, part.num_bytes, f"({part.equation})", source, "the layer's other parts"
            )
            for part in parts
        ),
        _layer_row(
            case, "masked scores", masked, "6abs²",
            "its s x s parts with a mask before the softmax: one byte more for each score",
            "all that is not s x s",
        ),
    ]  # fmt: skip


TEXTBOOK = "textbook layer"


def _layer_row(
    case: Case, setting: str, num_bytes: int, formula: str, source: str,
    leaves_out: str = TEXTBOOK_LAYER,
) -> MethodRow:  # fmt: skip
    """All layers, each with so many bytes."""
    layers = case.model.num_layers
    return _activations_row(
        TEXTBOOK, setting, layers * num_bytes, f"L·{formula}", source, leaves_out
    )


def square_root_row(case: Case, shape: FormulaShape) -> MethodRow:
    """Layers that are checkpointed at every square root of their number."""
    layers = case.model.num_layers
    found = square_root_bytes(case.layer_bytes(shape), num_layers=layers)
    return _activations_row(
        "square-root checkpoints", "every √L-th", found, "2√L·sbh(34 + 5as/h)",
        "arXiv:1604.06174, section 4", "logits; frameworks checkpoint every layer, not every √L-th",
    )  # fmt: skip


def _activations_row(
    method: str, setting: str, num_bytes: int, formula: str, source: str, leaves_out: str
) -> MethodRow:
    return MethodRow(
        method=method, setting=setting, states_bytes=None, activations_bytes=num_bytes,
        total_bytes=num_bytes, formula=formula, source=source,
        leaves_out=f"states; {leaves_out}",
    )  # fmt: skip
