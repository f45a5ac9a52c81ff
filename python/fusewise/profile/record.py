"""Records a step under torch's profiler and assigns each piece of time to a kind and a module."""

import gzip
import json
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from .._torch_private import tree_leaves
from .kinds import LAYOUT, kind_of

_MARK = "module: "
_ENGINE = "autograd::engine::evaluate_function"
_FUNCTION, _BACKWARD = 0, 1  # torch's RecordScope


@dataclass(frozen=True)
class Piece:
    """The time that one operator (CPU) or kernel (CUDA) took by itself, without its children."""

    us: float
    kind: str
    name: str
    """The name of the operator or kernel."""
    modules: tuple[str, ...]
    """Names of the modules that it ran for, the innermost first; empty if unknown."""
    counts: bool = True
    """False if it is only a part of a piece of work of its kind."""


@dataclass
class Work:
    """The least that all calls of one module in a step must move and compute."""

    calls: int = 0
    bytes: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Recording:
    pieces: list[Piece]
    busy: list[tuple[float, float]]
    """When kernels ran on the GPU: start and end in µs."""
    us: float
    """Wall time from the start of the first step to the end of the last."""
    trace: dict
    """The trace, for Perfetto."""


def record(subject, steps: int, device: str, marked: bool) -> Recording:
    """Records several steps under torch's profiler.

    With `marked`, every module's forward becomes a named range, so that pieces can be assigned to
    modules. That costs host time.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with _marks(subject.model) if marked else nullcontext():
        with profile(activities=activities, acc_events=True):
            subject.step()  # the first recording includes the profiler's own start-up
        with profile(activities=activities, acc_events=True) as recording:
            wait()
            begin = time.perf_counter()
            for _ in range(steps):
                subject.step()
            wait()
            us = (time.perf_counter() - begin) * 1e6
    events = recording.events()
    pieces = _kernels(events) if device == "cuda" else _operators(events)
    return Recording(pieces, _busy(events), us, _trace(recording))


def count_work(subject) -> dict[str, Work]:
    """Calls, bytes and operations of one step for each module, by name, including backward.

    Forward reads inputs and parameters and writes outputs. Backward reads inputs, parameters and
    the outputs' gradients, and writes the gradients that are needed. Only the operations of
    convolutions and linear layers are counted. Other modules have few operations compared with
    their bytes, and a count that is too low still gives a valid floor.
    """
    found: dict[str, Work] = defaultdict(Work)
    hooks = []
    for name, module in subject.model.named_modules():

        def count(module, arguments, keywords, output, name=name):
            inputs, outputs = _tensors((arguments, keywords)), _tensors(output)
            parameters = list(module.parameters())
            learned = [t for t in (*inputs, *parameters) if t.requires_grad]
            backward = torch.is_grad_enabled() and any(t.requires_grad for t in outputs)
            once = _bytes(inputs) + _bytes(outputs) + _bytes(parameters)
            found[name].calls += 1
            found[name].bytes += 2 * once + _bytes(learned) if backward else once
            if not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                return
            # Forward, the input's gradient and the weight's gradient take one such product each.
            product = 2 * outputs[0].numel() * module.weight[0].numel()
            gradients = inputs[0].requires_grad + module.weight.requires_grad
            operations = product * (1 + gradients if backward else 1)
            while True:  # also for all modules that contain it
                found[name].operations += operations
                if not name:
                    break
                name = name.rpartition(".")[0]

        hooks.append(module.register_forward_hook(count, with_kwargs=True))
    try:
        subject.step()
    finally:
        for hook in hooks:
            hook.remove()
    return dict(found)


def behind_linears(subject) -> list[tuple[str, str, float]]:
    """Every call, in a step, of a module on the output of a `torch.nn.Linear`.

    For each: the name of the linear layer, the name of the module, and 1 / the number of calls of
    that module.
    """
    pairs: list[tuple[str, str]] = []
    calls: Counter[str] = Counter()
    given: dict[int, tuple[str, torch.Tensor]] = {}  # by id; kept so that no id is reused
    hooks = []
    for name, module in subject.model.named_modules():

        def keep(module, arguments, output, name=name):
            given[id(output)] = (name, output)

        def look(module, arguments, name=name):
            calls[name] += 1
            if arguments and id(arguments[0]) in given:
                pairs.append((given[id(arguments[0])][0], name))

        if type(module) is nn.Linear:
            hooks.append(module.register_forward_hook(keep))
        hooks.append(module.register_forward_pre_hook(look))
    try:
        subject.step()
    finally:
        for hook in hooks:
            hook.remove()
    return [(linear, behind, 1 / calls[behind]) for linear, behind in pairs]


class _marks:
    """A context in which every module's forward is a named range in the recording."""

    def __init__(self, model: nn.Module):
        self._model = model

    def __enter__(self):
        self._hooks, open_ranges = [], []

        def enter(name):
            def hook(module, _):
                open_ranges.append(record_function(f"{_MARK}{name} ({type(module).__name__})"))
                open_ranges[-1].__enter__()

            return hook

        def leave(*_):
            open_ranges.pop().__exit__(None, None, None)

        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(enter(name)))
            self._hooks.append(module.register_forward_hook(leave))

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()


