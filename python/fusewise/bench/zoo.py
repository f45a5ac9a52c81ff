"""The sweep over all Squeeze-and-Excitation blocks of common models: its cases, and means by model.

benchmarks/cases/squeeze_excite_zoo.json has the blocks; tools/squeeze_excite_zoo.py writes it.
"""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace

from .cases import select
from .families.family import Case

FAMILY = "squeeze_excite"
BASELINES = ("eager", "compile")
EVERY_MODEL = "all models"
_SEED = 0


@dataclass(frozen=True)
class _Sizes:
    batches: tuple[int, ...]
    blocks: int | None
    """A random sample of the blocks. None: all of them."""
    others: float
    """The share of the cases that is also measured in each other dtype and layout."""
    compared: int
    """Cases that are also measured against compile, and by wall time."""


# A CPU gets a sample that takes a minute.
_SIZES = {
    "cuda": _Sizes(batches=(1, 32, 256), blocks=None, others=0.1, compared=30),
    "cpu": _Sizes(batches=(1,), blocks=10, others=0.1, compared=1),
}
# Each differs in one respect from the blocks themselves, which have half x in channels_last and
# float32 weights.
_OTHERS = {
    "float16-weights": {"weights": None},
    "bfloat16": {"dtype_name": "bfloat16"},
    "float32": {"dtype_name": "float32", "weights": None},
    "contiguous": {"layout": "contiguous"},
}


def sweep(device: str) -> list[tuple[Case, bool]]:
    """All cases in random order, and whether each is also compared with compile.

    The order and all samples are the same in every run. So the rows of a run that was stopped are a
    random sample, too.
    """
    sizes, rng = _SIZES[device], random.Random(_SEED)
    blocks = select(f"{FAMILY}_zoo", device, "zoo")
    if sizes.blocks:
        blocks = rng.sample(blocks, sizes.blocks)
    own = [_of_batch(block, batch) for block in blocks for batch in sizes.batches]
    share = math.ceil(sizes.others * len(own))
    others = [_changed(case, name) for name in _OTHERS for case in rng.sample(own, share)]
    compared = {case.name for case in rng.sample(own, sizes.compared)}
    cases = [*own, *others]
    rng.shuffle(cases)
    return [(case, case.name in compared) for case in cases]


def _of_batch(block: Case, batch: int) -> Case:
    return replace(block, name=f"{block.name}-n{batch}", shape=(batch, *block.shape[1:]))


def _changed(case: Case, name: str) -> Case:
    """The case in another dtype or layout. It does not count for the means by model."""
    changes = {"weights": case.extra["weights"], **_OTHERS[name]}
    weights = changes.pop("weights")
    extra = {key: value for key, value in case.extra.items() if key != "weights"}
    if weights:
        extra["weights"] = weights
    return replace(case, name=f"{case.name}@{name}", extra=extra, models={}, **changes)


def means(rows: list[dict]) -> list[dict]:
    """For each model, mode, batch, rival and clock: the geometric mean of how many times faster
    ours is. Each block counts as often as the model has it.
    """
    found = defaultdict(list)
    for row in rows:
        counts = row.get("models", {})
        counts = counts and {EVERY_MODEL: sum(counts.values()), **counts}
        for rival, clocks in row.get("against", {}).items():
            for clock, ratio in clocks.items():
                for model, count in counts.items():
                    key = (model, row["mode"], row["shape"][0], rival, clock)
                    found[key].append((count, ratio))
    names = ("model", "mode", "batch", "against", "clock")
    return [
        dict(zip(names, key, strict=True))
        | {
            "mean": _weighted_mean(ratios),
            "blocks": len(ratios),
            "slower": sum(ratio["verdict"] == "slower" for _, ratio in ratios),
        }
        for key, ratios in sorted(found.items())
    ]


def _weighted_mean(ratios: list[tuple[int, dict]]) -> float:
    logarithms = sum(count * math.log(ratio["ratio"]) for count, ratio in ratios)
    return math.exp(logarithms / sum(count for count, _ in ratios))
