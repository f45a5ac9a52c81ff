"""What the benchmark says first: the headline, the losses, and one table for each family."""

import copy

import pytest

from fusewise.bench import plots, report, runner, tables, verdict
from fusewise.bench.baselines import all_baselines
from fusewise.bench.statistics import summary
from results import contender, gpu_results


def with_rival(results, name, gpu):
    """Another contender, `gpu` µs in every row."""
    results["baselines"].append(name)
    for row in results["rows"]:
        row["contenders"][name] = contender(gpu)
        row["against"][name] = runner.ratios(row, name)
    return results


def two_families():
    """Rows of Squeeze-and-Excitation, slower than eager, and of linear_act, faster."""
    results = gpu_results(ours=2.0, eager=1.0, compiled=4.0)
    faster = gpu_results(ours=1.0, eager=8.0, compiled=2.0)
    for row in faster["rows"][:4]:
        results["rows"].append(row | {"family": "linear_act", "group": None})
    return results


def cells(table, heading):
    return [row[table.header.index(heading)] for row in table.rows]


def test_the_headline_counts_rows_and_takes_geometric_means():
    by_clock = {(s.clock, s.rival): s for s in verdict.scores(two_families())}
    eager = by_clock["gpu", "eager"]
    assert (eager.faster, eager.same, eager.slower) == (4, 0, 12)
    assert eager.mean == pytest.approx((0.5**12 * 8**4) ** (1 / 16))
    assert set(by_clock) == {(c, r) for c in ("gpu", "wall") for r in ("eager", "compile")}
    linear = verdict.scores(two_families(), "linear_act")[0]
    assert (linear.total, linear.mean) == (4, pytest.approx(8.0))


def test_same_is_what_the_interval_says():
    """Medians 5 % apart, of samples that differ by more."""
    results = gpu_results()
    row = results["rows"][0]
    row["contenders"]["fusewise"]["gpu"] = summary([8.0, 9.0, 10.0, 11.0, 12.0])
    row["contenders"]["eager"]["gpu"] = summary([8.5, 9.5, 10.5, 11.5, 12.5])
    row["against"]["eager"] = runner.ratios(row, "eager")
    score = verdict.scores(results)[0]
    assert (score.faster, score.same, score.slower) == (0, 1, 11)
    assert "1.05x same" in cells(tables.family_table(results, "squeeze_excite"), "vs eager")


@pytest.mark.parametrize("name", ["products", "layers", "graphed", "fused products"])
def test_yardsticks_are_in_no_verdict(name):
    results = gpu_results(ours=2.0, eager=3.0, compiled=4.0)
    said = copy.deepcopy(verdict.scores(results))
    with_rival(results, name, 1.0)
    assert verdict.scores(results) == said
    assert verdict.losses(results) == []
    assert report.losses(results) == "No losses: no rival is faster in any row."
    assert set(cells(tables.family_table(results, "squeeze_excite"), f"vs {name}")) == {
        "-",
        "0.50x",
    }


def test_losses_against_every_rival_eager_first_the_worst_first():
    results = with_rival(two_families(), "in-place", 0.5)
    results["rows"][3]["contenders"]["eager"] = contender(0.2)
    results["rows"][3]["against"]["eager"] = runner.ratios(results["rows"][3], "eager")
    lost = report.losses(results)
    assert lost.rows[0][:4] == ["b4-192x95", "forward", "GPU, eager", "0.10x SLOWER"]
    assert lost.rows[-1][2] == "wall, in-place"
    assert lost.title == "Losses: in 16 of 16 rows a rival is faster"
    assert len(lost.rows) == 2 * 12 + 2 * 16


def test_a_loss_of_less_than_a_hundredth_shows_its_figure():
    results = gpu_results(ours=1.0, eager=0.998)
    assert {row[3] for row in report.losses(results).rows} == {"0.998x SLOWER"}


