"""Real runs of train.py whose processes start in a fraction of a second: forked from the test's, not by torchrun.

    run = Trainers(4, ["--config", ...], tmp_path / "output")
    run.wait_for("step     2")
    run.kill(3)
    run.exit_codes(timeout=20), run.output()
    run.end()

The processes have torchrun's environment and its store (`agent=False`: rank 0 has the store, as without torchrun). They
share one output file. What torchrun also does, ending the others when one has failed, is left to the test.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

import train
from workers import PRELOADED

FORK = multiprocessing.get_context("fork")


def train_as_rank(rank, arguments, output, environment):
    """The life of one process, from where Python has started and imported train.py."""
    torch.set_num_threads(1)  # first of all, see workers.py
    gc.freeze()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(descriptor, "w", buffering=1)
    train.main_and_exit(arguments)


def keep_store(listener):
    """torchrun's part. A process of its own: the store has threads, and what has threads should not fork the ranks."""
    port = listener.getsockname()[1]
    options = dict(is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store = dist.TCPStore("127.0.0.1", port, **options)  # noqa: F841
    signal.pause()


class Trainers:
    def __init__(self, world_size, arguments, output, agent=True, **environment):
        for module in PRELOADED:
            importlib.import_module(module)
        self.path, self.store = output, None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            environment |= dict(
                WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]),
                TORCHELASTIC_USE_AGENT_STORE=str(agent),
            )  # fmt: skip
            if agent:
                self.store = FORK.Process(target=keep_store, args=(listener,), daemon=True)
                self.store.start()
        self.processes = [
            FORK.Process(target=train_as_rank, args=(rank, arguments, self.path, environment), daemon=True)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def output(self):
        return self.path.read_text() if self.path.exists() else ""

    def wait_for(self, condition, timeout=60):
        """Until `condition` holds, a function or a text in the output; or until the run has ended."""
        deadline = time.monotonic() + timeout
        holds = condition if callable(condition) else lambda: condition in self.output()
        while not holds() and any(process.is_alive() for process in self.processes):
            assert time.monotonic() < deadline, f"not within {timeout} s; the output:\n{self.output()}"
            time.sleep(0.004)

    def kill(self, *ranks, number=signal.SIGKILL):
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def exit_codes(self, timeout=60):
        """By rank, when all have ended; -9 for one that was killed."""
        deadline = time.monotonic() + timeout
        for rank, process in enumerate(self.processes):
            process.join(max(0, deadline - time.monotonic()))
            assert not process.is_alive(), f"rank {rank} is there after {timeout} s; the output:\n{self.output()}"
        return [process.exitcode for process in self.processes]

    def end(self):
        processes = [*self.processes, self.store] if self.store else self.processes
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
