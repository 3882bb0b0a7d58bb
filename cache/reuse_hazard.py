"""How soon is a saved state used again? Learnt from what happens to all of them, class by class."""

from collections.abc import Callable, Hashable, Iterable
from math import exp, log2

NUM_AGES = 80
"""Buckets of ages, two an octave: 0 is [0, 1) requests, 1 is [1, 1.41), the last one never ends."""

AGE_EDGES = [0.0, *(2 ** (i / 2) for i in range(NUM_AGES))]
_WIDTHS = [AGE_EDGES[i + 1] - AGE_EDGES[i] for i in range(NUM_AGES)]
_PRIOR = 0.025  # events per bucket, on half a state's exposure: a hazard of 1/20 over the age


def age_bucket(age: int) -> int:
    """The bucket of an age in requests."""
    return 0 if age < 1 else min(NUM_AGES - 1, 1 + int(2 * log2(age)))


class ReuseHazard:
    """Events and exposure by age, and the rank that follows.

    Hazard of an age: reuses at that age / requests that states spent at that age. Before anything
    is known it falls with 1/age, as LRU believes. Rank of an age: the largest ratio, over all
    horizons, of the probability that the state is used within the horizon to the expected time that
    it occupies its slot until then (Gittins' index of a job that ends with its first use; Aalto,
    Ayesta, Righter, "On the Gittins index in the M/G/1 queue", 2009). Uses per request, so that
    classes and ages can be compared.
    """

    def __init__(self) -> None:
        self._uses = [0.0] * NUM_AGES
        self._exposure = [0.0] * NUM_AGES

    def observe(self, age: int, *, used: bool) -> None:
        """A state of this class reached this age; there it was used, or stopped being observed."""
        last = age_bucket(age)
        for bucket in range(last):
            self._exposure[bucket] += _WIDTHS[bucket]
        self._exposure[last] += age - AGE_EDGES[last]
        self._uses[last] += used

    def ranks(self, ages_of_others: Iterable[int]) -> list[float]:
        """Rank by age bucket. ages_of_others: of the states still observed and not used so far."""
        exposure = list(self._exposure)
        here = [0] * NUM_AGES
        for age in ages_of_others:
            bucket = age_bucket(age)
            here[bucket] += 1
            exposure[bucket] += age - AGE_EDGES[bucket]
        older = 0
        for bucket in range(NUM_AGES - 1, -1, -1):
            exposure[bucket] += older * _WIDTHS[bucket]
            older += here[bucket]
        return _gittins([self._hazard(bucket, exposure[bucket]) for bucket in range(NUM_AGES)])

    def _hazard(self, bucket: int, exposure: float) -> float:
        prior_exposure = 0.5 * (AGE_EDGES[bucket] + _WIDTHS[bucket] / 2 + 1)
        return (self._uses[bucket] + _PRIOR) / (exposure + prior_exposure)


def _gittins(hazards: list[float]) -> list[float]:
    """Of a hazard that is constant in each bucket."""
    survival = [exp(-hazard * width) for hazard, width in zip(hazards, _WIDTHS, strict=True)]
    time = [(1 - stays) / hazard for stays, hazard in zip(survival, hazards, strict=True)]
    ranks = []
    for first in range(NUM_AGES):
        alive, used, spent, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(first, NUM_AGES):
            spent += alive * time[bucket]
            used += alive * (1 - survival[bucket])
            alive *= survival[bucket]
            best = max(best, used / spent)
            if alive < 1e-9:
                break
        ranks.append(best)
    return ranks


class LearntRanks:
    """The ranks of all classes; `refresh` computes them again, from what was seen by then."""

    def __init__(self, classes: Iterable[Hashable]) -> None:
        self.hazards = {class_: ReuseHazard() for class_ in classes}
        self.refresh(lambda _: ())

    def refresh(self, ages_of: Callable[[Hashable], Iterable[int]]) -> None:
        self._ranks = {class_: h.ranks(ages_of(class_)) for class_, h in self.hazards.items()}

    def rank(self, class_: Hashable, bucket: int) -> float:
        """Expected uses a request of a state of this class and age."""
        return self._ranks[class_][bucket]
