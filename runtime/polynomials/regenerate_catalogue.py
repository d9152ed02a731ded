"""Trace every model of the catalogue anew: ``python -m protwin.runtime.polynomials.regenerate_catalogue [NAME ...]``.

Writes the families of workloads beside the models' configurations, what they do in tiles, and what ranks do that share
sequences, and says what became of each.  Needed when the tracer changes, or what it traces with.  With ``--tiles``, the
families stay, and what they do in tiles and shared is traced: needed when tiles change.  With ``--sharings``, the last
alone; with ``--adapters`` what programs do with adapters, of the named models or all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from ...shared.basics.errors import ProtwinError
from ...shared.catalogue.models import model_configuration, model_names
from ...shared.families.architectures import program_of
from ...shared.families.shipped import (
    SHIPPED_DTYPES,
    shipped_family,
    shipped_path,
    shipped_tilings,
    sized_path,
    write_family,
)
from ...shared.schema.workload import DType
from .adapters import sized_family, target_sets, why_not
from .families import family_of_configuration, tilings_of_family
from .freshness import digest_of, fingerprint
from .sharings import sharings_of_family


def regenerate(names: Sequence[str], folder: Path) -> None:
    """Write the families of the models ``names`` into ``folder``, one file for each element type."""
    for name in names:
        described = model_configuration(name)
        for dtype in SHIPPED_DTYPES:
            begin_s = time.perf_counter()
            family = family_of_configuration(
                described.config, name=name, dtype=dtype, with_twin=dtype is not DType.FLOAT32
            )
            path = folder / shipped_path(name, dtype)
            write_family(family, path)
            _say(path, begin_s, f"{len(family.pieces)} pieces" if len(family.pieces) > 1 else "1 piece")


def regenerate_tilings(names: Sequence[str], folder: Path) -> None:
    """Write what the shipped families of the models ``names`` do in tiles into ``folder``, where they have tiles."""
    for dtype, name in product(SHIPPED_DTYPES, names):
        begin_s = time.perf_counter()
        family = shipped_family(name, dtype)
        assert family is not None, f"{name} has no family"
        tilings, reasons = tilings_of_family(family, model_configuration(name).config, name=name)
        path = folder / shipped_path(name, dtype)
        path.unlink(missing_ok=True)
        if tilings is not None:
            made = {"beside": digest_of(family), "fingerprint": fingerprint(model_configuration(name).config, dtype)}
            write_family(tilings.model_copy(update=made), path)
        _say(path, begin_s, " ".join(reasons) or "tiles of MLPs and of the loss")


def regenerate_sharings(names: Sequence[str], folder: Path) -> None:
    """Write what one of several ranks does that share sequences of the models ``names`` into ``folder``."""
    for name in names:
        begin_s = time.perf_counter()
        family = shipped_family(name, _SHARED)
        assert family is not None, f"{name} has no family"
        found, reasons = sharings_of_family(
            family, shipped_tilings(name, _SHARED), model_configuration(name).config, name=name
        )
        path = folder / shipped_path(name, _SHARED)
        path.unlink(missing_ok=True)
        if found is not None:
            own = fingerprint(model_configuration(name).config, _SHARED, is_shared=True)
            write_family(found.model_copy(update={"beside": digest_of(family), "fingerprint": own}), path)
            ranks = sorted({ranks for piece in found.pieces for ranks in piece.ranks})
            reasons.insert(0, f"{', '.join(map(str, ranks))} ranks")
        _say(path, begin_s, "; ".join(reasons))


def regenerate_adapters(names: Sequence[str], folder: Path) -> None:
    """Write what the programs of the models ``names`` do with adapters into ``folder``, each set of maps in a file.

    Every model of the catalogue is compared with what its program does with all maps adapted; so are two of them, the
    first and the last, with every other set.
    """
    members: dict[str, list[str]] = {}
    for name in model_names():
        program = program_of(model_configuration(name).config)
        if program is not None:
            members.setdefault(program, []).append(name)
    for program, of_program in members.items():
        if not set(of_program) & set(names):
            continue
        # A program that others run too is fitted to a model of its own architecture.
        described = {name: model_configuration(name).config for name in of_program}
        first = next((n for n, c in described.items() if program.startswith(str(c["model_type"]))), of_program[0])
        sets = target_sets(described[first], first)
        for dtype in SHIPPED_DTYPES:
            proven = list(of_program)
            for targets in sets:
                proven = _write_sized(described, first, dtype, targets, proven, folder, is_first=targets == sets[0])


def _write_sized(
    described: Mapping[str, Mapping[str, Any]],
    first: str,
    dtype: DType,
    targets: Sequence[str],
    models: Sequence[str],
    folder: Path,
    *,
    is_first: bool,
) -> list[str]:
    """Write one file; gives those of ``models`` that it holds for."""
    begin_s = time.perf_counter()
    program = program_of(described[first])
    assert program is not None
    path = folder / sized_path(program, targets, dtype)
    path.unlink(missing_ok=True)
    try:
        sized = sized_family(described[first], dtype=dtype, targets=targets, name=first)
    except ProtwinError as error:
        _say(path, begin_s, str(error))
        return list(models)
    reasons: dict[str, str] = {}
    for name in models if is_first else dict.fromkeys((*models[:1], *models[-1:])):
        family = shipped_family(name, dtype)
        reason = "it has no family" if family is None else why_not(sized, family, described[name])
        if reason is not None:
            reasons[name] = reason
    left = [] if reasons and not is_first else [name for name in models if name not in reasons]
    if left:
        write_family(sized.model_copy(update={"models": tuple(left)}), path)
    _say(path, begin_s, "; ".join([", ".join(left), *(f"not {name}: {reason}" for name, reason in reasons.items())]))
    return left if is_first else list(models)


_PARTS: Final = {
    "--tiles": "from tiles on: tilings, shared sequences, adapters",
    "--sharings": "from shared sequences on",
    "--adapters": "adapters alone",
}
"""What may be left out at the beginning."""
_SHARED: Final = DType.BFLOAT16
"""What ranks share sequences in; in other types they are traced."""


def _say(path: Path, begin_s: float, what: str) -> None:
    size_bytes = path.stat().st_size if path.exists() else 0
    sys.stdout.write(
        f"{path.parent.name}/{path.name}: {what}, {size_bytes:,} bytes, {time.perf_counter() - begin_s:.1f} s\n"
    )
    sys.stdout.flush()


def main() -> None:
    """Regenerate the models that are named, or all."""
    import protwin.shared

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models of the catalogue; none: all")
    part = parser.add_mutually_exclusive_group()
    for number, (option, what) in enumerate(_PARTS.items(), start=1):
        part.add_argument(option, dest="first", action="store_const", const=number, default=0, help=what)
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - set(model_names())):
        parser.error(f"the catalogue has no model {', '.join(unknown)}")
    data = Path(next(iter(protwin.shared.__path__))) / "catalogue" / "data"
    names = asked.names or model_names()
    steps = (
        ("workloads", regenerate),
        ("tilings", regenerate_tilings),
        ("sharings", regenerate_sharings),
        ("adapters", regenerate_adapters),
    )
    for folder, write in steps[asked.first :]:
        (data / folder).mkdir(exist_ok=True)
        write(names, data / folder)


if __name__ == "__main__":
    main()
