"""Types that are written as classes: the file and the class of each, and the heads of tasks."""

from importlib import import_module
from typing import TYPE_CHECKING

from memplan.model.heads import Task

if TYPE_CHECKING:
    from memplan.classes.base import Base

CLASSES = {
    "albert": "encoders.albert.AlbertModel",
    "apertus": "llama_kin.ApertusModel",
    "arcee": "llama_kin.ArceeModel",
    "bert": "encoders.bert.BertModel",
    "bloom": "older.alibi.BloomModel",
    "camembert": "encoders.bert.XLMRobertaModel",
    "codegen": "older.gptj.CodeGenModel",
    "cohere": "cohere.CohereModel",
    "cohere2": "cohere.Cohere2Model",
    "convbert": "encoders.convbert.ConvBertModel",
    "deepseek_v2": "mixed.latent.DeepseekV2Model",
    "deepseek_v3": "mixed.latent.DeepseekV3Model",
    "distilbert": "encoders.distilbert.DistilBertModel",
    "dots1": "mixed.deepseek.Dots1Model",
    "dpr": "encoders.bert_kin.DPRModel",
    "electra": "encoders.bert.ElectraModel",
    "esm": "encoders.prenorm.EsmModel",
    "eurobert": "encoders.eurobert.EuroBertModel",
    "exaone4": "llama_kin.Exaone4Model",
    "falcon": "older.falcon.FalconModel",
    "fnet": "encoders.fnet.FNetModel",
    "gemma": "gemma.GemmaModel",
    "gemma2": "gemma.Gemma2Model",
    "gemma3_text": "gemma.Gemma3TextModel",
    "glm": "glm.GlmModel",
    "glm4": "glm.Glm4Model",
    "glm4_moe": "mixed.deepseek.Glm4MoeModel",
    "gpt2": "older.gpt2.GPT2Model",
    "gpt_bigcode": "older.gpt2.GPTBigCodeModel",
    "gpt_neo": "older.gptj.GPTNeoModel",
    "gpt_neox": "gpt_neox.GPTNeoXModel",
    "glm4_moe_lite": "mixed.latent.Glm4MoeLiteModel",
    "gptj": "older.gptj.GPTJModel",
    "granite": "llama_kin.GraniteModel",
    "granitemoe": "mixed.mixtures.GraniteMoeModel",
    "helium": "llama_kin.HeliumModel",
    "hunyuan_v1_dense": "llama_kin.HunYuanModel",
    "hy_v3": "mixed.deepseek.HYV3Model",
    "hyperclovax": "llama_kin.HyperCLOVAXModel",
    "jais2": "llama_kin.Jais2Model",
    "jina_embeddings_v3": "encoders.turned.JinaEmbeddingsV3Model",
    "kimi_k2": "mixed.latent.DeepseekV3Model",
    "layoutlm": "encoders.bert_kin.LayoutLMModel",
    "lilt": "encoders.lilt.LiltModel",
    "llama": "llama.LlamaModel",
    "luke": "encoders.luke.LukeModel",
    "minicpm3": "mixed.latent.MiniCPM3Model",
    "minimax_m2": "mixed.deepseek.MiniMaxM2Model",
    "ministral3": "llama_kin.Ministral3Model",
    "mistral": "llama.MistralModel",
    "mistral4": "mixed.latent.Mistral4Model",
    "mixtral": "mixed.mixtures.MixtralModel",
    "modernbert": "encoders.modernbert.ModernBertModel",
    "mpt": "older.alibi.MptModel",
    "mpnet": "encoders.mpnet.MPNetModel",
    "nemotron": "starcoder.NemotronModel",
    "nomic_bert": "encoders.turned.NomicBertModel",
    "olmo": "olmo.OlmoModel",
    "olmo2": "olmo.Olmo2Model",
    "olmo3": "olmo.Olmo3Model",
    "olmoe": "mixed.mixtures.OlmoeModel",
    "openai-gpt": "older.gpt2.OpenAIGPTModel",
    "opt": "older.opt.OPTModel",
    "persimmon": "gpt_neox.PersimmonModel",
    "phi": "gpt_neox.PhiModel",
    "phi3": "glm.Phi3Model",
    "phimoe": "mixed.mixtures.PhimoeModel",
    "qwen2": "llama.Qwen2Model",
    "qwen2_moe": "mixed.mixtures.Qwen2MoeModel",
    "qwen3": "llama.Qwen3Model",
    "qwen3_moe": "mixed.mixtures.Qwen3MoeModel",
    "rembert": "encoders.bert_kin.RemBertModel",
    "roberta": "encoders.bert.RobertaModel",
    "roberta-prelayernorm": "encoders.prenorm.RobertaPreLayerNormModel",
    "roc_bert": "encoders.bert_kin.RoCBertModel",
    "seed_oss": "llama_kin.SeedOssModel",
    "smollm3": "llama_kin.SmolLM3Model",
    "solar_open": "mixed.deepseek.SolarOpenModel",
    "squeezebert": "encoders.squeezebert.SqueezeBertModel",
    "stablelm": "gpt_neox.StableLmModel",
    "starcoder2": "starcoder.Starcoder2Model",
    "vaultgemma": "gemma.VaultGemmaModel",
    "xglm": "older.opt.XGLMModel",
    "xmod": "encoders.xmod.XmodModel",
    "xlm-roberta": "encoders.bert.XLMRobertaModel",
    "xlm-roberta-xl": "encoders.prenorm.XLMRobertaXLModel",
}
"""By ``model_type``: a module of ``memplan.classes``, and the class of the base model in it."""

TASKS = {
    Task.BASE: "BaseModel",
    Task.CAUSAL_LM: "ForCausalLM",
    Task.SEQUENCE_CLASSIFICATION: "ForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "ForTokenClassification",
    Task.OTHER: "ForRetrieval",
}
"""The class around it (``memplan.classes.heads``)."""


def base_class(model_type: str) -> "type[Base]":
    """The class of a type's base model."""
    file, _, name = CLASSES[model_type].rpartition(".")
    found: type[Base] = getattr(import_module(f"memplan.classes.{file}"), name)
    return found
