"""Training with low-rank adapters is answered without a trace: sizes by formulas that know nothing of any trace."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest

from protwin.shared.basics.errors import WorkloadError
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.families.architectures import program_of, resized, sizes_of
from protwin.shared.phases.quantization import Quantization, QuantizedType
from protwin.shared.schema.training_options import LoraOptions, OsftOptions, QuantizationOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.workloads.source import WorkloadRequest, untraced_workload

FOLDER = files("protwin.shared") / "catalogue" / "data" / "adapters"
MOST_BYTES = 2**20
"""Of all files of adapters together."""
LLAMAS = ("llama-3-8b", "llama-3.2-1b", "mistral-7b", "qwen3-8b")


def asked(
    model: str = "llama-3-8b",
    *,
    rank: int = 16,
    targets: tuple[str, ...] = (),
    how: Quantization | None = None,
    skipped: tuple[str, ...] = (),
    dtype: str | None = "bfloat16",
    **others: Any,
) -> Workload | None:
    quantized = None if how is None else QuantizationOptions(how=how, skipped=skipped)
    options = TrainingOptions(
        lora=LoraOptions(rank=rank, targets=targets, **others.pop("lora", {})),
        quantized=quantized,
        **others.pop("options", {}),
    )
    return untraced_workload(
        WorkloadRequest(model, batch_size=2, sequence_length=257, dtype=dtype, options=options, **others)
    )


def found(*args: Any, **kwargs: Any) -> Workload:
    workload = asked(*args, **kwargs)
    assert workload is not None
    return workload


def maps_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the maps of a block of the Llama kind."""
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head_dim
    return {
        "q_proj": (hidden, heads * head_dim),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (heads * head_dim, hidden),
        "gate_proj": (hidden, ffn),
        "up_proj": (hidden, ffn),
        "down_proj": (ffn, hidden),
    }


@pytest.mark.parametrize("model", LLAMAS)
def test_what_is_trained_is_rank_times_the_sides_of_every_map(model: str) -> None:
    config = model_configuration(model).config
    rank = random.Random(f"20/{model}").randrange(1, 128)
    workload = found(model, rank=rank)
    of_block = sum(rank * sum(sizes) for sizes in maps_of(config).values())
    trained = [p for p in workload.parameters if p.trainable]
    assert sum(p.num_elements for p in trained) == config["num_hidden_layers"] * of_block
    assert {p.name.rpartition(".")[2] for p in trained} == {"lora_a", "lora_b"}
    assert workload.num_parameters == model_configuration(model).num_parameters + config["num_hidden_layers"] * of_block
    for block in range(workload.num_blocks):
        assert workload.profile_of(block).backward.gradient_bytes == 2 * of_block
    assert workload.epilogue_backward.gradient_bytes == 0


@pytest.mark.parametrize("double", [False, True])
def test_a_packed_base_takes_its_bits(double: bool) -> None:
    """Four bits, and for each block of 64 a scale of 32, or one of 8 and one of 32 for 256 of these."""
    config = model_configuration("llama-3-8b").config
    workload = found(how=Quantization(type=QuantizedType.NF4, double=double, blocksize=64))
    scalars = config["num_hidden_layers"] * sum(m * n for m, n in maps_of(config).values())
    tables = ("weight_code", "weight_nested_code", "weight_offset")
    packed = [p for p in workload.parameters if ".base." in p.name and not p.name.endswith(tables)]
    bits = 4 + (8 / 64 + 32 / (64 * 256) if double else 32 / 64)
    assert 8 * sum(p.size_bytes for p in packed) / scalars == pytest.approx(bits, rel=1e-6)
    assert sum(p.scalars for p in packed) == scalars
    plain = found()
    assert workload.num_parameters == plain.num_parameters
    # The largest weight lies there in 16 bits for a moment.
    largest = 2 * max(m * n for m, n in maps_of(config).values())
    one, other = plain.profile_of(1).forward, workload.profile_of(1).forward
    assert one.net_bytes == other.net_bytes
    assert one.peak_bytes < other.peak_bytes <= one.peak_bytes + 2 * largest
    unpacked = sum(op.flops * op.count for op in other.operations if op.name.endswith("dequantize_4bit"))
    assert unpacked == scalars // config["num_hidden_layers"]


