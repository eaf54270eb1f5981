"""What the checks of the exercises share. A check prints "not yet: …" and ends with 1, or "right: …" with 0."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project, and tests/layouts.py, tests/workers.py


def expect(holds, otherwise):
    """Ends the check unless `holds`."""
    if not holds:
        print(f"not yet: {otherwise}")
        sys.exit(1)


def timetable(name, pp_size, num_microbatches, num_chunks=1, **options):
    """The Timetable of a schedule that the learner has put into schedules.SCHEDULES; a deadlock is explained."""
    from schedules import SCHEDULES
    from timetable import make_timetable

    expect(name in SCHEDULES, f"schedules.SCHEDULES has no {name!r}")
    try:
        return make_timetable(name, pp_size, num_microbatches, num_chunks, **options)
    except ValueError as problem:
        expect(False, problem)


def run_on_ranks(num_ranks, function, *arguments):
    """The results of `function` on so many real gloo processes, by rank."""
    from workers import WorkerError, WorkerPool

    pool = WorkerPool()
    try:
        return pool.run(num_ranks, function, *arguments)
    except WorkerError as error:
        expect(False, error)
    finally:
        pool.close()


def difference_to_one_process(engine, num_chunks=1):
    """The largest difference between gradients on 2 pipeline ranks and in plain PyTorch, in float64."""
    import layouts

    config = layouts.tiny_config(num_hidden_layers=8)
    options = dict(config=config, engine=engine, chunks=num_chunks)
    results = run_on_ranks(2, layouts.train_cases, (1, 2, 1), [options])
    ours = layouts.assemble([result["gradients"] for (result,) in results])
    plain = layouts.train_plainly(config)["gradients"]
    return max((ours[name] - plain[name]).abs().max().item() for name in plain)
