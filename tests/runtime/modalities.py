"""Tiny configurations of models that read more than text, or run text token by token, and what their batches are."""

from __future__ import annotations

from typing import Any

import torch

from protwin.runtime.model.configurations import build_model
from protwin.runtime.tracing.model_inputs import ModelInputs
from protwin.shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, TARGET_LENGTH

WIDTH = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**WIDTH, "vocab_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 2}
EYE = {**WIDTH, "image_size": 16, "patch_size": 8}
SPEECH = {
    **WIDTH,
    "model_type": "wav2vec2",
    "vocab_size": 32,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 8],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
QUIET = {"layerdrop": 0.0, "mask_time_prob": 0.0, "attention_dropout": 0.0}
"""Nothing is drawn by chance that decides what runs, or with which kernel."""

Shapes = dict[str, tuple[int, ...]]
MODALITIES: dict[str, tuple[dict[str, Any], int | None, Shapes]] = {
    "clip": (
        {
            "model_type": "clip",
            "text_config": {**TEXT, "projection_dim": 8, "eos_token_id": 63},
            "vision_config": {**EYE, "projection_dim": 8},
            "projection_dim": 8,
        },
        6,
        {"pixel_values": (2, 3, 16, 16), "input_ids": (2, 6)},
    ),
    "llava": (
        {
            "model_type": "llava",
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**EYE, "model_type": "clip_vision_model"},
            "image_token_id": 60,
        },
        12,
        # The last of three blocks of the image's part is not looked at: its features are taken before it.
        {"input_ids": (2, 12), "pixel_values": (2, 3, 16, 16), "labels": (2, 12)},
    ),
    "qwen2_vl": (
        {
            "model_type": "qwen2_vl",
            "text_config": {
                **TEXT,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0},
            },
            "vision_config": {
                "depth": 3,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "patch_size": 4,
            },
            "image_token_id": 60,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        },
        20,
        # Half of 20 tokens hold 3 x 3 merged patches, each of 2 x 2; a patch is 2 frames of 3 channels of 4 x 4.
        {
            "input_ids": (2, 20),
            "mm_token_type_ids": (2, 20),
            "pixel_values": (72, 96),
            "image_grid_thw": (2, 3),
            "labels": (2, 20),
        },
    ),
    "gemma3": (
        {
            "model_type": "gemma3",
            "text_config": {**TEXT, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8},
            "vision_config": {**EYE, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_id": 60,
            "boi_token_id": 61,
            "eoi_token_id": 62,
        },
        12,
        # Masks are made within torch.vmap: images see all of themselves.
        {"input_ids": (2, 12), "token_type_ids": (2, 12), "pixel_values": (2, 3, 16, 16), "labels": (2, 12)},
    ),
    "qwen3_vl": (
        {
            "model_type": "qwen3_vl",
            "text_config": {
                **TEXT,
                "head_dim": 8,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0},
            },
            "vision_config": {
                "depth": 3,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            "image_token_id": 60,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        },
        20,
        # Features of inner blocks of the tower are added to what blocks of the text give.
        {
            "input_ids": (2, 20),
            "mm_token_type_ids": (2, 20),
            "pixel_values": (72, 96),
            "image_grid_thw": (2, 3),
            "labels": (2, 20),
        },
    ),
    "idefics3": (
        {
            "model_type": "idefics3",
            "text_config": {**TEXT, "model_type": "llama", "pad_token_id": 0},
            "vision_config": {**EYE, "model_type": "idefics3_vision"},
            "scale_factor": 2,
            "image_token_id": 60,
        },
        12,
        # Images of zeros alone are left out as padding, which depends on the values of pixels.
        {"input_ids": (2, 12), "pixel_values": (2, 1, 3, 16, 16), "labels": (2, 12)},
    ),
    "whisper": (
        {
            "model_type": "whisper",
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "vocab_size": 64,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
        6,
        {"input_features": (2, 8, 24), "labels": (2, 6)},
    ),
    "wav2vec2": (SPEECH | QUIET, 2560, {"input_values": (2, 2560), "labels": (2, 2)}),
    "segformer": (
        {
            "model_type": "segformer",
            "architectures": ["SegformerForSemanticSegmentation"],
            "image_size": 32,
            "hidden_sizes": [8, 8, 8, 8],
            "num_attention_heads": [1, 1, 1, 1],
            "depths": [1, 1, 1, 1],
            "decoder_hidden_size": 8,
            "num_labels": 5,
        },
        None,
        {"pixel_values": (2, 3, 32, 32), "labels": (2, 32, 32)},
    ),
    "mamba2": (
        {
            "model_type": "mamba2",
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "vocab_size": 64,
            "state_size": 8,
            "expand": 2,
            "head_dim": 8,
            "num_heads": 4,
            "n_groups": 1,
            "chunk_size": 4,
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
        },
        8,
        {"input_ids": (2, 8), "labels": (2, 8)},
    ),
}
"""Configuration, sequence length, and the batch of two samples, derived by hand."""


def model_and_batch(name: str, *, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and a batch of the shapes that are traced, filled with noise where it is no integer.

    A spectrogram's bands come first in Whisper, as in the first batch that is tried.
    """
    config, length, _ = MODALITIES[name]
    torch.manual_seed(3)
    model = build_model(config, name, torch.float32, device=device)
    given = {BATCH_SIZE: 2, SEQUENCE_LENGTH: length, TARGET_LENGTH: length}
    batch = next(ModelInputs(model).batches(given))
    return model.train(), {key: filled(value) for key, value in batch.items()}


def filled(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    return torch.randn(value.shape) if value.is_floating_point() else torch.ones(value.shape, dtype=value.dtype)
