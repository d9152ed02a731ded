"""The head of an answer, and its figures in the field's units, through the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.schema.record import Record
from tests.cli.conftest import Protwin
from tests.cli.refusals import SEARCH, SIMULATE, refusal, replaced

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GPT2 = ("search", "--model=gpt2", "--batch-size=2", "--sequence-length=64", "--hardware")


def simulated(protwin: Protwin, *arguments: str) -> Record:
    result = protwin(*SIMULATE, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return Record.from_mapping(json.loads(result.stdout), origin="standard output")


def test_tokens_have_their_time_energy_and_price(protwin_here: Protwin, folder: Path) -> None:
    (folder / "prices.toml").write_text("rtx-3090 = 0.36\nt4 = 9\n")
    found = simulated(protwin_here, "--tokens=1.5M", "--price=prices.toml", "--set=device.power_w=500")
    run, question = found.run, found.question
    assert run is not None
    assert question is not None
    assert question.overrides == ("device.power_w=500",)
    steps = -(-1_500_000 // found.num_tokens)
    assert (run.num_tokens, run.num_steps) == (1_500_000, steps)
    assert run.time_s == pytest.approx(steps * found.iteration_s)
    assert run.cost_usd == pytest.approx(run.time_s * 0.36 / 3600)
    assert run.energy_kwh == pytest.approx(run.time_s * 500 / 3.6e6)
    assert simulated(protwin_here).run is None
    assert simulated(protwin_here, "--price=rtx-3090=2", "--price=prices.toml").price_usd_per_hour == 2


def test_utilisation_is_that_of_the_stated_figures(protwin_here: Protwin, folder: Path) -> None:
    usual, faster = simulated(protwin_here), simulated(protwin_here, "--set=device.peak_flop_per_s.bfloat16=142e12")
    for found, rate in ((usual, 71e12), (faster, 142e12)):
        assert found.model_flops == usual.model_flops is not None
        assert found.peak_flop_per_s == rate
        assert found.mfu_frac == pytest.approx(found.model_flops / rate / found.iteration_s)


@pytest.mark.parametrize("call", [SEARCH, SIMULATE], ids=["search", "simulate"])
def test_tables_begin_with_what_was_asked(protwin_here: Protwin, folder: Path, call: tuple[str, ...]) -> None:
    printed = protwin_here(*call, "--tokens=300M", "--price=rtx-3090=1").stdout
    assert printed.splitlines()[2] == "Asked"
    for words in ("samples per second", "MFU", "HFU", "Training on 300M tokens", " kWh", " US dollars"):
        assert words in printed


@pytest.mark.parametrize("call", [SEARCH, SIMULATE], ids=["search", "simulate"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--price=24",), "'24' is no price"),
        (("--price=t4=1",), "a price is stated for 't4', but rtx-3090 is asked about"),
        (("--price=rtx-3090=free",), "price of rtx-3090 is 'free', which is no number"),
        (("--price=prices.toml",), "prices.toml: the price of t4 is -3 USD an hour, outside"),
        (("--price=missing.toml",), "missing.toml"),
        (("--tokens=many",), "'many' is no number"),
        (("--tokens=0",), "outside 1 to 1e18"),
    ],
)
def test_bad_prices_and_numbers_are_refused(
    protwin_here: Protwin, folder: Path, call: tuple[str, ...], options: tuple[str, ...], words: str
) -> None:
    (folder / "prices.toml").write_text("rtx-3090 = 1\nt4 = -3\n")
    assert words in refusal(protwin_here, folder, (*call, *options))


def test_tokens_of_images_are_refused(protwin_here: Protwin, folder: Path) -> None:
    asked = ("search", "--model=vit-huge", "--batch-size=2", "--hardware=a100-80gb", "--tokens=1B")
    assert "vit-huge is trained on samples without tokens, 2 in a step" in refusal(protwin_here, folder, asked)


def test_quantized_weights_are_refused(protwin_here: Protwin, folder: Path) -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    asked = (*replaced(SEARCH, "workload.json", "config.json"), "--batch-size=1", "--sequence-length=8")
    assert "has a quantization_config (awq, 4 bits)" in refusal(protwin_here, folder, asked)


def test_an_element_type_without_matrix_units_is_a_warning(protwin_here: Protwin) -> None:
    told = protwin_here(*GPT2, "t4", "--dtype=bfloat16")
    assert "t4 has no matrix units for bfloat16" in told.stderr
    assert "8.1 TFLOP/s" in told.stderr
    assert "--dtype float16" in told.stderr
    assert "runs at the rate of float32" in " ".join(told.stdout.split())
    silent = protwin_here(*GPT2, "t4")
    assert "matrix units" not in silent.stderr
    assert "float16, since the device computes in it and not in bfloat16" in " ".join(silent.stdout.split())


def test_another_element_type_is_named_where_a_plan_does_not_fit(protwin_here: Protwin, work: Path) -> None:
    assert protwin_here(*GPT2, "rtx-3090", "--output=plan.json").returncode == 0
    asked = ("simulate", "--plan=plan.json", *GPT2[1:])
    assert protwin_here(*asked, "rtx-4090").returncode == 0
    refused = protwin_here(*asked, "t4")
    assert refused.returncode == 2
    assert "(--dtype)" in refused.stderr
    assert protwin_here(*asked, "t4", "--dtype=bfloat16").returncode == 0
