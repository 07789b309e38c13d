"""Whatever a config holds, only a ``MemplanError`` may come out of reading it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.errors import MemplanError
from memplan.families import supported_families
from memplan.graph.counts import count_parameters
from memplan.sources.about_models.defaults import class_defaults
from memplan.sources.models import load_model

ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-3, max_value=70),
    st.sampled_from([0, -1, 3, 7, 10**30, 2**63, 1e308, float("nan"), float("inf"), -0.5, 1.5]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.lists(st.integers(-2, 9) | st.text(max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.mark.parametrize("family", supported_families())
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated(family: str, data: st.DataObject) -> None:
    row: Any = class_defaults().get(family, {})
    config = {"model_type": family, **row.get("defaults", {})}
    keys = sorted({*config, *row.get("renamed", {}), "num_key_value_heads", "head_dim"})
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        if key != "model_type":
            config[key] = data.draw(ODD_VALUES)
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=2)):
        config.pop(key, None)
    try:
        counts = count_parameters(load_model(config))
        assert counts.base > 0
    except MemplanError as error:
        assert "\n" not in str(error)
    else:
        assert counts.total >= counts.largest_layer >= 0
