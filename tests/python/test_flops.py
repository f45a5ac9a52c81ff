"""FlopCounterMode counts for every operator what it counts for the same model of torch's."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fusewise
from fusewise.bench.families.autoencoder import eager as eager_autoencoder
from fusewise.functional import batch_norm_excite, li_conv, linear_act, mlp, squeeze_excite
from fusewise.models._autoencoder import autoencoder
from linear_reference import eager, eager_mlp
from reference import eager as eager_squeeze_excite
from test_parts import PART, pair


def counts(function, inputs, needed):
    """Forward and backward, with gradients for the inputs of these places only."""
    inputs = [t.detach().requires_grad_(i in needed) for i, t in enumerate(inputs)]
    with FlopCounterMode(display=False) as forward:
        y = function(*inputs)
    with FlopCounterMode(display=False) as backward:
        if y.requires_grad:
            y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def every_choice(count):
    """None, all, each alone and all but each of so many inputs."""
    every = set(range(count))
    alone = [{i} for i in every]
    return [set(), every, *alone, *(every - one for one in alone)]


def draw(*shapes):
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("shape", ((5,), (2, 3), (0,)), ids=str)
def test_linear_act(shape):
    inputs = draw((*shape, 6), (4, 6), (4,))
    for needed in every_choice(3):
        expected = counts(eager, inputs, needed)
        assert counts(linear_act, inputs, needed) == expected
        assert expected[0] == 2 * inputs[0].numel() * 4


@pytest.mark.parametrize("biased", (True, False), ids=("bias", "no_bias"))
def test_mlp(biased):
    inputs = draw((5, 6), (7, 6), (4, 7), (3, 4), *[(7,), (4,), (3,)][: 3 * biased])

    def run(function):
        return lambda x, *rest: function(x, rest[:3], rest[3:] or None)

    for needed in every_choice(len(inputs)):
        expected = counts(run(eager_mlp), inputs, needed)
        assert counts(run(mlp), inputs, needed) == expected
        assert expected[0] == 2 * 5 * (42 + 28 + 12)


def eager_convolutions(x, w1, b1, w2, b2, *_):
    hidden = F.silu(F.conv2d(x.mean((2, 3), keepdim=True), w1, b1))
    return x * F.conv2d(hidden, w2, b2).sigmoid()


@pytest.mark.parametrize("convolutions", (False, True), ids=("2d", "4d"))
def test_squeeze_excite(convolutions):
    ones = (1, 1) if convolutions else ()
    inputs = draw((3, 6, 2, 5), (4, 6, *ones), (4,), (6, 4, *ones), (6,))
    theirs = eager_convolutions if convolutions else eager_squeeze_excite

    def run(function):
        return lambda *inputs: function(*inputs, "silu", "sigmoid")

    for needed in every_choice(5):
        expected = counts(run(theirs), inputs, needed)
        assert counts(run(squeeze_excite), inputs, needed) == expected
        assert expected[0] == 2 * 3 * 2 * 24


def test_batch_norm_excite():
    inputs = draw((3, 6, 2, 5), (6,), (6,), (4, 6, 1, 1), (4,), (6, 4, 1, 1), (6,))

    def ours(x, *parameters):
        return batch_norm_excite(x, None, None, *parameters, training=True)

    def theirs(x, weight, bias, *parameters):
        a = F.silu(F.batch_norm(x, None, None, weight, bias, training=True))
        return eager_convolutions(a, *parameters)

    for needed in every_choice(7):
        expected = counts(theirs, inputs, needed)
        assert counts(ours, inputs, needed) == expected, needed
        assert expected[0] == 2 * 3 * 2 * 24


@pytest.mark.parametrize("output", ("reconstruction", "latent", "score"))
@pytest.mark.parametrize("rows", ((5, 12), (5, 3, 4)), ids=str)
def test_autoencoder(output, rows):
    m, f, latent, s = 4, 3, 6, 5
    parameters = [(m,), (m,), (s, m), (s,), (latent, f * s), (latent,), (latent,)]
    inputs = draw(rows, *parameters, (latent, latent), (latent,), (m, s), (m,))

    def run(function):
        return lambda *inputs: function(*inputs, output=output)

    for needed in every_choice(12):
        assert counts(run(autoencoder), inputs, needed) == counts(
            run(eager_autoencoder), inputs, needed
        ), needed


@pytest.mark.parametrize("kind", PART)
def test_modules_run_their_operator_while_counted(kind):
    """The counter's own hooks, which are for all modules, watch and change nothing."""
    ours, theirs, x = pair(kind, "cpu")
    found = []
    for model in (ours, theirs):
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0
    with FlopCounterMode(display=False):
        assert "torch" not in {record.chosen for record in fusewise.explain(ours, x)}


@pytest.mark.parametrize("first", (True, False))
@pytest.mark.parametrize("stride", (1, 2))
def test_li_conv(first, stride):
    images = draw((2, 3, 7, 6), (2, 1, 7, 6)) if first else draw((3, 2, 3, 7, 6))
    channels, count = ((3, 1), 2) if first else ((3, 3), 1)
    weights = draw(*((4, c, 3, 3) for c in channels), *[(4, 4, 1, 1)] * 2)
    previous = [] if first else draw((4, 3, 1, 1))

    def ours(*t):
        x, own = list(t[:count]), t[count:]
        x = x if first else x[0]
        last = None if first else own[4]
        return li_conv(x, list(own[:2]), list(own[2:4]), last, stride=stride, padding=1)

    def plain(*t):
        x, own = t[:count] if first else t[0].unbind(), t[count:]
        u = [F.conv2d(image, w, None, stride, 1) for image, w in zip(x, own[:2], strict=False)]
        y = sum(F.conv2d(each, w) for each, w in zip(u, own[2:4], strict=True))
        y = y if first else y + F.conv2d(x[2], own[4], stride=stride)
        return torch.stack([*u, y])

    inputs = [*images, *weights, *previous]
    for needed in every_choice(len(inputs)):
        assert counts(ours, inputs, needed) == counts(plain, inputs, needed), needed


@pytest.mark.parametrize("integrated_only", (True, False))
@pytest.mark.parametrize("stride", (1, 2))
def test_li_block(stride, integrated_only):
    """As many as its layers have."""
    block = fusewise.nn.LIBottleneck(8, 2 * stride, 1, stride)
    x = torch.randn(2, 2, 8, 7, 6)
    parameters = list(block.parameters())
    for needed in every_choice(1 + len(parameters)):
        for i, parameter in enumerate(parameters, 1):
            parameter.requires_grad_(i in needed)

        def call(x):
            return block(x, None, integrated_only)

        found = counts(call, [x], needed)
        hook = block.conv1.register_forward_hook(lambda *_: None)
        assert found == counts(call, [x], needed), needed
        hook.remove()


@pytest.mark.parametrize("order", itertools.permutations(("fusewise", "torch.utils.flop_counter")))
def test_either_may_be_imported_first(run_python, order):
    run_python(
        f"""
        import {order[0]}
        import {order[1]}
        import torch, fusewise
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False) as counter:
            fusewise.functional.linear_act(torch.ones(2, 3), torch.ones(4, 3))
        assert counter.get_total_flops() == 2 * 2 * 3 * 4
        """
    )
