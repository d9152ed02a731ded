"""The element type that a model is trained in where nobody names one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.basics.errors import FileError, WorkloadError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.catalogue.models import load_model_configuration
from protwin.shared.records.question import question_of
from protwin.shared.schema.hardware import Device, DeviceKind
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import DType, DTypeOrigin
from protwin.shared.tables.question import question_table
from protwin.shared.workloads.dtypes import choose_dtype
from protwin.shared.workloads.source import load_workload

F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
ASKED, PUBLISHED, DEVICE = DTypeOrigin.ASKED, DTypeOrigin.PUBLISHED, DTypeOrigin.DEVICE
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def device(**rates: float) -> Device:
    base = load_hardware("rtx-3090").device
    return base.model_copy(update={"peak_flop_per_s": {DType(name): rate for name, rate in rates.items()}})


AMPERE, TURING = device(float32=10.0, bfloat16=80.0, float16=80.0), device(float32=8.0, float16=65.0)
SLOW_IN_BFLOAT16 = device(float32=4.0, bfloat16=1.0)
PROCESSOR = device(float32=1.0, bfloat16=4.0).model_copy(update={"kind": DeviceKind.CPU})


@pytest.mark.parametrize(
    ("published", "on", "chosen", "origin"),
    [
        (BF16, AMPERE, BF16, PUBLISHED),
        (F16, AMPERE, F16, PUBLISHED),
        (F32, AMPERE, BF16, DEVICE),
        (None, AMPERE, BF16, DEVICE),
        (F32, TURING, F16, DEVICE),
        (BF16, TURING, F16, DEVICE),
        (F16, TURING, F16, PUBLISHED),
        (F32, SLOW_IN_BFLOAT16, F32, PUBLISHED),
        (BF16, SLOW_IN_BFLOAT16, F32, DEVICE),
        (F32, PROCESSOR, F32, PUBLISHED),
        (F16, PROCESSOR, F16, PUBLISHED),
        (F32, None, F32, PUBLISHED),
        (BF16, None, BF16, PUBLISHED),
    ],
)
def test_the_device_decides_where_nobody_does(
    published: DType | None, on: Device | None, chosen: DType, origin: DTypeOrigin
) -> None:
    found = choose_dtype(published, None, on)
    assert (found.dtype, found.origin, found.published) == (chosen, origin, published or F32)
    assert choose_dtype(published, "float32", on).dtype is F32, "what is asked for stays"
    assert choose_dtype(published, "float32", on).origin is ASKED


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(WorkloadError, match="'int8' cannot be trained; use float32"):
        choose_dtype(F32, "int8", AMPERE)
    for published in ("float64", "float8"):
        with pytest.raises(WorkloadError, match=f"dtype '{published}' cannot be trained; use float32"):
            choose_dtype(published, None, AMPERE)
        assert choose_dtype(published, "bfloat16", AMPERE).dtype is BF16
    assert choose_dtype("float8", "bfloat16", AMPERE).published is None


@pytest.mark.parametrize(
    ("model", "machine", "dtype", "words"),
    [
        ("gpt2", "rtx-3090", None, "weights: bfloat16, since the device computes in it; published as float32"),
        ("gpt2", "t4", None, "weights: float16, since the device computes in it and not in bfloat16; published as"),
        ("gpt2", "t4", "bfloat16", "computes in bfloat16, which the device has no matrix units for and runs at the ra"),
        ("smollm2-135m", "rtx-3090", None, "weights: bfloat16, as published"),
        ("smollm2-135m", "rtx-3090", "float32", "weights: float32, as asked; published as bfloat16"),
        ("gpt2", "rtx-3090", "float32", "AdamW with float32 moments"),
    ],
)
def test_the_head_says_which_and_why(model: str, machine: str, dtype: str | None, words: str) -> None:
    hardware = load_hardware(machine)
    workload = load_workload(model, batch_size=2, sequence_length=64, dtype=dtype, hardware=hardware)
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**20, n_persist=0, n_buffer=1)
    rows = question_table(question_of(workload, plan, hardware)).rows
    assert any(words in f"{name}: {told}" for name, told in rows)


@pytest.mark.parametrize(
    ("field", "stated", "kind"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, r"gptq, 4 bits"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 128}, r"gptq, 4 bits"),
        ("quantization_config", {"load_in_8bit": True}, r"bitsandbytes, 8 bits"),
        ("quantization_config", {"quant_method": "fp8"}, r"fp8"),
        ("quantization_config", {}, r"of no known method"),
        ("compression_config", {"quant_method": "compressed-tensors"}, r"compressed-tensors"),
        ("quantization_config", "int4", r"'int4'"),
    ],
)
def test_quantized_weights_are_refused_by_name(field: str, stated: object, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {field: stated}))
    with pytest.raises(FileError, match=rf"has a {field} \({kind}\).*remove the field"):
        load_model_configuration(path)
    path.write_text(json.dumps({"model_type": "any", "text_config": LLAMA | {field: stated}}))
    with pytest.raises(FileError, match=rf"has a text_config\.{field} "):
        load_model_configuration(path)
    is_asked_about = isinstance(stated, dict) and "group_size" in stated
    with pytest.raises(FileError) as caught:
        load_model_configuration(path)
    assert ("--quantize gptq --quantization-blocksize 128" in str(caught.value)) is is_asked_about
    path.write_text(json.dumps(LLAMA | {field: None}))
    assert load_model_configuration(path).config["hidden_size"] == 32
