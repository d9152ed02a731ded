"""Trace every model of the catalogue anew: ``python -m protwin.runtime.tracing.regenerate_catalogue [NAME ...]``.

Writes the families of workloads beside the models' configurations, and says what became of each.  Needed when the
tracer changes, or what it traces with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...shared.catalogue.models import model_configuration, model_names
from ...shared.schema.workload import DType
from ...shared.workloads.shipped import SHIPPED_DTYPES, shipped_path, write_family
from .families import family_of_configuration


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
            pieces = f"{len(family.pieces)} pieces" if len(family.pieces) > 1 else "1 piece"
            sys.stdout.write(
                f"{path.name}: {pieces}, {path.stat().st_size:,} bytes, {time.perf_counter() - begin_s:.1f} s\n"
            )
            sys.stdout.flush()


def main() -> None:
    """Regenerate the models that are named, or all."""
    import protwin.shared

    folder = Path(next(iter(protwin.shared.__path__))) / "catalogue" / "data" / "workloads"
    folder.mkdir(exist_ok=True)
    regenerate(sys.argv[1:] or model_names(), folder)


if __name__ == "__main__":
    main()
