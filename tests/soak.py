"""`make soak`: many randomised runs of an optimizer, a million steps in all, beside the oracle.

Each is a seed: what fails says which, and `make soak` with `ARGS="--life SEED"` lives it again. Every
tenth seed is of an optimizer on two or three ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter

os.environ["TRITON_INTERPRET"] = "1"

import torch
from life import EVENTS, WEIGHTS, Life, counted
from ranks.pool import Pool

from ngn_kernels import SkippedStepWarning
from ngn_kernels.backends import availability

EVENTS_OF_A_LIFE = 40
# How often a life begins there: the reference takes 20 times as long as C++, an interpreter 500 times.
SHARES = {"cpu": 1000, "reference": 200, "triton": 4}


class Soak:
    def __init__(self) -> None:
        self.lives: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.pools: dict[int, Pool] = {}

    def live(self, seed: int) -> None:
        """One life from its beginning to its end; raises what fails, after saying how to repeat it."""
        if seed % 10 == 9:
            self.live_on_ranks(seed, 2 + seed // 10 % 2)
        else:
            self.live_here(seed)

    def live_on_ranks(self, seed: int, size: int) -> None:
        if size not in self.pools or self.pools[size].broken:
            self.pools[size] = Pool(size)
        pool = self.pools[size]
        task = {"seed": seed, "events": EVENTS_OF_A_LIFE, "port": pool.store.port}
        answers = pool.run("ranks.life", "live", **task)
        assert len({held for *_, held in answers}) == 1, "replicas differ"
        steps, happened, _ = answers[0]
        self.events += happened
        self.steps[f"{size} ranks"] += steps
        self.lives[f"on {size} ranks"] += 1

    def live_here(self, seed: int) -> None:
        rng = random.Random(seed)
        here = [name for name, reason in availability().items() if reason is None]
        shares = [SHARES[name] for name in here]
        first = rng.choices(here, shares)[0]
        # An optimizer on a quick backend visits the slow ones only now and then.
        visits = {first, *rng.choices(here, shares, k=1)}
        life = Life(rng.getrandbits(32), tuple(sorted(visits)))
        lived = []
        names, weights = list(EVENTS), list(WEIGHTS.values())
        for _ in range(EVENTS_OF_A_LIFE):
            name, number = rng.choices(names, weights)[0], rng.getrandbits(32)
            lived.append((name, number))
            backend, before = life.backend, life.steps
            try:
                happened = life.live(name, number)
            except BaseException:
                told = "\n".join(f"    {what} ({which})" for what, which in lived)
                print(f"life {seed} of {life.algorithm} ({life.kind}, {backend}):\n{told}")
                raise
            self.events[name] += happened
            self.steps[backend] += life.steps - before
        self.lives[life.kind] += 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--life", type=int, help="only the life with this seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error", SkippedStepWarning)
    warnings.filterwarnings("ignore", ".* encountered in", RuntimeWarning)
    soak, failed = Soak(), []
    started = said = time.monotonic()
    seed = options.seed if options.life is None else options.life
    while sum(soak.steps.values()) < options.steps:
        try:
            soak.live(seed)
        except Exception:
            traceback.print_exc()
            print(f'to live it again: make soak ARGS="--life {seed}"', flush=True)
            failed.append(seed)
            if len(failed) == 10:
                break
        if options.life is not None:
            break
        seed += 1
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{sum(soak.steps.values()):>10,} steps", flush=True)
    print(counted(soak.events))
    by_backend = ", ".join(f"{count:,} on {name}" for name, count in soak.steps.most_common())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in soak.lives.most_common())
    for pool in soak.pools.values():
        pool.kill()
    minutes = (time.monotonic() - started) / 60
    print(f"lives: {kinds}; steps: {by_backend}; {minutes:.0f} minutes")
    print(
        f"{sum(soak.steps.values()):,} steps: {sum(soak.events.values()):,} events of "
        f"{len(soak.events)} kinds, {len(failed)} failed lives {failed or ''}".rstrip()
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
