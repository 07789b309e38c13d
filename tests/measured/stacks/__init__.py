"""One translator for each source of published measurements, and which records it reads."""

from tests.measured.runs import LackingError, Record, Run, Translator, UnstatedError
from tests.measured.stacks.answer_ai import fsdp_qlora
from tests.measured.stacks.deepspeed import bf16_master_weights, ml_engineering, sdma_allgather
from tests.measured.stacks.fms import fms_acceleration
from tests.measured.stacks.hugging_face import documentation, peft_comparison
from tests.measured.stacks.litgpt import resource_tables
from tests.measured.stacks.llm_foundry import throughput_tables
from tests.measured.stacks.modelscope import ms_swift, qwen
from tests.measured.stacks.own_loops import cs336
from tests.measured.stacks.preferences import alignment_handbook, verl
from tests.measured.stacks.prime_rl import prime_rl
from tests.measured.stacks.torchtitan import torchtitan
from tests.measured.stacks.torchtune import torchtune


def _other_engine(name: str) -> Translator:
    def refuse(record: Record) -> Run:
        del record
        raise LackingError(feature=name)

    return refuse


TRANSLATORS: tuple[tuple[str, Translator], ...] = (
    ("foundation-model-stack/fms-acceleration", fms_acceleration),
    ("pytorch/torchtitan", torchtitan),
    ("pytorch/torchtune", torchtune),
    ("Lightning-AI/litgpt", resource_tables),
    ("AnswerDotAI/fsdp_qlora", fsdp_qlora),
    ("huggingface/transformers docs", documentation),
    ("huggingface/peft method_comparison", peft_comparison),
    ("stas00/ml-engineering", ml_engineering),
    ("deepspeedai/DeepSpeed examples/sdma_allgather", sdma_allgather),
    ("deepspeedai/DeepSpeedExamples training/bf16_master_weight", bf16_master_weights),
    ("deepspeedai/DeepSpeed commit", _other_engine("a figure before the first step")),
    ("modelscope/ms-swift", ms_swift),
    ("QwenLM/Qwen", qwen),
    ("PrimeIntellect-ai/prime-rl", prime_rl),
    ("mosaicml/llm-foundry", throughput_tables),
    ("CS336", cs336),
    ("huggingface/alignment-handbook", alignment_handbook),
    ("volcengine/verl", verl),
    ("hpcaitech/ColossalAI", _other_engine("ColossalAI's LowLevelZero")),
    ("MooreThreads/SimuMax", _other_engine("Megatron-core")),
    ("NVIDIA/Megatron-LM", _other_engine("Megatron-core")),
    ("kwai/Megatron-Kwai", _other_engine("Megatron-core")),
)
"""A piece of ``source_url_or_repo_path`` -> who reads such records."""


def translate(record: Record) -> Run:
    """The run that a record describes; raises ``NotExpressibleError`` where there is none."""
    if record["completeness"] == "C":
        raise UnstatedError(feature="settings that the source leaves out")
    for piece, translator in TRANSLATORS:
        if piece in record["source_url_or_repo_path"]:
            return translator(record)
    raise LackingError(feature="a source that no translator reads")
