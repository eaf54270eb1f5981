"""When a rank fails or dies: all ranks end, soon and together, with one message that says why.

A rank with an error of its own says it. A rank that only notices that another does not answer calls the roll: it asks
through the store who is still there, and names the others. A thread of every rank answers, whatever the rank itself
waits for, and then ends it.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

import rendezvous

PATIENCE = 3.0  # seconds that a rank has to answer when another asks who is still there
ending = False  # this process is about to leave: a store that others take along is no failure any more


def watch():
    """Starts the thread that answers. `rendezvous.join_processes` came before."""
    if dist.get_world_size() > 1:
        threading.Thread(target=answer_roll_call, args=(dist.get_rank(),), daemon=True).start()


def answer_roll_call(rank):
    """Until the run ends: when a rank that failed asks, says that this one is there, then ends it."""
    while not ending:
        if store_is_gone():
            with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as turn:
                turn.bind(("", store_address()[1]))  # one a machine gets it; local rank 0 may be gone
                print("rank 0 does not answer any more; the run ends", file=sys.stderr, flush=True)
                time.sleep(PATIENCE)
            os._exit(1)
        try:
            is_called = rendezvous.store.check(["roll_call"])
        except RuntimeError:  # torchrun is gone, and nobody else would end this process: as if it had sent SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if is_called:
            rendezvous.store.set(f"here/{rank}", "")
            time.sleep(PATIENCE + 1)  # for the one that asked, to speak
            os._exit(1)
        time.sleep(0.5)


def store_is_gone():
    """Whether rank 0 is gone and took the store along; torchrun's own outlives the ranks."""
    # By a connection, since a call to a store that is gone prints pages from C++.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not isinstance(rendezvous.store, dist.PrefixStore):
        return False
    try:
        socket.create_connection(store_address(), timeout=PATIENCE).close()
    except OSError:
        return True
    return False


def store_address():
    return rendezvous.store.underlying_store.host, rendezvous.store.underlying_store.port


def is_echo(error):
    """Whether `error` only says that another rank is gone or late: a broken connection or a collective's timeout."""
    lost = ("gloo/transport", "Connection closed", "Connection reset", "Timed out", "timed out", "NCCL")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in lost)


def report_failure(error):
    """Says once, for all ranks, why the run ends, and ends this process with exit code 1.

    An error of its own is printed by the first rank that has it. A rank that merely lost its connection asks who is
    still there, and names the others.
    """
    global ending
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun wants to end us; it waits 30 s
    if not dist.is_initialized():
        raise error
    rank, text = dist.get_rank(), "".join(traceback.format_exception(error))
    if "allocate memory" in str(error) or isinstance(error, torch.OutOfMemoryError):
        text = f"out of memory: {str(error).splitlines()[0]} (train.py --dry-run shows what a layout needs)"
    if is_echo(error):
        time.sleep(0.5)  # a process that dies closes its connections one after the other
        if store_is_gone():
            time.sleep(2 * PATIENCE)  # answer_roll_call ends this process
    ending = True
    try:
        rendezvous.store.set(f"here/{rank}", "")
        rendezvous.store.set(f"failed/{rank}", "")
        if is_echo(error):
            text = f"{missing_ranks()}; the run ends ({str(error).strip().splitlines()[0]})"
            is_first = rendezvous.store.add("failures", 1) == 1
        else:
            rendezvous.store.add("failures", 1)
            is_first = rendezvous.store.add(f"failure/{type(error).__name__}/{error}", 1) == 1
    except RuntimeError:  # the store went down with its host
        is_first = True
    if is_first:
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
    if not is_echo(error):
        with contextlib.suppress(RuntimeError):
            call_roll()
    if rank == 0:
        time.sleep(1)  # the last to go, if it has the store
    os._exit(1)  # without the tidy ending, which would wait for ranks that are gone


def missing_ranks():
    if gone := call_roll():
        return f"rank {', '.join(map(str, gone))} {'does' if len(gone) == 1 else 'do'} not answer any more"
    time.sleep(PATIENCE)  # all are there; whoever waits for one that does not come will say so within a step
    late = ranks_without("failed")
    return f"rank {', '.join(map(str, late)) or '?'} did not come within distributed.timeout_seconds"


def call_roll():
    """Ends the other ranks. Returns those that do not answer."""
    rendezvous.store.set("roll_call", "")
    deadline = time.monotonic() + PATIENCE
    while (gone := ranks_without("here")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return gone


def ranks_without(key):
    return [rank for rank in range(dist.get_world_size()) if not rendezvous.store.check([f"{key}/{rank}"])]


def stop(problem, patience=60.0):
    """Ends this process for something that the user can mend: a message for each machine, exit code 2."""
    # torchrun ends every process as soon as the first one exits. So the silent ones wait up to `patience` seconds to be
    # ended: if one went first, the message might never come out. One that nobody ends is alone with its problem.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # training may have set it to something gentler
        time.sleep(patience)
    print("error: " + str(problem).replace("\n", "\n       "), file=sys.stderr, flush=True)
    rendezvous.announce_stop()
    sys.exit(2)


def stop_all(problem):
    """`stop` for a problem that all ranks have: rank 0 says it, then all end with exit code 2."""
    global ending
    ending = True
    if dist.get_rank() == 0:
        print("error: " + str(problem).replace("\n", "\n       "), file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):  # a rank that died meanwhile
        dist.barrier()  # whoever left first would take the others along, by torchrun or with the store
    sys.exit(2)
