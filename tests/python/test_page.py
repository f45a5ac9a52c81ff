"""The HTML pages in a real browser: they fit, plots are drawn, tables sort, nothing is fetched."""

import html
import json
import re
import shutil
import subprocess

import pytest

from fusewise import cli
from fusewise.bench import report, runner
from results import contender, gpu_results
from test_report import with_rival

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium; on Debian: apt-get install chromium"
)

# Runs after the page's own script, and tells its frame what it found.
PROBE = """
<script>
window.addEventListener("load", () => {
  const all = (what) => [...document.querySelectorAll(what)];
  const found = { width: innerWidth, open: all("details[open]").length };
  found.firstScreen = all(".tile, .panel, section.bad caption")
    .filter((part) => part.getBoundingClientRect().bottom < innerHeight)
    .map((part) => part.className || part.tagName);
  const last = all("body > section, body > details").pop();
  found.last = last.tagName + ": " + last.textContent.trim().split("\\n")[0];

  for (const folded of all("details")) folded.open = true;
  const column = (table, i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
  const table = all(".scroll table").find(
    (table) => table.tBodies[0].rows.length > 1 && table.querySelector("th:not(.words)"));
  const headings = [...table.tHead.rows[0].cells];
  const i = headings.findIndex((cell) => !cell.classList.contains("words"));
  found.unsorted = column(table, i);
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
  found.pageScrolls = document.documentElement.scrollWidth > innerWidth;
  found.cut = all(".scroll, figure").filter((box) => box.scrollWidth > box.clientWidth)
    .map((box) => box.textContent.trim().split("\\n")[0]);
  const range = document.createRange();
  found.wrapped = all(".scroll td:not(.long), .bars th, .bars .value").filter((cell) => {
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map((box) => box.top)).size > 1;
  }).map((cell) => cell.textContent);
  const overlap = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  found.overlapping = all(".bars tr").filter((row) => {
    const boxes = [...row.cells].map((cell) => cell.getBoundingClientRect());
    return boxes.some((a, i) => boxes.slice(i + 1).some((b) => overlap(a, b)));
  }).length;
  found.uncaptioned = all("table").filter((table) => !table.caption).length
    + all("img").filter((image) => !image.alt).length;

  // Of every text and what lies behind it, by the rule of the W3C.
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour !== "rgba(0, 0, 0, 0)" ? colour : behind(element.parentElement);
  };
  found.faint = all("body *").filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())
    && !["SCRIPT", "STYLE"].includes(element.tagName)
  ).filter((element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  }).map((element) => element.textContent);
  found.dark = light(getComputedStyle(document.body).backgroundColor) < 0.1;

  parent.postMessage(JSON.stringify(found), "*");
});
</script>
"""
# No window is narrower than 500 pixels, but a frame may be; --dump-dom shows what it was told.
FRAME = """
<script>
addEventListener("message", (event) => {
  document.getElementById("probe").textContent = event.data;
});
</script>
<iframe src="probed.html" style="width: %dpx; height: 900px; border: 0"></iframe>
<pre id="probe"></pre>
"""


def probe(page, tmp_path, width=1200, *options):
    """What the browser finds in a page that is so wide, and 900 pixels high."""
    probed = page.read_text().replace("</body>", PROBE + "</body>")
    (tmp_path / "probed.html").write_text(probed)
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME % width)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", *options]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=5000"]
    command += ["--window-size=1400,1000", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.+?)</pre>', done.stdout, re.S)
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
    assert found["open"] == 0
    assert found["last"] == "DETAILS: Environment, and the command that repeats it"
    assert found["pageScrolls"] is False
    assert found["overlapping"] == found["uncaptioned"] == 0
    assert found["faint"] == []


def check_wide(found):
    """Every table is seen whole, with no word on a second line."""
    assert found["cut"] == found["wrapped"] == []


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of the benchmark, with as much as there can be."""
    results = with_rival(gpu_results(), "addmm_activation", 1.5)
    with_rival(results, "products", 1.5)
    results["environment"]["long"] = "as_long_as_some_lists_of_flags_are_" * 10
    for place, row in enumerate(results["rows"]):
        row["implementation"]["backward"] = {"chosen": "another_one", "declined": {}}
        row["host"] = {"overhead_us": 18.0, "empty_us": 12.5}
        row["floor"]["us"] = place / 10 + 0.1
        if place > 8:  # losses against both, of several sizes, so that sorting has something to do
            row["case"] = f"gelu_tanh-1024x784-2048-2048-{place}-bf16"
            row["family"], row["mode"] = "linear_act", "forward+backward"
            for name in ("eager", "compile"):
                row["contenders"][name] = contender(1.9 - place / 10)
                row["against"][name] = runner.ratios(row, name)
    folder = tmp_path_factory.mktemp("page")
    report.write(results, folder)
    return folder / "report.html"


def test_nothing_from_outside_is_named(page):
    text = page.read_text()
    assert not re.search(r'(?:src|href)\s*=\s*"(?!data:)', text)
    assert "@import" not in text and "url(" not in text


@needs_browser
def test_the_page_of_the_benchmark_in_a_browser(page, tmp_path):
    found = probe(page, tmp_path)
    check(found, plots=4)
    check_wide(found)
    # Four tiles (two clocks, two rivals), a panel of bars for each clock, and the losses begin.
    assert found["firstScreen"] == ["tile"] * 4 + ["panel"] * 2 + ["CAPTION"]


@needs_browser
def test_the_page_of_the_benchmark_on_a_telephone_and_in_the_dark(page, tmp_path):
    found = probe(page, tmp_path, 400, "--blink-settings=preferredColorScheme=0")
    assert found["width"] == 400 and found["dark"]
    check(found, plots=4)


@needs_browser
def test_the_page_of_a_profile_in_a_browser(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net_for_a_page.py").write_text(
        "import torch.nn as nn\nnet = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Softmax(1))"
    )
    command = ["profile", "net_for_a_page:net", "--input", "32,64", "--device", "cpu"]
    assert cli.main([*command, "--out", "out"]) == 0
    found = probe(tmp_path / "out" / "report.html", tmp_path)
    check(found, plots=2)
    check_wide(found)
    check(probe(tmp_path / "out" / "report.html", tmp_path, 400), plots=2)
