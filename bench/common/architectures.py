"""Tiny models of Hugging Face's classes by hand: of those that `bench.common.tiny_models` cannot make of the configuration class alone.

In: a model type of the table: the class, sizes that make it small, what it is fed. Out: `ResolvedModel`. Nothing is downloaded, and what
    the
configuration does not name stays as the library has it: dropout, ties, positions.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.common.tiny_models import bare_loss, far
from shardwise.errors import ModelError, format_error
from shardwise.zoo.resolved import ResolvedModel
from shardwise.zoo.shared_layers import random_classes, random_tokens

WORDS, LENGTH, IMAGE, BATCH = 96, 16, 32, 4
Sizes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Made:
    """A class of the library, its sizes, and the names of what it is fed (`INPUTS`). `learns`: what `labels` are; empty where the last
    states are compared. `image`: of a side."""

    model: str
    sizes: Sizes
    takes: str = "input_ids"
    learns: str = "next"
    image: int = IMAGE
    length: int = LENGTH


def _bert(**sizes: Any) -> Sizes:
    return {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 64, "pad_token_id": 0, **sizes,
    }  # fmt: skip


def _bart(**sizes: Any) -> Sizes:
    return {
        "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0,
        "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None, "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0, **sizes,
    }  # fmt: skip


def _t5(**sizes: Any) -> Sizes:
    return {
        "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, **sizes,
    }  # fmt: skip


def _vit(**sizes: Any) -> Sizes:
    return {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": IMAGE, "patch_size": 8,
        "num_labels": 5, **sizes,
    }  # fmt: skip


def _speech(**sizes: Any) -> Sizes:
    return {
        "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "conv_dim": (16, 16, 16), "conv_kernel": (8, 3, 3), "conv_stride": (4, 2, 2), "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "apply_spec_augment": False,
        "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "num_labels": 5, "classifier_proj_size": 16, **sizes,
    }  # fmt: skip


def _two(text: Sizes, vision: Sizes, **sizes: Any) -> Sizes:
    return {"text_config": text, "vision_config": vision, "projection_dim": 16, **sizes}


_CLIP_TEXT = {**_bert(max_position_embeddings=LENGTH), "bos_token_id": 1, "eos_token_id": 2}
_CLIP_VISION = {k: v for k, v in _vit().items() if k != "num_labels"}
_GPT = {"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _bert(num_key_value_heads=2, head_dim=8)
_SWIN = {
    "image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 5,
    "drop_path_rate": 0.0,
}  # fmt: skip
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_labels": 5}
_CLASS, _CTC = ("pixel_values", "class"), ("input_values", "ctc")

TABLE: dict[str, Made] = {
    # decoders
    "gpt2": Made("GPT2LMHeadModel", _GPT),
    "openai-gpt": Made("OpenAIGPTLMHeadModel", _GPT),
    "gptj": Made("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "codegen": Made("CodeGenForCausalLM", {**_GPT, "rotary_dim": 4}),
    "gpt_bigcode": Made("GPTBigCodeForCausalLM", _GPT),
    "gpt_neo": Made("GPTNeoForCausalLM", _bert(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8)),
    "gpt_neox": Made("GPTNeoXForCausalLM", _bert()),
    "gpt_neox_japanese": Made("GPTNeoXJapaneseForCausalLM", _bert(intermediate_multiple_size=2)),
    "opt": Made("OPTForCausalLM", _bert(ffn_dim=64, word_embed_proj_dim=32, pad_token_id=1)),
    "bloom": Made("BloomForCausalLM", _bert(n_layer=2, n_head=4)),
    "falcon": Made("FalconForCausalLM", _bert()),
    "mpt": Made("MptForCausalLM", {"vocab_size": WORDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "xglm": Made("XGLMForCausalLM", {"vocab_size": WORDS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}),
    "ctrl": Made("CTRLLMHeadModel", {"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64}),
    "biogpt": Made("BioGptForCausalLM", _bert()),
    "persimmon": Made("PersimmonForCausalLM", _bert()),
    "xlnet": Made("XLNetLMHeadModel", {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "bert-generation": Made("BertGenerationDecoder", _bert(is_decoder=True)),
    # encoders
    "bert": Made("BertForMaskedLM", _bert()),
    "albert": Made("AlbertForMaskedLM", _bert(embedding_size=16)),
    "roberta": Made("RobertaForMaskedLM", _bert(pad_token_id=1)),
    "camembert": Made("CamembertForMaskedLM", _bert(pad_token_id=1)),
    "xlm-roberta": Made("XLMRobertaForTokenClassification", _bert(num_labels=5, pad_token_id=1), learns="each"),
    "distilbert": Made("DistilBertForMaskedLM", {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "electra": Made("ElectraForMaskedLM", _bert(embedding_size=16)),
    "deberta-v2": Made("DebertaV2ForMaskedLM", _bert(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)),
    "deberta": Made("DebertaForMaskedLM", _bert(relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16)),
    "mpnet": Made("MPNetForMaskedLM", _bert(pad_token_id=1)),
    "convbert": Made("ConvBertForMaskedLM", _bert(embedding_size=32, conv_kernel_size=3)),
    "squeezebert": Made("SqueezeBertForMaskedLM", _bert(embedding_size=32)),
    "mobilebert": Made("MobileBertForMaskedLM", _bert(embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16)),
    "megatron-bert": Made("MegatronBertForMaskedLM", _bert()),
    "rembert": Made("RemBertForMaskedLM", _bert(input_embedding_size=16, output_embedding_size=16)),
    "roformer": Made("RoFormerForMaskedLM", _bert(embedding_size=32)),
    "ernie": Made("ErnieForMaskedLM", _bert()),
    "esm": Made("EsmForMaskedLM", _bert(mask_token_id=3, position_embedding_type="rotary", token_dropout=False, pad_token_id=1)),
    "fnet": Made("FNetForMaskedLM", _bert()),
    "nystromformer": Made("NystromformerForMaskedLM", _bert(num_landmarks=4, segment_means_seq_len=LENGTH)),
    "funnel": Made(
        "FunnelForMaskedLM",
        {"vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "num_decoder_layers": 1},
    ),
    "modernbert": Made("ModernBertForMaskedLM", _bert(local_attention=8)),
    "layoutlm": Made("LayoutLMForMaskedLM", _bert(), "input_ids bbox"),
    "xlm": Made("XLMWithLMHeadModel", {"vocab_size": WORDS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}),
    "ibert": Made("IBertForMaskedLM", _bert(pad_token_id=1)),
    "nomic_bert": Made("NomicBertForMaskedLM", _bert()),
    "splinter": Made("SplinterModel", _bert(), learns=""),
    # an encoder and a decoder
    "bart": Made("BartForConditionalGeneration", _bart()),
    "mbart": Made("MBartForConditionalGeneration", _bart()),
    "pegasus": Made("PegasusForConditionalGeneration", _bart()),
    "blenderbot": Made("BlenderbotForConditionalGeneration", _bart()),
    "blenderbot-small": Made("BlenderbotSmallForConditionalGeneration", _bart()),
    "marian": Made("MarianMTModel", _bart()),
    "m2m_100": Made("M2M100ForConditionalGeneration", _bart()),
    "plbart": Made("PLBartForConditionalGeneration", _bart()),
    "t5": Made("T5ForConditionalGeneration", _t5()),
    "mt5": Made("MT5ForConditionalGeneration", _t5(feed_forward_proj="gated-gelu")),
    "umt5": Made("UMT5ForConditionalGeneration", _t5()),
    "longt5": Made("LongT5ForConditionalGeneration", _t5(local_radius=4)),
    "prophetnet": Made(
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": WORDS, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "ngram": 2,
        },
    ),
    # images
    "vit": Made("ViTForImageClassification", _vit(), *_CLASS),
    "deit": Made("DeiTForImageClassification", _vit(), *_CLASS),
    "beit": Made("BeitForImageClassification", _vit(use_relative_position_bias=True, drop_path_rate=0.0), *_CLASS),
    "vit_msn": Made("ViTMSNForImageClassification", _vit(), *_CLASS),
    "dinov2": Made("Dinov2ForImageClassification", _vit(mlp_ratio=2, drop_path_rate=0.0), *_CLASS),
    "ijepa": Made("IJepaForImageClassification", _vit(), *_CLASS),
    "swin": Made("SwinForImageClassification", _SWIN, *_CLASS, image=64),
    "swinv2": Made("Swinv2ForImageClassification", _SWIN, *_CLASS, image=64),
    "convnext": Made("ConvNextForImageClassification", {**_STAGES, "drop_path_rate": 0.0}, *_CLASS),
    "convnextv2": Made("ConvNextV2ForImageClassification", {**_STAGES, "drop_path_rate": 0.0}, *_CLASS),
    "resnet": Made("ResNetForImageClassification", {**_STAGES, "embedding_size": 8, "layer_type": "basic"}, *_CLASS),
    "regnet": Made("RegNetForImageClassification", {**_STAGES, "embedding_size": 8, "groups_width": 8}, *_CLASS),
    "bit": Made("BitForImageClassification", {**_STAGES, "embedding_size": 32, "hidden_sizes": [32, 32, 32, 32], "num_groups": 4}, *_CLASS),
    "mobilenet_v1": Made("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 5}, *_CLASS),
    "mobilenet_v2": Made("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 5}, *_CLASS),
    "poolformer": Made("PoolFormerForImageClassification", {**_STAGES, "drop_path_rate": 0.0}, *_CLASS, image=64),
    "segformer": Made(
        "SegformerForImageClassification",
        {**_STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16, "drop_path_rate": 0.0}, *_CLASS, image=64,
    ),
    "pvt": Made(
        "PvtForImageClassification", {**_STAGES, "image_size": 64, "num_attention_heads": [1, 2, 2, 4], "drop_path_rate": 0.0}, *_CLASS,
        image=64,
    ),
    "mobilevit": Made(
        "MobileViTForImageClassification",
        {
            "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32], "num_labels": 5,
            "num_attention_heads": 4,
        }, *_CLASS, image=64,
    ),
    "focalnet": Made(
        "FocalNetForImageClassification",
        {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3],
         "num_labels": 5, "drop_path_rate": 0.0}, *_CLASS,
    ),
    "efficientnet": Made(
        "EfficientNetForImageClassification",
        {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "num_labels": 5,
         "drop_connect_rate": 0.0}, *_CLASS,
    ),
    "levit": Made(
        "LevitForImageClassification",
        {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
         "num_labels": 5, "drop_path_rate": 0}, *_CLASS, image=64,
    ),
    "videomae": Made(
        "VideoMAEForVideoClassification", _vit(num_frames=4, tubelet_size=2), "video", "class",
    ),
    "timesformer": Made("TimesformerForVideoClassification", _vit(num_frames=4, drop_path_rate=0), "video", "class"),
    "vivit": Made("VivitForVideoClassification", _vit(num_frames=4, tubelet_size=[2, 8, 8]), "video", "class"),
    # sound
    "wav2vec2": Made("Wav2Vec2ForCTC", _speech(), *_CTC),
    "hubert": Made("HubertForCTC", _speech(), *_CTC),
    "wavlm": Made("WavLMForCTC", _speech(), *_CTC),
    "unispeech": Made("UniSpeechForSequenceClassification", _speech(), "input_values", "class"),
    "data2vec-audio": Made("Data2VecAudioForCTC", _speech(conv_pos_kernel_size=3), *_CTC),
    "sew": Made("SEWForCTC", _speech(squeeze_factor=2), *_CTC),
    "audio-spectrogram-transformer": Made(
        "ASTForAudioClassification", _vit(max_length=32, num_mel_bins=16, frequency_stride=8, time_stride=8), "spectrum", "class",
    ),
    "whisper": Made("WhisperForConditionalGeneration", _bart(num_mel_bins=8, max_source_positions=16, max_target_positions=32), "mel"),
    "speech_to_text": Made(
        "Speech2TextForConditionalGeneration", _bart(input_feat_per_channel=8, conv_channels=16, max_source_positions=32,
                                                     max_target_positions=32), "frames",
    ),
    "wav2vec2-bert": Made(
        "Wav2Vec2BertForSequenceClassification",
        _speech(feature_projection_input_dim=8, conv_depthwise_kernel_size=3, max_source_positions=32), "frames", "class",
    ),
    # states that go along a sequence
    "mamba": Made("MambaForCausalLM", _bert(state_size=4)),
    "mamba2": Made("Mamba2ForCausalLM", _bert(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)),
    "falcon_mamba": Made("FalconMambaForCausalLM", _bert(state_size=4)),
    "rwkv": Made("RwkvForCausalLM", _bert(attention_hidden_size=32, context_length=64)),
    "recurrent_gemma": Made("RecurrentGemmaForCausalLM", {**_LLAMA, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}),
    # text beside images or sound
    "clip": Made("CLIPModel", _two(_CLIP_TEXT, _CLIP_VISION), "input_ids pixel_values", "pairs"),
    "siglip": Made("SiglipModel", _two(_CLIP_TEXT, _CLIP_VISION), "input_ids pixel_values", "pairs"),
    "chinese_clip": Made("ChineseCLIPModel", _two(_bert(), _CLIP_VISION), "input_ids pixel_values", "pairs"),
    "vilt": Made("ViltModel", _bert(image_size=IMAGE, patch_size=8), "input_ids pixel_values pixel_mask", ""),
    "git": Made("GitForCausalLM", _bert(vision_config=_CLIP_VISION, num_image_with_embedding=None), "input_ids pixel_values"),
    "clap": Made(
        "ClapTextModelWithProjection", _bert(projection_dim=16, pad_token_id=1), learns="embeds",
    ),
    "visual_bert": Made("VisualBertModel", _bert(visual_embedding_dim=16), "input_ids visual_embeds", ""),
    "llava": Made(
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama", **_LLAMA}, "vision_config": {"model_type": "clip_vision_model", **_CLIP_VISION},
         "image_token_index": WORDS - 1, "vision_feature_layer": -1}, "ids_of_images pixel_values", length=24,
    ),
    "paligemma": Made(
        "PaliGemmaForConditionalGeneration",
        {"text_config": {"model_type": "gemma", **_LLAMA}, "vision_config": {"model_type": "siglip_vision_model", **_CLIP_VISION},
         "image_token_index": WORDS - 1, "projection_dim": 32, "hidden_size": 32}, "ids_of_images pixel_values token_type_ids", length=24,
    ),
    # series, decisions
    "patchtst": Made(
        "PatchTSTForPrediction",
        {"num_input_channels": 3, "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2, "d_model": 32,
         "num_attention_heads": 4, "ffn_dim": 64, "prediction_length": 4, "use_cls_token": False, "do_mask_input": False,
         "loss": "mse"}, "past_values future_values", "given",
    ),
    "patchtsmixer": Made(
        "PatchTSMixerForPrediction",
        {"num_input_channels": 3, "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_layers": 2, "d_model": 16,
         "prediction_length": 4}, "past_values future_values", "given",
    ),
    "decision_transformer": Made(
        "DecisionTransformerModel", {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
                                     "max_ep_len": 32}, "states actions rewards returns_to_go timesteps attention_mask", "actions",
    ),
}  # fmt: skip


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _ids_of_images(size: int, made: Made) -> Tensor:
    """Places of an image's patches in front of words."""
    ids = random_tokens((size, made.length), WORDS - 1, seed=0)
    ids[:, : (made.image // 8) ** 2] = WORDS - 1
    return ids


# What a model is fed under each name; where the name of the argument differs, behind the colon.
INPUTS: dict[str, Callable[[int, Made], Tensor]] = {
    "input_ids": lambda size, made: random_tokens((size, made.length), WORDS, seed=0).clamp_(min=3),
    "ids_of_images:input_ids": _ids_of_images,
    "token_type_ids": lambda size, made: torch.ones((size, made.length), dtype=torch.long),
    "bbox": lambda size, made: random_tokens((size, made.length), WORDS, seed=1).sort(-1).values.unsqueeze(-1).expand(-1, -1, 4).clone(),
    "pixel_values": lambda size, made: _normal(size, 3, made.image, made.image),
    "pixel_mask": lambda size, made: torch.ones((size, made.image, made.image), dtype=torch.long),
    "video:pixel_values": lambda size, made: _normal(size, 4, 3, made.image, made.image),
    "input_values": lambda size, made: _normal(size, 400),
    "spectrum:input_values": lambda size, made: _normal(size, 32, 16),
    "mel:input_features": lambda size, made: _normal(size, 8, 32),
    "frames:input_features": lambda size, made: _normal(size, 32, 8),
    "visual_embeds": lambda size, made: _normal(size, 4, 16),
    "past_values": lambda size, made: _normal(size, 16, 3),
    "future_values": lambda size, made: _normal(size, 4, 3),
    "states": lambda size, made: _normal(size, made.length, 5),
    "actions": lambda size, made: _normal(size, made.length, 3),
    "rewards": lambda size, made: _normal(size, made.length, 1),
    "returns_to_go": lambda size, made: _normal(size, made.length, 1),
    "timesteps": lambda size, made: torch.arange(made.length).repeat(size, 1),
    "attention_mask": lambda size, made: torch.ones((size, made.length), dtype=torch.long),
}
LABELS: dict[str, Callable[[int, dict[str, Tensor]], Tensor]] = {
    "next": lambda size, fed: fed["input_ids"].clone() if "input_ids" in fed else random_tokens((size, 8), WORDS, seed=1).clamp_(min=3),
    "each": lambda size, fed: fed["input_ids"] % 5,
    "class": lambda size, fed: random_classes(size, 5, seed=1),
    "ctc": lambda size, fed: random_tokens((size, 6), 19, seed=1).clamp_(min=1),
}


def _pairs(output: Any, batch: Any) -> Tensor:
    """Each text is its own image's."""
    logits = output.logits_per_text
    return nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "": bare_loss, "pairs": _pairs, "embeds": lambda output, batch: far(output.text_embeds),
    "actions": lambda output, batch: far(output.action_preds),
}  # fmt: skip


def resolved(name: str) -> ResolvedModel:
    """The tiny model of a type of the table."""
    made = TABLE[name]
    library = importlib.import_module("transformers")
    kind = getattr(library, made.model)
    config = kind.config_class(**copy.deepcopy(made.sizes))
    config.use_cache = False

    def make() -> nn.Module:
        try:
            module: nn.Module = kind(copy.deepcopy(config)).train()
        except Exception as error:
            raise ModelError(f"{made.model} cannot be made so small: {format_error(error)}") from error
        return module

    def batch(size: int) -> dict[str, Tensor]:
        fed = {key.partition(":")[2] or key: INPUTS[key](size, made) for key in map(_full, made.takes.split())}
        return fed | ({"labels": LABELS[made.learns](size, fed)} if made.learns in LABELS else {})

    return ResolvedModel(name, make, batch, LOSSES.get(made.learns), BATCH)


def _full(name: str) -> str:
    return next(key for key in INPUTS if key.partition(":")[0] == name)
