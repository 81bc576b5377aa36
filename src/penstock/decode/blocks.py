"""Which blocks of a paged cache belong to which text: host logic, without tensors (Kwon et al., SOSP 2023, section 4).

A text's tokens are in blocks of `size` tokens each. Texts with the same beginning share its blocks: a block of prompt
tokens is found by these tokens and the block before it. A block that is no longer used keeps its tokens until its space
is needed, so that the next text with this beginning finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class BlockTable:
    """The blocks of one text, in the order of its tokens."""

    blocks: list[int]
    reused: int
    """Tokens at the beginning whose keys and values are already in the cache."""
    published: int = 0
    """Blocks that other texts can find."""
    ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Blocks:
    """The blocks of a cache, and how many texts use each."""

    count: int
    size: int
    _free: list[int] = field(init=False)
    _users: list[int] = field(init=False)
    _by_key: dict[Key, int] = field(init=False, default_factory=dict)
    _keys: dict[int, Key] = field(init=False, default_factory=dict)
    _idle: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._free = list(range(self.count - 1, -1, -1))
        self._users = [0] * self.count

    @property
    def available(self) -> int:
        """Number of blocks that a new text can use."""
        return len(self._free) + len(self._idle)

    def count_for(self, tokens: int) -> int:
        """Number of blocks for `tokens` tokens."""
        return -(-tokens // self.size)

    def allocate(self, ids: Sequence[int], tokens: int) -> BlockTable | None:
        """Allocate blocks for a text of at most `tokens` tokens that begins with `ids`; None if too few are free.

        The last token of a prompt is always computed, never reused, because its features are needed.
        """
        shared = self._matching(ids)
        fresh = self.count_for(tokens) - len(shared)
        if fresh > self.available - sum(block in self._idle for block in shared):
            return None
        for block in shared:
            self._idle.pop(block, None)
            self._users[block] += 1
        blocks = [*shared, *(self._take() for _ in range(fresh))]
        return BlockTable(blocks, len(shared) * self.size, len(shared), tuple(ids))

    def _matching(self, ids: Sequence[int]) -> list[int]:
        """Cached blocks that hold the beginning of these tokens."""
        blocks: list[int] = []
        before = -1
        for start in range(0, len(ids) - self.size, self.size):
            block = self._by_key.get((before, tuple(ids[start : start + self.size])))
            if block is None:
                break
            blocks.append(block)
            before = block
        return blocks

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:  # the block that has been idle longest; blocks that follow it have been idle longer, so they are gone
            block, _ = self._idle.popitem(last=False)
            del self._by_key[self._keys.pop(block)]
        self._users[block] = 1
        return block

    def publish(self, table: BlockTable, tokens: int) -> None:
        """Let other texts find the blocks of a text's prompt, after `tokens` of its tokens have been computed."""
        while (table.published + 1) * self.size <= min(tokens, len(table.ids)):
            start = table.published * self.size
            block = table.blocks[table.published]
            before = table.blocks[table.published - 1] if table.published else -1
            key = (before, table.ids[start : start + self.size])
            if key in self._by_key or (before >= 0 and before not in self._keys):
                break  # another text was first; later blocks would have to follow its block
            self._by_key[key], self._keys[block] = block, key
            table.published += 1

    def release(self, table: BlockTable) -> None:
        """Release a text's blocks."""
        for block in reversed(table.blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)
