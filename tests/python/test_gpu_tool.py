"""`make gpu` in parts, with commands that need no GPU."""

import dataclasses
import json
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools" / "gpu.py").is_file():
    pytest.skip("there are no tools here", allow_module_level=True)
sys.path.append(str(ROOT / "tools"))

import gpu  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_records  # noqa: E402
from gpu_parts import Job, Part  # noqa: E402
from gpu_records import Failure, Record, Step  # noqa: E402

# --- what there is --------------------------------------------------------------------------------


def test_every_test_file_is_in_one_part():
    for folder in ("tests/python", "tests/gpu"):
        families = (*gpu_parts.FAMILIES, gpu_parts.REST)
        found = [path for family in families for path in gpu_parts.test_files(folder, family)]
        assert sorted(found) == sorted((ROOT / folder).glob("test_*.py"))
        for family in families:
            assert gpu_parts.test_files(folder, family), f"{folder}: {family}"


def test_every_family_has_every_kind_of_part():
    names = gpu_parts.all_parts().keys()
    assert {"build", "cpp", "fuzz", "sanitize-cpp", "tests-rest", "gpu-rest"} <= names
    for name, family in gpu_parts.FAMILIES.items():
        kinds = ("tests", "gpu", *(("sanitize", "bench") if family.kernels else ()))
        assert {f"{kind}-{name}" for kind in kinds} <= names
    from fusewise.bench.families import FAMILIES

    benched = [name for family in gpu_parts.FAMILIES.values() for name in family.bench]
    assert sorted(benched) == sorted(FAMILIES)
    program = (ROOT / "tools" / "sanitizer_calls.py").read_text()
    sanitized = [name for name, family in gpu_parts.FAMILIES.items() if family.kernels]
    assert all(f'    "{family}": ' in program for family in sanitized)
    assert set(gpu_parts.FUZZED) == set(FAMILIES)


def test_jobs_have_names_of_their_own():
    for part in gpu_parts.all_parts().values():
        steps = [job.step for job in part.jobs(ROOT / "gpu-results" / part.name, "")]
        assert len(set(steps)) == len(steps)
        assert steps or part.name == "build"


@pytest.mark.parametrize("family", ["squeeze_excite", "linear"])
def test_tests_that_need_most_of_the_memory_run_one_after_the_other(family):
    jobs = gpu_parts.all_parts()[f"gpu-{family}"].jobs(ROOT / "out", "")
    named = {job.step: job.command[job.command.index("-k") + 1] for job in jobs}
    assert [job.step for job in jobs if job.large] == ["large"]
    assert named.pop("large") == gpu_parts.LARGE
    assert len(named) > 1 and set(named.values()) == {f"not {gpu_parts.LARGE}"}


