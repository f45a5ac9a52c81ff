"""BatchNorm + activation + Squeeze-and-Excitation: right numbers on every way."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewise
import reference
from batch_norm_excite_reference import leave_kinks, make_case
from batch_norm_reference import ACTIVATIONS
from fusewise.bench.accuracy import check
from fusewise.functional import batch_norm_act, batch_norm_excite, squeeze_excite
from reference import DTYPES, GATES, LAYOUTS, same_bits

HIDDEN = reference.ACTIVATIONS
FUNCTIONS = list(itertools.product(ACTIVATIONS, HIDDEN, GATES))
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
LAYOUT = pytest.mark.parametrize("layout", ["nchw", "channels_last"])


def functions(i):
    """Others for each i, all of them in turn."""
    names = ("activation", "hidden_activation", "gate")
    return dict(zip(names, FUNCTIONS[7 * i % len(FUNCTIONS)], strict=True))


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES)
def test_the_rule_sees_wrong_results(dtypes):
    cases = [((4, 16, 9, 8), activation) for activation, *_ in FUNCTIONS[::6]]
    cases += [((4, 72, 14, 14), "relu"), ((4, 72, 14, 14), "relu6")]
    for shape, activation in cases:
        case = make_case(shape, 8, "cpu", DTYPES[dtypes], activation=activation)
        ours, eager = case.results(), case.results(case.eager)
        assert check(ours, eager).passed
        for name, right in ours.outputs.items():
            one = right.clone().flatten()
            one[one.abs().argmax()] *= 1.1
            for wrong in (torch.zeros_like(right), right * 1.1, one.view(right.shape)):
                spoiled = ours._replace(outputs={**ours.outputs, name: wrong})
                assert not check(spoiled, eager).passed, name


@TRAINING
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(device, layout, dtypes, training):
    i = 9 * list(DTYPES).index(dtypes) + list(LAYOUTS).index(layout) + 30 * training
    make_case(
        (3, 10, 5, 4),
        8,
        device,
        DTYPES[dtypes],
        layout,
        dy_layout=list(LAYOUTS)[i * 5 % len(LAYOUTS)],
        training=training,
        **functions(i),
    ).check_every_implementation()


@pytest.mark.parametrize("activation, hidden_activation, gate", FUNCTIONS)
def test_every_function(device, activation, hidden_activation, gate):
    i = FUNCTIONS.index((activation, hidden_activation, gate))
    make_case(
        (4, 33, 7, 7),
        9,
        device,
        layout="channels_last" if i % 2 else "nchw",
        training=i % 3 > 0,
        activation=activation,
        hidden_activation=hidden_activation,
        gate=gate,
    ).check_every_implementation()


@TRAINING
@pytest.mark.parametrize("convolution", [False, True], ids=["matrix", "convolution"])
def test_absent_parameters(device, convolution, training):
    for i, absent in enumerate(itertools.product((True, False), repeat=4)):
        make_case(
            (3, 12, 4, 5),
            6,
            device,
            DTYPES[("fp32", "fp16", "bf16-fp32")[i % 3]],
            affine=absent[:2],
            biases=absent[2:],
            convolution=convolution,
            training=training,
            **functions(i),
        ).check_every_implementation()


@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16"])
@LAYOUT
def test_odd_sizes(device, layout, dtypes):
    sizes = [
        ((7, 1, 5, 3), 2, True),
        ((2, 3, 1, 1), 5, False),
        ((1, 1, 1, 1), 1, False),
        ((16, 65, 1, 1), 8, True),
        ((3, 65, 11, 13), 3, True),
        ((1, 65, 7, 2), 9, True),
        ((1, 8, 57, 49), 4, True),
        ((33, 16, 3, 3), 64, True),
        ((70, 3, 2, 9), 3, False),
    ]
    for i, (shape, reduced, training) in enumerate(sizes):
        case = make_case(
            shape, reduced, device, DTYPES[dtypes], layout, training=training, **functions(i)
        )
        case.check_every_implementation()


def test_float32_parameters_beside_half_data(device):
    """Larger than above: torch's error counts in the rule, and that of few values is chance."""
    for i, dtypes in enumerate(("fp16-fp32", "bf16-fp32", "fp16", "bf16")):
        for layout in ("nchw", "channels_last"):
            make_case(
                (4, 72, 14, 14), 24, device, DTYPES[dtypes], layout, **functions(i)
            ).check_every_implementation()


