"""Prepares, decides and swaps: the work behind `fusewise.optimize`."""

import contextlib

import torch
from torch import nn

from .candidate import Edits, Root, apply, take_over
from .decide import Work
from .options import Options
from .progress import Silent
from .report import BOTH, COMPILED, GRAPHED, Report
from .setting import same_random_numbers_afterwards
from .together import all_succeed, from_rank_0
from .trees import share
from .whole import as_graph


def run(model: nn.Module, example_inputs, options: Options, progress=None):
    """The model to use from now on, and the report."""
    given, progress = model, progress or Silent()
    if isinstance(model, nn.parallel.DistributedDataParallel) and options.inplace:
        model = model.module
    # What is made under inference_mode could not be trained afterwards.
    with (
        _memory_given_back(),
        _current(model),
        same_random_numbers_afterwards(),
        torch.inference_mode(False),
    ):
        work = all_succeed(
            lambda: Work(model, example_inputs, options, progress),
            lambda work: [candidate.key for candidate in work.found],
            "prepare",
        )
        report, swapped = from_rank_0(work.decide)
        root = Root(model if options.inplace else share(model))
        edits = apply(root, [each for each in work.found if each.key in swapped])
        try:
            result = _finish(root, edits, report, work)
        except BaseException:
            edits.undo()
            raise
    report._restore = _restoring(model, root, edits if options.inplace else None)
    return (given if result is model else result), report


@contextlib.contextmanager
def _memory_given_back():
    """The allocator would keep the GPU memory of references and graphs."""
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _current(model: nn.Module):
    """Makes the model's GPU the current one."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    device = next((each.device for each in parameters if each.is_cuda), None)
    return torch.cuda.device(device) if device else contextlib.nullcontext()


def _finish(root: Root, edits: Edits, report: Report, work: Work) -> nn.Module:
    if report.returned.startswith((COMPILED, BOTH)):
        edits.compile()
    if report.returned.endswith(GRAPHED):
        return as_graph(root.model, work.setting)
    return root.model


def _restoring(model: nn.Module, root: Root, edits: Edits | None):
    """`edits` are those of the model itself; None if the swaps are in another tree."""

    def restore() -> nn.Module:
        if edits is None:
            take_over(model, root.model)
        else:
            edits.undo()
        return model

    return restore
