"""The HTML pages in a real browser: plots are drawn, tables sort, nothing is fetched."""

import html
import json
import re
import shutil
import subprocess

import pytest

from fusewise import cli
from fusewise.bench import report
from results import gpu_results

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# Runs after the page's own script, and leaves what it found where --dump-dom shows it.
PROBE = """
<script>
window.addEventListener("load", () => {
  const column = (table, i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
  const table = [...document.querySelectorAll("table")].find(
    (table) => table.tBodies[0].rows.length > 1 && table.querySelector("th:not(.words)"));
  const headings = [...table.tHead.rows[0].cells];
  const i = headings.findIndex((cell) => !cell.classList.contains("words"));
  const found = { unsorted: column(table, i) };
  headings[i].querySelector("button").click();
  found.up = column(table, i);
  found.upState = headings[i].getAttribute("aria-sort");
  headings[i].querySelector("button").click();
  found.down = column(table, i);
  headings[0].querySelector("button").click();
  found.words = column(table, 0);
  found.plots = [...document.images].map((image) => image.naturalWidth > 100 && image.complete);
  found.fetched = performance.getEntriesByType("resource")
    .map((entry) => entry.name).filter((name) => !name.startsWith("data:"));
  found.cut = [document.documentElement, ...document.querySelectorAll(".scroll")]
    .filter((box) => box.scrollWidth > box.clientWidth)
    .map((box) => box.querySelector("caption, title").textContent);
  const shown = document.createElement("pre");
  shown.id = "probe";
  shown.textContent = JSON.stringify(found);
  document.body.append(shown);
});
</script>
"""


def probe(page, tmp_path):
    """What the browser finds in a page."""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=5000"]
    command.append("--window-size=1200,900")
    done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def natural(text):
    """Figures inside of words by their value."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def check(found, plots):
    numbers = [float(re.match(r"[\d.]+", text)[0]) for text in found["unsorted"]]
    assert [float(re.match(r"[\d.]+", text)[0]) for text in found["up"]] == sorted(numbers)
    assert found["upState"] == "ascending"
    assert [float(re.match(r"[\d.]+", text)[0]) for text in found["down"]] == sorted(numbers)[::-1]
    assert found["words"] == sorted(found["words"], key=natural)
    assert found["plots"] == [True] * plots
    assert found["fetched"] == []
    assert found["cut"] == []


@pytest.fixture
def page(tmp_path):
    """Of the benchmark."""
    results = gpu_results()
    results["environment"]["long"] = "as_long_as_some_lists_of_flags_are_" * 10
    for row in results["rows"]:
        row["implementation"]["backward"] = {"chosen": "another_one", "declined": {}}
    for place, row in enumerate(results["rows"]):  # so that sorting has something to do
        row["floor"]["us"] = float(100 * (place * 7 % 12) + 1)
    report.write(results, tmp_path)
    return tmp_path / "report.html"


def test_nothing_from_outside_is_named(page):
    text = page.read_text()
    assert not re.search(r'(?:src|href)\s*=\s*"(?!data:)', text)
    assert "@import" not in text and "url(" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium; on Debian: apt-get install chromium")
def test_the_page_of_the_benchmark_in_a_browser(page, tmp_path):
    check(probe(page, tmp_path), plots=3)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium; on Debian: apt-get install chromium")
def test_the_page_of_a_profile_in_a_browser(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net_for_a_page.py").write_text(
        "import torch.nn as nn\nnet = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Softmax(1))"
    )
    command = ["profile", "net_for_a_page:net", "--input", "32,64", "--device", "cpu"]
    assert cli.main([*command, "--out", "out"]) == 0
    check(probe(tmp_path / "out" / "report.html", tmp_path), plots=2)
