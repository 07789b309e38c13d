"""What GaLore's and APOLLO's projectors ask for, matrix by matrix (galore-torch 1.0, ``galore_projector.py``)."""

import pytest

from memplan.dtypes import DType
from memplan.training.optimizers.low_rank import is_targeted, make_projector, random_projector
from memplan.training.optimizers.script import ActKind, Script, Stepped, TensorRole

STATE, LET = ActKind.STATE, ActKind.LET
PROJECTOR = "projector.ortho_matrix"


def made(
    rows: int, columns: int, dtype: DType, *, random: bool = False, **options: int
) -> tuple[dict[str, int], dict[str, int]]:
    """States and temporaries [bytes]; every temporary goes again."""
    script = Script({"rank": 2, **options}.items(), first=True)  # type: ignore[arg-type]
    tensor = Stepped((rows, columns), dtype, TensorRole.LINEAR, "mlp.up_proj")
    if random:
        random_projector(script, tensor)
    else:
        make_projector(script, tensor, dtype)
    states = {act.name: act.num_bytes for act in script.acts if act.kind is STATE}
    lets = {act.name: act.num_bytes for act in script.acts if act.kind is LET}
    assert lets.keys() <= {act.name for act in script.acts if act.kind is ActKind.DROP}
    return states, lets


@pytest.mark.parametrize(("rows", "columns"), [(8, 4), (4, 8), (4, 4)])
def test_an_fp32_projector_is_a_view_of_all_singular_vectors(rows: int, columns: int) -> None:
    """Of the right ones where the matrix is tall or square, else of the left ones: 4 x 4 either way."""
    states, lets = made(rows, columns, DType.FP32)
    assert states == {PROJECTOR: 4 * 4 * 4}
    other = "U" if rows >= columns else "Vh"
    scaled = (max(rows, columns)) * 2
    assert lets == {
        other: 4 * max(rows, columns) * 4, "S": 4 * 4, "copy": 4 * rows * columns, "diagonal": 4 * 4,
        "scaled": 4 * scaled,
    }  # fmt: skip


def test_a_half_one_is_a_cast_of_its_part() -> None:
    states, lets = made(8, 4, DType.BF16)
    assert states == {PROJECTOR: 2 * 2 * 4}
    assert lets == {
        "matrix": 4 * 32, "U": 4 * 32, "Vh": 4 * 16, "S": 16, "copy": 4 * 32, "diagonal": 16, "scaled": 64,
    }  # fmt: skip


def test_q_galores_is_bytes_with_a_scale_and_a_zero_for_each_group() -> None:
    states, lets = made(8, 6, DType.BF16, quant_n_bit=4, quant_group_size=5)
    assert states == {PROJECTOR: 12, f"{PROJECTOR}_scales": 2 * 3, f"{PROJECTOR}_zeros": 2 * 3}
    assert lets["cast"] == 2 * 12


def test_apollos_is_random() -> None:
    assert made(8, 4, DType.FP32, random=True) == ({PROJECTOR: 4 * 2 * 4}, {"randn": 4 * 2 * 4})
    states, lets = made(4, 8, DType.BF16, random=True)
    assert states == {PROJECTOR: 2 * 2 * 4}
    assert lets == {"matrix": 4 * 32, "randn": 4 * 8, "proj": 4 * 8}


def test_targets_are_parts_of_names_patterns_or_all() -> None:
    def targeted(
        words: str,
        module: str,
        shape: tuple[int, ...] = (8, 4),
        role: TensorRole = TensorRole.LINEAR,
    ) -> bool:
        tensor = Stepped(shape, DType.BF16, role, module)
        return is_targeted(Script((("target_modules", words),), first=False), tensor)

    assert targeted("attn, mlp", "layers.0.mlp.up_proj")
    assert not targeted("attn", "layers.0.mlp.up_proj")
    assert not targeted("", "layers.0.mlp.up_proj")
    assert targeted(r".*\.up_proj", "layers.0.mlp.up_proj")
    assert not targeted(r".*\.up", "layers.0.mlp.up_proj".replace(".up_", ".down_"))
    assert targeted("all-linear", "head")
    assert targeted("all_linear", "head")
    assert not targeted("all-linear", "norm", shape=(8,))
    assert not targeted("all-linear", "embed", role=TensorRole.EMBEDDING)
