"""What classes of transformers 5.23 refuse by themselves, whatever their sizes mean to memplan."""

from memplan.model.config import ConfigReader

WHOLE_HEADS = frozenset(
    {
        "arcee", "aria_text", "deepseek_v2", "eurobert", "gemma2", "gemma3_text", "gpt_neox",
        "hyperclovax", "jais2", "llama", "minicpm3", "muse_glimmer_text", "vaultgemma",
    }
)  # fmt: skip
"""Types whose config raises where the hidden size is no multiple of the heads, though heads have a size of
their own (``validate_architecture`` in each ``configuration_*.py``)."""

WITHOUT_SDPA = frozenset(
    {
        "align", "big_bird", "bigbird_pegasus", "bit", "bloom", "clvp", "codegen", "convbert",
        "convnext", "convnextv2", "cpmant", "cvt", "deberta", "deberta-v2", "deepseek_v4",
        "efficientnet", "encodec", "falcon_mamba", "flava", "fnet", "focalnet", "fsmt", "funnel",
        "gemma2", "glpn", "got_ocr2", "gpt_neo", "gpt_oss", "gptj", "groupvit", "led", "levit",
        "lilt", "longformer", "longt5", "luke", "lxmert", "mamba", "mamba2", "mimo_v2_flash",
        "mobilevit", "mpnet", "mpt", "openai-gpt", "openai_privacy_filter", "patchtsmixer",
        "pegasus_x", "perceiver", "poolformer", "prophetnet", "pvt", "reformer", "regnet",
        "rembert", "resnet", "rwkv", "speech_to_text", "speecht5", "squeezebert", "swinv2",
        "switch_transformers", "timesformer", "upernet", "vaultgemma", "vilt", "visual_bert",
        "vitmatte", "wavlm", "xglm", "xlnet",
    }
)  # fmt: skip
"""Types whose classes raise where ``attn_implementation="sdpa"`` is asked for (``_supports_sdpa``;
``PreTrainedModel._sdpa_can_dispatch``). Where nothing is asked for they run what they have."""

WITHOUT_FLASH = frozenset(
    {
        "align", "big_bird", "bigbird_pegasus", "bit", "blip-2", "bloom", "clvp", "codegen",
        "convbert", "convnext", "convnextv2", "cpmant", "cvt", "deberta", "deberta-v2",
        "decision_transformer", "deepseek_v32", "deepseek_v4", "doge", "dpr",
        "efficientnet", "encodec", "falcon_mamba", "flava", "fnet", "focalnet", "fsmt",
        "funnel", "glm_moe_dsa", "glpn", "got_ocr2", "granite_speech",
        "granite_speech_plus", "groupvit", "layoutlm", "led", "levit", "lilt", "llama4",
        "llama4_text", "longformer", "longt5", "luke", "lxmert", "mamba", "mamba2",
        "mllama", "mobilevit", "mpnet", "mpt", "mt5", "openai-gpt", "patchtsmixer",
        "perceiver", "poolformer", "pp_formulanet", "prophetnet", "pvt", "reformer",
        "regnet", "rembert", "resnet", "rwkv", "sam", "sam_hq", "seamless_m4t",
        "seamless_m4t_v2", "siglip2", "siglip2_vision_model", "speech_to_text", "speecht5",
        "squeezebert", "step3p7", "swinv2", "switch_transformers", "t5", "timesformer",
        "umt5", "upernet", "vilt", "visual_bert", "vitmatte", "wav2vec2-bert",
        "wav2vec2-conformer", "wavlm", "xglm", "xlnet",
    }
)  # fmt: skip
"""Types whose classes raise where the flash-attention package is asked for (``_supports_flash_attn``;
``PreTrainedModel._flash_attn_can_dispatch``)."""

DECLARING_FP32 = frozenset({"deberta", "xlnet"})
"""Types of which a weight is ``torch.FloatTensor`` or ``dtype=torch.float`` in the class itself: built or
loaded in 16 bits it stays in fp32, and a product of two formats raises (``XLNetRelativeAttention.q``,
``DisentangledSelfAttention.q_bias``). A model that is cast as a whole, as DeepSpeed does, runs."""

WITHOUT_AUTOCAST = frozenset({"xmod"})
"""Types that write what a linear layer gave into a tensor of the norm's format: under autocast 16 bits into
fp32, which raises (models/xmod, ``XmodOutput.lang_adapter``; aten's ``index_put_``)."""


def check_heads(reader: ConfigReader, model_type: str) -> None:
    """Refuse what the type's config refuses."""
    if model_type in WHOLE_HEADS:
        heads = reader.integer("num_attention_heads")
        reader.divide("hidden_size", reader.integer("hidden_size"), "num_attention_heads", heads)
