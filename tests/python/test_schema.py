"""results.json: what was written is read back, what is damaged is named; and `compare`."""

import copy
import json
import math

import pytest

from fusewise import cli
from fusewise._usage import UsageError
from fusewise.bench import schema
from fusewise.bench.compare import compare, lines, tables, worse
from fusewise.bench.statistics import summary
from results import contender, gpu_results


def written(path, results):
    path.write_text(json.dumps(results))
    return path


def test_what_is_written_is_read_back(tmp_path):
    results = gpu_results()
    results["rows"][3] = {
        key: value
        for key, value in results["rows"][3].items()
        if key not in ("check", "implementation", "contenders", "against")
    } | {"failed": "out of memory"}
    assert schema.read(written(tmp_path / "a.json", results)) == results


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda r: r["rows"][2].pop("layout"), "rows[2].layout is missing"),
        (lambda r: r["rows"][0].update(more=1), "rows[0].more is unknown"),
        (lambda r: r["rows"][1].update(count=True), "rows[1].count is True"),
        (lambda r: r["rows"][0]["shape"].append("4"), "rows[0].shape[4] is '4'"),
        (lambda r: r.update(rows={}), "rows is not a list"),
        (
            lambda r: r["rows"][4]["contenders"]["eager"]["gpu"]["samples"].clear(),
            "rows[4].contenders.eager.gpu.samples are not times",
        ),
        (
            lambda r: r["rows"][2]["contenders"]["eager"]["wall"]["samples"].append(math.nan),
            "rows[2].contenders.eager.wall.samples are not times",
        ),
        (
            lambda r: r["rows"][1].pop("contenders"),
            "rows[1] has neither failed nor times in contenders.fusewise",
        ),
        (
            lambda r: r["rows"][1]["contenders"].pop("fusewise"),
            "rows[1] has neither failed nor times in contenders.fusewise",
        ),
        (
            lambda r: r["rows"][0]["contenders"]["eager"].update(gpu=3.0),
            "rows[0].contenders.eager.gpu is not an object",
        ),
    ],
)
def test_what_is_damaged_is_named(tmp_path, damage, said):
    results = gpu_results()
    damage(results)
    with pytest.raises(UsageError) as raised:
        schema.read(written(tmp_path / "a.json", results))
    assert said in str(raised.value)


def test_another_schema_is_named(tmp_path):
    results = gpu_results() | {"schema": 1}
    with pytest.raises(UsageError, match="has schema 1, this fusewise reads 2"):
        schema.read(written(tmp_path / "a.json", results))


def changed(ours, eager=1.0):
    """Two results whose first case changed from 2 µs to `ours`, and eager's from 1 to `eager`."""
    old = gpu_results()
    new = copy.deepcopy(old)
    new["rows"][0]["contenders"]["fusewise"] = contender(ours)
    new["rows"][0]["contenders"]["eager"] = contender(eager)
    return old, new


@pytest.mark.parametrize(
    "ours, eager, verdict",
    [
        (2.0, 1.0, "same"),
        (2.5, 1.0, "worse"),
        (1.5, 1.0, "better"),
        (2.03, 1.0, "same"),  # within what two runs differ by
        (2.2, 1.2, "same"),  # the whole machine was slower
    ],
)
def test_better_and_worse_beyond_the_noise(ours, eager, verdict):
    found = compare(*changed(ours, eager))
    assert found["rows"][0]["clocks"]["gpu"]["verdict"] == verdict
    assert {row["clocks"]["gpu"]["verdict"] for row in found["rows"][1:]} == {"same"}
    assert worse(found) == (["b4-48x190 forward"] if verdict == "worse" else [])


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_noisy_samples_are_no_verdict(factor):
    """Medians 10 % apart, of samples that differ by far more among themselves."""
    old, new = changed(2.0)
    for results, centre in ((old, 2.0), (new, 2.0 * factor)):
        samples = [centre * (0.6 + 0.1 * i) for i in range(9)]
        results["rows"][0]["contenders"]["fusewise"]["gpu"] = summary(samples)
    found = compare(old, new)["rows"][0]["clocks"]["gpu"]
    assert found["change"].value == pytest.approx(1 / factor)
    assert found["verdict"] == "same"


def test_a_case_that_fails_now_is_worse():
    old, new = changed(2.0)
    for key in ("contenders", "against"):
        del new["rows"][0][key]
    new["rows"][0]["failed"] = "WRONG: y: off by 1"
    assert worse(compare(old, new)) == ["b4-48x190 forward"]
    assert worse(compare(new, old)) == []


def test_cases_of_one_run_only_and_another_machine_are_said():
    old, new = changed(2.0)
    old["rows"].pop(1)
    new["rows"].pop(2)
    new["environment"]["cpu"] = "another CPU"
    said = "\n".join(lines(compare(old, new)))
    assert "only in the old run: b4-144x95 forward" in said
    assert "only in the new run: b4-24x190 forward" in said
    assert "cpu differs: a CPU in the old run, another CPU in the new" in said


def test_the_exit_code_of_compare(tmp_path, capsys):
    old, new = changed(3.0)
    paths = [str(written(tmp_path / f"{i}.json", r)) for i, r in enumerate((old, new))]
    assert cli.main(["compare", *paths]) == 0
    assert cli.main(["compare", *paths, "--fail"]) == 1
    assert cli.main(["compare", *reversed(paths), "--fail"]) == 0
    said = capsys.readouterr().out
    assert "| old / new | 95 % interval | same within | old µs | new µs |" in said
    row = (
        "| b4-48x190 | forward | WORSE | 0.667 | 0.667 to 0.667 | 0.980 to 1.020 | 2 | 3 | 1.000 |"
    )
    assert row in said


def test_the_interval_that_decides_is_shown():
    """Eager moved by 1 / 1.2 in the first row, so ours may, too."""
    for clock_table in tables(compare(*changed(2.2, 1.2))):
        assert clock_table.rows[0][2:6] == ["same", "0.909", "0.909 to 0.909", "0.833 to 1.020"]
        assert clock_table.rows[1][5] == "0.980 to 1.020"
