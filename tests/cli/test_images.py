"""Models that see and hear from the command line: how large images are, how many, and a run by the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin, protwin_here, variables, work
from tests.runtime.modalities import MODALITIES

__all__ = ["protwin_here", "variables", "work"]

SHAPE = ("--batch-size", "2", "--dtype", "float32")


def written(work: Path, name: str) -> str:
    path = work / f"{name}.json"
    path.write_text(json.dumps(MODALITIES[name][0]))
    return str(path)


@pytest.mark.slow
def test_images_from_the_trace_to_the_run(protwin_here: Protwin, work: Path) -> None:
    """Two images of 8 x 16 pixels per sample, with the tower frozen; the run's batches are those that were traced."""
    model = written(work, "qwen2_vl")
    images = ("--image-size", "8x16", "--images", "2", "--freeze", "model.visual.*")
    length = ("--sequence-length", "20")
    protwin_here("trace", "--model", model, *SHAPE, *length, *images, "--output", "workload.json")
    workload = Workload.load(work / "workload.json")
    # Patches of 4 x 4 of two samples with two images each: 2 x 4 of them, of which one placeholder stands for 2 x 2.
    assert workload.batch_shapes["pixel_values"] == (2 * 2 * 2 * 4, 96)
    assert workload.batch_shapes["image_grid_thw"] == (4, 3)
    assert [block.name for block in workload.blocks if "visual" in block.name]
    asked = ("--model", "workload.json", "--hardware", "rtx-3090", "--device-budget", "300KiB")
    assert protwin_here("search", *asked, "--output", "plan.json").returncode == 0
    told = protwin_here(
        "run",
        *("--plan", "plan.json", "--workload", "workload.json", "--model", model, *images),
        *("--device-budget", "300KiB", "--steps", "8", "--output", "measured.json"),
    )
    assert told.returncode == 0, told.stderr
    assert "loss" in told.stdout
    assert Record.load(work / "measured.json").peak_device_bytes <= 300 * 2**10


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen2_vl", ("--image-size", "9x16"), "a side of 9 is no whole number of them. Make it 8"),
        ("qwen2_vl", ("--image-size", "0"), "--image-size 0 is no size in pixels"),
        (
            "qwen2_vl",
            ("--image-size", "8", "--images", "9"),
            "9 of them and what stands around them 19, and sequence_l",
        ),
        ("whisper", ("--image-size", "8"), "reads no images. Leave --image-size and --images out"),
        ("clip", ("--images", "2"), "takes one image per sample, not 2"),
    ],
    ids=["patches", "none", "many", "sounds", "pairs"],
)
def test_images_that_a_model_cannot_have(
    protwin_here: Protwin, work: Path, name: str, options: tuple[str, ...], message: str
) -> None:
    refused = protwin_here("trace", "--model", written(work, name), *SHAPE, "--sequence-length", "6", *options)
    words = " ".join(refused.stderr.split())
    assert refused.returncode == 2
    assert re.search(message, words), words
