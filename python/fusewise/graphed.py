"""A model as two CUDA graphs, one for forward and one for backward."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ._capturing import WaitsForTheGpu, waiting_is_an_error, without_garbage_collection
from ._torch_private import copy_each, tree_flatten, tree_leaves, tree_unflatten

_WARM_UP = 3  # calls before the capture, in which GEMMs and convolutions are tuned


def graphed(model: torch.nn.Module, *inputs: Tensor, **keywords: Tensor) -> "Graphed":
    """Captures forward and backward of a model as CUDA graphs, by
    `torch.cuda.make_graphed_callables`. A call then costs the host two launches.

    The model runs a few times before the capture, so that everything that is tuned at its first
    call is tuned. Afterwards buffers and random-number states are as before: none of these calls
    counts as a training step.

    The graphs are those of the model's mode (train or eval), of the surrounding autocast, and of
    the shapes and dtypes of `inputs`. Inputs are copied into the graph's memory, in any layout. In
    the other mode the model is called as it is, without a graph. In the same mode, a call that the
    graphs do not fit raises an error; nothing is recomputed silently.

    What a graph does not see: Python code in the model runs only while it is captured. Hooks,
    prints and decisions that depend on Python values are those of the capture.

    Args:
        model: On a CUDA device. Not wrapped in DistributedDataParallel: wrap the result.
        inputs: CUDA tensors as the model takes them. Those that need a gradient say so.
        keywords: Further tensors, by name.

    Returns:
        A module with the parameters, buffers and state dict of the model, which it has as
        `module`. Its outputs are the caller's own; the next call does not overwrite them. Backward
        must come before the next call. There is no second backward. Set gradients to None before
        the call rather than after it: those of the last step are copied otherwise. Gradients of
        parameters that `torch.autograd.grad` returns are in the graph's memory: the next call
        overwrites them.

    Raises:
        TypeError: If an input is no tensor, or the model is no module.
        RuntimeError: If something is not on one CUDA device, or cannot be captured.

    Example:
        >>> import torch, fusewise
        >>> model, x = fusewise.nn.MLP([784, 256, 10]), torch.randn(32, 784)
        >>> if torch.cuda.is_available():
        ...     model, x = model.cuda(), x.cuda()
        ...     model = fusewise.graphed(model, x)
        >>> model(x).sum().backward()  # on a GPU one launch each way
    """
    _check_arguments(model, inputs, keywords)
    tensors = {f"inputs[{i}]": t for i, t in enumerate(inputs)} | keywords
    _require_cuda(model, tensors)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "graphed: inference_mode is on, in which no memory can be kept; "
            "capture under torch.no_grad() instead"
        )
    # The caller's tensors stay theirs: the graph reads copies.
    samples = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors.values()]
    with _as_before(model, samples[0].device):
        replay = _capture(_Call(model, tuple(keywords)), samples)
    return Graphed(model, _Capture(model, replay, dict(zip(tensors, samples, strict=True))))


class Graphed(torch.nn.Module):
    """What `graphed` returns. `module` is the model itself."""

    def __init__(self, module: torch.nn.Module, capture: "_Capture"):
        super().__init__()
        self.module = module
        self.training = module.training
        self._capture = capture

    def forward(self, *inputs, **keywords):
        if self.module.training != self._capture.modes[0][1]:
            return self.module(*inputs, **keywords)
        return self._capture(inputs, keywords)

    # Names are those of the model, so that state dicts go both ways.

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args, **options):
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args, **options):
        return self.module.load_state_dict(*args, **options)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        # As a part of another module: what follows goes to `module`, under its name.
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __reduce_ex__(self, protocol):
        raise TypeError("graphed: a captured graph cannot be copied or pickled; take its .module")


class _Place(NamedTuple):
    """Where a module holds a parameter or buffer, and what the graph reads and writes."""

    name: str
    held: dict
    key: str
    tensor: Tensor
    address: int
    requires_grad: bool

    def moved(self) -> bool:
        now = self.held.get(self.key)
        return now is not self.tensor or now.data_ptr() != self.address


class _Capture:
    """The graphs, and what they were captured with."""

    def __init__(self, model, replay, samples: dict[str, Tensor]):
        self.replay, self.samples = replay, samples
        self.modes = [(module, module.training) for module in model.modules()]
        self.places = _places(model)
        self.autocast = _autocast()
        self.gradients = torch.is_grad_enabled()
        self.calls = 0
        self.addresses: dict[Tensor, set[int]] = {}
        """Where each parameter's gradients have been, those in the graph's memory among them."""

    def __call__(self, inputs, keywords):
        tensors = {f"inputs[{i}]": t for i, t in enumerate(inputs)} | keywords
        self._check_inputs(tensors)
        self._check_state()
        self.calls += 1
        self._keep_gradients()
        inputs = [tensors[name] for name in self.samples]
        if torch.is_grad_enabled():
            inputs = [_OwnGradient.apply(t) if t.requires_grad else t for t in inputs]
        outputs = self.replay(*inputs)
        leaves, form = tree_flatten(outputs)
        return tree_unflatten(_Own.apply(self, *leaves), form)

    def _check_inputs(self, tensors: dict[str, Tensor]) -> None:
        if tensors.keys() != self.samples.keys():
            expected, got = (", ".join(names) or "nothing" for names in (self.samples, tensors))
            raise TypeError(f"graphed: expected {expected} as captured, got {got}")
        for name, sample in self.samples.items():
            t = tensors[name]
            if not isinstance(t, Tensor):
                raise TypeError(f"graphed: {name}: expected a tensor, got {type(t).__name__}")
            for what in ("shape", "dtype", "device"):
                expected, got = getattr(sample, what), getattr(t, what)
                if expected != got:
                    if what == "shape":
                        expected, got = list(expected), list(got)
                    raise RuntimeError(
                        f"graphed: {name}: expected {what} {expected} as captured, got {got}; "
                        "call .module without a graph, or capture again"
                    )
            if t.requires_grad and not sample.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"graphed: {name}: expected no requires_grad as captured, got a tensor that "
                    "needs a gradient; capture with one that does"
                )

    def _check_state(self) -> None:
        if autocast := _difference(self.autocast, _autocast()):
            raise RuntimeError(f"graphed: expected {autocast}; capture again under this autocast")
        learns = torch.is_grad_enabled() and not self.gradients
        for place in self.places:
            if place.moved():
                raise RuntimeError(
                    f"graphed: {place.name}: expected the tensor that was captured, got another "
                    "or moved one; call .to() and the like before the capture"
                )
            if place.tensor.requires_grad and (learns or not place.requires_grad):
                raise RuntimeError(
                    f"graphed: {place.name}: needs a gradient, but was captured without; "
                    "capture again with gradients, or call under torch.no_grad()"
                )
        for module, training in self.modes:
            if module.training != training:
                raise RuntimeError(
                    f"graphed: a {type(module).__name__} in the model is in "
                    f"{'eval' if training else 'train'} mode, which it was not at the capture; "
                    "capture again"
                )

    def before_backward(self, call: int) -> None:
        if call != self.calls:
            raise RuntimeError(
                "graphed: this is the backward of a call whose memory a later call has "
                "overwritten; call backward before the model is called again"
            )
        for place in self.places:
            p = place.tensor
            if place.requires_grad and p.requires_grad and p not in self.addresses:
                self.addresses[p], hook = _addresses(p)
                weakref.finalize(self, hook.remove)

    def _keep_gradients(self) -> None:
        """Autograd takes the graph's memory as .grad where there was none. Both replays write to
        this memory, so gradients that are still there move to memory of their own."""
        held = [
            p
            for p, addresses in self.addresses.items()
            if p.grad is not None and p.grad.data_ptr() in addresses
        ]
        if held:
            own = [torch.empty_like(p.grad) for p in held]
            copy_each(own, [p.grad for p in held])
            for p, gradient in zip(held, own, strict=True):
                p.grad = gradient


def _addresses(p: Tensor) -> tuple[set[int], RemovableHandle]:
    """A set that fills with the address of every gradient that reaches a parameter, and the hook
    that fills it. Not only of the first gradient, which may be a sum with what reaches the
    parameter from outside of the graph."""
    found: set[int] = set()
    return found, p.register_hook(lambda gradient: found.add(gradient.data_ptr()))


class _OwnGradient(torch.autograd.Function):
    """An input as it is. Its gradient is a copy, because the graph's is overwritten."""

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


