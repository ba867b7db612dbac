"""Every rank does the same thing: errors, skipped steps, and what is sent."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from algorithms import EVERY, Algorithm

from ranks.pool import Pool
from ranks.troubles import TROUBLES

MODULE = "ranks.troubles"


@pytest.mark.parametrize("name", TROUBLES)
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_raise_together(name: str, size: int, ranks: Callable[[int], Pool]) -> None:
    if name == "a mesh outside of the group" and size == 2:
        pytest.skip("needs ranks outside")
    answers = ranks(size).run(MODULE, "trouble", kind=name)
    for rank, (said, unchanged, goes_on) in enumerate(answers):
        assert re.search(TROUBLES[name][1], said, re.S), f"rank {rank}: {said}"
        assert unchanged, f"rank {rank} changed something"
        assert goes_on, f"rank {rank} cannot go on"
    if not name.startswith(("a group without", "a mesh outside")):
        assert len({said for said, *_ in answers}) == 1


@pytest.mark.parametrize(
    ("what", "reason"),
    [("gradient", "a gradient"), ("loss", "the loss is not finite"), ("overflow", "overflow")],
)
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_skip_together(
    what: str, reason: str, size: int, ranks: Callable[[int], Pool]
) -> None:
    for said, skipped, unchanged in ranks(size).run(MODULE, "skip", what=what):
        assert len(said) == 1 and reason in said[0]
        assert skipped == 1 and unchanged


def test_a_step_without_loss_and_gradients(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(MODULE, "nothing_to_do") == [(True, True)] * 2


def test_a_rank_with_nothing_to_do_takes_part(ranks: Callable[[int], Pool]) -> None:
    """Its own parameters have no gradient: the others do not wait for it, and all know rho."""
    (same, shrink), *others = ranks(2).run(MODULE, "one_has_nothing")
    assert same and shrink == 2 / (2 + 0.5 * 12)
    assert others == [(True, shrink)]


def test_several_buckets_are_summed_once(ranks: Callable[[int], Pool]) -> None:
    for shared, alone in ranks(2).run(MODULE, "several_buckets"):
        assert shared == alone == 2 / (2 + 0.5 * 24)


def test_a_rank_that_never_comes(ranks: Callable[[int], Pool]) -> None:
    waiting, _ = ranks(2).run(MODULE, "one_never_comes")
    assert "NGNM.step() waited for the numbers of the other 1 ranks" in waiting
    assert "every rank of reduce_group must call step()" in waiting


@EVERY
@pytest.mark.parametrize("clipping", [False, True], ids=["", "clipping"])
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_one_collective_a_step(
    algorithm: Algorithm, clipping: bool, sharded: bool, ranks: Callable[[int], Pool]
) -> None:
    """Two where the clip factor must be known before the rule's own sums."""
    wanted = 2 if clipping and algorithm.rms and not algorithm.coordinate else 1
    task = {"algorithm": str(algorithm), "clipping": clipping, "sharded": sharded}
    for count, size in ranks(2).run(MODULE, "collectives", **task):
        assert count == wanted
        assert size <= 64


def test_partial_gradients(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(MODULE, "partial_gradients") == [True, True]
