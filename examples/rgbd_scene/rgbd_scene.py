"""Trains a LINet on aligned RGB, depth and orthogonal images of scenes.

    python rgbd_scene.py                                # synthetic scenes, a small model
    python rgbd_scene.py --data DIR --size 224 --width 1 --epochs 60
    torchrun --nproc-per-node 4 rgbd_scene.py ...       # a process per GPU
    python rgbd_scene.py ... --resume                   # goes on with checkpoint.pt

DIR has the images as {train,test}/CLASS/{rgb,depth,orthogonal}/NAME.png.
After the training it prints the accuracy on the test images, of a linear classifier on each stream
alone, of the model with one stream blanked, and of the model; accuracy.png shows them.
"""

import argparse
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from data import Batch, SceneError, batches, load
from evaluation import Evaluation, draw
from progress import for_output
from scenes import STREAMS

import fusewise

SAME = ("data", "scenes", "size", "width", "batch", "epochs", "lr", "blank", "seed")
"""The options that a resumed run must have in common with the one before."""


def main(arguments: list[str] | None = None) -> dict[str, float] | None:
    """Returns the accuracies; None in all processes but the first."""
    options = parse(arguments)
    processes = Processes(options.device)
    try:
        return run(options, processes)
    except SceneError as error:
        # From a process that reads images, it comes after that process's traceback.
        said = str(error).strip().splitlines()[-1].removeprefix("data.SceneError: ")
        sys.exit(f"rgbd_scene: {said}")
    finally:
        processes.end()


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"rgbd_scene: {message}\n")


