"""A clock that makes times up: base times, a slowdown, the noise of visits and of sessions, and now and then a visit disturbed."""

import math
import random

from ops_math.cli.bench.clock import Sample


class MadeUpClock:
    """Times [us] by subject; nothing is run. A session begins with an order in which each is named once."""

    fixed_s = 0.0

    def __init__(self, seed: int, base: dict[str, float] | None = None, visits: float = 0.1, sessions: float = 0.02) -> None:
        self.source = random.Random(seed)
        self.base, self.visits, self.sessions = base or {}, visits, sessions
        self.moved: dict[str, float] = {}
        self.orders: list[list[str]] = []

    def take(self, calls, order):
        self.orders.append(list(order))
        if len(order) == len(calls):
            self.moved = {name: math.exp(self.source.gauss(0, self.sessions)) for name in calls}
        found = []
        for place, name in enumerate(order):
            drift = 1 + 0.3 * math.sin(place / 20)  # the machine's own speed, which meets all alike
            noise = math.exp(self.source.gauss(0, self.visits)) * (3 if self.source.random() < 0.03 else 1)
            us = self.base.get(name, 1000.0) * self.moved[name] * drift * noise
            found.append(Sample(us, us / 2))
        return found
