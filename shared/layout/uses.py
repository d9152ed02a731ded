"""Who uses a parameter, by number.

[Note: Numbers of sections]
Sections are numbered in the order of forward: 0 is the prologue, 1 + b is block b, and n + 1, for n blocks, is the
epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schema.workload import BlockId, OuterSection, Parameter, Section, Workload


def section_number(section: Section, num_blocks: int) -> int:
    """The number of a section; see [Note: Numbers of sections]."""
    if section is OuterSection.PROLOGUE:
        return 0
    return num_blocks + 1 if section is OuterSection.EPILOGUE else 1 + int(section)


def numbered_section(number: int, num_blocks: int) -> Section:
    """The section of that number."""
    if number == 0:
        return OuterSection.PROLOGUE
    return OuterSection.EPILOGUE if number == num_blocks + 1 else BlockId(number - 1)


@dataclass(frozen=True, slots=True)
class NumberedUses:
    """The sections that use a parameter, by number, ascending."""

    forward: tuple[int, ...]
    """Those that run forward with it."""
    backward: tuple[int, ...]
    """Those that run backward, or forward again, with it."""
    gradient: int
    """The one whose backward is the last to add to its gradient."""

    @property
    def sections(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(sorted({*self.forward, *self.backward, self.gradient}))

    @property
    def is_alone(self) -> bool:
        """Whether one section alone uses it, forward and backward."""
        return self.forward == self.backward == (self.gradient,)


def numbered_uses(parameter: Parameter, num_blocks: int) -> NumberedUses:
    """The uses of ``parameter`` in a model of so many blocks.

    Forward and backward of the epilogue follow each other: what one of them needs stays for both.
    """
    last = num_blocks + 1
    if parameter.block is not None:
        block = 1 + parameter.block
        return NumberedUses((block,), (block,), block)
    if parameter.uses is None:
        return NumberedUses((0, last), (0, last), 0)
    forward, backward = (
        {section_number(_section(section), num_blocks) for section in sections}
        for sections in (parameter.uses.forward, parameter.uses.backward)
    )
    at_the_turn = {last} & (forward | backward)
    gradient = section_number(_section(parameter.uses.gradient), num_blocks)
    return NumberedUses(tuple(sorted(forward | at_the_turn)), tuple(sorted(backward | at_the_turn)), gradient)


def parameters_of_blocks(workload: Workload) -> list[list[Parameter]]:
    """What each block alone uses, and what lies in its module, which may run several times as a block each time.

    What something outside the blocks uses as well is left out.
    """
    found: list[list[Parameter]] = [[] for _ in workload.blocks]
    for parameter in workload.parameters:
        if parameter.block is not None:
            found[parameter.block].append(parameter)
        elif parameter.uses is not None and not any(isinstance(user, OuterSection) for user in parameter.uses.forward):
            names = (parameter.name, *parameter.aliases)
            for of, block in zip(found, workload.blocks, strict=True):
                if any(name.startswith(f"{block.name}.") for name in names):
                    of.append(parameter)
    return found


def _section(section: int | OuterSection) -> Section:
    return section if isinstance(section, OuterSection) else BlockId(section)
