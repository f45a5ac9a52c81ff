"""The model to profile, its inputs, and one step of it."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .._torch_private import tree_leaves
from .._usage import UsageError
from ..bench.families.family import DTYPES

_DEFAULT_INPUT = "1,3,224,224"
# The dtype for autocast. CPUs are not fast in fp16.
AMP_DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}


@dataclass(frozen=True)
class Subject:
    """A model on its device, and its step."""

    model: nn.Module
    step: Callable[[], None]
    """Forward and, in training, backward. The gradients are None before each step."""
    dtype: torch.dtype
    """The dtype of the GEMMs."""


def make_model(
    spec: str, inputs: tuple[str, ...], device: str, train: bool, channels_last: bool
) -> tuple[nn.Module, list[Tensor]]:
    """The model of MODULE:FACTORY in its mode on the device, and inputs of these sizes."""
    model = load(spec)
    values = [make_input(text, device, channels_last) for text in inputs or (_DEFAULT_INPUT,)]
    model = model.to(device).train(train)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model, values


def make_subject(spec: str, inputs: tuple[str, ...], device: str, train, amp, channels_last):
    model, values = make_model(spec, inputs, device, train, channels_last)
    subject = Subject(
        model,
        _step(model, values, device, train, amp),
        AMP_DTYPES[device] if amp else _dtype(model),
    )
    try:
        subject.step()
    except Exception as error:
        given = " ".join(f"--input {text}" for text in inputs or (_DEFAULT_INPUT,))
        raise UsageError(f"{spec} does not run with {given}: {first_line(error)}") from error
    return subject


def load(spec: str) -> nn.Module:
    """The model of MODULE:FACTORY; for torchvision and timm, FACTORY is the name of a model."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise UsageError(f"{spec}: expected MODULE:FACTORY, as in torchvision:resnet50")
    try:
        factory = _factory(module, name)
    except ImportError as error:
        hint = f"; pip install {module}" if module in ("torchvision", "timm") else ""
        raise UsageError(f"{spec}: {module} cannot be imported: {error}{hint}") from error
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{spec}: importing {module} failed: {first_line(error)}") from error
    try:
        model = factory if isinstance(factory, nn.Module) else factory()
    except Exception as error:
        raise UsageError(f"{spec}: the factory failed: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{spec}: expected a factory of a torch.nn.Module, got {type(model).__name__}"
        )
    return model


def _factory(module: str, name: str):
    if module == "torchvision":
        from torchvision.models import get_model

        return lambda: get_model(name)
    if module == "timm":
        from timm import create_model

        return lambda: create_model(name)
    if str(Path.cwd()) not in sys.path:  # as with `python -m`
        sys.path.insert(0, str(Path.cwd()))
    imported = importlib.import_module(module)
    if not hasattr(imported, name):
        raise UsageError(f"{module}:{name}: {module} has no {name}")
    return getattr(imported, name)


def make_input(text: str, device: str, channels_last: bool) -> Tensor:
    """Random values of the sizes in `text`; zeros for an integer dtype."""
    sizes, _, name = text.partition(":")
    try:
        shape = [int(size) for size in sizes.split(",")]
        dtype = getattr(torch, name) if name else torch.float32
        value = torch.zeros(shape, dtype=dtype, device=device)
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"--input {text}: expected sizes, and a dtype where it is not float32, "
            "as in 1,3,224,224 or 8,128:int64"
        ) from error
    if value.is_floating_point():
        value.normal_()
    if channels_last and value.dim() == 4:
        value = value.contiguous(memory_format=torch.channels_last)
    return value


def _step(model: nn.Module, values: list[Tensor], device: str, train: bool, amp: bool):
    starts: list[Tensor] = []  # the outputs' gradients, from which backward starts; made once

    def forward():
        with torch.autocast(device, AMP_DTYPES[device], enabled=amp):
            output = model(*values)
        return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]

    def step():
        if not train:
            with torch.no_grad():
                forward()
            return
        outputs = forward()
        if not outputs:
            raise ValueError("no output needs a gradient")
        if not starts:
            starts.extend(torch.ones_like(output) for output in outputs)
        torch.autograd.backward(outputs, starts)
        for parameter in model.parameters():
            parameter.grad = None

    return step


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype that the model mostly computes in, of those whose rate can be measured."""
    found = (p.dtype for p in model.parameters() if str(p.dtype).removeprefix("torch.") in DTYPES)
    return next(found, torch.float32)


def first_line(error: BaseException) -> str:
    """The error's message in one line."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"[:300]
