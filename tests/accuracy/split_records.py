"""Records of DTensor's tensor parallelism as training setups, and the figures memplan gives for them."""

from typing import Any

from memplan.estimator.recording import record_and_walk, tape_options
from memplan.memory.accounts import rank_account
from memplan.memory.rank import RankInput
from memplan.sources.models import load_model
from memplan.training.adapters import Lora
from memplan.training.setup import TrainingSetup
from tests.accuracy.sharding_records import figures_of

_SIZES = {
    "llama3-8b": (4096, 32, 8, 14336, 128256),
    "llama3-70b": (8192, 64, 8, 28672, 128256),
    "llama2-13b-like": (5120, 40, 40, 13824, 32000),
}
"""Hidden size, heads, key/value heads, network's width, vocabulary, as the records' README says."""


def config_of(name: str) -> dict[str, Any]:
    """``llama3-8b x8 layers`` as a config."""
    model, depth, *_ = name.split()
    hidden, heads, kv_heads, width, vocabulary = _SIZES[model]
    return {
        "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": vocabulary,
        "num_hidden_layers": int(depth.removeprefix("x")), "tie_word_embeddings": False,
        "max_position_embeddings": 8192, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip


def setup_of(settings: dict[str, Any]) -> TrainingSetup:
    """A record's settings; kernels as fake tensors run them."""
    data_parallel = settings["dp_fsdp2"]
    options = {}
    if data_parallel > 1:
        options = {"reshard_after_forward": settings["reshard_after_forward"]}
    replicas = settings.get("replicas", 1)
    if replicas > 1:
        options["data_parallel_replicate_degree"] = replicas
    lora = settings.get("lora")
    adapter = None
    if lora is not None:
        adapter = Lora(rank=lora["rank"], targets=tuple(lora["targets"]), dtype="fp32")  # type: ignore[arg-type]
    precision = settings["precision"].replace("_", "-")
    return TrainingSetup(
        num_gpus=replicas * data_parallel * settings["tp"],
        num_nodes=1,
        engine="fsdp" if data_parallel > 1 else "ddp",  # type: ignore[arg-type]
        tensor_parallel=settings["tp"],
        sequence_parallel=settings["sequence_parallel"],
        loss_parallel=settings["loss_parallel"],
        micro_batch_size=settings["b"],
        gradient_accumulation_steps=settings.get("accum", 1),
        seq_len=settings["s"],
        precision={"amp": "bf16-amp"}.get(precision, precision),
        optimizer=settings["optimizer"].replace("_", "-"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        kernel_scratch=False,
        engine_options=options,
        adapter=adapter,
    )


def predict_split(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record, and the activations kept for backward."""
    settings = record["settings"]
    model = load_model(record.get("config") or config_of(settings["model"]), "causal-lm")
    resolved = setup_of(settings).resolve(model.context_length)
    tape, passes = record_and_walk(model, tape_options(resolved, None))
    figures = figures_of(rank_account(RankInput(tape=tape, passes=passes, setup=resolved), rank=0))
    del figures["peak_load"]
    if settings["reshard_after_forward"] is not False:
        # Where gathered weights outlive the forward pass a record counts them too.
        figures["activations"] = passes.after_forward.total_bytes
    return figures
