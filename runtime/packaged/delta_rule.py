"""The gated delta rule of flash-linear-attention, and its gate by channels (Kimi Delta Attention), chunk by chunk.

[Note: Delta rule]
Forward forms, for every chunk of 64 tokens, a triangular matrix of keys, its inverse, and from it what is written to
the state and read from it (the WY form: Yang et al., arXiv 2406.06484, 2412.06464).  Then the state goes from chunk to
chunk, and the results are read off.  Backward forms everything again but the inverse, and goes back through the chunks.
Kept are normalized queries and keys, values, summed gates, and the matrices of chunks; states are not.
Source: ops/gated_delta_rule, ops/kda and ops/common of flash-linear-attention 0.6.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from .launching import chunks, launch

_CHUNK: Final = 64
"""Tokens of a chunk."""
_PART: Final = 16
"""Tokens of a part of a chunk whose matrix is inverted by itself, in float32."""
_WIDEST: Final = 128
"""Channels that a kernel of backward takes at a time; sums of gates have one addend for each."""
_GATE_WIDTH: Final = 32
"""The same of the kernel within chunks, where every channel has a gate."""


class _Sizes(NamedTuple):
    """Of one call: values have as many heads as queries, or a multiple."""

    samples: int
    length: int
    key_heads: int
    heads: int
    keys: int
    """Width of queries and keys."""
    values: int

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> _Sizes:
        """``key``: (samples, length, heads, width)."""
        samples, length, key_heads, keys = key.shape
        return cls(samples, length, key_heads, value.shape[2], keys, value.shape[3])

    @property
    def steps(self) -> int:
        """Chunks of a sequence."""
        return chunks(self.length, _CHUNK)

    def flops(self, by_tokens: int = 0, by_keys: int = 0, by_values: int = 0, of_state: int = 0) -> int:
        """Of so many products, in each chunk: of tokens by tokens, with keys or values, and with the state."""
        within = _CHUNK * _CHUNK * (by_tokens * _CHUNK + by_keys * self.keys + by_values * self.values)
        return 2 * self.samples * self.heads * self.steps * (within + of_state * _CHUNK * self.keys * self.values)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the state gives each query, as the values lie, and the last state.

    ``q``, ``k``: (samples, length, heads, width); ``v``: of as many heads or a multiple; ``g``, ``beta``: (samples,
    length, heads of values); ``initial_state``: (samples, heads, width of keys, width of values).
    """
    found: tuple[torch.Tensor, torch.Tensor | None] = _DeltaRule.apply(  # type: ignore[no-untyped-call]
        q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )
    return found


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same with a gate for every channel: ``g`` is (samples, length, heads of values, width of keys).

    ``use_gate_in_kernel``: ``g`` is what the gate is made of, with ``A_log`` and ``dt_bias``.
    """
    gate_weights = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
    found: tuple[torch.Tensor, torch.Tensor | None] = _KimiDeltaRule.apply(  # type: ignore[no-untyped-call]
        q,
        k,
        v,
        g,
        beta,
        *gate_weights,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
    )
    return found


def _contiguous(*tensors: torch.Tensor | None) -> list[Any]:
    """The package holds what it has laid out anew until its call returns; so must callers."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of length 1, and one over the length that each had."""
    result = torch.empty_like(x)
    inverse = x.new_empty(x.shape[:-1], dtype=torch.float32)
    launch("l2norm_fwd", (x,), (result, inverse))
    return result, inverse


