"""Pictures: those that need no long run are made here; those in docs/figures are small and show what they should."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import rc_context

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import figures  # noqa: E402

from schedules import SCHEDULES  # noqa: E402
from visualize import GREY, STYLE  # noqa: E402

NAMES = ("bubble", "held_activations", "loss_of_six_layouts", "timeline_1f1b", "timeline_zb_h1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    with rc_context(STYLE):
        yield tmp_path


def texts_of(path):
    """The picture's texts, once it is small, whole, and has nothing that a light or a dark page would hide."""
    assert path.stat().st_size < 60_000
    texts = list(ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"))
    assert "#ffffff" not in path.read_text()  # no white paper
    for text in texts:  # grey, but for the names of actions, black on their own colours
        assert f"fill: {GREY.lower()}" in text.get("style") or re.fullmatch(r"[FBIW]?\d+'*", text.text)
    return [text.text for text in texts]


@pytest.mark.parametrize("name", NAMES)
def test_committed_pictures_are_small_and_for_light_and_dark_pages(name):
    assert texts_of(ROOT / "docs" / "figures" / f"{name}.svg")


def test_committed_timelines_are_measured_over_predicted():
    for engine in ("1f1b", "zb_h1"):
        texts = texts_of(ROOT / "docs" / "figures" / f"timeline_{engine}.svg")
        titles = [text for text in texts if "step time" in text]
        assert [title.split(":")[0] for title in titles] == [f"measured, {engine}", "predicted from the mean times"]


def test_committed_losses_are_those_of_one_training_run():
    texts = texts_of(ROOT / "docs" / "figures" / "loss_of_six_layouts.svg")
    (title,) = [text for text in texts if text.startswith("Six layouts")]
    assert float(re.search("at most (.*) apart", title)[1]) < 1e-9


def test_bubble(folder):
    figures.main(["bubble"])
    texts = texts_of(folder / "bubble.svg")
    assert set(SCHEDULES) <= {text.split(",")[0] for text in texts}
    assert "bubble: idle time / step time (%)" in texts
    again = (folder / "bubble.svg").read_bytes()
    figures.main(["bubble"])
    assert (folder / "bubble.svg").read_bytes() == again  # nothing to commit where nothing has changed


def test_a_picture_that_there_is_not(folder, capsys):
    assert figures.main(["bubbles"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no picture has bubbles in its name: bubble, page, ") and error.count("\n") == 1


def test_losses_name_the_largest_distance(folder):
    losses = {name: [5.5, 4.5, 4.0] for name in figures.LAYOUTS}
    losses["tp 2"] = [5.5, 4.5 + 2**-20, 4.0]
    figures.draw_losses(losses)
    texts = texts_of(folder / "loss_of_six_layouts.svg")
    assert f"Six layouts, one training run in float64: losses at most {2**-20:.1e} apart" in texts
    assert set(figures.LAYOUTS) <= set(texts)


def test_held_activations_of_real_runs(folder):
    """The benchmark itself on two ranks; a micro-batch leaves about half a MiB, so that the order of sizes is clear."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("resident memory is measured on Linux alone")
    small = "training.seq_length=64 training.micro_batch_size=4 model.num_hidden_layers=2"
    path = folder / "held.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "benchmarks/activations.py"),
            *("--config", "configs/tiny_1gpu.json", "--json", path, *small.split()),
        ],
        cwd=ROOT,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())
    afab, one_f_one_b = ([row for row in rows if row["schedule"] == name] for name in ("afab", "1f1b"))
    assert [row["held"] for row in afab] == [row["microbatches"] for row in afab]
    assert [row["held"] for row in one_f_one_b] == [min(2, row["microbatches"]) for row in one_f_one_b]
    assert afab[-1]["measured"] > 2 * one_f_one_b[-1]["measured"]
    assert afab[-1]["measured"] == pytest.approx(afab[-1]["planned"], rel=0.25)
    figures.draw_held(rows)
    assert {"afab, measured", "1f1b, measured", "MiB", "micro-batches held"} <= set(
        texts_of(folder / "held_activations.svg")
    )
