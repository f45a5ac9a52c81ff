"""fusewise.graphed without a GPU: what it refuses, and everything around the graphs.

`replays` stands for the graphs: like torch's, it has memory of its own for inputs, outputs and
gradients, which every replay overwrites. tests/gpu has the graphs themselves.
"""

import copy
import gc
import importlib
import pickle
import weakref

import pytest
import torch
from torch import nn

import fusewise
from fusewise._capturing import without_garbage_collection

module = importlib.import_module("fusewise.graphed")


def model():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5))


def test_no_gpu():
    said = r"^graphed: expected CUDA tensors, got cpu \(inputs\[0\]\); CUDA graphs need a GPU: "
    with pytest.raises(RuntimeError, match=said):
        fusewise.graphed(model(), torch.randn(2, 2, 5, 5))


@pytest.mark.parametrize(
    "arguments, keywords, said",
    [
        ((len, torch.ones(1)), {}, "model: expected a torch.nn.Module, got builtin_function_or_"),
        ((nn.ReLU(),), {}, "expected the inputs of a call after the model, got none"),
        ((nn.ReLU(), [1]), {}, r"inputs\[0\]: expected a tensor, got list"),
        ((nn.ReLU(), torch.ones(1), None), {}, r"inputs\[1\]: expected a tensor, got NoneType"),
        ((nn.ReLU(), torch.ones(1)), {"mask": 3}, "mask: expected a tensor, got int"),
    ],
)
def test_mistakes(arguments, keywords, said):
    with pytest.raises(TypeError, match=f"^graphed: {said}"):
        fusewise.graphed(*arguments, **keywords)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_the_tensor_that_is_elsewhere_is_named(place):
    with pytest.raises(RuntimeError, match=rf"got {place} \(0.weight\); CUDA graphs need a GPU"):
        module._require_cuda(nn.Sequential(nn.Linear(3, 2, device=place)), {})


@pytest.mark.parametrize("enabled", [True, False])
def test_without_garbage_collection(enabled):
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        cycle = [nn.ReLU()]
        cycle.append(cycle)
        kept = weakref.ref(cycle[0])
        del cycle
        with without_garbage_collection():
            assert kept() is None and not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


@pytest.fixture
def replays(monkeypatch):
    """Calls in place of graphs. The list has an entry per replay of forward and of backward."""
    log = []

    def capture(call, samples):
        parameters = tuple(call.parameters())
        # The replay of a graph runs no hooks of the parameters, which these stand for.
        stand_ins = {
            n: p.detach().requires_grad_(p.requires_grad) for n, p in call.named_parameters()
        }
        inputs_of_backward = (*samples, *stand_ins.values())
        wanted = [t for t in inputs_of_backward if t.requires_grad]
        memory = {}

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                with torch.no_grad():
                    for static, t in zip(samples, inputs, strict=False):
                        static.copy_(t)
                with torch.enable_grad():
                    memory["y"] = torch.func.functional_call(call, stand_ins, tuple(samples))
                memory.setdefault("out", memory["y"].detach().clone()).copy_(memory["y"].detach())
                for slope in memory.get("slopes", ()):  # forward has its intermediates there
                    slope.fill_(float("nan"))
                log.append("forward")
                return memory["out"].detach()

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, dy):
                found = torch.autograd.grad(memory["y"], wanted, dy)
                static = memory.setdefault("slopes", [t.clone() for t in found])
                for one, t in zip(static, found, strict=True):
                    one.copy_(t)
                log.append("backward")
                slopes = dict(zip(wanted, static, strict=True))
                return tuple(
                    slopes[t].detach() if t in slopes else None for t in inputs_of_backward
                )

        call(*samples)  # the warm-up changes statistics and random numbers
        return lambda *inputs: Replay.apply(*inputs, *parameters)

    monkeypatch.setattr(module, "_require_cuda", lambda *_: None)
    monkeypatch.setattr(module, "_capture", capture)
    return log


