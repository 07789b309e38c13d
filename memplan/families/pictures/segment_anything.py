"""Segment Anything: SAM, SAM-HQ and SAM 2 for videos, and PP-FormulaNet on SAM's encoder."""

import math
from collections.abc import Callable
from dataclasses import replace

from memplan.families.classes import BARE, dispatch, whole_model
from memplan.families.nesting import PartSpec, read_part
from memplan.families.request import ReadRequest
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.parts import attention
from memplan.families.towers.sam import sam2_vision, sam_vision
from memplan.families.towers.sizes import few, pair
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.gridded.grids import ForgottenBody, ReturnedBody
from memplan.model.towers.gridded.nets import ConvolutionBody
from memplan.model.towers.gridded.segmenting import (
    FineFeaturesBody,
    FineMasksBody,
    LastLookBody,
    MasksBody,
    PlacesBody,
    PromptBody,
    TwoWayLayerBody,
    UpscalingBody,
)
from memplan.model.towers.layers import LayerBody, LayerNames
from memplan.model.towers.parts import LinearBody, NormBody, SpareBody
from memplan.model.towers.texts import DecodedTokensBody, OutputBody

MASK_CHANNELS = 16
"""``mask_input_channels`` where the config has none (``SamPromptEncoderConfig``)."""
TWO_WAY_RATE = 2
"""``attention_downsample_rate`` of ``SamTwoWayAttentionBlock``, to which no config's is handed."""
MEMORY_WIDTH = 64
"""Of what SAM 2's memory attention reads, written out in ``Sam2VideoMemoryAttentionLayer``."""
GENERATION = "ForConditionalGeneration"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _parts(reader: ConfigReader, *keys: str) -> list[ConfigReader]:
    """Readers of nested configs; SAM 2's vision part may be of any type, and usually is its own."""
    return [
        read_part(reader, PartSpec(key=f"{key}_config", model_type="sam2_vision_model")).reader
        for key in keys
    ]


