"""Shards of one parameter: the place of each element, and the bits of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ranks.narrow import NARROW, TOLERANCES
from ranks.pool import Pool
from ranks.shards import WAYS

MODULE = "ranks.shards"


@pytest.mark.parametrize("way", WAYS)
def test_the_place_of_each_element(way: str, ranks: Callable[[int], Pool]) -> None:
    """Noise is counted by it; where elements do not follow each other, every shard has its own."""
    ranges: dict[tuple[int, ...], range] = {}
    for first, places in ranks(4).run(MODULE, "places", way=way):
        if places:
            follow = places == list(range(places[0], places[0] + len(places)))
            assert follow == WAYS[way].noise
            assert first == places[0] or not follow
            assert ranges.setdefault(tuple(places), range(first, first + len(places)))[0] == first
    counted = [place for each in ranges.values() for place in each]
    assert len(set(counted)) == len(counted)


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_one_process(way: str, narrow: str, ranks: Callable[[int], Pool]) -> None:
    options = NARROW[narrow]
    noise, blocks = WAYS[way].noise, WAYS[way].blocks or "8bit" not in options["state"]
    for backend in ("cpu", "reference"):
        for same, error in ranks(4).run(MODULE, "steps", way=way, backend=backend, **options):
            assert all(same.values()) or not (noise and blocks), same
            assert error < TOLERANCES[narrow]


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]
)
def test_matrices_are_whole_at_their_owners(
    dtype: torch.dtype, error: float, ranks: Callable[[int], Pool]
) -> None:
    for backend in ("cpu", "reference"):
        answers = ranks(4).run(MODULE, "matrices", dtype=dtype, backend=backend)
        owned = [i for *_, each in answers for i in each]
        assert all(each for *_, each in answers) and sorted(owned) == list(range(len(owned)))
        for strayed, same, _ in answers:
            assert strayed < error
            assert all(same)


def test_stacks_of_whole_matrices_stay_where_they_are(ranks: Callable[[int], Pool]) -> None:
    """Experts are often sharded by their first dimension: each rank has whole matrices then."""
    for strayed, sent in ranks(4).run(MODULE, "stacks", placements=("S0", "R S0", "S0 S0")):
        assert strayed < 1e-12 and sent == 0
    answers = ranks(4).run(MODULE, "stacks", placements=("S0", "S1", "S0 S1"))
    assert all(strayed < 1e-12 for strayed, _ in answers) and any(sent for _, sent in answers)


def test_a_sharded_matrix_needs_all_ranks(ranks: Callable[[int], Pool]) -> None:
    for said in ranks(4).run(MODULE, "alone"):
        assert "is sharded, and this rank steps alone" in said and "reduce_group=None" in said


def test_exact_without_noise_has_the_bits_everywhere(ranks: Callable[[int], Pool]) -> None:
    for way in WAYS:
        for same, _ in ranks(4).run(
            MODULE, "steps", way=way, dtype=torch.bfloat16, rounding="exact"
        ):
            assert all(same.values()) and "remainder" in same, way


def test_state_on_another_mesh(ranks: Callable[[int], Pool]) -> None:
    for said in ranks(4).run(MODULE, "another_mesh"):
        assert len(said) == 2
        for text in said:
            assert "lie on different meshes: load sharded state with" in text


def test_state_with_other_placements(ranks: Callable[[int], Pool]) -> None:
    assert ranks(4).run(MODULE, "another_placement") == [[]] * 4
