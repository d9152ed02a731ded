"""Trace every model of the catalogue anew: ``python -m protwin.runtime.polynomials.regenerate_catalogue [NAME ...]``.

Writes the families of workloads beside the models' configurations, and what they do in tiles, and says what became of
each.  Needed when the tracer changes, or what it traces with.  With ``--tiles``, the families stay, and only what they
do in tiles is traced: needed when tiles change.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from ...shared.catalogue.models import model_configuration, model_names
from ...shared.families.shipped import SHIPPED_DTYPES, shipped_family, shipped_path, write_family
from ...shared.schema.workload import DType
from .families import family_of_configuration, tilings_of_family


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
            write_family(tilings, path)
        _say(path, begin_s, " ".join(reasons) or "tiles of MLPs and of the loss")


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
    names = [name for name in sys.argv[1:] if name != "--tiles"] or model_names()
    for folder, write in (("workloads", regenerate), ("tilings", regenerate_tilings)):
        if folder == "tilings" or "--tiles" not in sys.argv:
            (data / folder).mkdir(exist_ok=True)
            write(names, data / folder)


if __name__ == "__main__":
    main()
