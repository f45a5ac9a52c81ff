"""Whether a fused module computes the right numbers.

By the accuracy rule of docs/specification.md: outputs, updated buffers, and the gradients for a
seeded random cotangent. The reference is the same module in higher precision.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .._torch_private import tree_leaves
from ..bench import accuracy
from ..bench.accuracy import Check, Expected, Results
from .candidate import Refused
from .kinks import Kinks
from .setting import SHIFT, Setting, shifted, without_tf32
from .trees import doubled

SEED = 20260
_LARGE = 1 << 24  # elements of a half-precision tensor whose reference is in float32
HALVES = (torch.float16, torch.bfloat16)


def random_gradient(output: Tensor) -> Tensor:
    """For an output. Drawn in float32, so that it is the same in every dtype."""
    generator = torch.Generator(output.device).manual_seed(SEED)
    return torch.randn(output.shape, generator=generator, device=output.device)


def check_slot(
    before: nn.Module, after: nn.Module, inputs: tuple, setting: Setting, gradients: bool
) -> Check:
    """Compares a fused module with the one that it replaces, on the same inputs."""
    for value in inputs:
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise Refused(f"gets a tensor of {value.dtype}; expected a floating dtype")
    theirs = _Run(before, inputs, setting, gradients)
    ours = _Run(after, inputs, setting, gradients)
    precision = _reference_dtype(inputs)
    exact = tuple(_to(value, precision) for value in inputs)
    reference = doubled(before, precision)
    with without_tf32():
        with Kinks(setting.dtype or _dtype_of(inputs)) as kinks:
            right = _Run(reference, exact, setting.off(), gradients)
        other = _Run(reference, tuple(map(shifted, exact)), setting.off(), gradients)
    runs = ours, theirs, right, other
    settled = {}
    if said := _differently_shaped(ours.outputs, theirs.outputs):
        return Check("y", float("nan"), float("nan"), said)
    if gradients:
        for name, output in right.outputs.items():
            clear = ~kinks.at(output)
            for run in (theirs, ours):
                clear &= (run.outputs[name] > 0) == (output > 0)
            settled[output.shape] = clear & settled.get(output.shape, clear)
            cotangent = (random_gradient(output) * clear).to(theirs.outputs[name].dtype)
            for run in runs:
                run.cotangents[name] = cotangent.to(run.outputs[name].dtype)
            other.cotangents[name] = shifted(right.cotangents[name])
        for run in (ours, theirs):
            run.backward()
        with without_tf32():
            right.backward()
            other.backward()
    found = [run.results() for run in runs]
    for name, value in found[2].items():
        # Gates pass on a gradient of their own, also where the cotangent is 0.
        if name.startswith("dx") and value.shape in settled:
            for results in found:
                results[name] = results[name] * settled[value.shape]
    return _compared(*found, setting)


def _differently_shaped(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    found, wanted = ({n: list(t.shape) for n, t in each.items()} for each in (ours, theirs))
    return "" if found == wanted else f"shapes {found}, not {wanted}"


class _Run:
    """A forward of a module, and later the backward. The module's buffers stay as they were."""

    def __init__(self, module: nn.Module, inputs: tuple, setting: Setting, gradients: bool):
        self._setting = setting
        self._inputs = [_leaf(value, gradients) for value in inputs]
        with _own_buffers(module) as buffers, torch.set_grad_enabled(gradients), setting.autocast():
            # A module may write to its input, which autograd forbids for a leaf.
            given = [v.clone() if isinstance(v, Tensor) else v for v in self._inputs]
            leaves = [leaf for leaf in tree_leaves(module(*given)) if isinstance(leaf, Tensor)]
        self.outputs = {
            _numbered("y", i, leaves): leaf
            for i, leaf in enumerate(leaves)
            if leaf.is_floating_point()
        }
        self._others = {
            f"buffer {_last(name)}": buffer
            for name, buffer in buffers.items()
            if buffer.is_floating_point()
        }
        self._learned = {
            _numbered("dx", i, self._inputs): value
            for i, value in enumerate(self._inputs)
            if isinstance(value, Tensor) and value.requires_grad
        } | {
            f"d{_last(name)}": value
            for name, value in module.named_parameters()
            if value.requires_grad
        }
        self.cotangents: dict[str, Tensor] = {}

    def backward(self) -> None:
        wanted = [name for name in self.cotangents if self.outputs[name].requires_grad]
        found = [None] * len(self._learned)
        if wanted and found:
            with self._setting.off().autocast():
                found = torch.autograd.grad(
                    [self.outputs[name] for name in wanted],
                    list(self._learned.values()),
                    [self.cotangents[name] for name in wanted],
                    allow_unused=True,
                )
        for (name, value), gradient in zip(self._learned.items(), found, strict=True):
            self._others[name] = torch.zeros_like(value) if gradient is None else gradient

    def results(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in (self.outputs | self._others).items()}


