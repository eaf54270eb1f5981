"""How the processes of a run find each other, and whether they are set up alike.

Ranks come at different times: one may have tokenised for an hour. So they wait for each other here, through a
key-value store and outside of any collective, whose timeout then only has to cover a training step. A rank that will
not come, since its machine has a problem of its own, says so to the others; and what has to be the same on all ranks is
compared before any group exists, as ranks that are set up differently could not talk in one.
"""

import contextlib
import json
import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist

store = None  # the part of the store that this start of the run has, made by join_processes
timeout = None  # of a collective in any group, set by join_processes; None: torch's own, half an hour
LATE_START = timedelta(hours=2)  # how long the first rank waits for the last one to arrive


def join_processes(device, timeout_seconds, settings=None):
    """`init_process_group` for torchrun's processes, or for this one alone.

    A collective waits `timeout_seconds` for a missing rank; here the first one waits `LATE_START` for the last.
    `settings`: {name: value} that all ranks must have alike, or each raises the same ValueError.
    """
    global store, timeout
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        store = dist.HashStore()
    else:
        try:
            shared, rank, world_size = next(dist.rendezvous("env://", timeout=_connect_timeout()))
            shared.set_timeout(LATE_START)
            store = wait_for_all(shared, rank, world_size)
        except RuntimeError as problem:
            reason = str(problem).splitlines()[0]
            raise ValueError(f"rank 0's machine {os.environ['MASTER_ADDR']} does not answer: {reason}") from None
        check_same_everywhere({**(settings or {}), "distributed.device": device.type}, rank, world_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _connect_timeout():
    """torchrun's store is there before any rank is. Without torchrun rank 0 brings it along, whenever it comes."""
    return timedelta(minutes=1) if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else LATE_START


def wait_for_all(shared, rank, world_size):
    """The part of the store that belongs to this start of the ranks; torchrun keeps its store over --max-restarts, and
    what an earlier start left there would mislead this one. Returns when all ranks have come.
    """
    me = secrets.token_hex(8)
    if rank == 0:  # names the start, and welcomes the others when the last of them has said hello
        mine = dist.PrefixStore(me, shared)
        shared.set("start", me)
        wait_for_hellos(shared, mine, world_size)
        for other in range(1, world_size):
            mine.set(f"welcome/{other}", mine.get(f"hello/{other}"))
        return mine
    start = None
    while not is_stopped(shared):
        # If it is still an earlier start's: its welcome is to another process.
        if shared.check(["start"]) and (latest := shared.get("start")) != start:
            start, mine = latest, dist.PrefixStore(latest.decode(), shared)
            mine.set(f"hello/{rank}", me)
        if start and mine.check([f"welcome/{rank}"]) and mine.get(f"welcome/{rank}").decode() == me:
            return mine
        time.sleep(0.05)


def wait_for_hellos(shared, mine, world_size):
    """Until every rank has said hello. After a minute it says who has not."""
    started, missing, is_said = time.monotonic(), range(1, world_size), False
    while missing := [rank for rank in missing if not mine.check([f"hello/{rank}"]) and not is_stopped(shared)]:
        waited, names = time.monotonic() - started, ", ".join(map(str, missing))
        if waited > LATE_START.total_seconds():
            raise ValueError(f"rank {names} did not come within {LATE_START}")
        if waited > 60 and not is_said:
            print(f"waiting for rank {names}: still busy with the data?", flush=True)
            is_said = True
        time.sleep(0.05)


def announce_stop():
    """Tells the other machines, whose ranks wait for this one to come, that it does not."""
    if store is None and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        with contextlib.suppress(RuntimeError):  # nobody there to be told
            shared, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=5)))
            shared.set(_stopped(), str(rank))


def is_stopped(shared):
    """Raises ValueError when a rank on another machine has ended with an error before it could come."""
    if shared.check([_stopped()]):
        raise ValueError(f"rank {shared.get(_stopped()).decode()} has ended with an error, told on its own machine")
    return False


def _stopped():
    return f"stopped/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"  # the store outlives a restart


def check_same_everywhere(settings, rank, world_size):
    """Through the store, as ranks that are set up differently could not talk in any group."""
    store.set(f"settings/{rank}", json.dumps(settings))
    of_ranks = [json.loads(text) for text in store.multi_get([f"settings/{other}" for other in range(world_size)])]
    store.set(f"settings_seen/{rank}", "")
    if rank == 0:  # it may take the store along
        store.wait([f"settings_seen/{other}" for other in range(world_size)])
    for other, theirs in enumerate(of_ranks):
        for name, value in of_ranks[0].items():
            if theirs.get(name) != value:
                shown = f"rank 0 has {json.dumps(value)}, rank {other} {json.dumps(theirs.get(name))}"
                raise ValueError(f"{name} is not the same on all ranks: {shown}")