@pytest.mark.parametrize("convolution", [False, True], ids=["matrix", "convolution"])
def test_parameters_in_any_layout(device, convolution):
    case = make_case((2, 12, 5, 4), 5, device, convolution=convolution)
    dense = case.check().outputs
    case.w1 = case.w1.transpose(0, 1).contiguous().transpose(0, 1)
    case.w2 = torch.cat([case.w2, case.w2], 1)[:, ::2].copy_(case.w2)
    case.b1 = torch.stack([case.b1, case.b1], 1)[:, 0]
    case.weight = torch.stack([case.weight, case.weight], 1)[:, 1]
    assert not case.w1.is_contiguous() and not case.w2.is_contiguous()
    for name, value in case.check().outputs.items():
        assert torch.equal(value, dense[name]), name


@LAYOUT
def test_statistics_do_not_cancel(device, layout):
    """The sum of squares minus the square of the mean would leave nothing of these variances."""
    for *dtypes, mean, deviation in (
        (torch.float32, torch.float32, 1e4, 1e-2),
        (torch.float16, torch.float32, 1000.0, 1.0),
        (torch.float64, torch.float64, 1e8, 1e-2),
    ):
        case = make_case((4, 16, 24, 20), 8, device, dtypes, layout, mean=mean, deviation=deviation)
        assert case.check().outputs["y"].isfinite().all()


@TRAINING
def test_agrees_with_the_two_operators(device, training):
    for i, layout in enumerate(("nchw", "channels_last", "sliced")):
        case = make_case(
            (3, 20, 6, 7), 6, device, DTYPES["fp64"], layout, training=training, **functions(i)
        )
        excitation = {"activation": case.hidden_activation, "gate": case.gate}

        def parts(mean, var, x, weight, bias, excitation=excitation, case=case, **others):
            options = {"activation": case.activation, "training": training, "momentum": 0.3}
            a = batch_norm_act(x, mean, var, weight, bias, **options)
            return squeeze_excite(a, **others, **excitation)

        ours, theirs = (case.results(fn).outputs for fn in (None, parts))
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], msg=lambda m, name=name: f"{name}: {m}")


def test_results_do_not_depend_on_the_number_of_threads():
    case = make_case((5, 48, 33, 31), 12)
    many = case.results().outputs
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = case.results().outputs
    finally:
        torch.set_num_threads(before)
    for name, value in many.items():
        assert same_bits(value, one[name]), name


# --- gradients of every order -------------------------------------------------------------------


@TRAINING
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, training):
    """First and second order."""
    i = 2 * list(ACTIVATIONS).index(activation) + training
    case = make_case(
        (2, 3, 3, 2),
        2,
        dtypes=DTYPES["fp64"],
        layout=("nchw", "channels_last")[i % 2],
        training=training,
        affine=(i != 3, i != 4),
        biases=(i != 5, i != 6),
        **(functions(i) | {"activation": activation}),
    )
    tensors = {name: getattr(case, name) for name in case.names}
    names = [name for name, t in tensors.items() if t is not None]

    def ours(*given):
        statistics = (t.clone() for t in case.statistics)
        return case.ours(*statistics, **dict(zip(names, given, strict=True)))

    inputs = [tensors[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(ours, inputs)
    assert torch.autograd.gradgradcheck(ours, inputs)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_without_statistics_those_of_x_are_used(device, training):
    """In inference too, where nothing is counted. Their gradient is that of x."""
    case = make_case((3, 6, 4, 5), 4, device, DTYPES["fp64"])
    counter = torch.tensor(3, device=device)
    inputs = [t.requires_grad_() for t in (case.x, case.weight, case.bias, case.w1, case.w2)]
    x, weight, bias, w1, w2 = inputs
    y = batch_norm_excite(
        x, None, None, weight, bias, w1, None, w2, None,
        training=training, num_batches_tracked=counter,
    )  # fmt: skip
    a = F.silu(F.batch_norm(x, None, None, weight, bias, training=True))
    right = reference.eager(a, w1, None, w2, None)
    torch.testing.assert_close(y, right)
    gradients = [torch.autograd.grad(t.square().sum(), inputs) for t in (y, right)]
    torch.testing.assert_close(*gradients)
    assert counter == 3 + training


def test_a_second_backward_updates_no_statistics(device):
    case = make_case((3, 6, 4, 5), 4, device, DTYPES["fp64"])
    mean, var = (t.clone() for t in case.statistics)
    counter = torch.tensor(0, device=device)
    tensors = [getattr(case, name).requires_grad_() for name in case.names]
    y = batch_norm_excite(
        tensors[0], mean, var, *tensors[1:], training=True, num_batches_tracked=counter
    )
    after = [mean.clone(), var.clone()]
    found = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in found), tensors)
    assert counter == 1
    torch.testing.assert_close([mean, var], after, rtol=0, atol=0)


