"""What is compared where no engine is named."""

from memplan.search.comparison import Wanted, comparison_setups
from memplan.training.choices import ZeroStage
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def test_a_model_spread_over_ranks_is_compared_under_the_engine_that_runs_it() -> None:
    whole = comparison_setups(TrainingSetup(num_gpus=8, tensor_parallel=8))
    assert [each.chosen_engine for each in whole] == [Engine.DDP]
    shared = comparison_setups(TrainingSetup(num_gpus=32, tensor_parallel=8))
    assert [each.chosen_engine for each in shared] == [Engine.FSDP]


def test_deepspeeds_pipelines_have_the_stages_that_go_with_them() -> None:
    base = TrainingSetup(num_gpus=8, pipeline_parallel=4, gradient_accumulation_steps=8)
    rows = comparison_setups(base, Wanted(engine=Engine.DEEPSPEED))
    stages = [row.zero_stage for row in rows]
    assert stages[-1] is ZeroStage.OPTIMIZER
    assert set(stages) <= {ZeroStage.NONE, ZeroStage.OPTIMIZER}
