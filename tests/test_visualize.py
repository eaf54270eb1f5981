"""Schedules as text, table and picture; traces: what they cost, and that the prediction from them fits."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from costs import Trace
from schedules import SCHEDULES
from timetable import make_timetable
from visualize import print_schedules

ROOT = Path(__file__).parent.parent
P4_M8 = ["--pp-size", "4", "--microbatches", "8"]


@pytest.fixture
def run(capsys):
    """Runs a command line of schedules.py; the lines it printed, or for `error=True` its one line on stderr."""

    def run(*arguments, error=False):
        try:
            code = print_schedules([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert (code, bool(err)) == ((2, True) if error else (0, False)), err
        assert err.count("\n") == error
        return err.removesuffix("\n") if error else out.splitlines()

    return run


def write_trace(
    path, name="1f1b", p=2, m=4, v=1, costs=(("F", 2), ("B", 5), ("I", 2), ("W", 2)), transfer=0.5, **metadata
):
    """The trace of a step that ran exactly as the timetable says, in ms per chunk, starting at some time of the day."""
    timetable = make_timetable(name, p, m, v, costs=dict(costs), transfer=transfer)
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "pp rank 0"}}]
    for rank, boxes in enumerate(timetable.boxes):
        free = 0
        for box in boxes:
            place = {"stage": box.stage, "chunk": box.chunk, "microbatch": box.microbatch}
            for kind, start, end in (("wait", free, box.start), (box.kind, box.start, box.end)):
                if end > start:
                    times = {"ts": 123e9 + 1000 * start, "dur": 1000 * (end - start)}
                    event = {"name": f"{kind}{box.microbatch}", "cat": kind, "ph": "X", "pid": rank, "tid": 0}
                    events.append(event | times | {"args": place})
            free = box.end
        times = {"ts": 123e9 + 1000 * timetable.step_time, "dur": 3000}
        events.append({"name": "optimizer", "cat": "optimizer", "ph": "X", "pid": rank, "tid": 0, **times})
    metadata = {
        "pp_engine": name,
        "pp_size": p,
        "num_microbatches": m,
        "num_chunks": v,
        "tp_size": 1,
        "dp_size": 1,
    } | metadata
    path.write_text(json.dumps({"traceEvents": events, "metadata": metadata}))
    return timetable


# --- text -------------------------------------------------------------------------------------------------------------


def test_a_timetable_as_text(run):
    assert run("zb_v", "--pp-size", 2, "--microbatches", 2) == [
        "zb_v: pp_size 2, micro-batches 2, chunks 2",
        "a rank's share of a micro-batch takes F 1, B 2, I 1, W 1; a transfer 0; a column is 0.5",
        "F forward, B backward, I input half, W weight half; F3' is F3 of the rank's chunk 1",
        "",
        "rank 0   F0  F1      F0' I0' W0' F1' I1' W1' I0  W0      I1  W1",
        "rank 1       F0  F0' F1  F1' I0' W0' I0  W0  I1' W1' I1  W1",
        "",
        "rank  idle  micro-batches held",
        "0     1     1.5",
        "1     1     2",
        "",
        "step time 7, bubble 14.3% (idle time / step time, mean over ranks)",
    ]


def test_costs(run):
    lines = run("1f1b", "--pp-size", 2, "--microbatches", 2, "--costs", "1,2.5,1/2")
    assert lines[4:6] == [
        "rank 0   F0 F1          B0──────    B1──────",
        "rank 1      F0 B0────── F1 B1──────",
    ]
    assert lines[-1].startswith("step time 12, bubble 33.3%")


@pytest.mark.parametrize("name", SCHEDULES)
def test_json_and_text_agree_for_every_schedule(run, name):
    (line,) = run(name, *P4_M8, "--json")
    figures = json.loads(line)
    assert set(figures) == {"step_time", "bubble", "peak_microbatches", "actions"}
    assert max(action["end"] for actions in figures["actions"] for action in actions) == figures["step_time"]
    busy = sum(action["end"] - action["start"] for actions in figures["actions"] for action in actions)
    assert busy == 4 * 24
    assert figures["bubble"] == pytest.approx(1 - 24 / figures["step_time"])
    text = "\n".join(run(name, *P4_M8))
    assert f"step time {figures['step_time']:g}, bubble {figures['bubble']:.1%}" in text
    for rank, held in enumerate(figures["peak_microbatches"]):
        assert re.search(rf"^{rank} +{figures['step_time'] - 24:g} +{held:g}$", text, re.MULTILINE)


def test_golden_values_on_the_command_line(run):
    (line,) = run("interleaved_1f1b", *P4_M8, "--chunks", 2, "--json")
    assert json.loads(line)["step_time"] == 28.5
    assert json.loads(line)["peak_microbatches"] == [5.5, 4.5, 3.5, 2.5]
    (line,) = run("interleaved_1f1b", "--pp-size", 3, "--microbatches", 6, "--chunks", 3, "--json")
    assert json.loads(line)["step_time"] == 20  # exactly, though a chunk's F takes a third


def test_the_table_of_all_schedules(run):
    (line,) = run(*P4_M8, "--json")
    rows = {(row["schedule"], row["chunks"]): row for row in json.loads(line)}
    assert {key: row["step_time"] for key, row in rows.items()} == {
        ("afab", 1): 33,
        ("1f1b", 1): 33,
        ("interleaved_1f1b", 2): 28.5,
        ("interleaved_1f1b", 4): 26.25,
        ("zb_h1", 1): 27,
        ("zb_v", 2): 25.5,
        ("dualpipev", 2): 25.5,
    }
    # forward and backward, each over 3 boundaries, or 7, or 15, or two way down and up the V
    assert {key: row["transfers"] for key, row in rows.items()} == {
        ("afab", 1): 2 * 8 * 3,
        ("1f1b", 1): 2 * 8 * 3,
        ("interleaved_1f1b", 2): 2 * 8 * 7,
        ("interleaved_1f1b", 4): 2 * 8 * 15,
        ("zb_h1", 1): 2 * 8 * 3,
        ("zb_v", 2): 2 * 8 * 6,
        ("dualpipev", 2): 2 * 8 * 6,
    }
    assert rows["interleaved_1f1b", 2]["held"] == 5.5
    lines = run(*P4_M8)
    assert lines[2].split() == "schedule chunks microbatches step_time per_microbatch bubble held transfers".split()
    assert lines[3].split() == ["zb_v", "2", "8", "25.5", "3.188", "5.9%", "4", "96"]
    assert lines[-1] == "fastest per micro-batch: zb_v, chunks 2, micro-batches 8"


def on_terminal(*arguments, **environment):
    """What schedules.py writes to a terminal of 80 columns."""
    terminal, its_end = pty.openpty()
    command = [sys.executable, "schedules.py", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=its_end, env=os.environ | environment) as process:
        os.close(its_end)
        written = b""
        try:
            while part := os.read(terminal, 1 << 16):
                written += part
        except OSError:  # Linux says so when the other end is closed
            pass
        os.close(terminal)
        assert process.wait(timeout=60) == 0
    return written.decode().replace("\r\n", "\n")


def test_colour_on_a_terminal_only_and_lines_that_fit(run):
    coloured = on_terminal("zb_v", *P4_M8)
    plain = on_terminal("zb_v", *P4_M8, NO_COLOR="1")
    assert coloured.count("\x1b[30;48;5;117m") == 2 * 8 * 4  # the F's
    assert "\x1b" not in plain
    in_bands = plain.splitlines()
    assert [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines()] == in_bands
    grids = [[line[9:].ljust(4 * 17) for line in in_bands if line.startswith(f"rank {rank} ")] for rank in range(4)]
    assert max(map(len, in_bands[3:])) <= 80
    piped = run("zb_v", *P4_M8)
    assert ["".join(rows).rstrip() for rows in grids] == [line[9:] for line in piped[4:8]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "error: --pp-size and --microbatches are needed"),
        (["1f1b", "--pp-size", 4], "error: --pp-size and --microbatches are needed"),
        (["1f1b", "--pp-size", 0, "--microbatches", 8], "error: --pp-size: 0 is not above 0"),
        (["1f1b", "--pp-size", 4, "--microbatches", -8], "error: --microbatches: -8 is not above 0"),
        (["1f1b", "--pp-size", "four"], "error: argument --pp-size: invalid int value: 'four'"),
        ([*P4_M8, "--colour"], "error: unrecognized arguments: --colour"),
        ([*P4_M8, "--chunks", 0], "error: --chunks: 0 is not above 0"),
        ([*P4_M8, "--max-held", "nan"], "error: --max-held: nan is not above 0"),
        ([*P4_M8, "--max-held", 0.5], "error: --max-held: 0.5, but every schedule holds more micro-batches than that"),
        (
            ["1f1b", *P4_M8, "--chunks", 2],
            "error: distributed.pp_chunks: 2, but this schedule has one chunk a rank: use 1",
        ),
        (
            ["zb_v", *P4_M8, "--chunks", 3],
            "error: distributed.pp_chunks: 3, but this schedule folds the model into a V: use 2",
        ),
        (["gpipe", *P4_M8], "error: distributed.pp_engine: 'gpipe' is not a schedule"),
        ([*P4_M8, "-o", "all.svg"], "error: -o: name the schedule or the trace.json to draw"),
        (["1f1b", *P4_M8, "-o", "nowhere/x.svg"], "error: [Errno 2] No such file or directory: 'nowhere/x.svg'"),
        (["1f1b", *P4_M8, "-o", "x.doc"], "error: Format 'doc' is not supported"),
        (["nowhere.json"], "error: [Errno 2] No such file or directory: 'nowhere.json'"),
        *(
            ([*P4_M8, "--costs", costs], f"error: --costs: '{costs}', but it takes three positive numbers F,I,W")
            for costs in ("1,2", "1,1,0", "1,1,-1", "1,1,1,1", "1;1;1", "1,1,nan", "1,1,1/0", "")
        ),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(run, arguments, message):
    assert run(*arguments, error=True).startswith(message)


def test_a_schedule_of_a_file(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from schedules import one_f_one_b\n\ndef mine(*numbers):\n    return one_f_one_b(*numbers)\n")
    mine, theirs = run(f"{path}:mine", *P4_M8), run("1f1b", *P4_M8)
    assert mine[0] == f"{path}:mine: pp_size 4, micro-batches 8, chunks 1"
    assert mine[1:] == theirs[1:]
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def mine(*numbers):\n    return numbers\n")
    assert run(f"{wrong}:mine", *P4_M8, error=True) == (
        "error: mine(0, 4, 8) returned (0, 4, 8); it must return a list of actions"
    )


def test_the_scripts_themselves():
    for script in ("schedules.py", "visualize.py"):
        command = [sys.executable, script, "1f1b", *P4_M8, "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["step_time"] == 33


# --- traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, p, m, v, costs, share",
    [
        # of a rank's share; without I and W in the trace each is half of B, without B that is I + W
        ("1f1b", 2, 4, 1, {"F": 2, "B": 5}, {"F": 2, "B": 5, "I": 2.5, "W": 2.5}),
        ("zb_h1", 4, 8, 1, {"F": 2, "I": 4, "W": 1.5}, {"F": 2, "B": 5.5, "I": 4, "W": 1.5}),
        ("interleaved_1f1b", 2, 4, 2, {"F": 1, "B": 3}, {"F": 2, "B": 6, "I": 3, "W": 3}),
        ("dualpipev", 2, 6, 2, {"F": 1, "B": 3, "I": 2, "W": 1.25}, {"F": 2, "B": 6, "I": 4, "W": 2.5}),
    ],
)
def test_a_trace_gives_back_the_costs_it_was_made_with(tmp_path, name, p, m, v, costs, share):
    path = tmp_path / "trace.json"
    timetable = write_trace(path, name, p, m, v, costs.items())
    trace = Trace(path)
    assert trace.costs(p).share == pytest.approx(share, abs=1e-4)  # microseconds since long ago have few digits left
    assert trace.costs(p).transfer == pytest.approx(0.5, abs=1e-4)
    assert trace.costs(2 * p).share["F"] == pytest.approx(share["F"] / 2, abs=1e-4)  # twice the ranks, half the share
    assert trace.step_time == pytest.approx(timetable.step_time, abs=1e-4)
    assert trace.bubble == pytest.approx(timetable.bubble, abs=1e-4)
    predicted = trace.costs(p).timetable(name, p, m, v)
    assert predicted.step_time == pytest.approx(timetable.step_time, abs=1e-3)


def test_means_and_other_threads(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path)
    content = json.loads(path.read_text())
    forwards = [event for event in content["traceEvents"] if event.get("cat") == "F"]
    forwards[0]["dur"] *= 3
    content["traceEvents"].append(forwards[1] | {"dur": 1e9, "tid": 1})  # another tp or dp rank
    path.write_text(json.dumps(content))
    assert Trace(path).costs(2).share["F"] == pytest.approx((7 * 2 + 6) / 8, abs=1e-4)


def test_the_fastest_on_this_machine(run, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, "zb_h1", 4, 8, costs=(("F", 2), ("I", 2), ("W", 2)), transfer=0)
    for max_held in (1, 2, 3.9, 4, 100):
        (line,) = run("--costs", path, "--max-held", max_held, "--json")
        rows = json.loads(line)
        assert len(rows) == 7
        assert all(row["held"] <= max_held and row["microbatches"] <= 8 for row in rows)
        for row in rows:  # no other count does better
            name, v = row["schedule"], row["chunks"]
            for m in range(1, 9):
                other = make_timetable(
                    name, 4, m, v, costs={k: c / v for k, c in {"F": 2, "B": 4, "I": 2, "W": 2}.items()}
                )
                if max(other.peak_microbatches) <= max_held:
                    assert row["per_microbatch"] <= other.step_time / m + 1e-4
        assert rows == sorted(rows, key=lambda row: row["per_microbatch"])
    lines = run("--costs", path, "--max-held", 4)
    assert lines[0] == "a rank's share of a micro-batch takes F 2 ms, B 4 ms, I 2 ms, W 2 ms; a transfer 0 ms"
    assert lines[-1] == "fastest per micro-batch: zb_v, chunks 2, micro-batches 8"
    # one micro-batch at a time: nothing to gain from a schedule
    assert {row["microbatches"] for row in json.loads(run("--costs", path, "--max-held", 1, "--json")[0])} == {1}


def test_transfers_decide_too(run, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, "zb_h1", 4, 8, costs=(("F", 2), ("I", 2), ("W", 2)), transfer=20)
    assert run("--costs", path)[0].endswith("; a transfer 20 ms")
    assert "afab, chunks 1" in run("--costs", path)[-1]  # where going over costs most, the fewest round trips win


def test_a_trace_is_the_cost_of_one_schedule(run, tmp_path):
    path = tmp_path / "trace.json"
    timetable = write_trace(path, "1f1b", 2, 4)
    assert f"step time {timetable.step_time:g} ms" in run("1f1b", "--costs", path)[-1]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": [], "metadata": {}}',
        '{"traceEvents": [], "metadata": {"pp_engine": "1f1b", "pp_size": 2, "num_microbatches": 4, "num_chunks": 1}}',
        '{"traceEvents": [1], "metadata": {"pp_engine": "1f1b", "pp_size": 2, "num_microbatches": 4, "num_chunks": 1}}',
    ],
)
def test_what_is_not_a_trace(run, tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert run("--costs", path, error=True).startswith(f"error: {path} is not the trace of a step: ")
    assert run(path, "-o", tmp_path / "x.svg", error=True).startswith(f"error: {path} is not the trace of a step: ")
    assert not (tmp_path / "x.svg").exists()


def test_a_trace_of_forwards_or_of_fewer_ranks_than_it_says(run, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, pp_size=1)
    assert "is not the trace of a step: IndexError" in run(path, error=True)
    write_trace(path)
    content = json.loads(path.read_text())
    content["traceEvents"] = [event for event in content["traceEvents"] if event.get("cat") != "B"]
    path.write_text(json.dumps(content))
    assert "is not the trace of a step: KeyError 'I'" in run(path, error=True)


# --- pictures ---------------------------------------------------------------------------------------------------------


def texts_of(svg):
    return [element.text for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_picture_of_every_schedule(run, tmp_path, name):
    svg = tmp_path / "x.svg"
    assert run(name, *P4_M8, "-o", svg) == [f"drawn into {svg}"]
    texts = texts_of(svg)
    figures = json.loads(run(name, *P4_M8, "--json")[0])
    names = [f"{box['kind']}{box['microbatch']}" + "'" * box["chunk"] for boxes in figures["actions"] for box in boxes]
    assert sorted(text for text in texts if re.fullmatch("[FBIW][0-9]+'*", text)) == sorted(names)
    title = f"step time {figures['step_time']:g}, bubble {figures['bubble']:.1%} (idle / step time)"
    assert f"{name}, 8 micro-batches: {title}" in texts
    kinds = {box["kind"] for boxes in figures["actions"] for box in boxes}
    legend = {"F": "F forward", "B": "B backward", "I": "I input half", "W": "W weight half"}
    assert {kind for kind, text in legend.items() if text in texts} == kinds
    for rank, boxes in enumerate(figures["actions"]):
        stages = sorted({box["stage"] for box in boxes})
        assert f"rank {rank}, stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" in texts
    assert svg.stat().st_size < 200_000


def test_png(run, tmp_path):
    png = tmp_path / "x.png"
    run("zb_v", "--pp-size", 2, "--microbatches", 4, "-o", png)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_large_picture_is_a_small_file(run, tmp_path):
    run("interleaved_1f1b", "--pp-size", 8, "--microbatches", 256, "-o", tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size < 500_000


def test_picture_of_a_trace_is_measured_over_predicted(run, tmp_path):
    path, svg = tmp_path / "trace.json", tmp_path / "timeline.svg"
    timetable = write_trace(path, "zb_v", 2, 4, 2, costs=(("F", 2), ("I", 2), ("W", 2)))
    run(path, "-o", svg)
    texts = texts_of(svg)
    figures = f"step time {timetable.step_time:g} ms, bubble {timetable.bubble:.1%} (idle / step time)"
    assert texts.index(f"measured, zb_v: {figures}") < texts.index(f"predicted from the mean times: {figures}")
    for box in timetable.boxes[0]:
        assert texts.count(str(box)) == 2 * 2  # on both ranks, measured and predicted
    assert {"waiting", "other", "time (ms)"} <= set(texts)


def test_what_is_too_short_to_be_seen_is_not_drawn(run, tmp_path):
    path, pictures = tmp_path / "trace.json", [tmp_path / "with.svg", tmp_path / "without.svg"]
    write_trace(path)
    content = json.loads(path.read_text())
    events = [event for event in content["traceEvents"] if event.get("cat") != "optimizer"]
    short = [{**event, "cat": "send", "dur": 1} for event in events if event.get("cat") == "F"]
    for picture, all_events in zip(pictures, (events + short, events), strict=True):
        path.write_text(json.dumps(content | {"traceEvents": all_events}))
        run(path, "-o", picture)
    assert texts_of(pictures[0]) == texts_of(pictures[1])
    assert "other" not in texts_of(pictures[0])
    assert pictures[0].read_text().count("<path") == pictures[1].read_text().count("<path")
