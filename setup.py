"""The one thing that pyproject.toml cannot say for good: a library in C, which may be missing.

It uses nothing of Python, so that one wheel serves every version; ``sim/kernels/library.py`` loads it.
"""

import os

from setuptools import Extension, setup

SOURCES = ("allocator.c", "blocks.c", "expandable.c", "order.c", "periods.c", "replay.c", "side_by_side.c", "spans.c")
HEADERS = ("allocator.h", "blocks.h", "lanes.h", "periods.h")

setup(
    ext_modules=[
        Extension(
            "protwin.sim.kernels._lanes",
            sources=[f"sim/kernels/{name}" for name in SOURCES],
            depends=[f"sim/kernels/{name}" for name in HEADERS],
            libraries=["m"] if os.name == "posix" else [],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
