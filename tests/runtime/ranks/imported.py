"""The last thing that processes of ranks are forked with: see [Note: Processes that need not start]."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
