"""Traced workloads on disk: read back equal, and never an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from protwin.shared.basics.errors import FileError
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads import cache as workload_cache
from protwin.shared.workloads.cache import TraceRequest, cache_key, load_cached, store_cached
from tests.shared.laid_out import decoder_workload
from tests.strategies.workloads import workloads

CONFIGURATION: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64}
REQUEST = TraceRequest(CONFIGURATION, name="small", batch_size=1, sequence_length=8, dtype=None)


@given(workload=workloads())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_kept_reads_back_equal(workload: Workload, tmp_path: Path) -> None:
    store_cached(tmp_path, "key", workload)
    assert load_cached(tmp_path, "key") == workload


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 2},
        {"sequence_length": 16},
        {"dtype": "bfloat16"},
        {"name": "other"},
        {"device_kind": DeviceKind.CPU},
        {"configuration": CONFIGURATION | {"n_layer": 3}},
        {"configuration": CONFIGURATION | {"tie_word_embeddings": False}},
    ],
)
def test_the_key_depends_on_model_and_shape(change: dict[str, Any]) -> None:
    assert cache_key(replace(REQUEST, **change)) != cache_key(REQUEST)


def test_the_key_ignores_the_order_of_fields() -> None:
    reversed_fields = replace(REQUEST, configuration=dict(reversed(CONFIGURATION.items())))
    assert cache_key(reversed_fields) == cache_key(REQUEST)


@pytest.mark.parametrize("package", ["protwin", "torch", "transformers"])
def test_the_key_depends_on_software(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key(REQUEST)
    installed = workload_cache.version  # type: ignore[attr-defined]
    monkeypatch.setattr(workload_cache, "version", lambda name: "0.0.0" if name == package else installed(name))
    assert cache_key(REQUEST) != before


def test_the_key_imports_no_torch() -> None:
    code = (
        "import sys\nfrom protwin.shared.workloads.cache import TraceRequest, cache_key\n"
        "cache_key(TraceRequest({}, name='n', batch_size=1, sequence_length=1, dtype=None))\n"
        "assert not {'torch', 'transformers', 'protwin.runtime'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_nothing_is_a_miss(tmp_path: Path) -> None:
    assert load_cached(tmp_path / "no" / "folder", "key") is None


def test_every_truncation_is_a_miss(tmp_path: Path) -> None:
    store_cached(tmp_path, "key", decoder_workload(2))
    path = tmp_path / "key.json"
    text = path.read_text()
    for length in range(0, len(text) - 2, 97):
        path.write_text(text[:length])
        assert load_cached(tmp_path, "key") is None, length


def test_a_changed_figure_is_a_miss(tmp_path: Path) -> None:
    store_cached(tmp_path, "key", decoder_workload(2))
    path = tmp_path / "key.json"
    entry = json.loads(path.read_text())
    entry["workload"]["num_tokens"] += 1
    path.write_text(json.dumps(entry))
    assert load_cached(tmp_path, "key") is None
    entry["checksum"] = workload_cache._checksum(Workload.model_validate(entry["workload"]))
    path.write_text(json.dumps(entry))
    assert load_cached(tmp_path, "key") is not None, "only the checksum tells the changed figure"


def test_the_entry_of_another_key_is_a_miss(tmp_path: Path) -> None:
    store_cached(tmp_path, "key", decoder_workload(2))
    (tmp_path / "other.json").write_text((tmp_path / "key.json").read_text())
    assert load_cached(tmp_path, "other") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"kind": "plan", "schema_version": 1}'])
def test_foreign_files_are_misses(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key.json").write_bytes(content)
    assert load_cached(tmp_path, "key") is None


def test_a_newer_entry_is_a_miss(tmp_path: Path) -> None:
    store_cached(tmp_path, "key", decoder_workload(2))
    path = tmp_path / "key.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    assert load_cached(tmp_path, "key") is None


def test_a_folder_in_the_place_of_an_entry_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "key.json").mkdir()
    assert load_cached(tmp_path, "key") is None


def test_only_the_newest_entries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_cache, "_MAX_ENTRIES", 3)
    for place, key in enumerate("abcde"):
        store_cached(tmp_path, key, decoder_workload(1))
        os.utime(tmp_path / f"{key}.json", ns=(place, place))
    assert {path.stem for path in tmp_path.iterdir()} == {"c", "d", "e"}


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        store_cached(tmp_path / "file" / "below", "key", decoder_workload(2))