def _normalized_backward(result: torch.Tensor, inverse: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(result)
    launch("l2norm_bwd", (result, inverse, gradient), (found,))
    return found


def _summed(gate: torch.Tensor) -> torch.Tensor:
    """Sums of gates within chunks, in float32."""
    result = torch.empty_like(gate, dtype=torch.float32)
    launch("chunk_local_cumsum", (gate,), (result,))
    return result


def _written(
    key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, gate: torch.Tensor, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is taken from the state and what is written to it (w and u)."""
    sizes = _Sizes.of(key, value)
    taken = key.new_empty(sizes.samples, sizes.length, sizes.heads, sizes.keys)
    written = torch.empty_like(value)
    flops = sizes.flops(by_keys=1, by_values=1)
    launch("recompute_w_u_fwd", (key, value, beta, gate, matrix), (taken, written), flops=flops)
    return taken, written


def _states(
    key: torch.Tensor,
    taken: torch.Tensor,
    written: torch.Tensor,
    gate: torch.Tensor,
    initial_state: torch.Tensor | None,
    wants_last: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The state before every chunk, the values that are new to it, and the last state."""
    sizes = _Sizes.of(key, written)
    states = key.new_empty(sizes.samples, sizes.steps, sizes.heads, sizes.keys, sizes.values)
    last = None
    if wants_last:
        last = key.new_zeros(sizes.samples, sizes.heads, sizes.keys, sizes.values, dtype=torch.float32)
    new = torch.empty_like(written)
    made = [states, new] if last is None else [states, new, last]
    reads = (key, taken, written, gate, initial_state)
    launch("chunk_gated_delta_rule_fwd_h", reads, made, flops=sizes.flops(of_state=2), steps=sizes.steps)
    return states, new, last


def _states_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    taken: torch.Tensor,
    gate: torch.Tensor,
    gradient: torch.Tensor,
    of_new: torch.Tensor,
    initial_state: torch.Tensor | None,
    of_last: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gradients of the states, of the first one, and of the new values."""
    sizes = _Sizes.of(key, of_new)
    of_states = query.new_empty(sizes.samples, sizes.steps, sizes.heads, sizes.keys, sizes.values)
    of_first = None if initial_state is None else torch.empty_like(initial_state, dtype=torch.float32)
    found = torch.empty_like(of_new)
    made = [of_states, found] if of_first is None else [of_states, found, of_first]
    reads = (query, key, taken, gate, gradient, of_new, initial_state, of_last)
    launch("chunk_gated_delta_rule_bwd_dhu", reads, made, flops=sizes.flops(of_state=3), steps=sizes.steps)
    return of_states, of_first, found


def _of_key_heads(gradient: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Gradients of queries or keys, added up where several heads of values share one."""
    samples, length, heads, width = gradient.shape
    if heads == key_heads:
        return gradient
    return gradient.view(samples, length, key_heads, heads // key_heads, width).sum(3)


class _DeltaRule(torch.autograd.Function):
    """See [Note: Delta rule]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        wants_last: bool,
        is_normalized: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        held = _contiguous(query, key, value, gate, beta, initial_state)
        query, key, value, gate, beta, initial_state = held
        query_inverse = key_inverse = None
        if is_normalized:
            query, query_inverse = _normalized(query)
            key, key_inverse = _normalized(key)
        sums = _summed(gate)
        sizes = _Sizes.of(key, value)
        matrix = key.new_zeros(sizes.samples, sizes.length, sizes.heads, _CHUNK)
        flops = sizes.flops(by_keys=1, by_tokens=1)
        launch("chunk_gated_delta_rule_fwd_kkt_solve", (key, sums, beta), (matrix,), flops=flops)
        taken, written = _written(key, value, beta, sums, matrix)
        states, new, last = _states(key, taken, written, sums, initial_state, wants_last)
        result = torch.empty_like(value)
        flops = sizes.flops(of_state=1, by_keys=1, by_values=1)
        launch("chunk_fwd_o", (query, key, new, states, sums), (result,), flops=flops)
        ctx.save_for_backward(query, query_inverse, key, key_inverse, value, sums, beta, matrix, initial_state)
        ctx.set_materialize_grads(False)
        return result.to(query.dtype), last

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_last: torch.Tensor | None) -> Any:
        query, query_inverse, key, key_inverse, value, sums, beta, matrix, initial_state = ctx.saved_tensors
        gradient, of_last = _contiguous(gradient, of_last)
        of_query, of_key, of_value, of_gate, of_beta, of_first = _delta_rule_backward(
            query, key, value, sums, beta, matrix, initial_state, gradient, of_last
        )
        if query_inverse is not None:
            of_query = _normalized_backward(query, query_inverse, of_query)
            of_key = _normalized_backward(key, key_inverse, of_key)
        return of_query, of_key, of_value, of_gate, of_beta, of_first, None, None


def _delta_rule_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sums: torch.Tensor,
    beta: torch.Tensor,
    matrix: torch.Tensor,
    initial_state: torch.Tensor | None,
    gradient: torch.Tensor,
    of_last: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of queries, keys, values, gates, ``beta`` and the first state."""
    sizes = _Sizes.of(key, value)
    taken, written = _written(key, value, beta, sums, matrix)
    states, new, _ = _states(key, taken, written, sums, initial_state, wants_last=False)
    of_new = torch.empty_like(gradient)
    flops = sizes.flops(by_keys=1, by_values=1)
    launch("chunk_bwd_dv_local", (query, key, sums, gradient), (of_new,), flops=flops)
    of_states, of_first, of_new = _states_backward(query, key, taken, sums, gradient, of_new, initial_state, of_last)
    of_query, of_key, of_taken, of_sums = _read_backward(
        query, key, new, taken, sums, states, of_new, gradient, of_states
    )
    of_key_too = key.new_empty(sizes.samples, sizes.length, sizes.heads, sizes.keys)
    of_value, of_sums_too, of_beta = torch.empty_like(value), torch.empty_like(sums), torch.empty_like(beta)
    launch(
        "prepare_wy_repr_bwd",
        (key, value, beta, sums, matrix, of_taken, of_new),
        (of_key_too, of_value, of_beta, of_sums_too),
        flops=sizes.flops(by_keys=3, by_values=2, by_tokens=2),
    )
    of_key_too = _of_key_heads(of_key_too, sizes.key_heads)
    of_key.add_(of_key_too)
    of_sums.add_(of_sums_too)
    return of_query, of_key, of_value, _summed(of_sums), of_beta, of_first


def _read_backward(
    query: torch.Tensor, key: torch.Tensor, new: torch.Tensor, taken: torch.Tensor, sums: torch.Tensor, *reads: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys, what is taken from the state, and summed gates, from what was read off.

    ``reads``: states, and gradients of new values, of the result and of states.
    """
    sizes = _Sizes.of(key, new)
    of_query, of_key = (key.new_empty(sizes.samples, sizes.length, sizes.heads, sizes.keys) for _ in ("query", "key"))
    of_sums = torch.empty(chunks(sizes.keys, _WIDEST), *sums.shape, dtype=torch.float32, device=sums.device)
    of_taken = torch.empty_like(taken)
    made = (of_query, of_key, of_taken, of_sums)
    flops = sizes.flops(of_state=3, by_keys=3, by_values=1)
    launch("chunk_bwd_dqkwg", (query, key, new, taken, sums, *reads), made, flops=flops)
    of_query, of_key = _of_key_heads(of_query, sizes.key_heads), _of_key_heads(of_key, sizes.key_heads)
    return of_query, of_key, of_taken, of_sums.sum(0)


class _KimiDeltaRule(torch.autograd.Function):
    """See [Note: Delta rule]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        gate_log: torch.Tensor | None,
        gate_bias: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        wants_last: bool,
        is_normalized: bool,
        is_gated: bool,
        is_squashed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        held = _contiguous(query, key, value, gate, beta, initial_state)
        query, key, value, gate, raw_beta, initial_state = held
        query_inverse = key_inverse = None
        if is_normalized:
            query, query_inverse = _normalized(query)
            key, key_inverse = _normalized(key)
        beta = raw_beta
        if is_squashed:
            beta = torch.empty_like(raw_beta, dtype=torch.float32)
            launch("fused_beta_sigmoid", (raw_beta,), (beta,))
        sums = _summed(gate)
        sizes = _Sizes.of(key, value)
        scores, matrix, taken, written, decayed = _kimi_within(query, key, value, beta, sums)
        states, new, last = _states(decayed, taken, written, sums, initial_state, wants_last)
        result = torch.zeros_like(value)
        flops = sizes.flops(of_state=1, by_values=1)
        launch("chunk_gla_fwd_o", (query, new, sums, states, scores), (result,), flops=flops)
        kept_sums = None if is_gated else sums
        ctx.save_for_backward(
            query, query_inverse, key, key_inverse, value, kept_sums, gate, raw_beta, beta, gate_log, gate_bias,
            scores, matrix, initial_state,
        )  # fmt: skip
        ctx.is_squashed = is_squashed
        ctx.set_materialize_grads(False)
        return result.to(query.dtype), last

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_last: torch.Tensor | None) -> Any:
        (
            query, query_inverse, key, key_inverse, value, sums, gate, raw_beta, beta, gate_log, gate_bias,
            scores, matrix, initial_state,
        ) = ctx.saved_tensors  # fmt: skip
        gradient, of_last = _contiguous(gradient, of_last)
        of_query, of_key, of_value, of_beta, of_gate, of_first, of_log, of_bias = _kimi_backward(
            query, key, value, sums, gate, beta, gate_log, gate_bias, scores, matrix, initial_state, gradient, of_last
        )
        if query_inverse is not None:
            of_query = _normalized_backward(query, query_inverse, of_query)
            of_key = _normalized_backward(key, key_inverse, of_key)
        if ctx.is_squashed:
            of_raw_beta = torch.empty_like(raw_beta)
            launch("fused_beta_sigmoid_bwd", (raw_beta, of_beta), (of_raw_beta,))
            of_beta = of_raw_beta
        return (
            of_query.to(query.dtype), of_key.to(key.dtype), of_value, of_gate.to(gate.dtype),
            of_beta.to(raw_beta.dtype), of_log, of_bias, of_first, None, None, None, None,
        )  # fmt: skip


def _kimi_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sums: torch.Tensor | None,
    gate: torch.Tensor,
    beta: torch.Tensor,
    gate_log: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    scores: torch.Tensor,
    matrix: torch.Tensor,
    initial_state: torch.Tensor | None,
    gradient: torch.Tensor,
    of_last: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Gradients of queries, keys, values, ``beta``, gates, the first state, and what gates are made of."""
    is_gated = sums is None
    sums = _summed(gate) if sums is None else sums
    sizes = _Sizes.of(key, value)
    taken, written, decayed, decayed_query = _kimi_written(key, value, beta, sums, matrix, query)
    assert decayed_query is not None
    states, new, _ = _states(decayed, taken, written, sums, initial_state, wants_last=False)
    of_scores = torch.empty_like(scores, dtype=torch.float32)
    of_new = torch.empty_like(gradient)
    launch("chunk_kda_bwd_dAv", (new, gradient, scores), (of_scores, of_new), flops=sizes.flops(by_values=2))
    of_states, of_first, of_new = _states_backward(
        decayed_query, decayed, taken, sums, gradient, of_new, initial_state, of_last
    )
    of_query, of_key = (torch.empty_like(sums) for _ in ("query", "key"))
    of_value, of_sums = torch.empty_like(value), torch.empty_like(sums)
    of_beta, of_matrix = (torch.empty_like(tensor, dtype=torch.float32) for tensor in (beta, matrix))
    flops = sizes.flops(of_state=3, by_keys=3, by_values=2, by_tokens=2)
    made = (of_query, of_key, of_value, of_sums, of_beta, of_matrix)
    launch(
        "chunk_kda_bwd_wy_dqkg",
        (query, key, value, new, sums, beta, matrix, states, gradient, of_states, of_new),
        made,
        flops=flops,
    )
    of_new = of_value
    within = (query, key, sums, beta, of_scores, of_matrix)
    of_query, of_key, of_beta, of_sums = _kimi_within_backward(sizes, within, of_query, of_key, of_beta, of_sums)
    del made
    of_query, of_key = _of_key_heads(of_query, sizes.key_heads), _of_key_heads(of_key, sizes.key_heads)
    of_gate, of_log, of_bias = _summed(of_sums), None, None
    if is_gated:
        of_gate, of_log, of_bias = _kimi_gate_backward(gate, gate_log, gate_bias, of_gate)
    return of_query, of_key, of_value, of_beta, of_gate, of_first, of_log, of_bias


def _kimi_gate_backward(
    gate: torch.Tensor, gate_log: torch.Tensor | None, gate_bias: torch.Tensor | None, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of what gates are made of; parts of the weights' are added up."""
    heads, keys = gate.shape[2:]
    rows = chunks(gate.shape[0] * gate.shape[1], _GATE_WIDTH)
    found = torch.empty_like(gate)
    of_log = None if gate_log is None else gate.new_empty(rows, heads, dtype=torch.float32)
    of_bias = None if gate_bias is None else gate.new_empty(rows, heads * keys, dtype=torch.float32)
    made = [tensor for tensor in (found, of_log, of_bias) if tensor is not None]
    launch("kda_gate_bwd", (gate, gate_log, gate_bias, gradient), made)
    found = found.view_as(gate)
    if of_log is not None and gate_log is not None:
        of_log = of_log.sum(0).view_as(gate_log).type_as(gate_log)
    if of_bias is not None and gate_bias is not None:
        of_bias = of_bias.sum(0).view_as(gate_bias).type_as(gate_bias)
    return found, of_log, of_bias


def _kimi_within(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores within chunks, the inverse of the keys' matrix, and what ``_kimi_written`` makes of it."""
    sizes = _Sizes.of(key, value)
    of_chunks = (sizes.samples, sizes.length, sizes.heads)
    scores, matrix = key.new_empty(*of_chunks, _CHUNK), key.new_zeros(*of_chunks, _CHUNK)
    diagonal = key.new_empty(*of_chunks, _PART, dtype=torch.float32)
    reads = (query, key, sums, beta)
    part_flops = 2 * sizes.samples * sizes.length * sizes.heads * _PART * sizes.keys
    launch("chunk_kda_fwd_intra_token_parallel", reads, (scores, diagonal), flops=2 * part_flops)
    flops = sizes.flops(by_keys=2, by_tokens=1)
    launch("chunk_kda_fwd_inter_solve", (*reads, diagonal), (scores, matrix), flops=flops)
    taken, written, decayed, _ = _kimi_written(key, value, beta, sums, matrix)
    return scores, matrix, taken, written, decayed


def _kimi_written(
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    sums: torch.Tensor,
    matrix: torch.Tensor,
    query: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As ``_written``, and the keys, and the queries if there are some, with the gates of their chunk."""
    sizes = _Sizes.of(key, value)
    shape = (sizes.samples, sizes.length, sizes.heads, sizes.keys)
    taken, written = key.new_empty(shape), torch.empty_like(value)
    decayed_query = None if query is None else key.new_empty(shape)
    decayed = key.new_empty(shape)
    made = [taken, written, decayed] if decayed_query is None else [taken, written, decayed, decayed_query]
    flops = sizes.flops(by_keys=1, by_values=1)
    launch("recompute_w_u_fwd_kda", (key, value, beta, sums, matrix, query), made, flops=flops)
    return taken, written, decayed, decayed_query


def _kimi_within_backward(
    sizes: _Sizes,
    reads: tuple[torch.Tensor, ...],
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_beta: torch.Tensor,
    of_sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients with what comes from within the chunks added, in new tensors."""
    more_query, more_key, more_sums = (torch.empty_like(tensor) for tensor in (of_query, of_key, of_sums))
    more_beta = of_beta.new_empty(chunks(sizes.keys, _GATE_WIDTH), *of_beta.shape)
    made = (more_query, more_key, more_sums, more_beta)
    flops = sizes.flops(by_keys=4)
    launch("chunk_kda_bwd_intra", (*reads, of_query, of_key, of_sums), made, flops=flops)
    return more_query, more_key, more_beta.sum(0).add_(of_beta), more_sums
