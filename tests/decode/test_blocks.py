"""Block tables: no block has two owners unless they begin alike, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from penstock.decode.blocks import Blocks, BlockTable
from penstock.decode.kv_cache import Columns, KVCache, Pages


def allocated(blocks: Blocks, ids: Sequence[int], tokens: int) -> BlockTable:
    table = blocks.allocate(ids, tokens)
    assert table is not None
    return table


def test_texts_that_begin_alike_share_what_has_been_computed() -> None:
    blocks = Blocks(8, 2)
    first = allocated(blocks, (1, 2, 3, 4, 5), 7)
    assert (len(first.blocks), first.reused) == (4, 0)
    early = allocated(blocks, (1, 2, 3, 4, 5), 5)
    assert early.reused == 0, "nothing has been computed yet"
    blocks.release(early)
    blocks.publish(first, 3)
    second = allocated(blocks, (1, 2, 3, 4), 5)
    assert (second.reused, second.blocks[0]) == (2, first.blocks[0])
    blocks.publish(first, 5)
    third = allocated(blocks, (1, 2, 3, 4, 5, 6), 6)
    assert (third.reused, third.blocks[:2]) == (4, first.blocks[:2])
    assert blocks.allocate((9,), 5) is None, "one block is left"
    for table in (first, second, third):
        blocks.release(table)
    assert blocks.available == 8


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    blocks = Blocks(8, 2)
    table = allocated(blocks, (1, 2, 3, 4), 6)
    blocks.publish(table, 4)
    assert allocated(blocks, (1, 2, 3, 4), 6).reused == 2


def test_a_text_without_space_does_not_change_which_blocks_are_found() -> None:
    blocks = Blocks(6, 2)
    first = allocated(blocks, range(1, 8), 8)
    blocks.publish(first, 7)
    blocks.release(first)
    assert blocks.allocate(range(1, 8), 14) is None
    others, second = allocated(blocks, (9,), 6), allocated(blocks, (7, 7, 8), 4)
    blocks.publish(second, 3)
    blocks.release(others)
    assert allocated(blocks, (7, 7, 5, 6, 1), 6).reused == 2, "5 and 6 were computed after other tokens"


def test_five_hundred_drawn_texts_leave_nothing_behind() -> None:
    draw = random.Random(0)
    blocks = Blocks(12, 2)
    live: list[BlockTable] = []
    for _ in range(500):
        if live and draw.random() < 0.45:
            blocks.release(live.pop(draw.randrange(len(live))))
        else:
            ids = tuple(draw.choices(range(2), k=draw.randint(1, 8)))
            table = blocks.allocate(ids, len(ids) + draw.randint(1, 4))
            if table is not None:
                blocks.publish(table, draw.randint(0, len(ids)))
                live.append(table)
        owned = [block for table in live for block in table.blocks[table.reused // 2 :]]
        assert len(owned) == len(set(owned)), "what a text computes itself is its own"
        used = {block for table in live for block in table.blocks}
        assert blocks.available == 12 - len(used)
    for table in live:
        blocks.release(table)
    assert blocks.available == 12


def test_layers_with_unequal_heads_read_what_they_wrote() -> None:
    heads, columns, device = (3, 1, 3), 6, torch.device("cpu")
    pages, whole = Pages(6, 2), Columns(2, columns)
    texts = torch.tensor([[3, 0, 4], [1, 2, 5]])
    for begin, new in ((0, 3), (3, 1), (4, 2)):
        written = [torch.randn(2, 2, count, new, 4) for count in heads]
        kept = []
        for store in (pages, whole):
            past = KVCache(store, rows=2, columns=columns, device=device)
            past.at(torch.arange(begin, begin + new), columns=begin, width=begin + new)
            pages.look(texts)
            kept.append([store.keep(layer, k, v, past) for layer, (k, v) in enumerate(written)])
        torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=0)
