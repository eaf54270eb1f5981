"""docs/schedules.html: it is what its command makes, its data are the timetables, and a browser shows them."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schedules import SCHEDULES
from timetable import make_timetable

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "schedules.html").read_text()


def make_page(*arguments):
    return subprocess.run(
        [sys.executable, "docs/make_page.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def actions_of(layout):
    """(name, kind, chunk, rank) of every action, rank after rank."""
    for rank, names in enumerate(layout["actions"]):
        for name in names.split():
            yield name, name[0], name.count("'"), rank


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_command_makes_now(tmp_path):
    done = make_page("-o", tmp_path / "page.html")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    same = (tmp_path / "page.html").read_text() == PAGE
    assert same, "docs/schedules.html is not up to date: python docs/make_page.py"


def test_the_page_needs_nothing_from_elsewhere_and_is_small():
    assert len(PAGE.encode()) < 1_000_000
    assert set(re.findall(r"https?://[^\"'\s]+", PAGE)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"\bsrc=|<link|@import|url\(|fetch\(|XMLHttpRequest|import\(", PAGE)
    assert "default-src 'none'" in PAGE  # and the browser would not load it


def test_its_data_are_the_timetables():
    data = data_of(PAGE)
    assert {layout["schedule"] for layout in data["layouts"]} == set(SCHEDULES)
    for layout in data["layouts"]:
        for play in layout["plays"]:
            numbers = [layout[key] for key in ("schedule", "p", "m", "chunks")]
            timetable = make_timetable(*numbers, costs=play["lengths"], transfer=play["transfer"])
            assert layout["stages"] == timetable.stages
            assert layout["actions"] == [" ".join(map(str, actions)) for actions in timetable.lists]
            assert play["starts"] == timetable.starts
            assert (play["step_time"], play["idle"]) == (timetable.step_time, timetable.idle)
            assert play["bubble"] == pytest.approx(timetable.bubble, abs=1e-5)
            assert layout["peak"] == timetable.peak_microbatches
            assert [max(held) / layout["chunks"] for held in layout["held"]] == timetable.peak_microbatches
            assert all(held[-1] == 0 for held in layout["held"])


def test_costs_are_those_of_a_ranks_share():
    costs = {}
    for layout in data_of(PAGE)["layouts"]:
        for play in layout["plays"]:
            share = {kind: ticks * layout["chunks"] / 40 for kind, ticks in play["lengths"].items()}
            share["transfer"] = play["transfer"] / 40
            assert costs.setdefault(play["costs"], share) == share  # the same in every layout
    assert costs["F = I = W = 1"] == {"F": 1, "B": 2, "I": 1, "W": 1, "transfer": 0}
    assert costs["F 1, I 1.1, W 0.9"] == {"F": 1, "B": 2, "I": 1.1, "W": 0.9, "transfer": 0}
    assert costs["F = I = W = 1, a transfer takes 0.25"]["transfer"] == 0.25


def test_what_an_action_waits_for_is_why_it_starts_when_it_does():
    """Every start is the end of the action before it in the list, or when the last of what it needs is there."""
    for layout in data_of(PAGE)["layouts"]:
        actions = list(actions_of(layout))
        for play in layout["plays"]:
            starts = sum(play["starts"], [])
            ends = [start + play["lengths"][kind] for start, (_, kind, _, _) in zip(starts, actions, strict=True)]
            for i, (_, _, _, rank) in enumerate(actions):
                free = ends[i - 1] if i and actions[i - 1][3] == rank else 0
                there = [ends[n] + (actions[n][3] != rank) * play["transfer"] for n in layout["needs"][i]]
                assert starts[i] == max([free, *there])


def test_a_schedule_of_ones_own(tmp_path):
    schedule = tmp_path / "mine.py"
    schedule.write_text(
        "from schedules import B, F\n\n"
        "def mine(pp_rank, pp_size, num_microbatches):\n"
        "    return [action(i) for i in range(num_microbatches) for action in (F, B)]\n"
    )
    assert make_page("1f1b", f"{schedule}:mine", "-o", tmp_path / "page.html").returncode == 0
    layouts = data_of((tmp_path / "page.html").read_text())["layouts"]
    assert {layout["schedule"] for layout in layouts} == {"1f1b", f"{schedule}:mine"}
    done = make_page("gpipe", "-o", tmp_path / "other.html")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: distributed.pp_engine: 'gpipe' is not a schedule")
    assert not (tmp_path / "other.html").exists()


# --- in a browser -----------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(not BROWSER, reason="no browser: apt-get install chromium (Debian), and it is tested")


@pytest.fixture
def browse(tmp_path):
    """Opens a page, as text, in headless Chromium; the document as it is when its scripts have run."""

    def browse(page, address=""):
        (tmp_path / "page.html").write_text(page)
        command = [BROWSER, "--headless", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox does not work for root
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path}/page.html{address}"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    return browse


def text_of(document, name):
    """The lines of the paragraph or section with this id, without its tags."""
    inside = re.search(rf'<(p|section) id="{name}".*?>(.*?)</\1>', document, re.S)[2]
    lines = re.sub(r"</(?:p|li|h2|b|tr|span)>", "\n", inside)
    texts = [html.unescape(re.sub("<.*?>", "", line)).strip() for line in lines.split("\n")]
    return [text for text in texts if text]


@in_browser
def test_an_action_tells_what_it_waits_for_and_who_waits_for_it(browse):
    document = browse(PAGE, "#schedule=1f1b&p=4&m=8&action=B0@1")
    assert text_of(document, "figures")[0].startswith(
        "step time 33, bubble 27.3% (idle time / step time, mean over ranks; idle time / busy time is 37.5%)"
    )
    assert text_of(document, "details") == [
        "B0 of stage 1 on rank 1, from 8 to 10",
        "Its rank stood idle for 4, waiting for B0 of stage 2 on rank 2.",
        "It waits for",
        "B0 of stage 2 on rank 2, whose gradient it takes on: ended at 8",
        "F0 of stage 1 on rank 1, whose activations it needs: ended at 2",
        "F2 of stage 1 on rank 1, before it in the list of its rank: ended at 4",
        "These wait for it",
        "B0 of stage 0 on rank 0: starts at 10, its rank having stood idle for 6",
        "F3 of stage 1 on rank 1, next in the list of its rank: starts at 10",
    ]
    marked = re.findall(r'class="box (chosen|before|after)"[^>]*aria-label="(.*?)"', document)
    assert sorted(marked) == [
        ("after", "B0 of stage 0 on rank 0"),
        ("after", "F3 of stage 1 on rank 1"),
        ("before", "B0 of stage 2 on rank 2"),
        ("before", "F0 of stage 1 on rank 1"),
        ("before", "F2 of stage 1 on rank 1"),
        ("chosen", "B0 of stage 1 on rank 1"),
    ]


@in_browser
def test_chunks_and_transfers(browse):
    document = browse(PAGE, "#schedule=interleaved_1f1b&p=2&m=4&chunks=4&costs=3&action=F0@2")
    timetable = make_timetable("interleaved_1f1b", 2, 4, 4, costs={"F": 0.25, "B": 0.5}, transfer=0.25)
    _, before, box = timetable.boxes[0][:3]
    assert (str(before), str(box), box.stage) == ("F1", "F0'", 2)
    figures = f"step time {timetable.step_time:g}, bubble {timetable.bubble:.1%} "
    assert text_of(document, "figures")[0].startswith(figures)
    assert text_of(document, "details")[:2] == [
        f"F0 of stage 2 on rank 0, from {box.start:g} to {box.end:g}",
        f"Its rank stood idle for {box.start - before.end:g}, waiting for F0 of stage 1 on rank 1.",
    ]
    rows = {tuple(row.split()) for row in re.findall("<td>.*?</tr>", document)}
    assert len(rows) == 7  # all schedules beside it


# Goes through all choices, at each from action to action by arrow keys, and writes down what it found.
TOUR = """
<pre id="tour"></pre>
<script>
  const found = { drawn: 0, visited: 0, wrong: [] };
  choices.schedule.value = "zb_h1"; // by hand: the address follows, and a click's action too
  choices.schedule.dispatchEvent(new Event("change", { bubbles: true }));
  boxes[5].element.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  found.address = location.hash;
  onerror = (message) => found.wrong.push(message);
  for (const layout of data.layouts) {
    for (const costs of [0, 3]) {
      for (const key of ["schedule", "p", "m"]) choices[key].value = layout[key];
      choices.costs.selectedIndex = costs;
      draw(layout.chunks);
      found.drawn += document.querySelectorAll(".box rect").length;
      const curves = document.querySelectorAll(".held").length;
      if (curves !== layout.p) found.wrong.push(`${curves} ranks`);
      if (layout.p > 4 || layout.m > 4 || costs) continue;
      boxes[0].element.focus();
      for (let rank = 0; rank < layout.p; rank++) {
        const key = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        for (let last = null; document.activeElement !== last; found.visited++) {
          last = document.activeElement;
          const words = last.getAttribute("aria-label");
          if (!part("details").textContent.startsWith(words)) found.wrong.push(words);
          key("ArrowRight");
        }
        while (document.activeElement.box.previous) key("ArrowLeft");
        key("ArrowDown");
      }
    }
  }
  part("tour").textContent = JSON.stringify(found);