def test_nothing_has_changed_after_the_capture(replays):
    plain = model()
    before = copy.deepcopy(plain.state_dict())
    x, kept = torch.randn(4, 2, 5, 5), torch.get_rng_state()
    right = x.clone()
    fusewise.graphed(plain, x)
    assert torch.equal(torch.get_rng_state(), kept) and torch.equal(x, right)
    assert all(p.grad is None for p in plain.parameters())
    for name, t in plain.state_dict().items():
        assert torch.equal(t, before[name]), name


def test_training_is_as_without_graphs(replays):
    plain = model()
    other = copy.deepcopy(plain)
    ours = fusewise.graphed(other, torch.randn(4, 2, 5, 5))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (plain, ours)]
    for seed in range(3):
        x = torch.randn(4, 2, 5, 5, requires_grad=False)
        for m, optimizer in zip((plain, ours), optimizers, strict=True):
            torch.manual_seed(seed)
            loss = m(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert replays == ["forward", "backward"] * 3
    for name, t in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], t)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up(replays, set_to_none):
    """Autograd keeps a gradient without a copy, and a replay writes into the same memory."""
    plain = nn.Linear(3, 2)
    ours = fusewise.graphed(copy.deepcopy(plain), torch.randn(4, 3))
    for _ in range(2):
        for _ in range(3):
            x = torch.randn(4, 3)
            for m in (plain, ours):
                m(x).square().sum().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
        plain.zero_grad(set_to_none), ours.zero_grad(set_to_none)


def test_gradients_add_up_to_those_from_outside(replays):
    """In the first backward a penalty reaches the weights too, and one is frozen."""
    plain = nn.Linear(3, 2)
    ours = fusewise.graphed(copy.deepcopy(plain), torch.randn(4, 3))
    for m in (plain, ours):
        m.bias.requires_grad_(False)
    for step in range(4):
        x = torch.randn(4, 3)
        for m in (plain, ours):
            penalty = m.weight.square().sum() if step == 0 else 0
            (m(x).square().sum() + penalty).backward()
            if step == 0:
                m.zero_grad()
                m.bias.requires_grad_(True)
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def test_gradients_of_inputs_are_the_callers(replays):
    ours = fusewise.graphed(nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True))
    first, second = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    ours(first).sum().backward()
    kept = first.grad.clone()
    (5 * ours(second)).sum().backward()
    torch.testing.assert_close(first.grad, kept)
    torch.testing.assert_close(second.grad, 5 * kept)


def test_outputs_are_the_callers(replays):
    ours = fusewise.graphed(nn.Linear(3, 2), torch.randn(4, 3))
    first = ours(torch.randn(4, 3))
    kept = first.detach().clone()
    second = ours(torch.randn(4, 3))
    assert torch.equal(first, kept) and not torch.equal(first, second)
    with pytest.raises(RuntimeError, match="^graphed: this is the backward of a call whose memory"):
        first.sum().backward()
    second.sum().backward()


