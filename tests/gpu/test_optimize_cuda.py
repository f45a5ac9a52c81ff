"""fusewise.optimize on a GPU: verification, CUDA graphs for its times, and what stays as it was.

What it finds and how it decides is tested without a GPU in tests/python/test_optimize*.py.
"""

import copy
import random

import pytest
import torch
from torch import nn

import fusewise
from fusewise.graphed import Graphed
from fusewise.nn import BatchNormAct2d
from fusewise.rewrite import measure
from fusewise.rewrite.candidate import Chain
from fusewise.rewrite.options import Options
from fusewise.rewrite.run import run
from fusewise.rewrite.setting import Setting
from fusewise.rewrite.verify import check_slot
from gpu_helpers import allocated, needs_gpu
from optimize_models import Interrupts, Stem, inject, shaken, step

__all__ = ["inject"]

pytestmark = needs_gpu
CLASSES = 10


def vision_transformer():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight, std=0.02)  # torchvision's is 0
    return model


def of_torchvision(name):
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.get_model(name, num_classes=CLASSES)


def of_timm(name):
    return pytest.importorskip("timm").create_model(name, num_classes=CLASSES)


MODELS = {
    "resnet18": lambda: of_torchvision("resnet18"),
    "mobilenet_v3_small": lambda: of_torchvision("mobilenet_v3_small"),
    "seresnet18": lambda: of_timm("seresnet18"),
    "vit": vision_transformer,
}


def made(name, training):
    model = MODELS[name]().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 32 if name == "vit" else 64, 32 if name == "vit" else 64, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():  # running statistics that fit the activations
        for _ in range(20):
            model.train()(x)
    return model.train(training), x


def assert_near(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "training, amp",
    [(True, torch.float16), (False, torch.float16), (True, False)],
    ids=["training float16", "inference float16", "training float32"],
)
@pytest.mark.parametrize("name", MODELS)
def test_swapped_models_compute_the_same(inject, name, training, amp):
    model, x = made(name, training)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    new, report = fusewise.optimize(model, x, training=training, amp=amp)
    assert {row.result for row in report.rows} <= {"swapped", "covered", "unsupported"}, str(report)
    assert len(report.swapped) >= 2 and report.returned == "swapped"
    chains = any(row.pattern == "BatchNorm + Squeeze-and-Excitation" for row in report.swapped)
    assert chains == (name in ("mobilenet_v3_small", "seresnet18"))
    assert all(a is b for a, b in zip(new.parameters(), parameters, strict=True))
    assert list(new.state_dict()) == keys
    assert report.setting["amp"] == ("float16" if amp else False)

    # In another precision than the one that was verified.
    ours, theirs = copy.deepcopy(new).double(), copy.deepcopy(model).double()
    for mode in (training, not training):
        assert_near(*(step(each, x.double(), mode) for each in (ours, theirs)))
    with torch.no_grad():
        parameters[0].add_(1)
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), model.parameters(), strict=True))
    assert report.restore() is model


@pytest.mark.parametrize(
    "amp, factor", [(torch.float16, 1.2), (None, 1.05)], ids=["float16", "float32"]
)
def test_a_wrong_gradient_is_found(amp, factor):
    """In float16, eager's own error here is 3 %."""
    before = Chain(nn.BatchNorm2d(16), nn.SiLU()).cuda()
    after = BatchNormAct2d.from_batch_norm(copy.deepcopy(before.layers[0]), "silu")
    x = torch.randn(8, 16, 20, 20, device="cuda", dtype=amp or torch.float32)
    setting = Setting.make(before, x, True, amp or False)
    assert check_slot(before, after, (x,), setting, gradients=True).passed
    after.weight.register_hook(lambda gradient: factor * gradient)
    assert not check_slot(before, after, (x,), setting, gradients=True).passed


def test_the_report_has_both_clocks_and_memory(tmp_path):
    model, x = made("resnet18", True)
    new, report = fusewise.optimize(model, x, amp=True)
    assert not [row for row in report.rows if row.result in ("WRONG", "unsupported")], str(report)
    assert report.setting["device"] == "cuda" and "gpu" in report.environment
    for row in report.rows:
        assert row.us.keys() == row.ratio.keys() == {"gpu", "wall"}
        assert all(us > 0 for both in row.us.values() for us in both)
    for times in report.whole.values():
        assert times["peak_bytes"] > 0
        assert 0 < times["gpu"]["median"] <= 1.1 * times["wall"]["median"]
    assert "GPU ms" in str(report) or not report.whole
    report.to_json(tmp_path / "report.json")
    with torch.autocast("cuda", torch.float16):
        new(x).float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert report.restore() is model


def test_graphs_are_returned(inject):
    inject(**{"swapped + graph": 300})
    model, x = made("mobilenet_v3_small", False)
    for training in (False, True):
        new, report = fusewise.optimize(model.train(training), x, graph=True)
        assert isinstance(new, Graphed) and report.returned == "swapped + graph"
        assert all(a is b for a, b in zip(new.parameters(), model.parameters(), strict=True))
        with torch.set_grad_enabled(training):
            mine, right = new(x), copy.deepcopy(model)(x)
        torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2 * right.abs().max().item())
        if training:
            mine.square().sum().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            model.zero_grad()
        assert report.restore() is model


def test_a_graph_is_measured():
    model, x = made("resnet18", False)
    _, report = fusewise.optimize(model, x, graph=True, verify=False)
    (name,) = [name for name in report.whole if name.endswith(" + graph")]
    assert "wall" in report.whole[name] and "gpu" not in report.whole[name]
    assert "gpu" in report.whole["original"]


