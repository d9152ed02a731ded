"""The package from outside: the editable installation, a wheel, spawned workers, and what may import what."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from protwin.shared.basics.units import parse_bytes

ROOT = Path(__file__).parents[1]
FOLDERS = ("shared", "sim", "runtime", "calibration")
RUNTIME_MODULES = ("torch", "transformers", "psutil", "safetensors")


def python(code: str, *, executable: Path = Path(sys.executable), cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def modules_of(folder: str) -> list[str]:
    found = pkgutil.walk_packages([str(ROOT / folder)], f"protwin.{folder}.")
    left_out = ("._lanes", ".cli.namespace.__main__")  # a library, and what runs the command
    return [module.name for module in found if not module.ispkg and not module.name.endswith(left_out)]


def importing(modules: list[str], *, without: tuple[str, ...]) -> str:
    """Code that imports ``modules`` where ``without`` cannot be imported."""
    return (
        "import importlib, sys\n"
        f"for name in {without!r}: sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )


def test_protwin_holds_typed_packages_and_importing_it_imports_none(tmp_path: Path) -> None:
    code = (
        "import sys, protwin; print([name for name in sys.modules if name.startswith('protwin.') or name == 'torch'])"
    )
    result = python(code, cwd=tmp_path)
    assert result.stdout == "[]\n", result.stderr
    for folder in FOLDERS:
        spec = importlib.util.find_spec(f"protwin.{folder}")
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).with_name("py.typed").is_file()


def test_torch_belongs_to_an_extra() -> None:
    required = importlib.metadata.requires("protwin") or []
    always = {re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line}
    runtime = {re.split(r"[^\w-]", line)[0] for line in required if 'extra == "runtime"' in line}
    assert always == {"jinja2", "markupsafe", "numpy", "pydantic", "rich", "scipy", "simpy", "tomli-w", "typer"}
    assert runtime == set(RUNTIME_MODULES)


def test_shared_and_sim_need_no_torch(tmp_path: Path) -> None:
    code = importing([*modules_of("shared"), *modules_of("sim")], without=RUNTIME_MODULES)
    result = python(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_shared_needs_no_simpy(tmp_path: Path) -> None:
    result = python(importing(modules_of("shared"), without=(*RUNTIME_MODULES, "simpy")), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    wrong = python(importing(["simpy"], without=("simpy",)), cwd=tmp_path)
    assert "ModuleNotFoundError" in wrong.stderr, "what is blocked cannot be imported"


def test_runtime_and_sim_do_not_meet(tmp_path: Path) -> None:
    check = "assert not [name for name in sys.modules if name.split('.')[:2] == ['protwin', {other!r}]]\n"
    for folder, other in (("runtime", "sim"), ("sim", "runtime")):
        left_out = ("protwin.runtime.integrations.axolotl",)  # axolotl itself imports it
        plain = [name for name in modules_of(folder) if ".commands." not in name and name not in left_out]
        result = python(
            importing(plain, without=("simpy",) if folder == "runtime" else ()) + check.format(other=other),
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr


def test_spawned_workers_find_the_package() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(parse_bytes, "3KiB").result(timeout=600) == 3 * 1024


def test_modules_start_by_name(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "protwin.shared.basics.units"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_type_checkers_see_the_folders_themselves() -> None:
    for folder in FOLDERS:
        link = ROOT / ".typing" / "protwin" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy so that nothing is left in the tree."""
    copy = tmp_path_factory.mktemp("sources") / "protwin"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    built = copy.parent / "wheels"
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(built)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(copy)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = built.glob("protwin-*.whl")
    return path


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_folders_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    present = {
        f"protwin/{path.relative_to(ROOT)}".replace("shared/cli/namespace/", "")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    # The library in C is there where it was installed here, since that takes a compiler.
    assert packed == present


@pytest.mark.slow
def test_a_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=600)
    own = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", own, "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
        timeout=600,
    )
    (site,) = (environment / "lib").glob("python*/site-packages")
    dependencies = Path(pytest.__file__).parents[1]
    (site / "dependencies.pth").write_text(f"{dependencies}\n")

    packages = ", ".join(f"protwin.{folder}" for folder in FOLDERS)
    where = python(f"import {packages}; print(protwin.shared.__file__)", executable=own, cwd=tmp_path)
    assert Path(where.stdout.strip()) == site / "protwin" / "shared" / "__init__.py", where.stderr

    script = environment / "bin" / "protwin"
    for command in ([script], [own, "-m", "protwin"]):
        listed = subprocess.run(
            [*command, "hardware", "list"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert listed.returncode == 0, listed.stderr
        assert "rtx-3090" in listed.stdout

    spawning = (
        "import multiprocessing, concurrent.futures as futures\n"
        "from protwin.shared.basics.units import parse_bytes\n"
        "if __name__ == '__main__':\n"
        "    with futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:\n"
        "        print(pool.submit(parse_bytes, '3KiB').result())\n"
    )
    assert python(spawning, executable=own, cwd=tmp_path).stdout == "3072\n"
