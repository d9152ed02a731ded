"""The families of workloads that come with the package, and how they lie on disk."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..catalogue.data_files import data_folder
from ..schema.workload import DType
from .family import WorkloadFamily

if TYPE_CHECKING:
    from .sharings import FamilySharings
    from .sized import SizedFamily
    from .tilings import FamilyTilings

SHIPPED_DTYPES: Final = (DType.BFLOAT16, DType.FLOAT32)
"""Models are shipped in these; in float16 most do what they do in bfloat16."""
_SUFFIX: Final = ".json.gz"


def shipped_family(name: str, dtype: DType) -> WorkloadFamily | None:
    """The shipped family of full training of a model of the catalogue; None if there is none."""
    own = DType.BFLOAT16 if dtype is DType.FLOAT16 else dtype
    if shipped_path(name, own) not in _shipped_files():
        return None
    content = _content(_folder() / shipped_path(name, own))
    family = WorkloadFamily.from_mapping(content, origin=f"catalogue entry {name}")
    return family.in_dtype(dtype) if dtype in (family.compute_dtype, *family.twins) else None


def shipped_tilings(name: str, dtype: DType) -> FamilyTilings | None:
    """What the shipped family of a model in ``dtype`` does in tiles; None if nothing is known of that."""
    from .tilings import FamilyTilings

    path = data_folder("tilings") / shipped_path(name, dtype)
    return FamilyTilings.from_mapping(_content(path), origin=f"tilings of {name}") if path.is_file() else None


def shipped_sharings(name: str, dtype: DType) -> FamilySharings | None:
    """What one of several ranks does that share sequences of the shipped family; None if nothing is known of that."""
    from .sharings import FamilySharings

    path = data_folder("sharings") / shipped_path(name, dtype)
    return FamilySharings.from_mapping(_content(path), origin=f"sharings of {name}") if path.is_file() else None


def shipped_sized(program: str, targets: Sequence[str], dtype: DType) -> SizedFamily | None:
    """What models of one program do with adapters beside ``targets`` (paths in a block); None if it is not known."""
    path = data_folder("adapters") / sized_path(program, targets, dtype)
    found = _read_sized(path, program) if path.is_file() else None
    return found if found is not None and found.targets == tuple(targets) else None


def sized_families(program: str, dtype: DType) -> list[SizedFamily]:
    """What models of one program do with adapters beside every set of maps that is known."""
    entries = sorted(data_folder("adapters").iterdir(), key=lambda entry: entry.name)
    own = [e for e in entries if e.name.startswith(f"{program}.") and e.name.endswith(f".{dtype}{_SUFFIX}")]
    return [_read_sized(entry, program) for entry in own]


def _read_sized(path: Traversable, program: str) -> SizedFamily:
    from .sized import SizedFamily

    return SizedFamily.from_mapping(_content(path), origin=f"adapters of {program}")


def sized_path(program: str, targets: Sequence[str], dtype: DType) -> str:
    """The name of the file of a program with adapters."""
    ends = "-".join(target.rpartition(".")[2] for target in targets)
    return f"{program}.{ends}.{dtype}{_SUFFIX}"


def shipped_path(name: str, dtype: DType) -> str:
    """The name of a shipped family's file."""
    return f"{name}.{dtype}{_SUFFIX}"


def write_family(family: WorkloadFamily | FamilyTilings | FamilySharings | SizedFamily, path: Path) -> None:
    """Write a family, its tilings or its sharings, as the catalogue holds it; equal ones give equal bytes."""
    import gzip  # the command line reads families, and never writes one

    text = json.dumps(json.loads(family.to_json()), separators=(",", ":"), ensure_ascii=False)
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    unfinished.replace(path)


def _content(path: Traversable) -> dict[str, Any]:
    content = json.loads(zlib.decompress(path.read_bytes(), wbits=31))
    assert isinstance(content, dict)
    return content


def _folder() -> Traversable:
    return data_folder("workloads")


@cache
def _shipped_files() -> frozenset[str]:
    folder = _folder()
    return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()