def test_sums_stand_in_the_table_of_their_family():
    results = two_families()
    assert tables.family_table(results, "squeeze_excite").rows[0][0] == "efficientnet-b4, sum of 32"
    assert len(tables.family_table(results, "linear_act").rows) == 4


def test_host_overhead_and_where_only_a_graph_helps():
    """The wall time of ours is 20 µs in every row."""
    results = gpu_results()
    assert "host µs" not in tables.family_table(results, "squeeze_excite").header
    results["rows"][0]["host"] = {"overhead_us": 18.0, "empty_us": 12.5}
    results["rows"][1]["host"] = {"overhead_us": 18.0, "empty_us": 9.5}
    results["rows"][2]["host"] = None
    results["rows"][3]["host"] = {"overhead_us": -0.5, "empty_us": 9.5}
    table = tables.family_table(results, "squeeze_excite")
    assert cells(table, "host µs")[:5] == ["-", "18 (90%)", "18 (90%)", "-", "0 (0%)"]
    assert cells(table, "empty µs")[:4] == ["-", "12.5 graph", "9.5", "-"]
    assert any("In 1 of 12 rows an empty operator" in line for line in report.remarks(results))


def test_a_row_that_failed_is_said():
    results = gpu_results()
    for key in ("contenders", "against", "check", "implementation"):
        del results["rows"][0][key]
    results["rows"][0]["failed"] = "WRONG: y: off by 1"
    assert "NOT MEASURED: b4-48x190 forward: WRONG: y: off by 1" in report.remarks(results)
    assert cells(tables.family_table(results, "squeeze_excite"), "GPU µs")[1] == "FAILED"
    assert "FAILED" in report.markdown(results)


def test_a_rival_that_is_wrong_is_said():
    results = gpu_results()
    assert not any("WRONG" in line for line in report.remarks(results))
    for row in results["rows"][:2]:
        row["contenders"]["eager"] = {"unavailable": "WRONG: y: off by 1"}
        del row["against"]["eager"]
    cases = "b4-48x190, b4-24x190"
    said = f"WRONG, so without times: eager in 2 of 12 rows ({cases}). The first: y: off by 1"
    assert said in report.remarks(results)
    assert said in report.markdown(results)


def test_no_empty_columns():
    """As with --cases FILE on a CPU: most baselines are other families', and some could not run."""
    results = gpu_results() | {"device": "cpu", "sums": [], "baselines": list(all_baselines())}
    for row in results["rows"]:
        row["contenders"] = {name: contender(1.0) for name in ("fusewise", "eager")}
        for times in row["contenders"].values():
            for key in ("gpu", "kernels", "peak_bytes"):
                del times[key]
        row["contenders"]["graphed"] = {"unavailable": "GPU only"}
        row["against"] = {"eager": runner.ratios(row, "eager")}
    table = tables.family_table(results, "squeeze_excite")
    assert table.header == ["case", "direction", "wall µs", "vs eager", "of floor", "±"]
    assert "| case | direction | wall µs | vs eager | of floor | ± |" in report.markdown(results)


def test_markers_are_on_the_lines_of_their_rows_and_there_is_one_legend():
    results = with_rival(gpu_results(), "products", 1.5)
    (plot,) = plots.ratios(results, "squeeze_excite")
    *ratios, _ = plot.figure.axes
    places = set(range(13))  # twelve rows and their sum
    for axes in ratios:
        marked = [set(bars.lines[0].get_ydata()) for bars in axes.containers]
        assert len(marked) == 3 and all(ys <= places for ys in marked)
        assert axes.get_legend() is None
    (legend,) = plot.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["eager", "compile", "products"]


def test_a_plot_shows_every_loss_whatever_is_far_to_the_right():
    results = with_rival(gpu_results(ours=2.0, eager=3.0), "naive", 200.0)
    with_rival(results, "in-place", 0.1)
    (plot,) = plots.ratios(results, "squeeze_excite")
    low, high = plot.figure.axes[0].get_xlim()
    assert low < 0.05 and 2 < high < 100
