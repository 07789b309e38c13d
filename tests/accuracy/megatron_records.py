"""Records of Megatron-core's layers as training setups, and the figures memplan gives for them."""

from typing import Any

from memplan.estimator.recording import record_and_walk, tape_options
from memplan.memory.accounts import rank_account
from memplan.memory.rank import RankInput
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.sharding_records import figures_of


def config_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The shape of a record's ``gpt`` or ``llama``."""
    tied = settings.get("tied", False)
    if settings.get("style", "gpt") == "gpt":
        return {
            "model_type": "gpt2", "n_embd": settings["h"], "n_head": settings["a"],
            "n_layer": settings["layers"], "n_positions": settings["s"], "vocab_size": settings["V"],
            "tie_word_embeddings": tied, "architectures": ["GPT2LMHeadModel"],
        }  # fmt: skip
    return {
        "model_type": "llama", "hidden_size": settings["h"], "num_attention_heads": settings["a"],
        "num_key_value_heads": settings["k"], "intermediate_size": settings["ff"],
        "num_hidden_layers": settings["layers"], "vocab_size": settings["V"],
        "tie_word_embeddings": tied, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip


def options_of(settings: dict[str, Any]) -> dict[str, Any]:
    """A record's settings in Megatron's words; what it leaves out is the plain loop of its reference."""
    wrapped = bool(settings.get("ddp"))
    options: dict[str, Any] = {
        "transformer_impl": "local", "make_vocab_size_divisible_by": 1, "wrap_with_ddp": wrapped,
        "gradient_accumulation_fusion": False,
    }  # fmt: skip
    if wrapped:
        options["use_distributed_optimizer"] = settings["do"]
        options["overlap_grad_reduce"] = settings.get("overlap", False)
        options["grad_reduce_in_bf16"] = settings.get("bf16_reduce", False)
        options["ddp_bucket_size"] = settings.get("bucket")
    if settings.get("act_fusion") is False:
        options |= {"bias_gelu_fusion": False, "bias_swiglu_fusion": False}
    granularity = settings.get("rec")
    if granularity is not None:
        options["recompute_granularity"] = granularity
    if granularity == "full":
        options["recompute_method"] = settings.get("method", "uniform")
        options["recompute_num_layers"] = settings.get("n", 1)
    if granularity == "selective":
        options["recompute_modules"] = settings.get("modules", ["core_attn"])
    return options


def setup_of(settings: dict[str, Any]) -> TrainingSetup:
    """A record's settings; kernels as it ran them, each on its own."""
    wrapped = bool(settings.get("ddp"))
    degree = settings["t"]
    return TrainingSetup(
        num_gpus=degree * settings.get("dp", 1),
        engine="megatron",  # type: ignore[arg-type]
        tensor_parallel=degree,
        sequence_parallel=bool(settings.get("sp")),
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision="bf16-master" if wrapped else "bf16",  # type: ignore[arg-type]
        optimizer="adamw-foreach" if wrapped else "adamw-fused",  # type: ignore[arg-type]
        dropout=settings.get("drop"),
        kernel_scratch=False,
        engine_options=options_of(settings),
    )


def predict_megatron(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record without its batch, and what one layer keeps for backward."""
    settings = record["settings"]
    model = load_model(config_of(settings), "causal-lm")
    resolved = setup_of(settings).resolve(model.context_length)
    tape, passes = record_and_walk(model, tape_options(resolved, None))
    batch_bytes = sum(tape.inputs)
    given = RankInput(tape=tape, passes=passes, setup=resolved)
    figures = figures_of(rank_account(given, rank=settings.get("rank", 0)))
    figures = {name: value - batch_bytes for name, value in figures.items()}
    figures["peak_load"] += batch_bytes
    layers = next(each for each in passes.forward if each.segment.is_layer)
    figures["activations_per_layer"] = layers.later_bytes
    figures["activations"] = passes.after_forward.total_bytes
    return figures
