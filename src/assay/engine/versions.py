"""Which weights sampled which tokens."""

from __future__ import annotations

from bisect import bisect_right

Span = tuple[int, int]  # (version, number of consecutive tokens that it sampled)


class VersionLog:
    """The first step of each weights version, as far back as a running sequence can need."""

    def __init__(self) -> None:
        self.current = -1
        self.starts: list[tuple[int, int]] = [(0, -1)]  # (first step, version), ascending

    def start(self, step: int) -> None:
        """Nothing is running: only the current version matters from `step` on."""
        self.starts = [(step, self.current)]

    def update(self, version: int, step: int, oldest: int) -> None:
        """From `step` on `version` is served; no running sequence entered before the step `oldest`."""
        self.current = version
        self.starts.append((step, version))
        while len(self.starts) > 1 and self.starts[1][0] <= oldest:
            del self.starts[0]

    def spans(self, first: int, count: int) -> list[Span]:
        """Spans of the `count` tokens that were sampled from step `first` on, one per step."""
        if len(self.starts) == 1:
            return [(self.starts[0][1], count)]
        spans: list[Span] = []
        place = max(bisect_right(self.starts, first, key=lambda start: start[0]) - 1, 0)
        step, end = first, first + count
        while step < end:
            following = self.starts[place + 1][0] if place + 1 < len(self.starts) else end
            if following > step:
                spans.append((self.starts[place][1], min(following, end) - step))
                step = min(following, end)
            place += 1
        return spans


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """The same with neighbouring spans of one version joined."""
    joined: list[Span] = []
    for version, count in spans:
        if joined and joined[-1][0] == version:
            joined[-1] = version, joined[-1][1] + count
        elif count:
            joined.append((version, count))
    return tuple(joined)
