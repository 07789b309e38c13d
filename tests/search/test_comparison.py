"""What is compared where no engine is named."""

from memplan.search.comparison import comparison_setups
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def test_a_model_spread_over_ranks_is_compared_under_the_engine_that_runs_it() -> None:
    whole = comparison_setups(TrainingSetup(num_gpus=8, tensor_parallel=8))
    assert [each.chosen_engine for each in whole] == [Engine.DDP]
    shared = comparison_setups(TrainingSetup(num_gpus=32, tensor_parallel=8))
    assert [each.chosen_engine for each in shared] == [Engine.FSDP]
