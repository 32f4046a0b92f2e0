"""This module owns the engine's status line: what it did since the last one, while it is busy. A quiet engine says
nothing.
"""

from __future__ import annotations

import logging

from radixlm.schedule.scheduler import Scheduler

log = logging.getLogger("radixlm.engine")


class StatusLog:
    """
    Args:
        interval: seconds between two lines; 0 for none.
    """

    def __init__(self, scheduler: Scheduler, interval: float) -> None:
        self._scheduler = scheduler
        self._interval = interval
        self._last = 0.0
        self._seen = (0, 0, 0, 0)

    def step(self, now: float) -> None:
        """A step was done."""
        if not self._interval:
            return
        seconds = now - self._last
        if seconds < self._interval:
            return
        totals = self._scheduler.counters
        figures = (totals.prompt_tokens, totals.cached_tokens, totals.generation_tokens, totals.steps)
        prompt, cached, generated, steps = (new - old for new, old in zip(figures, self._seen, strict=True))
        self._last, self._seen = now, figures
        if seconds > 10 * self._interval:
            return  # the first step after a rest: a rate over the rest would mislead
        counts = self._scheduler.cache.counts()
        log.info(
            "running %d  waiting %d  in %.0f tok/s (%.0f%% cached)  out %.0f tok/s  %.1f steps/s  "
            "pool %.0f%% used, %.0f%% cached",
            len(self._scheduler.running),
            len(self._scheduler.waiting),
            prompt / seconds,
            100 * cached / max(prompt, 1),
            generated / seconds,
            steps / seconds,
            100 * (counts["leased"] + counts["pinned"]) / counts["total"],
            100 * counts["evictable"] / counts["total"],
        )
