"""Finds machines that sound wrong, having heard only such that sound right.

    python machine_sound.py               # a machine made of numbers, and three faults
    python machine_sound.py --data DIR    # DIR/train/normal, DIR/test/{normal,anomaly}/*.wav
    python machine_sound.py --live LONG.wav --weights model.safetensors

The first two train a SpectralShapeAutoencoder on the normal sounds, score every test file by the
mean score of its rows, print the ROC AUC (0.5 is guessing, 1 is right every time), draw both
distributions to scores.png and write the weights to model.safetensors. The third reads a long
recording window by window and prints a score for each, the shorter last one included.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

try:
    from safetensors import SafetensorError, safe_open
except ImportError:
    safe_open = None

sys.path.insert(0, str(Path(__file__).parent))

import machine
from sound import SoundError, Wav, mel_filters, read_wav, rows, samples_of

from fusewise.models import SpectralShapeAutoencoder

BANDS, FRAMES = 64, 5
LAYOUT = ("train/normal", "test/normal", "test/anomaly")


def main(arguments: list[str] | None = None) -> float | None:
    """Returns the AUC, where there is one."""
    options = parse(arguments)
    try:
        if safe_open is None:
            raise SoundError("weights need the package safetensors: pip install safetensors")
        return live(options) if options.live else train_and_test(options)
    except SoundError as error:
        show("")
        sys.exit(f"machine_sound: {error}")
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"machine_sound: {message}\n")


def parse(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help=f"folder with {', '.join(LAYOUT)}; default: synthesised sound"
    )
    parser.add_argument("--live", type=Path, help="score this WAV file window by window")
    parser.add_argument(
        "--weights", type=Path, help="model.safetensors of an earlier run, for --live"
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the results")
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument(
        "--files", type=positive, default=60, help="number of synthesised training files"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of synthesised files")
    parser.add_argument(
        "--window", type=float, default=1.0, help="length of a --live window in seconds"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.live and not options.weights:
        parser.error("--live needs --weights, which a run without --live writes")
    if options.live and options.data:
        parser.error("--data is for training and testing: --live scores one file with --weights")
    if not 0.5 <= options.seconds <= 3600:
        parser.error(f"--seconds takes 0.5 to 3600, got {options.seconds}")
    if not 0.2 <= options.window <= 3600:
        parser.error(f"--window takes 0.2 to 3600 seconds, got {options.window}")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed takes 0 to 2**63 - 1, got {options.seed}")
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


# --- data --------------------------------------------------------------------------------------


def files_of(folder: Path):
    """Yields (set, label, samples, rate, path) of the WAV files in the folders of LAYOUT."""
    found = {}
    for each in LAYOUT:
        try:
            paths = sorted(p for p in (folder / each).iterdir() if p.suffix.lower() == ".wav")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SoundError(
                f"{folder / each}: there is no such folder: "
                f"--data takes a folder that holds {', '.join(LAYOUT)} with WAV files in each"
            ) from error
        except OSError as error:
            raise SoundError(f"{folder / each}: cannot be read: {error.strerror}") from error
        if not paths:
            raise SoundError(f"{folder / each}: has no .wav file: put some there")
        found[each] = paths
    rate = None
    for each, paths in found.items():
        for path in paths:
            samples, rate = read_wav(path, rate)
            yield *each.split("/"), samples, rate, path


def synthesised(options):
    test = max(9, options.files // 2)
    for part, label, samples in machine.dataset(options.files, test, options.seconds, options.seed):
        yield part, label, samples, machine.RATE, "synthesised"


def load(options) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]], int]:
    """Rows of every training file, label and rows of every test file, the rate."""
    source = files_of(options.data) if options.data else synthesised(options)
    train, test, filters, rate = [], [], None, 0
    for part, label, samples, rate, name in source:
        if filters is None:
            filters = mel_filters(rate, BANDS)
        found = rows(samples, filters, FRAMES, name)
        if part == "train":
            train.append(found)
        else:
            test.append((label, found))
        show(f"reading: {len(train)} files to train with, {len(test)} to test")
    done()
    return train, test, rate


# --- training and scoring -----------------------------------------------------------------------


def train(model, data: torch.Tensor, epochs: int, seed: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=epochs * -(-len(data) // 256)
    )
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(data), generator=generator).split(256):
            optimizer.zero_grad()
            loss = model.anomaly_score(data[batch]).mean()  # one operator each way
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        show(f"training: epoch {epoch + 1} of {epochs}, mean score {total / len(data):.4f}")
    done()


def auc(normal: torch.Tensor, anomalous: torch.Tensor) -> float:
    """The chance that a random anomalous sound scores higher than a random normal one."""
    higher = (anomalous[:, None] > normal).double() + 0.5 * (anomalous[:, None] == normal)
    return higher.mean().item()


def train_and_test(options) -> float:
    start = time.perf_counter()
    torch.manual_seed(options.seed)
    make_folder(options.out)
    train_rows, test_rows, rate = load(options)
    data = torch.cat(train_rows)
    if (data.amax(0) - data.amin(0)).max() < 1e-4:  # log10 of energies
        raise SoundError(
            f"{options.data / LAYOUT[0]}: the training files are silent or all alike: "
            "put recordings of a running machine there"
        )
    mean, deviation = data.mean(), data.std()

    model = SpectralShapeAutoencoder(BANDS, FRAMES)
    train(model, (data - mean) / deviation, options.epochs, options.seed)
    model.eval()
    with torch.inference_mode():
        scores = [
            (label, model.anomaly_score((found - mean) / deviation).mean().item())
            for label, found in test_rows
        ]
    normal = torch.tensor([score for label, score in scores if label == "normal"])
    anomalous = torch.tensor([score for label, score in scores if label != "normal"])
    for label in dict.fromkeys(label for label, _ in scores if label != "normal"):
        some = torch.tensor([score for each, score in scores if each == label])
        print(f"AUC {label:10} {auc(normal, some):.3f}  ({len(some)} files)")
    area = auc(normal, anomalous)
    print(f"AUC {'all':10} {area:.3f}  ({len(anomalous)} files against {len(normal)} normal ones)")

    try:
        save(model, mean, deviation, rate, options.out / "model.safetensors")
        drawn = draw(scores, options.out / "scores.png")
    except (OSError, SafetensorError) as error:
        raise SoundError(
            f"{options.out}: cannot be written to: {error}: take another folder for --out"
        ) from error
    written = "model.safetensors and scores.png are" if drawn else "model.safetensors is"
    print(f"{time.perf_counter() - start:.0f} s; {written} written to {options.out.resolve()}")
    if not drawn:
        print("for a plot of the scores: pip install matplotlib")
    return area


def make_folder(folder: Path) -> None:
    """Before the work, so that nothing is lost where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SoundError(
            f"{folder}: cannot be written to: {error.strerror}: take another folder for --out"
        ) from error


