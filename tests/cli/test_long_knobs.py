"""Knobs of long sequences that make no sense, and those that do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Protwin
from tests.cli.refusals import SEARCH, refusal

_GPT2 = ("search", "--model", "gpt2", "--hardware", "rtx-3090", "--batch-size", "1", "--sequence-length", "64")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*_GPT2, "--mlp-tiles", "0"), "'--mlp-tiles': '0' is too small. Write one from 1 to"),
        ((*_GPT2, "--loss-tiles", str(2**40)), f"'--loss-tiles': '{2**40}' is too large. Write one from 1 to"),
        ((*_GPT2, "--mlp-tiles", "128"), "mlp_tiles is 128, but the batch has 64 tokens"),
        ((*_GPT2, "--loss-tiles", "128"), "loss_tiles is 128, but the batch has 64 tokens"),
        ((*SEARCH, "--mlp-tiles", "4"), "workload.json is a workload that knows 1. Trace the model with that number"),
        ((*SEARCH, "--loss-tiles", "4"), "workload.json is a workload that knows 1. Trace the model with that number"),
        ((*_GPT2[:-1], "1", "--loss-tiles", "2"), "but the batch has 1 token, of which"),
        ((*_GPT2, "--product-stride", "3"), "product_stride: 3, but it is known for 1 and 2"),
        ((*_GPT2, "--product-stride", "1", "--mlp-tiles", "2"), "but blocks in tiles keep no results"),
        ((*SEARCH, "--n-offload-input", "some"), "'some' is neither a number from 0 to"),
        ((*SEARCH, "--n-offload-input", "4", "--n-checkpoint", "0"), "n_offload_input is at least 4 but n_checkpoint"),
    ],
)
def test_tiles_and_inputs_that_cannot_be_are_refused(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...], told: str
) -> None:
    assert told in refusal(protwin_here, folder, arguments)


@pytest.mark.slow
def test_a_model_without_modules_that_run_in_tiles_says_so(protwin: Protwin, folder: Path) -> None:
    """BERT calls its layers one by one."""
    arguments = ("--model", "bert-large", "--hardware", "rtx-3090", "--batch-size", "1", "--sequence-length", "64")
    assert "has no" in refusal(protwin, folder, ("search", *arguments, "--mlp-tiles", "4"))


@pytest.mark.slow
def test_a_model_without_a_loss_over_words_says_so(protwin: Protwin, folder: Path) -> None:
    arguments = ("--model", "vit-huge", "--hardware", "rtx-3090", "--batch-size", "1")
    assert "loss" in refusal(protwin, folder, ("search", *arguments, "--loss-tiles", "4"))
