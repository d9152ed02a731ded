"""What the parameters of a student's blocks begin with, each computed from its teacher's when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...shared.basics.errors import WorkloadError
from ...shared.students.block_shape import BlockShape
from ...shared.students.families import Family
from ...shared.students.student import (
    ExpertInitialization,
    FfnInitialization,
    Initialization,
    KeyValueHeadInitialization,
    LinearInitialization,
    Subblock,
)
from .activation_statistics import ActivationStatistics
from .ffn_parts import CHANNEL_DIMS, EXPERT_CHANNEL_DIMS
from .teacher_values import TeacherValues

_KEY_VALUE_MAPS: Final = ("k_proj", "v_proj")


@dataclass(frozen=True)
class BlockValues:
    """Those of one block."""

    number: int
    family: Family
    teacher: BlockShape
    student: BlockShape
    initialization: Initialization
    statistics: ActivationStatistics | None
    path: str
    """Of the block in the model."""
    values: TeacherValues

    def value(self, parameter: str) -> torch.Tensor | None:
        """What ``parameter``, by its path within the block, begins with; None: a random value.

        A tensor of its own, in the teacher's element type.  Raises WorkloadError if statistics are needed and missing.
        """
        part, _, rest = parameter.partition(".")
        if part == self.family.ffn and self.student.ffn is Subblock.LINEAR:
            return self._linear_ffn(rest)
        if part == self.family.attention and self.student.attention is Subblock.LINEAR:
            return self._linear_attention(rest)
        found = self._read(parameter)
        if part == self.family.attention and self.student.num_key_value_heads != self.teacher.num_key_value_heads:
            found = self._key_value_heads(found, rest)
        if part == self.family.ffn:
            found = self._experts(found, rest)
            found = self._channels(found, rest)
        return found.detach().clone(memory_format=torch.contiguous_format)

    def _read(self, parameter: str) -> torch.Tensor:
        return self.values(f"{self.path}.{parameter}")

    def unused(self, parameter: str) -> bool:
        """Whether the teacher's ``parameter`` has no successor, since what it is part of is not there."""
        part = parameter.partition(".")[0]
        if part in (self.family.ffn, self.family.ffn_norm):
            kind, own = self.student.ffn, self.family.ffn
        elif part in (self.family.attention, self.family.attention_norm) and self.teacher.is_attention:
            kind, own = self.student.attention, self.family.attention
        else:
            return False
        return kind is Subblock.ABSENT or (kind is Subblock.LINEAR and part == own)

    # -- key-value heads ----------------------------------------------------------------------------------------------

    def _key_value_heads(self, values: torch.Tensor, path: str) -> torch.Tensor:
        if path.partition(".")[0] not in _KEY_VALUE_MAPS:
            return values
        heads, num_kept = self.teacher.num_key_value_heads, self.student.num_key_value_heads
        # (kept, of its group, head_dim, ...)
        grouped = values.reshape(num_kept, heads // num_kept, -1, *values.shape[1:])
        if self.initialization.key_value_heads is KeyValueHeadInitialization.FIRST:
            return grouped[:, 0].flatten(0, 1)
        return grouped.float().mean(dim=1).flatten(0, 1).to(values.dtype)

    # -- experts and channels -----------------------------------------------------------------------------------------

    def _experts(self, values: torch.Tensor, path: str) -> torch.Tensor:
        if self.student.num_local_experts == self.teacher.num_local_experts:
            return values
        is_of_experts = path in EXPERT_CHANNEL_DIMS or path.partition(".")[0] == self.family.router
        return values.index_select(0, self._kept_experts().to(values.device)) if is_of_experts else values

    def _kept_experts(self) -> torch.Tensor:
        """Ascending, (experts of the student,)."""
        num_kept = self.student.num_local_experts or 0
        if num_kept == self.teacher.num_local_experts or self.initialization.experts is ExpertInitialization.FIRST:
            return torch.arange(num_kept)
        return _largest(self._measured("experts", "initialization.experts = 'router'", "'first'"), num_kept)

    def _channels(self, values: torch.Tensor, path: str) -> torch.Tensor:
        width = self.student.intermediate_size
        dims = CHANNEL_DIMS if self.teacher.num_local_experts is None else EXPERT_CHANNEL_DIMS
        if width == self.teacher.intermediate_size or path not in dims:
            return values
        kept = self._kept_channels().to(values.device)
        if self.teacher.num_local_experts is None:
            return values.index_select(dims[path], kept)
        if path == "experts.gate_up_proj":
            kept = torch.cat((kept, kept + self.teacher.intermediate_size), dim=1)
        index = kept[:, :, None] if dims[path] == 1 else kept[:, None, :]
        others = [-1 if dim in (0, dims[path]) else size for dim, size in enumerate(values.shape)]
        return values.gather(dims[path], index.expand(others))

    def _kept_channels(self) -> torch.Tensor:
        """Ascending, (width,); with experts (experts of the student, width)."""
        width = self.student.intermediate_size
        if self.initialization.ffn is FfnInitialization.PRUNE:
            measured = self._measured("channels", "initialization.ffn = 'prune'", "'truncate'")
            return _largest(measured if measured.dim() == 1 else measured[self._kept_experts()], width)
        first = torch.arange(width)
        return first if self.student.num_local_experts is None else first.expand(self.student.num_local_experts, width)

    def _measured(self, what: str, mode: str, other: str) -> torch.Tensor:
        if self.statistics is None:
            raise WorkloadError(
                f"{mode} needs statistics of the teacher's activations for block {self.number}, and none are given. "
                f"Collect them with activation_statistics(teacher, batches), or choose {other}."
            )
        found: Mapping[int, torch.Tensor] = getattr(self.statistics, what)
        expected: tuple[int, ...] = (
            (self.teacher.num_local_experts,) if self.teacher.num_local_experts is not None else ()
        )
        expected += (self.teacher.intermediate_size,) if what == "channels" else ()
        if self.number not in found or found[self.number].shape != expected:
            raise WorkloadError(
                f"the statistics given are of another model: block {self.number} of the teacher has {what} of shape "
                f"{list(expected)}. Collect them from this teacher."
            )
        return found[self.number]

    # -- linear maps --------------------------------------------------------------------------------------------------

    def _linear_ffn(self, rest: str) -> torch.Tensor | None:
        if self.initialization.linear is LinearInitialization.RANDOM:
            return None
        up, down = self._map("ffn", "c_fc", "up_proj"), self._map("ffn", "c_proj", "down_proj")
        return _chained(up, down, rest)

    def _linear_attention(self, rest: str) -> torch.Tensor | None:
        """Attention of every token to itself alone."""
        if self.initialization.linear is LinearInitialization.RANDOM:
            return None
        value, out = self._map("attention", "c_attn", "v_proj"), self._map("attention", "c_proj", "o_proj")
        joined = value.weight.shape[0] // self._num_joined()
        weight, bias = (one[-joined:] if one is not None else None for one in (value.weight, value.bias))
        value = _Map(self._repeated(weight), self._repeated(bias) if bias is not None else None)
        return _chained(value, out, rest)

    def _num_joined(self) -> int:
        """Maps whose rows follow each other in one: queries, keys, values, or values alone."""
        return 3 if self._has("attention", "c_attn.weight") else 1

    def _repeated(self, values: Any) -> torch.Tensor:
        """Of key-value heads, for every head of queries."""
        num_heads, num_kept = self.teacher.num_heads, self.teacher.num_key_value_heads
        heads = values.unflatten(0, (num_kept, -1))
        repeated: torch.Tensor = heads.repeat_interleave(num_heads // num_kept, dim=0).flatten(0, 1)
        return repeated

    def _has(self, part: str, path: str) -> bool:
        return f"{self.path}.{getattr(self.family, part)}.{path}" in self.values.names

    def _map(self, part: str, transposed: str, name: str) -> _Map:
        """A linear map of the teacher's; ``transposed`` is its name where its weight is (inputs, outputs)."""
        is_transposed = self._has(part, f"{transposed}.weight")
        path = f"{getattr(self.family, part)}.{transposed if is_transposed else name}"
        weight = self._read(f"{path}.weight")
        bias = self._read(f"{path}.bias") if self._has(part, f"{path.rpartition('.')[2]}.bias") else None
        return _Map(weight.T if is_transposed else weight, bias)


@dataclass(frozen=True, slots=True)
class _Map:
    """x -> weight x + bias."""

    weight: Any
    """(outputs, inputs)."""
    bias: Any


def _chained(first: _Map, second: _Map, rest: str) -> torch.Tensor:
    """Weight or bias of the second map after the first, computed in float32."""
    if rest == "weight":
        product: torch.Tensor = second.weight.float() @ first.weight.float()
    else:
        product = torch.zeros(second.weight.shape[0], device=second.weight.device)
        if first.bias is not None:
            product = second.weight.float() @ first.bias.float()
        if second.bias is not None:
            product = product + second.bias.float()
    return product.to(second.weight.dtype)


def _largest(measured: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Ascending indices of the largest figures along the last dim; of equal ones the first."""
    order = measured.argsort(dim=-1, descending=True, stable=True)
    return order[..., :num_kept].sort(dim=-1).values
