"""Which of a step's states are worth the ones that would go for them?"""

from collections.abc import Callable

from cache.eviction import EvictionPolicy, Kind


def admitted(
    points: dict[int, Kind],
    *,
    base: int,
    policy: EvictionPolicy,
    room: int,
    num_free: int,
    allocate: Callable[[], int | None],
) -> dict[int, int]:
    """Boundary -> slot of the states to save, out of `points`; their slots are allocated.

    base: the next shallower boundary that has a state. room: slots that may be taken, `num_free` of
    them without evicting. A policy that is not selective takes the deepest ones: they are worth
    most. With a selective one the new states and the old ones compete: what is worth least goes,
    be it new or old, until all fit; a new state is worth more when the one below it is passed over.
    """
    chosen = sorted(points)
    if not policy.selective:
        del chosen[: max(0, len(chosen) - max(0, room))]
    slots = [_taken(allocate) for _ in range(min(len(chosen), num_free, room))]

    def worth(index: int) -> float:
        above = chosen[index - 1] if index else base
        return policy.worth(chosen[index], above, points[chosen[index]])

    while len(slots) < len(chosen):
        worst = min(range(len(chosen)), key=worth) if policy.selective else 0
        scarce = len(chosen) > room
        if policy.selective and (scarce or worth(worst) <= policy.least_worth()):
            del chosen[worst]
        else:
            slots.append(_taken(allocate))
    return dict(zip(reversed(chosen), slots, strict=True))


def _taken(allocate: Callable[[], int | None]) -> int:
    slot = allocate()
    assert slot is not None, "room was found, but no slot"
    return slot
