"""The example of examples/rgbd_scene: what it learns, and what folders and options it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "rgbd_scene"
if not FOLDER.is_dir():
    pytest.skip("there are no examples here", allow_module_level=True)
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("numpy")
sys.path.insert(0, str(FOLDER))

import rgbd_scene  # noqa: E402
from data import Folder, Synthetic, read  # noqa: E402
from evaluation import draw  # noqa: E402
from progress import for_output  # noqa: E402
from scenes import CLASSES, STREAMS  # noqa: E402

SMALL = ["--device", "cpu", "--size", "32", "--width", "0.125"]
TINY = [*SMALL, "--scenes", "64", "--batch", "16", "--epochs", "2"]


def run(*arguments):
    return rgbd_scene.main([str(each) for each in arguments])


def test_the_class_shows_only_when_the_streams_are_integrated(tmp_path):
    results = run(*SMALL, "--scenes", 1024, "--epochs", 5, "--out", tmp_path)
    assert results["integrated"] >= 0.9
    alone = [results[f"{name} alone"] for name in STREAMS]
    without = [results[f"without {name}"] for name in STREAMS]
    assert max(alone) <= 0.6
    assert max(alone) < min(without) <= max(without) <= 0.7  # two views halve the choice
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "accuracy.png"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that learns nothing, but quickly."""
    out = tmp_path_factory.mktemp("finished")
    return run(*TINY, "--out", out), out


def weights(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)["model"]


