"""Folders that many ranks write together and that are there whole or not at all.

    save_dir/.tmp-step_00000010-…/  being written, or left by a killed run: never read, the next save deletes it
    save_dir/step_00000010/         whole: SHA256SUMS lists every file, as `sha256sum --check SHA256SUMS` expects it
    save_dir/.old-step_00000010/    a whole one that is being replaced, until the new one has its name

All files are on the disk before the folder gets its name by a rename, so a process may be killed at any moment. What is
in the files is `checkpoint.py`'s affair. `lock_save_dir`, `write_folder` and `find_checkpoint` are called by all ranks
together, and an error on one of them is raised by all, so nobody waits for a rank that gave up: see `on_all_ranks`.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

import process_group_manager as pgm
from log import say

SUMS = "SHA256SUMS"
BLOCK = 2**20  # bytes of one read or write; writes of 64 MiB and more took up to ten times as long (Linux 6.18, ext4)
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}  # in a safetensors header
TRAINER_STATE = "trainer_state.json"  # the last line of SHA256SUMS, which so cannot lose a line unseen


def on_all_ranks(function, *arguments, only=None):
    """Calls function(*arguments) on every rank or only on one. All ranks get the results by rank, or the same error."""
    rank, error, result = pgm.process_group_manager.global_rank, None, None
    try:
        result = function(*arguments) if only in (None, rank) else None
    except ValueError as problem:
        error = ValueError("; ".join(str(problem).splitlines()))
    except OSError as problem:
        error = OSError(f"{problem} (rank {rank})")
    outcomes = [None] * pgm.process_group_manager.world_size
    dist.all_gather_object(outcomes, (error, result), group=pgm.process_group_manager.patient_group)
    for error, _ in outcomes:
        if error is not None:
            raise error
    return [result for _, result in outcomes]


def lock_save_dir(save_dir):
    """Makes `save_dir` this run's own, as long as the result is kept. ValueError if another run has it, or if a rank
    has another folder of that name.
    """
    lock = FileLock(Path(save_dir, ".lock"))

    def acquire():
        try:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"checkpoint.save_dir = {save_dir}: another run is using it, each needs its own") from None
        except OSError as problem:
            raise ValueError(f"checkpoint.save_dir = {save_dir}: {problem}") from None
        mark.touch()

    def look():
        if not mark.exists():
            other = f"rank {pgm.process_group_manager.global_rank} has another"
            raise ValueError(f"checkpoint.save_dir = {save_dir}: must be one folder for all ranks, {other}")

    mark = Path(save_dir, on_all_ranks(lambda: f".{secrets.token_hex(8)}", only=0)[0])  # .lock may be an old run's
    on_all_ranks(acquire, only=0)
    try:
        on_all_ranks(look)
    finally:
        on_all_ranks(lambda: mark.unlink(missing_ok=True), only=0)
    return lock


# --- writing ---------------------------------------------------------------------------------------------------------


def write_file(path, *parts):
    """Writes the bytes and waits for the disk. Returns their SHA-256."""
    try:
        with ThreadPoolExecutor(1) as thread, open(path, "wb") as file:
            digest = thread.submit(sha256, parts)  # while this thread writes: both release the GIL
            for part in parts:
                for start in range(0, len(part), BLOCK):
                    file.write(part[start : start + BLOCK])
            file.flush()
            os.fsync(file.fileno())
            return digest.result()
    except OSError as error:  # that of a write does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None


def sha256(parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def write_tensors(path, tensors):
    """A safetensors file: the length of its header in 8 bytes, the header, the tensors straight from their memory."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)  # keeps the tensors aligned
    contents = (tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors.values())
    return write_file(path, len(header).to_bytes(8, "little"), header, *contents)


