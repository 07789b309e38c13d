"""Rules that only show at the edges, each with an expectation from outside the code."""

from dataclasses import replace
from typing import Any

import pytest

import memplan
from memplan.estimator import Estimate
from memplan.estimator.estimate import Verdict
from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import gpu_from_memory
from memplan.memory.account import ComponentKind, Entry, Phase
from memplan.memory.deepspeed.partition import FlatBuffer
from memplan.training.setup import TrainingSetup
from memplan.units import GIB, MIB

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 2816, "vocab_size": 32000,
    "num_hidden_layers": 8, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
NUM_PARAMS = 168_313_856
"""As transformers counts them."""
EMBEDDING = 32_000 * 1024


def answer(config: dict[str, Any] = LLAMA, gpu: str | None = None, **fields: Any) -> Estimate:
    defaults: dict[str, Any] = {"seq_len": 512, "kernel_scratch": False}
    return memplan.estimate(config, TrainingSetup(**defaults | fields), gpu=gpu)


class TestSelectiveRecomputation:
    """Megatron's: scores, softmax and dropout of one layer at a time come back in its backward."""

    @pytest.mark.parametrize("num_layers", [1, 2, 7])
    def test_all_layers_but_the_one_in_backward_are_spared(self, num_layers: int) -> None:
        """``5as²b`` a layer (arXiv:2205.05198, section 5), and that layer computes them again.

        Heads are many and the vocabulary small, so that the peak is in the last layer's attention,
        where the whole and the recomputed layer hold the same.
        """
        heads, tokens = 64, 2048
        config = {
            "model_type": "gpt2", "n_embd": 1024, "n_head": heads, "n_layer": num_layers,
            "vocab_size": 512, "n_positions": tokens,
        }  # fmt: skip
        fields: dict[str, Any] = {
            "engine": "ddp", "precision": "bf16", "kernels": "megatron", "seq_len": tokens,
        }  # fmt: skip
        whole = answer(config, **fields).phases["backward"].peak_bytes
        spared = answer(config, **fields, checkpointing="selective").phases["backward"].peak_bytes
        assert whole - spared == (num_layers - 1) * 5 * heads * tokens**2


class TestLiger:
    """Requested peaks of PyTorch's own CUDA build with liger-kernel 0.8.5's kernels."""

    @pytest.mark.parametrize(
        ("num_layers", "peak_bytes"), [(4, 15_559_708_540), (8, 22_728_606_644)]
    )
    def test_swiglu_writes_its_gradients_over_gate_and_up(
        self, num_layers: int, peak_bytes: int
    ) -> None:
        config = LLAMA | {
            "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": num_layers,
        }  # fmt: skip
        made = answer(
            config, gpu="h100", precision="bf16", kernels="liger", seq_len=2048,
            micro_batch_size=2, kernel_scratch=True,
        )  # fmt: skip
        assert made.peak_bytes == pytest.approx(peak_bytes, rel=9e-6)