def test_inputs_with_gradients_and_names(replays):
    class Scaled(nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    x, scale = torch.randn(3, requires_grad=True), torch.randn(3)
    ours = fusewise.graphed(Scaled(), x, scale=scale)
    x = torch.randn(3, requires_grad=True)
    ours(x, scale=2 * scale).sum().backward()
    torch.testing.assert_close(x.grad, 2 * scale)
    for inputs, keywords, said in (
        ((x,), {}, r"expected inputs\[0\], scale as captured, got inputs\[0\]"),
        ((x, scale), {}, r"got inputs\[0\], inputs\[1\]"),
        ((), {"x": x, "scale": scale}, r"got x, scale"),
        ((x,), {"scale": 1.0}, "scale: expected a tensor, got float"),
        ((), {}, "got nothing"),
    ):
        with pytest.raises(TypeError, match=said):
            ours(*inputs, **keywords)
    with pytest.raises(RuntimeError, match="^graphed: scale: expected no requires_grad as capt"):
        ours(x, scale=scale.requires_grad_())


@pytest.mark.parametrize(
    "x, said",
    [
        (torch.ones(5, 3), r"shape \[4, 3\] as captured, got \[5, 3\]"),
        (torch.ones(4, 3, 1), r"shape \[4, 3\] as captured, got \[4, 3, 1\]"),
        (torch.ones(4, 3).double(), "dtype torch.float32 as captured, got torch.float64"),
        (torch.ones(4, 3, device="meta"), "device cpu as captured, got meta"),
    ],
)
def test_inputs_that_do_not_fit(replays, x, said):
    ours = fusewise.graphed(nn.Linear(3, 2), torch.ones(4, 3))
    with pytest.raises(RuntimeError, match=rf"^graphed: inputs\[0\]: expected {said}; "):
        ours(x)
    assert not replays


def test_strides_may_differ(replays):
    ours = fusewise.graphed(nn.Linear(3, 2), torch.ones(4, 3))
    x = torch.randn(3, 4).T
    torch.testing.assert_close(ours(x), ours.module(x))


@pytest.mark.parametrize("training", [True, False])
def test_the_other_mode_runs_without_a_graph(replays, training):
    plain = model().train(training)
    ours = fusewise.graphed(plain, torch.randn(4, 2, 5, 5))
    assert ours.training == training
    ours.train(not training)
    assert plain.training != training
    assert ours(torch.randn(3, 2, 6, 6)).shape == (3, 3, 4, 4)
    assert not replays
    ours.train(training)
    ours(torch.randn(4, 2, 5, 5))
    assert replays == ["forward"]


def test_state_that_does_not_fit(replays):
    x = torch.randn(4, 2, 5, 5)
    ours = fusewise.graphed(model(), x)
    ours.module[1].eval()
    with pytest.raises(RuntimeError, match="^graphed: a BatchNorm2d in the model is in eval mode"):
        ours(x)
    ours.train()
    torch.set_autocast_enabled("cuda", True)
    try:
        with pytest.raises(RuntimeError, match="^graphed: expected no autocast as captured, got a"):
            ours(x)
    finally:
        torch.set_autocast_enabled("cuda", False)
    ours(x)
    ours.module[1].running_mean = torch.zeros(3)
    with pytest.raises(RuntimeError, match="^graphed: 1.running_mean: expected the tensor that wa"):
        ours(x)
    ours = fusewise.graphed(model(), x)
    ours.double()
    with pytest.raises(RuntimeError, match="^graphed: 0.weight: .*call .to.. and the like before"):
        ours(x)


def test_gradients_that_were_not_captured(replays):
    x = torch.randn(4, 2, 5, 5)
    frozen = model()
    frozen[0].weight.requires_grad_(False)
    ours = fusewise.graphed(frozen, x)
    ours(x).sum().backward()
    first = ours.module[0]
    assert first.weight.grad is None and first.bias.grad is not None
    first.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="^graphed: 0.weight: needs a gradient, but was captur"):
        ours(x)
    with torch.no_grad():
        ours = fusewise.graphed(model(), x)
        assert not ours(x).requires_grad
    with pytest.raises(RuntimeError, match=r"capture again with gradients, or call under torch.no"):
        ours(x)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="capture under torch.no_grad"):
        fusewise.graphed(model(), x)


def test_a_forward_that_replaces_a_buffer(replays):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps = self.steps + 1
            return x * self.steps

    plain = Counts()
    steps = plain.steps
    with pytest.raises(RuntimeError, match="^graphed: steps: the model's forward replaces this"):
        fusewise.graphed(plain, torch.ones(2))
    assert plain.steps is steps and steps == 0


