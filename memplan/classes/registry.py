"""Types that are written as classes: the file and the class of each, and the heads of tasks."""

from importlib import import_module
from typing import TYPE_CHECKING

from memplan.model.heads import Task

if TYPE_CHECKING:
    from memplan.classes.base import Base

CLASSES = {
    "albert": "albert.AlbertModel",
    "apertus": "llama_kin.ApertusModel",
    "arcee": "llama_kin.ArceeModel",
    "bart": "translating.bart.BartModel",
    "bert": "bert.BertModel",
    "blenderbot": "translating.bart.BlenderbotModel",
    "blenderbot-small": "translating.bart.BlenderbotSmallModel",
    "bloom": "older.alibi.BloomModel",
    "camembert": "bert.XLMRobertaModel",
    "codegen": "older.gptj.CodeGenModel",
    "cohere": "cohere.CohereModel",
    "cohere2": "cohere.Cohere2Model",
    "deepseek_v2": "mixed.latent.DeepseekV2Model",
    "deepseek_v3": "mixed.latent.DeepseekV3Model",
    "distilbert": "distilbert.DistilBertModel",
    "dots1": "mixed.deepseek.Dots1Model",
    "dpr": "bert_kin.DPRModel",
    "electra": "bert.ElectraModel",
    "esm": "prenorm.EsmModel",
    "eurobert": "rotary_encoders.EuroBertModel",
    "exaone4": "llama_kin.Exaone4Model",
    "falcon": "older.falcon.FalconModel",
    "gemma": "gemma.GemmaModel",
    "gemma2": "gemma.Gemma2Model",
    "gemma3_text": "gemma.Gemma3TextModel",
    "glm": "glm.GlmModel",
    "glm4": "glm.Glm4Model",
    "glm4_moe": "mixed.deepseek.Glm4MoeModel",
    "glm4_moe_lite": "mixed.latent.Glm4MoeLiteModel",
    "gpt2": "older.gpt2.GPT2Model",
    "gpt_bigcode": "older.gpt2.GPTBigCodeModel",
    "gpt_neo": "older.gptj.GPTNeoModel",
    "gpt_neox": "gpt_neox.GPTNeoXModel",
    "gptj": "older.gptj.GPTJModel",
    "granite": "llama_kin.GraniteModel",
    "granitemoe": "mixed.mixtures.GraniteMoeModel",
    "helium": "llama_kin.HeliumModel",
    "hunyuan_v1_dense": "llama_kin.HunYuanModel",
    "hy_v3": "mixed.deepseek.HYV3Model",
    "hyperclovax": "llama_kin.HyperCLOVAXModel",
    "jais2": "llama_kin.Jais2Model",
    "jina_embeddings_v3": "rotary_encoders.JinaEmbeddingsV3Model",
    "kimi_k2": "mixed.latent.DeepseekV3Model",
    "layoutlm": "bert_kin.LayoutLMModel",
    "llama": "llama.LlamaModel",
    "m2m_100": "translating.bart.M2M100Model",
    "marian": "translating.bart.MarianModel",
    "mbart": "translating.bart.MBartModel",
    "minicpm3": "mixed.latent.MiniCPM3Model",
    "minimax_m2": "mixed.deepseek.MiniMaxM2Model",
    "ministral3": "llama_kin.Ministral3Model",
    "mistral": "llama.MistralModel",
    "mistral4": "mixed.latent.Mistral4Model",
    "mixtral": "mixed.mixtures.MixtralModel",
    "modernbert": "rotary_encoders.ModernBertModel",
    "mpt": "older.alibi.MptModel",
    "mt5": "translating.t5.MT5Model",
    "nemotron": "starcoder.NemotronModel",
    "nomic_bert": "rotary_encoders.NomicBertModel",
    "olmo": "olmo.OlmoModel",
    "olmo2": "olmo.Olmo2Model",
    "olmo3": "olmo.Olmo3Model",
    "olmoe": "mixed.mixtures.OlmoeModel",
    "openai-gpt": "older.gpt2.OpenAIGPTModel",
    "opt": "older.opt.OPTModel",
    "pegasus": "translating.bart.PegasusModel",
    "persimmon": "gpt_neox.PersimmonModel",
    "phi": "gpt_neox.PhiModel",
    "phi3": "glm.Phi3Model",
    "phimoe": "mixed.mixtures.PhimoeModel",
    "plbart": "translating.bart.PLBartModel",
    "qwen2": "llama.Qwen2Model",
    "qwen2_moe": "mixed.mixtures.Qwen2MoeModel",
    "qwen3": "llama.Qwen3Model",
    "qwen3_moe": "mixed.mixtures.Qwen3MoeModel",
    "rembert": "bert_kin.RemBertModel",
    "roberta": "bert.RobertaModel",
    "roberta-prelayernorm": "prenorm.RobertaPreLayerNormModel",
    "roc_bert": "bert_kin.RoCBertModel",
    "seed_oss": "llama_kin.SeedOssModel",
    "smollm3": "llama_kin.SmolLM3Model",
    "solar_open": "mixed.deepseek.SolarOpenModel",
    "stablelm": "gpt_neox.StableLmModel",
    "starcoder2": "starcoder.Starcoder2Model",
    "t5": "translating.t5.T5Model",
    "umt5": "translating.t5.UMT5Model",
    "vaultgemma": "gemma.VaultGemmaModel",
    "xglm": "older.opt.XGLMModel",
    "xlm-roberta": "bert.XLMRobertaModel",
    "xlm-roberta-xl": "prenorm.XLMRobertaXLModel",
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
