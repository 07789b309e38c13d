"""What wraps a model in memory is read off it: engines, accelerate's autocast, Lightning's Trainer. Stand-ins have the wrappers' own names.

The real ones are trained beside their estimates by ``benchmarks/live_setups.py``.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import memplan
from memplan.live.engine import engine_fields
from memplan.live.lightning import lightning_run
from memplan.live.model import read_model, unwrapped
from memplan.memory.replaying.replay import OnCard  # noqa: F401 - the compiled core, as every estimate has it

CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip
PARAMETERS = 2 * 1000 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64


class Parameter(SimpleNamespace):
    requires_grad = True

    def numel(self) -> int:
        return PARAMETERS


class Module:
    """A module as torch's are: children, parameters, and nothing else that is asked for."""

    def __init__(self, **children: Any) -> None:
        self._modules = children

    def parameters(self) -> list[Any]:
        return [each for child in self._modules.values() for each in child.parameters()]

    def named_modules(self, prefix: str = "") -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [(prefix, self)]
        for name, child in self._modules.items():
            found += child.named_modules(f"{prefix}.{name}".lstrip("."))
        return found


class LlamaForCausalLM(Module):
    def __init__(self, dtype: str = "torch.float32", **children: Any) -> None:
        super().__init__(**children)
        self.config = SimpleNamespace(to_dict=lambda: CONFIG, _attn_implementation="sdpa")
        self.dtype = dtype

    def parameters(self) -> list[Any]:
        return [Parameter(dtype=self.dtype)]


class AdamW(SimpleNamespace):
    param_groups = ({"fused": True},)


AdamW.__module__ = "torch.optim.adamw"


def checked(model: Any, **more: Any) -> Any:
    asked = {
        "batch": {"input_ids": SimpleNamespace(shape=(2, 32))},
        "gpus": 4,
        "gpu": "h100",
        **more,
    }
    found = memplan.check(model, AdamW(), **asked)
    assert found.estimate.num_params == PARAMETERS
    return found.estimate.setup


def wrapper(name: str, **values: Any) -> Any:
    kind = type(name, (Module,), {})
    made = kind(module=values.pop("module", LlamaForCausalLM()))
    made.__dict__ |= values
    return made


def test_ddp() -> None:
    setup = checked(
        wrapper(
            "DistributedDataParallel",
            gradient_as_bucket_view=False,
            bucket_bytes_cap_default=True,
            bucket_bytes_cap=1,
        )
    )
    assert (setup.engine.value, dict(setup.engine_options), setup.precision.value) == (
        "ddp",
        {},
        "fp32",
    )
    views = wrapper(
        "DistributedDataParallel",
        gradient_as_bucket_view=True,
        bucket_bytes_cap_default=False,
        bucket_bytes_cap=50 << 20,
    )
    assert dict(checked(views).engine_options) == {
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 50.0,
    }


def sharded(
    *,
    mesh: Any,
    keeps: bool = False,
    auto: bool = False,
    compute: Any = "torch.bfloat16",
    offload: str = "OffloadPolicy",
) -> Any:
    policy = SimpleNamespace(param_dtype=compute, reduce_dtype="torch.float32" if compute else None)
    group = SimpleNamespace(
        mp_policy=policy, mesh_info=mesh, post_forward_mesh_info=None if keeps else object(), offload_policy=type(offload, (), {})()
    )  # fmt: skip
    state = SimpleNamespace(_fsdp_param_groups=[group], _auto_reshard_after_forward=auto)
    layer = type("FSDPLayer", (Module,), {"_get_fsdp_state": lambda _: state})()
    kind = type(
        "FSDPLlamaForCausalLM",
        (LlamaForCausalLM,),
        {"_get_fsdp_state": lambda _: state, "unshard": None},
    )
    return kind(**{"0": layer})


@pytest.mark.parametrize(
    ("given", "strategy", "precision", "options"),
    [
        ({}, "full_shard", "bf16-mixed", {"reduce_dtype": "fp32"}),
        ({"auto": True}, "full_shard", "bf16-mixed", {"reduce_dtype": "fp32", "reshard_after_forward": "auto"}),
        ({"keeps": True}, "shard_grad_op", "bf16-mixed", {"reduce_dtype": "fp32"}),
        ({"compute": None}, "full_shard", "fp32", {}),
        ({"mesh": SimpleNamespace(replicate_mesh_size=2)}, "hybrid", "bf16-mixed",
         {"reduce_dtype": "fp32", "data_parallel_replicate_degree": 2}),
    ],
)  # fmt: skip
def test_fsdp2(
    given: dict[str, Any], strategy: str, precision: str, options: dict[str, Any]
) -> None:
    setup = checked(sharded(**{"mesh": SimpleNamespace(), **given}))
    assert (setup.engine.value, setup.fsdp_strategy.value, setup.precision.value) == (
        "fsdp",
        strategy,
        precision,
    )
    assert dict(setup.engine_options) == options
    on_host = checked(sharded(mesh=SimpleNamespace(), offload="CPUOffloadPolicy"))
    assert on_host.offload_param.value == on_host.offload_optimizer.value == "cpu"


