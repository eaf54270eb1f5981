"""Real processes for the tests: `pool.run(4, function, *args)` runs function(*args) on 4 gloo ranks, returns 4 results.

The workers are forked once and used again by every test, since starting a Python that imports torch takes seconds. Only
failures cost something: then all workers are killed, and the next run forks new ones.

Each run has a process group of its own, and a grid of them takes longer to make and to end than a tiny model takes to
train: where several cases need the same grid, let one run do them all.

The function and the arguments travel by pickle, so the function has to be at the top level of a module.
"""

import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

import process_group_manager as pgm
import rendezvous

# Slow modules that torch imports only when they are used: once in the parent instead of once in every worker.
PRELOADED = ("torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
GRACE_SECONDS = 3.0  # for the ranks that have not answered when one has failed (they may know why), or at the timeout


class WorkerError(RuntimeError):
    """A rank raised an exception, died or did not return in time. The message holds the traceback."""


@dataclass
class Task:
    """What one worker is told to do. `call` is the pickled (function, args)."""

    call: bytes
    rank: int
    world_size: int
    folder: str  # for the rendezvous file and the stack dumps of this run
    timeout: float


class Pickler(pickle.Pickler):
    """Tensors as bytes: a copy (multiprocessing shares memory) and ten times as fast as torch's archive for each."""

    def reducer_override(self, value):
        if type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        return tensor_of, (value.reshape(-1).view(torch.uint8).numpy(), value.dtype, value.shape)


def tensor_of(elements, dtype, shape):
    return torch.from_numpy(elements).view(dtype).reshape(shape)


def dumps(value):
    stream = io.BytesIO()
    Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


# ---------------------------------------------------------------- in the worker


def serve(connection, parents_end):
    """The life of a worker: receive a task, run it, send the answer; until the parent is gone."""
    torch.set_num_threads(1)  # first of all: the parent's OpenMP threads did not survive the fork, using them hangs
    parents_end.close()  # the fork copied it; while a copy is open, the parent's death does not close the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    gc.freeze()  # what was inherited is not garbage: perform() collects in no time
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(perform(task))


def perform(task):
    """Run one task in a process group of its own. Returns a pickled (True, result) or (False, traceback)."""
    rank, world_size = task.rank, task.world_size
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.manual_seed(0)
    with open(f"{task.folder}/stack_of_rank_{rank}", "w") as stack:
        # A thread that needs no Python writes down where this process hangs, whatever it hangs in. Collectives give up
        # later than that: one rank's error would break the connections, and so change the picture on the others.
        faulthandler.dump_traceback_later(task.timeout, file=stack)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{task.folder}/rendezvous",  # a file: no port can collide
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=2 * task.timeout + GRACE_SECONDS),
            )
            function, args = pickle.loads(task.call)
            answer = dumps((True, function(*args)))
            if dist.is_initialized():
                dist.barrier()  # a rank that leaves while others still connect makes them fail
            return answer
        except BaseException:  # SystemExit too: the worker has to outlive it
            return pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            pgm.process_group_manager = rendezvous.timeout = None
            gc.collect()  # a group has threads and sockets of its own, until nothing (a model in a cycle) refers to it
            torch.set_default_dtype(torch.float32)
            faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------- in the parent


@dataclass
class Worker:
    process: multiprocessing.Process
    connection: Connection

    def send(self, task):
        with contextlib.suppress(OSError):  # when the worker is dead already, receive() tells
            self.connection.send_bytes(pickle.dumps(task))

    def receive(self):
        """(True, result), or (False, what became of the worker)."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            return False, f"died: {signal.Signals(-code).name}" if code < 0 else f"died: exit code {code}"


def fork_worker():
    for module in PRELOADED:
        importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    connection, worker_end = fork.Pipe()
    process = fork.Process(target=serve, args=(worker_end, connection), daemon=True)
    process.start()
    worker_end.close()  # the worker now holds the only copy, so its death closes the pipe and wakes the parent
    return Worker(process, connection)


class WorkerPool:
    """As many workers as the largest world size so far; worker i is rank i."""

    def __init__(self):
        self.workers = []

    def run(self, world_size, function, *args, timeout=90):
        """The results of function(*args) on each rank of a new process group, by rank. Raises WorkerError."""
        call = dumps((function, args))
        while len(self.workers) < world_size:
            self.workers.append(fork_worker())
        workers = self.workers[:world_size]
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank, worker in enumerate(workers):
                    worker.send(Task(call, rank, world_size, folder, timeout))
                return collect(workers, folder, timeout)
            except BaseException:  # Ctrl-C too: no later test may meet workers in an unknown state
                self.close()
                raise

    def close(self):
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()
        self.workers = []


def collect(workers, folder, timeout):
    """The results by rank, or a WorkerError that tells what went wrong on which rank."""
    results, failures = {}, {}
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout + GRACE_SECONDS
    while waiting and (answered := wait(waiting, max(0, deadline - time.monotonic()))):
        for connection in answered:
            rank = waiting.pop(connection)
            succeeded, answer = workers[rank].receive()
            (results if succeeded else failures)[rank] = answer
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in waiting.values():
        stack = stack_at_timeout(folder, rank)
        if stack or not failures:
            failures[rank] = f"did not return in {timeout} s\n{stack}"
    if failures:
        # An error of gloo itself (connection closed by peer, ...) mostly echoes what happened on another rank.
        causes = {rank: text for rank, text in failures.items() if "gloo/transport" not in text} or failures
        raise WorkerError("\n".join(f"rank {rank} of {len(workers)} {causes[rank]}" for rank in sorted(causes)))
    return [results[rank] for rank in range(len(workers))]


def stack_at_timeout(folder, rank):
    """Where a rank was when its time was up: the frames above this file's. Empty for a rank that was in time."""
    path = Path(folder, f"stack_of_rank_{rank}")
    return path.read_text().partition(f'  File "{__file__}"')[0] if path.exists() else ""
