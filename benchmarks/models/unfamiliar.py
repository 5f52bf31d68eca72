"""Twenty architectures of transformers that the zoo does not have, small enough for a second a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.models.batches import Batch, ModelAndBatch, images, tokens

VOCABULARY = 512
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "use_cache": False,
}
ENCODER = {name: value for name, value in DECODER.items() if name != "use_cache"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def text() -> Batch:
    return tokens(8, 128, VOCABULARY)


def causal(name: str, **config: Any) -> Callable[[], ModelAndBatch]:
    """Return a function that makes a causal language model and its batch."""

    def make() -> ModelAndBatch:
        model = getattr(transformers, f"{name}ForCausalLM")
        return model(getattr(transformers, f"{name}Config")(**{**DECODER, **config})), text()

    return make


def masked(name: str, **config: Any) -> Callable[[], ModelAndBatch]:
    """Return a function that makes a masked language model and its batch."""

    def make() -> ModelAndBatch:
        model = getattr(transformers, f"{name}ForMaskedLM")
        return model(getattr(transformers, f"{name}Config")(**{**ENCODER, **config})), text()

    return make


def classifier(name: str, **config: Any) -> Callable[[], ModelAndBatch]:
    """Return a function that makes an image classifier and its batch."""

    def make() -> ModelAndBatch:
        model = getattr(transformers, f"{name}ForImageClassification")
        return model(getattr(transformers, f"{name}Config")(**config)), images(8, 64)

    return make


def bart() -> ModelAndBatch:
    """Return an encoder and decoder of BART."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=128,
        use_cache=False,
    )
    return transformers.BartForConditionalGeneration(config), text()


def wav2vec2() -> ModelAndBatch:
    """Return wav2vec 2.0 with its loss over alignments."""
    config = transformers.Wav2Vec2Config(
        **{**ENCODER, "vocab_size": 32},
        conv_dim=(64, 64, 64),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 4),
        mask_time_prob=0.0,
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        ctc_zero_infinity=True,
    )
    labels = torch.randint(1, 32, (4, 12))
    return transformers.Wav2Vec2ForCTC(config), {"input_values": torch.randn(4, 8000), "labels": labels}


MODELS: dict[str, Callable[[], ModelAndBatch]] = {
    "OPT": causal("OPT", ffn_dim=512, max_position_embeddings=128, word_embed_proj_dim=128),
    "Bloom": causal("Bloom", n_layer=6, n_head=4),
    "GPT-NeoX": causal("GPTNeoX"),
    "Falcon": causal("Falcon"),
    "Phi": causal("Phi"),
    "Qwen2": causal("Qwen2", num_key_value_heads=2),
    "Qwen3 MoE": causal("Qwen3Moe", num_key_value_heads=2, head_dim=32, **EXPERTS),
    "Gemma 2": causal("Gemma2", num_key_value_heads=2, head_dim=32),
    "OLMo 2": causal("Olmo2"),
    "Cohere": causal("Cohere", num_key_value_heads=2),
    "DeBERTa v2": masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "ALBERT": masked("Albert", embedding_size=64),
    "ELECTRA": masked("Electra", embedding_size=64),
    "Longformer": masked("Longformer", attention_window=32, max_position_embeddings=256),
    "XLNet": lambda: (
        transformers.XLNetLMHeadModel(
            transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=128, n_layer=6, n_head=4, d_inner=512)
        ),
        text(),
    ),
    "BART": bart,
    "Swin": classifier(
        "Swin",
        image_size=64,
        patch_size=4,
        embed_dim=48,
        depths=[2, 2, 4],
        num_heads=[3, 6, 12],
        window_size=4,
    ),
    "ConvNeXt": classifier("ConvNext", depths=[2, 2, 4, 2], hidden_sizes=[32, 64, 128, 256]),
    "MobileNet v2": classifier("MobileNetV2", image_size=64),
    "wav2vec 2.0": wav2vec2,
}
