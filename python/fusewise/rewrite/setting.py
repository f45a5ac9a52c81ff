"""How the model is run: its inputs, mode and autocast."""

import contextlib
import random
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .._torch_private import tree_leaves, tree_map
from ..profile.model import AMP_DTYPES

SHIFT = 2.0**-23


@dataclass(frozen=True)
class Setting:
    args: tuple
    kwargs: dict
    device: str
    """"cpu" or "cuda"."""
    training: bool
    dtype: torch.dtype | None
    """Autocast's; None: off."""
    computed_in: torch.dtype
    """The dtype of the model's GEMMs."""

    @classmethod
    def make(cls, model: nn.Module, example_inputs, training: bool | None, amp) -> "Setting":
        args, kwargs = _arguments(example_inputs)
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        devices |= {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise ValueError(
                f"model: expected all parameters, buffers and inputs on one device, got {names}"
            )
        device = devices.pop().type if devices else "cpu"
        if device not in AMP_DTYPES:
            raise ValueError(f"model: expected a model on cpu or cuda, got {device}")
        if training is None:
            training = model.training
        dtype = _autocast_dtype(amp, device)
        floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
        own = max(floating, key=lambda each: torch.finfo(each).eps, default=torch.float32)
        return cls(args, kwargs, device, training, dtype, dtype or own)

    def off(self) -> "Setting":
        """The same without autocast, for references."""
        return replace(self, dtype=None)

    def in_precision(self, dtype: torch.dtype) -> "Setting":
        """With floating inputs of this dtype, without autocast, for a reference."""

        def convert(value):
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        args, kwargs = tree_map(convert, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs, dtype=None, computed_in=dtype)

    def rounded_inputs(self, seed: int) -> "Setting":
        """Each floating input value is changed by one rounding error of the computation."""
        eps = torch.finfo(self.computed_in).eps

        def round_again(value):
            if not (isinstance(value, Tensor) and value.is_floating_point()):
                return value
            generator = torch.Generator(value.device).manual_seed(seed)
            signs = torch.empty_like(value).bernoulli_(0.5, generator=generator) * 2 - 1
            return value * (1 + eps * signs)

        args, kwargs = tree_map(round_again, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def shifted_inputs(self) -> "Setting":
        args, kwargs = tree_map(shifted, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def copied(self) -> "Setting":
        """With new inputs, for a model that writes to them."""
        args, kwargs = tree_map(_ordinary, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def here(self) -> "Setting":
        """With autocast as it is at this moment; a model may switch it inside."""
        on = torch.is_autocast_enabled(self.device)
        return replace(self, dtype=torch.get_autocast_dtype(self.device) if on else None)

    def shapes(self) -> list[list[int]]:
        """Of the input tensors."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [list(value.shape) for value in leaves if isinstance(value, Tensor)]

    def not_finite(self) -> str:
        """The first floating input that has NaN or infinity, as in "input 0"; '' if none has."""
        for name, value in (*enumerate(self.args), *self.kwargs.items()):
            for leaf in tree_leaves(value):
                floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
                if floating and not leaf.isfinite().all():
                    return f"input {name}"
        return ""

    @contextlib.contextmanager
    def autocast(self):
        """As around one step of a training loop: casts of weights are kept no longer than that."""
        try:
            with torch.autocast(self.device, self.dtype, enabled=self.dtype is not None):
                yield
        finally:
            torch.clear_autocast_cache()

    def run(self, model: nn.Module):
        with self.autocast():
            return model(*self.args, **self.kwargs)

    def outputs(self, model: nn.Module, gradients: bool) -> list[Tensor]:
        """The model's floating outputs; with `gradients` those that have one."""
        with torch.set_grad_enabled(gradients):
            leaves = tree_leaves(self.run(model))
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
        return [t for t in tensors if t.requires_grad] if gradients else tensors


def shifted(value):
    """Changes a tensor by a small share of |value|, so that a sum changes by that share of the sum
    of |terms|."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value + SHIFT * value.abs() if floating else value


def _arguments(example_inputs) -> tuple[tuple, dict]:
    if isinstance(example_inputs, dict):
        args, kwargs = (), dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        args, kwargs = tuple(example_inputs), {}
    else:
        args, kwargs = (example_inputs,), {}
    # Copies: a model may write to its inputs, and a tensor that was made under inference_mode could
    # not be saved for backward.
    return tree_map(_ordinary, (args, kwargs))


def _ordinary(value):
    return value.detach().clone() if isinstance(value, Tensor) else value


def _autocast_dtype(amp, device: str) -> torch.dtype | None:
    if amp is None:
        amp = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    if amp is True:
        return AMP_DTYPES[device]
    if not (amp is False or isinstance(amp, torch.dtype)):
        raise TypeError(f"amp: expected True, False, None or a dtype, got {amp!r}")
    return amp or None


def seed_all(seed: int) -> None:
    """Seeds every random-number generator that a model may use: torch's, Python's and numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextlib.contextmanager
def without_tf32():
    """For references: TF32 has no more digits than float16. By default cuDNN's convolutions use it
    for float32 data."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    kept = matmul.fp32_precision, convolution.fp32_precision
    older = _older_switch() if kept[0] == "tf32" else "highest"
    try:
        # The older switch also sets the newer one. They must not contradict each other.
        if older != "highest":
            torch.set_float32_matmul_precision("highest")
        elif kept[0] == "tf32":
            matmul.fp32_precision = "ieee"
        if kept[1] == "tf32":
            convolution.fp32_precision = "ieee"
        yield
    finally:
        if older != "highest":
            torch.set_float32_matmul_precision(older)
        elif kept[0] == "tf32":
            matmul.fp32_precision = kept[0]
        if kept[1] == "tf32":
            convolution.fp32_precision = kept[1]


def _older_switch() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # only the newer one was set
        return "highest"


@contextlib.contextmanager
def same_random_numbers_afterwards():
    """Restores the state of all these generators."""
    numpy = sys.modules.get("numpy")
    python, numbers = random.getstate(), numpy and numpy.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(numbers)
