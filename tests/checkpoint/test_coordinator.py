"""Some rank does some work, and all get its result or its error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.spawn import spawn
from penstock.checkpoint import clean
from penstock.checkpoint.coordinator import collect, main_first
from penstock.errors import ConfigError, DataError, EnvironmentProblem


def _fails(work: object, kind: type[Exception]) -> str:
    try:
        work()  # type: ignore[operator]
    except kind as error:
        return str(error)
    raise AssertionError("it did not raise")


def _errors(folder: Path) -> list[str]:
    rank = dist.get_rank()

    def refuse() -> None:
        raise ConfigError("no such output")

    def break_down() -> None:
        raise ValueError("oh")

    def part() -> int:
        if rank > 0:
            raise DataError(f"file {rank} is torn")
        return 5

    told = [_fails(lambda: main_first(refuse), ConfigError)]
    told.append(_fails(lambda: main_first(break_down), EnvironmentProblem if rank else ValueError))
    told.append(_fails(lambda: collect(part), DataError))
    clean(folder / f"only on {rank}")
    assert main_first(lambda: [1, 2]) == [1, 2]
    assert collect(lambda: "x" * rank) == ["", "x", "xx"]
    return told


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    torn = "file 1 is torn"
    (tmp_path / "only on 0").mkdir()
    first, second, third = spawn(_errors, 3, tmp_path)
    assert first == ["no such output", "oh", f"On rank 1: {torn}"]
    assert second == ["On rank 0: no such output", "Rank 0 failed with ValueError: oh", torn]
    assert third == ["On rank 0: no such output", "Rank 0 failed with ValueError: oh", f"On rank 1: {torn}"]


def test_a_process_alone_has_its_own_result_and_error() -> None:
    assert (collect(lambda: 3), main_first(lambda: 4)) == ([3], 4)
    with pytest.raises(ZeroDivisionError):
        main_first(lambda: 1 // 0)