def parse(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of images; default: synthetic scenes")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the results")
    parser.add_argument("--resume", action="store_true", help="go on with checkpoint.pt in --out")
    parser.add_argument("--epochs", type=number(int, 1, 10**6), default=5)
    parser.add_argument(
        "--batch", type=number(int, 2, 10**6), default=32, help="samples per process"
    )
    parser.add_argument("--size", type=number(int, 32, 4096), default=32, help="sides of an image")
    parser.add_argument(
        "--width", type=number(float, 1 / 64, 8), default=0.125, help="of the model"
    )
    parser.add_argument("--lr", type=number(float, 1e-9, 10), default=4e-3)
    parser.add_argument(
        "--blank",
        type=number(float, 0, 0.9),
        default=0.1,
        help="share of the images that are blanked in training, so that one may be absent later",
    )
    parser.add_argument(
        "--scenes", type=number(int, 64, 10**7), default=2048, help="synthetic ones to train with"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="bf16 and fp16 by autocast; default: bf16 on a GPU, else fp32",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--workers", type=number(int, 0, 1024), default=0, help="that read images")
    parser.add_argument("--seed", type=number(int, 0, 2**32), default=0)
    options = parser.parse_args(arguments)
    if options.width * 64 % 1:
        parser.error(f"--width: expected a multiple of 1/64, got {options.width}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    return options


def number(kind, least, most):
    def read(text: str):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {text}")
        return value

    read.__name__ = kind.__name__
    return read


class Processes:
    """Those that torchrun starts; without it, one."""

    def __init__(self, device: str):
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.count > 1:
            torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")

    def wrap(self, model):
        if self.count == 1:
            return model
        # Streams that are absent or unused have zero gradients, so DDP needs no special setting.
        devices = [self.device] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def wait(self) -> None:
        if self.count > 1:
            torch.distributed.barrier()

    def end(self) -> None:
        if self.count > 1:
            torch.distributed.destroy_process_group()


def run(options, processes: Processes) -> dict[str, float] | None:
    begin = time.perf_counter()
    make_folder(options.out)
    torch.manual_seed(options.seed)
    train, test = load(options)
    training = Training(options, processes, train)
    if options.resume:
        training.resume()
    evaluation = Evaluation(training.model, training.prepare, options.batch, options.workers)
    progress = for_output(len(training.order(0)) * options.epochs, processes.rank == 0)
    with progress:
        progress.advance(len(training.order(0)) * training.epochs_done)
        while training.epochs_done < options.epochs:
            loss = training.epoch(progress)
            if processes.rank == 0:
                training.save()
                accuracy = evaluation.accuracy(test)
                said = f"epoch {training.epochs_done} of {options.epochs}"
                progress.say(f"{said}: loss {loss:.3f}, accuracy {accuracy:.3f}")
            processes.wait()
    if processes.rank:
        return None

    results = evaluation.everything(train, test)
    for name, value in results.items():
        print(f"{name:20} {value:.3f}")
    written = ["checkpoint.pt"]
    if draw(results, test, options.out / "accuracy.png"):
        written.append("accuracy.png")
    else:
        print("for a plot: pip install matplotlib")
    seconds = time.perf_counter() - begin
    print(f"{seconds:.0f} s; written to {options.out.resolve()}: {', '.join(written)}")
    return results


class Training:
    """The model, and everything that a checkpoint holds."""

    def __init__(self, options, processes: Processes, data):
        self.options, self.processes, self.data = options, processes, data
        self.epochs_done = 0
        model = fusewise.models.li_resnet18(
            tuple(STREAMS.values()), num_classes=len(data.classes), width=options.width
        )
        self.model = model.to(processes.device, memory_format=torch.channels_last)
        self.parallel = processes.wrap(self.model)
        self.scale = self._measure()
        steps = len(self.order(0))
        if not steps:
            raise SceneError(
                f"{len(data)} training samples are too few for {processes.count} processes: "
                "expected at least 2 for each"
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), options.lr, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, options.lr, total_steps=steps * options.epochs
        )
        self.scaler = torch.amp.GradScaler(options.device, enabled=options.precision == "fp16")

    def _measure(self) -> list[tuple[float, float]]:
        """Mean and deviation of each stream, of some training samples."""
        indices = torch.linspace(0, len(self.data) - 1, min(256, len(self.data))).long().tolist()
        images, absent, _ = self.data[indices]
        found = []
        for image, gone in zip(images, absent, strict=True):
            there = image[~gone]
            mean, deviation = (there.mean(), there.std()) if len(there) else (0.0, 1.0)
            found.append((float(mean), max(float(deviation), 1e-3)))
        return found

    def order(self, epoch: int):
        """The batches of this process in an epoch. Every process has as many."""
        generator = torch.Generator().manual_seed(self.options.seed + epoch)
        order = torch.randperm(len(self.data), generator=generator)
        share = len(order) // self.processes.count
        order = order[self.processes.rank :: self.processes.count][:share]
        # BatchNorm in training needs two samples, where an image has shrunk to one pixel.
        return batches(self.data, self.options.batch, self.options.workers, order, least=2)

    def prepare(self, batch: Batch) -> Batch:
        device = self.processes.device

        def scaled(image, mean, deviation):
            image = image.to(device, non_blocking=True, memory_format=torch.channels_last)
            return (image - mean) / deviation

        images = [scaled(x, *scale) for x, scale in zip(batch.images, self.scale, strict=True)]
        return Batch(images, batch.absent.to(device), batch.labels.to(device))

    def epoch(self, progress) -> float:
        """The mean loss of this process."""
        options, device = self.options, self.processes.device
        self.model.train()
        place = self.processes.rank + self.processes.count * self.epochs_done
        chance = torch.Generator().manual_seed(options.seed + 1000003 * place)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
        losses = []
        for batch in self.order(self.epochs_done):
            images, absent, labels = self.prepare(augment(batch, options.blank, chance))
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = F.cross_entropy(self.parallel(*images, blanked=absent), labels)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            losses.append(loss.detach())
            progress.advance(1)
        self.epochs_done += 1
        return torch.stack(losses).mean().item()

    def parts(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }

    def settings(self):
        found = {name: str(getattr(self.options, name)) for name in SAME}
        return found | {"processes": str(self.processes.count), "classes": list(self.data.classes)}

    def save(self) -> None:
        path = self.options.out / "checkpoint.pt"
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state |= {"epochs_done": self.epochs_done, "settings": self.settings()}
        state |= {"scale": self.scale}
        partial = path.with_suffix(".partial")  # a run that is stopped here leaves the last one
        try:
            torch.save(state, partial)
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            raise SceneError(f"{path}: cannot be written: {error}") from error

    def resume(self) -> None:
        path = self.options.out / "checkpoint.pt"
        try:
            state = torch.load(path, map_location=self.processes.device, weights_only=True)
            before = state["settings"]
        except OSError as error:
            raise SceneError(f"{path}: cannot be read: {error.strerror}") from error
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
            raise SceneError(f"{path}: is no checkpoint of this program") from error
        for name, value in self.settings().items():
            if before.get(name) != value:
                raise SceneError(
                    f"{path}: is of a run with {name} {before.get(name)}, got {value}: "
                    "resume with the same options"
                )
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.epochs_done, self.scale = state["epochs_done"], state["scale"]


def augment(batch: Batch, blank: float, generator: torch.Generator) -> Batch:
    """Mirrors half of the samples, and blanks some of the images, but never all of a sample."""
    images, absent, labels = batch
    flip = torch.rand(len(labels), 1, 1, 1, generator=generator) < 0.5
    images = [torch.where(flip, image.flip(3), image) for image in images]
    more = absent | (torch.rand(absent.shape, generator=generator) < blank)
    return Batch(images, torch.where(more.all(0), absent, more), labels)


def make_folder(folder: Path) -> None:
    """Before the work, so that nothing is lost where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SceneError(
            f"{folder}: cannot be written to: {error.strerror}: take another folder for --out"
        ) from error


if __name__ == "__main__":
    main()
