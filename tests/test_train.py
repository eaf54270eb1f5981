"""train.py from the outside, under the real torchrun: what a user types, sees and gets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from config import VALID_KEYS

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CONFIG = {
    "model": {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 257, "max_position_embeddings": 32, "dtype": "float64",
    },
    "training": {
        "steps": 3, "seq_length": 32, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 0.001,
    },
    "dataset": {"validation_fraction": 0.2},
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """run(processes, *overrides) starts train.py on a small text and returns the finished process."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    common = ["train.py", "--config", str(config), f"dataset.files={json.dumps([str(text)])}"]
    common.append(f"dataset.cache_dir={tmp_path / 'cache'}")

    def start(processes, *overrides, launcher=(), **options):
        launch = (
            [*TORCHRUN, *(launcher or ["--standalone"]), f"--nproc_per_node={processes}"]
            if processes
            else [sys.executable]
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **options.pop("env", {})}
        return subprocess.Popen(
            [*launch, *common, *overrides], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
            **options,
        )  # fmt: skip

    def finish(*arguments, **options):
        process = start(*arguments, **options)
        process.out, process.err = process.communicate(timeout=100)
        return process

    finish.start = start
    return finish


def metrics_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_layout_logs_the_same_run(run, tmp_path):
    evaluate = ("training.eval_frequency=2", "training.eval_steps=1")
    expected_file, file = tmp_path / "one.jsonl", tmp_path / "four.jsonl"
    alone = run.start(0, f"logging.metrics_file={expected_file}", *evaluate)
    layout = ("distributed.tp_size=2", "distributed.dp_size=2", "training.gradient_accumulation_steps=2")
    layout += ("distributed.zero1=true", "distributed.sequence_parallel=true")
    process = run(4, f"logging.metrics_file={file}", *layout, *evaluate, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert process.returncode == 0, process.err
    printed_alone, errors = alone.communicate(timeout=100)
    assert alone.returncode == 0, errors
    imported = set(re.findall(r"import time:.*\| +([\w.]+)$", process.err, re.M))
    assert "torch" in imported
    unused = {"torch._dynamo", "sympy", "transformers", "datasets", "wandb", "matplotlib", "huggingface_hub"}
    assert not imported & unused  # seconds of start-up on every rank
    for ours, expected in zip(metrics_of(file), metrics_of(expected_file), strict=True):
        assert ours.keys() == expected.keys()
        for key in expected.keys() & {"loss", "grad_norm", "validation_loss", "learning_rate"}:
            assert ours[key] == pytest.approx(expected[key], rel=1e-12), key
        assert (ours["step"], ours["tokens"]) == (expected["step"], expected["tokens"])
    assert "validation_loss" in expected_file.read_text()
    assert abs(metrics_of(file)[0]["loss"] - 5.55) < 0.1  # ln(257)
    # What is the model's and not the rank's is printed once, and the same.
    parameters = re.search(r"model: ([\d,]+) parameters", printed_alone)[1]
    assert process.out.count(f"model: {parameters} parameters") == 1
    assert "global batch = 2 × 2 × 2 = 8 sequences = 256 tokens" in process.out
    assert process.out.count("no GPU found") == 1 and process.out.count("step     3") == 1


def test_schedules_and_transfers_and_trace(run, tmp_path):
    trace = tmp_path / "out" / "trace.json"
    process = run(2, "distributed.pp_size=2", "distributed.pp_engine=zb_v", f"logging.trace_file={trace}",
                  "logging.show_transfers=true", "training.steps=2", "model.recompute=layer")  # fmt: skip
    assert process.returncode == 0, process.err
    # 4 micro-batches over 4 stages: 2 boundaries between ranks, each crossed forward and backward, in 2 steps.
    sent = r"^step [12], rank (\d): sends [FI]\d'? to rank (?!\1)\d \(stage \d → \d, tick \d+\)$"
    assert len(re.findall(sent, process.out, re.M)) == 4 * 4 * 2
    awaited = r"^step [12], rank \d: stage \d waits for the (?:input|gradient) of micro-batch \d$"
    assert len(re.findall(awaited, process.out, re.M)) == 4 * 4 * 2
    assert "bubble" in process.out
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["cat"] in "FIW" for event in events) == 2 * 2 * 4 * 3
    ends = {}
    for event in sorted(events, key=lambda event: (event["pid"], event["ts"])):
        assert event["ts"] >= ends.get(event["pid"], 0) - 1  # one thing after the other
        ends[event["pid"]] = event["ts"] + event["dur"]