# --- running statistics and training ------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None, 0.0])
@pytest.mark.parametrize("implementation", ["", "torch"])
def test_statistics_of_five_steps(device, momentum, implementation):
    theirs = nn.BatchNorm2d(5, momentum=momentum, device=device)
    mean, var, counter = (t.clone() for t in theirs.buffers())
    w1, w2 = torch.randn(3, 5, device=device), torch.randn(5, 3, device=device)
    statistics = {"momentum": momentum, "num_batches_tracked": counter}
    for step in range(5):
        x = torch.randn(4, 5, 3, 3, device=device) * (step + 1) + step
        with fusewise.implementation(batch_norm_excite=implementation):
            y = batch_norm_excite(
                x, mean, var, None, None, w1, None, w2, None, training=True, **statistics
            )
        right = reference.eager(F.silu(theirs(x)), w1, None, w2, None)
        torch.testing.assert_close(y, right)
    for found, value in zip((mean, var, counter), theirs.buffers(), strict=True):
        torch.testing.assert_close(found, value)
    y = batch_norm_excite(x, mean, var, None, None, w1, None, w2, None, **statistics)
    torch.testing.assert_close(y, reference.eager(F.silu(theirs.eval()(x)), w1, None, w2, None))
    assert counter == 5


class Block(nn.Module):
    """A convolution, a norm, an activation, torchvision's excitation; all but the first may be
    one operator."""

    def __init__(self, activation, excitation, fused):
        super().__init__()
        self.convolution = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.activation, self.excitation, self.fused = activation, excitation, fused

    def forward(self, x):
        x, norm, excitation = self.convolution(x), self.norm, self.excitation
        if not self.fused:
            return excitation(ACTIVATIONS[self.activation](norm(x)))
        return batch_norm_excite(
            x,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            excitation.fc1.weight,
            excitation.fc1.bias,
            excitation.fc2.weight,
            excitation.fc2.bias,
            activation=self.activation,
            hidden_activation="silu" if self.activation == "silu" else "relu",
            gate="hardsigmoid" if self.activation == "hardswish" else "sigmoid",
            training=norm.training,
            num_batches_tracked=norm.num_batches_tracked if norm.training else None,
        )


@pytest.mark.parametrize("activation", ["silu", "relu", "hardswish"])
def test_five_training_steps_as_torchvisions_layers(device, activation):
    ops = pytest.importorskip("torchvision.ops")
    options = {
        "silu": {"activation": nn.SiLU},
        "relu": {},
        "hardswish": {"scale_activation": nn.Hardsigmoid},
    }[activation]
    models = []
    for fused in (True, False):
        torch.manual_seed(1)
        block = Block(activation, ops.SqueezeExcitation(12, 4, **options), fused)
        models.append(block.double().to(device))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    for _ in range(5):
        x = torch.randn(4, 3, 9, 8, dtype=torch.float64, device=device)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    ours, theirs = (model.eval() for model in models)
    torch.testing.assert_close(ours(x), theirs(x))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


# --- unusual values -----------------------------------------------------------------------------


def test_no_samples(device):
    case = make_case((0, 6, 4, 5), 3, device)
    outputs = case.check().outputs
    assert outputs["dx"].shape == (0, 6, 4, 5)
    assert all((outputs[f"d{name}"] == 0).all() for name in case.names[1:])
    assert same_bits(outputs["running_mean"], case.running_mean)
    counter = torch.tensor(2, device=device)
    inputs = (getattr(case, name) for name in case.names[1:])
    batch_norm_excite(case.x, None, None, *inputs, training=True, num_batches_tracked=counter)
    assert counter == 3


@LAYOUT
def test_a_channel_of_constants(device, layout):
    """Its variance is 0: only the bias is left."""
    dense = torch.randn(3, 6, 4, 5, device=device)
    dense[:, 2] = 7.25
    case = make_case((3, 6, 4, 5), 4, device)
    case.x = LAYOUTS[layout](dense)
    case.leave_hidden_kinks()
    y = case.check().outputs["y"]
    assert y.isfinite().all()
    one = F.silu(case.bias[2])
    assert ((y[:, 2] / one).amax((-2, -1)) - (y[:, 2] / one).amin((-2, -1)) < 1e-5).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@TRAINING
