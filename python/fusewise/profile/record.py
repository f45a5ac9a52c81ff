"""One recording of a step under torch's profiler: each piece of time with its kind and module."""

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
_FUNCTION, _BACKWARD = 0, 1  # RecordScope of torch


@dataclass(frozen=True)
class Piece:
    """Time that one operator (CPU) or kernel (CUDA) took itself."""

    us: float
    kind: str
    name: str
    """Of the operator, or of the kernel."""
    modules: tuple[str, ...]
    """Names of the modules that it ran for, the innermost first; empty where that is unknown."""
    counts: bool = True
    """Whether it is a piece of work of its kind by itself, not a part of one."""


@dataclass
class Work:
    """What all calls of one module in a step must at least move and compute."""

    calls: int = 0
    bytes: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Recording:
    pieces: list[Piece]
    busy: list[tuple[float, float]]
    """When kernels ran on the GPU, start and end in µs."""
    us: float
    """From the start of the first step to the end of the last, by the wall's clock."""
    trace: dict
    """For Perfetto."""


def record(subject, steps: int, device: str, marked: bool) -> Recording:
    """Several steps under torch's profiler. `marked`: every module's forward is a named range, so
    that pieces know their modules; that costs time on the host."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with _marks(subject.model) if marked else nullcontext():
        with profile(activities=activities, acc_events=True):
            subject.step()  # the first recording starts the profiler itself
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
    """By the module's name: calls, bytes and operations of one step, backward included.

    Forward reads the inputs and parameters and writes the outputs. Backward reads inputs,
    parameters and the outputs' gradients, and writes the gradients of those that need one.
    Operations are those of convolutions and linear layers: what else there is, is few beside
    its bytes, and a count too low is still a floor.
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
            # Each of forward, the input's and the weight's gradient is one such product.
            product = 2 * outputs[0].numel() * module.weight[0].numel()
            gradients = inputs[0].requires_grad + module.weight.requires_grad
            operations = product * (1 + gradients if backward else 1)
            while True:  # of all modules that it is in
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
    """For each call in a step of a module with what a `torch.nn.Linear` gave: the names of the
    layer and of that module, and which share of the module's calls this one is."""
    pairs: list[tuple[str, str]] = []
    calls: Counter[str] = Counter()
    given: dict[int, tuple[str, torch.Tensor]] = {}  # by the output's id, which it keeps in use
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
    """While entered, every module's forward is a named range in the recording."""

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
        if kind == LAYOUT:  # copies inside of it say nothing; who wanted it does
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
            if kernel.name != event.name  # a range's own shadow on the GPU
        ]
    # What a CUDA graph or a foreign library launched is tied to no operator.
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
    """The times in which some kernel or copy ran, in order, overlaps joined."""
    joined: list[tuple[float, float]] = []
    for event in _on_gpu(events):  # in the order of their starts
        start, end = event.time_range.start, event.time_range.end
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _chain(event) -> list[str]:
    """Names of the operator and of those it runs for, up to the module or autograd's engine."""
    names = []
    while event is not None and not _is_border(event):
        names.append(event.name)
        event = event.cpu_parent
    return names


def _is_border(event) -> bool:
    return event.is_user_annotation or event.name.startswith((_MARK, _ENGINE))


def _module_finder(events):
    """A function from an event to the modules around it. What backward runs belongs to the modules
    of the forward operator with the same sequence number; of several such operators only the last
    made the node of the graph, the others merely saw its number."""
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
    """The node of autograd's graph that an event is, or runs for, in backward."""
    while event is not None:
        in_backward = event.scope == _BACKWARD or event.name.startswith(_ENGINE)
        if in_backward and event.sequence_nr >= 0:
            return event
        event = event.cpu_parent
    return None


def _trace(recording) -> dict:
    """As the profiler exports it, without the name of the file that it was exported to."""
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
