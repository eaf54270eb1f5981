"""What a run survives: killed ranks, full and read-only disks, signals, numbers that are not finite."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import failure
from checkpoint import read_trainer_state
from checkpoint_folder import verify_checkpoint
from trainers import Trainers

ROOT = Path(__file__).parent.parent
CONFIG = {
    "model": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 257, "max_position_embeddings": 16,
    },
    "training": {
        "steps": 20, "seq_length": 16, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 0.003,
        "warmup_steps": 3,
    },
}  # fmt: skip
LAYOUTS = {
    "alone": [],
    "tp2": ["distributed.tp_size=2"],
    "pp2_zb_v": ["distributed.pp_size=2", "distributed.pp_engine=zb_v", "model.num_hidden_layers=4"],
    "dp2_zero1_bfloat16": ["distributed.dp_size=2", "distributed.zero1=true", "model.dtype=bfloat16"],
    "tp2_pp2": ["distributed.tp_size=2", "distributed.pp_size=2"],
}


def world_size(layout):
    return 2 ** sum("_size=2" in override for override in LAYOUTS[layout])


@pytest.fixture
def start(tmp_path):
    """start(layout, *overrides) starts the processes of a run; what is written goes below tmp_path."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 8)  # 11 steps, or fewer
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    runs = []

    def arguments(layout, *overrides):
        common = [f'dataset.files=["{tmp_path}/text.txt"]', f"dataset.cache_dir={tmp_path}/cache"]
        return ["--config", f"{tmp_path}/config.json", *common, *LAYOUTS[layout], *overrides]

    def start(layout, *overrides, **options):
        output = tmp_path / f"output_{len(runs)}"
        runs.append(Trainers(world_size(layout), arguments(layout, *overrides), output, **options))
        return runs[-1]

    start.arguments = arguments
    yield start
    for run in runs:
        run.end()


def finished(run, *codes):
    """The output of a run that ends by itself: all ranks with this exit code."""
    assert run.exit_codes() == [*codes] * len(run.processes), run.output()
    return run.output()


def the_error(run):
    """The one line of a run whose ranks all end with exit code 2."""
    output = finished(run, 2)
    assert "Traceback" not in output
    (error,) = re.findall(r"^error: (.*)$", output, re.M)
    return error


def saving(save_dir, **more):
    more = {"save_frequency": 1} | more
    return [f"checkpoint.save_dir={save_dir}", *(f"checkpoint.{key}={value}" for key, value in more.items())]


def checkpoints(save_dir):
    """{step: folder}, all of them whole and what their name says."""
    found = {}
    for path in save_dir.glob("step_*"):
        verify_checkpoint(path)
        found[int(path.stem.removeprefix("step_"))] = path
        assert read_trainer_state(path)["step"] == int(path.stem.removeprefix("step_"))
    return found


def newest_step(save_dir):
    return max((int(path.stem.removeprefix("step_")) for path in save_dir.glob("step_*")), default=0)


def tensors_of(path):
    """The checksums of a checkpoint's tensors: the other files have paths of this run in them."""
    return [line for line in (path / "SHA256SUMS").read_text().splitlines() if line.endswith(".safetensors")]


