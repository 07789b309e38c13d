"""Checks of live objects beside what their runs then take, on PyTorch's CUDA build.

``PYTHON benchmarks/live_setups.py [NAME...]`` runs each setup in a process of its own: model, Trainer (or loop, or engine) as a script
makes them, ``memplan.check`` before the first step, three steps, and the peak that torch's allocator counted beside the foreseen
one. PYTHON has torch, transformers, accelerate, peft, and what the setups named need: TRL, DeepSpeed, bitsandbytes, Lightning. It needs a card, or
the stub of one (``STUB_GPU=h100``; Triton's kernels want ``TRITON_LIBCUDA_PATH``, the folder of its ``libcuda.so.1``), on which several ranks' first one
runs alone.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GPU = os.environ.get("LIVE_GPU", "h100")
STEPS = 3
WIDE = 0.005
"""The bar: how far the foreseen peak may be off."""
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16,
         "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048}  # fmt: skip
T5 = {
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 4,
    "num_heads": 12,
    "vocab_size": 32128,
}
TOKENS = 512
WORLD = 4
WATCHDOG_S = 0.15
"""As long as a step takes at least: NCCL's watchdog looks every 0.1 s which collectives are over (torch 2.13, ``ProcessGroupNCCL.cpp``), and
what they reduced stays until the next one behind that. Without it a stub's steps are over before it has looked once, and DDP's first
buckets lie beside the second ones."""


def causal(kind: str = "llama", *, dtype: str = "float32", **sizes: Any) -> Any:
    """A model of random weights on the CPU, in the format named."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, "pad_token_id": 0, **sizes})
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def text_model(name: str, kind: str, **sizes: Any) -> Any:
    """A model of another class."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.use_cache = False
    return getattr(transformers, name).from_config(config)


def lora(model: Any, **given: Any) -> Any:
    """The model with adapters of rank 16."""
    from peft import LoraConfig, get_peft_model

    usual = {
        "r": 16,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
    }
    return get_peft_model(model, LoraConfig(**{**usual, **given}))


def rows(count: int = 64, *, tokens: int = TOKENS, **more: Any) -> list[dict[str, Any]]:
    """Examples of one length."""
    return [
        {"input_ids": [5] * tokens, "labels": [5] * tokens, "attention_mask": [1] * tokens, **more}
        for _ in range(count)
    ]


def trained(model: Any, data: Any = None, **given: Any) -> dict[str, Any]:
    """transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**USUAL | given)
    return run_trainer(Trainer(model=model, args=arguments, train_dataset=data or rows()))


USUAL: dict[str, Any] = {
    "output_dir": tempfile.gettempdir() + "/live", "report_to": [], "max_steps": STEPS, "save_strategy": "no", "logging_strategy": "no",
    "per_device_train_batch_size": 2, "disable_tqdm": True,
}  # fmt: skip


def run_trainer(trainer: Any) -> dict[str, Any]:
    """Checked, then trained."""
    import memplan

    checked = memplan.check(trainer, gpu=GPU)
    if os.environ.get("LIVE_VERBOSE"):
        batch = next(iter(trainer.get_train_dataloader()))
        print(
            {key: tuple(getattr(each, "shape", ())) for key, each in batch.items()},
            checked.estimate.setup,
            file=sys.stderr,
        )
    trainer.train()
    return compared(checked)


def compared(checked: Any) -> dict[str, Any]:
    """The peak of the run beside the foreseen one."""
    import torch

    measured, foreseen = int(torch.cuda.max_memory_allocated()), checked.allocated_bytes
    return {
        "measured": measured, "foreseen": foreseen, "off": (foreseen - measured) / measured,
        "phase": checked.estimate.peak_phase, "remarks": list(checked.remarks),
        "asked": checked.estimate.worst_bytes,
        "requested": int(torch.cuda.memory_stats()["requested_bytes.all.peak"]),
    }  # fmt: skip


def trl(kind: str, model: Any, data: Any, **given: Any) -> dict[str, Any]:
    """One of TRL's trainers."""
    import trl as package
    from datasets import Dataset, fingerprint

    fingerprint.Hasher.hash = classmethod(
        lambda *_: os.urandom(8).hex()
    )  # nothing is kept for a second time
    peft_config = given.pop("peft_config", None)
    arguments = getattr(package, f"{kind}Config")(**USUAL | given)
    more = {"peft_config": peft_config} if peft_config is not None else {}
    if kind == "DPO" and peft_config is None:
        more["ref_model"] = causal()
    made = getattr(package, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer(), **more
    )  # fmt: skip
    return run_trainer(made)