VENDORS_HAZARD = """
========= Error: Race reported between Read access at nvjet_sm90_hsh_64x88_4x1_v_bz_NNT+0xa60
=========     and Write access at nvjet_sm90_hsh_64x88_4x1_v_bz_NNT+0x2f20 [448 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_hazards_count_outside_of_the_vendors_kernels():
    assert gpu_parts.own_hazards(VENDORS_HAZARD) == ""
    own = VENDORS_HAZARD.replace("nvjet_sm90_hsh", "void fusewise::cuda::scale_kernel<float>")
    assert "fusewise::cuda::scale_kernel" in gpu_parts.own_hazards(own)
    assert gpu_parts.own_hazards("========= Internal Sanitizer Error") == "no summary"


def test_a_problem_in_the_log_fails_a_job(tmp_path):
    job = Job(
        "step", [sys.executable, "-c", "print('half of it')"], problem=lambda log: log.strip()
    )
    code, step = gpu.run(job, tmp_path / "log", 60, False, "part")
    assert code == 0 and not step.passed and "half of it" in step.detail


def test_families_include_only_what_they_say_they_use():
    """Else a part would call itself up to date while a file that it tests has changed."""
    pattern = re.compile(
        r'^\s*(?:#include "(\S+)"|from (\S+) import (.+)|import (\S+))', re.MULTILINE
    )
    checked = 0
    for path in gpu_parts.operators():
        family = gpu_parts.owner(path)
        if family is None or path.suffix not in (".h", ".cpp", ".cu", ".cuh", ".py"):
            continue
        for named in pattern.findall(path.read_text()):
            other = gpu_parts.owner(Path(" ".join(named)))
            checked += 1
            assert other in (None, family, *gpu_parts.FAMILIES[family].uses), f"{path}: {named}"
    assert checked > 100


def make(*arguments):
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_lists_the_parts_and_passes_options_on():
    listed = make("gpu", "PARTS")
    assert [line.split()[0] for line in listed.splitlines()] == list(gpu_parts.all_parts())
    said = make(
        "-n", "gpu", "PART=fuzz tests-linear", "AGAIN=1", "COMMIT=abc1234", "ARGS=--filter b4"
    )
    options = 'fuzz tests-linear --again --commit="abc1234" --bench="--filter b4"'
    assert f"tools/gpu.py {options}" in said


# --- which sources --------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small tree, and a function that changes a file of it and names the parts that notice."""
    names = (
        "CMakeLists.txt",
        "src/common/check.h",
        "src/cuda/linear_act/passes.cu",
        "src/cuda/autoencoder/forward.cu",
        "src/cuda/squeeze_excite/cluster.cu",
        "python/fusewise/nn/mlp.py",
        "python/fusewise/bench/accuracy.py",
        "python/fusewise/bench/runner.py",
        "python/fusewise/_lib/library.so",
        "benchmarks/cases/mlp.json",
        "benchmarks/cases/squeeze_excite_zoo.json",
        "benchmarks/optimize_models.py",
        "tests/conftest.py",
        "tests/cpp/test_mlp.cpp",
        "tests/python/reference.py",
        "tests/python/linear_reference.py",
        "tests/python/test_linear_act.py",
        "tests/python/test_page.py",
        "tests/gpu/test_linear_act_cuda.py",
        "tools/sanitizer_calls.py",
        "tools/fuzz_calls.py",
        "docs/results/some/summary.md",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    monkeypatch.setattr(gpu_parts, "ROOT", tmp_path)

    def digests():
        return {name: gpu_parts.digest(part) for name, part in gpu_parts.all_parts().items()}

    def notice(name):
        before = digests()
        (tmp_path / name).write_text((tmp_path / name).read_text() + "more")
        return {part for part, digest in digests().items() if digest != before[part]}

    return notice


@pytest.mark.parametrize(
    "name, noticed, not_noticed",
    [
        ("CMakeLists.txt", set(gpu_parts.all_parts()), set()),
        ("src/common/check.h", set(gpu_parts.all_parts()), set()),
        (
            "src/cuda/linear_act/passes.cu",  # the autoencoder uses it
            {"build", "tests-linear", "sanitize-autoencoder", "tests-rest", "bench-linear", "fuzz"},
            {"tests-squeeze_excite", "sanitize-squeeze_excite", "bench-squeeze_excite"},
        ),
        (
            "src/cuda/autoencoder/forward.cu",
            {"build", "cpp", "gpu-autoencoder", "sanitize-cpp", "gpu-rest"},
            {"tests-linear", "gpu-squeeze_excite", "bench-linear"},
        ),
        ("python/fusewise/nn/mlp.py", {"tests-linear", "fuzz"}, {"build", "tests-squeeze_excite"}),
        ("python/fusewise/bench/accuracy.py", {"tests-linear", "gpu-linear", "fuzz"}, {"cpp"}),
        ("python/fusewise/bench/runner.py", {"tests-rest", "bench-linear"}, {"tests-linear"}),
        ("benchmarks/cases/mlp.json", {"bench-linear"}, {"bench-squeeze_excite", "tests-linear"}),
        (
            "benchmarks/cases/squeeze_excite_zoo.json",
            {"bench-squeeze_excite-zoo"},
            {"bench-linear", "tests-squeeze_excite"},
        ),
        (
            "benchmarks/optimize_models.py",
            {"bench-optimize", "tests-rest"},
            {"bench-linear", "tests-optimize"},
        ),
        ("tests/python/reference.py", {"tests-linear", "gpu-linear", "fuzz"}, {"bench-linear"}),
        ("tests/python/test_linear_act.py", {"tests-linear"}, {"gpu-linear", "tests-rest"}),
        ("tests/gpu/test_linear_act_cuda.py", {"gpu-linear"}, {"tests-linear"}),
        ("tools/sanitizer_calls.py", {"sanitize-linear"}, {"sanitize-cpp", "tests-linear"}),
        ("python/fusewise/_lib/library.so", set(), set(gpu_parts.all_parts())),
        ("docs/results/some/summary.md", set(), set(gpu_parts.all_parts())),
    ],
)
def test_a_change_is_noticed_by_the_parts_that_test_it(tree, name, noticed, not_noticed):
    found = tree(name)
    assert noticed <= found and not (not_noticed & found)


# --- runs -----------------------------------------------------------------------------------------

TESTS = """
    import pytest

    def test_right():
        pass

    def test_wrong():
        assert 1 == 2, "planted"

    @pytest.mark.skip(reason="needs two GPUs")
    def test_skipped():
        pass
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A GPU machine that is none. Returns the parts, which tests fill, and `source`, which all of
    them test."""
    source = tmp_path / "source"
    source.write_text("first")
    monkeypatch.setattr(gpu, "OUT", tmp_path / "gpu-results")
    monkeypatch.setattr(gpu_parts, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "ENVIRONMENT", dict(gpu.ENVIRONMENT))
    monkeypatch.setattr(gpu, "build", lambda out: ([Step("build", True, 1.0, "exit code 0")], []))
    monkeypatch.setattr(
        gpu,
        "describe",
        lambda: {"gpu": "none", "commit": gpu.ENVIRONMENT.get("FUSEWISE_COMMIT", "from git")},
    )
    parts = {}

    def add(name, *jobs, **options):
        parts[name] = Part(name, lambda out, arguments: list(jobs), lambda: [source], **options)

    add("build")
    monkeypatch.setattr(gpu_parts, "all_parts", lambda: parts)
    return add, source


def shell(step, text, found=""):
    return Job(step, ["bash", "-c", text], found=found)


def record(name, folder="gpu-results"):
    return json.loads((gpu.OUT.parent / folder / "parts" / f"{name}.json").read_text())


def test_a_part_that_passed_is_recorded_and_not_run_again(machine, capsys):
    add, source = machine
    runs = source.parent / "runs"
    add("one", shell("a", f"echo x >> {runs}; echo 7 calls", r"(\d+ calls)"), shell("b", "true"))

    def count(*arguments):
        assert gpu.main(list(arguments)) == 0
        return len(runs.read_text().split())

    assert count("one", "--commit", "abc1234") == 1
    found = record("one")
    assert found["passed"] and found["commit"] == "abc1234" and found["failures"] == []
    assert found["digest"] == gpu_parts.digest(gpu_parts.all_parts()["one"])
    assert {step["step"]: step["detail"] for step in found["steps"]} == {
        "a": "exit code 0, 7 calls",
        "b": "exit code 0",
    }
    assert (gpu.OUT / "parts" / "one.tar.gz").is_file()
    assert count("one") == 1
    assert "one: passed already for these sources; AGAIN=1" in capsys.readouterr().out
    assert count("one", "--again") == 2
    source.write_text("second")
    assert count("one") == 3


def test_a_failed_test_is_named_with_its_message(machine, capsys):
    add, source = machine
    tests = source.parent / "test_planted.py"
    tests.write_text(textwrap.dedent(TESTS))
    junit = gpu.OUT / "one" / "share.xml"
    command = [sys.executable, "-m", "pytest", "-q", tests, f"--junitxml={junit}"]
    add("one", Job("share", [*command, "-p", "no:cacheprovider"]))
    add("two", shell("crash", "echo on the way; exit 3"))
    assert gpu.main(["one", "two"]) == 1
    found = record("one")
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["skipped"] == {"needs two GPUs": 1}
    (failure,) = found["failures"]
    assert failure["name"].endswith("test_wrong") and "planted" in failure["message"]
    assert len(found["slowest"]) == 3
    (failure,) = record("two")["failures"]
    assert failure == {"name": "crash", "message": "exit code 3\non the way"}
    said = capsys.readouterr().out[-2000:]
    assert "planted" in said and "2 failed:" in said and "two: crash" in said
    assert said.endswith("two: FAILED, 0 s\n")
    assert gpu.main(["two"]) == 1  # what failed runs again


def test_a_part_whose_tests_are_all_skipped_has_not_passed(machine):
    add, _ = machine
    case = '<testcase name="a"><skipped message="needs a GPU"/></testcase>'
    add("one", shell("share", f"echo '<testsuite>{case}</testsuite>' > {gpu.OUT}/one/share.xml"))
    add("two", shell("share", f"echo '<testsuite/>' > {gpu.OUT}/two/share.xml; exit 5"))
    assert gpu.main(["one", "two"]) == 1
    for name in ("one", "two"):
        assert record(name)["failures"][0]["message"].startswith("no test ran: 0 passed")


def test_a_part_ends_in_time(machine, monkeypatch):
    add, _ = machine
    monkeypatch.setattr(gpu, "SECONDS", 0.5)
    add("one", shell("slow", "sleep 60"))
    assert gpu.main(["one"]) == 1
    assert record("one")["seconds"] < 30
    assert record("one")["failures"][0]["message"].startswith("stopped after")


def test_no_part_runs_on_a_failed_build(machine, monkeypatch, capsys):
    add, source = machine
    add("one", shell("a", f"touch {source.parent / 'ran'}"))
    broken = [Step("build", False, 1.0, "exit code 1")], [Failure("build", "no such header")]
    monkeypatch.setattr(gpu, "build", lambda out: broken)
    assert gpu.main([]) == 1
    assert not (source.parent / "ran").exists()
    said = capsys.readouterr().out
    assert "no such header" in said and "- missing: one" in said


def test_runs_beside_each_other_build_one_after_the_other(machine):
    add, _ = machine
    add("one", shell("a", "true"))
    run = threading.Thread(target=gpu.main, args=(["one"],))
    with gpu.one_at_a_time():
        run.start()
        run.join(0.3)
        assert run.is_alive() and not (gpu.OUT / "parts").exists()
    run.join(60)
    assert record("one")["passed"]


def waits_for(own, other):
    """A job that ends well once the other runs too."""
    wait = "for i in $(seq 100); do test -e {1} && exit 0; sleep 0.1; done; exit 1"
    return shell("a", f"cd {gpu.OUT.parent}; touch {{0}}; {wait}".format(own, other))


def test_parts_of_a_stage_run_beside_each_other_and_benchmarks_alone(machine, monkeypatch):
    add, source = machine
    monkeypatch.setattr(gpu, "PROCESSES", 2)
    add("one", waits_for("x", "y"), stage=gpu_parts.SANITIZED)
    add("two", waits_for("y", "x"), stage=gpu_parts.SANITIZED)
    alone = f"mkdir {source.parent}/alone && sleep 0.2 && rmdir {source.parent}/alone"
    add("three", shell("a", alone))
    add("four", shell("a", alone))
    assert gpu.main([]) == 0


def test_jobs_that_need_much_memory_take_turns(machine, monkeypatch):
    add, source = machine
    monkeypatch.setattr(gpu, "PROCESSES", 4)
    text = f"mkdir {source.parent}/large && sleep 0.2 && rmdir {source.parent}/large"
    for name in ("one", "two", "three"):
        job = dataclasses.replace(shell("large", text), large=True)
        add(name, job, stage=gpu_parts.SANITIZED)
    assert gpu.main([]) == 0


def test_a_part_that_must_be_asked_for(machine):
    add, source = machine
    add("one", shell("a", "true"))
    add("sweep", shell("a", "true"), asked=True)
    assert gpu.main([]) == 0
    assert not (gpu.OUT / "parts" / "sweep.json").exists()
    assert "sweep" not in (gpu.OUT / "summary.md").read_text()
    assert gpu.main(["sweep"]) == 0
    assert gpu.main(["--summary"]) == 0
    assert "| sweep | passed" in (gpu.OUT / "summary.md").read_text()
    source.write_text("second")
    assert gpu.main(["--summary"]) == 1


def test_all_parts_and_the_summary(machine, capsys):
    add, source = machine
    add("one", shell("a", "true"))
    add("two", shell("b", "true"))
    assert gpu.main([]) == 0
    page = (gpu.OUT / "summary.md").read_text()
    assert page.startswith("# `make gpu`: all parts passed\n")
    capsys.readouterr()
    assert gpu.main(["--list"]) == 0
    assert re.search(r"^two +0 s  passed$", capsys.readouterr().out, re.MULTILINE)
    source.write_text("second")
    assert gpu.main(["--summary"]) == 1
    assert "- older than the code: build, one, two" in capsys.readouterr().out


def test_durations_are_known_from_a_summary_that_is_kept(machine, tmp_path, monkeypatch, capsys):
    add, _ = machine
    add("one", shell("a", "true"))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    for date, seconds in (("2026-01-01", 20.0), ("2026-01-02", 30.0)):
        folder = tmp_path / "docs" / "results" / date
        folder.mkdir(parents=True)
        (folder / "parts.json").write_text(json.dumps({"one": {"seconds": seconds}}))
    assert gpu.main(["--list"]) == 0
    assert re.search(r"^one +30 s$", capsys.readouterr().out, re.MULTILINE)


def test_a_filtered_benchmark_is_none_of_everything(machine):
    add, _ = machine
    add("bench-one", shell("bench", "true"))
    assert gpu.main(["bench-one", "--bench=--filter b4"]) == 0
    assert gpu.main(["--summary"]) == 1
    assert "passed, but only for --filter b4" in (gpu.OUT / "summary.md").read_text()
    assert gpu.main(["bench-one"]) == 0
    assert gpu.main(["--summary"]) == 0


def test_an_incomplete_sweep_fails_and_its_next_run_goes_on(machine):
    add, source = machine
    text = "cd {}/one; ls >> list; if test -e rows; then echo done; else touch rows; echo '{}'; fi"
    said = "INCOMPLETE: 3 cases are left"
    job = shell("sweep", text.format(gpu.OUT, said))
    job = dataclasses.replace(job, problem=gpu_parts.incomplete)
    add("one", job, resumes=True)
    assert gpu.main(["one"]) == 1
    assert said in record("one")["failures"][0]["message"]
    assert gpu.main(["one"]) == 0
    assert "rows" in (gpu.OUT / "one" / "list").read_text()
    assert gpu.main(["one", "--again"]) == 1  # from the start
    add("one", job)
    assert gpu.main(["one"]) == 1


def test_the_sweep_over_models_stops_before_its_part_does():
    part = gpu_parts.all_parts()["bench-squeeze_excite-zoo"]
    assert part.resumes and part.asked
    (job,) = part.jobs(ROOT / "out", "")
    command = " ".join(map(str, job.command))
    assert "bench squeeze_excite --zoo --minutes 7 --device cuda --out out/bench" in command
    assert 60 * gpu_parts.ZOO_MINUTES < gpu.SECONDS
    assert job.problem("rows\nINCOMPLETE: 3 cases are left; go on\n") and not job.problem("rows\n")


def test_whole_models_stop_before_their_part_does():
    part = gpu_parts.all_parts()["bench-optimize"]
    assert part.resumes and part.asked
    (job,) = part.jobs(ROOT / "out", "--no-compile")
    command = " ".join(map(str, job.command[1:]))
    begin = "benchmarks/optimize_models.py --device=cuda --minutes 6 --no-compile --out "
    assert command == begin + str(ROOT / "out" / "bench")
    program = (ROOT / "benchmarks" / "optimize_models.py").read_text()
    (margin,) = re.findall(r"^MARGIN = (\d+)", program, re.MULTILINE)
    assert 60 * gpu_parts.MODEL_MINUTES + int(margin) < gpu.SECONDS
    assert job.problem("INCOMPLETE: 3 runs are left; call it again\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_machine_without_a_gpu_is_refused():
    with pytest.raises(
        SystemExit, match="gpu: fusewise or the GPU cannot be used on this machine: "
    ):
        gpu.describe.__wrapped__()


# --- the summary ----------------------------------------------------------------------------------


def test_records_of_several_machines_are_merged(tmp_path, machine, capsys):
    add, source = machine
    for name in ("one", "two", "three"):
        add(name)
    digest = gpu_parts.digest(gpu_parts.all_parts()["one"])

    def put(folder, name, finished, commit, **more):
        made = {"passed": True, "seconds": 9.0, "digest": digest} | more
        Record(part=name, finished=finished, commit=commit, **made).write(
            tmp_path / folder / f"{name}.json"
        )

    put("a", "build", "2026-01-01 10:00:00", "aaa1111")
    put("a", "one", "2026-01-01 10:00:00", "aaa1111", passed=False)
    put("b", "one", "2026-01-01 11:00:00", "bbb2222", environment={"gpu": "H200"}, text="# Bench")
    put("b/deeper", "two", "2026-01-01 12:00:00", "ccc3333", digest="another")
    (tmp_path / "b" / "results.json").write_text('{"rows": []}')
    assert gpu.main(["--summary", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    page = (gpu.OUT / "summary.md").read_text()
    assert page.startswith("# `make gpu`: incomplete\n")
    assert "- missing: three\n" in page and "- older than the code: two\n" in page
    assert "| one | passed |  | 9 | bbb2222 | 2026-01-01 11:00:00 |" in page
    assert "| two | older than the code |  | 9 | ccc3333 |" in page
    assert "- gpu H200\n" in page and "\n## Bench\n" in page
    assert json.loads((gpu.OUT / "parts.json").read_text())["one"]["commit"] == "bbb2222"
    put("b", "three", "2026-01-01 12:00:00", "d", passed=False, failures=[Failure("t", "because")])
    assert gpu.main(["--summary", str(tmp_path / "b")]) == 1
    page = (gpu.OUT / "summary.md").read_text()
    assert page.startswith("# `make gpu`: FAILED\n") and "- FAILED: three\n" in page
    assert "## three: t\n\n```\nbecause\n```" in page


def test_a_report_of_ctest_is_read(tmp_path):
    (tmp_path / "ctest.xml").write_text(
        """<testsuite>
        <testcase name="A.Good" classname="A.Good" time="0.5" status="run"/>
        <testcase name="A.Bad" classname="A.Bad" time="1.5" status="fail">
          <failure message="Failed"/><system-out>Expected: 1</system-out></testcase>
        <testcase name="A.Not" classname="A.Not" time="0" status="notrun">
          <skipped message="SKIP_RETURN_CODE=77"/></testcase>
        </testsuite>"""
    )
    tests = gpu_records.read_tests(tmp_path / "ctest.xml")
    assert tests.counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert tests.failures == [Failure("A.Bad", "Failed\nExpected: 1")]
    assert tests.seconds["A.Bad"] == 1.5
    (tmp_path / "half.xml").write_text("<testsuite><testcase")
    assert gpu_records.read_tests(tmp_path / "half.xml") is None
    assert gpu_records.read_tests(tmp_path / "none.xml") is None


def test_the_end_of_the_output_has_every_name(capsys):
    failures = [Failure(f"test_{i}", "long\n" * 5000) for i in range(30)]
    gpu_records.print_failures([Record("one", False, 1.0, "", "", "", failures=failures)])
    said = capsys.readouterr().out
    assert len(said) < 12000 and all(f"one: test_{i}\n" in said for i in range(30))