class TestWholeRun:
    """What decides is the fullest moment of the run, not of the step."""

    def test_loading_decides(self) -> None:
        """Without ``zero.Init`` each of 64 ranks first holds the whole model in bf16.

        10 layers of 8192: the step of a short sequence needs less than those 2 bytes a parameter.
        """
        config = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 10}
        small = {"reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 1_000_000,
                 "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # fmt: skip
        made = answer(
            config,
            engine="deepspeed",
            zero_stage=3,
            num_gpus=64,
            seq_len=32,
            checkpointing="full",
            engine_options={**small, "zero_init": False},
        )
        whole = 2 * made.num_params
        assert made.peak_bytes < whole
        assert made.worst_bytes >= whole
        assert made.total_bytes.low > whole

    @pytest.mark.parametrize("name", ["load", "forward", "backward", "step", "save"])
    def test_whichever_phase_is_fullest_decides(self, name: str) -> None:
        """``max_memory_allocated`` of a whole job is over all of it; a step's peak is over the step."""
        made = answer(engine="ddp")
        more = Entry(ComponentKind.TEMPORARIES, made.worst_bytes)
        account = replace(
            made.account,
            phases=tuple(
                Phase(each.name, (more,) if each.name == name else each.entries[:1])
                for each in made.account.phases
            ),
        )
        changed = replace(made, account=account)
        assert changed.worst_bytes == made.worst_bytes
        assert (changed.peak_bytes == made.worst_bytes) is (name not in ("load", "save"))


class TestCapacity:
    """DeepSpeed asks the GPU for its room before it flattens (stage_1_and_2.py)."""

    @pytest.mark.parametrize(("gib", "copies"), [(80, 2), (20, 1)])
    def test_stage_2_flattens_where_there_is_room(self, gib: int, copies: int) -> None:
        """7 billion bf16 parameters are 13 GiB: two copies fit an 80 GB card, one a 20 GB card."""
        made = memplan.estimate(
            "llama-2-7b",
            TrainingSetup(engine="deepspeed", zero_stage=2, num_gpus=64, seq_len=512),
            gpu=gpu_from_memory(gib * GIB),
        )
        load = made.phases["load"].peak_bytes
        assert round(load / (2 * made.num_params)) == copies


@dataclass(frozen=True, kw_only=True, slots=True)
class Numels:
    numels: tuple[int, ...]
    trainable: tuple[bool, ...]


class TestAlignment:
    """ZeRO pads the flat buffer to 2 elements a rank (``nccl_start_alignment_factor`` is 2)."""

    @pytest.mark.parametrize(
        ("count", "ranks", "padded"), [(10, 4, 16), (16, 4, 16), (17, 4, 24), (1, 8, 16), (3, 1, 4)]
    )
    def test_a_multiple_of_twice_the_ranks(self, count: int, ranks: int, padded: int) -> None:
        weights = Numels(numels=(count,), trainable=(True,))
        buffer = FlatBuffer(weights, num_ranks=ranks, round_robin=False)
        assert buffer.numel == padded
        assert buffer.size * ranks == padded

    def test_frozen_parameters_are_not_in_it(self) -> None:
        weights = Numels(numels=(10, 5, 7), trainable=(True, False, True))
        assert FlatBuffer(weights, num_ranks=4, round_robin=False).numel == 24


class TestDdp:
    """torch/nn/parallel/distributed.py and ddp_comm_hooks/default_hooks.py."""

    def test_one_rank_of_a_node_writes_the_model(self) -> None:
        """On the CPU a node holds one copy of the fp32 weights while it saves, whatever its ranks."""
        made = answer(engine="ddp", num_gpus=16, precision="bf16-amp")
        copy = 4 * NUM_PARAMS
        assert copy <= made.account.host.save_bytes * made.setup.gpus_per_node < copy + MIB

    def test_saving_takes_no_room_on_the_gpu(self) -> None:
        """``state_dict`` gives references; a file is written from CPU copies."""
        made = answer(engine="ddp", num_gpus=16, precision="bf16-amp")
        assert made.phases["save"].peak_bytes == made.held_bytes

    @pytest.mark.parametrize("hook", ["bf16_compress", "fp16_compress"])
    @pytest.mark.parametrize("precision", ["bf16", "bf16-amp", "fp16-amp", "fp32"])
    def test_a_hook_copies_where_the_format_changes(self, hook: str, precision: str) -> None:
        """``buffer.to(dtype)`` is the buffer itself where it has that format, else a 16-bit copy.

        The last bucket holds the embedding, at least, and at most 25 MiB more; by then whole
        gradients lie beside it, which few tokens make the fullest moment.
        """
        fields: dict[str, Any] = {"engine": "ddp", "num_gpus": 8, "seq_len": 16}
        fields["precision"] = precision
        plain = answer(**fields)
        made = answer(**fields, engine_options={"comm_hook": hook})
        copies = not (hook == "bf16_compress" and precision == "bf16")
        least = plain.held_bytes + plain.phases["step"].components["gradients"] + 2 * EMBEDDING
        if copies:
            assert least <= made.phases["backward"].peak_bytes <= least + 25 * MIB
        else:
            assert made.phases == plain.phases


@pytest.mark.parametrize(("gpu", "flash"), [("a100-80gb", True), ("v100-32gb", False)])
def test_a_card_without_flash_attention_runs_another_kernel(gpu: str, flash: bool) -> None:
    """Flash attention needs compute capability 8.0: V100 has 7.0, A100 8.0."""
    made = answer(LLAMA, gpu, engine="ddp", precision="fp16-amp")
    assert (made.attention_kernel == "flash") is flash


def test_a_card_that_holds_the_step_but_not_the_load_is_too_small() -> None:
    """13 GiB of whole bf16 weights do not load on 12 GiB, however little the step needs."""
    made = memplan.estimate(
        "llama-2-7b",
        TrainingSetup(
            engine="deepspeed",
            zero_stage=3,
            num_gpus=64,
            seq_len=32,
            checkpointing="full",
            engine_options={"zero_init": False, "reduce_bucket_size": 1_000_000,
                            "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
        ),
        gpu=gpu_from_memory(12 * GIB),
    )  # fmt: skip
    assert made.peak_bytes < 6 * GIB
    assert made.verdict is Verdict.OOM
