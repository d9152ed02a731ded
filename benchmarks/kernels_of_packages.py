"""What kernels of flash-linear-attention, mamba-ssm and causal-conv1d hold, by the packages' own Python.

The packages need a GPU to be installed, and Triton.  Here their kernels do nothing, so that what their Python
allocates, frees and keeps can be seen on any machine.  Folders hold the unpacked packages, and einops:

    python -m benchmarks.kernels_of_packages                        # timed forwards beside predicted ones
    pip download --no-deps flash-linear-attention fla-core einops   # and unpack the wheels
    python -m benchmarks.kernels_of_packages FOLDER...              # beside what a trace takes them to hold
    python -m benchmarks.kernels_of_packages --record FOLDER...     # for tests/runtime/packaged/recorded.json
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import torch
import torch._dynamo

from protwin.runtime.packaged.substitution import KERNELS
from tests.runtime.packaged.calls import Held, cases, held
from tests.sim.operations.test_chunked import H100, MEASURED, calls, seconds

RECORDED: Final = Path("tests/runtime/packaged/recorded.json")
_PROCESSORS: Final = 148
_BLOCKS: Final = {"BLOCK_SIZE": 64, "BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32}
_FROM: Final = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk",
    "chunk_kda": "fla.ops.kda.chunk",
    "mamba_chunk_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
    "mamba_split_conv1d_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
    "selective_scan_fn": "mamba_ssm.ops.selective_scan_interface",
    "mamba_inner_fn": "mamba_ssm.ops.selective_scan_interface",
    "causal_conv1d_fn": "causal_conv1d.causal_conv1d_interface",
}


class _Kernel:
    """A kernel of Triton that does nothing."""

    def __init__(self, function: Any) -> None:
        self.best_config = SimpleNamespace(kwargs=_BLOCKS)
        self.configs = [self.best_config]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _decorator(*args: Any, **kwargs: Any) -> Callable[[Any], _Kernel]:
    return lambda function: function if isinstance(function, _Kernel) else _Kernel(function)


class _Anything(ModuleType):
    """A module that has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=name))
        return self.__dict__[name]


def _module(name: str, **parts: Any) -> None:
    sys.modules[name] = _Anything(name)
    sys.modules[name].__dict__.update({"__path__": []} | parts)