def numbers_of(metrics_file):
    """[(step, loss, gradient norm, …)] of all the runs that wrote to this file."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    return [tuple(json.loads(line)[key] for key in keys) for line in metrics_file.read_text().splitlines()]


# --- stopped ---------------------------------------------------------------------------------------------------------


def test_three_steps_and_three_more_are_six(start, tmp_path):
    """dp 2, accumulation 4: of 22 sequences a step takes 8, so the third step, after which it stops, is in epoch 2."""
    six_steps = ("training.steps=6", "training.gradient_accumulation_steps=4")
    numbers, folders = [], (tmp_path / "at_once", tmp_path / "in_two")
    for folder, stops in zip(folders, ((), (3,)), strict=True):
        metrics = f"logging.metrics_file={folder}.jsonl"
        for stop in (*stops, None):
            limit = [f"training.max_tokens={stop * 8 * 16}"] if stop else []
            run = start("dp2_zero1_bfloat16", *six_steps, *saving(folder, save_frequency=0), metrics, *limit)
            finished(run, 0)
            assert newest_step(folder) == (stop or 6)
        numbers.append(numbers_of(folder.with_suffix(".jsonl")))
    assert "resumed from" in run.output() and len(numbers[0]) == 6
    assert numbers[0] == numbers[1]
    assert tensors_of(checkpoints(folders[0])[6]) == tensors_of(checkpoints(folders[1])[6])


def test_what_changed_since_the_checkpoint_is_told(start, tmp_path):
    save_dir = tmp_path / "saved"
    finished(start("alone", *saving(save_dir), "training.steps=2"), 0)
    changed = ("training.steps=3", "training.learning_rate=0.002", "training.gradient_accumulation_steps=1")
    output = finished(start("alone", *saving(save_dir, resume=save_dir / "step_00000001"), *changed), 0)
    note = "note: since that checkpoint: steps 2 -> 3, learning_rate 0.003 -> 0.002, global_batch_size 2 -> 1"
    assert note in output.splitlines()
    assert f"warning: {save_dir}/step_00000002 is later: checkpoint.resume=auto would take it" in output
    assert "note:" not in finished(start("alone", *saving(save_dir), *changed), 0)


def test_another_runs_checkpoints_are_not_written_among(start, tmp_path, monkeypatch):
    ours, others = tmp_path / "ours", tmp_path / "others"
    finished(start("alone", *saving(ours), "training.steps=2"), 0)
    finished(start("alone", *saving(others), "training.steps=3", "training.seed=7"), 0)
    before = sorted(others.iterdir())
    from_ours = saving(others, resume=ours / "step_00000001", keep=1)
    assert f"but {others} has checkpoints, which checkpoint.resume=auto would continue" in the_error(
        start("alone", *from_ours)
    )
    assert sorted(others.iterdir()) == before
    fork = saving(tmp_path / "fork", resume=ours / "step_00000001")
    assert "at step 1" in finished(start("alone", *fork, "training.steps=2"), 0)
    # torchrun starts the ranks again with the same command: on with the fork, not from its beginning.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    output = finished(start("alone", *fork, "training.steps=3"), 0)
    assert f"resumed from {tmp_path}/fork/step_00000002 at step 2" in output


# --- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2", "pp2_zb_v", "dp2_zero1_bfloat16", "tp2_pp2"])
def test_killed_at_five_random_moments(layout, start, tmp_path):
    seed = list(LAYOUTS).index(layout)
    print(f"{seed=}")
    chance, expected_dir, save_dir = random.Random(seed), tmp_path / "expected", tmp_path / "saved"
    expected_file, metrics_file = tmp_path / "expected.jsonl", tmp_path / "metrics.jsonl"
    began = time.monotonic()
    run = start(layout, *saving(expected_dir), f"logging.metrics_file={expected_file}")
    run.wait_for(lambda: newest_step(expected_dir) > 0)
    first_save = time.monotonic() - began
    finished(run, 0)
    one_step = (time.monotonic() - began - first_save) / CONFIG["training"]["steps"]
    expected, expected_numbers = checkpoints(expected_dir), dict(by_step(numbers_of(expected_file)))

    def check(run, resume_step):
        resumed = re.findall(r"^resumed from \S+ at step (\d+)$", run.output(), re.M)
        assert resumed in ([], [str(resume_step)])
        for step, path in checkpoints(save_dir).items():
            assert tensors_of(path) == tensors_of(expected[step]), f"step {step} is not the uninterrupted run's"

    newest = inside_a_save = 0
    overrides = (f"logging.metrics_file={metrics_file}",)
    for moment in ("start", "step", "save", "step", "save", *20 * ["another save"]):
        if moment == "another save" and inside_a_save:
            break
        resume, resume_step = "auto", newest
        if newest > 1 and moment == "save":  # so that the next save replaces a checkpoint
            resume, resume_step = checkpoints(save_dir)[newest - 1], newest - 1
        leftovers = set(save_dir.glob(".tmp-*"))
        run = start(layout, *saving(save_dir, keep=3, resume=resume), *overrides)
        if moment == "start":
            time.sleep(chance.uniform(0, first_save))
        elif moment == "step":
            run.wait_for(lambda before=newest: newest_step(save_dir) > before)
            time.sleep(chance.uniform(0, 1.5 * one_step))
        else:
            run.wait_for(lambda before=leftovers: set(save_dir.glob(".tmp-*")) - before)
            time.sleep(chance.uniform(0, 0.5 * one_step))
        run.kill(chance.randrange(world_size(layout)))
        time.sleep(chance.uniform(0, 0.1))
        run.end()
        check(run, resume_step)
        assert newest_step(save_dir) >= newest, "a checkpoint is gone"
        newest = newest_step(save_dir)
        leftovers = [path.name for path in set(save_dir.glob(".tmp-*")) - leftovers]
        inside_a_save += bool(leftovers)
        print(f"killed at a {moment}; newest is step {newest}, half written: {leftovers}")
    assert inside_a_save

    run = start(layout, *saving(save_dir, keep=3), *overrides)
    output = finished(run, 0)
    assert f"resumed from {save_dir}/step_{newest:08d} at step {newest}\n" in output
    check(run, newest)
    last = CONFIG["training"]["steps"]
    assert sorted(checkpoints(save_dir)) == [last - 2, last - 1, last]
    # Every line that any of the runs wrote is the uninterrupted run's, and none is missing.
    numbers = numbers_of(metrics_file)
    assert all(expected_numbers[step] == rest for step, rest in by_step(numbers))
    assert {step for step, _ in by_step(numbers)} == set(range(1, last + 1))


def by_step(numbers):
    return [(step, rest) for step, *rest in numbers]


def test_torchrun_restarts_a_run_and_passes_signals_on(start, tmp_path):
    expected_file, metrics_file, save_dir = tmp_path / "expected.jsonl", tmp_path / "metrics.jsonl", tmp_path / "saved"
    overrides = [*saving(save_dir, keep=2), f"logging.metrics_file={metrics_file}", "training.steps=2000"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.Popen(
        [*torchrun, "--max-restarts=2", "train.py", *start.arguments("pp2_zb_v", *overrides)], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        read_until(process.stdout, "saved step 3")
        pids = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(min(map(int, pids)), signal.SIGKILL)
        read_until(process.stdout, "grid")
        output = read_until(process.stdout, "saved step")
        assert re.search(r"^resumed from \S+ at step \d+$", output, re.M)
        process.terminate()
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    (last,) = re.findall(r"^saved step (\d+) in \S+\nended by a signal after step \1\n\Z", output, re.M)
    assert newest_step(save_dir) == int(last) and checkpoints(save_dir)
    assert errors.count("exitcode: -9") == 1  # torchrun's
    assert errors.count("does not answer any more") <= 1 and 'train.py", line' not in errors
    # A kill and a signal later: the uninterrupted run, step for step.
    run = start("pp2_zb_v", "training.steps=2000", f"logging.metrics_file={expected_file}")
    run.wait_for(lambda: expected_file.exists() and len(numbers_of(expected_file)) >= int(last))
    run.end()
    expected, numbers = dict(by_step(numbers_of(expected_file))), by_step(numbers_of(metrics_file))
    assert {step for step, _ in numbers} == set(range(1, int(last) + 1))
    assert all(expected[step] == rest for step, rest in numbers)


def read_until(stream, text):
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} never came after\n{''.join(lines)}")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_run_with_a_checkpoint(number, start, tmp_path):
    expected_file, metrics_file, save_dir = tmp_path / "expected.jsonl", tmp_path / "metrics.jsonl", tmp_path / "saved"
    steps = "training.steps=200"
    expected_run = start("tp2", f"logging.metrics_file={expected_file}", steps)
    run = start("tp2", *saving(save_dir, save_frequency=0), f"logging.metrics_file={metrics_file}", steps)
    run.wait_for("step     2")
    run.kill(1, number=number)  # one rank is enough
    output = finished(run, 0)
    last = newest_step(save_dir)
    assert 2 <= last < 200
    assert output.endswith(f"\nsaved step {last} in {save_dir}\nended by a signal after step {last}\n")
    assert numbers_of(metrics_file)[-1][0] == last
    run = start("tp2", *saving(save_dir, save_frequency=0), f"logging.metrics_file={metrics_file}", steps)
    run.wait_for(f"step {last + 2:5d}")
    run.kill(0, 1, number=number)
    finished(run, 0)
    assert newest_step(save_dir) > last
    expected_run.wait_for(f"step {newest_step(save_dir):5d}")
    assert numbers_of(metrics_file) == numbers_of(expected_file)[: newest_step(save_dir)]


def test_a_run_that_lost_torchrun_saves_and_ends(start, tmp_path):
    run = start("tp2", *saving(tmp_path / "saved", save_frequency=0), "training.steps=100000")
    run.wait_for("step     2")
    run.store.kill()
    finished(run, 0)
    assert list(checkpoints(tmp_path / "saved")) == [newest_step(tmp_path / "saved")]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(failure, "PATIENCE", 1.0)  # the processes are forked: they have it too


@pytest.mark.parametrize(("victim", "agent"), [(2, True), (2, False), (0, False)], ids=str)
def test_the_message_names_the_rank_that_died(victim, agent, start, impatient):
    """Nobody ends the others. Of the pipeline's ranks, some are not connected with the one that died."""
    layout = ["distributed.tp_size=1", "distributed.pp_size=4", "model.num_hidden_layers=4"]
    run = start("tp2_pp2", *layout, "training.steps=100000", agent=agent)
    run.wait_for("step     2")
    run.kill(victim)
    codes = run.exit_codes(timeout=20)
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(4)]
    message, *others = re.findall(r"^.*rank.*end.*$", run.output(), re.M)
    assert f"rank {victim} does not answer any more" in message and not others
    assert "Traceback" not in run.output() and "frame #" not in run.output()


