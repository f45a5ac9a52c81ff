"""Several processes decide alike: rank 0 measures, the others take over what it decided."""

from collections.abc import Callable
from typing import TypeVar

from torch import distributed

T = TypeVar("T")


def processes() -> int:
    """How many take part; 1 if torch.distributed is not used."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def all_succeed(step: Callable[[], T], compared: Callable[[T], object], what: str) -> T:
    """The step's result, if it succeeded in all processes with the same `compared(result)`.

    Otherwise every process raises an error. So does a process whose peer has died.
    """
    if processes() == 1:
        return step()
    result = error = None
    try:
        result = step()
    except BaseException as raised:  # the others must hear of it, whatever it is
        error = raised
    mine = _said(error), None if error else compared(result)
    everyones = [None] * processes()
    try:
        distributed.all_gather_object(everyones, mine)
    except Exception:
        if error is None:
            raise
    if error is not None:
        raise error
    for rank, (failure, found) in enumerate(everyones):
        if failure:
            raise RuntimeError(f"model: rank {rank} failed to {what} it: {failure}")
        if found != everyones[0][1]:
            raise RuntimeError(
                f"model: expected the same model on all ranks, but rank {rank} found {found} "
                f"where rank 0 found {everyones[0][1]}"
            )
    return result


def from_rank_0(decide: Callable[[], T]) -> T:
    """What `decide` returns on rank 0, the only one that calls it. If it fails there, all fail."""
    if processes() == 1:
        return decide()
    if distributed.get_rank() == 0:
        try:
            result = decide()
        except BaseException as error:
            _broadcast((_said(error), None))
            raise
        _broadcast((None, result))
        return result
    failure, result = _broadcast(None)
    if failure:
        raise RuntimeError(f"model: rank 0 failed to optimize it: {failure}")
    return result


def _broadcast(value):
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def _said(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