def test_own_schedule_trains_and_a_wrong_one_is_explained_before_processes_meet(run, tmp_path):
    schedules = tmp_path / "mine.py"
    schedules.write_text(
        "from schedules import B, F\n"
        "def one_by_one(pp_rank, pp_size, num_microbatches):\n"
        "    return [action(i) for i in range(num_microbatches) for action in (F, B)]\n"
        "def backward_first(pp_rank, pp_size, num_microbatches):\n"
        "    return [action(i) for i in range(num_microbatches) for action in (B, F)]\n"
    )
    process = run(2, "distributed.pp_size=2", f"distributed.pp_engine={schedules}:one_by_one", "training.steps=1")
    assert process.returncode == 0, process.err
    process = run(2, "distributed.pp_size=2", f"distributed.pp_engine={schedules}:backward_first")
    assert (
        process.err.count("error:") == 1 and "before its forward" in process.err and "Traceback" not in own(process.err)
    )


def test_a_placement_that_depends_on_the_process_is_told(run, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import os\n"
        "from schedules import afab as mine\n"
        "mine.placement = lambda pp_rank, chunk, pp_size: (pp_rank + int(os.environ['RANK'])) % pp_size\n"
    )
    process = run(2, "distributed.pp_size=2", f"distributed.pp_engine={mine}:mine")
    assert process.err.count("error:") == 1 and f"the schedule {mine}:mine is not the same on all ranks" in process.err
    assert "Traceback" not in own(process.err)


def own(text):
    """What our processes wrote: torchrun's report starts with its log lines."""
    return re.split(r"^[WE]\d{4} ", text, maxsplit=1, flags=re.M)[0]


