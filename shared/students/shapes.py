"""The shapes of a teacher's blocks and of its student's, from the configuration and the student's file alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ..basics.errors import WorkloadError
from .block_shape import BlockShape, has_learnt_part
from .families import Family, family_of
from .student import SIZES_OF, BlockOverrides, FfnInitialization, LinearInitialization, Student, Subblock

_EXPERT_FIELDS: Final = ("num_local_experts", "num_experts_per_tok")


def teacher_shapes(configuration: Mapping[str, Any], *, name: str = "the teacher") -> tuple[BlockShape, ...]:
    """The blocks of a model, by its configuration (``config.json`` with all of its sizes).

    Raises WorkloadError if no students are made of its family, or if a size is missing.
    """
    family = family_of(configuration, name)
    missing = [
        field
        for field in (family.num_blocks, family.hidden_size, family.num_heads, family.num_experts)
        if field is not None and configuration.get(field) is None
    ]
    if missing:
        raise WorkloadError(f"the configuration of {name} has no {missing[0]}. State it.")
    return tuple(_teacher_block(configuration, family, block) for block in range(configuration[family.num_blocks]))


def _teacher_block(configuration: Mapping[str, Any], family: Family, block: int) -> BlockShape:
    num_heads = configuration[family.num_heads]
    has_experts = family.has_experts(configuration, block)
    num_key_value_heads = configuration.get(family.num_key_value_heads) if family.num_key_value_heads else None
    return BlockShape(
        is_attention=family.is_attention(configuration, block),
        # GPT-2 alone may leave it out.
        intermediate_size=configuration.get(family.intermediate_size) or 4 * configuration[family.hidden_size],
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads or num_heads,
        num_local_experts=configuration[family.num_experts] if has_experts and family.num_experts else None,
        num_experts_per_tok=configuration.get("num_experts_per_tok", 2) if has_experts else None,
    )


def student_shapes(
    student: Student, configuration: Mapping[str, Any], *, name: str = "the teacher"
) -> tuple[BlockShape, ...]:
    """The blocks of the student of a teacher with this configuration.

    Raises WorkloadError if the student names blocks or parts that the teacher does not have, sizes that its own cannot
    be brought to, or if nothing of it would be learnt.
    """
    family, teacher = family_of(configuration, name), teacher_shapes(configuration, name=name)
    named = dict(student.named_blocks)
    beyond = [block for block in named if block >= len(teacher)]
    if beyond:
        raise WorkloadError(
            f"the student names block {min(beyond)}, but {name} has {len(teacher)} blocks, from 0 to "
            f"{len(teacher) - 1}. A student has as many blocks as its teacher."
        )
    _check_family_has(family, student, name)
    _check_somewhere(student.all, teacher, name)
    shapes = tuple(
        _student_block(student, family, shape, named.get(block), f"block {block}")
        for block, shape in enumerate(teacher)
    )
    if not any(has_learnt_part(student.keys_to_learn, shape) for shape in shapes):
        raise WorkloadError(
            f"nothing of the student is learnt: none of its blocks has a part of keys_to_learn = "
            f"{', '.join(student.keys_to_learn)}. Name keys of parts that its blocks have."
        )
    return shapes


def _check_family_has(family: Family, student: Student, name: str) -> None:
    """Raise WorkloadError for a size that the whole family does not have."""
    for overrides in (student.all, *student.block.values()):
        if family.num_key_value_heads is None and overrides.num_key_value_heads is not None:
            raise WorkloadError(
                f"num_key_value_heads cannot differ: every head of {name} has a key and a value of its own, and its "
                f"family knows no other way. Leave it out."
            )


def _check_somewhere(overrides: BlockOverrides, teacher: tuple[BlockShape, ...], name: str) -> None:
    """Raise WorkloadError if ``[all]`` states something that no block of the teacher has."""
    for field in overrides.stated:
        if not any(_has(shape, field) for shape in teacher):
            raise WorkloadError(f"[all] states {field}, but no block of {name} has {_part(field)}. Leave it out.")


def _has(shape: BlockShape, field: str) -> bool:
    if field in _EXPERT_FIELDS:
        return shape.num_local_experts is not None
    return shape.is_attention if field in ("num_key_value_heads", "attention") else True


def _part(field: str) -> str:
    return "experts" if field in _EXPERT_FIELDS else "attention"


def _student_block(
    student: Student, family: Family, teacher: BlockShape, own: BlockOverrides | None, where: str
) -> BlockShape:
    for field in own.stated if own is not None else ():
        if not _has(teacher, field):
            raise WorkloadError(
                f"{where} of the student states {field}, but its teacher has no {_part(field)} there. Leave it out."
            )
    stated = {field: value for field, value in student.all.stated.items() if _has(teacher, field)}
    shape = replace(teacher, **(stated | (own.stated if own is not None else {})))
    for part, sizes in SIZES_OF.items():
        kind = getattr(shape, part)
        vain = [size for size in sizes if own is not None and size in own.stated and kind is not Subblock.FULL]
        if vain:
            raise WorkloadError(
                f"{where} of the student states {vain[0]}, but [all] has {part} = '{kind}'. State {part} = 'full' for "
                f"that block too, or leave {vain[0]} out."
            )
    for complaint in _complaints(student, family, teacher, shape):
        raise WorkloadError(f"{where} of the student {complaint}")
    # Equal blocks are equal shapes: what is not there has no size of its own.
    if shape.ffn is not Subblock.FULL:
        shape = replace(shape, **{field: getattr(teacher, field) for field in SIZES_OF["ffn"]})
    if shape.attention is not Subblock.FULL:
        shape = replace(shape, num_key_value_heads=teacher.num_key_value_heads)
    return shape


def _complaints(student: Student, family: Family, teacher: BlockShape, shape: BlockShape) -> Iterator[str]:
    """Why a student's block cannot be made of the teacher's."""
    width, own_width = shape.intermediate_size, teacher.intermediate_size
    if width > own_width:
        yield f"has intermediate_size = {width}, but its teacher only {own_width}. A student's FFN is not wider."
    if width != own_width and student.initialization.ffn is FfnInitialization.COPY and shape.ffn is Subblock.FULL:
        yield (
            f"has intermediate_size = {width} and its teacher {own_width}, which initialization.ffn = 'copy' cannot "
            f"bring together. Choose 'truncate' or 'prune', or leave intermediate_size out."
        )
    is_from_teacher = student.initialization.linear is LinearInitialization.FROM_TEACHER
    if shape.ffn is Subblock.LINEAR and is_from_teacher and teacher.num_local_experts is not None:
        yield (
            "has ffn = 'linear', but no one linear map follows from its teacher's experts. Choose "
            "initialization.linear = 'random', or fewer experts."
        )
    heads, own_heads = shape.num_key_value_heads, teacher.num_key_value_heads
    if own_heads % heads:
        yield (
            f"has num_key_value_heads = {heads}, which does not divide its teacher's {own_heads}. Each stands for a "
            f"group of the teacher's: choose one of {', '.join(map(str, _divisors(own_heads)))}."
        )
    experts, chosen = shape.num_local_experts, shape.num_experts_per_tok
    if experts is not None and chosen is not None and teacher.num_local_experts is not None:
        if experts > teacher.num_local_experts:
            yield f"has num_local_experts = {experts}, but its teacher only {teacher.num_local_experts}. Lower it."
        if experts == 1 and family.expert_period is not None:
            yield "has num_local_experts = 1, which its family takes for an FFN without experts. Keep 2 or more."
        if chosen > experts:
            yield (
                f"sends each token through num_experts_per_tok = {chosen} experts but has num_local_experts = "
                f"{experts}. Lower num_experts_per_tok too."
            )


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def size_fields(family: Family, shape: BlockShape) -> dict[str, int]:
    """The fields of a configuration that make a block of its family have the sizes of ``shape``."""
    fields = {family.intermediate_size: shape.intermediate_size}
    if family.num_key_value_heads is not None and shape.is_attention:
        fields[family.num_key_value_heads] = shape.num_key_value_heads
    if family.num_experts is not None and shape.num_local_experts is not None:
        fields[family.num_experts] = shape.num_local_experts
        if shape.num_experts_per_tok is not None:
            fields["num_experts_per_tok"] = shape.num_experts_per_tok
    return fields


def uniform_sizes(family: Family, shapes: Sequence[BlockShape]) -> dict[str, int] | None:
    """The fields of one configuration for all blocks; None if blocks differ, or transformers has no such block."""
    sizes: dict[str, int] = {}
    for shape in shapes:
        fields = size_fields(family, shape)
        if not shape.is_plain or any(sizes.get(field, value) != value for field, value in fields.items()):
            return None
        sizes |= fields
    return sizes
