"""``protwin run`` asks for expandable segments before torch starts, and leaves alone what a user has set."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.runtime.devices.process_settings import EXPANDABLE, VARIABLES, prefer_expandable_segments
from tests.cli.conftest import Protwin
from tests.cli.refusals import RUN

TORCH = """
import os
raise SystemExit("settings at the import: " + repr({name: os.environ.get(name) for name in %r}))
"""


@pytest.fixture
def showing_torch(tmp_path: Path) -> dict[str, str]:
    """Variables of a process in which importing torch ends it with the settings of the allocator."""
    folder = tmp_path / "showing"
    folder.mkdir()
    (folder / "torch.py").write_text(TORCH % (VARIABLES,))
    return {"PYTHONPATH": str(folder)}


def test_they_are_asked_for_before_torch_starts(
    protwin: Protwin, folder: Path, environment: dict[str, str], showing_torch: dict[str, str]
) -> None:
    for name in VARIABLES:
        environment.pop(name, None)
    shown = protwin(*RUN, **showing_torch).stderr
    assert shown.strip() == f"settings at the import: {dict.fromkeys(VARIABLES) | {VARIABLES[0]: EXPANDABLE}}"


@pytest.mark.parametrize("value", ["", "expandable_segments:False", "max_split_size_mb:128"])
@pytest.mark.parametrize("name", VARIABLES)
def test_what_a_user_has_set_stays(name: str, value: str) -> None:
    environment = {name: value, "PATH": "/bin"}
    prefer_expandable_segments(environment)
    assert environment == {name: value, "PATH": "/bin"}


def test_the_help_says_so(protwin_here: Protwin) -> None:
    shown = " ".join(protwin_here("run", "--help").stdout.split())
    assert (
        "expandable segments of PyTorch's allocator unless PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set"
        in shown
    )
