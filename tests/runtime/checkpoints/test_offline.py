"""Checkpoints that are resharded, consolidated and inspected without a training: the same bits, in little memory."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemWriter
from transformers import LlamaForCausalLM

from protwin.runtime.checkpoints import pieces
from protwin.runtime.checkpoints.checkpoints import read_checkpoint
from protwin.runtime.offline.consolidating import consolidate
from protwin.runtime.offline.resharding import reshard
from protwin.shared.basics.progress import no_progress
from tests.proof_size import some_quick
from tests.runtime.file_operations import save_like_a_training
from tests.runtime.models import STEPS, cases, differences
from tests.runtime.resuming import kept, mixed, offloaded, resumed, same_bits, saved_after

NAMES = ("gpt2 with dropout, tied", "llama in bfloat16", "hand-written, batch statistics")


@pytest.fixture(scope="module", params=[NAMES[0], *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:])])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The checkpoint of one rank after two steps, and of three ranks and five made from it."""
    folder = tmp_path_factory.mktemp("saved")
    case = cases()[request.param]
    saved_after(case, mixed(case.workload), 2, folder / "1")
    for before, after in (("1", 3), ("3", 5)):
        reshard(folder / before, folder / str(after), after, on_progress=no_progress)
    return request.param, folder


def test_a_checkpoint_comes_back_from_other_numbers_of_ranks_as_it_was(saved: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = saved
    reshard(folder / "5", tmp_path / "back", 1, on_progress=no_progress)
    before, after = (read_checkpoint(path) for path in (folder / "1", tmp_path / "back"))
    assert same_bits(before.weights, after.weights)
    assert same_bits(before.optimizer, after.optimizer)
    assert same_bits(before.training, after.training)
    assert (before.model_hash, before.step, before.configuration) == (
        after.model_hash,
        after.step,
        after.configuration,
    )


@pytest.mark.parametrize(("ranks", "plan"), [("3", kept), ("5", offloaded)])
def test_one_rank_goes_on_from_a_checkpoint_of_several(saved: tuple[str, Path], ranks: str, plan: object) -> None:
    name, folder = saved
    case = cases()[name]
    losses, model = resumed(case, plan(case.workload), folder / ranks)  # type: ignore[operator]
    assert losses == case.plain.losses[len(case.plain.losses) // STEPS * 2 :]
    assert differences(model, case.plain.weights[-1]) == []


def test_consolidated_weights_are_those_of_the_plain_loop(saved: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = saved
    expected = cases()[name].plain.weights[2]
    for ranks, most in (("1", 2**30), ("5", 9_000)):
        files = consolidate(folder / ranks, tmp_path / ranks, max_shard_bytes=most, on_progress=no_progress)
        found = {}
        for file in files:
            with safe_open(file, framework="pt") as content:
                tensors = {key: content.get_tensor(key) for key in list(content.keys())}
            found |= tensors
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= most
        assert len(files) == 1 if ranks == "1" else len(files) > 2
        assert same_bits(found, {key: expected[key] for key in found})
        # Tied weights are there once.
        assert all(any(torch.equal(value, one) for one in found.values()) for value in expected.values())


def test_from_pretrained_loads_consolidated_shards(tmp_path: Path) -> None:
    case = cases()["llama"]
    saved_after(case, kept(case.workload), 1, tmp_path / "one")
    reshard(tmp_path / "one", tmp_path / "saved", 2, on_progress=no_progress)
    files = consolidate(tmp_path / "saved", tmp_path / "model", max_shard_bytes=9_000, on_progress=no_progress)
    assert len(files) > 2
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert differences(loaded, case.plain.weights[1]) == []


# -- memory ----------------------------------------------------------------------------------------------------------

MEBIBYTE = 2**20
NUM_TENSORS = 30
BOUND_BYTES = 24 * MEBIBYTE
"""Of 90 MiB in tensors of 1 MiB."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    save_like_a_training(folder / "1", num_tensors=NUM_TENSORS, scalars=MEBIBYTE // 4)
    reshard(folder / "1", folder / "3", 3, on_progress=no_progress)
    return folder


def growth_bytes(what: str, source: Path, into: Path) -> int:
    """The most that a process has more in memory while it does it; mapped files do not count."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # What this process had freed would serve the child without being seen.
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            os.write(writable, b"ready")
            if what == "consolidate":
                consolidate(source, into, max_shard_bytes=2**30, on_progress=no_progress)
            else:
                reshard(source, into, int(what), on_progress=no_progress)
            code = 0
        finally:
            os._exit(code)
    os.read(readable, 5)
    before = most = _anonymous_bytes(child)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        most = max(most, _anonymous_bytes(child))
        time.sleep(0.0005)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    os.close(readable)
    os.close(writable)
    return most - before


def _anonymous_bytes(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found is not None else 0


@some_quick("what", ["1", "2", "5", "consolidate"], quick=2)
def test_one_tensor_is_in_memory_at_a_time(what: str, large: Path, tmp_path: Path) -> None:
    assert growth_bytes(what, large / "3", tmp_path / "made") < BOUND_BYTES


def test_the_writer_of_torch_holds_all_that_it_writes(large: Path, tmp_path: Path) -> None:
    """See [Note: One piece at a time]; the wrong variant.  On a busy machine nobody may look while it holds them."""
    with patch.object(pieces._Writer, "write_data", FileSystemWriter.write_data):
        found = (growth_bytes("2", large / "3", tmp_path / str(number)) for number in range(5))
        assert any(held_bytes > 1.5 * BOUND_BYTES for held_bytes in found)
