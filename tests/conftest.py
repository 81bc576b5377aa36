"""Shared by all tests: one thread, a fixed seed, no memory of earlier runs."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from helpers.caches import SHARED, new_cache

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("penstock", deadline=None)
hypothesis.settings.load_profile("penstock")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Programs that tests start find tests/helpers too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["PENSTOCK_CACHE"] = str(SHARED)
_SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more process than cores, for tests that wait for a process, a signal or a deadline leave theirs idle."""
    from penstock.launch.settings import usable_cores

    return (len(usable_cores()) or os.cpu_count() or 1) + 1


def _marked_slow(item: pytest.Item) -> bool:
    """Whether tests/slow.txt names this test, all cases of its function, or the one."""
    return item.nodeid in _SLOW or item.nodeid.partition("[")[0] in _SLOW


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark slow tests before any is chosen by its marks. Of those chosen put the modules with the longest tests first:
    whoever starts a long one last is waited for by all others."""
    for item in filter(_marked_slow, items):
        item.add_marker("slow")
    yield
    weights: Counter[Path] = Counter()
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = limit.args[0] if limit else 300
        weights[item.path] += seconds if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: -weights[item.path])


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New folders. Pytest's own numbered ones lie in one folder, all of whose names it reads for each."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _isolated(_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees its own cache folder and starts from seed 0 on one thread."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(new_cache(next(_caches))))
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def known_machine(_isolated: None) -> None:
    """No run probes this machine, which takes ten seconds: its figures are there, but made up."""
    from helpers.toy import take_for_this_one

    take_for_this_one()


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Collections of garbage pass over all that was there before this module: mostly torch's and transformers' own
    objects, a million, which cost 0.4 s at each `gc.collect()`.
    """
    gc.collect()
    gc.freeze()
