from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from itertools import islice
from threading import Timer

import numpy as np
import psutil
import pytest

from helpers.sources import Imports, Raises, Sleeps
from penstock.config.run import DataConfig
from penstock.data import image_loader, open_source
from penstock.data.loader import Loader
from penstock.data.pool import Pool, SampleRequest
from penstock.errors import DataError


def pool_of(batches: Loader) -> Pool:
    pool = batches._reader
    assert isinstance(pool, Pool)
    return pool


def pids(pool: Pool) -> list[int]:
    return [worker.process.pid for worker in pool._workers]


def digits_in(workers: int, batch: int = 8) -> Loader:
    source = open_source(DataConfig(), split="train", channels=1)
    return image_loader(source, batch=batch, image_size=8, classes=10, workers=workers)


def test_requests_come_back_in_order_and_whole() -> None:
    source = open_source(DataConfig(), split="train", channels=3)
    requests = [SampleRequest(ids, ids) for ids in (np.arange(n, n + 1 + n % 7) for n in range(12))]
    with (
        closing(Pool(source, batch=8, workers=3, depth=5)) as pool,
        closing(pool.read(iter(requests))) as batches,
    ):
        for wanted, (request, pixels, reading) in zip(requests, batches, strict=True):
            assert request is wanted
            np.testing.assert_array_equal(pixels, source.read(request.ids)[0])
            np.testing.assert_array_equal(reading.ids, request.ids)


def test_large_batches_do_not_clog_the_pipes() -> None:
    with digits_in(workers=1, batch=20_000) as batches:
        for _ in range(6):
            assert len(next(batches)) == 20_000


def test_processes_stay_and_end_with_the_pool() -> None:
    with digits_in(workers=2) as batches:
        found = pids(pool_of(batches))
        for _ in range(20):
            next(batches)
        batches.load_state_dict(batches.state_dict() | {"position": 0})
        next(batches)
        assert pids(pool_of(batches)) == found
        assert all(psutil.pid_exists(pid) for pid in found)
    assert not any(psutil.pid_exists(pid) for pid in found)


def test_a_killed_worker_is_named_at_once() -> None:
    with digits_in(workers=2) as batches:
        next(batches)
        pid = pids(pool_of(batches))[1]
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(DataError, match=rf"data worker 1 \(process {pid}\) was killed by SIGKILL"):
            list(islice(batches, 10))
        assert time.monotonic() - start < 5


def test_a_worker_killed_while_reading_is_named() -> None:
    with closing(Pool(Sleeps(), batch=4, workers=2, depth=2)) as pool:
        pid = pids(pool)[0]
        Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(DataError, match=rf"data worker 0 \(process {pid}\) was killed"):
            next(pool.read(iter([SampleRequest(np.arange(2), np.arange(2))])))


def test_closing_does_not_wait_for_slow_workers() -> None:
    batches = image_loader(Sleeps(), batch=30, image_size=8, classes=1, workers=1)
    batches._start()
    time.sleep(0.1)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 5  # what is in flight would take 90 seconds


def test_workers_import_no_torch() -> None:
    with image_loader(Imports(), batch=4, image_size=8, classes=1, workers=1, augment=None) as batches:
        assert next(batches).images.max() == -1  # black: no torch


def test_other_errors_keep_their_name() -> None:
    with (
        image_loader(Raises(), batch=4, image_size=8, classes=1, workers=2) as batches,
        pytest.raises(DataError, match=r"data worker 0 .* failed on raises: ZeroDivisionError: by zero"),
    ):
        next(batches)


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )


def test_a_script_needs_no_main_guard() -> None:
    done = run_script("""
        from penstock.config.run import DataConfig
        from penstock.data import image_loader, open_source
        source = open_source(DataConfig(), split="train")
        batches = image_loader(source, batch=4, image_size=8, classes=10, workers=1)
        print(tuple(next(batches).images.shape))
    """)
    assert done.stdout == "(4, 3, 8, 8)\n", done.stderr
    assert done.returncode == 0
    assert not done.stderr


@pytest.mark.sweep
def test_a_source_defined_in_the_script_is_explained() -> None:
    done = run_script("""
        import numpy as np
        from penstock.data import ImageSource, image_loader
        class Mine(ImageSource):
            name, classes, size, channels, labels = "mine", ("a",), 8, 1, np.zeros(5, np.int64)
            def load(self, index, out):
                out[...] = 0
        image_loader(Mine(), batch=4, image_size=8, classes=1, workers=1)
    """)
    assert "class Mine is defined in the script itself" in done.stderr
    assert done.returncode == 1


def test_workers_end_when_their_parent_is_killed() -> None:
    script = """
        import sys, time
        from penstock.config.run import DataConfig
        from penstock.data import image_loader, open_source
        source = open_source(DataConfig(), split="train")
        batches = image_loader(source, batch=4, image_size=8, classes=10, workers=2)
        next(batches)
        print(*[worker.process.pid for worker in batches._reader._workers], flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_that_ends_does_not_wait_for_its_workers() -> None:
    start = time.monotonic()
    done = run_script("""
        import time
        from helpers.sources import Sleeps
        from penstock.data import image_loader
        batches = image_loader(Sleeps(), batch=20, image_size=8, classes=1, workers=1)
        batches._start()
        time.sleep(0.5)
        print("done")
    """)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert time.monotonic() - start < 15  # what is in flight would take a minute


def test_workers_serve_on_when_all_processes_of_a_job_are_asked_to_stop() -> None:
    with digits_in(workers=2) as batches:
        next(batches)
        for pid in pids(pool_of(batches)):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGUSR1)
        for _ in range(4):
            next(batches)
