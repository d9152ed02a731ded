"""How many steps a number of tokens takes."""

from __future__ import annotations

from dataclasses import dataclass

from ...shared.basics.errors import PlanError


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """A number of tokens in terms of batches and steps."""

    num_tokens: int
    """As asked for."""
    sequence_length: int
    """Tokens of one sample."""
    micro_batch_size: int
    """Samples of one forward and backward."""
    micro_batches: int = 1
    """Forwards and backwards per step."""

    def __post_init__(self) -> None:
        """Raise PlanError unless all of them are at least 1."""
        for field in ("num_tokens", "sequence_length", "micro_batch_size", "micro_batches"):
            if getattr(self, field) < 1:
                raise PlanError(f"{field} = {getattr(self, field)}, but training takes at least 1.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all micro-batches of a step."""
        return self.sequence_length * self.micro_batch_size * self.micro_batches

    @property
    def num_steps(self) -> int:
        """Steps that go through all tokens, the last one whole."""
        return -(-self.num_tokens // self.tokens_per_step)

    @property
    def num_batches(self) -> int:
        """Micro-batches of all steps."""
        return self.num_steps * self.micro_batches

    def warmup_steps(self, warmup_frac: float) -> int:
        """At least 1 step; otherwise this part of the steps that ``num_tokens`` fills, rounded to even.

        Raises PlanError if the part is not from 0 to 1.
        """
        if not 0 <= warmup_frac <= 1:
            raise PlanError(f"a warm-up of {warmup_frac} of all steps is impossible. Give a part from 0 to 1.")
        return max(1, round(warmup_frac * max(1, self.num_tokens // self.tokens_per_step)))
