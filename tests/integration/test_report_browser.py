# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The report in a real browser: it opens from disk without network, draws its curves, and shows the metrics' figures.

The page is loaded in a frame of a page that looks at it from outside; headless Chromium prints that page's findings.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.report import make_report
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.fake_run import collected
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEPS = 5000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

LOOK = """<!doctype html><body style="margin:0"><pre id="found"></pre>
<iframe id="page" src="report.html" style="border:0;width:WIDTHpx;height:4200px"></iframe>
<script>
const frame = document.getElementById('page');
frame.onload = () => {
  frame.contentDocument.querySelectorAll('details').forEach((one) => { one.open = true; });
  setTimeout(look, 300);
};
const look = () => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const hover = (svg, part) => {
    const box = svg.getBoundingClientRect();
    const across = box.left + 52 + part * (box.width - 70);
    svg.dispatchEvent(new view.PointerEvent('pointermove', { clientX: across, clientY: box.top + 40, bubbles: true }));
    return page.getElementById('tip').innerText;
  };
  const charts = [...page.querySelectorAll('figure')].map((figure) => {
    const svg = figure.querySelector('svg');
    return {
      title: figure.dataset.chart,
      paths: [...svg.querySelectorAll('path')].map((path) => ({
        series: path.dataset.series, points: Number(path.dataset.points), d: path.getAttribute('d'),
        height: path.getBBox().height, width: path.getBBox().width })),
      marks: svg.querySelectorAll('.mark').length,
      texts: [...svg.querySelectorAll('text')].map((text) => [text.textContent, Number(text.getAttribute('y'))]),
      first: hover(svg, 0), last: hover(svg, 1) };
  });
  document.getElementById('found').textContent = JSON.stringify({
    drawn: Number(page.documentElement.dataset.drawn), charts, text: page.body.innerText,
    away: [...page.querySelectorAll('.track .away')].map((one) => one.title),
    scroll: page.documentElement.scrollWidth, width: view.innerWidth,
    background: view.getComputedStyle(page.body).backgroundColor,
    loaded: view.performance.getEntriesByType('resource').map((one) => one.name) });
};
</script>"""


def browse(folder: Path, looking: str, *options: str) -> tuple[Any, str]:
    """The findings of a page that looks at the report, and the messages of the browser."""
    assert CHROMIUM is not None
    (folder / "look.html").write_text(looking)
    flags = "headless no-sandbox disable-gpu disable-dev-shm-usage no-first-run enable-logging=stderr allow-file-access-from-files"
    argv = [CHROMIUM, *(f"--{flag}" for flag in flags.split())]
    argv += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", *options]
    argv.append(f"file://{folder}/look.html")
    clock = {**os.environ, "TZ": "UTC"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=True, env=clock)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.S)
    assert found is not None, done.stdout[:2000] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), done.stderr


class Seen:
    """A page as the browser shows it."""

    def __init__(self, folder: Path, width: int, *options: str) -> None:
        self.found, said = browse(folder, LOOK.replace("WIDTH", str(width)), *options)
        self.console = [line for line in said.splitlines() if "CONSOLE" in line]
        self.charts = {chart["title"]: chart for chart in self.found["charts"]}

    @property
    def text(self) -> str:
        return str(self.found["text"])


