"""Functions of transformers that run kernels of another package where it is installed.

[Note: Kernels of packages]
Linear attention, state-space layers and short convolutions of transformers have two implementations: kernels of a
package (flash-linear-attention, mamba-ssm, causal-conv1d), and operations of PyTorch, the reference, where the package
is missing.  Kernels cannot run on fake tensors, nor do they say what they keep.  So models without weights are traced
by their reference, unless the package is named; then what its kernels read, write and keep is told by this room.  What
was left out is named: with it training takes less memory and time.
Source: ``integrations/hub_kernels.py`` of transformers, use_kernel_func_from_hub_with_fallback.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Final, NamedTuple

from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.workload import KernelPackage
from .causal_convolution import causal_conv1d_fn
from .delta_rule import chunk_gated_delta_rule, chunk_kda
from .selective_scan import mamba_inner_fn, selective_scan_fn
from .state_space import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

_MADE_IN: Final = "transformers/integrations/hub_kernels.py"
_CALLED: Final = {
    "fla": KernelPackage.FLASH_LINEAR_ATTENTION,
    "mamba_ssm": KernelPackage.MAMBA_SSM,
    "causal_conv1d": KernelPackage.CAUSAL_CONV1D,
}
"""The packages by the names that they are imported by."""
KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (
        causal_conv1d_fn,
        chunk_gated_delta_rule,
        chunk_kda,
        mamba_chunk_scan_combined,
        mamba_inner_fn,
        mamba_split_conv1d_scan_combined,
        selective_scan_fn,
    )
}
"""By what the packages call them; others are for generation."""


class Kernels(NamedTuple):
    """What models of a trace have called, by the packages' names."""

    left_out: set[str]
    """Their reference ran."""
    taken: set[KernelPackage]
    """What their kernels do was traced."""


def asked_packages(
    kernels: Sequence[KernelPackage | str], *, is_run: bool, device_kind: DeviceKind
) -> tuple[KernelPackage, ...]:
    """Whose kernels a trace is asked for.  Raises WorkloadError if nobody knows them, or if they cannot be told."""
    try:
        found = tuple(KernelPackage(package) for package in ([kernels] if isinstance(kernels, str) else kernels))
    except ValueError:
        raise WorkloadError(f"kernels are {kernels!r}; known are those of {', '.join(KernelPackage)}.") from None
    if found and (is_run or device_kind is not DeviceKind.CUDA):
        reason = "the model has weights, and runs as it is" if is_run else "they run on GPUs, and this is a CPU"
        raise WorkloadError(f"kernels of {', '.join(found)} are asked for, but {reason}. Leave --kernels out.")
    return found


def missing_packages(packages: Sequence[KernelPackage]) -> tuple[KernelPackage, ...]:
    """Those of ``packages`` that this machine has not installed."""
    imported = {package: name for name, package in _CALLED.items()}
    return tuple(package for package in packages if find_spec(imported[package]) is None)


def check_taken(packages: Sequence[KernelPackage], called: Kernels, name: str) -> None:
    """Raise WorkloadError if the model called no kernel of one of ``packages``."""
    for package in packages:
        # Fused layers of mamba-ssm call causal-conv1d themselves.
        is_within = package is KernelPackage.CAUSAL_CONV1D and KernelPackage.MAMBA_SSM in called.taken
        if package not in called.taken and not is_within:
            raise WorkloadError(
                f"kernels of {package} are asked for, but {name} calls none of them. Leave --kernels {package} out."
            )


@contextmanager
def kernels_of_packages(model: nn.Module, packages: Sequence[KernelPackage], *, is_run: bool) -> Iterator[Kernels]:
    """Within the block ``model`` runs by references, or by what kernels of ``packages`` do.

    ``is_run``: whether it has weights; then kernels that are installed run, and are not left out.
    """
    found = Kernels(set(), set())
    # The module of a class need not be imported by its name: a file may be run, or loaded from a path.
    names = {type(part).__module__ for part in model.modules()} & sys.modules.keys()
    modules = {name: sys.modules[name] for name in names}
    replaced = []
    for module in modules.values():
        for name, function in list(vars(module).items()):
            known = _with_kernels(function)
            if known is None or (is_run and known["is_new_implementation"]):
                continue
            package = _CALLED.get(str(known["package"]), str(known["package"]))
            kernel = KERNELS.get(str(known["func_name"])) if package in packages else None
            replaced.append((module, name, function))
            if kernel is not None:
                setattr(module, name, _naming(kernel, package, found.taken))
            else:
                setattr(module, name, _naming(known["torch_function"], package, found.left_out))
    try:
        yield found
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


def _naming(run: Callable[..., Any], package: Any, named: set[Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def naming(*args: Any, **kwargs: Any) -> Any:
        named.add(package)
        return run(*args, **kwargs)

    return naming


def _with_kernels(function: Any) -> dict[str, Any] | None:
    """What a function with kernels knows: package, name there, reference, whether kernels run.  None for any other."""
    while isinstance(function, FunctionType):
        if function.__code__.co_filename.replace("\\", "/").endswith(_MADE_IN):
            cells = function.__closure__ or ()
            found = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
            if found.keys() >= {"package", "func_name", "torch_function", "is_new_implementation"}:
                return found
        function = getattr(function, "__wrapped__", None)
    return None
