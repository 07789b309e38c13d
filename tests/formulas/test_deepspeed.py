"""DeepSpeed's estimators: what must hold for any model and cluster, and where it cuts."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import SetupError
from memplan.formulas.deepspeed import (
    DeepSpeedCase,
    DeepSpeedFormula,
    DeepSpeedOffload,
    DeepSpeedRow,
    zero2_cpu_bytes,
    zero2_gpu_bytes,
    zero2_table,
    zero3_cpu_bytes,
    zero3_gpu_bytes,
    zero3_pinned_bytes,
    zero3_table,
)

counts = st.integers(min_value=1, max_value=10**13)
gpus = st.integers(min_value=1, max_value=16)
nodes = st.integers(min_value=1, max_value=512)


@st.composite
def cases(draw: st.DrawFn) -> DeepSpeedCase:
    total_params = draw(counts)
    return DeepSpeedCase(
        total_params=total_params,
        largest_layer_params=draw(st.integers(min_value=1, max_value=total_params)),
        num_gpus_per_node=draw(gpus),
        num_nodes=draw(nodes),
        additional_buffer_factor=draw(st.floats(min_value=0.5, max_value=4)),
    )


def all_rows(case: DeepSpeedCase) -> list[DeepSpeedRow]:
    zero2_rows = [row for f in DeepSpeedFormula for row in zero2_table(case, formula=f)]
    return [*zero2_rows, *zero3_table(case)]


def case(**changes: float) -> DeepSpeedCase:
    """An ordinary case, with changes."""
    ordinary = DeepSpeedCase(
        total_params=1_000_000, largest_layer_params=1000, num_gpus_per_node=8, num_nodes=2
    )
    return replace(ordinary, **changes)  # type: ignore[arg-type]


class TestOrder:
    def test_zero2(self) -> None:
        rows = zero2_table(case(), formula=DeepSpeedFormula.CURRENT)
        assert [row.offload_optimizer for row in rows] == [True, False]
        assert {(row.zero_stage, row.offload_param, row.zero_init) for row in rows} == {
            (2, False, None)
        }

    def test_zero3(self) -> None:
        assert [
            (row.offload_param, row.offload_optimizer, row.zero_init) for row in zero3_table(case())
        ] == [
            (True, True, True),
            (True, True, False),
            (False, True, True),
            (False, True, False),
            (False, False, True),
            (False, False, False),
        ]


class TestCuts:
    """The partitioned term is cut before it is added, the CPU figure at the end."""

    @pytest.mark.parametrize(
        ("formula", "expected_bytes"),
        [
            pytest.param(DeepSpeedFormula.DOCUMENTED, 4 * 10 + 53, id="160/3"),
            pytest.param(DeepSpeedFormula.CURRENT, 2 * 11 + 66, id="198/3"),
        ],
    )
    def test_zero2_gpu(self, formula: DeepSpeedFormula, expected_bytes: int) -> None:
        total_params = 10 if formula is DeepSpeedFormula.DOCUMENTED else 11
        assert expected_bytes == zero2_gpu_bytes(
            total_params, num_gpus=3, offload_optimizer=False, formula=formula
        )

    def test_zero3_gpu(self) -> None:
        assert zero3_gpu_bytes(
            10, largest_layer_params=1, num_gpus=7, offload=DeepSpeedOffload.OPTIMIZER
        ) == 4 + int(20 / 7)

    def test_zero3_cpu_multiplies_by_the_inverse_of_the_nodes(self) -> None:
        """7·18·1.5/27 is 7, but 1/27 is inexact: DeepSpeed 0.14.2 and 0.19.8 give 6."""
        assert (
            zero3_cpu_bytes(
                7,
                largest_layer_params=1,
                num_gpus_per_node=1,
                num_nodes=27,
                offload=DeepSpeedOffload.OPTIMIZER_AND_PARAM,
                zero_init=True,
            )
            == 6
        )


class TestClusters:
    def test_zero2_offload_counts_the_processes_of_all_nodes(self) -> None:
        assert (
            zero2_cpu_bytes(100, num_gpus_per_node=8, num_nodes=8, offload_optimizer=True)
            == 100 * 4 * 64 * 1.5
        )

    def test_zero2_offload_on_few_gpus_holds_the_states(self) -> None:
        assert (
            zero2_cpu_bytes(100, num_gpus_per_node=1, num_nodes=1, offload_optimizer=True)
            == 100 * 16 * 1.5
        )

    def test_zero3_loading_outside_zero_init_counts_one_node(self) -> None:
        rows = zero3_table(case(num_nodes=8))
        assert {row.per_cpu_bytes for row in rows if not row.zero_init} == {48_000_000}

    def test_buffer_factor_scales_the_cpu_alone(self) -> None:
        usual, plain = all_rows(case()), all_rows(case(additional_buffer_factor=1.0))
        assert [row.per_cpu_bytes for row in usual] == [1.5 * row.per_cpu_bytes for row in plain]
        assert [row.per_gpu_bytes for row in usual] == [row.per_gpu_bytes for row in plain]


class TestProperties:
    @given(cases(), st.integers(min_value=1, max_value=8))
    def test_more_gpus_never_raise_the_gpu_figure(self, few: DeepSpeedCase, more: int) -> None:
        many = replace(few, num_gpus_per_node=few.num_gpus_per_node + more)
        for small, large in zip(all_rows(few), all_rows(many), strict=True):
            assert large.per_gpu_bytes <= small.per_gpu_bytes

    @given(cases(), st.integers(min_value=1, max_value=8))
    def test_more_nodes_never_raise_a_node_of_zero3(self, few: DeepSpeedCase, more: int) -> None:
        many = replace(few, num_nodes=few.num_nodes + more)
        for small, large in zip(zero3_table(few), zero3_table(many), strict=True):
            assert large.per_cpu_bytes <= small.per_cpu_bytes
            assert large.per_gpu_bytes <= small.per_gpu_bytes

    @given(cases())
    def test_offload_never_raises_the_gpu_figure(self, any_case: DeepSpeedCase) -> None:
        for formula in DeepSpeedFormula:
            offloaded, resident = zero2_table(any_case, formula=formula)
            assert offloaded.per_gpu_bytes <= resident.per_gpu_bytes
        for more_offloaded, less_offloaded in pairwise(zero3_table(any_case)):
            assert more_offloaded.per_gpu_bytes <= less_offloaded.per_gpu_bytes

    @given(cases())
    def test_zero_init_never_raises_the_cpu_figure(self, any_case: DeepSpeedCase) -> None:
        rows = zero3_table(any_case)
        for inside, outside in zip(rows[::2], rows[1::2], strict=True):
            assert inside.per_cpu_bytes <= outside.per_cpu_bytes
            assert inside.per_gpu_bytes == outside.per_gpu_bytes

    @given(cases())
    def test_current_formula_is_above_the_documented_one_on_one_gpu_only(
        self, any_case: DeepSpeedCase
    ) -> None:
        """2Φ + 18Φ/G less 4Φ + 16Φ/G is 2Φ/G - 2Φ: nothing at G = 1, negative beyond."""
        current = zero2_table(any_case, formula=DeepSpeedFormula.CURRENT)[1].per_gpu_bytes
        documented = zero2_table(any_case, formula=DeepSpeedFormula.DOCUMENTED)[1].per_gpu_bytes
        assert (current == documented) == (any_case.num_gpus == 1)
        assert current <= documented

    @given(cases(), st.booleans(), st.sampled_from(DeepSpeedOffload))
    def test_pinned_memory_is_part_of_the_cpu_figure(
        self, any_case: DeepSpeedCase, accumulating: bool, offload: DeepSpeedOffload
    ) -> None:
        """Over all nodes: a node's figure is cut, after roundings of a double."""
        pinned = zero3_pinned_bytes(
            any_case.total_params, offload=offload, gradient_accumulation=accumulating
        )
        for row in zero3_table(any_case):
            if row.offload is offload:
                slack = any_case.num_nodes * (1 + math.ulp(row.per_cpu_bytes))
                assert pinned <= row.per_cpu_bytes * any_case.num_nodes + slack

    @given(cases())
    def test_bytes_are_integers(self, any_case: DeepSpeedCase) -> None:
        for row in all_rows(any_case):
            assert type(row.per_cpu_bytes) is int
            assert type(row.per_gpu_bytes) is int


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            pytest.param("total_params", 0, id="no-params"),
            pytest.param("total_params", -(10**30), id="negative-params"),
            pytest.param("total_params", 10**400, id="absurd-params"),
            pytest.param("largest_layer_params", 0, id="no-layer"),
            pytest.param("largest_layer_params", 1_000_001, id="layer-above-the-model"),
            pytest.param("num_gpus_per_node", 0, id="no-gpus"),
            pytest.param("num_nodes", 0, id="no-nodes"),
            pytest.param("num_nodes", 10**400, id="absurd-nodes"),
            pytest.param("additional_buffer_factor", 0.0, id="no-buffer"),
            pytest.param("additional_buffer_factor", math.nan, id="nan-buffer"),
            pytest.param("additional_buffer_factor", math.inf, id="infinite-buffer"),
        ],
    )
    def test_names_the_field_in_one_short_line(self, field: str, value: float) -> None:
        with pytest.raises(SetupError, match=field) as caught:
            case(**{field: value})
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 160

    def test_the_largest_cases_have_an_answer(self) -> None:
        largest = case(
            total_params=10**18,
            num_gpus_per_node=10**18,
            num_nodes=10**18,
            additional_buffer_factor=1000.0,
        )
        assert all(row.per_cpu_bytes >= 0 for row in all_rows(largest))
