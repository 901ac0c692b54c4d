"""Models of the transformers library, made from configurations. Each factory returns (module, batch); nothing is downloaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

SAMPLES = 8
CLASSES = 10
VOCABULARY = 512

Made = tuple[nn.Module, dict[str, Tensor]]


def normal(*shape: int) -> Tensor:
    """Normal numbers, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def integers(below: int, *shape: int, seed: int = 0) -> Tensor:
    """Integers from 0, the same at every call."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def texts() -> dict[str, Tensor]:
    """Tokens and what should follow them."""
    return {"input_ids": integers(VOCABULARY, SAMPLES, 128), "labels": integers(VOCABULARY, SAMPLES, 128, seed=1)}


def gpt2() -> Made:
    """GPT-2."""
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=192, n_layer=4, n_head=4)
    return transformers.GPT2LMHeadModel(config), texts()


def bert() -> Made:
    """BERT."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=4, num_attention_heads=4, intermediate_size=768
    )
    return transformers.BertForMaskedLM(config), texts()


def t5() -> Made:
    """T5."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=192, d_kv=48, d_ff=512, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    batch = {"input_ids": integers(VOCABULARY, SAMPLES, 128), "labels": integers(VOCABULARY, SAMPLES, 96)}
    return transformers.T5ForConditionalGeneration(config), batch


def vit() -> Made:
    """Vision transformer."""
    config = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768,
        image_size=96,
        patch_size=8,
        num_labels=CLASSES,
    )
    return transformers.ViTForImageClassification(config), {
        "pixel_values": normal(SAMPLES, 3, 96, 96),
        "labels": integers(CLASSES, SAMPLES),
    }


def llama() -> Made:
    """Llama."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), texts()


def mixtral() -> Made:
    """Mixtral."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config), texts()


def whisper() -> Made:
    """Whisper."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=40,
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=100,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    batch = {"input_features": normal(SAMPLES, 40, 200), "labels": integers(VOCABULARY, SAMPLES, 64)}
    return transformers.WhisperForConditionalGeneration(config), batch


class SpeechClassifier(nn.Module):
    """wav2vec 2.0 without its random masks, a mean over time, a head."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.Wav2Vec2Config(
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=512,
            conv_dim=(64, 64, 64),
            conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 3),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            apply_spec_augment=False,
            layerdrop=0.0,
        )
        self.body = transformers.Wav2Vec2Model(config)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, sounds: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(sounds).last_hidden_state.mean(1)), labels)


def wav2vec2() -> Made:
    """wav2vec 2.0."""
    return SpeechClassifier(), {"sounds": normal(SAMPLES, 4000), "labels": integers(CLASSES, SAMPLES)}


class TextsBesideImages(nn.Module):
    """CLIP, trained to bring each text near its image."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = transformers.CLIPConfig(
            text_config={"vocab_size": VOCABULARY, **shape, "max_position_embeddings": 64, "eos_token_id": VOCABULARY - 1},
            vision_config={**shape, "image_size": 64, "patch_size": 8},
            projection_dim=64,
        )
        self.body = transformers.CLIPModel(config)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        out = self.body(input_ids=input_ids, pixel_values=pixel_values)
        texts = F.normalize(out.text_embeds, dim=-1)
        images = F.normalize(out.image_embeds, dim=-1)
        return 1 - (texts * images).sum(-1).mean()


def clip() -> Made:
    """CLIP."""
    return TextsBesideImages(), {"input_ids": integers(VOCABULARY, SAMPLES, 64), "pixel_values": normal(SAMPLES, 3, 64, 64)}


FACTORIES = (gpt2, bert, t5, vit, llama, mixtral, whisper, wav2vec2, clip)