@pytest.mark.parametrize(("to", "bits"), [("gptq", 4), ("gptq-8bit", 8)])
def test_a_base_in_groups_takes_its_bits_and_stays_unpacked_until_backward(to: str, bits: int) -> None:
    """Its bits, for each group of 128 those of a zero and a scale of 16, and 32 for each input of a map."""
    config = model_configuration("llama-3-8b").config
    workload = found(how=Quantization(type=QuantizedType(to), blocksize=128))
    maps = maps_of(config).values()
    scalars = config["num_hidden_layers"] * sum(m * n for m, n in maps)
    inputs = config["num_hidden_layers"] * sum(m for m, _ in maps)
    packed = [p for p in workload.parameters if ".base." in p.name and not p.name.endswith("shifts")]
    assert 8 * sum(p.size_bytes for p in packed) == scalars * bits + scalars // 128 * (bits + 16) + 32 * inputs
    assert sum(p.scalars for p in packed) == scalars
    plain = found()
    assert workload.num_parameters == plain.num_parameters
    # A block that keeps its activations keeps its weights in 16 bits; a checkpointed one until its backward.
    in_16_bits = 2 * scalars // config["num_hidden_layers"]
    one, other = plain.profile_of(1), workload.profile_of(1)
    assert other.forward.net_bytes == one.forward.net_bytes + in_16_bits
    assert other.backward.net_bytes == one.backward.net_bytes - in_16_bits
    assert other.recompute.net_bytes == one.recompute.net_bytes + in_16_bits
    assert other.checkpoint_forward.net_bytes == one.checkpoint_forward.net_bytes
    # Of the largest map, whole numbers of 32 bits beside the narrow ones that are made of them.
    largest = max(m * n for m, n in maps)
    assert other.checkpoint_forward.peak_bytes >= (4 + bits // 4) * largest
    shifted = sum(op.flops * op.count for op in other.forward.operations if op.name == "bitwise_right_shift")
    per_block = scalars // config["num_hidden_layers"]
    assert shifted == per_block + per_block // 128


def test_groups_that_do_not_divide_inputs_are_refused_without_a_trace() -> None:
    with pytest.raises(WorkloadError, match="q_proj cannot be packed to gptq in groups of 512: it has 896 inputs"):
        asked("qwen2.5-0.5b", how=Quantization(type=QuantizedType.GPTQ, blocksize=512))


def test_a_scale_costs_nothing() -> None:
    assert found() == found(lora={"alpha": 32.0, "use_rslora": True})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rank": 4097}, "the rank of LoRA is 4097 but model.layers.0.self_attn.q_proj maps 4096 to 4096"),
        ({"rank": 2**16 + 1}, "must be a whole number from 1 to 65536"),
        ({"targets": ("q_porj",)}, "no linear map of a block is called 'q_porj'.*q_proj"),
    ],
)
def test_what_makes_no_sense_is_refused_without_a_trace(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        asked(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"targets": ("up_proj",)},
        {"model": "t5-small"},
        {"lora": {"dropout": 0.05}},
        {"lora": {"use_dora": True}},
        {"lora": {"dtype": DType.FLOAT32}},
        {"mlp_tiles": (2,)},
        {"loss_tiles": (2,)},
        {"sequence_ranks": (2,)},
        {"options": {"frozen": ("model.norm",)}},
        {"options": {"autocast": DType.BFLOAT16}},
        {"options": {"osft": OsftOptions(unfreeze_rank_ratio=0.5)}},
        # A matrix of an adapter would look like the packed map of keys.
        {"rank": 1024, "how": Quantization(type=QuantizedType.NF4, blocksize=64)},
        # Recomputation would end elsewhere.
        {"targets": ("q_proj", "v_proj"), "how": Quantization(type=QuantizedType.NF4, blocksize=64)},
        {"skipped": ("q_proj",), "how": Quantization(type=QuantizedType.NF4, blocksize=64)},
    ],
)
def test_what_is_not_known_takes_a_trace(changed: dict[str, Any]) -> None:
    assert asked(**changed) is None


def test_beyond_a_sliding_window_a_trace_is_needed() -> None:
    options = TrainingOptions(lora=LoraOptions(rank=8))
    within, beyond = (
        WorkloadRequest("mistral-7b", batch_size=1, sequence_length=length, options=options) for length in (4095, 4096)
    )
    assert untraced_workload(within) is not None
    assert untraced_workload(beyond) is None


def test_sizes_of_a_configuration_and_back() -> None:
    draw = random.Random(20)
    for model in ("llama-3-8b", "gpt2", "opt-1.3b", "bert-large", "mixtral-8x7b", "gemma-2-9b"):
        config = model_configuration(model).config
        sizes = sizes_of(config)
        assert sizes is not None
        drawn = {name: draw.randrange(2, 50) for name in sizes}
        assert sizes_of(resized(config, drawn)) == drawn
        assert program_of(resized(config, drawn)) == program_of(config)
    assert program_of(model_configuration("llama-2-7b").config) == "llama-ungrouped"
    assert program_of(model_configuration("t5-small").config) is None
    assert sizes_of(model_configuration("llama-3-8b").config | {"head_dim": 100}) is None


def test_the_files_are_small() -> None:
    entries = [entry for entry in FOLDER.iterdir() if entry.name.endswith(".json.gz")]
    assert 0 < sum(len(entry.read_bytes()) for entry in entries) < MOST_BYTES


def test_no_torch_is_needed() -> None:
    options = "--batch-size=1 --sequence-length=512 --lora-rank=16 --quantize=nf4 --double-quantize --json"
    program = (
        "import sys; sys.modules.update(torch=None, transformers=None, bitsandbytes=None)\n"
        "from protwin.shared.cli import main\n"
        f"sys.argv = 'protwin search --model=llama-3.2-1b --hardware=rtx-4090 {options}'.split()\n"
        "main.main()"
    )
    told = subprocess.run([sys.executable, "-c", program], check=False, timeout=600, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["kind"] == "search_result"
