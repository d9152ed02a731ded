"""Functions of transformers that run kernels of another package where it is installed.

[Note: Reference implementations]
Linear attention, state-space layers and short convolutions of transformers have two implementations: kernels of a
package (flash-linear-attention, mamba-ssm, causal-conv1d), and operations of PyTorch, the reference, where the package
is missing.  Kernels cannot run on fake tensors, nor do they say what they keep.  So models without weights are traced
by their reference, whatever is installed, and the packages are named: with them training takes less memory and time.
Source: ``integrations/hub_kernels.py`` of transformers, use_kernel_func_from_hub_with_fallback.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final

from torch import nn

_MADE_IN: Final = "transformers/integrations/hub_kernels.py"
_CALLED: Final = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
"""What pip calls the packages, by the names that they are imported by."""


@contextmanager
def references_named(model: nn.Module, *, is_run: bool) -> Iterator[set[str]]:
    """Within the block ``model`` runs by references; gives the packages whose kernels were left out so far.

    ``is_run``: whether it has weights; then kernels that are installed run, and are not left out.
    """
    named: set[str] = set()
    modules = {name: sys.modules[name] for name in {type(part).__module__ for part in model.modules()}}
    replaced = []
    for module in modules.values():
        for name, function in list(vars(module).items()):
            found = _with_kernels(function)
            if found is None or (is_run and found["is_new_implementation"]):
                continue
            package = str(found["package"])
            replaced.append((module, name, function))
            setattr(module, name, _naming(found["torch_function"], _CALLED.get(package, package), named))
    try:
        yield named
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


def _naming(reference: Callable[..., Any], package: str, named: set[str]) -> Callable[..., Any]:
    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        named.add(package)
        return reference(*args, **kwargs)

    return run


def _with_kernels(function: Any) -> dict[str, Any] | None:
    """What a function with kernels knows: package, reference, whether kernels run.  None for any other function."""
    while isinstance(function, FunctionType):
        if function.__code__.co_filename.replace("\\", "/").endswith(_MADE_IN):
            cells = function.__closure__ or ()
            found = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
            if found.keys() >= {"package", "torch_function", "is_new_implementation"}:
                return found
        function = getattr(function, "__wrapped__", None)
    return None
