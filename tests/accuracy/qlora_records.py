"""Records of adapters over quantized bases as training setups, and memplan's figures for them."""

from dataclasses import replace
from typing import Any

from memplan.estimator import estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.lora_records import LORA_MODELS, setup_of
from tests.accuracy.sharding_records import TASKS, account_of, figures_of


def predict_qlora(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of ``qlora.jsonl``; kernels as fake tensors run them."""
    settings = record["settings"]
    config = {**LORA_MODELS[settings["model"]], "num_hidden_layers": settings["layers"]}
    targets = ["q_proj", "v_proj"] if settings["targets"] == "qv" else settings["targets"]
    setup = TrainingSetup(
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision="bf16-autocast" if settings["amp"] else "bf16",  # type: ignore[arg-type]
        optimizer=settings["optimizer"].replace("_", "-"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        kernel_scratch=False,
        quantize="nf4",  # type: ignore[arg-type]
        engine_options={
            "double_quant": settings["quant"] == "nf4",
            "prepare_for_kbit": settings["prep"],
        },
        adapter={  # type: ignore[arg-type]
            "lora": {
                "rank": settings["r"],
                "targets": targets,
                "dropout": settings["dropout"],
                "dtype": settings["adapter"],
            }
        },
    )
    return figures_of(account_of(config, setup))


def quantized_setup_of(record: dict[str, Any]) -> TrainingSetup:
    """A record of ``qlora_cuda.jsonl`` in memplan's words."""
    settings = record["settings"]
    quant = settings["quant"]
    setup = setup_of(record)
    options: dict[str, object] = {
        **dict(setup.engine_options),
        "prepare_for_kbit": settings.get("kbit", False),
        "device_map": False,  # by a loop of the recorder's own
    }
    if quant["type"] != "int8":
        options["double_quant"] = quant["double"]
    if "compute" in quant:
        options["compute_dtype"] = quant["compute"]
    return replace(
        setup,
        optimizer=_OPTIMIZERS.get(settings.get("opt", ""), setup.optimizer),
        quantize=quant["type"],
        engine_options=options,
    )


_OPTIMIZERS: dict[str, Any] = {"bnb_AdamW8bit": "bnb-adamw-8bit"}


def predict_qlora_cuda(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of ``qlora_cuda.jsonl``, with all that kernels allocate."""
    model = load_model(record["config"], TASKS[record["task"]])
    found = estimate(model, quantized_setup_of(record), load_gpu("h100-sxm-80gb"))
    phases = found.phases
    return {
        "trainable": found.trainable_params,
        "requested_before": found.held_bytes,
        "requested_peak": found.peak_bytes,
        "peak_forward": phases["forward"].peak_bytes,
        "peak_backward": phases["backward"].peak_bytes,
        "reserved_peak": found.reserved_bytes,
    }


def loaded_bytes(record: dict[str, Any]) -> dict[str, int]:
    """The peak before the first step."""
    model = load_model(record["config"], TASKS[record["task"]])
    found = estimate(model, quantized_setup_of(record), load_gpu("h100-sxm-80gb"))
    return {"peak_init": found.phases["load"].peak_bytes}