def test_a_bad_value_spreads_as_in_torch(device, training, value):
    """In training over all samples, whose gates depend on every channel; in inference over one."""
    for i, layout in enumerate(("nchw", "channels_last")):
        case = make_case((3, 16, 4, 4), 4, device, layout=layout, training=training, **functions(i))
        case.x[1, 5, 2, 2] = value
        ours, eager = case.results().outputs, case.results(case.eager).outputs
        for name, right in eager.items():
            assert ours[name].isnan().equal(right.isnan()), name
        if not training:
            assert ours["y"][[0, 2]].isfinite().all()


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinity_times_nothing(device, layout, activation, closed):
    """If no unit of the hidden layer is open, the pooled values have gradients of 0, and an
    infinite x times that is no reason for NaN."""
    case = make_case(
        (3, 16, 7, 5),
        1,
        device,
        layout=layout,
        activation=activation,
        hidden_activation="relu",
        training=False,
    )
    case.w1.fill_(-1.0 if closed else 1.0)
    for value in (torch.inf, -torch.inf):
        case.x[1, 5, 2, 2] = case.x[2, 4, 3, 3] = value
        ours, eager = case.results().outputs, case.results(case.eager).outputs
        for name, right in eager.items():
            torch.testing.assert_close(ours[name], right, equal_nan=True, rtol=1e-3, atol=1e-3)


def test_the_gradient_at_kinks_is_torchs(device):
    """relu is closed at 0, relu6 at 6, hardswish has slope 0 at -3 and 1 at 3."""
    values = {"relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}
    for activation, kinks in values.items():
        x = torch.tensor([*kinks, -4.0, -1.0, 1.0, 4.0], device=device).repeat(2, 3, 4, 1)
        statistics = torch.zeros(3, device=device), torch.ones(3, device=device)
        case = make_case((2, 3, 4, x.shape[-1]), 2, device, activation=activation)
        found = []
        for fn in (batch_norm_excite, None):
            t = x.clone().requires_grad_()
            if fn:
                parameters = (None, None, case.w1, case.b1, case.w2, case.b2)
                y = fn(t, *statistics, *parameters, activation=activation, eps=0.0)
            else:
                a = ACTIVATIONS[activation](t)
                y = reference.eager(a, case.w1, case.b1, case.w2, case.b2)
            found.append(torch.autograd.grad(y.square().sum(), t)[0])
        torch.testing.assert_close(*found)
        closed = found[0][..., : len(kinks)] == 0
        assert closed[..., 0].all() and (closed[..., 1:].all() or activation == "hardswish")


def test_saved_holds_statistics_pooled_hidden_and_gates(device):
    case = make_case((3, 6, 4, 5), 2, device)
    tensors = [getattr(case, name) for name in case.names]
    operator = torch.ops.fusewise._batch_norm_excite.default
    numbers = ("silu", "silu", "sigmoid", True, 0.1, 1e-5)
    mean, var = (t.clone() for t in case.statistics)
    _, saved = operator(tensors[0], mean, var, *tensors[1:], None, *numbers, True, "")
    mean, variance = case.x.mean((0, 2, 3)), case.x.var((0, 2, 3), correction=0)
    v = F.batch_norm(case.x, None, None, case.weight, case.bias, training=True)
    pooled = F.silu(v).mean((2, 3))
    hidden = F.linear(pooled, case.w1, case.b1)
    gates = F.linear(F.silu(hidden), case.w2, case.b2).sigmoid()
    right = [mean, (variance + 1e-5).rsqrt(), pooled, hidden, gates]
    torch.testing.assert_close(saved, torch.cat([t.flatten() for t in right]))
    without = operator(tensors[0], None, None, *tensors[1:], None, *numbers, False, "")
    assert without[1].numel() == 0


def test_cases_keep_away_from_kinks():
    """What the tests above take for granted."""
    for i in range(0, len(FUNCTIONS), 4):
        case = make_case((4, 16, 9, 8), 8, "cpu", DTYPES["bf16"], "expanded", **functions(i))
        assert not case.near_kinks().any()
    case = make_case((4, 16, 9, 8), 8, "cpu", DTYPES["bf16"], activation="relu6")
    case.bias.zero_()
    case.x[:, 0] = case.x[:, 0].double().mean()
    assert case.near_kinks()[:, 0].all()
    leave_kinks(case, case.x, lambda: torch.randn_like(case.x), lambda t: t)
    assert not case.near_kinks().any()
