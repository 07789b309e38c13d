"""The types of language models with towers, one row each.

Sources: ``modeling_*.py`` and ``configuration_*.py`` of each type in transformers 5.23.
"""

from collections.abc import Mapping

from memplan.families.multimodal_spec import Multimodal, Ties
from memplan.families.nesting import PartSpec
from memplan.families.projectors import convolved, plain, queried, sounds
from memplan.families.projectors.towers import TEXT
from memplan.model.towers.compared.joining import Joining, TowerJoin

LLAMA = PartSpec(key=TEXT, model_type="llama")
QWEN2 = PartSpec(key=TEXT, model_type="qwen2")
OWN = PartSpec(key=TEXT)
"""The outer class says which class reads the text."""
FLAT = PartSpec(key=TEXT, flat=True)
"""Published files have the text's keys in the outer config."""
OPT = PartSpec(key=TEXT, model_type="opt")
GRANITE = PartSpec(key=TEXT, model_type="granite")

GOT_QWEN: Mapping[str, object] = {
    "vocab_size": 151860, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768,
    "use_sliding_window": False,
}  # fmt: skip
GLM_ASR_TEXT: Mapping[str, object] = {
    "vocab_size": 59264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip

VOXTRAL_TEXT: Mapping[str, object] = {
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "head_dim": 128,
}  # fmt: skip

SCATTERED = TowerJoin(joining=Joining.SCATTERED)
CROSSED = TowerJoin(joining=Joining.CROSSED)
COLLECTED = TowerJoin(joining=Joining.COLLECTED)
SCATTERED_KEPT = TowerJoin(joining=Joining.SCATTERED, returned=True)
COLLECTED_KEPT = TowerJoin(joining=Joining.COLLECTED, returned=True)
SOUND, QUERIED = "the audio tower", "the vision tower and the Q-Former"

MULTIMODALS: dict[str, Multimodal] = {
    "instructblip": Multimodal(
        declare=queried.instructblip,
        text=OPT,
        ties=Ties.INNER,
        join=SCATTERED_KEPT,
        left_out=QUERIED,
    ),
    "instructblipvideo": Multimodal(
        declare=queried.instructblip, text=OPT, ties=Ties.INNER, left_out=QUERIED
    ),
    "blip-2": Multimodal(
        declare=queried.blip2,
        text=OPT,
        ties=Ties.INNER,
        head_in_base=True,
        left_out=QUERIED,
    ),
    "qwen2_audio": Multimodal(
        declare=sounds.qwen2_audio,
        text=QWEN2,
        left_out=SOUND,
        join=TowerJoin(joining=Joining.PICKED),
        attended_loss=True,
    ),
    "voxtral": Multimodal(
        declare=sounds.voxtral,
        text=PartSpec(key=TEXT, model_type="llama", fills=VOXTRAL_TEXT, always_fills=True),
        left_out=SOUND,
        join=SCATTERED,
    ),
    "glmasr": Multimodal(
        declare=sounds.glm_asr,
        text=PartSpec(key=TEXT, model_type="llama", fills=GLM_ASR_TEXT, always_fills=True),
        left_out=SOUND,
        join=TowerJoin(joining=Joining.PICKED, returned=True),
    ),
    "granite_speech": Multimodal(
        declare=sounds.granite_speech, text=GRANITE, left_out="the audio tower and the Q-Former"
    ),
    "deepseek_vl_hybrid": Multimodal(
        declare=convolved.deepseek_vl_hybrid,
        text=LLAMA,
        join=SCATTERED_KEPT,
        left_out="the vision towers",
    ),
    "got_ocr2": Multimodal(
        declare=convolved.got_ocr2,
        text=PartSpec(key=TEXT, model_type="qwen2", fills=GOT_QWEN),
        join=SCATTERED_KEPT,
    ),
    "llama4": Multimodal(
        declare=plain.llama4, text=OWN, join=SCATTERED, ties=Ties.INNER, head_in_base=True
    ),
    "mllama": Multimodal(declare=plain.mllama, text=OWN, join=CROSSED, plain_logits=True),
    "step3p7": Multimodal(declare=convolved.step, text=OWN, join=COLLECTED_KEPT),
    "kosmos-2.5": Multimodal(declare=queried.kosmos, text=OWN, ties=Ties.INNER),
    "gemma4": Multimodal(
        declare=plain.gemma4,
        text=OWN,
        join=COLLECTED_KEPT,
        window_masks_key="use_bidirectional_attention",
        left_out="the towers",
    ),
    "florence2": Multimodal(
        declare=plain.florence2,
        text=PartSpec(key=TEXT, model_type="bart"),
        join=SCATTERED,
        own_output=True,
    ),
    "granite_speech_plus": Multimodal(
        declare=sounds.granite_speech, text=GRANITE, left_out="the audio tower and the Q-Former"
    ),
}