def test_compiled_variants():
    torch._dynamo.reset()
    model, x = shaken(Stem(nn.Identity())).cuda().eval(), torch.randn(4, 3, 14, 14, device="cuda")
    new, report = fusewise.optimize(model, x, compile=True)
    assert "compiled" in report.whole and "gpu" in report.whole["compiled"], str(report)
    with torch.no_grad():
        torch.testing.assert_close(new(x), model(x), rtol=1e-3, atol=1e-3)


# --- nothing else changes -------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws from the generators of the GPU and of the CPU."""

    def forward(self, x):
        return x + random.random() + torch.rand((), device=x.device) + torch.rand(()).item()


MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
SWITCHES = (
    torch.get_float32_matmul_precision,
    lambda: MATMUL.allow_tf32,
    lambda: MATMUL.fp32_precision,
    lambda: CUDNN.allow_tf32,
    lambda: CUDNN.conv.fp32_precision,
)


def read(switch):
    """Torch's older switches cannot be read where a newer one says something else."""
    try:
        return switch()
    except RuntimeError as error:
        return str(error)


def everything(model):
    """What must be as before, whatever happens."""
    return {
        "modules": [
            (name, type(module), module.training, len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ],
        "tensors": [
            (name, id(tensor), tensor._version, tensor.detach().cpu().tolist(), tensor.grad)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ],
        "random": (
            torch.get_rng_state().tolist(),
            torch.cuda.get_rng_state().tolist(),
            random.getstate(),
        ),
        "switches": (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.cuda.get_sync_debug_mode(),
            *map(read, SWITCHES),
        ),
        "stream": torch.cuda.current_stream(),
        "capturing": torch.cuda.is_current_stream_capturing(),
    }


IMAGE = (4, 3, 14, 14)


@pytest.mark.parametrize("amp", [torch.float16, False], ids=["float16", "float32"])
def test_all_is_as_before(amp):
    """With real times: steps with dropout are captured, whose generator the graph knows."""
    model = shaken(Stem(nn.Dropout(0.5))).cuda().train()
    x = torch.randn(IMAGE, device="cuda")
    before = everything(model)
    memory = []
    for _ in range(2):  # the first call leaves workspaces of the libraries
        new, report = fusewise.optimize(model, x, amp=amp)
        assert everything(model) == before
        assert "gpu" in report.rows[0].us
        del new, report
        memory.append(allocated())
    assert memory[1] <= memory[0] + (1 << 20)


@pytest.mark.parametrize("older", ["high", ""])
def test_the_switches_for_tf32_stay(run_python, older):
    """References are computed without it. In a process of its own: what was set once in torch's
    older way cannot be undone."""
    run_python(
        f"""
        import torch
        from test_optimize_cuda import IMAGE, Stem, everything, fusewise, nn
        from torch.backends import cuda, cudnn
        if {older!r}:
            torch.set_float32_matmul_precision({older!r})
        else:
            cuda.matmul.fp32_precision = "tf32"
            cudnn.conv.fp32_precision = "tf32"
        model, x = Stem(nn.Identity()).cuda(), torch.randn(IMAGE, device="cuda")
        before = everything(model)
        _, report = fusewise.optimize(model, x)
        assert everything(model) == before
        assert report.rows[0].result in ("swapped", "taken back", "not faster"), str(report)
        """
    )


def test_a_model_that_waits_for_the_gpu_has_wall_time_only():
    model = shaken(Stem(Noisy())).cuda()
    model.blocks.append(WaitsForTheGpu())
    x, before = torch.randn(IMAGE, device="cuda"), everything(model)
    _, report = fusewise.optimize(model, x)
    assert everything(model) == before
    assert "gpu" in report.rows[0].us  # the norm alone can be captured
    assert all("gpu" not in times and "wall" in times for times in report.whole.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    graph.replay()
    assert torch.equal(y, x * 2)


class WaitsForTheGpu(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


@pytest.mark.parametrize("inplace", [False, True], ids=["new tree", "inplace"])
def test_an_exception_at_any_step(inject, inplace):
    model = shaken(Stem(nn.Dropout(0.5))).cuda()
    x, before = torch.randn(IMAGE, device="cuda"), everything(model)
    for at in range(100):
        steps = Interrupts(at, torch.OutOfMemoryError("no memory"))
        try:
            _, report = run(model, x, Options(inplace=inplace), steps)
        except torch.OutOfMemoryError as raised:
            assert raised is steps.error
        else:
            break
        assert everything(model) == before
    assert at > 8
    report.restore()
    assert everything(model) == before


@pytest.mark.parametrize("where", ["warm-up", "capture"])
def test_an_exception_while_graphs_are_captured(monkeypatch, where):
    """Also the next call finds torch's allocator in order."""

    class Fails(measure.GraphTimer):
        def __init__(self, call, *arguments):
            def failing(i):
                if (where == "capture") == torch.cuda.is_current_stream_capturing():
                    raise KeyboardInterrupt
                return call(i)

            super().__init__(failing, *arguments)

    model, x = shaken(Stem(nn.Identity())).cuda(), torch.randn(IMAGE, device="cuda")
    before = everything(model)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(measure, "GraphTimer", Fails)
        fusewise.optimize(model, x)
    assert everything(model) == before
    _, report = fusewise.optimize(model, x)
    assert everything(model) == before and "gpu" in report.rows[0].us