def test_fsdp1() -> None:
    model = Module(_fsdp_wrapped_module=LlamaForCausalLM())
    model.__class__ = type("FullyShardedDataParallel", (Module,), {})
    model.__dict__ |= {
        "sharding_strategy": SimpleNamespace(name="SHARD_GRAD_OP"), "_use_orig_params": True, "cpu_offload": None,
        "mixed_precision": SimpleNamespace(param_dtype="torch.bfloat16", reduce_dtype=None),
    }  # fmt: skip
    setup = checked(model)
    assert (setup.engine.value, setup.fsdp_strategy.value, setup.precision.value) == (
        "fsdp1",
        "shard_grad_op",
        "bf16-mixed",
    )
    assert dict(setup.engine_options) == {"use_orig_params": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_s_engine(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    engine = wrapper(
        "DeepSpeedEngine",
        config="a file",
        _config=SimpleNamespace(_param_dict=config),
        module=LlamaForCausalLM("torch.bfloat16"),
    )
    setup = checked(engine)
    assert (setup.engine.value, setup.zero_stage.value, setup.precision.value) == (
        "deepspeed",
        stage,
        "bf16-master",
    )
    assert dict(setup.engine_options).get("zero_init") is (False if stage == 3 else None)
    loaded = ModuleType("transformers.integrations.deepspeed")
    loaded.is_deepspeed_zero3_enabled = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    assert dict(checked(engine).engine_options).get("zero_init") is (True if stage == 3 else None)


def test_accelerate_s_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ModuleType("accelerate.state")
    state.AcceleratorState = SimpleNamespace(_shared_state={"_mixed_precision": "bf16"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    plain, prepared = LlamaForCausalLM(), LlamaForCausalLM()
    prepared._original_forward = None  # type: ignore[attr-defined]
    assert checked(plain, gpus=1).precision.value == "fp32"
    setup = checked(prepared, gpus=1)
    assert (setup.precision.value, setup.upcast_outputs) == ("bf16-amp", True)
    assert checked(prepared, gpus=1, precision="fp16-amp").precision.value == "fp16-amp"


def lightning_trainer(**values: Any) -> Any:
    kind = type("Trainer", (SimpleNamespace,), {"__module__": "lightning.pytorch.trainer.trainer"})
    loader = SimpleNamespace(batch_size=3, dataset=[{"input_ids": [1] * 48}] * 4)
    usual = {
        "strategy": SimpleNamespace(model=Module(model=LlamaForCausalLM())), "optimizers": [AdamW()], "train_dataloader": loader,
        "precision": "bf16-mixed", "accumulate_grad_batches": 2, "world_size": 1,
    }  # fmt: skip
    return kind(**usual | values)


def test_lightning_s_trainer() -> None:
    found = memplan.check(lightning_trainer(), gpu="h100")
    setup = found.estimate.setup
    assert (setup.micro_batch_size, setup.seq_len, setup.gradient_accumulation_steps) == (3, 48, 2)
    assert setup.precision is not None
    assert (setup.precision.value, setup.optimizer.value) == ("bf16-amp", "adamw-fused")
    assert setup.gradients_held
    assert not any("behind the next forward pass" in each for each in found.remarks)
    own = wrapper("DeepSpeedEngine", module=Module(model=LlamaForCausalLM()))
    kept = lightning_trainer(strategy=SimpleNamespace(model=own), precision="bf16-true")
    assert not lightning_run(kept).holds_gradients
    with pytest.raises(memplan.MemplanError, match="no optimizer yet: check it in a callback"):
        memplan.check(lightning_trainer(optimizers=[]))
    silent = SimpleNamespace(batch_size=3, dataset=iter([]))
    with pytest.raises(memplan.MemplanError, match="seq_len: the data does not say"):
        memplan.check(lightning_trainer(train_dataloader=silent))
    assert lightning_run(lightning_trainer(train_dataloader=silent)).tokens is None


def test_a_module_of_one_s_own_around_a_model_and_a_child_of_that_name() -> None:
    bare = LlamaForCausalLM()
    assert read_model(Module(model=bare)).num_params == PARAMETERS
    bare._modules["module"] = Module()
    assert unwrapped(wrapper("DistributedDataParallel", module=bare)) is bare
    assert engine_fields(bare, num_gpus=1, given={}) == {}
    assert engine_fields(bare, num_gpus=2, given={}) == {"engine": "ddp"}


def test_layers_that_are_run_again_by_the_model_s_own_switch() -> None:
    model = LlamaForCausalLM()
    model.is_gradient_checkpointing = True  # type: ignore[attr-defined]
    assert checked(model).checkpointing.value == "full"
