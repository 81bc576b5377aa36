"""Rows of figures that the whole fault suite publishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.rows import Note, record


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Puts figures under a row into the result file of the module, where the test is marked as one of the whole suite:
    `faults_resume.json` of `test_resume_faults.py`. Short forms record nothing.
    """
    *_, name = (word for word in request.path.stem.split("_") if word != "faults")
    file = Path(__file__).parents[2] / "benchmarks" / "results" / f"faults_{name}.json"
    command = f"make test-faults PYTEST=tests/faults/{request.path.name}"
    whole = request.node.get_closest_marker("faults") is not None

    def put(row: str, **figures: object) -> None:
        if whole:
            record(file, row, figures, command=command)

    return put
