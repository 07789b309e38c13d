"""Which parts of a model transformers splits over a group's ranks, and how: facts, by model type.

transformers 5.23, each type's ``base_model_tp_plan`` (``models/*/configuration_*.py``) as
``distributed/tensor_parallel.py`` applies it: ``colwise`` and ``rowwise`` are a split part,
``colwise_gather_output`` and ``rowwise_split_input`` a joined one, and what a plan does not name every
rank has whole. The token table and the output matrix are split in all of them.
"""

from collections.abc import Mapping
from typing import Final

from memplan.fast_dataclass import replace
from memplan.graph.core.splits import PLAIN_SPLIT, Sharing, SplitPlan
from memplan.model.mixers import MixerSpec
from memplan.model.spec import ModelSpec
from memplan.training.splitting.parallelism import TensorParallel, TensorParallelKind

_ATTENTION_WHOLE = SplitPlan(attention=Sharing.WHOLE)
_EXPERTS_ALONE = SplitPlan(attention=Sharing.WHOLE, network=Sharing.WHOLE, shared=Sharing.WHOLE)
_ATTENTION_JOINED = SplitPlan(attention=Sharing.JOINED)
_SHARED_WHOLE = SplitPlan(shared=Sharing.WHOLE)
_MIXER_JOINED = SplitPlan(mixer=Sharing.JOINED)

_TYPES: Final[tuple[tuple[SplitPlan, str], ...]] = (
    (
        PLAIN_SPLIT,
        (
            "apertus arcee cohere cohere2 deepseek_v2 deepseek_v32 dots1 ernie4_5_moe exaone4 "
            "gemma gemma2 gemma3_text glm4_moe glm_moe_dsa granite helium hy_v3 hyperclovax jais2 "
            "gemma4 gemma4_text laguna llama ministral3 mistral mixtral nemotron olmo phi qwen2 qwen3 qwen3_moe "
            "seed_oss smollm3 starcoder2 vaultgemma "
            # Of these the plan is the text model's, and the head has its class's own.
            "aya_vision gemma3 glm4v_moe idefics3 internvl llava llava_next llava_next_video llava_onevision mistral3 paligemma "
            "qwen2_5_vl qwen2_vl qwen3_vl_moe smolvlm"
        ),
    ),
    # Its token table is called otherwise than the one that every plan splits.
    (SplitPlan(table=Sharing.WHOLE), "gpt_neox"),
    (_ATTENTION_WHOLE, "deepseek_v3 kimi_k25"),
    (_EXPERTS_ALONE, "afmoe granitemoe phimoe"),
    (_ATTENTION_JOINED, "minimax_m2 olmo2 olmo3 olmoe"),
    (SplitPlan(network=Sharing.JOINED), "glm glm4 glm4v"),
    (SplitPlan(attention=Sharing.JOINED, network=Sharing.JOINED), "phi3"),
    (_SHARED_WHOLE, "glm4_moe_lite qwen2_moe"),
    (_MIXER_JOINED, "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next"),
    (SplitPlan(network=Sharing.WHOLE, shared=Sharing.WHOLE), "solar_open"),
)
PLANS: Final[Mapping[str, SplitPlan]] = {
    family: plan for plan, families in _TYPES for family in families.split()
}
"""By ``model_type``; a type that is not here has no plan, or one of parts that are not written down."""


def has_plan(model: ModelSpec) -> bool:
    """Whether transformers itself splits the model."""
    return model.family in PLANS


def plan_words(model: ModelSpec, group: TensorParallel) -> str:
    """Whose plan it is, in words.

    >>> import memplan
    >>> plan_words(memplan.load_model("llama-3.1-8b"), TensorParallel(degree=2, sequence=True))
    "torch's styles on each layer, as torchtitan gives them"
    >>> plan_words(memplan.load_model("pythia-70m"), TensorParallel(degree=2))
    "as transformers' tp_plan: token table whole"
    """
    if group.kind is TensorParallelKind.AUTOTP:
        return "as DeepSpeed turns transformers' tp_plan: token table whole"
    if group.sequence:
        return "torch's styles on each layer, as torchtitan gives them"
    if not has_plan(model):
        return f"torch's styles on each layer: transformers has no tp_plan for {model.family}"
    plan = plan_of(model, group)
    parts = {
        "attention": plan.attention, "networks": plan.network, "shared experts": plan.shared,
        "token table": plan.table,
    }  # fmt: skip
    if any(isinstance(run.layer.attention, MixerSpec) for run in model.stacks[0].runs):
        parts["other mixers"] = plan.mixer
    odd = [f"{name} {how.value}" for name, how in parts.items() if how is not Sharing.SPLIT]
    if model.vocab_size % group.degree:
        odd.append("uneven vocabulary, the figures are the first rank's")
    return "as transformers' tp_plan" + (f": {', '.join(odd)}" if odd else "")


def plan_of(model: ModelSpec, group: TensorParallel) -> SplitPlan:
    """How the ranks share the model's parts.

    By heads and widths where transformers has no plan, and beside sequence parallel, which none of its
    plans knows: torch's own styles are then given to the same layers.

    >>> import memplan
    >>> plan_of(memplan.load_model("llama-3.1-8b"), TensorParallel(degree=2)).attention
    <Sharing.SPLIT: 'split'>
    """
    plan = PLAIN_SPLIT if group.sequence else PLANS.get(model.family, PLAIN_SPLIT)
    if group.kind is TensorParallelKind.AUTOTP:
        return replace(plan, table=Sharing.WHOLE)
    return replace(plan, mixer=Sharing.WHOLE) if group.leaves_mixers else plan
