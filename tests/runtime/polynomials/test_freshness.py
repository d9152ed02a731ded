"""What families do in tiles, and shared, was fitted with the code of today, beside the families that are shipped."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from protwin.runtime.polynomials import freshness
from protwin.runtime.polynomials.freshness import digest_of, fingerprint, small_twin
from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.families.sharings import FamilySharings
from protwin.shared.families.shipped import shipped_family, shipped_sharings, shipped_tilings
from protwin.shared.families.tilings import FamilyTilings
from protwin.shared.schema.workload import DType
from tests.proof_size import some_quick

Fitted = FamilyTilings | FamilySharings


def fitted() -> list[Fitted]:
    found = [
        known(name, dtype) for known in (shipped_tilings, shipped_sharings) for name in model_names() for dtype in DType
    ]
    return [one for one in found if one is not None]


def remade(one: Fitted) -> str:
    config = model_configuration(one.model_name).config
    return fingerprint(config, one.compute_dtype, is_shared=isinstance(one, FamilySharings))


def first_of_each_architecture() -> list[Fitted]:
    found: dict[Any, Fitted] = {}
    for one in fitted():
        kind = model_configuration(one.model_name).config["model_type"]
        found.setdefault((kind, one.compute_dtype, type(one)), one)
    return list(found.values())


def name_of(one: Fitted) -> str:
    return f"{one.KIND}-{one.model_name}-{one.compute_dtype}"


def check(one: Fitted) -> None:
    if not one.fingerprint:
        pytest.skip("made before there were fingerprints")
    if any(one.software.get(name) != version(name) for name in ("torch", "transformers")):
        pytest.skip("fitted with other versions")
    assert one.fingerprint == remade(one), f"make {name_of(one)} anew: make catalogue NAMES=..."


def test_files_belong_to_the_families_that_are_shipped() -> None:
    for one in fitted():
        family = shipped_family(one.model_name, one.compute_dtype)
        assert family is not None
        assert one.beside == digest_of(family), name_of(one)


@some_quick("one", first_of_each_architecture(), ids=name_of, quick=3)
def test_files_are_what_would_be_made_today(one: Fitted) -> None:
    check(one)


@pytest.mark.slow
@pytest.mark.parametrize("one", fitted(), ids=name_of)
def test_every_file_is_what_would_be_made_today(one: Fitted) -> None:
    check(one)


def test_changed_tiles_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_configuration("gpt2").config
    right = fingerprint(config, DType.BFLOAT16)
    assert right == fingerprint(config, DType.BFLOAT16)
    monkeypatch.setattr(freshness, "_TILES", 4)
    assert fingerprint(config, DType.BFLOAT16) != right


def test_small_twins_keep_what_an_architecture_is() -> None:
    for name in model_names():
        config = model_configuration(name).config
        small = small_twin(config)
        assert small["model_type"] == config["model_type"]
        assert {field for field in config if field not in freshness._UNNEEDED} == set(small)
