"""The rule by which a spare gives up its stage, so that the spares can take over any stage.

A spare is a worker that is in no pipeline while pipelines serve. A worker that did not answer for a
while, and was replaced, still holds its stage when it answers again. Then it is a spare for this
stage only: before it could load another one, its process would have to start again, and clients
would wait for that. So such a spare is recalled from its stage in time: its process ends, and
starts again without a stage. No spare is recalled if a spare holds no stage, or if the spares
together hold all stages. A spare without a stage has started its processes, and only needs to load
weights.

There is no hurry. When a pipeline has just lost a worker, its other members are spares, and they
are needed with their stages as soon as the lost worker is back. So a spare is recalled only if this
rule has named it for `SETTLE_S` without interruption.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from orcinus.v1 import worker_pb2

from services.scheduler.pipeline.fit import Traits, traits_of
from services.scheduler.pipeline.muster import Offer, Presence, faults_of

SETTLE_S = 60.0
"""Seconds for which the rule must name the same spare, without interruption, before it is recalled.
A pod that takes the place of a lost one, or a worker that was recalled, is usually there again by
then."""


class SurplusWatch:
    """Measures for how long `to_recall` has returned the same spare worker."""

    def __init__(self, clock: Callable[[], float], settle_s: float = SETTLE_S) -> None:
        self._clock = clock
        self._settle_s = settle_s
        self._found: tuple[str, str] | None = None  # address and process
        self._since = 0.0

    def begin_anew(self) -> None:
        """Starts the measurement again from zero. Called when a pipeline was lost."""
        self._found = None

    def settled(self, surplus: Offer | None) -> Offer | None:
        """Returns `surplus`, the present result of `to_recall`, if it has been the same spare in
        all calls for at least `settle_s` seconds. Returns None otherwise."""
        found = None if surplus is None else (surplus.address, surplus.answer.process)
        if found != self._found:
            self._found, self._since = found, self._clock()
        return surplus if self._clock() - self._since >= self._settle_s else None


def to_recall(
    offers: Sequence[Offer],
    n_stages: int,
    *,
    serving: Collection[Traits],
    taken: Collection[str] = (),
) -> Offer | None:
    """Returns the spare worker that must give up its stage. Returns None if there is no need, or if
    that is not certain yet, because a spare loads, does not answer or starts its ranks. A worker
    that starts its ranks answers without traits.

    `offers` are the workers that are in no pipeline. `serving` are the traits of the workers in
    pipelines: a spare can only take over a stage of a pipeline with its own traits. `taken` are the
    names of the processes of workers in pipelines. A worker that no pipeline can use is never
    recalled, and neither is a member of a pipeline that is listed again under another address.
    """
    faults = faults_of(offers, n_stages, taken)
    sound = [it for it in offers if not (it.is_leaving or it.address in faults)]
    if not all(it.answer.traits for it in sound):
        return None
    for traits in serving:
        spares = [it for it in sound if traits_of(it.answer) == traits]
        if found := _to_recall(spares, n_stages):
            return found
    return None


def _to_recall(spares: Sequence[Offer], n_stages: int) -> Offer | None:
    if not all(map(_is_settled_holder, spares)):
        return None
    n_holders = Counter(it.answer.stage_index for it in spares if _is_of_use(it, n_stages))
    movable = [it for it in spares if not it.answer.is_fixed]
    if len(n_holders) == n_stages or not movable:
        return None
    # A worker of no use comes first, and then a worker whose stage another spare holds, too.
    return max(
        movable,
        key=lambda it: (not _is_of_use(it, n_stages), n_holders[it.answer.stage_index]),
    )


def _is_settled_holder(offer: Offer) -> bool:
    """Returns whether a worker answers and holds a stage that it has loaded."""
    return (
        offer.presence is Presence.HERE
        and not offer.is_serving
        and offer.answer.state == worker_pb2.WORKER_STATE_READY
    )


def _is_of_use(offer: Offer, n_stages: int) -> bool:
    """Returns whether a worker holds a stage of a pipeline with `n_stages` stages."""
    return offer.answer.n_stages == n_stages
