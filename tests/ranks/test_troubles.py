"""Every rank does the same thing: errors, skipped steps, and what is sent."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from algorithms import EVERY, SCALAR, Algorithm

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


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_raise_of_a_skipped_step(
    limit: int | None, size: int, ranks: Callable[[int], Pool]
) -> None:
    """At the beginning of the next step, and then they go on."""
    answers = ranks(size).run(MODULE, "skip_that_raises", limit=limit)
    wanted = [False, True, False, False] if limit is None else [False, False, True, False]
    for raised, goes_on in answers:
        assert [bool(said) for said in raised] == wanted
        assert "not finite" in "".join(raised)
        assert goes_on


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
    """Two where the clip factor must be known before the rule's own sums.

    And one before matrices are brought to their owners, for which ranks wait.
    """
    wanted = 2 if clipping and algorithm.rms and not algorithm.coordinate else 1
    wanted += bool(algorithm.spectral and sharded)
    task = {"algorithm": str(algorithm), "clipping": clipping, "sharded": sharded}
    for count, size in ranks(2).run(MODULE, "collectives", **task):
        assert count == wanted
        assert size <= 64


def test_partial_gradients(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(MODULE, "partial_gradients") == [True, True]


@pytest.mark.parametrize("algorithm", SCALAR, ids=str)
@pytest.mark.parametrize("clipping", [None, 0.5], ids=["", "clipping"])
def test_a_rank_without_gradients_sends_nothing_of_the_others(
    algorithm: Algorithm, clipping: float | None, ranks: Callable[[int], Pool]
) -> None:
    """Same gradients, loss, parameters and moments in every step: the same rho in every step."""
    task = {"algorithm": str(algorithm), "clipping": clipping, "steps": 4}
    told = ranks(3).run(MODULE, "constant_steps", **task)
    sums = 4.0 if clipping is None else 4.0 * (0.5 / 2) ** (1 if algorithm.rms else 2)
    for shrinks in told:
        assert shrinks == pytest.approx([2 / (2 + sums)] * 4, rel=1e-6)


@pytest.mark.parametrize("clipping", [None, 0.5], ids=["", "clipping"])
def test_a_rank_without_a_loss_does_not_repeat_the_last_one(
    clipping: float | None, ranks: Callable[[int], Pool]
) -> None:
    """Numbers of the group must not lie where the host believes its own to be."""
    task = {"algorithm": "NGNM", "clipping": clipping, "steps": 4, "copied": True}
    expected = ranks(2).run(MODULE, "constant_steps", **{**task, "copied": False})[0]
    for shrinks in ranks(2).run(MODULE, "constant_steps", **task):
        assert shrinks == expected == [expected[0]] * 4


def test_an_overflow_is_of_one_step(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(MODULE, "overflow_once") == [[1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("shape", "replicas", "placement", "copies"),
    [
        ((2, 2), None, "shard", 1),  # data parallel outside of the mesh
        ((2, 2), 4, "shard", 1),
        ((2, 2), 1, "shard", 2),  # two stages, each with a parameter of its own
        ((2, 2), 2, "shard", 2),  # the same, where ordinary parameters lie on a stage's two ranks
        ((2, 2), None, "replicate", 1),
        ((2, 2), 2, "replicate", 2),
        ((1, 4), None, "shard", 1),
        ((4, 1), None, "shard", 1),
        ((4, 1), 2, "shard", 2),
    ],
)
def test_data_parallel_by_hand_around_tensor_parallel(
    shape: tuple[int, int],
    replicas: int | None,
    placement: str,
    copies: int,
    ranks: Callable[[int], Pool],
) -> None:
    """A parameter of 4 elements counts once for each different one that there is."""
    task = {"shape": shape, "replicas": replicas, "placement": placement, "steps": 2}
    for shrinks in ranks(4).run(MODULE, "by_hand_around_tensor_parallel", **task):
        assert shrinks == [2 / (2 + 4 * copies)] * 2


def test_groups_that_come_and_go(ranks: Callable[[int], Pool]) -> None:
    """Every number of replicas belongs to the process group of its step."""
    pool = Pool(3)
    try:
        answers = pool.run(MODULE, "groups_come_and_go", port=pool.store.port)
    finally:
        pool.kill()
    assert answers == [[2 / 3] * 8] * 3


def test_a_loss_in_parts(ranks: Callable[[int], Pool]) -> None:
    for parts, whole in ranks(2).run(MODULE, "dtensor_loss"):
        assert parts == whole


def test_partial_gradients_on_only_some_ranks(ranks: Callable[[int], Pool]) -> None:
    """The others wait for their numbers, and all of them have the same."""
    assert ranks(3).run(MODULE, "partial_on_some_ranks") == [[2 / (2 + 8)] * 3] * 3


@pytest.mark.parametrize("frozen", [False, True], ids=["zero gradients", "frozen"])
def test_a_warm_up_from_zero_keeps_ranks_together(
    frozen: bool, ranks: Callable[[int], Pool]
) -> None:
    """A rank without a loss takes part in each step, whatever its first gradients are."""
    sums = [4 * k / 4 * (1 if frozen or k == 0 else 2) for k in range(4)]
    expected = [2 * (1.0 + k) / (2 * (1.0 + k) + q) for k, q in enumerate(sums)]
    for told in ranks(2).run(MODULE, "warm_up_from_zero", frozen=frozen):
        assert told == pytest.approx(expected)


def test_copies_share_the_process_group(ranks: Callable[[int], Pool]) -> None:
    for shared, said in ranks(2).run(MODULE, "copies_with_a_group"):
        assert shared and "save its state_dict()" in said
