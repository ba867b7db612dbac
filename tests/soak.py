"""`make soak`: many randomised runs of an optimizer, a million steps in all, beside the oracle.

Each is a seed: what fails says which, and `make soak` with `ARGS="--run SEED"` repeats it. Every
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
from randomised import Run, event
from ranks.pool import Pool

from ngn_kernels import SkippedStepWarning
from ngn_kernels.backends import availability

EVENTS_OF_A_RUN = 40
# How often a run begins there: the reference takes 20 times as long as C++, an interpreter 500 times.
SHARES = {"cpu": 1000, "reference": 200, "triton": 4}


class Soak:
    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.pools: dict[int, Pool] = {}

    def run(self, seed: int) -> None:
        """One run; raises what fails, after saying how to repeat it."""
        if seed % 10 == 9:
            self.run_on_ranks(seed, 2 + seed // 10 % 2)
        else:
            self.run_here(seed)

    def run_on_ranks(self, seed: int, size: int) -> None:
        if size not in self.pools or self.pools[size].broken:
            self.pools[size] = Pool(size)
        pool = self.pools[size]
        task = {"seed": seed, "events": EVENTS_OF_A_RUN, "port": pool.store.port}
        answers = pool.run("ranks.randomised", "randomised_run", **task)
        assert len({held for *_, held in answers}) == 1, "replicas differ"
        steps, happened, _ = answers[0]
        self.events += happened
        self.steps[f"{size} ranks"] += steps
        self.runs[f"on {size} ranks"] += 1

    def run_here(self, seed: int) -> None:
        rng = random.Random(seed)
        here = [name for name, reason in availability().items() if reason is None]
        shares = [SHARES[name] for name in here]
        first = rng.choices(here, shares)[0]
        # An optimizer on a quick backend visits the slow ones only now and then.
        visits = {first, *rng.choices(here, shares, k=1)}
        run, drawn = Run(rng.getrandbits(32), tuple(sorted(visits))), []
        for _ in range(EVENTS_OF_A_RUN):
            name, number = event.draw(rng)
            drawn.append(f"    {name} ({number})")
            backend, before = run.backend, run.steps
            try:
                self.events[name] += run.happen(name, number)
            except BaseException:
                told = "\n".join(drawn)
                print(f"run {seed} of {run.algorithm} ({run.kind}, {backend}):\n{told}")
                raise
            self.steps[backend] += run.steps - before
        self.runs[run.kind] += 1


def counted(numbers: Counter[str], template: str, separator: str) -> str:
    return separator.join(template.format(count, name) for name, count in numbers.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--run", type=int, help="only the run with this seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error", SkippedStepWarning)
    warnings.filterwarnings("ignore", ".* encountered in", RuntimeWarning)
    soak, failed = Soak(), []
    started = said = time.monotonic()
    seed = options.seed if options.run is None else options.run
    while sum(soak.steps.values()) < options.steps:
        try:
            soak.run(seed)
        except Exception:
            traceback.print_exc()
            print(f'to repeat it: make soak ARGS="--run {seed}"', flush=True)
            failed.append(seed)
            if len(failed) == 10:
                break
        if options.run is not None:
            break
        seed += 1
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{sum(soak.steps.values()):>10,} steps", flush=True)
    print(counted(soak.events, "{:>10,}  {}", "\n"))
    by_backend = counted(soak.steps, "{:,} on {}", ", ")
    kinds = counted(soak.runs, "{:,} {}", ", ")
    for pool in soak.pools.values():
        pool.kill()
    minutes = (time.monotonic() - started) / 60
    print(f"runs: {kinds}; steps: {by_backend}; {minutes:.0f} minutes")
    print(
        f"{sum(soak.steps.values()):,} steps: {sum(soak.events.values()):,} events of "
        f"{len(soak.events)} kinds, {len(failed)} failed runs {failed or ''}".rstrip()
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
