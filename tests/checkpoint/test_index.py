"""Which rank writes which chunk. The index as it is read is in test_hostile.py, all of it at work in test_ranks.py."""

from __future__ import annotations

import pytest
import torch

from penstock.checkpoint.index import Chunk, assign_chunks, held_pieces
from penstock.checkpoint.snapshot import Piece, pieces_of


def rows(first: int, count: int, of: int) -> list[Piece]:
    return [Piece(torch.zeros(count, 2), torch.Size([of, 2]), torch.Size([first, 0]))]


def test_copies_are_written_once_and_by_turns() -> None:
    ranks = [held_pieces({name: pieces_of(torch.zeros(5)) for name in ("w/a", "w/b", "w/c")})] * 3
    index = assign_chunks(ranks)
    assert sorted(entry.chunks[0].rank for entry in index.values()) == [0, 1, 2]
    assert all(entry.chunks[0].sizes == entry.shape == (5,) for entry in index.values())


def test_shards_are_written_by_who_has_them() -> None:
    ranks = [
        held_pieces({"w/a": rows(0, 2, 3)}),
        held_pieces({"w/a": rows(2, 1, 3)}),
        held_pieces({"w/a": rows(3, 0, 3)}),
    ]
    assert assign_chunks(ranks)["w/a"].chunks == (Chunk(0, (0, 0), (2, 2)), Chunk(1, (2, 0), (1, 2)))


def test_scalars_and_tensors_without_elements_are_kept() -> None:
    index = assign_chunks(
        [held_pieces({"w/s": pieces_of(torch.tensor(1.0)), "w/e": pieces_of(torch.zeros(0, 4))})] * 2
    )
    assert index["w/s"].chunks[0].sizes == ()
    assert index["w/e"].chunks[0].sizes == (0, 4)


@pytest.mark.parametrize("second", [rows(1, 2, 3), rows(2, 2, 4)])
def test_ranks_that_disagree_are_refused(second: list[Piece]) -> None:
    with pytest.raises(ValueError, match="'w/a' of shape \\(3, 2\\) exactly once"):
        assign_chunks([held_pieces({"w/a": rows(0, 2, 3)}), held_pieces({"w/a": second})])
