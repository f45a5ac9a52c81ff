"""What the trained model can do with all streams, without one of them, and with one alone."""

from pathlib import Path

import torch
from data import batches
from scenes import STREAMS
from torch import Tensor


class Evaluation:
    """`prepare` brings a batch to the device, and its images to the scale of training."""

    def __init__(self, model, prepare, batch: int, workers: int):
        self.model, self.prepare, self.batch, self.workers = model, prepare, batch, workers

    @torch.inference_mode()
    def accuracy(self, data, without: int | None = None) -> float:
        """The share of samples that the model classifies rightly, maybe with one stream blanked."""
        self.model.eval()
        right = 0
        for batch in batches(data, self.batch, self.workers):
            images, absent, labels = self.prepare(batch)
            if without is not None:
                absent[without] = True
            right += (self.model(*images, blanked=absent).argmax(1) == labels).sum().item()
        return right / len(data)

    @torch.inference_mode()
    def features(self, data, stream: int) -> tuple[Tensor, Tensor]:
        """What the stream alone computes of the samples that it has, and their labels."""
        self.model.eval()
        found, labels = [], []
        for batch in batches(data, self.batch, self.workers):
            images, absent, known = self.prepare(batch)
            found.append(self.model.forward_stream(stream, images[stream])[~absent[stream]])
            labels.append(known[~absent[stream]])
        return torch.cat(found).double(), torch.cat(labels)

    def probe(self, train, test, stream: int) -> float | None:
        """The accuracy of a linear classifier on the features of one stream: ridge regression to
        the labels of the training samples. None if the stream has no images."""
        x, labels = self.features(train, stream)
        y, right = self.features(test, stream)
        if not len(labels) or not len(right):
            return None
        mean, deviation = x.mean(0), x.std(0, correction=0) + 1e-6
        x, y = ((t - mean) / deviation for t in (x, y))
        x, y = (torch.cat([t, torch.ones_like(t[:, :1])], 1) for t in (x, y))
        targets = torch.nn.functional.one_hot(labels, len(train.classes)).double()
        ridge = 1e-2 * len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        weights = torch.linalg.solve(x.T @ x + ridge, x.T @ targets)
        return ((y @ weights).argmax(1) == right).double().mean().item()

    def everything(self, train, test) -> dict[str, float]:
        found = {f"{name} alone": self.probe(train, test, i) for i, name in enumerate(STREAMS)}
        found |= {f"without {name}": self.accuracy(test, i) for i, name in enumerate(STREAMS)}
        found["integrated"] = self.accuracy(test)
        return {name: value for name, value in found.items() if value is not None}


def draw(results: dict[str, float], test, path: Path) -> bool:
    """Some scenes, and the accuracies beside them. Whether there is a matplotlib to draw with."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False

    figure = plt.figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15))
    counts = test.labels.bincount(minlength=len(test.classes))
    shown = counts.nonzero().flatten()[:4].tolist()
    samples = test[[(test.labels == label).int().argmax().item() for label in shown]]
    grid = left.subplots(len(STREAMS), len(shown), squeeze=False)
    for row, (name, images) in enumerate(zip(STREAMS, samples.images, strict=True)):
        for column, label in enumerate(shown):
            axes = grid[row][column]
            axes.imshow(images[column].permute(1, 2, 0).squeeze(2).numpy(), cmap="gray")
            axes.set(xticks=[], yticks=[])
            if not row:
                axes.set_title(test.classes[label], fontsize=10)
            if not column:
                axes.set_ylabel(name)

    axes = right.subplots()
    kinds = {"alone": "tab:gray", "without": "tab:orange", "integrated": "tab:blue"}
    colours = [next(c for kind, c in kinds.items() if kind in name) for name in results]
    percent = [100 * value for value in results.values()]
    bars = axes.barh(list(results), percent, color=colours)
    over_the_line = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(bars, [f"{value:.0f} %" for value in percent], padding=4, bbox=over_the_line)
    chance = 100 * (counts.max() / counts.sum()).item()
    axes.axvline(chance, color="black", linestyle="--", linewidth=1)
    axes.text(chance + 1, -0.65, "always the same class", va="center", fontsize=8)
    axes.set(xlim=(0, 114), xlabel="accuracy, %", ylim=(len(results) - 0.4, -0.95))
    axes.set_xticks(range(0, 101, 20))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
