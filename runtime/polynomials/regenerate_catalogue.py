"""Trace every model of the catalogue anew: ``python -m protwin.runtime.polynomials.regenerate_catalogue [NAME ...]``.

Writes the families of workloads beside the models' configurations, what they do in tiles, and what ranks do that share
sequences, and says what became of each.  Needed when the tracer changes, or what it traces with.  With ``--tiles``, the
families stay, and what they do in tiles and shared is traced: needed when tiles change.  With ``--sharings``, the last
alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Final

from ...shared.catalogue.models import model_configuration, model_names
from ...shared.families.shipped import SHIPPED_DTYPES, shipped_family, shipped_path, shipped_tilings, write_family
from ...shared.schema.workload import DType
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

    data = Path(next(iter(protwin.shared.__path__))) / "catalogue" / "data"
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or model_names()
    steps = (("workloads", regenerate), ("tilings", regenerate_tilings), ("sharings", regenerate_sharings))
    first = 2 if "--sharings" in sys.argv else 1 if "--tiles" in sys.argv else 0
    for folder, write in steps[first:]:
        (data / folder).mkdir(exist_ok=True)
        write(names, data / folder)


if __name__ == "__main__":
    main()
