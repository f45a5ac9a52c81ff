"""Writes benchmarks/cases/squeeze_excite_zoo.json: all Squeeze-and-Excitation blocks of the models.

    python3 tools/squeeze_excite_zoo.py

Needs torchvision and timm. The models run on the meta device, each at the resolution of its default
weights. Nothing is downloaded and nothing is computed.
"""

import json
import random
import re
from collections import Counter
from pathlib import Path

import timm
import torch
import torchvision
from timm.models._efficientnet_blocks import SqueezeExcite

from fusewise.nn import SqueezeExcitation

FILE = Path(__file__).resolve().parent.parent / "benchmarks/cases/squeeze_excite_zoo.json"
TORCHVISION = (
    *(f"efficientnet_b{i}" for i in range(8)),
    *(f"efficientnet_v2_{size}" for size in "sml"),
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    *(f"regnet_y_{size}" for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")),
)
TIMM = ("seresnet50", "seresnext50_32x4d", "mobilenetv3_large_100")
KINDS = (torchvision.ops.SqueezeExcitation, timm.layers.SEModule, SqueezeExcite)
# Kept out of any fit of the choice between kernels.
HELD_OUT = 1 / 3
SEED = 0


def model(name: str) -> tuple[torch.nn.Module, int]:
    """The model on the meta device, and the height and width of its images."""
    if name in TIMM:
        made = timm.create_model(name)
        side = made.pretrained_cfg["input_size"][-1]
    else:
        made = torchvision.models.get_model(name)
        weights = torchvision.models.get_model_weights(name).DEFAULT
        (side,) = weights.transforms().crop_size
    return made.eval().to("meta"), side


def blocks(made: torch.nn.Module, side: int) -> Counter[tuple]:
    """How often the model has each block, described by the fields of its case."""
    found = Counter()

    def count(block: SqueezeExcitation, x: torch.Tensor) -> None:
        if block.fc1.bias is None or block.fc2.bias is None:
            raise SystemExit(f"{block}: has no biases; every case of the benchmark has")
        reduced = block.fc1.out_channels
        found[(tuple(x.shape), reduced, block.activation, block.gate)] += 1

    for module in [module for module in made.modules() if isinstance(module, KINDS)]:
        block = SqueezeExcitation.from_module(module)  # before the hook, which it would refuse
        module.register_forward_pre_hook(lambda _, inputs, block=block: count(block, *inputs))
    with torch.no_grad():
        made(torch.empty(1, 3, side, side, device="meta"))
    return found


def cases(names: tuple[str, ...] = TORCHVISION + TIMM) -> dict:
    """The cases file for these models."""
    groups, models = {}, {}
    for name in names:
        made, side = model(name)
        found = blocks(made, side)
        library = "timm" if name in TIMM else "torchvision"
        groups[name] = f"{library}, {side} px: {found.total()} blocks with biases"
        for block, count in found.items():
            models.setdefault(block, {})[name] = count
    ordered = sorted(models)
    apart = held_out(ordered)
    return {
        "family": "squeeze_excite",
        "groups": groups,
        "cases": [case(block, models[block], block in apart) for block in ordered],
    }


def held_out(ordered: list[tuple]) -> set[tuple]:
    return set(random.Random(SEED).sample(ordered, round(HELD_OUT * len(ordered))))


def case(block: tuple, models: dict[str, int], held_out: bool) -> dict:
    """As under autocast: half x with float32 weights. The sweep chooses the batch."""
    shape, reduced, activation, gate = block
    _, channels, height, _ = shape  # all images are square
    return {
        "name": f"{channels}x{height}-r{reduced}",
        "shape": shape,
        "reduced": reduced,
        "activation": activation,
        "gate": gate,
        "dtype": "float16",
        "weights": "float32",
        "layout": "channels_last",
        "held_out": held_out,
        "models": models,
    }


def text(made: dict) -> str:
    """The file's text, with one line for each case and group."""
    lines = [json.dumps(case) for case in made["cases"]]
    outer = json.dumps(made | {"cases": []}, indent=2)
    return re.sub(r"\[\]", lambda _: "[\n    " + ",\n    ".join(lines) + "\n  ]", outer) + "\n"


if __name__ == "__main__":
    made = cases()
    FILE.write_text(text(made))
    print(f"{len(made['cases'])} blocks of {len(made['groups'])} models in {FILE.name}")