def write_folder(final, write_share, write_rest, keep=None):
    """Every rank calls write_share(folder), which returns {file name: SHA-256}, then rank 0 write_rest(folder).

    Then the folder becomes `final`, and of all whole ones only the newest `keep` stay (None: all).
    """
    temporary = on_all_ranks(_make_temporary, final, only=0)[0]
    try:
        shares = on_all_ranks(write_share, temporary)
        sums = {file: digest for share in shares for file, digest in share.items()}
        assert len(sums) == sum(map(len, shares)), "two ranks wrote the same file"
        on_all_ranks(lambda: (write_rest(temporary), _publish(temporary, final, sums, keep)), only=0)
    except (OSError, ValueError):
        if pgm.process_group_manager.global_rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_temporary(final):
    _clean_up(final.parent)
    # No two runs write to one name: ranks of a killed run may still be writing when the next one saves this step.
    temporary = _hidden(final).with_name(f"{_hidden(final).name}-{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    return temporary


def _publish(temporary, final, sums, keep):
    for path in filter(Path.is_file, temporary.rglob("*")):
        name = str(path.relative_to(temporary))
        if name not in sums:
            sums[name] = write_file(path, path.read_bytes())  # again, to have it on the disk
    in_order = sorted(sums, key=lambda name: (name == TRAINER_STATE, name))
    write_file(temporary / SUMS, "".join(f"{sums[name]}  {name}\n" for name in in_order).encode())
    _sync_folder(temporary)
    if final.exists():  # until the new one has the name, the old one stays a checkpoint under another
        final.rename(final.with_name(f".old-{final.name}"))
    temporary.rename(final)
    _sync_folder(final.parent)
    others = [path for path in checkpoints_in(final.parent) if step_of(path) != step_of(final)]
    others = [path for path in others if (path / SUMS).exists()]
    for path in others[keep - 1 :] if keep else []:
        path.rename(_hidden(path))
    _clean_up(final.parent)


def _hidden(path):
    """The name of a folder that is no checkpoint yet, or no more."""
    return path.with_name(f".tmp-{path.name.removeprefix('.old-')}")


def _clean_up(save_dir):
    """Deletes what a killed run left over, what `keep` gave up, and what was replaced."""
    for path in save_dir.glob(".tmp-step_*"):
        _delete(path)
    for path in checkpoints_in(save_dir):
        if path.name.startswith(".old-") and path.with_name(path.name.removeprefix(".old-")).exists():
            _delete(path.rename(_hidden(path)))  # hidden first: what is half deleted must not look like a checkpoint


def _delete(path):
    path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- finding ---------------------------------------------------------------------------------------------------------


def checkpoints_in(save_dir):
    """The newest first. An .old-step_00000010 without its successor was left by a kill between the two renames."""
    paths = [*Path(save_dir).glob("step_*"), *Path(save_dir).glob(".old-step_*")]
    paths = [path for path in paths if re.fullmatch(r"(\.old-)?step_\d{8,}", path.name)]
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path} is in the way: it has a checkpoint's name, but is not a folder")
    return sorted(paths, key=lambda path: (step_of(path), path.name), reverse=True)  # "." comes before "s"


def step_of(path):
    return int(path.name.rpartition("_")[2])


def find_checkpoint(resume, save_dir):
    """The checkpoint to resume from, verified, or None. `resume`: "none", a path, or "auto", the newest whole one."""
    manager = pgm.process_group_manager
    if resume == "none":
        return None
    paths = on_all_ranks(checkpoints_in, save_dir, only=0)[0] if resume == "auto" else [Path(resume)]
    for path in paths:
        try:
            on_all_ranks(verify_checkpoint, path, manager.global_rank, manager.world_size)
            return path
        except (ValueError, OSError) as error:
            if resume != "auto":
                raise type(error)(f"checkpoint.resume: {error}") from None
            say(f"warning: passed over a checkpoint: {error}")
    if paths:
        raise ValueError(f"checkpoint.save_dir = {save_dir}: every checkpoint there is damaged; empty it to start over")
    return None


def verify_checkpoint(path, part=0, num_parts=1):
    """ValueError if a file is missing or is not what was written. Reads one of `num_parts` shares of the files."""
    path = Path(path)
    try:
        lines = [line.split("  ") for line in (path / SUMS).read_text().splitlines()]
        sums = {name: digest for digest, name in lines}
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is not a whole checkpoint: it has no {SUMS}") from None
    except ValueError:
        sums = {}
    if list(sums)[-1:] != [TRAINER_STATE]:
        raise ValueError(f"{path / SUMS} is damaged")
    for name in list(sums)[part::num_parts]:
        try:
            with open(path / name, "rb") as file:
                digest = sha256(iter(partial(file.read, BLOCK), b""))
        except FileNotFoundError:
            raise ValueError(f"{path / name} is missing") from None
        if digest != sums[name]:
            raise ValueError(f"{path / name} is damaged: its SHA-256 is not the one in {SUMS}")


def find_weights(name):
    """The folder of a Hugging Face model: `name` itself, or the hub's, downloaded. Needs no process group."""
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])
    except Exception as error:  # the hub's library, and what is below it, raise dozens of classes
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"checkpoint.init_from = {name}: no such folder here or model on the hub: {reason}") from None
