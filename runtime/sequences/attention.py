"""Attention over sequences that ranks share, by way of the registry that models of transformers take theirs from.

[Note: The registry]
A model asks ``ALL_ATTENTION_FUNCTIONS`` for the function that its configuration names, and the functions of
``masking_utils`` ask ``ALL_MASK_ATTENTION_FUNCTIONS`` for the mask.  While sequences are shared, wrappers stand under
the same names: kernels and checks that read the name of a configuration find what they know.  They are the process's,
so that they look which model's attention calls, and hand others' through.

[Note: Masks of the whole sequence]
A model makes its mask for the tokens that it is given, which are a rank's own.  Attention has all tokens, so the mask
is made for all: by the model's own function, told of other lengths.  Where positions begin anew within a row (packed
samples), the model looks for that in the positions of its own tokens; it is shown those of the whole row.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ScheduleError
from .exchange import Peers, check_heads, to_heads, to_tokens

_PACKING: Final = ("find_packed_sequence_indices", "remap_positions_for_packed_sequence")
"""What ``masking_utils`` makes of positions, each of which is its last argument."""


class SharedAttention:
    """The attention of one model whose sequences ``peers`` share."""

    def __init__(self, model: nn.Module, peers: Peers) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._peers = peers
        self.num_tokens: int | None = None
        """Of a whole sequence, from its forward to the next, for recomputation; None: the last one was not shared."""
        self.positions: torch.Tensor | None = None
        """(B or 1, S) of the whole sequence."""
        self.called: set[str] = set()
        """Modules whose attention has run since somebody emptied it."""

    def has(self, module: nn.Module) -> bool:
        """Whether it is a part of the model."""
        return id(module) in self._names

    def run(
        self, inner: Callable[..., Any], module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """``inner`` on all tokens of this rank's heads.

        q (B, H, S/P, D); k and v (B, K, S/P, D).  Gives (B, S/P, H, D), and no weights.
        """
        name, ranks = self._names[id(module)], self._peers.num_ranks
        self._refuse_by_head(module, kwargs, name)
        check_heads(q.shape[1], k.shape[1], ranks, name)
        if q.shape[2] != k.shape[2]:
            raise ScheduleError(
                f"{name} attends from {q.shape[2]} tokens to {k.shape[2]}; only self-attention can share a sequence. "
                f"Train with sequence_ranks 1."
            )
        self.called.add(name)
        if kwargs.get("position_ids") is not None and self.positions is not None:
            # Kernels for packed samples read them: those of all tokens.
            kwargs["position_ids"] = self.positions
        groups = getattr(module, "num_key_value_groups", None)
        queries, keys, values = to_heads(self._peers, (q, k, v))
        del q, k, v
        own = queries.shape[1] // keys.shape[1]
        try:
            if groups is not None:
                module.num_key_value_groups = own
            output, *_ = inner(module, queries, keys, values, *args, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups
        del queries, keys, values
        return to_tokens(self._peers, output), None

    def _refuse_by_head(self, module: nn.Module, kwargs: dict[str, Any], name: str) -> None:
        """What each head has of its own would have to be divided too."""
        has = [key for key in ("s_aux", "position_bias", "head_mask") if kwargs.get(key) is not None]
        has += ["sinks"] if isinstance(getattr(module, "sinks", None), torch.Tensor) else []
        if has:
            raise PlanError(
                f"sequence_ranks: {name} has {has[0]}, numbers of each head that ranks do not divide. Train with "
                f"sequence_ranks 1."
            )


class _Registry:
    """The wrappers in transformers' registries, as long as any model's sequences are shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: tuple[SharedAttention, ...] = ()
        self._undo: list[Callable[[], None]] = []
        self._running = threading.local()

    @property
    def at_hand(self) -> SharedAttention | None:
        """Whose forward runs on this thread."""
        return getattr(self._running, "shared", None)

    @contextmanager
    def running(self, shared: SharedAttention) -> Iterator[None]:
        """Within the block, masks are made for ``shared``."""
        self._running.shared = shared
        try:
            yield
        finally:
            self._running.shared = None

    def add(self, shared: SharedAttention) -> None:
        with self._lock:
            if not self._shared:
                self._install()
            self._shared = (*self._shared, shared)

    def remove(self, shared: SharedAttention) -> None:
        with self._lock:
            self._shared = tuple(other for other in self._shared if other is not shared)
            while not self._shared and self._undo:
                self._undo.pop()()

    def _install(self) -> None:
        from transformers import masking_utils
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._put(ALL_ATTENTION_FUNCTIONS, "eager", self._attention(None))
        for name in [name for name in ALL_ATTENTION_FUNCTIONS if name != "eager" and not name.startswith("paged|")]:
            self._put(ALL_ATTENTION_FUNCTIONS, name, self._attention(ALL_ATTENTION_FUNCTIONS[name]))
        masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        for name in list(masks):
            self._put(masks, name, self._mask(masks[name]))
        for name in _PACKING:
            if (original := getattr(masking_utils, name, None)) is not None:
                setattr(masking_utils, name, self._of_whole_positions(original))
                self._undo.append(partial(setattr, masking_utils, name, original))

    def _put(self, registry: Any, name: str, wrapper: Callable[..., Any]) -> None:
        own = registry._local_mapping
        if name in own:
            self._undo.append(partial(own.__setitem__, name, own[name]))
        else:
            self._undo.append(partial(own.pop, name, None))
        own[name] = wrapper

    def _attention(self, inner: Callable[..., Any] | None) -> Callable[..., Any]:
        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            function = inner or _eager_of(module)
            shared = next((shared for shared in self._shared if shared.has(module)), None)
            if shared is None or shared.num_tokens is None:
                return function(module, *args, **kwargs)
            return shared.run(function, module, *args, **kwargs)

        return attend

    def _mask(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def mask(*args: Any, **kwargs: Any) -> Any:
            if (shared := self.at_hand) is None or shared.num_tokens is None:
                return inner(*args, **kwargs)
            if args or kwargs.get("q_offset") or kwargs.get("kv_offset"):
                raise ScheduleError("a mask for a cache of keys is asked for. Leave use_cache out.")
            padding = kwargs.get("attention_mask")
            if padding is not None and padding.shape[-1] != shared.num_tokens:
                raise PlanError(
                    f"sequence_ranks: the model makes a mask of its own for {padding.shape[-1]:,} of the "
                    f"{shared.num_tokens:,} tokens of a sequence. Give it an attention_mask, or train it with "
                    f"sequence_ranks 1."
                )
            return inner(**{**kwargs, "q_length": shared.num_tokens, "kv_length": shared.num_tokens})

        return mask

    def _of_whole_positions(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            shared = self.at_hand
            if shared is None or shared.num_tokens is None or shared.positions is None:
                return original(*args)
            whole = shared.positions.expand(args[-1].shape[0], -1)
            return original(*args[:-1], whole)

        return function


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """What a model's own file has for attention without a kernel."""
    found = getattr(type(module).forward, "__globals__", {}).get("eager_attention_forward")
    if found is None:
        found = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if found is None:
        raise PlanError(
            f"sequence_ranks: {type(module).__name__} names no eager attention of its own. Choose another "
            f'(attn_implementation="sdpa").'
        )
    function: Callable[..., Any] = found
    return function


REGISTRY: Final = _Registry()
