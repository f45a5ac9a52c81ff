"""Torch's tools for models with BatchNorms, and ours, on a model that contains BatchNormAct2d."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from fusewise.nn import BatchNormAct2d, update_bn


def models():
    """The same model twice: with our layer, and with torch's alone."""
    torch.manual_seed(0)
    theirs = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    )
    ours = copy.deepcopy(theirs)
    ours[1] = BatchNormAct2d.from_batch_norm(ours[1], "relu")
    ours[2] = nn.Identity()
    return ours, theirs


def batches(count=3):
    torch.manual_seed(1)
    return [torch.randn(2, 3, 6, 6) * (i + 1) for i in range(count)]


def same(ours, theirs):
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(
            ours.state_dict()[name], value, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("labels", [False, True], ids=["tensors", "pairs"])
def test_update_bn(labels):
    ours, theirs = models()
    ours[1].momentum = theirs[1].momentum = 0.3
    ours.eval(), theirs.eval()
    ours[0].train(), theirs[0].train()
    for model in (ours, theirs):
        for batch in batches(1):
            model(batch)  # statistics that must not remain
    loader = [(batch, "label") for batch in batches()] if labels else batches()
    update_bn(loader, ours, device="cpu")
    swa_utils.update_bn(loader, theirs)
    same(ours, theirs)
    assert ours[1].momentum == 0.3 and not ours.training and not ours[1].training


def test_update_bn_restores_the_model_after_an_error():
    ours, _ = models()
    ours.eval()
    with pytest.raises(RuntimeError):
        update_bn([torch.randn(2, 5, 6, 6)], ours)
    assert ours[1].momentum == 0.1 and not ours.training


def test_update_bn_of_a_model_without_running_statistics():
    model = BatchNormAct2d(3, track_running_stats=False)
    update_bn(iter([]), model)
    assert model.training


def test_torchs_own_update_bn():
    """It finds torch's layers only. Ours then averages with its momentum, without a reset; in a
    model without torch's layers nothing happens at all."""
    ours, theirs = models()
    swa_utils.update_bn(batches(), ours)
    swa_utils.update_bn(batches(), theirs)
    torch.testing.assert_close(ours[4].running_mean, theirs[4].running_mean)
    assert ours[1].num_batches_tracked == 3
    assert not torch.allclose(ours[1].running_mean, theirs[1].running_mean)
    alone = nn.Sequential(BatchNormAct2d(3))
    swa_utils.update_bn(batches(), alone)
    assert alone[0].num_batches_tracked == 0


def test_state_dicts_go_both_ways():
    ours, theirs = models()
    for batch in batches():
        ours(batch)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    same(ours, theirs)
    for batch in batches(2):
        theirs(batch)
    ours.load_state_dict(theirs.state_dict())
    same(ours, theirs)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(batch), theirs(batch))


def test_there_and_back():
    norm = nn.BatchNorm2d(3, affine=False, track_running_stats=False).eval()
    ours = BatchNormAct2d.from_batch_norm(norm, "silu")
    back = ours.to_batch_norm()
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(ours(x), nn.functional.silu(norm(x)))
    torch.testing.assert_close(back(x), norm(x))
    assert not back.training and back.weight is None and back.running_mean is None


def test_a_norm_with_hooks_is_refused():
    norm = nn.BatchNorm2d(3)
    norm.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="^norm: has hooks"):
        BatchNormAct2d.from_batch_norm(norm, "relu")


def test_copies_and_files(tmp_path):
    norm = BatchNormAct2d(3, "silu", momentum=None)
    norm(torch.randn(2, 3, 4, 4))
    torch.save(norm, tmp_path / "norm.pt")
    for other in (copy.deepcopy(norm), torch.load(tmp_path / "norm.pt", weights_only=False)):
        same(other, norm)
        x = torch.randn(2, 3, 4, 4)
        assert torch.equal(other.eval()(x), copy.deepcopy(norm).eval()(x))
    half = copy.deepcopy(norm).half()
    assert (
        half.running_mean.dtype == torch.float16 and half.num_batches_tracked.dtype == torch.int64
    )
    assert half(torch.randn(2, 3, 4, 4).half()).dtype == torch.float16
    assert repr(norm).startswith("BatchNormAct2d(3, activation='silu'")