def draw(scores: list[tuple[str, float]], path: Path) -> bool:
    """Whether there is a matplotlib to draw with."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False

    labels = list(dict.fromkeys(label for label, _ in scores))
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    values = [torch.tensor([s for each, s in scores if each == label]).log10() for label in labels]
    low, high = min(v.min() for v in values), max(v.max() for v in values)
    bins = torch.linspace(low.item(), high.item() + 1e-6, 30).tolist()
    for label, some in zip(labels, values, strict=True):
        axes.hist(some.tolist(), bins, alpha=0.6, label=label)
    axes.set(xlabel="log10 of a file's mean score", ylabel="files")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


# --- weights and streams ------------------------------------------------------------------------


def save(model, mean: torch.Tensor, deviation: torch.Tensor, rate: int, path: Path) -> None:
    """What the rows were brought to, and at which rate, travels beside the weights."""
    scale = {"mean": str(mean.item()), "deviation": str(deviation.item()), "rate": str(rate)}
    model.save_safetensors(path, scale)


def load_model(path: Path) -> tuple[SpectralShapeAutoencoder, float, float, int]:
    wanted = "take the model.safetensors that a run without --live wrote"
    try:
        path.open("rb").close()
    except OSError as error:
        raise SoundError(f"{path}: cannot be read: {error.strerror}: {wanted}") from error
    model = SpectralShapeAutoencoder(BANDS, FRAMES)
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            scale = file.metadata() or {}
        model.load_state_dict(weights)
    except (OSError, SafetensorError) as error:
        raise SoundError(f"{path}: cannot be read as weights: {error}: {wanted}") from error
    except RuntimeError as error:  # many lines: each name and shape that differs
        raise SoundError(f"{path}: holds the weights of another model: {wanted}") from error
    try:
        mean, deviation, rate = float(scale["mean"]), float(scale["deviation"]), int(scale["rate"])
    except (KeyError, ValueError) as error:
        raise SoundError(
            f"{path}: does not say the mean, deviation and rate of its training files: {wanted}"
        ) from error
    numbers = [torch.tensor([mean, deviation]), *model.state_dict().values()]
    if not all(each.isfinite().all() for each in numbers) or deviation <= 0 or rate < 1:
        raise SoundError(f"{path}: holds numbers that cannot be used, such as NaN: train again")
    return model.eval(), mean, deviation, rate


@torch.inference_mode()
def live(options) -> None:
    model, mean, deviation, rate = load_model(options.weights)
    wav = Wav(options.live, rate, "the weights")
    filters = mel_filters(rate, BANDS)
    step = int(options.window * rate)
    if step < samples_of(FRAMES):
        least = math.ceil(100 * samples_of(FRAMES) / rate) / 100
        raise SoundError(f"{options.live}: at {rate} Hz --window takes at least {least} s")
    if len(wav) < step:
        raise SoundError(
            f"{options.live}: is shorter than a window of {options.window} s: "
            "take a longer recording or a shorter --window"
        )
    for begin in range(0, len(wav), step):
        samples = wav.read(begin, begin + step)
        if len(samples) < samples_of(FRAMES):
            print(f"{begin / rate:8.1f} s  the rest, {len(samples) / rate:.2f} s, is too short")
            break
        window = rows(samples, filters, FRAMES, options.live)
        score = model.anomaly_score((window - mean) / deviation).mean().item()
        print(f"{begin / rate:8.1f} s  {score:10.4f}  {'#' * int(min(60, 20 * score))}", flush=True)


# --- progress -----------------------------------------------------------------------------------


def show(text: str) -> None:
    """One line that is written over on a terminal; elsewhere silence until `done`."""
    show.last = text
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def done() -> None:
    print("" if sys.stdout.isatty() else show.last, flush=True)


if __name__ == "__main__":
    main()
