"""How blocks fall on the stages of a pipeline."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def stage_blocks(depth: int, stages: int) -> tuple[int, int, int]:
    """Blocks of the first, a middle and the last stage.

    Even where `stages` divides `depth`. Else, where it divides `depth + 2`, entrance and exit take a block's place
    each. Else the first stages take one more than the others, of which the last is one.
    """
    if stages == 1:
        return depth, depth, depth
    if depth % stages == 0:
        return depth // stages, depth // stages, depth // stages
    if (depth + 2) % stages == 0:
        each = (depth + 2) // stages
        return each - 1, each, each - 1
    each = -(-depth // stages)
    return each, each, each - 1


def blocks_by_stage(depth: int, stages: int) -> list[tuple[int, int]]:
    """Stages in a row and the blocks of each, as `stage_blocks` has them, for two stages at least; of those between the
    first and the last the later ones may have one less."""
    first, middle, last = stage_blocks(depth, stages)
    fewer = first + last + (stages - 2) * middle - depth
    return [(1, first), (stages - 2 - fewer, middle), (fewer, middle - 1), (1, last)]
