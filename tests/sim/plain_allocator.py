"""The allocator's rules once more, as an oracle: nothing but the addresses in use, and gaps found by looking.

A free block is a stretch between blocks in use of one segment: the allocator merges neighbours at once, so there are
never two side by side.  With expandable segments the stretches run over pages that are mapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

MIB = 2**20
SPACE = 20 * MIB * 2**24


@dataclass
class PlainSegment:
    begin: int
    size: int
    stream: int
    is_small: bool
    is_expandable: bool = False
    pages: set[int] = field(default_factory=set)
    """Of an expandable segment: numbers of mapped pages."""

    @property
    def page(self) -> int:
        return 2 * MIB if self.is_small else 20 * MIB


class PlainAllocator:
    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.expandable = expandable
        self.limit = limit
        self.segments: list[PlainSegment] = []
        self.used: dict[int, int] = {}
        """Size of every block in use, by address."""
        self.next_address = 2 * MIB

    # -- what is there -------------------------------------------------------------------------------------------

    def reserved(self) -> int:
        return sum(len(s.pages) * s.page if s.is_expandable else s.size for s in self.segments)

    def used_in(self, segment: PlainSegment) -> list[tuple[int, int]]:
        inside = [(a, n) for a, n in self.used.items() if segment.begin <= a < segment.begin + segment.size]
        return sorted(inside)

    def unused_runs(self, segment: PlainSegment) -> list[tuple[int, int]]:
        """(begin, end) between blocks in use, mapped or not."""
        at, runs = segment.begin, []
        for address, size in [*self.used_in(segment), (segment.begin + segment.size, 0)]:
            if address > at:
                runs.append((at, address))
            at = address + size
        return runs

    def free_runs(self, segment: PlainSegment) -> list[tuple[int, int, int]]:
        """(begin, end, size that it could grow to) of stretches that memory lies behind."""
        if not segment.is_expandable:
            return [(a, b, b - a) for a, b in self.unused_runs(segment)]
        found = []
        for begin, end in self.unused_runs(segment):
            for first, last, is_mapped, beyond in self.stretches(segment, begin, end):
                if is_mapped:
                    found.append((first, last, last - first + beyond))
        return found

    def stretches(self, segment: PlainSegment, begin: int, end: int) -> list[tuple[int, int, bool, int]]:
        """(begin, end, whether mapped, bytes of the unmapped stretch right behind it) within an unused run."""
        cuts = {begin, end}
        for page in segment.pages:
            for edge in (segment.begin + page * segment.page, segment.begin + (page + 1) * segment.page):
                if begin < edge < end:
                    cuts.add(edge)
        edges = sorted(cuts)
        parts: list[tuple[int, int, bool]] = []
        for first, last in pairwise(edges):
            mapped = (first - segment.begin) // segment.page in segment.pages
            if parts and parts[-1][2] == mapped:
                parts[-1] = (parts[-1][0], last, mapped)
            else:
                parts.append((first, last, mapped))
        following = [*parts[1:], (0, 0, True)]
        return [
            (first, last, mapped, 0 if nxt[2] else nxt[1] - nxt[0])
            for (first, last, mapped), nxt in zip(parts, following, strict=True)
        ]

    # -- requests ------------------------------------------------------------------------------------------------

    def rounded(self, size: int) -> int:
        return max(512, (size + 511) // 512 * 512)

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """The address; None if there is no memory left."""
        size = self.rounded(size)
        small = size <= MIB
        found = self.best_gap(size, stream, small)
        if found is None:
            found = self.fresh(size, stream, small)
        if found is None:
            self.empty_cache()
            found = self.fresh(size, stream, small)
        if found is None:
            return None
        begin, end = found
        rest = end - begin - size
        is_split = rest >= 512 if small or self.expandable else rest > MIB
        self.used[begin] = size if is_split else end - begin
        return begin

    def best_gap(self, size: int, stream: int, small: bool) -> tuple[int, int] | None:
        runs = sorted(
            (end - begin, begin, end, grown)
            for s in self.segments
            if s.stream == stream and s.is_small == small
            for begin, end, grown in self.free_runs(s)
        )
        fitting = [run for run in runs if run[0] >= size]
        if not fitting:
            return None
        best = fitting[0]
        if self.expandable:
            for other in fitting[1:]:
                if other[3] >= best[3]:
                    break
                best = other
        return best[1], best[2]

    def fresh(self, size: int, stream: int, small: bool) -> tuple[int, int] | None:
        if self.expandable:
            return self.mapped(size, stream, small)
        asked = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        if self.limit is not None and self.reserved() + asked > self.limit:
            return None
        segment = PlainSegment(self.next_address, asked, stream, small)
        self.next_address += asked
        self.segments.append(segment)
        return segment.begin, segment.begin + asked

    def mapped(self, size: int, stream: int, small: bool) -> tuple[int, int] | None:
        segment = next((s for s in self.segments if s.stream == stream and s.is_small == small), None)
        if segment is None:
            page = 2 * MIB if small else 20 * MIB
            begin = (self.next_address + page - 1) // page * page
            self.next_address += SPACE + page
            segment = PlainSegment(begin, SPACE, stream, small, is_expandable=True)
            self.segments.append(segment)
        for begin, end in self.unused_runs(segment):
            parts = self.stretches(segment, begin, end)
            if end - begin < size or all(part[2] for part in parts):
                continue
            first = (begin - segment.begin) // segment.page
            last = (begin + size - 1 - segment.begin) // segment.page
            for missing in self.unmapped_runs(segment, first, last):
                # One call of the driver: all of its pages or none.
                if self.limit is not None and self.reserved() + len(missing) * segment.page > self.limit:
                    return None
                segment.pages.update(missing)
            return next((a, b) for a, b, _ in self.free_runs(segment) if a == begin)
        raise AssertionError("address space is used up")

    @staticmethod
    def unmapped_runs(segment: PlainSegment, first: int, last: int) -> list[list[int]]:
        runs: list[list[int]] = []
        for number in range(first, last + 1):
            if number not in segment.pages:
                if runs and runs[-1][-1] == number - 1:
                    runs[-1].append(number)
                else:
                    runs.append([number])
        return runs

    # -- giving back ---------------------------------------------------------------------------------------------

    def free(self, address: int) -> None:
        del self.used[address]

    def empty_cache(self) -> None:
        for segment in self.segments:
            if segment.is_expandable:
                for begin, end, _ in self.free_runs(segment):
                    for number in list(segment.pages):
                        edge = segment.begin + number * segment.page
                        if begin <= edge and edge + segment.page <= end:
                            segment.pages.discard(number)
        self.segments = [s for s in self.segments if s.is_expandable or self.used_in(s)]
