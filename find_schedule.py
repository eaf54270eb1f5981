"""From a schedule's name to the lists of actions of all ranks, one of `schedules.py` or of a file of the user's own.

    action_lists(find_schedule("my_schedule.py:one_by_one"), pp_size=4, num_microbatches=8)

What is wrong with such a file is told as one line, with the file's own line number, and as a ValueError.
"""

import inspect
import runpy
import traceback
from functools import lru_cache

from schedules import SCHEDULES, Action, loop, v_shape


def find_schedule(name):
    """The schedule function called `name`: one of SCHEDULES, or `path/to/file.py:function`. Raises ValueError."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    path, _, function_name = name.rpartition(":")
    if not path.endswith(".py"):
        known = ", ".join(SCHEDULES)
        raise ValueError(f"distributed.pp_engine: {name!r} is not a schedule; use one of {known}, or file.py:function")
    try:
        module = _run_file(path)
    except (Exception, SystemExit) as problem:
        raise ValueError(f"distributed.pp_engine: cannot load {name!r}: {_with_line(problem, path)}") from problem
    if not inspect.isfunction(module.get(function_name)):
        raise ValueError(f"distributed.pp_engine: {name!r}: {path} has no function {function_name!r}")
    return module[function_name]


@lru_cache
def _run_file(path):
    """Once, so that all of a run has the same schedule."""
    return runpy.run_path(path)


def _with_line(problem, path):
    """An exception in a user's file as one line, with the last line of that file that it went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == path]
    text = f"{type(problem).__name__}: {' '.join(str(problem).split())}"  # a SyntaxError knows its line itself
    return f"{text} ({path}, line {lines[-1]})" if lines else text


def placement_of(schedule):
    return getattr(schedule, "placement", loop)


def chunks_of(schedule):
    """How many model chunks a rank `schedule` takes; None if that is free, as the parameter num_chunks."""
    if placement_of(schedule) is v_shape:
        return 2
    return None if "num_chunks" in inspect.signature(schedule).parameters else 1


def check_chunks(schedule, num_chunks):
    """Raises ValueError unless `schedule` can be made for `num_chunks` model chunks a rank."""
    needed = chunks_of(schedule)
    if needed not in (None, num_chunks):
        why = "folds the model into a V" if needed == 2 else "has one chunk a rank"
        raise ValueError(f"distributed.pp_chunks: {num_chunks}, but this schedule {why}: use {needed}")


def action_lists(schedule, pp_size, num_microbatches, num_chunks=1):
    """Every rank's list of actions. Raises ValueError when the function fails or makes something else."""
    takes_chunks = "num_chunks" in inspect.signature(schedule).parameters
    numbers = (pp_size, num_microbatches, num_chunks) if takes_chunks else (pp_size, num_microbatches)
    lists = []
    for pp_rank in range(pp_size):
        call = f"{schedule.__name__}{(pp_rank, *numbers)}"
        try:
            actions = schedule(pp_rank, *numbers)
            actions = list(actions) if inspect.isgenerator(actions) else actions
        except (Exception, SystemExit) as problem:
            raise ValueError(f"{call} failed: {_with_line(problem, inspect.getsourcefile(schedule))}") from problem
        if not isinstance(actions, list):
            raise ValueError(f"{call} returned {actions!r:.100}; it must return a list of actions")
        for action in actions:
            if not (isinstance(action, Action) and type(action.chunk) is type(action.microbatch) is int):
                how = "make every action with F, B, I or W and whole numbers: F(microbatch) or F(microbatch, chunk)"
                raise ValueError(f"{call} returned a list with {action!r:.100} in it; {how}")
        lists.append(actions)
    return lists
