"""Models of the catalogue on the command line: listed, and searched for without torch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from protwin.shared.answers.search_result import SearchResult
from protwin.shared.catalogue.models import ModelList, model_names
from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin

SMALL = ("--model", "gpt2", "--hardware", "rtx-3090", "--batch-size", "2", "--n-checkpoint", "12", "--n-persist", "2")

CONFIGURATION = {"model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 64, "vocab_size": 256, "n_positions": 64}


def test_models_are_listed(protwin_here: Protwin) -> None:
    shown = protwin_here("models")
    assert shown.returncode == 0
    (row,) = [line.split() for line in shown.stdout.splitlines() if line.startswith("llama-3-8b ")]
    assert row == ["llama-3-8b", "8.03B", "bfloat16", "llama", "meta-llama/Meta-Llama-3-8B"], "all columns have room"
    listed = ModelList.from_mapping(json.loads(protwin_here("models", "--json").stdout), origin="standard output")
    assert tuple(model.name for model in listed.models) == model_names()
    assert all(model.name in shown.stdout and "Hugging Face" in model.source for model in listed.models)


def test_words_choose_models(protwin_here: Protwin) -> None:
    """Those that have every word somewhere in their row; the rows themselves are those of the whole list."""
    everything = protwin_here("models").stdout.splitlines()
    draw = random.Random(3)
    rows = [line for line in everything if line.split()[:1] and line.split()[0] in model_names()]
    assert len(rows) == len(model_names())
    for words in (["llama"], ["Qwen3"], ["gpt", "xl"], draw.sample(rows, 1)[0].split()[:1]):
        found = protwin_here("models", *words).stdout.splitlines()
        wanted = {line.split()[0] for line in rows if all(word.casefold() in line.casefold() for word in words)}
        assert {line.split()[0] for line in found if line.split()} & set(model_names()) == wanted
        listed = json.loads(protwin_here("models", *words, "--json").stdout)
        assert {model["name"] for model in listed["models"]} == wanted
    (row,) = json.loads(protwin_here("models", "Llama 3.1 8B", "--json").stdout)["models"]
    assert row["name"] == "llama-3.1-8b"


def test_words_of_no_model_are_refused_with_the_nearest(protwin_here: Protwin) -> None:
    refused = protwin_here("models", "lamma-3-8b")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no model of the catalogue has 'lamma-3-8b'" in refused.stderr
    assert "Did you mean llama-3-8b" in refused.stderr


def test_the_first_question_about_a_model_of_the_catalogue_needs_no_torch(
    protwin: Protwin, without_torch: dict[str, str]
) -> None:
    result = protwin("search", *SMALL, "--sequence-length", "333", "--json", **without_torch)
    assert result.returncode == 0, result.stderr
    found = SearchResult.from_mapping(json.loads(result.stdout), origin="standard output")
    assert found.prediction.iteration_s > 0
    assert "torch" not in result.stderr


def test_why_nothing_fits_is_said_without_torch(protwin: Protwin, without_torch: dict[str, str]) -> None:
    """Of a model whose tiles a trace alone would tell, in an installation that has none."""
    for module in ("torch", "transformers"):
        missing = f"raise ModuleNotFoundError('it is not installed', name='{module}')\n"
        (Path(without_torch["PYTHONPATH"]) / f"{module}.py").write_text(missing)
    asked = ("--model", "gpt2-xl", "--hardware", "rtx-3090", "--batch-size", "3", "--sequence-length", "700")
    result = protwin("search", *asked, "--device-budget", "700MiB", **without_torch)
    assert result.returncode == 2
    assert "no plan fits, for device memory is too small" in result.stderr
    assert "Plans in tiles were not tried" in result.stderr


def test_packed_rows_of_a_model_of_the_catalogue_need_no_torch(protwin: Protwin, without_torch: dict[str, str]) -> None:
    """Rows longer than any sample that the model has positions for."""
    lengths = ("--sequence-length", "2048", "--packed-lengths", "1024,768,256")
    result = protwin("search", *SMALL, *lengths, "--json", **without_torch)
    assert result.returncode == 0, result.stderr
    found = SearchResult.from_mapping(json.loads(result.stdout), origin="standard output")
    question = found.prediction.question
    assert question is not None
    assert question.packing is not None
    assert question.packing.squares == 1024**2 + 768**2 + 256**2


def test_attention_that_grows_with_the_square_is_told_once(protwin_here: Protwin) -> None:
    asked = ("--hardware", "rtx-3090", "--batch-size", "1", "--n-checkpoint", "0", "--prefetch-depth", "1")
    warned, silent = (
        protwin_here("search", "--model", model, *asked, "--sequence-length", "512").stderr
        for model in ("t5-small", "gpt2")
    )
    told = "attention of t5-small takes memory with the square of 512 tokens: its kernel is given a mask or a bias"
    assert warned.count(told) == 1
    assert "square" not in silent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "2", "--sequence-ranks", "2"), "with 2 ranks that share each sequence (--sequence-ranks)"),
        (("--lora-rank", "4", "--lora-dropout", "0.1"), "with lora"),
    ],
)
def test_what_has_to_be_traced_is_said_without_torch(
    protwin: Protwin, without_torch: dict[str, str], options: tuple[str, ...], words: str
) -> None:
    for module in ("torch", "transformers"):
        missing = f"raise ModuleNotFoundError('it is not installed', name='{module}')\n"
        (Path(without_torch["PYTHONPATH"]) / f"{module}.py").write_text(missing)
    asked = ("--model", "tinyllama-1.1b", "--hardware", "rtx-4090-x8", "--batch-size", "1", "--sequence-length", "64")
    result = protwin("search", *asked, *options, **without_torch)
    assert result.returncode == 2
    told = f"which is not installed: tinyllama-1.1b {words} is known by a trace alone. Install"
    assert told in " ".join(result.stderr.split())


def test_training_that_is_not_shipped_is_traced(protwin: Protwin, without_torch: dict[str, str]) -> None:
    result = protwin(
        "search", *SMALL, "--sequence-length", "64", "--lora-rank", "4", "--lora-dropout", "0.1", **without_torch
    )
    assert "torch was imported" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sequence-length", "1025"), "learned positions for 1024"),
        (("--sequence-length", str(2**62)), "sequence_length is 4611686018427387904"),
        (("--sequence-length", "8", "--lora-targets", "c_attn"), "--lora-rank is missing"),
        (("--sequence-length", "8", "--autocast", "int8"), "--autocast int8 is not known"),
        (("--sequence-length", "8", "--dtype", "int8"), "dtype 'int8' cannot be trained"),
        (("--sequence-length", "8", "--packed-lengths", "3,4"), "3,4 make 7 tokens, but a row has 8"),
        (("--sequence-length", "8", "--packed-lengths", "uniform:1:9"), "9 tokens does not fit into a row of 8"),
        (("--sequence-length", "2048", "--packed-lengths", "1025,1023"), "learned positions for 1024"),
        (("--goal", "longest-sequence", "--packed-lengths", "8"), "but --packed-lengths 8 fixes it"),
    ],
)
def test_impossible_training_gets_one_message(protwin_here: Protwin, options: tuple[str, ...], message: str) -> None:
    result = protwin_here("search", *SMALL, *options)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--sequence-length is missing: the tokens of a row"),
        (("--sequence-length", "8", "--real"), "--real runs on rows of one sample"),
        (("--sequence-length", "8"), "8,8 make 16 tokens, but a row has 8"),
    ],
)
def test_rows_that_cannot_be_traced_get_one_message(
    protwin_here: Protwin, options: tuple[str, ...], message: str
) -> None:
    result = protwin_here("trace", "--model", "gpt2", "--batch-size", "1", "--packed-lengths", "8,8", *options)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_lora_from_trace_to_training(protwin_here: Protwin, work: Path) -> None:
    (work / "config.json").write_text(json.dumps(CONFIGURATION))
    options = ("--model", "config.json", "--lora-rank", "4", "--freeze", "transformer.h.0")
    shape = ("--batch-size", "2", "--sequence-length", "16")
    assert protwin_here("trace", *options, *shape, "--output", "workload.json").returncode == 0
    workload = Workload.load(work / "workload.json")
    trained = {parameter.name for parameter in workload.parameters if parameter.trainable}
    assert trained
    assert all("lora_" in name and not name.startswith("transformer.h.0.") for name in trained)
    knobs = ("--chunk-bytes", "64KiB", "--n-persist", "0", "--hardware", "rtx-3090", "--output", "plan.json")
    assert protwin_here("search", "--model", "workload.json", *knobs).returncode == 0
    run = ("run", "--plan", "plan.json", "--workload", "workload.json", "--steps", "5")
    assert "loss" in protwin_here(*run, *options).stdout
    other = protwin_here(*run, "--model", "config.json")
    assert other.returncode == 2
    assert "is another model than the plan's workload" in other.stderr
