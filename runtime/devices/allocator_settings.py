"""How PyTorch's caching allocator is asked to cut device memory, before CUDA starts.

[Note: Expandable segments]
A plan that fills its device fits by what it allocates; segments that were cut for one size leave up to a quarter of
that unused beside it, and expandable segments do not (docs/memory.md).  The older of the two variables is set: every
release reads it, while some take the newer one for other devices only (2.9.1: pytorch/pytorch issue 183387).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where PyTorch reads the settings of its allocator."""
EXPANDABLE: Final = "expandable_segments:True"


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Ask for expandable segments unless the user has set any of the ``VARIABLES``, be it to nothing.

    Read when CUDA starts, so to be called before torch is imported.
    """
    if not any(name in environment for name in VARIABLES):
        environment[VARIABLES[0]] = EXPANDABLE
