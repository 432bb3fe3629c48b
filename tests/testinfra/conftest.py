"""The hosts of the scenario that runs, for tests that are played in it."""

from __future__ import annotations

import pytest
from lab import Lab


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
