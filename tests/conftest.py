"""Fixtures that every test file may ask for."""

import os

# Before torch is imported: the tests compare numbers on the CPU, and CUDA would not survive the fork of the workers.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    """Real gloo processes: `pool.run(world_size, function, *args)` returns the results by rank; see workers.py."""
    from workers import WorkerPool  # not at the top: tests without processes start without torch

    workers = WorkerPool()
    yield workers
    workers.close()
