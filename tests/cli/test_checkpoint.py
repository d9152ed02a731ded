"""``protwin checkpoint``: what it tells and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.runtime.offline.inspecting import inspect
from protwin.shared.basics.errors import FileError
from protwin.shared.basics.progress import no_progress
from tests.cli.conftest import Protwin
from tests.runtime.file_operations import save_like_a_training


def test_the_command_inspects_reshards_and_consolidates(protwin_here: Protwin, work: Path) -> None:
    save_like_a_training(work / "saved", num_tensors=10, scalars=2**16)
    result = protwin_here("checkpoint", "inspect", "saved")
    assert result.returncode == 0, result.stderr
    for told in ("Model", "AdamW", "2.5 MiB", "5 MiB", "model.safetensors", "whole"):
        assert told in result.stdout
    assert "damaged" not in result.stdout
    result = protwin_here("checkpoint", "reshard", "saved", "--ranks=2", "--output=two")
    assert (result.returncode, result.stdout) == (0, "a checkpoint of 2 ranks in two\n"), result.stderr
    assert "__1_0.distcp" in protwin_here("checkpoint", "inspect", "two").stdout
    assert inspect(work / "two", on_progress=no_progress).num_ranks == 2
    result = protwin_here("checkpoint", "consolidate", "two", "--output=model", "--max-shard-bytes=512KiB")
    assert result.stdout.startswith("2.501 MiB of weights in 5 files, in model"), result.stderr
    written = json.loads(protwin_here("checkpoint", "consolidate", "two", "--output=again", "--json").stdout)
    assert written["files"] == {"model.safetensors": (work / "again" / "model.safetensors").stat().st_size}
    one = json.loads(protwin_here("checkpoint", "reshard", "two", "--ranks=1", "--output=one", "--json").stdout)
    assert (one["kind"], one["num_ranks"], one["damage"]) == ("checkpoint_report", 1, None)
    again = protwin_here("checkpoint", "reshard", "saved", "--ranks=2", "--output=two")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    (work / "two" / "__1_0.distcp").write_bytes(b"")
    result = protwin_here("checkpoint", "inspect", "two")
    assert result.returncode == 2
    assert "0 bytes of" in result.stdout
    assert "__1_0.distcp is damaged: it has 0 bytes" in result.stderr
    for command in (("reshard", "two", "--ranks=1", "--output=none"), ("consolidate", "two", "--output=none")):
        result = protwin_here("checkpoint", *command)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert not (work / "none").exists()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist, or is empty"):
        inspect(tmp_path / "none", on_progress=no_progress)
