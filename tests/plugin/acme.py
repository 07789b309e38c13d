"""One plug-in of each kind."""

from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels, NormKernel
from memplan.training.optimizers.script import OptimizerRow

MEMPLAN_INTERFACE = 1
CARD = {"memory_gib": 96, "vendor": "NVIDIA", "compute_capability": "9.0"}
NO_CARD = {"memory_gib": -1}
ENGINE = {"engine": "fsdp", "fsdp_strategy": "shard_grad_op", "checkpointing": "full"}
OPTIMIZER = OptimizerRow(
    init=lambda script, tensor: script.state("momentum", tensor.numel, tensor.dtype), source="acme"
)
KERNELS = Kernels(attention=AttentionKernel.FLASH, norm=NormKernel.FUSED)


def model() -> dict[str, object]:
    return {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
            "intermediate_size": 5632, "vocab_size": 32000}  # fmt: skip


def nothing() -> None:
    """What a plug-in must not return."""


class Reader:
    @staticmethod
    def looks_like(values: dict[str, object]) -> bool:
        return "acme_version" in values

    @staticmethod
    def read(values: dict[str, object]) -> dict[str, object]:
        return {
            "model": "acme-1b",
            "engine": "fsdp",
            "num_gpus": values["gpus"],
            "micro_batch_size": 2,
        }


def write(setup: object, model: object) -> str:
    return f"acme launch {model.name} --gpus {setup.num_gpus}"  # type: ignore[attr-defined]