def test_a_resumed_run_gives_the_same_weights(finished, tmp_path, monkeypatch, few_threads):
    whole = tmp_path / "whole"
    run(*TINY, "--out", whole)
    epoch = rgbd_scene.Training.epoch

    def stopped(training, progress):
        if training.epochs_done:
            raise KeyboardInterrupt
        return epoch(training, progress)

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(rgbd_scene.Training, "epoch", stopped)
        run(*TINY, "--out", tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epochs_done"] == 1
    run(*TINY, "--out", tmp_path, "--resume")
    found = weights(tmp_path)
    for name, t in weights(whole).items():
        assert torch.equal(t, found[name]), name


def test_resuming_a_finished_run_evaluates_it(finished, capsys):
    results, out = finished
    assert run(*TINY, "--out", out, "--resume") == results
    assert "epoch" not in capsys.readouterr().out


def test_half_precision(tmp_path, capsys):
    results = run(*TINY, "--out", tmp_path, "--precision", "bf16")
    assert all(0 <= value <= 1 for value in results.values())
    assert "epoch 2 of 2: loss 1." in capsys.readouterr().out


def test_torchrun(tmp_path):
    """Two processes, which share the scenes."""
    program = [str(FOLDER / "rgbd_scene.py"), *TINY, "--out", str(tmp_path)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *program],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 2 of 2") == 1
    assert done.stdout.count("integrated") == 1
    settings = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["settings"]
    assert settings["processes"] == "2"


# --- folders ------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    """Synthetic scenes as --data takes them: 8 bits of RGB, 16 bits of the others."""
    for seed, part in enumerate(("train", "test")):
        scenes = Synthetic(24, 32, seed)
        for i, label in enumerate(scenes.labels.tolist()):
            for (stream, channels), images in zip(STREAMS.items(), scenes.images, strict=True):
                path = tmp_path / "data" / part / CLASSES[label] / stream / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                if channels == 3:
                    values = (images[i] * 255).round().byte().permute(1, 2, 0).numpy()
                else:
                    values = (images[i, 0] * 65535).round().numpy().astype("uint16")
                Image.fromarray(values).save(path)
    return tmp_path / "data"


def test_folders_of_images(folders, tmp_path):
    found = Folder(folders / "train", 32)
    right = Synthetic(24, 32, 0)
    assert found.classes == CLASSES and len(found) == 24
    order = sorted(range(24), key=lambda i: (right.labels[i].item(), str(i)))
    ours, theirs = found[list(range(24))], right[order]
    assert torch.equal(ours.labels, theirs.labels) and not ours.absent.any()
    for one, other in zip(ours.images, theirs.images, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.5 / 255 + 1e-6)
    # A sample without some of its images is blanked there.
    first = found.samples[0]
    first["depth"].unlink(), first["rgb"].unlink()
    (batch,) = [Folder(folders / "train", 40)[[0]]]
    assert batch.absent.tolist() == [[True], [True], [False]]
    assert not batch.images[0].any() and batch.images[2].shape == (1, 1, 40, 40)
    arguments = [*SMALL, "--data", folders, "--epochs", 1, "--batch", 8, "--out", tmp_path]
    results = run(*arguments, "--workers", 1)
    assert results.keys() == {
        *(f"{name} alone" for name in STREAMS),
        *(f"without {name}" for name in STREAMS),
        "integrated",
    }


def test_a_stream_without_any_image_is_left_out(folders, tmp_path):
    for path in folders.rglob("depth/*.png"):
        path.unlink()
    results = run(*SMALL, "--data", folders, "--epochs", 1, "--batch", 8, "--out", tmp_path)
    assert "depth alone" not in results and results["without depth"] == results["integrated"]


@pytest.mark.parametrize(
    "mode, value, right",
    [("L", 51, 0.2), ("I;16", 13107, 0.2), ("F", 0.2, 0.2), ("RGB", None, 0.2)],
)
def test_images_of_every_kind(tmp_path, mode, value, right):
    path = tmp_path / ("a.tiff" if mode == "F" else "a.png")
    Image.new(mode, (5, 4), (51, 51, 51) if value is None else value).save(path)
    for channels in (1, 3) if mode in ("L", "RGB") else (1,):
        found = read(path, channels, 8)
        torch.testing.assert_close(found, torch.full((channels, 8, 8), right), rtol=0, atol=1e-3)


def refused(said, *arguments):
    """The run ends with one line, and with exit code 1, which is what a text gives."""
    with pytest.raises(SystemExit, match=said) as caught:
        run(*arguments)
    assert caught.value.code.startswith("rgbd_scene: ")
    assert "\n" not in caught.value.code


def test_folders_that_cannot_be_used(folders, tmp_path):
    arguments = [*SMALL, "--out", tmp_path, "--epochs", 1, "--batch", 8, "--data"]
    refused("nowhere/train: there is no such folder: --data takes", *arguments, "nowhere")
    (tmp_path / "one" / "train" / "A").mkdir(parents=True)
    said = "one/train: expected a folder for each of at least 2 classes, found 1"
    refused(said, *arguments, tmp_path / "one")
    (folders / "test" / "A").rename(folders / "test" / "E")
    refused("train has the classes A, B, C, D, test has B, C, D, E", *arguments, folders)
    (folders / "train" / "A" / "rgb").rename(folders / "train" / "A" / "color")
    for stream in ("depth", "orthogonal"):
        for path in (folders / "train" / "A" / stream).iterdir():
            path.unlink()
    refused("train/A: has no images in rgb, depth, orthogonal", *arguments, folders)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read(folders, tmp_path, workers):
    path = next((folders / "train" / "B" / "rgb").iterdir())
    path.write_bytes(b"nonsense")
    arguments = [*SMALL, "--data", folders, "--out", tmp_path, "--workers", workers, "--epochs", 1]
    refused(f"B/rgb/{path.name}: cannot be read as an image: ", *arguments)


# --- options ------------------------------------------------------------------------------------


def test_checkpoints_that_do_not_fit(finished, tmp_path):
    _, out = finished
    refused("checkpoint.pt: cannot be read: No such file", *TINY, "--out", tmp_path, "--resume")
    refused("is of a run with seed 0, got 1: resume with the same options", *TINY, "--out", out,
            "--resume", "--seed", 1)  # fmt: skip
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    refused("is no checkpoint of this program", *TINY, "--out", tmp_path, "--resume")
    torch.save({"a": 1}, tmp_path / "checkpoint.pt")
    refused("is no checkpoint of this program", *TINY, "--out", tmp_path, "--resume")


def test_an_output_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    refused("file: cannot be written to: .*: take another", *TINY, "--out", tmp_path / "file")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--epochs", "0"], "--epochs: expected 1 to 1000000, got 0"),
        (["--size", "31"], "--size: expected 32 to 4096, got 31"),
        (["--width", "nan"], "--width: expected 0.015625 to 8, got nan"),
        (["--width", "0.3"], "--width: expected a multiple of 1/64, got 0.3"),
        (["--blank", "1"], "--blank: expected 0 to 0.9, got 1"),
        (["--batch", "two"], "--batch: invalid int value: 'two'"),
        (["--seed", "-1"], "--seed: expected 0 to"),
        (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
    ],
)
def test_bad_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        rgbd_scene.main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rgbd_scene: ") and said in line


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw({"integrated": 1.0}, Synthetic(4, 32, 0), tmp_path / "accuracy.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rich", [True, False])
def test_progress(monkeypatch, capsys, rich):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with for_output(3, loud=True) as progress:
        progress.advance(2)
        progress.say("epoch 1 of 1")
        progress.advance(1)
    said = capsys.readouterr().out
    assert "epoch 1 of 1" in said and ("3/3" in said) == rich
    with for_output(3, loud=False) as progress:
        progress.say("epoch 1 of 1")
    assert not capsys.readouterr().out