def _selective_scan(u: Any, delta: Any, decay: Any, keys: Any, queries: Any, skip: Any, gate: Any, *_: Any) -> Any:
    """``selective_scan_fwd`` of csrc/selective_scan/selective_scan.cpp."""
    states = torch.empty(*u.shape[:2], -(-u.shape[2] // 2048), 2 * decay.shape[1], dtype=decay.dtype)
    gated = [] if gate is None else [torch.empty_like(gate)]
    return [torch.empty_like(delta), states, *gated]


def _selective_scan_backward(*given: Any) -> Any:
    """``selective_scan_bwd`` of the same file."""
    u, delta, decay, keys, queries, skip, gate, bias, _, _, result, of_gate, _, forms_again = given
    found = [torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(decay)]
    of_keys, of_queries = (torch.zeros_like(part, dtype=torch.float32) for part in (keys, queries))
    weights = [None if part is None else torch.zeros_like(part) for part in (skip, bias)]
    gates = [] if gate is None else [torch.empty_like(gate) if of_gate is None else of_gate]
    again = [torch.empty_like(result)] if gate is not None and forms_again else []
    return [*found, of_keys.to(keys.dtype), of_queries.to(queries.dtype), *weights, *gates, *again]


def _stand_in(folders: list[str]) -> None:
    """Stand-ins for Triton and for what is compiled, and ``folders`` where packages are looked for."""
    torch.compile = torch.compiler.disable = lambda function=None, *_, **__: function or (lambda inner: inner)  # type: ignore
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=_PROCESSORS)  # type: ignore
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore
    active = SimpleNamespace(
        get_current_target=lambda: SimpleNamespace(backend="cpu", arch="90"),
        utils=SimpleNamespace(get_device_properties=lambda _: {"multiprocessor_count": _PROCESSORS}),
    )
    driver = SimpleNamespace(active=active)
    runtime = SimpleNamespace(driver=driver, Autotuner=object, JITFunction=_Kernel)
    _module(
        "triton",
        jit=lambda function=None, **_: _Kernel(function) if function else _decorator(),
        autotune=_decorator,
        heuristics=_decorator,
        cdiv=lambda number, size: -(-number // size),
        next_power_of_2=lambda number: 1 << (number - 1).bit_length(),
        Config=lambda kwargs, **more: SimpleNamespace(kwargs=kwargs, **more),
        runtime=runtime,
        __version__="3.5.0",
    )
    names = "language runtime compiler backends tools testing language.extra language.extra.libdevice language.math"
    names += " language.extra.cuda language.extra.cuda.libdevice runtime.autotuner runtime.driver runtime.jit"
    names += " runtime.errors compiler.errors tools.tensor_descriptor backends.compiler runtime.cache language.core"
    for name in names.split():
        _module(f"triton.{name}", constexpr=lambda value=None: value, driver=driver)
    _module("fla.ops.utils.cache", fla_cache_autotune=_decorator)
    _module("causal_conv1d_cuda", **{f"causal_conv1d_{way}": lambda *_: None for way in ("fwd", "bwd", "update")})
    _module("selective_scan_cuda", fwd=_selective_scan, bwd=_selective_scan_backward)
    sys.path[:0] = folders
    for folder in folders:
        if (Path(folder) / "mamba_ssm").exists():
            for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.utils", "mamba_ssm.ops.triton"):
                _module(name, __path__=[str(Path(folder) / name.replace(".", "/"))])


def _of_package(function: str) -> Callable[..., Any] | None:
    try:
        module = importlib.import_module(_FROM[function])
    except ModuleNotFoundError as error:
        print(f"{function}: {error}", file=sys.stderr)
        return None
    for name, other in list(sys.modules.items()):
        if name.startswith("fla.") and "check_shared_mem" in vars(other):
            # As on an H100, whose multiprocessors have room for the widest blocks.
            vars(other)["check_shared_mem"] = lambda *_, **__: True
    found: Callable[..., Any] = getattr(module, function)
    return found


def print_times() -> None:
    """Forwards that others timed, and how many forwards a backward takes."""
    for function, samples, tokens, keys, heads, device, measured_ms in MEASURED:
        predicted_ms = 1e3 * seconds(calls(function, samples, tokens, keys, heads, device)[0], device)
        gain = predicted_ms / measured_ms - 1
        what = f"{function}, {heads} heads, {samples} x {tokens:,} tokens, {device.num_multiprocessors} multiprocessors"
        print(f"{what}: measured {measured_ms:.2f} ms, predicted {predicted_ms:.2f} ms ({gain:+.0%})")
    forward, backward = calls("chunk_gated_delta_rule", 1, 4096, 16, 32)
    print(f"backward takes {seconds(backward, H100) / seconds(forward, H100):.1f} forwards")


def main(arguments: list[str]) -> None:
    """Print both, or record what the packages hold."""
    if not arguments:
        print_times()
        return
    is_recording = "--record" in arguments
    _stand_in([folder for folder in arguments if folder != "--record"])
    recorded: dict[str, Any] = {}
    functions = {name: _of_package(name) for name in _FROM}
    for name, (function, given) in cases().items():
        package = functions[function]
        if package is None:
            continue
        real = held(package, given)
        recorded[name] = real._asdict()
        if not is_recording:
            ours: Held = held(KERNELS[function], given)
            print(f"{name}: {real[:3]} {'the same' if ours == real else ours[:3]}")
    if is_recording:
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
        print(f"{len(recorded)} calls in {RECORDED}")


if __name__ == "__main__":
    main(sys.argv[1:])
