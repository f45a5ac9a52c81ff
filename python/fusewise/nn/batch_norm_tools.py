"""Tools of torch that look for BatchNorms, for models that contain ours."""

from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .batch_norm import SharedNorm


def convert_sync_batchnorm(model: torch.nn.Module, process_group=None) -> torch.nn.Module:
    """Makes all BatchNorms share their statistics with the other processes of a group.

    Every `BatchNormAct2d` and `LIBatchNorm2d` in the model gets the group. Torch's own layers
    become `torch.nn.SyncBatchNorm`, by `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, which alone
    leaves ours as they are.

    Args:
        model: Changed in place.
        process_group: A `torch.distributed` group; None is the group of all processes.

    Returns:
        The model. If it is itself one of torch's BatchNorms, the layer that replaces it.

    Raises:
        RuntimeError: If `process_group` is None and torch.distributed is not initialised.

    Example:
        >>> import torch, fusewise
        >>> model, store = fusewise.nn.BatchNormAct2d(8), torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = fusewise.nn.convert_sync_batchnorm(model)
        >>> model.process_group is torch.distributed.group.WORLD
        True
        >>> torch.distributed.destroy_process_group()
    """
    ours = [module for module in model.modules() if isinstance(module, SharedNorm)]
    group = process_group
    if group is None and ours:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise RuntimeError(
                "process_group: None is the group of all processes, but there is none yet; call "
                "torch.distributed.init_process_group first"
            )
        group = torch.distributed.group.WORLD
    for module in ours:
        module.process_group = group
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group)


@torch.no_grad()
def update_bn(
    loader: Iterable,
    model: torch.nn.Module,
    device: torch.device | str | None = None,
) -> None:
    """Computes the running statistics anew, as averages over all batches of a loader.

    The same as `torch.optim.swa_utils.update_bn`, which does not reset a `BatchNormAct2d`, and does
    nothing if the model has no other BatchNorms.

    Args:
        loader: Yields tensors, or lists and tuples whose first element is one, for the model.
        model: All its BatchNorms that track running statistics are updated, torch's and ours.
        device: Where the batches are moved before the model is called; None: they stay.

    Example:
        >>> import torch, fusewise
        >>> norm = fusewise.nn.BatchNormAct2d(8)
        >>> batches = [torch.full((4, 8, 2, 2), value) for value in (1.0, 3.0)]
        >>> fusewise.nn.update_bn(batches, norm)
        >>> norm.running_mean[0]
        tensor(2.)
    """
    momenta = {
        module: module.momentum
        for module in model.modules()
        if isinstance(module, (_BatchNorm, SharedNorm)) and module.track_running_stats
    }
    if not momenta:
        return
    was_training = model.training
    try:
        model.train()
        for module in momenta:
            module.reset_running_stats()
            module.momentum = None
        for batch in loader:
            x = batch[0] if isinstance(batch, (list, tuple)) else batch
            model(x if device is None else x.to(device))
    finally:
        for module, momentum in momenta.items():
            module.momentum = momentum
        model.train(was_training)