class _Own(torch.autograd.Function):
    """Gives the caller tensors of its own, and looks at the state before backward is replayed."""

    @staticmethod
    def forward(ctx, capture, *outputs):
        ctx.capture, ctx.call = capture, capture.calls
        own = tuple(t.clone() for t in outputs)
        ctx.mark_non_differentiable(
            *(t for t, output in zip(own, outputs, strict=True) if not output.requires_grad)
        )
        return own

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        ctx.capture.before_backward(ctx.call)
        return None, *gradients


class _Call(torch.nn.Module):
    """The model with positional arguments only, as torch's graphs take them."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *tensors):
        count = len(tensors) - len(self.names)
        keywords = dict(zip(self.names, tensors[count:], strict=True))
        return self.module(*tensors[:count], **keywords)


def _check_arguments(model, inputs, keywords) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"graphed: model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            "graphed: model: got a DistributedDataParallel; capture first, then wrap the result: "
            "DistributedDataParallel(graphed(model, ...))"
        )
    if not inputs and not keywords:
        raise TypeError("graphed: expected the inputs of a call after the model, got none")
    for name, t in [*((f"inputs[{i}]", t) for i, t in enumerate(inputs)), *keywords.items()]:
        if not isinstance(t, Tensor):
            raise TypeError(
                f"graphed: {name}: expected a tensor, got {type(t).__name__}; give other values "
                "to the model before the capture"
            )


def _require_cuda(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    held = {place.name: place.tensor for place in _places(model)}
    first = None
    for name, t in (tensors | held).items():
        if t.device.type != "cuda":
            raise RuntimeError(
                f"graphed: expected CUDA tensors, got {t.device} ({name}); CUDA graphs need a GPU: "
                "move the model and its inputs there, or call the model without a graph"
            )
        first = first or (name, t.device)
        if t.device != first[1]:
            raise RuntimeError(
                f"graphed: expected all tensors on one device, got {first[0]} on {first[1]} and "
                f"{name} on {t.device}"
            )


def _places(model: torch.nn.Module) -> list[_Place]:
    found = []
    for name, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for key, t in held.items():
                if t is not None:
                    full = f"{name}.{key}" if name else key
                    found.append(_Place(full, held, key, t, t.data_ptr(), t.requires_grad))
    return found


def _autocast() -> tuple[bool, torch.dtype | None]:
    on = torch.is_autocast_enabled("cuda")
    return on, torch.get_autocast_dtype("cuda") if on else None


def _difference(captured, now) -> str:
    """Says what autocast was and is; empty where both are the same."""
    if captured == now:
        return ""
    was, is_ = (f"autocast to {dtype}" if on else "no autocast" for on, dtype in (captured, now))
    return f"{was} as captured, got {is_}"


@contextlib.contextmanager
def _as_before(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """In a `with` block, calls change no buffer and no random-number state for good."""
    places = _places(model)
    buffers = [place for place in places if not isinstance(place.tensor, torch.nn.Parameter)]
    before = [place.tensor.clone() for place in buffers]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
        for place in places:
            if place.moved():
                raise RuntimeError(
                    f"graphed: {place.name}: the model's forward replaces this tensor; a graph "
                    "can only change it in place"
                )
    finally:
        with torch.no_grad():
            for place, t in zip(buffers, before, strict=True):
                place.held[place.key] = place.tensor
                place.tensor.copy_(t)


def _capture(call: _Call, samples: list[Tensor]):
    """The replay of a call: a function of tensors like the samples."""
    device = samples[0].device
    with torch.cuda.device(device), contextlib.ExitStack() as stack:
        on, dtype = _autocast()
        if on:  # casts that are kept between calls would lie outside of the graph
            stack.enter_context(torch.autocast("cuda", dtype, cache_enabled=False))
        _warm_up(call, samples)
        stack.enter_context(without_garbage_collection())
        # A capture that fails may leave torch's own stream as the current one.
        stack.enter_context(torch.cuda.stream(torch.cuda.current_stream()))
        try:
            return torch.cuda.make_graphed_callables(
                call, tuple(samples), num_warmup_iters=1, allow_unused_input=True
            )
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise RuntimeError(
                "graphed: the model does something that a CUDA graph cannot capture, such as "
                "waiting for the GPU, using CPU tensors or another stream; remove it, or graph "
                f"only a part: {str(error).strip().splitlines()[0]}"
            ) from error


def _warm_up(call: _Call, samples: list[Tensor]) -> None:
    """Steps as in training, on a stream of their own. The last one may not wait for the GPU."""
    wanted = [t for t in (*samples, *call.parameters()) if t.requires_grad]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for i in range(_WARM_UP):
                with waiting_is_an_error() if i == _WARM_UP - 1 else contextlib.nullcontext():
                    outputs = [t for t in tree_leaves(call(*samples)) if t.requires_grad]
                    if outputs:
                        slopes = [torch.ones_like(t) for t in outputs]
                        torch.autograd.grad(outputs, wanted, slopes, allow_unused=True)
    except WaitsForTheGpu as error:
        raise RuntimeError(
            "graphed: the model waits for the GPU, which a graph cannot capture; the traceback "
            "above shows where: remove .item(), .cpu(), .nonzero(), boolean indexing and prints "
            "of tensors, or graph only a part"
        ) from error
    finally:  # also after an error: the buffers are restored next
        torch.cuda.current_stream().wait_stream(stream)