</script>
"""


@in_browser
def test_every_choice_is_drawn_and_every_action_reached_by_keys(browse):
    document = browse(PAGE.replace("</html>", TOUR + "</html>"))
    found = json.loads(html.unescape(re.search('<pre id="tour">(.*?)</pre>', document)[1]))
    layouts = data_of(PAGE)["layouts"]
    assert found["wrong"] == []
    fifth = make_timetable("zb_h1", 4, 8).boxes[0][5]
    assert found["address"] == f"#schedule=zb_h1&p=4&m=8&chunks=1&costs=0&action={fifth}%40{fifth.stage}"
    assert found["drawn"] == 2 * sum(len(layout["needs"]) for layout in layouts)
    assert found["visited"] == sum(len(layout["needs"]) for layout in layouts if max(layout["p"], layout["m"]) <= 4)


@in_browser
def test_it_fits_a_narrow_screen(browse):
    frame = f'<iframe width="320" height="900" srcdoc="{html.escape(PAGE)}"></iframe><pre id="width"></pre>'
    script = """<script>
      addEventListener("load", () => {
        const inside = frames[0].document.documentElement;
        document.getElementById("width").textContent = `${inside.scrollWidth} of ${inside.clientWidth}`;
      });
    </script>"""
    wide, available = re.search(r'<pre id="width">(\d+) of (\d+)</pre>', browse(frame + script)).groups()
    assert int(wide) <= int(available) <= 320