def test_names_and_state(replays):
    plain = model()
    ours = fusewise.graphed(plain, torch.randn(4, 2, 5, 5))
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    assert list(ours.parameters()) == list(plain.parameters())
    assert dict(ours.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert ours.module is plain and ours.get_submodule("0") is plain[0]
    other = model()
    ours.load_state_dict(other.state_dict())
    other.load_state_dict(ours.state_dict())
    assert torch.equal(plain[0].weight, other[0].weight)
    # As a part of another module.
    whole, right = nn.Sequential(ours), nn.Sequential(other)
    assert list(whole.state_dict()) == list(right.state_dict())
    found = [name for name, _ in whole.named_parameters()]
    assert found == [name for name, _ in right.named_parameters()]
    nn.init.ones_(other[0].weight)
    whole.load_state_dict(right.state_dict())
    assert plain[0].weight.eq(1).all()
    with pytest.raises(RuntimeError, match="Missing key"):
        whole.load_state_dict({})
    with pytest.raises(AttributeError, match="no attribute 'fc'"):
        ours.fc  # noqa: B018


@pytest.mark.parametrize("work", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies(replays, work):
    ours = fusewise.graphed(nn.Linear(3, 2), torch.ones(4, 3))
    with pytest.raises(TypeError, match="^graphed: a captured graph cannot be copied or pickled"):
        work(ours)
    work(ours.module)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_data_parallel(replays, tmp_path):
    """Around the result it works; the model itself may not be wrapped yet."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        plain, x = nn.Linear(3, 2), torch.randn(4, 3)
        ours = fusewise.graphed(copy.deepcopy(plain), x)
        parallel = nn.parallel.DistributedDataParallel(ours)
        for _ in range(3):
            x = torch.randn(4, 3)
            for m in (plain, parallel):
                m(x).square().sum().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
        assert replays == ["forward", "backward"] * 3
        with pytest.raises(TypeError, match="^graphed: model: got a DistributedDataParallel; "):
            fusewise.graphed(nn.parallel.DistributedDataParallel(nn.Linear(3, 2)), x)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "error, said",
    [
        (
            "CUDA error: operation not permitted when stream is capturing\nmore",
            "cannot capture, such as",
        ),
        ("something else", "^something else$"),
    ],
)
def test_errors_of_the_capture_are_translated(monkeypatch, error, said):
    def fail(*_, **__):
        raise RuntimeError(error)

    class Device:
        def __init__(self, _):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "stream", Device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(module, "_warm_up", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    with pytest.raises(RuntimeError, match=said) as caught:
        module._capture(module._Call(nn.ReLU(), ()), [torch.ones(1)])
    assert "\n" not in str(caught.value)


def test_a_linet_whose_blanked_samples_change(replays):
    plain = fusewise.models.li_resnet18((3, 1), num_classes=5, width=0.125).double()
    before = copy.deepcopy(plain.state_dict())

    def draw():
        streams = [torch.randn(4, c, 33, 36, dtype=torch.float64) for c in (3, 1)]
        return streams, torch.rand(2, 4) < 0.4

    other = copy.deepcopy(plain)
    streams, blanked = draw()
    ours = fusewise.graphed(other, *streams, blanked=blanked)
    for name, t in ours.state_dict().items():
        assert torch.equal(t, before[name]), name
    for _ in range(2):
        streams, blanked = draw()
        for m in (plain, ours):
            m(*streams, blanked=blanked).square().sum().backward()
    assert replays == ["forward", "backward"] * 2
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()))
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(*streams), plain(*streams))
    assert ours.forward_stream(1, streams[1]).shape == (4, 64)


def test_a_capture_leaves_no_hooks_behind(replays):
    plain = nn.Linear(3, 2)
    for _ in range(2):
        ours = fusewise.graphed(plain, torch.randn(4, 3))
        ours(torch.randn(4, 3)).sum().backward()
        assert len(plain.weight._backward_hooks) == 1
        del ours
        gc.collect()
        assert not plain.weight._backward_hooks


def test_captures_in_two_threads_leave_the_garbage_collector_on():
    with without_garbage_collection():
        with without_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