def tokenizer() -> Any:
    """One of words, without a file."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "word": 5}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def preferences(prompt: int = 64, answer: int = 192) -> list[dict[str, str]]:
    """Pairs of answers of one length."""
    words = " ".join(["word"] * answer)
    return [
        {"prompt": " ".join(["word"] * prompt), "chosen": words, "rejected": words}
        for _ in range(64)
    ]


def texts(tokens: int = TOKENS) -> list[dict[str, str]]:
    """Examples for supervised fine-tuning."""
    return [{"text": " ".join(["word"] * (tokens - 1))} for _ in range(64)]


def lora_config(**given: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0, **given
    )


# -- loops of one's own --------------------------------------------------------------------------------------


def batch_of(size: int = 2, tokens: int = TOKENS) -> dict[str, Any]:
    import torch

    ids = torch.full((size, tokens), 5, device="cuda")
    return {"input_ids": ids, "labels": ids}


def loop(
    model: Any,
    optimizer: Any,
    *,
    autocast: bool = False,
    precision: str | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """Forward, backward, step."""
    import torch

    import memplan

    batch = batch_of()
    checked = memplan.check(model, optimizer, batch=batch, precision=precision, gpu=GPU, **asked)
    model.train()
    for _ in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        time.sleep(WATCHDOG_S)
    return compared(checked)


def adamw(model: Any, **given: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-5, **{"fused": True, **given})


def plain_loop(
    dtype: str = "float32", *, make: Callable[[Any], Any] = adamw, **given: Any
) -> dict[str, Any]:
    model = causal(dtype=dtype).to("cuda")
    return loop(model, make(model), **given)


def started() -> None:
    """The first rank of several, whose collectives a stub completes."""
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK="0", WORLD_SIZE=str(WORLD), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511",
        TORCH_NCCL_ENABLE_MONITORING="0", TORCH_NCCL_RANKS_PER_ROOT="1000000",
    )  # fmt: skip
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", rank=0, world_size=WORLD, store=dist.HashStore(), device_id=torch.device("cuda", 0)
    )


def ddp_loop(**given: Any) -> dict[str, Any]:
    import torch

    started()
    model = causal().to("cuda")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    return loop(wrapped, adamw(wrapped), **given)


def fsdp2_loop(
    *, reshard: bool = True, mesh_shape: tuple[int, ...] = (WORLD,), half: bool = True
) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    started()
    names = ("replicate", "shard")[-len(mesh_shape) :]
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if half
        else MixedPrecisionPolicy()
    )
    options = {
        "mesh": init_device_mesh("cuda", mesh_shape, mesh_dim_names=names),
        "mp_policy": policy,
        "reshard_after_forward": reshard,
    }
    with torch.device("meta"):
        model = causal()
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device="cuda")
    return loop(model, adamw(model))


def deepspeed_loop(stage: int, **more: Any) -> dict[str, Any]:
    import deepspeed
    import deepspeed.runtime.zero.partition_parameters as partition
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    import torch
    from deepspeed.runtime.zero import stage3, utils

    import memplan

    for module in (utils, partition, coordinator, stage3):  # they compare values that nobody sent
        for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: None)
        if hasattr(module, "get_lst_from_rank0"):
            module.get_lst_from_rank0 = lambda values: values
    started()
    model = causal(dtype="bfloat16").to("cuda")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": stage, **more},
              "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}, "gradient_clipping": 1.0}  # fmt: skip
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=config, dist_init_required=False
    )
    batch = batch_of()
    checked = memplan.check(engine, optimizer, batch=batch, gpu=GPU)
    torch.cuda.synchronize()
    for _ in range(STEPS):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    return compared(checked)


def accelerated(**given: Any) -> dict[str, Any]:
    """A loop over accelerate."""
    import torch
    from accelerate import Accelerator

    import memplan

    accelerator = Accelerator(**given)
    model = causal()
    model, optimizer = accelerator.prepare(model, adamw(model))
    batch = batch_of()
    checked = memplan.check(model, optimizer, batch=batch, gpu=GPU)
    for _ in range(STEPS):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    return compared(checked)


def lightning_fit(precision: Any = "32-true", **given: Any) -> dict[str, Any]:
    import lightning
    import torch

    import memplan

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = causal()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return adamw(self.model)

    def together(items: list[dict[str, Any]]) -> dict[str, Any]:
        return {key: torch.tensor([each[key] for each in items]) for key in ("input_ids", "labels")}

    loader = torch.utils.data.DataLoader(rows(), batch_size=2, collate_fn=together)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_steps=STEPS, precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="gpu", devices=1,
        enable_model_summary=False, **given,
    )  # fmt: skip
    module = Module()
    found: list[Any] = []

    class Check(lightning.Callback):
        def on_train_start(self, trainer: Any, _: Any) -> None:
            found.append(memplan.check(trainer, gpu=GPU))

    trainer.callbacks.append(Check())
    trainer.fit(module, loader)
    return compared(found[0])


def quantized(**given: Any) -> Any:
    """A model whose linear layers are in four bits, as ``from_pretrained`` makes it of a saved one."""
    import torch
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as folder:
        causal(dtype="bfloat16").save_pretrained(folder)
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            **given,
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=how, dtype=torch.bfloat16, device_map={"": 0}
        )
    model.config.use_cache = False
    return lora(prepare_model_for_kbit_training(model))


SETUPS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "trainer fp32": lambda: trained(causal()),
    "trainer bf16": lambda: trained(causal(), bf16=True),
    "trainer bf16 weights": lambda: trained(causal(dtype="bfloat16"), bf16=True),
    "trainer checkpointing": lambda: trained(causal(), bf16=True, gradient_checkpointing=True),
    "trainer accumulation": lambda: trained(causal(), bf16=True, gradient_accumulation_steps=4),
    "trainer adafactor": lambda: trained(causal(), bf16=True, optim="adafactor"),
    "trainer adamw loop": lambda: trained(causal(), bf16=True, optim="adamw_torch"),
    "trainer sgd": lambda: trained(causal(), optim="sgd"),
    "trainer 8-bit adamw": lambda: trained(causal(), bf16=True, optim="adamw_bnb_8bit"),
    "trainer eager attention": lambda: trained(causal(attn_implementation="eager"), bf16=True),
    "trainer batch 5": lambda: trained(causal(), bf16=True, per_device_train_batch_size=5),
    "trainer qwen2": lambda: trained(causal("qwen2"), bf16=True),
    "trainer mistral": lambda: trained(causal("mistral"), bf16=True),
    "trainer gemma2": lambda: trained(causal("gemma2", head_dim=64), bf16=True),
    "trainer gpt2": lambda: trained(text_model("AutoModelForCausalLM", "gpt2"), bf16=True),
    "trainer t5": lambda: trained(text_model("AutoModelForSeq2SeqLM", "t5", **T5), bf16=True),
    "trainer bert": lambda: trained(text_model("AutoModelForMaskedLM", "bert"), bf16=True),
    "trainer lora": lambda: trained(lora(causal()), bf16=True),
    "trainer lora bf16 weights": lambda: trained(lora(causal(dtype="bfloat16")), bf16=True),
    "trainer lora checkpointing": lambda: trained(lora(causal(dtype="bfloat16")), bf16=True, gradient_checkpointing=True),
    "trainer lora dropout": lambda: trained(lora(causal(), lora_dropout=0.1), bf16=True),
    "trainer dora": lambda: trained(lora(causal(), use_dora=True), bf16=True),
    "trainer qlora": lambda: trained(quantized(), bf16=True, gradient_checkpointing=True),
    "trainer qlora double": lambda: trained(quantized(bnb_4bit_use_double_quant=True), bf16=True),
    "trl sft": lambda: trl("SFT", causal(), texts(), bf16=True, max_length=TOKENS),
    "trl sft lora": lambda: trl("SFT", causal(dtype="bfloat16"), texts(), bf16=True, max_length=TOKENS, peft_config=lora_config()),
    "trl sft packing": lambda: trl("SFT", causal(), texts(100), bf16=True, max_length=TOKENS, packing=True, packing_strategy="wrapped"),
    "trl dpo": lambda: trl("DPO", causal(), preferences(), bf16=True, max_length=256),
    "trl dpo lora": lambda: trl("DPO", causal(), preferences(), bf16=True, max_length=256, peft_config=lora_config()),
    "trl reward": lambda: trl("Reward", text_model("AutoModelForSequenceClassification", "llama", **SIZES, num_labels=1, pad_token_id=0),
                              preferences(), bf16=True, max_length=256),
    "loop fp32": plain_loop,
    "loop bf16": lambda: plain_loop("bfloat16"),
    "loop autocast": lambda: plain_loop(autocast=True, precision="bf16-amp"),
    "loop bert": lambda: loop(bert := text_model("AutoModelForMaskedLM", "bert").to("cuda"), adamw(bert)),
    "loop bert autocast": lambda: loop(bert := text_model("AutoModelForMaskedLM", "bert").to("cuda"), adamw(bert), autocast=True, precision="bf16-amp"),
    "trainer bert whole": lambda: trained(text_model("AutoModelForMaskedLM", "bert"), [{key: row[key] for key in ("input_ids", "labels")} for row in rows()], bf16=True),
    "loop foreach": lambda: plain_loop(make=lambda model: adamw(model, fused=False)),
    "loop ddp": ddp_loop,
    "loop ddp autocast": lambda: ddp_loop(autocast=True, precision="bf16-amp"),
    "loop fsdp2": fsdp2_loop,
    "loop fsdp2 kept": lambda: fsdp2_loop(reshard=False),
    "loop fsdp2 fp32": lambda: fsdp2_loop(half=False),
    "loop fsdp2 hybrid": lambda: fsdp2_loop(mesh_shape=(2, 2)),
    "deepspeed 1": lambda: deepspeed_loop(1),
    "deepspeed 2": lambda: deepspeed_loop(2),
    "deepspeed 3": lambda: deepspeed_loop(3),
    "accelerate fp32": accelerated,
    "accelerate bf16": lambda: accelerated(mixed_precision="bf16"),
    "lightning fp32": lightning_fit,
    "lightning bf16": lambda: lightning_fit("bf16-mixed"),
    "lightning bf16 weights": lambda: lightning_fit("bf16-true"),
}  # fmt: skip
"""What a script does, by a name."""


def one(name: str) -> None:
    """Run one setup in this process and print what came of it."""
    import transformers.masking_utils as masking

    # No value exists on a stub: the usual answer, one sequence a row, nothing padded, every token labelled, after the same computation.
    packed, every, whole = (
        masking.find_packed_sequence_indices,
        masking.fast_all,
        masking._ignore_bidirectional_mask_sdpa,
    )  # type: ignore[attr-defined]
    masking.find_packed_sequence_indices = lambda *given, **more: (packed(*given, **more), None)[1]  # type: ignore[assignment]
    masking.fast_all = lambda *given, **more: (every(*given, **more), True)[1]  # type: ignore[attr-defined]
    masking._ignore_bidirectional_mask_sdpa = lambda *given, **more: (whole(*given, **more), True)[
        1
    ]
    if name.startswith("trl"):
        import trl.trainer.utils as fused

        fused._use_triton = lambda _: False  # it picks tokens by their labels; else it takes all
    try:
        found = SETUPS[name]()
    except Exception as error:  # noqa: BLE001 - one that fails is a row
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    print("ROW " + json.dumps({"name": name, **found}), flush=True)
    os._exit(0)


def main() -> None:
    """Run those that are named, or all."""
    names = sys.argv[1:] or list(SETUPS)
    off = []
    for name in names:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import live_setups; live_setups.one({name!r})"], capture_output=True, text=True, check=False,
            env={"STUB_GPU": GPU, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))},
        )  # fmt: skip
        line = next((each for each in done.stdout.splitlines() if each.startswith("ROW ")), None)
        row = json.loads(line[4:]) if line else {"name": name, "error": done.stderr[-300:]}
        if "error" in row:
            print(f"{name:28} ERROR {row['error']}", flush=True)
            if os.environ.get("LIVE_VERBOSE"):
                print(done.stderr[-3000:], flush=True)
            continue
        if os.environ.get("LIVE_VERBOSE"):
            print(done.stderr[-3000:], flush=True)
        off.append(abs(row["off"]))
        print(
            f"{name:28} {row['measured'] / 2**20:9.1f} MiB, foreseen {row['foreseen'] / 2**20:9.1f} ({row['off']:+.3%}; of what is asked for {row['asked'] / row['requested'] - 1:+.3%}) in {row['phase']}; {row['remarks']}",
            flush=True,
        )
    within = sum(each <= WIDE for each in off)
    print(f"{len(names)} setups, {len(off)} compared, {within} within {WIDE:.1%}")


if __name__ == "__main__":
    main()
