"""Types that are written as classes: the file and the class of each, and the heads of tasks."""

from memplan.model.heads import Task

CLASSES = {
    "arcee": "llama_kin.ArceeModel",
    "gemma": "gemma.GemmaModel",
    "gemma2": "gemma.Gemma2Model",
    "gemma3_text": "gemma.Gemma3TextModel",
    "granite": "llama_kin.GraniteModel",
    "granitemoe": "mixtures.GraniteMoeModel",
    "hunyuan_v1_dense": "llama_kin.HunYuanModel",
    "llama": "llama.LlamaModel",
    "mistral": "llama.MistralModel",
    "mixtral": "mixtures.MixtralModel",
    "olmoe": "mixtures.OlmoeModel",
    "qwen2": "llama.Qwen2Model",
    "qwen2_moe": "mixtures.Qwen2MoeModel",
    "qwen3": "llama.Qwen3Model",
    "qwen3_moe": "mixtures.Qwen3MoeModel",
    "seed_oss": "llama_kin.SeedOssModel",
    "smollm3": "llama_kin.SmolLM3Model",
}
"""By ``model_type``: a module of ``memplan.classes``, and the class of the base model in it."""

TASKS = {
    Task.BASE: "BaseModel",
    Task.CAUSAL_LM: "ForCausalLM",
    Task.SEQUENCE_CLASSIFICATION: "ForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "ForTokenClassification",
}
"""The class around it (``memplan.classes.heads``)."""