def test_a_rank_that_hangs_is_named_when_the_time_is_up(start, impatient):
    run = start("tp2_pp2", "training.steps=100000", "distributed.timeout_seconds=2")
    run.wait_for("step     2")
    run.kill(3, number=signal.SIGSTOP)
    run.wait_for("does not answer", timeout=20)
    run.kill(3)
    assert run.exit_codes(timeout=20) == [1, 1, 1, -signal.SIGKILL]
    (message,) = re.findall(r"^.*does not answer.*$", run.output(), re.M)
    assert "rank 3 does not answer any more" in message


# --- disks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if shutil.which("mount") is None or mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", path):
        pytest.skip("no permission to mount a tmpfs here")
    yield path
    subprocess.run(["umount", "--recursive", path], check=True)


def mount(*arguments):
    """0 if it worked."""
    return subprocess.run(["mount", *arguments], stderr=subprocess.DEVNULL).returncode


def test_full_and_read_only_disks(disk, start):
    save_dir = disk / "saved"
    for _ in range(2):  # the second time it resumes, and comes no further
        error = the_error(start("tp2", *saving(save_dir)))
        assert re.fullmatch(rf"\[Errno 28\] No space left on device: '{save_dir}/\.tmp-\S+' \(rank [01]\)", error)
        last = newest_step(save_dir)
        assert last == len(checkpoints(save_dir)) and not list(save_dir.glob(".tmp-*"))
    assert last > 0

    mount("-o", "remount,size=4m", disk)
    run = start("tp2", *saving(save_dir, keep=2), "training.steps=100000")
    run.wait_for(lambda: newest_step(save_dir) > last + 1)
    # As when a disk fails under a run. Not "remount,ro": that is refused while a file is open.
    mount("--bind", save_dir, save_dir)
    mount("-o", "remount,bind,ro", save_dir)
    for error in (the_error(run), the_error(start("tp2", *saving(save_dir)))):
        assert "Read-only file system" in error and str(save_dir) in error
    subprocess.run(["umount", save_dir], check=True)
    newest = newest_step(save_dir)
    assert newest > last
    run = start("tp2", *saving(save_dir, keep=1), f"training.steps={newest + 1}")
    assert f"at step {newest}\n" in finished(run, 0)
    assert list(checkpoints(save_dir)) == [newest + 1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_of_the_logs_is_a_warning(start):
    logs = ("logging.metrics_file=/dev/full", "logging.trace_file=/dev/full", "training.steps=4")
    output = finished(start("alone", *logs), 0)
    assert "Traceback" not in output and "step     4" in output
    warnings = re.findall(r"^warning: (logging\.\w+): .*No space left on device.*$", output, re.M)
    assert sorted(warnings) == ["logging.metrics_file", "logging.trace_file"]


# --- what lies in the folder -----------------------------------------------------------------------------------------


def test_damaged_checkpoints_are_passed_over(start, tmp_path):
    save_dir = tmp_path / "saved"
    finished(start("tp2", *saving(save_dir), "training.steps=3"), 0)
    second = save_dir / "step_00000002"
    expected = tensors_of(save_dir / "step_00000003")
    shard = sorted((save_dir / "step_00000003").glob("*.safetensors"))[2]
    os.truncate(shard, shard.stat().st_size - 1)
    (save_dir / "step_00000004").mkdir()
    (save_dir / ".tmp-step_00000005-01234567").mkdir()
    (save_dir / "step_00000003_copy").mkdir()  # the user's own
    error = the_error(start("tp2", *saving(save_dir, resume=save_dir / "step_00000003"), "training.steps=3"))
    assert error.startswith(f"checkpoint.resume: {shard} is damaged")
    output = finished(start("tp2", *saving(save_dir, keep=2), "training.steps=3"), 0)
    warnings = re.findall(r"^warning: passed over a checkpoint: (\S+)", output, re.M)
    assert warnings == [str(save_dir / "step_00000004"), str(shard)]
    assert f"resumed from {second} at step 2" in output
    assert tensors_of(save_dir / "step_00000003") == expected
    left = sorted(path.name for path in save_dir.iterdir() if path.is_dir())  # what is not whole does not count as kept
    assert left == ["step_00000002", "step_00000003", "step_00000003_copy", "step_00000004"]

    # A finished run has nothing to do, and says so.
    overrides = ("training.steps=3", "checkpoint.init_from=configs")
    output = finished(start("tp2", *saving(save_dir), *overrides, agent=False), 0)
    assert "frame #" not in output  # of a store that left too early
    assert "nothing to do: at step 3" in output and "saved step" not in output
    assert "checkpoint.init_from = configs: not used" in output
    (save_dir / "step_00000006").write_text("not a folder")
    assert "step_00000006 is in the way" in the_error(start("tp2", *saving(save_dir), agent=False))


def test_two_runs_on_one_folder(start, tmp_path):
    save_dir = tmp_path / "saved"
    first = start("tp2", *saving(save_dir), "training.steps=10000")
    first.wait_for("saved step 1 ")
    assert f"checkpoint.save_dir = {save_dir}: another run is using it" in the_error(start("tp2", *saving(save_dir)))
    saved = newest_step(save_dir)
    first.wait_for(lambda: newest_step(save_dir) > saved)
    first.kill(0, number=signal.SIGTERM)
    finished(first, 0)
    assert len(checkpoints(save_dir)) == newest_step(save_dir)


# --- not finite ------------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_stops_and_keeps_the_last_good_checkpoint(start, tmp_path):
    save_dir = tmp_path / "saved"
    diverging = ("training.learning_rate=1e30", "training.warmup_steps=0", "training.grad_clip=null")
    diverging += ("training.max_bad_steps=2", "training.min_learning_rate=1e30")
    run = start("pp2_zb_v", *saving(save_dir), *diverging)
    error = the_error(run)
    assert error == "2 steps in a row were not finite (training.max_bad_steps)"
    last = newest_step(save_dir)
    assert list(checkpoints(save_dir)) == list(range(1, last + 1))
    bad = re.findall(r"^step (\d+) is not applied: loss (\S+), gradient norm (\S+); (.*)$", run.output(), re.M)
    assert [int(step) for step, *_ in bad] == [last + 1, last + 2]
    for _, loss, norm, where in bad:
        assert "nan" in (loss, norm) or "inf" in (loss, norm)
        assert re.fullmatch(r"not finite: the gradient of [\w.]+ on rank \d and on 1 more ranks", where)
    # As the last step of a run it loses nothing: what the steps before it made is saved.
    again = saving(tmp_path / "again", save_frequency=0)
    finished(start("pp2_zb_v", *again, *diverging, f"training.steps={last + 1}"), 0)
    assert tensors_of(checkpoints(tmp_path / "again")[last + 1]) == tensors_of(checkpoints(save_dir)[last])


def test_one_bad_step_is_not_applied_and_the_run_goes_on(start, tmp_path):
    """The embedding of "Z", which the text has once, is not a number."""
    finished(start("alone", *saving(tmp_path / "start"), "training.steps=1"), 0)
    (folder,) = checkpoints(tmp_path / "start").values()
    (shard,) = [path for path in folder.glob("model-*") if "model.embed_tokens.weight" in load_file(path)]
    tensors = load_file(shard)
    tensors["model.embed_tokens.weight"][ord("Z")] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    text = 5 * "the quick brown fox jumps over the lazy dog, and then comes back"  # 64 bytes each, the tokens of a step
    common = [f"checkpoint.init_from={folder}", "model.dtype=float32", "dataset.shuffle=false"]
    common += ["training.min_learning_rate=0.003", "training.warmup_steps=0"]  # the same rate at each step
    outputs, numbers = [], []
    for name, content, steps in (("with", text[:74] + "Z" + text[75:], 4), ("without", text, 3)):
        (tmp_path / f"{name}.txt").write_text(content)
        own = [f'dataset.files=["{tmp_path}/{name}.txt"]', f"logging.metrics_file={tmp_path}/{name}.jsonl"]
        own += [*saving(tmp_path / name), f"training.steps={steps}"]
        outputs.append(finished(start("dp2_zero1_bfloat16", *common, *own), 0))
        numbers.append([rest[:3] for _, rest in by_step(numbers_of(tmp_path / f"{name}.jsonl"))])
    bad = r"^step 2 is not applied: loss nan, gradient norm nan; not finite: the gradient of [\w.]+ on rank \d"
    assert len(re.findall(bad, outputs[0], re.M)) == 1
    assert "is not applied" not in outputs[1]
    # Its weights and moments went on from step 1's: as if the text had no such step.
    assert numbers[0][:1] + numbers[0][2:] == numbers[1]
    saved, expected = checkpoints(tmp_path / "with"), checkpoints(tmp_path / "without")
    assert saved.keys() == {1, 3, 4} and expected.keys() == {1, 2, 3}
    assert tensors_of(saved[4]) == tensors_of(expected[3])
