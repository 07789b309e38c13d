"""What narrowing an input takes beside the product: TransformerEngine 2.x, ``module/layernorm_linear.py`` and ``linear.py``."""

import pytest

import memplan
from memplan.compute.host import CPU_PRICES
from memplan.compute.narrow import NarrowTimes
from memplan.compute.product_shapes import has_norm, second_operand
from memplan.compute.rates import rates_of
from memplan.compute.work import Work
from memplan.estimator.job import Job
from memplan.graph.core.operation_kinds import OperationKind

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


def test_a_weight_s_codes_are_made_of_16_bits_in_a_kernel_of_their_own() -> None:
    """DDP casts weights in every step: input and weight are read in 16 bits, and 8 are written of each by row and by
    column, as Hopper multiplies them (``Float8Quantizer``); a kernel for either."""
    setup = memplan.TrainingSetup(engine="ddp", precision="bf16", seq_len=128, fp8="te-delayed")
    gpu = memplan.load_gpu("h100")
    tape = Job.of(memplan.load_model(CONFIG), setup, gpu).given.tape
    rates = rates_of(gpu)
    times = NarrowTimes(tape, rates)
    segments = tape.segments
    made = [each for segment in segments for each in segment.operations if times.quantizes(each)]
    assert made
    for operation in made:
        work = Work()
        times.quantize(work, operation)
        numel = operation.inputs[0].numel + second_operand(operation).numel
        seconds = (2 + 1 + 1) * numel / rates.bytes_per_s + 2 * rates.kernel_s
        assert work.memory_s == pytest.approx(seconds)
        assert not has_norm(operation)


def test_torchao_multiplies_as_many_products_in_8_bits_whether_they_are_compiled_or_not() -> None:
    """``Float8Linear`` is every linear layer but the output matrix: seven of a Llama's layer."""
    gpu, counts = memplan.load_gpu("h100"), []
    for scope in ("none", "layer", "model"):
        setup = memplan.TrainingSetup(
            engine="ddp", precision="bf16", seq_len=128, fp8="torchao-tensorwise", compile=scope
        )
        tape = Job.of(memplan.load_model(CONFIG), setup, gpu).given.tape
        times = NarrowTimes(tape, rates_of(gpu))
        counts.append(
            sum(
                segment.repeat * times.is_narrow(operation)
                for segment in tape.segments
                for operation in segment.operations
                if operation.kind is OperationKind.LINEAR
            )
        )
    assert counts == 3 * [2 * 7]
