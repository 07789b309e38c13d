"""The families of models: which module reads which ``model_type``.

To add a family, write (or extend) a module in this package that fills in a ``ModelSpec`` from a
``ConfigReader``, and name its model types in ``FAMILY_MODULES``. Defaults and key names of the
transformers class come from ``memplan/data/config_defaults.json``; blocks from ``memplan.graph``.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from memplan.errors import ConfigError, UnsupportedFamilyError, did_you_mean
from memplan.graph.families.request import ReadRequest, deduce_model_type, resolve_task
from memplan.model.config import MAX_LAYERS, ConfigReader
from memplan.model.read_log import ReadLog
from memplan.model.spec import ModelSpec, Task

FAMILY_MODULES: dict[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "openai-gpt": "gpt",
    "gpt2": "gpt",
    "gpt_bigcode": "gpt",
    "gpt_neo": "gpt",
    "gptj": "gpt",
    "codegen": "gpt",
    "opt": "gpt",
    "xglm": "gpt",
    "bloom": "gpt",
    "mpt": "gpt",
    "gpt_neox": "gpt",
    "phi": "gpt",
    "falcon": "gpt",
    "persimmon": "gpt",
    "stablelm": "gpt",
    "starcoder2": "gpt",
    "nemotron": "gpt",
    "gemma": "dense",
    "gemma2": "dense",
    "gemma3_text": "dense",
    "vaultgemma": "dense",
    "phi3": "dense",
    "olmo": "dense",
    "olmo2": "dense",
    "olmo3": "dense",
    "cohere": "dense",
    "cohere2": "dense",
    "glm": "dense",
    "glm4": "dense",
    "granite": "dense",
    "hyperclovax": "dense",
    "arcee": "dense",
    "apertus": "dense",
    "exaone4": "dense",
    "smollm3": "dense",
    "ministral3": "dense",
    "hunyuan_v1_dense": "dense",
    "seed_oss": "dense",
    "helium": "dense",
    "jais2": "dense",
    "fuyu": "fuyu",
    "mixtral": "mixtures",
    "qwen3_moe": "mixtures",
    "qwen2_moe": "mixtures",
    "olmoe": "mixtures",
    "granitemoe": "mixtures",
    "phimoe": "mixtures",
    "dots1": "mixtures",
    "glm4_moe": "mixtures",
    "solar_open": "mixtures",
    "ernie4_5_moe": "mixtures",
    "minimax_m2": "mixtures",
    "hy_v3": "mixtures",
    "deepseek_v2": "latents",
    "deepseek_v3": "latents",
    "glm4_moe_lite": "latents",
    "minicpm3": "latents",
    "bert": "encoders",
    "roberta": "encoders",
    "xlm-roberta": "encoders",
    "xlm-roberta-xl": "encoders",
    "camembert": "encoders",
    "distilbert": "encoders",
    "electra": "encoders",
    "layoutlm": "encoders",
    "esm": "encoders",
    "jina_embeddings_v3": "encoders",
    "nomic_bert": "encoders",
    "eurobert": "encoders",
    "albert": "encoders",
    "deberta": "encoders",
    "deberta-v2": "encoders",
    "t5": "t5",
    "mt5": "t5",
    "umt5": "t5",
    "bart": "bart",
    "mbart": "bart",
    "pegasus": "bart",
    "marian": "bart",
    "blenderbot": "bart",
    "blenderbot-small": "bart",
    "m2m_100": "bart",
    "plbart": "bart",
    "afmoe": "mixtures",
    "laguna": "mixtures",
    "gpt_oss": "mixtures",
    "mimo_v2_flash": "mixtures",
    "deepseek_v32": "latents",
    "longt5": "t5_kin",
    "switch_transformers": "t5_kin",
    "led": "bart_kin",
    "pegasus_x": "bart_kin",
    "bigbird_pegasus": "bart_kin",
    "fsmt": "bart_kin",
    "prophetnet": "bart_kin",
    "big_bird": "counted_encoders",
    "longformer": "counted_encoders",
    "xmod": "counted_encoders",
    "luke": "counted_encoders",
    "lilt": "counted_encoders",
    "convbert": "counted_encoders",
    "squeezebert": "counted_encoders",
    "fnet": "counted_encoders",
    "funnel": "counted_encoders",
    "xlnet": "counted_encoders",
    "whisper": "speech",
    "speech_to_text": "speech",
    "moonshine": "speech",
    "speecht5": "speech",
    "seamless_m4t": "seamless",
    "seamless_m4t_v2": "seamless",
    "reformer": "reformer",
    "perceiver": "perceiver",
    "lxmert": "text_image",
    "visual_bert": "text_image",
    "flava": "text_image",
    "roberta-prelayernorm": "bert_kin",
    "rembert": "bert_kin",
    "roc_bert": "bert_kin",
    "mpnet": "bert_kin",
    "dpr": "bert_kin",
    "modernbert": "modernbert",
    "mamba": "hybrids",
    "falcon_mamba": "hybrids",
    "mamba2": "hybrids",
    "jamba": "hybrids",
    "bamba": "hybrids",
    "granitemoehybrid": "hybrids",
    "falcon_h1": "hybrids",
    "nemotron_h": "hybrids",
    "rwkv": "recurrent",
    "recurrent_gemma": "recurrent",
    "zamba": "recurrent",
    "zamba2": "recurrent",
    "qwen3_next": "linear_attention",
    "qwen3_5_text": "linear_attention",
    "qwen3_5_moe_text": "linear_attention",
    "minimax": "linear_attention",
    "lfm2": "linear_attention",
    "lfm2_moe": "linear_attention",
    "clip": "two_towers",
    "chinese_clip": "two_towers",
    "altclip": "two_towers",
    "siglip": "two_towers",
    "siglip2": "two_towers",
    "owlv2": "two_towers",
    "align": "two_towers",
    "xclip": "two_towers",
    "groupvit": "two_towers",
    "vision-text-dual-encoder": "two_towers",
    "clip_text_model": "two_towers",
    "clip_vision_model": "two_towers",
    "siglip_vision_model": "two_towers",
    "siglip2_vision_model": "two_towers",
    "vit": "image_transformers",
    "deit": "image_transformers",
    "ijepa": "image_transformers",
    "dinov2_with_registers": "image_transformers",
    "videomae": "image_transformers",
    "timesformer": "image_transformers",
    "vilt": "image_transformers",
    "diffllama": "counted_decoders",
    "jetmoe": "counted_decoders",
    "dbrx": "counted_decoders",
    "bitnet": "counted_decoders",
    "doge": "counted_decoders",
    "cpmant": "cpmant",
    "deepseek_v4": "counted_decoders",
    "glm_moe_dsa": "latents",
    "kimi_k2": "latents",
    "resnet": "convolutional",
    "regnet": "convolutional",
    "bit": "convolutional",
    "convnext": "convolutional",
    "convnextv2": "convolutional",
    "efficientnet": "convolutional",
    "poolformer": "convolutional",
    "openai_privacy_filter": "counted_decoders",
    "step3p5": "counted_decoders",
    "decision_transformer": "decision",
    "swinv2": "pyramids",
    "focalnet": "pyramids",
    "cvt": "pyramids",
    "pvt": "pyramids",
    "glpn": "pyramids",
    "levit": "pyramids",
    "mobilevit": "mobilevit",
    "upernet": "dense_prediction",
    "vitmatte": "dense_prediction",
    "wav2vec2": "speech_encoders",
    "hubert": "speech_encoders",
    "wavlm": "speech_encoders",
    "data2vec-audio": "speech_encoders",
    "unispeech": "speech_encoders",
    "unispeech-sat": "speech_encoders",
    "wav2vec2-conformer": "speech_encoders",
    "wav2vec2-bert": "speech_encoders",
    "encodec": "codecs",
    "mimi": "codecs",
    "csm": "codecs",
    "clvp": "codecs",
    "patchtst": "time_series",
    "patchtsmixer": "time_series",
    "llava": "multimodal",
    "llava_next_video": "multimodal",
    "llava_onevision": "multimodal",
    "video_llava": "multimodal",
    "mistral3": "multimodal",
    "aya_vision": "multimodal",
    "cohere2_vision": "multimodal",
    "gemma3": "multimodal",
    "paligemma": "multimodal",
    "deepseek_vl": "multimodal",
    "idefics3": "multimodal",
    "smolvlm": "multimodal",
    "modernvbert": "multimodal",
    "internvl": "multimodal",
    "lfm2_vl": "multimodal",
    "qwen2_vl": "multimodal",
    "qwen2_5_vl": "multimodal",
    "qwen3_vl": "multimodal",
    "qwen3_vl_moe": "multimodal",
    "qwen3_5": "multimodal",
    "qwen3_5_moe": "multimodal",
    "glm4v": "multimodal",
    "glm4v_moe": "multimodal",
    "glm_ocr": "multimodal",
    "exaone4_5": "multimodal",
    "kimi_k25": "multimodal",
    "paddleocr_vl": "multimodal",
    "video_llama_3": "multimodal",
    "minicpmv4_6": "multimodal",
    "muse_glimmer": "multimodal",
    "ovis2": "multimodal",
    "aria": "multimodal",
    "instructblip": "multimodal",
    "qwen2_audio": "multimodal",
    "voxtral": "multimodal",
    "glmasr": "multimodal",
    "granite_speech": "multimodal",
    "deepseek_vl_hybrid": "multimodal",
    "got_ocr2": "multimodal",
    "janus": "multimodal",
    "glm_image": "multimodal",
    "llama4": "multimodal",
    "mllama": "multimodal",
    "step3p7": "multimodal",
    "kosmos-2.5": "multimodal",
    "gemma4": "multimodal",
    "florence2": "multimodal",
    "granite_speech_plus": "multimodal",
    "gemma4_text": "text_decoders",
    "llama4_text": "text_decoders",
    "mllama_text_model": "text_decoders",
    "muse_glimmer_text": "text_decoders",
    "aria_text": "text_decoders",
    "kosmos_2_5_text_model": "text_decoders",
    "colpali": "composites",
    "qwen2_5_omni": "composites",
    "sam": "segment_anything",
    "sam_hq": "segment_anything",
    "sam2_video": "segment_anything",
    "pp_formulanet": "segment_anything",
    "lw_detr": "detection",
    "rf_detr": "detection",
    "d_fine": "detection",
    "dinov2": "image_transformers",
    "llava_next": "multimodal",
    "vipllava": "multimodal",
    "blip-2": "multimodal",
    "instructblipvideo": "multimodal",
    "colqwen2": "composites",
}
"""For each supported ``model_type``, the module of this package that reads it."""


def supported_families() -> tuple[str, ...]:
    """Every ``model_type`` that can be read, in alphabetical order."""
    return tuple(sorted(FAMILY_MODULES))


def read_model(
    config: Mapping[str, object],
    *,
    source: str,
    name: str,
    defaults: Mapping[str, Mapping[str, object]],
    task: Task | None = None,
    family: str | None = None,
    num_labels: int | None = None,
    log: ReadLog | None = None,
) -> ModelSpec:
    """Turn a config into a ``ModelSpec``.

    ``defaults`` holds, for each model type, what its transformers class fills in (``defaults``) and
    calls differently (``renamed``). ``family`` overrules the config's own ``model_type``.

    Raises ``ConfigError`` for a config that cannot be right, ``UnsupportedFamilyError`` for a kind
    of model that no module reads.
    """
    model_type = family or deduce_model_type(config, source=source, known=FAMILY_MODULES)
    module_name = FAMILY_MODULES.get(model_type)
    if module_name is None:
        msg = (
            f"{source}: model_type {model_type!r} is not supported."
            f"{did_you_mean(model_type, supported_families())} Name the nearest one with `family`: "
            f"{', '.join(supported_families())}"
        )
        raise UnsupportedFamilyError(msg)
    row = defaults.get(model_type, {})
    reader = ConfigReader(
        config,
        source=source,
        model_type=model_type,
        defaults=_mapping(row.get("defaults")),
        renamed={key: str(value) for key, value in _mapping(row.get("renamed")).items()},
        log=log,
        all_defaults=defaults,
    )
    request = ReadRequest(
        name=name,
        model_type=model_type,
        task=resolve_task(reader, model_type, task),
        num_labels=num_labels,
        all_defaults=defaults,
    )
    try:
        model = _module(module_name).read(reader, request)
    except RecursionError as error:
        msg = f"{source}: the config is nested too deeply"
        raise ConfigError(msg) from error
    if num_labels is not None and model.task in _WITHOUT_LABELS:
        msg = (
            f"{source}: num_labels {num_labels}: the task {model.task.value} has no labels; name "
            "one that has, such as `task='sequence-classification'`"
        )
        raise ConfigError(msg)
    if model.num_layers > MAX_LAYERS:
        msg = f"{source}: has {model.num_layers} layers in all, and memplan lays out {MAX_LAYERS}"
        raise ConfigError(msg)
    return model


_WITHOUT_LABELS = (Task.CAUSAL_LM, Task.SEQ2SEQ_LM, Task.MASKED_LM)
"""Tasks whose classes have no number of labels."""


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


class FamilyModule(Protocol):
    """What a module of this package provides."""

    def read(self, reader: ConfigReader, request: ReadRequest) -> ModelSpec:
        """Fill in a ``ModelSpec`` from a config of any of the module's types."""


def _module(name: str) -> FamilyModule:
    return cast("FamilyModule", import_module(f"memplan.graph.families.{name}"))
