"""Who chooses what happens next in an abstract machine."""

from __future__ import annotations

import random
from collections.abc import Sequence

from protwin.shared.schema.schedule import Lane, TaskId
from tests.shared.abstract_machine import Adversary, Event


def at_random(seed: int) -> Adversary:
    """Any event with lanes of random speeds, so that some run far ahead of others."""
    generator = random.Random(seed)
    speed = {lane: generator.choice((0.01, 0.3, 1.0, 30.0)) for lane in Lane}

    def choose(events: Sequence[Event]) -> Event:
        return generator.choices(events, [speed[event.task.lane] for event in events])[0]

    return choose


def holding(task: TaskId, *, iteration: int) -> Adversary:
    """Keep the end of one task back until nothing else can happen: whatever may overtake it does."""

    def choose(events: Sequence[Event]) -> Event:
        for event in events:
            if event.is_start or event.task.id != task or event.iteration != iteration:
                return event
        return events[0]

    return choose


def preferring(*lanes: Lane) -> Adversary:
    """The lanes that are named first run as early as they may, the others as late as they may."""
    rank = {lane: place for place, lane in enumerate((*lanes, *(lane for lane in Lane if lane not in lanes)))}

    def choose(events: Sequence[Event]) -> Event:
        return min(events, key=lambda event: rank[event.task.lane])

    return choose
