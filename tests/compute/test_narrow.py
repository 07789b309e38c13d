"""What narrowing an input takes beside the product: TransformerEngine 2.x, ``module/layernorm_linear.py`` and ``linear.py``."""

import pytest

import memplan
from memplan.compute.host import CPU_PRICES
from memplan.compute.narrow import NarrowTimes
from memplan.compute.product_shapes import has_norm
from memplan.compute.rates import rates_of
from memplan.compute.work import Work
from memplan.estimator.job import Job

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["te-delayed", "te-current"])
def test_a_norm_writes_the_codes_of_its_module_itself(recipe: str) -> None:
    """A module without a norm runs a kernel of its own for them. One whose norm runs before reads 16 bits only where the
    scale is looked for first; else the norm writes codes by row and by column, two bytes in place of two."""
    setup = memplan.TrainingSetup(engine="megatron", num_gpus=8, seq_len=128, fp8=recipe)
    gpu = memplan.load_gpu("h100")
    tape = Job.of(memplan.load_model(CONFIG), setup, gpu).given.tape
    rates = rates_of(gpu)
    times = NarrowTimes(tape, rates)
    made = [
        each for segment in tape.segments for each in segment.operations if times.quantizes(each)
    ]
    assert {has_norm(each) for each in made} == {True, False}
    for operation in made:
        work = Work()
        times.quantize(work, operation)
        own = 0 if has_norm(operation) else 1
        assert work.host_s == own * CPU_PRICES.kernel
        moves = work.memory_s > own * rates.kernel_s
        assert moves == (own == 1 or recipe == "te-current")