def write_report(folder: Path, *runs: Path) -> None:
    files = str(ROOT / "roles" / "collect" / "files")
    (folder / "report.html").write_text(make_report([str(run) for run in runs], files))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 5000-step run with its report, compared with a shorter one."""
    folder = tmp_path_factory.mktemp("report")
    write_report(folder, collected(folder, "d8", STEPS), collected(folder, "d8-before", 3000))
    return folder


@pytest.fixture(scope="module")
def desk(folder: Path) -> Seen:
    """A wide screen by day."""
    return Seen(folder, 1200)


@pytest.fixture(scope="module")
def steps(folder: Path) -> list[dict[str, Any]]:
    """Rank 0's steps, read from its metrics."""
    lines = (folder / "d8" / "node1" / "metrics-rank0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "step"]


def test_it_is_drawn_in_time_without_a_complaint_and_loads_nothing(desk: Seen) -> None:
    assert desk.console == []
    assert desk.found["loaded"] == []
    assert 0 < desk.found["drawn"] < 2000
    assert desk.found["background"] == "rgb(252, 252, 251)"


def test_every_curve_is_drawn_over_the_whole_run(desk: Seen) -> None:
    titles = [
        "Loss",
        "Validation",
        "Speed",
        "Waiting",
        "Where the time of rank 0, node1 went",
        "Where the time of rank 1, node2 went",
    ]
    assert list(desk.charts) == [*titles, "Sent", "Memory"]
    for title, chart in desk.charts.items():
        assert chart["paths"], title
        for path in chart["paths"]:
            assert path["d"].startswith("M"), title
            assert "NaN" not in path["d"], title
            assert path["width"] > 100, (title, path["series"])
    assert [path["points"] for path in desk.charts["Loss"]["paths"]] == [STEPS, STEPS, 3000]
    assert desk.charts["Loss"]["marks"] == 5


def test_figures_under_the_pointer_are_those_of_the_metrics(desk: Seen, steps: list[dict[str, Any]]) -> None:
    assert desk.charts["Loss"]["first"].startswith(f"step 0\neach step: {steps[0]['loss']:.4f}")
    assert desk.charts["Loss"]["last"].startswith(f"step 4,999\neach step: {steps[-1]['loss']:.4f}")
    assert f"each step: {steps[-1]['tokens_per_second']:,.0f}" in desk.charts["Speed"]["last"]
    assert f"rank 0, node1: {steps[-1]['bytes_sent'] / 1e6:.1f} MB" in desk.charts["Sent"]["last"]
    assert "waiting for other ranks: 150 ms" in desk.charts["Where the time of rank 1, node2 went"]["last"]
    assert "rank 1, node2: 30 %" in desk.charts["Waiting"]["last"]


def test_the_loss_curve_lies_where_the_axis_says(desk: Seen, steps: list[dict[str, Any]]) -> None:
    chart = desk.charts["Loss"]
    (low, low_y), (high, high_y) = [(float(text), y) for text, y in chart["texts"] if re.fullmatch(r"\d+\.\d\d", text)][
        :2
    ]
    points = [tuple(map(float, point.split())) for point in re.findall(r"[ML]([\d.]+ [\d.]+)", chart["paths"][0]["d"])]

    def value(y: float) -> float:
        # Labels stand four pixels below their lines.
        return low + (y - (low_y - 4)) * (high - low) / (high_y - low_y)

    assert value(points[0][1]) == pytest.approx(steps[0]["loss"], abs=0.06)
    assert value(points[-1][1]) == pytest.approx(steps[-1]["loss"], abs=0.06)
    highest = max(step["loss"] for step in steps)
    assert max(value(y) for dummy, y in points) == pytest.approx(highest, abs=0.06)


def test_the_words_hold_the_figures_too(desk: Seen, steps: list[dict[str, Any]]) -> None:
    assert "Run d8" in desk.text
    assert f"{steps[-1]['loss']:.4f}" in desk.text
    assert "5,000 of 5,000" in desk.text
    assert "weights identical on all ranks" in desk.text
    assert "The capital of <France> is Paris & more." in desk.text
    begun = "2023-11-14 22:13:20"
    assert (
        f"depth 4, 7,340,162 parameters · data text-1a2b3c4d · on node1, node2 · {begun} to 2023-11-14 22:55:00, 41 min 40 s"
        in desk.text
    )
    assert "loss, smoothed, from 8.0000" in desk.text
    for heading in ("Hosts over time", "Compared with other runs", "What happened"):
        assert heading in desk.text


def test_it_fits_a_phone_in_the_dark(folder: Path) -> None:
    phone = Seen(folder, 390, "--blink-settings=preferredColorScheme=0")
    assert phone.console == []
    assert phone.found["width"] == 390
    assert phone.found["scroll"] <= 390
    assert phone.found["background"] == "rgb(19, 19, 22)"
    assert all(path["width"] > 100 for chart in phone.charts.values() for path in chart["paths"])


@pytest.mark.parametrize("kept", [1, 2])
def test_a_run_that_has_just_begun_is_shown(tmp_path: Path, kept: int) -> None:
    run = collected(tmp_path, "d4", 40)
    for rank in (0, 1):
        metrics = run / f"node{rank + 1}" / f"metrics-rank{rank}.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:kept]))
        fake_run.write_json(run / f"node{rank + 1}" / "session.json", fake_run.session_of(rank, 1.7e9))
    write_report(tmp_path, run)
    seen = Seen(tmp_path, 800)
    assert seen.console == []
    assert "still running when this was collected" in seen.text
    assert ("Loss" in seen.charts) == (kept > 1)


def test_a_host_that_was_away_leaves_a_gap_and_a_band_that_says_why(tmp_path: Path) -> None:
    run = collected(tmp_path, "d4", 400)
    metrics, events = run / "node2" / "metrics-rank1.jsonl", fake_run.history(1, 2, 400, 1.7e9)
    there = [event for event in events if not 100 <= event.get("step", 0) < 300]
    metrics.write_text("".join(json.dumps(event) + "\n" for event in there))
    both = {"what": "training", "members": ["node1", "node2"]}
    story = [
        {"time": 1.7e9, **both},
        {"time": 1.7e9 + 50, "what": "ending", "why": "node2 is not heard"},
        {"time": 1.7e9 + 51, "what": "training", "members": ["node1"], "generation": 2},
        {"time": 1.7e9 + 150, **both, "generation": 3},
    ]
    (run / "node1" / "members.jsonl").write_text("".join(json.dumps(one) + "\n" for one in story))
    write_report(tmp_path, run)
    seen = Seen(tmp_path, 800)
    assert seen.console == []
    alone, away = (path["d"] for path in seen.charts["Waiting"]["paths"])
    assert (alone.count("M"), away.count("M")) == (1, 2)
    assert seen.found["away"] == ["node2 is not heard: 2023-11-14 22:14:10 to 2023-11-14 22:15:50"]
