"""Whether what families hold is what the code of today would trace, told by a small model of the same architecture.

[Note: Fingerprints]
Traces of all models of the catalogue take half an hour.  A fingerprint takes less than a second: the digest of what one
trace sees of a model with the same classes and settings, but small.  Whoever fits what a family does in tiles, or
shared among ranks, keeps the fingerprint beside it; where the code, or what it traces with, changes what such a trace
sees, the two differ and the files are to be made anew (``make catalogue``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ...shared.basics.errors import ProtwinError
from ...shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, WorkloadFamily
from ...shared.observed.observed_inputs import while_frames_return
from ...shared.schema.training_options import FULL_TRAINING
from ...shared.schema.workload import DType
from ..model.blocks import find_blocks
from ..model.configurations import quiet
from ..tiles.mlp_modules import Mlps, find_mlps
from ..tracing.configurations import batch_of, configured_model
from ..tracing.fake_subject import FakeSubject

_HEADS: Final = 4
_WIDTH: Final = 8
"""Features of a head."""
_SMALL: Final = {
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": _HEADS,
    "n_head": _HEADS,
    "hidden_size": _HEADS * _WIDTH,
    "n_embd": _HEADS * _WIDTH,
    "word_embed_proj_dim": _HEADS * _WIDTH,
    "head_dim": _WIDTH,
    "query_pre_attn_scalar": _WIDTH,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "vocab_size": 96,
    "num_local_experts": 4,
    "max_window_layers": 2,
}
"""Sizes in the place of those that a configuration has."""
_UNNEEDED: Final = ("layer_types", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields that follow from sizes, or name words of the large vocabulary."""
_BATCH: Final = 2
_TOKENS: Final = 37
_TILES: Final = 3
_RANKS: Final = 2


def small_twin(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a small model of the same architecture and settings."""
    kept = {name: value for name, value in configuration.items() if name not in _UNNEEDED}
    small = kept | {name: size for name, size in _SMALL.items() if name in kept}
    heads = kept.get("num_key_value_heads")
    if heads is not None:
        small["num_key_value_heads"] = _HEADS if heads == kept["num_attention_heads"] else _HEADS // 2
    return small


def fingerprint(configuration: Mapping[str, Any], dtype: DType, *, is_shared: bool = False) -> str:
    """The digest of what a trace sees of the small twin with all in tiles that can be ([Note: Fingerprints]).

    ``is_shared``: as one of two ranks that share each sequence.  Raises what a trace raises.
    """
    model = configured_model(small_twin(configuration), "small twin", dtype, FULL_TRAINING)
    with quiet():
        mlps: Mlps = ()
        with suppress(ProtwinError):
            mlps = find_mlps(find_blocks(model))
        subject = FakeSubject(model, loss_tiles=_TILES)
        subject.sequence_ranks = _RANKS if is_shared else 1
        tokens = _TOKENS * subject.sequence_ranks
        with subject.in_tiles(mlps, _TILES if mlps else 1):
            traced = subject.at(batch_of(model, {BATCH_SIZE: _BATCH, SEQUENCE_LENGTH: tokens, "target_length": None}))
    digest = hashlib.sha256()
    for mode, sections in while_frames_return(traced.observed).items():
        for key, seen in sections.items():
            told = (seen.calls, seen.levels, seen.adding_levels, seen.net_bytes, seen.saved_bytes, seen.exchanges)
            digest.update(repr((mode, key, told)).encode())
    return digest.hexdigest()[:16]


def digest_of(family: WorkloadFamily) -> str:
    """Of the pieces of a family, whatever traced them."""
    pieces = json.dumps([piece.model_dump(mode="json") for piece in family.pieces], sort_keys=True)
    return hashlib.sha256(pieces.encode()).hexdigest()[:16]
