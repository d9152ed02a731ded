"""Model families of transformers at tiny sizes: which train by a plan, and with which bits.

Each is built by its configuration as ``protwin run`` builds it, with random weights and batches of its own, and trained
for three steps twice: by a plain loop, and by a plan that offloads every chunk and checkpoints every other block.
``make families`` runs it; the result is kept in benchmarks/results/, and docs/families.md is written from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn

from protwin.runtime import CpuDevice
from protwin.runtime.commands.random_batches import random_batches
from protwin.runtime.data.byte_text import read_text
from protwin.runtime.model.configurations import build_model, quiet
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.errors import ProtwinError, shortened
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ActivationMode, Plan, mode_counts
from protwin.shared.schema.workload import Workload
from tests.runtime.equality import trained
from tests.runtime.modalities import EYE, MODALITIES, TEXT
from tests.runtime.models import SEED, Case

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
STEPS: Final = 3
LENGTH: Final = 16
BYTES: Final = 256
"""Tokens are bytes."""
_TEXT: Final = {**TEXT, "vocab_size": BYTES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT: Final = {
    "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64, "n_ctx": 64, "n_inner": 24, "vocab_size": BYTES
}  # fmt: skip
_ROUTED: Final = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: Final = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_PAIR: Final = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": BYTES, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
_T5: Final = {
    "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
    "vocab_size": BYTES, "decoder_start_token_id": 0,
}  # fmt: skip

Config = Mapping[str, Any]


def _decoders() -> dict[str, Config]:
    plain = (
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "olmo3",
        "stablelm", "starcoder2", "cohere", "cohere2", "granite", "glm", "glm4", "helium", "nemotron", "smollm3",
        "exaone4", "ernie4_5", "hunyuan_v1_dense", "seed_oss", "apertus", "arcee", "ministral", "persimmon", "gpt_neox",
        "gpt_neox_japanese", "falcon", "diffllama", "vaultgemma",
    )  # fmt: skip
    own: dict[str, dict[str, Any]] = {name: {} for name in plain}
    own["gemma2"] = own["gemma3_text"] = own["gemma"] = own["vaultgemma"] = own["glm"] = own["glm4"] = {"head_dim": 8}
    own["helium"] = own["hunyuan_v1_dense"] = own["ministral"] = {"head_dim": 8}
    own["phi"] = own["stablelm"] = own["persimmon"] = own["glm"] | {"partial_rotary_factor": 0.5}
    found: dict[str, Config] = {name: _TEXT | settings for name, settings in own.items()}
    found |= dict.fromkeys(("gpt2", "gptj", "gpt_bigcode", "codegen", "openai-gpt"), _GPT)
    found["gptj"] = found["codegen"] = _GPT | {"rotary_dim": 4}
    found["codegen"] = _GPT | {"rotary_dim": 4, "n_head": 4}
    found["gpt_neo"] = {
        "hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
        "vocab_size": BYTES, "max_position_embeddings": 64, "window_size": 8,
    }  # fmt: skip
    found["opt"] = {
        "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "word_embed_proj_dim": 16,
        "vocab_size": BYTES, "max_position_embeddings": 64,
    }  # fmt: skip
    found["bloom"] = {"hidden_size": 16, "n_layer": 3, "n_head": 2, "vocab_size": BYTES}
    found["mpt"] = {"d_model": 16, "n_heads": 2, "n_layers": 3, "max_seq_len": 64, "vocab_size": BYTES}
    found["xglm"] = {
        "d_model": 16, "ffn_dim": 24, "num_layers": 3, "attention_heads": 2, "vocab_size": BYTES,
        "max_position_embeddings": 64,
    }  # fmt: skip
    found["biogpt"] = _TEXT
    return found


def _mixtures() -> dict[str, Config]:
    routed = _TEXT | _ROUTED
    names = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "gpt_oss", "minimax", "flex_olmo")
    found: dict[str, Config] = dict.fromkeys(names, routed)
    found["qwen2_moe"] = routed | {"shared_expert_intermediate_size": 24}
    found["gpt_oss"] = routed | {"head_dim": 8, "sliding_window": 8}
    latent = _TEXT | _LATENT | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
    found |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), latent)
    found["glm4_moe"] = routed | _LATENT | {"head_dim": 8}
    found["dbrx"] = {
        "d_model": 16, "n_heads": 2, "n_layers": 3, "max_seq_len": 64, "vocab_size": BYTES,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
    }  # fmt: skip
    return found


def _recurrent() -> dict[str, Config]:
    state = {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": BYTES, "state_size": 8, "expand": 2}
    found: dict[str, Config] = {"mamba": state, "falcon_mamba": state, "mamba2": MODALITIES["mamba2"][0]}
    found["mamba2"] = dict(found["mamba2"]) | {"vocab_size": BYTES}
    found["rwkv"] = {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 3, "vocab_size": BYTES}
    found["recurrent_gemma"] = _TEXT | {"lru_width": 16, "attention_window_size": 8, "head_dim": 8}
    found["jamba"] = _TEXT | {
        "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8
    }  # fmt: skip
    found["lfm2"] = _TEXT | {"layer_types": ["conv", "full_attention", "conv"]}
    return found


def _encoders() -> dict[str, Config]:
    names = {
        "bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "electra": "ElectraForMaskedLM",
        "albert": "AlbertForMaskedLM", "deberta": "DebertaForMaskedLM", "deberta-v2": "DebertaV2ForMaskedLM",
        "modernbert": "ModernBertForMaskedLM", "camembert": "CamembertForMaskedLM", "mpnet": "MPNetForMaskedLM",
        "roformer": "RoFormerForMaskedLM", "esm": "EsmForMaskedLM", "nomic_bert": "NomicBertForMaskedLM",
        "eurobert": "EuroBertForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM",
    }  # fmt: skip
    found: dict[str, Config] = {
        name: _TEXT | {"architectures": [head], "embedding_size": 16, "type_vocab_size": 2}
        for name, head in names.items()
    }
    found["distilbert"] = {
        "dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2, "vocab_size": BYTES,
        "architectures": ["DistilBertForMaskedLM"], "max_position_embeddings": 64,
    }  # fmt: skip
    return found


def _translators() -> dict[str, Config]:
    found: dict[str, Config] = dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5)
    for name in ("bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "m2m_100", "plbart", "led"):
        found[name] = _PAIR
    found["led"] = _PAIR | {
        "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64
    }  # fmt: skip
    return found


def _images() -> dict[str, Config]:
    heads = {
        "vit": "ViTForImageClassification", "deit": "DeiTForImageClassification", "beit": "BeitForImageClassification",
        "dinov2": "Dinov2ForImageClassification", "vit_msn": "ViTMSNForImageClassification",
        "siglip": "SiglipForImageClassification", "ijepa": "IJepaForImageClassification",
    }  # fmt: skip
    found: dict[str, Config] = {
        name: EYE | {"architectures": [head], "num_labels": 3} for name, head in heads.items() if name != "siglip"
    }
    found["siglip"] = {"architectures": [heads["siglip"]], "vision_config": EYE, "num_labels": 3}
    found["convnext"] = {
        "architectures": ["ConvNextForImageClassification"], "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1],
        "image_size": 32, "num_labels": 3,
    }  # fmt: skip
    found["swin"] = {
        "architectures": ["SwinForImageClassification"], "image_size": 32, "patch_size": 4, "embed_dim": 8,
        "depths": [1, 1], "num_heads": [1, 2], "window_size": 4, "num_labels": 3,
    }  # fmt: skip
    found["segformer"] = MODALITIES["segformer"][0]
    return found


KINDS: Final[dict[str, dict[str, Config]]] = {
    "decoder": _decoders(),
    "mixture of experts": _mixtures(),
    "recurrent": _recurrent(),
    "encoder": _encoders(),
    "encoder and decoder": _translators(),
    "images": _images(),
    "images and text": {
        name: MODALITIES[name][0] for name in ("clip", "llava", "qwen2_vl", "qwen3_vl", "gemma3", "idefics3")
    },
    "sound": {name: MODALITIES[name][0] for name in ("whisper", "wav2vec2")},
}


def length_of(kind: str, family: str) -> int | None:
    """Tokens or samples of each row; None where images are all that is read."""
    if family in MODALITIES and kind in ("images and text", "sound", "images"):
        return MODALITIES[family][1]
    return None if kind == "images" else LENGTH


def built(config: Config, name: str) -> nn.Module:
    """The model with random weights, the same ones every time."""
    torch.manual_seed(SEED)
    model: nn.Module = build_model(config, name, torch.float32, device="cpu")
    return model


def plan_for(workload: Workload) -> Plan:
    """Every chunk on the host, every other block checkpointed."""
    modes = tuple((ActivationMode.CHECKPOINT, ActivationMode.KEEP)[block % 2] for block in range(workload.num_blocks))
    chunk_bytes = max(4096, max(parameter.size_bytes for parameter in workload.parameters))
    counts: dict[str, Any] = mode_counts(modes)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=0,
        n_buffer=layout_of(workload, chunk_bytes).min_buffers(0),
        **counts,
        activation_modes=modes,
    )


def judged(kind: str, family: str, config: Config) -> dict[str, Any]:
    """What came of one family."""
    row: dict[str, Any] = {"family": family, "kind": kind}
    config = {"model_type": family} | dict(config)
    try:
        with quiet():
            model = built(config, family)
            batches = list(
                random_batches(
                    model,
                    read_text(None),
                    name=family,
                    batch_size=2,
                    sequence_length=length_of(kind, family),
                    num_batches=STEPS,
                )
            )
            case = Case(partial(built, config, family), batches)
            workload = case.workload
            outcome, plain = trained(case, plan_for(workload), CpuDevice()), case.plain
    except ProtwinError as error:
        return row | {"verdict": "refused", "reason": shortened(str(error).splitlines()[0])}
    except Exception as error:
        return row | {"verdict": "failed", "reason": shortened(f"{type(error).__name__}: {error}".splitlines()[0])}
    equal = outcome.losses == plain.losses and not outcome.different
    found = {"model": type(model).__name__, "blocks": workload.num_blocks, "gathers": outcome.num_gathers}
    if equal:
        return row | found | {"verdict": "equal"}
    return row | found | {"verdict": "different", "reason": f"{len(outcome.different)} tensors differ"}


def main() -> None:
    """Try all families, or those that are named, and keep what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--family", action="append", help="this family alone, anew; the kept result keeps its other rows"
    )
    chosen = parser.parse_args().family
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    today = datetime.datetime.now(datetime.UTC).date()
    kept = {} if chosen is None else {row["family"]: row for row in newest()["rows"]}
    rows = []
    for kind, families in KINDS.items():
        for family, config in families.items():
            known = kept.get(family)
            is_tried = chosen is None or family in chosen or known is None
            rows.append(judged(kind, family, config) if is_tried or known is None else known)
            if is_tried:
                print(json.dumps(rows[-1]), flush=True)
    found = {"date": str(today), "torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}
    write_atomically(RESULTS / f"families-{today}.json", json.dumps(found, indent=1) + "\n")


def newest() -> dict[str, Any]:
    """The result that was kept last."""
    (path,) = sorted(RESULTS.glob("families-*.json"))[-1:]
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