def _sam(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    vision, prompts, masks = _parts(reader, "vision", "prompt_encoder", "mask_decoder")

    def declare(table: ParameterTable, _ending: str) -> None:
        places = PlacesBody(image=pair(vision, "image_size"), patch=pair(vision, "patch_size"))
        with table.block("shared_image_embedding", body=places):
            features = vision.integer("num_pos_feats")
            table.parameter("shared_image_embedding", "positional_embedding", 2, features)
        fine = request.model_type == "sam_hq"
        sam_vision(table, "vision_encoder", vision, keeps_wide=fine)
        _written_parts(table, prompts, masks, fine=fine)

    return whole_model(
        reader, request, (BARE,), declare,
        hidden_size=vision.integer("hidden_size"), context_length=1,
    )  # fmt: skip


def _written_parts(
    table: ParameterTable, prompts: ConfigReader, masks: ConfigReader, *, fine: bool
) -> None:
    """Behind SAM's encoder, in the order in which it runs; a prompt is one point, and no mask."""
    size, heads = masks.integer("hidden_size"), masks.integer("num_attention_heads", default=8)
    tokens = masks.integer("num_multimask_outputs") + 1
    last_narrow = size // masks.integer("attention_downsample_rate")
    last_token = "hq_token.weight" if fine else ""
    if fine:
        with table.block("mask_decoder.features", body=FineFeaturesBody(size=size)):
            _fine_features(table, size, masks.integer("vit_dim"))
    prompt = PromptBody(size=size, num_tokens=tokens + fine, last_token=last_token)
    with table.block("prompt_encoder", body=prompt):
        _prompt_encoder(table, prompts)
        table.embedding("iou_token", 1, size)
        table.embedding("mask_tokens", tokens, size)
        if fine:
            table.embedding("hq_token", 1, size)
    points = prompts.integer("num_point_embeddings")
    with table.block("prompt_encoder.points", count=points, body=SpareBody()):
        table.embedding("point_embed", 1, prompts.integer("hidden_size"))
    layer = TwoWayLayerBody(
        size=size, narrow=size // TWO_WAY_RATE, inner_size=masks.integer("mlp_dim"), num_heads=heads,
        network="mlp", activation=tower_activation(masks, "hidden_act", default="relu"),
    )  # fmt: skip
    for _ in range(masks.layers("num_hidden_layers")):
        # No layers that are run again: ``SamTwoWayAttentionBlock`` is a plain module.
        with table.block("mask_decoder.two_way", body=layer):
            _two_way_layer(table, masks, TWO_WAY_RATE, 2)
    last = LastLookBody(size=size, narrow=last_narrow, num_heads=heads)
    with table.block("mask_decoder.final", body=ChainBody(parts=(last, UpscalingBody(size=size)))):
        attention(table, "final_attn_token_to_image", size, inner=last_narrow)
        table.norm("layer_norm_final_attn", size)
        _upscaling(table, size)
    inner, depth = masks.integer("iou_head_hidden_dim"), few(masks, "iou_head_depth")
    with table.block("mask_decoder.quality", body=SpareBody()):
        _deep(table, "iou_prediction_head", size, inner, tokens, depth)
    made: TowerBody = MasksBody(size=size, num_tokens=tokens)
    if fine:
        made = FineMasksBody(size=size, num_tokens=tokens)
    with table.block("mask_decoder.masks", body=made):
        if fine:
            _deep(table, "hq_mask_mlp", size, size, size // 8, 3)
            table.convolution("mask_conv1", size // 8, size // 4, 3, 3)
            table.norm("mask_norm", size // 4)
            table.convolution("mask_conv2", size // 4, size // 8, 3, 3)
        for number in range(tokens):
            _deep(table, f"output_hypernetworks_mlps.{number}", size, size, size // 8, 3)


def _upscaling(table: ParameterTable, size: int) -> None:
    # Torch's transposed convolutions have their inputs first: the same numbers.
    table.convolution("upscale_conv1", size, size // 4, 2, 2)
    table.convolution("upscale_conv2", size // 4, size // 8, 2, 2)
    table.norm("upscale_layer_norm", size // 4)


def _prompt_encoder(table: ParameterTable, reader: ConfigReader) -> None:
    """Convolutions of a mask, and embeddings for where there is none."""
    size = reader.integer("hidden_size")
    wide = reader.integer("mask_input_channels", default=MASK_CHANNELS)
    narrow = wide // 4
    table.convolution("mask_embed.conv1", 1, narrow, 2, 2)
    table.convolution("mask_embed.conv2", narrow, wide, 2, 2)
    table.convolution("mask_embed.conv3", wide, size, 1, 1)
    table.norm("mask_embed.layer_norm1", narrow)
    table.norm("mask_embed.layer_norm2", 4 * narrow)
    table.embedding("no_mask_embed", 1, size)
    table.embedding("not_a_point_embed", 1, size)


def _deep(
    table: ParameterTable, name: str, size: int, inner: int, out: int, num_layers: int
) -> None:
    """``SamFeedForward``: two linear layers at least."""
    table.linear(f"{name}.proj_in", size, inner)
    for index in range(num_layers - 2):
        table.linear(f"{name}.layers.{index}", inner, inner)
    table.linear(f"{name}.proj_out", inner, out)


def _two_way_transformer(
    table: ParameterTable, reader: ConfigReader, rate: int, network_layers: int
) -> None:
    """Points attend to the image and the image to them, at a narrower width."""
    size = reader.integer("hidden_size")
    narrow = size // reader.integer("attention_downsample_rate")
    with table.block("mask_decoder.layers", count=reader.layers("num_hidden_layers")):
        _two_way_layer(table, reader, rate, network_layers)
    with table.block("mask_decoder.final"):
        attention(table, "final_attn_token_to_image", size, inner=narrow)
        table.norm("layer_norm_final_attn", size)


def _two_way_layer(
    table: ParameterTable, reader: ConfigReader, rate: int, network_layers: int
) -> None:
    size = reader.integer("hidden_size")
    narrow = size // rate
    attention(table, "self_attn", size)
    attention(table, "cross_attn_token_to_image", size, inner=narrow)
    attention(table, "cross_attn_image_to_token", size, inner=narrow)
    _deep(table, "mlp", size, reader.integer("mlp_dim"), size, network_layers)
    for index in range(4):
        table.norm(f"layer_norm{index + 1}", size)


def _mask_decoder(table: ParameterTable, reader: ConfigReader) -> None:
    size = reader.integer("hidden_size")
    tokens = reader.integer("num_multimask_outputs") + 1
    with table.block("mask_decoder"):
        table.embedding("iou_token", 1, size)
        table.embedding("mask_tokens", tokens, size)
        _upscaling(table, size)
        inner, depth = reader.integer("iou_head_hidden_dim"), few(reader, "iou_head_depth")
        _deep(table, "iou_prediction_head", size, inner, tokens, depth)
    with table.block("mask_decoder.hypernetworks", count=tokens):
        _deep(table, "output_hypernetworks_mlp", size, size, size // 8, 3)


def _fine_features(table: ParameterTable, size: int, vision: int) -> None:
    """``SamHQMaskDecoder``: one more mask reads the encoder's early and late features."""
    table.convolution("compress_vit_conv1", vision, size, 2, 2)
    table.norm("compress_vit_norm", size)
    table.convolution("compress_vit_conv2", size, size // 8, 2, 2)
    table.convolution("encoder_conv1", size, size // 4, 2, 2)
    table.norm("encoder_norm", size // 4)
    table.convolution("encoder_conv2", size // 4, size // 8, 2, 2)


def _sam2_video(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """SAM 2: Hiera, and a memory of earlier frames."""
    vision, prompts, masks = _parts(reader, "vision", "prompt_encoder", "mask_decoder")
    backbone = read_part(
        vision, PartSpec(key="backbone_config", model_type="sam2_hiera_det_model")
    ).reader

    def declare(table: ParameterTable, _ending: str) -> None:
        sam2_vision(table, "vision_encoder", vision, backbone)
        with table.block("prompt_encoder"):
            _prompt_encoder(table, prompts)
            points = prompts.integer("num_point_embeddings")
            table.embedding("point_embed", points, prompts.integer("hidden_size"))
        rate = masks.integer("attention_downsample_rate")
        _two_way_transformer(table, masks, rate, few(masks, "num_hidden_layers"))
        _mask_decoder(table, masks)
        _object_scores(table, masks)
        _memory_attention(table, reader)
        _memory_encoder(table, reader)
        _memory(table, reader, vision.integer("fpn_hidden_size"))

    model = whole_model(
        reader, request, (BARE,), declare,
        hidden_size=vision.integer("fpn_hidden_size"), context_length=1,
    )  # fmt: skip
    left_out = f"{model.activations_left_out} (its class runs under torch.inference_mode alone)"
    return replace(model, activations_left_out=left_out)


def _object_scores(table: ParameterTable, reader: ConfigReader) -> None:
    size = reader.integer("hidden_size")
    with table.block("mask_decoder.objects"):
        table.convolution("conv_s0", size, size // 8, 1, 1)
        table.convolution("conv_s1", size, size // 4, 1, 1)
        table.embedding("obj_score_token", 1, size)
        _deep(table, "pred_obj_score_head", size, size, 1, 3)


def _memory_attention(table: ParameterTable, reader: ConfigReader) -> None:
    size = reader.integer("memory_attention_hidden_size")
    width = size // reader.integer("memory_attention_downsample_rate")
    inner = reader.integer("memory_attention_feed_forward_hidden_size")
    with table.block("memory_attention.layers", count=reader.layers("memory_attention_num_layers")):
        attention(table, "self_attn", size, inner=width)
        attention(table, "cross_attn_image", size, inner=width, source=MEMORY_WIDTH)
        table.linear("linear1", size, inner)
        table.linear("linear2", inner, size)
        for index in range(3):
            table.norm(f"layer_norm{index + 1}", size)
    with table.block("memory_attention.norm"):
        table.norm("layer_norm", size)


def _memory_encoder(table: ParameterTable, reader: ConfigReader) -> None:
    """A mask made small step by step, joined with the frame's features.

    The defaults are ``Sam2VideoConfig``'s.
    """
    size, out = (
        reader.integer(f"memory_encoder_{key}") for key in ("hidden_size", "output_channels")
    )
    kernel = reader.integer("mask_downsampler_kernel_size", default=3)
    stride = reader.integer("mask_downsampler_stride", default=2, minimum=2)
    steps = int(
        math.log2(reader.integer("mask_downsampler_total_stride", default=16)) // math.log2(stride)
    )
    with table.block("memory_encoder"):
        channels = 1
        for index in range(steps):
            table.convolution(f"mask.{index}", channels, channels * stride**2, kernel, kernel)
            channels *= stride**2
            table.norm(f"mask.{index}.layer_norm", channels)
        width = reader.integer("mask_downsampler_embed_dim", default=256)
        table.convolution("mask.final_conv", channels, width, 1, 1)
        table.convolution("feature_projection", size, size, 1, 1)
        table.convolution("projection", size, out, 1, 1)
    width, inner = (
        reader.integer(f"memory_fuser_{key}") for key in ("embed_dim", "intermediate_dim")
    )
    across = reader.integer("memory_fuser_kernel_size")
    with table.block("memory_encoder.fuser", count=reader.layers("memory_fuser_num_layers")):
        table.parameter("memory_fuser", "scale", width)
        table.convolution("depthwise_conv", width, width, across, across, groups=width)
        table.norm("layer_norm", width)
        table.linear("pointwise_conv1", width, inner)
        table.linear("pointwise_conv2", inner, width)


def _memory(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """What ``Sam2VideoModel`` owns itself."""
    width = reader.integer("memory_encoder_output_channels")
    with table.block("memory"):
        table.parameter("model", "no_memory_embedding", 1, 1, size)
        table.parameter("model", "no_memory_positional_encoding", 1, 1, size)
        frames = reader.integer("num_maskmem")
        table.parameter("model", "memory_temporal_positional_encoding", frames, 1, 1, width)
        table.parameter("model", "no_object_pointer", 1, size)
        if reader.flag("enable_occlusion_spatial_embedding"):
            table.parameter("model", "occlusion_spatial_embedding_parameter", 1, width)
        if reader.flag("enable_temporal_pos_encoding_for_object_pointers"):
            table.linear("temporal_positional_encoding_projection_layer", size, width)
        table.convolution("mask_downsample", 1, 1, 4, 4)
        _deep(table, "object_pointer_proj", size, size, size, 3)


def _formula_net(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """PP-FormulaNet: SAM's encoder, two more convolutions, and mBART's decoder.

    Its class ties nothing, whatever the flags say (``_tied_weights_keys``).
    """
    vision, text = _parts(reader, "vision", "text")
    size = text.integer("d_model")

    def declare(table: ParameterTable, ending: str) -> None:
        sam_vision(table, "encoder", vision, written_out=True)
        _formula_projector(table, vision)
        _formula_decoder(table, text, size)
        if ending == GENERATION:
            rows = text.integer("vocab_size")
            spelled = OutputBody(size=size, rows=rows, table="", upcast=True)
            with table.block("head", body=spelled):
                table.linear("lm_head", size, rows, bias=False)

    return whole_model(
        reader, request, (GENERATION, BARE), declare,
        hidden_size=size, vocab_size=text.integer("vocab_size"),
        context_length=text.integer("max_position_embeddings"),
    )  # fmt: skip


def _formula_projector(table: ParameterTable, vision: ConfigReader) -> None:
    before, middle, after = (
        vision.integer(f"post_conv_{key}_channels") for key in ("in", "mid", "out")
    )
    out = vision.integer("decoder_hidden_size")
    convolutions = (
        ConvolutionBody(module=f"conv{number}", kernel=3, stride=2, padding=2) for number in (1, 2)
    )
    # What the neck gave, the model returns beside the decoder's result.
    parts: tuple[TowerBody, ...] = (
        ReturnedBody(), *convolutions, LinearBody(module="linear_1", inputs=after, outputs=after),
        LinearBody(module="linear_2", inputs=after, outputs=out),
    )  # fmt: skip
    with table.block("projector", body=ChainBody(parts=parts)):
        table.convolution("conv1", before, middle, 3, 3, bias=False)
        table.convolution("conv2", middle, after, 3, 3, bias=False)
        table.linear("linear_1", after, after)
        table.linear("linear_2", after, out)


def _formula_decoder(table: ParameterTable, text: ConfigReader, size: int) -> None:
    """``PPFormulaNetTextModel``; positions begin at 2, as BART's do."""
    length, drop = text.integer("max_position_embeddings"), text.number("dropout", default=0.1)
    tokens = DecodedTokensBody(
        size=size, num_positions=length, tokens="embed_tokens", positions="embed_positions",
        norm="layernorm_embedding", dropout=drop,
    )  # fmt: skip
    with table.block("decoder.embed", body=tokens):
        table.embedding("embed_tokens", text.integer("vocab_size"), size)
        table.embedding("embed_positions", length + 2, size)
        table.norm("layernorm_embedding", size)
    inner, heads = text.integer("decoder_ffn_dim"), text.integer("decoder_attention_heads")
    head_dim = text.divide("d_model", size, "decoder_attention_heads", heads)
    seen = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, query_bias=True, key_bias=True,
        value_bias=True, output_bias=True, causal=True, fp32_softmax=False,
        dropout=text.number("attention_dropout", default=0.0), names_weights=False,
    )  # fmt: skip
    body = LayerBody(
        size=size, inner_size=inner, attention=seen, cross_attention=replace(seen, causal=False),
        memory="projector", activation=tower_activation(text, "activation_function"), dropout=drop,
        activation_dropout=text.number("activation_dropout", default=0.0),
        names=LayerNames(
            output="o_proj", first_norm="self_attn_layer_norm", second_norm="final_layer_norm",
            cross_attention="encoder_attn", cross_norm="encoder_attn_layer_norm",
        ),
    )  # fmt: skip
    # Layers may be left out at random.
    written = text.number("decoder_layerdrop", default=0.0) == 0
    count = text.layers("decoder_layers")
    with table.block("decoder.layers", count=count, body=body if written else None):
        for name in ("self_attn", "encoder_attn"):
            attention(table, name, size)
            table.norm(f"{name}_layer_norm", size)
        table.linear("mlp.fc1", size, inner)
        table.linear("mlp.fc2", inner, size)
        table.norm("final_layer_norm", size)
    last = (NormBody(module="layer_norm", size=size), ForgottenBody())
    with table.block("decoder.norm", body=ChainBody(parts=last)):
        table.norm("layer_norm", size)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "sam": _sam,
    "sam_hq": _sam,
    "sam2_video": _sam2_video,
    "pp_formulanet": _formula_net,
}
