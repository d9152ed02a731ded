"""``--quantize``: QLoRA is asked about before anything is rented; what makes no sense is one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Protwin
from tests.cli.refusals import refusal
from tests.proof_size import some_quick

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
ASKED = ("search", "--model=config.json", "--hardware=rtx-4090", "--batch-size=1", "--sequence-length=128")
LORA = "--lora-rank=4"


@pytest.fixture
def configured(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@some_quick(
    ("options", "bits"),
    [((), 16), (("--quantize=nf4",), 4.5), (("--quantize=nf4", "--double-quantize"), 4.127)],
    quick=1,
)
def test_a_base_takes_its_packed_bytes(
    protwin_here: Protwin, configured: Path, options: tuple[str, ...], bits: float
) -> None:
    """4 bits, and for each block of 64 a scale of 32, or one of 8 and one of 32 for 256 of these."""
    told = protwin_here("trace", *ASKED[1:2], *ASKED[3:], LORA, *options, "--output=traced.json")
    assert told.returncode == 0, told.stderr
    parameters = json.loads((configured / "traced.json").read_text())["parameters"]
    item_bytes = {"bfloat16": 2, "float32": 4, "uint8": 1}

    def size_bytes(parameter: dict[str, object]) -> int:
        count = 1
        for size in parameter["shape"]:  # type: ignore[attr-defined]
            count *= size
        return count * item_bytes[str(parameter["dtype"])]

    tables = ("weight_code", "weight_nested_code", "weight_offset")
    base = [p for p in parameters if "_proj.base." in p["name"] and not p["name"].endswith(tables)]
    num_scalars = 3 * (4 * 256 * 256 + 3 * 256 * 512)
    assert 8 * sum(map(size_bytes, base)) / num_scalars == pytest.approx(bits, rel=1e-3)


def test_an_answer_says_how_weights_are_packed(protwin_here: Protwin, configured: Path) -> None:
    told = protwin_here(*ASKED, LORA, "--quantize=nf4", "--double-quantize")
    assert told.returncode == 0, told.stderr
    words = " ".join(told.stdout.split())
    assert "nf4, double quantized; others bfloat16, as published" in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--quantize=nf4",), "packed weights cannot be trained"),
        (("--quantize=nf4", "--unfreeze-rank-ratio=0.5"), "factorises and trains these weights"),
        (("--quantize=nf5", LORA), "nf5"),
        (("--double-quantize", LORA), "--quantize is not"),
        (("--quantization-blocksize=128", LORA), "--quantize is not"),
        (("--quantize-head", LORA), "--quantize is not"),
        (("--bitsandbytes=0.41.1", LORA), "--quantize is not"),
        (("--quantize=nf4", "--packed-from=float16", LORA), "--bitsandbytes is not"),
        (("--quantize=nf4", "--bitsandbytes=new", LORA), "no release of bitsandbytes that is known"),
        (("--quantize=nf4", "--bitsandbytes=0.38.1", LORA), "write one from 0.39.0 on"),
        (("--quantize=gptq", "--bitsandbytes=0.41.1", LORA), "gptq is not bitsandbytes'"),
        (("--quantize=nf4", "--bitsandbytes=0.41.1", "--packed-from=int4", LORA), "--packed-from int4 is not known"),
        (("--quantize=nf4", "--bitsandbytes=0.41.1", "--packed-from=int8", LORA), "unpacked to float16"),
        (("--quantize=int8", "--bitsandbytes=0.41.1", "--packed-from=float16", LORA), "--packed-from is given beside"),
        (("--quantize=int8", "--double-quantize", LORA), "one scale for each output"),
        (("--quantize=nf4", "--quantization-blocksize=48", LORA), "must be one of 32, 64"),
        (("--quantize=gptq", "--quantization-blocksize=2048", LORA), "must be one of 32, 64"),
        (("--quantize=gptq", "--double-quantize", LORA), "has scales in 16 bits"),
        (("--quantize=gptq", "--quantization-blocksize=512", LORA), "it has 256 inputs, which is no multiple of 512"),
    ],
)
def test_what_makes_no_sense_is_refused(
    protwin_here: Protwin, configured: Path, options: tuple[str, ...], words: str
) -> None:
    assert words in refusal(protwin_here, configured, (*ASKED, *options))


@pytest.mark.slow
def test_groups_of_gptq_are_said(protwin_here: Protwin, configured: Path) -> None:
    told = protwin_here(*ASKED, LORA, "--quantize=gptq", "--quantization-blocksize=64")
    assert told.returncode == 0, told.stderr
    assert "gptq in groups of 64; others bfloat16, as published" in " ".join(told.stdout.split())


def test_a_saved_workload_is_not_packed_again(protwin_here: Protwin, folder: Path) -> None:
    asked = ("search", "--model=workload.json", "--hardware=rtx-4090", LORA, "--quantize=nf4")
    assert "--quantize" in refusal(protwin_here, folder, asked)