def _operators(events) -> list[Piece]:
    modules = _module_finder(events)
    found = []
    for event in events:
        if event.device_type != DeviceType.CPU or not (chain := _chain(event)):
            continue
        kind, name = kind_of(chain), chain[0]
        if kind == LAYOUT:  # name what asked for the conversion, not the copies inside it
            converting = next(name for name in chain if kind_of([name]) == LAYOUT)
            name = f"{converting} in {chain[-1]}" if converting != chain[-1] else converting
        counts = kind_of(chain[:1]) == kind
        found.append(Piece(event.self_cpu_time_total, kind, name, modules(event), counts))
    return found


def _kernels(events) -> list[Piece]:
    modules = _module_finder(events)
    found = []
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        chain = _chain(event)
        found += [
            Piece(kernel.duration, kind_of(chain, kernel.name), kernel.name, modules(event))
            for kernel in event.kernels
            if kernel.name != event.name  # skips the range's own copy on the GPU timeline
        ]
    # Kernels launched by a CUDA graph or by another library belong to no operator.
    known = Counter((piece.name, piece.us) for piece in found)
    for event in _on_gpu(events):
        key = (event.name, event.time_range.end - event.time_range.start)
        known[key] -= 1
        if known[key] < 0:
            found.append(Piece(key[1], kind_of([], event.name), event.name, ()))
    return found


def _on_gpu(events) -> list:
    return [
        event
        for event in events
        if event.device_type == DeviceType.CUDA
        and not (event.is_user_annotation or event.name.startswith(_MARK))
    ]


def _busy(events) -> list[tuple[float, float]]:
    """The times in which a kernel or copy ran, in order, with overlaps merged."""
    joined: list[tuple[float, float]] = []
    for event in _on_gpu(events):  # sorted by start
        start, end = event.time_range.start, event.time_range.end
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _chain(event) -> list[str]:
    """The names of the operator and its callers, up to the module or autograd's engine."""
    names = []
    while event is not None and not _is_border(event):
        names.append(event.name)
        event = event.cpu_parent
    return names


def _is_border(event) -> bool:
    return event.is_user_annotation or event.name.startswith((_MARK, _ENGINE))


def _module_finder(events):
    """A function from an event to the modules that it ran for.

    An event in backward belongs to the modules of the forward operator with the same sequence
    number. Several forward operators can have that number. Only the last one created the autograd
    node; the others merely read the counter.
    """
    forward = {}
    for event in events:
        if event.scope == _FUNCTION and event.sequence_nr >= 0 and not _node(event):
            earlier = forward.get(event.sequence_nr)
            if earlier is None or earlier.time_range.start <= event.time_range.start:
                forward[event.sequence_nr] = event

    def find(event) -> tuple[str, ...]:
        node = _node(event)
        if node is not None:
            event = forward.get(node.sequence_nr)
        names = []
        while event is not None:
            if event.name.startswith(_MARK):
                names.append(event.name.removeprefix(_MARK).rpartition(" (")[0])
            event = event.cpu_parent
        return tuple(names)

    return find


def _node(event):
    """The autograd node that an event in backward is, or runs inside of; None in forward."""
    while event is not None:
        in_backward = event.scope == _BACKWARD or event.name.startswith(_ENGINE)
        if in_backward and event.sequence_nr >= 0:
            return event
        event = event.cpu_parent
    return None


def _trace(recording) -> dict:
    """The profiler's trace, without the name of the temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(errors="replace"))
    trace.pop("traceName", None)
    return trace


def write_trace(trace: dict, path: Path) -> None:
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)


def _tensors(values) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