def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path):
    (tmp_path / "short.txt").write_text("twenty characters...")
    (tmp_path / "mine.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    short = [f'dataset.files=["{tmp_path}/short.txt"]', "dataset.validation_fraction=0"]
    expected = {
        "type: torchrun --nproc_per_node 2 train.py": ["distributed.tp_size=2"],
        "torch sees no CUDA device here": ["distributed.device=cuda"],
        "the data set has 20 tokens; one sequence needs 33": short,
        "/proc/none": ["logging.metrics_file=/proc/none/metrics.jsonl"],
        "'gpipe'": ["distributed.pp_engine=gpipe"],
        "use 2": ["distributed.pp_engine=zb_v", "distributed.pp_chunks=3"],
        "model.vocab_size must be at least": ["model.vocab_size=100"],
        "mine.json is there, and no run has written it": [f"logging.trace_file={tmp_path}/mine.json"],
        "out is logging.metrics_file, too": [f"logging.{key}_file={tmp_path}/out" for key in ("trace", "metrics")],
        "pipe is a pipe": [f"logging.metrics_file={tmp_path}/pipe"],
        "dataset.cache_dir: [Errno 20]": [f"dataset.cache_dir={tmp_path}/short.txt/cache"],
        "training.max_tokens: 255 is less than one step has: must be at least 256": ["training.max_tokens=255"],
    }
    processes = {message: run.start(0, *overrides) for message, overrides in expected.items()}
    for message, process in processes.items():
        _, errors = process.communicate(timeout=100)
        assert errors.count("error:") == 1 and message in errors and "Traceback" not in errors
        assert process.returncode == 2, message


def test_a_wrong_world_size_is_told_once(run):
    process = run(3, "distributed.pp_size=2")
    assert process.err.count("error:") == 1 and "world size 3 != tp 1 × pp 2 × dp 1 = 2" in process.err
    assert "Traceback" not in own(process.err) and "exitcode  : 2" in process.err


def test_wandb_offline_writes_and_asks_nothing(run, tmp_path):
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    process = run(0, "logging.use_wandb=true", "training.steps=1", env=environment, stdin=subprocess.DEVNULL)
    assert process.returncode == 0, process.err
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_wandb_without_a_login_is_one_error(run, tmp_path):
    environment = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_MODE": "online"}
    process = run(0, "logging.use_wandb=true", env=environment, stdin=subprocess.DEVNULL)
    assert process.returncode == 2 and "logging.use_wandb" in process.err


def wait_for(process, text, stream):
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came; exit code {process.wait()}")


def test_ctrl_c_ends_every_rank_without_a_trace_from_it(run):
    process = run.start(2, "distributed.pp_size=2", "training.steps=100000")
    wait_for(process, "step     2", process.stdout)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert 'train.py", line' not in errors and "KeyboardInterrupt" not in errors


def test_ctrl_c_on_one_process_is_exit_code_130(run):
    process = run.start(0, "training.steps=100000")
    wait_for(process, "step     2", process.stdout)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors


def run_on_two_machines(run, *overrides_of_both):
    """Two torchruns on this machine, as two machines would start them. Returns exit code, output and errors of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    layout = ("distributed.tp_size=2", "distributed.pp_size=2", "training.steps=2")
    launch = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    nodes = [
        run.start(2, *layout, *overrides, launcher=[*launch, f"--node_rank={node}"])
        for node, overrides in enumerate(overrides_of_both)
    ]
    return [(node.returncode, *outputs) for outputs, node in [(node.communicate(timeout=100), node) for node in nodes]]


def test_two_machines(run):
    (code, first, errors), (other_code, second, _) = run_on_two_machines(run, [], [])
    assert (code, other_code) == (0, 0), errors
    assert first.count("step     2") == 1 and "step" not in second


def test_two_machines_that_are_set_up_differently(run, tmp_path):
    (tmp_path / "other.txt").write_text("the quick brown fox jumps over the lazy cat; " * 200)
    for overrides, name in (
        (["training.learning_rate=0.002"], "training.learning_rate is not the same on all ranks: rank 0 has 0.001, "),
        (["distributed.tp_size=1", "distributed.pp_size=4"], "distributed.tp_size is not the same on all ranks: "),
        ([f'dataset.files=["{tmp_path}/other.txt"]'], "the data's SHA-256 is not the same on all ranks: "),
        (["logging.log_frequency=7"], "logging.log_frequency is not the same on all ranks: "),
        ([f"checkpoint.save_dir={tmp_path}/saved"], "checkpoint.save_dir is not the same on all ranks: "),
        (["--verify"], "--verify is not the same on all ranks: "),
    ):
        for code, _, errors in run_on_two_machines(run, [], overrides):
            assert code != 0 and errors.count("error:") == 1 and f"error: {name}" in errors
            assert "Traceback" not in own(errors)


def test_an_error_on_one_machine_ends_the_others(run):
    (_, _, first), (_, _, second) = run_on_two_machines(run, [], ["model.num_key_value_heads=3"])
    assert "error: rank 2 has ended with an error, told on its own machine" in first
    assert "error: model.num_key_value_heads = 3: must" in second
    assert "Traceback" not in own(first) + own(second)


def test_every_key_has_a_reader():
    settings = ("config.py", "read_config.py", "architecture.py")
    sources = [path.read_text() for path in ROOT.glob("*.py") if path.name not in settings]
    derived = {"model.name", "model.rope_theta", "model.rope_scaling"}  # read by architecture.py into the other keys
    for key in set(VALID_KEYS) - derived:
        attribute = re.compile(rf"\.{key.split('.')[1]}\b")
        assert any(attribute.search(source) for source in sources), f"nothing reads {key}"