@contextmanager
def _own_buffers(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While a module runs, it has copies of its buffers, by name: those that it updates."""
    kept = {
        name: (inner, dict(inner._buffers))
        for name, inner in module.named_modules()
        if not isinstance(inner, torch.jit.ScriptModule)  # its buffers cannot be exchanged
    }
    copies = {id(buffer): buffer.clone() for buffer in module.buffers()}
    found = {}
    try:
        for name, (inner, own) in kept.items():
            mine = {key: copies[id(buffer)] for key, buffer in own.items() if buffer is not None}
            inner._buffers.update(mine)
            found |= {f"{name}.{key}".lstrip("."): buffer for key, buffer in mine.items()}
        yield found
    finally:
        for inner, own in kept.values():
            inner._buffers.update(own)


def nearness(check: Check) -> float:
    return check.error / check.allowed if check.allowed else 0.0


def _compared(ours: dict, theirs: dict, right: dict, shifted: dict, setting: Setting) -> Check:
    """Under autocast torch computes the gradients of parameters in half precision."""
    if ours.keys() != theirs.keys():
        said = f"results {', '.join(ours)}, not {', '.join(theirs)}"
        return Check("y", float("nan"), float("nan"), said)
    expected = {}
    for name, value in right.items():
        dtype = ours[name].dtype
        terms = accuracy.largest(shifted[name] - value) / SHIFT
        scale = accuracy.scale(accuracy.largest(value), terms, 0.0, dtype)
        if dtype == value.dtype:  # the reference has rounding errors of its own
            scale *= 4
        expected[name] = Expected(value, scale)
    checks = []
    for gradients, computed_in in ((False, None), (True, setting.dtype)):
        names = [name for name in ours if name.startswith("d") == gradients]
        if names:
            pair = (
                Results({name: run[name] for name in names}, expected) for run in (ours, theirs)
            )
            checks.append(accuracy.check(*pair, computed_in))
    return next((check for check in checks if not check.passed), max(checks, key=nearness))


def _numbered(name: str, i: int, values: Iterable) -> str:
    return name if len(list(values)) == 1 else f"{name}{i}"


def _last(name: str) -> str:
    """A parameter's name without the layers of a chain, which have other names in ours."""
    parts = name.split(".")
    return ".".join(parts[2:]) if parts[0] == "layers" and len(parts) > 2 else name


def _leaf(value, gradients: bool):
    if not isinstance(value, Tensor):
        return value
    made = value.detach().clone()
    return made.requires_grad_(gradients and made.is_floating_point())


def _to(value, dtype: torch.dtype):
    return value.to(dtype) if isinstance(value, Tensor) else copy.copy(value)


def _dtype_of(inputs: tuple) -> torch.dtype:
    tensors = [v for v in inputs if isinstance(v, Tensor) and v.is_floating_point()]
    return tensors[0].dtype if tensors else torch.float32


def _reference_dtype(inputs: tuple) -> torch.dtype:
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    halves = all(value.dtype in HALVES for value in tensors)
    large = any(value.numel() > _LARGE for value in tensors)
    return torch.float32 if tensors and halves and large else torch.float64
