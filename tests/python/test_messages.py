"""One mistake, one message: from C++, in eager mode, while tracing, and under torch.compile."""

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import autoencoder_reference
import batch_norm_excite_reference
import fusewise
import linear_reference
import reference
from fusewise.functional import (
    batch_norm_act,
    batch_norm_excite,
    li_conv,
    linear_act,
    mlp,
    squeeze_excite,
)
from fusewise.models._autoencoder import autoencoder


def excitation(**changes):
    case = reference.make_case((2, 6, 4, 5), 3)
    named = dict(
        zip(("x", "w1", "b1", "w2", "b2", "activation", "gate"), case.arguments, strict=True)
    )
    return squeeze_excite, named, changes


def chain(**changes):
    case = batch_norm_excite_reference.make_case((2, 6, 4, 5), 3)
    tensors = {name: getattr(case, name) for name in case.names}
    statistics = {name: getattr(case, name) for name in ("running_mean", "running_var")}
    return batch_norm_excite, {**tensors, **statistics, **case.options}, changes


def norm(**changes):
    named = {"x": zeros(2, 6, 4, 5), "running_mean": zeros(6), "running_var": zeros(6)}
    return batch_norm_act, named, {"training": True, **changes}


def model(**changes):
    case = autoencoder_reference.make_case(2, autoencoder_reference.SMALL)
    named = dict(zip(autoencoder_reference.NAMES, case.inputs, strict=True))

    def call(output="reconstruction", **tensors):
        return autoencoder(*tensors.values(), output=output)

    return call, named, changes


def layer(**changes):
    case = linear_reference.make_case((2, 3), 6, 4)
    named = dict(zip(("x", "w", "b", "activation"), case.arguments, strict=True))
    return linear_act, named, changes


def stack(i=None, **changes):
    """With a change in layer i."""
    case = linear_reference.make_mlp_case((3,), (6, 5, 4))
    names = ("x", "weights", "biases", "activation", "final_activation")
    named = dict(zip(names, case.arguments, strict=True))
    if i is not None:
        changes = {
            name: [*named[name][:i], tensor, *named[name][i + 1 :]]
            for name, tensor in changes.items()
        }
    return mlp, named, changes


def streams(i=None, first=False, **changes):
    """With a change in stream i."""
    named = {
        "x": [zeros(2, 3, 5, 4), zeros(2, 1, 5, 4)] if first else zeros(3, 2, 6, 5, 4),
        "weights": [zeros(4, 3 if first else 6, 3, 3), zeros(4, 1 if first else 6, 3, 3)],
        "mix": [zeros(4, 4), zeros(4, 4, 1, 1)],
        "previous": None if first else zeros(4, 6),
        "stride": 2,
        "padding": 1,
    }
    if i is not None:
        changes = {
            name: [*named[name][:i], tensor, *named[name][i + 1 :]]
            for name, tensor in changes.items()
        }
    return li_conv, named, changes


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


ACTIVATIONS = "'identity', 'relu', 'gelu', 'gelu_tanh' or 'silu'"
MISTAKES = {
    "x: expected [N, C, H, W], got [2, 6, 4]": lambda: excitation(x=zeros(2, 6, 4)),
    "x: expected [N, C, H, W] with C, H and W >= 1, got [2, 0, 4, 5]": lambda: excitation(
        x=zeros(2, 0, 4, 5)
    ),
    "x: expected [N, C, H, W] with C, H and W >= 1, got [2, 6, 4, 0]": lambda: excitation(
        x=zeros(2, 6, 4, 0)
    ),
    "x: expected a floating dtype, got int64": lambda: excitation(
        x=zeros(2, 6, 4, 5, dtype=torch.int64)
    ),
    "w2: expected a floating dtype, got complex64": lambda: excitation(
        w2=zeros(6, 3, dtype=torch.complex64)
    ),
    "w1: expected [R, 6] or [R, 6, 1, 1], got [3, 5]": lambda: excitation(w1=zeros(3, 5)),
    "w1: expected [R, 6] or [R, 6, 1, 1], got [3, 6, 1]": lambda: excitation(w1=zeros(3, 6, 1)),
    "w1: expected [R, 6] or [R, 6, 1, 1] with R >= 1, got [0, 6]": lambda: excitation(
        w1=zeros(0, 6)
    ),
    "w1: expected x's dtype float32, got float16": lambda: excitation(
        w1=zeros(3, 6, dtype=torch.float16)
    ),
    "w1: expected x's dtype float16, or float32, got float64": lambda: excitation(
        x=zeros(2, 6, 4, 5, dtype=torch.float16), w1=zeros(3, 6, dtype=torch.float64)
    ),
    "b1: expected [3], got [4]": lambda: excitation(b1=zeros(4)),
    "b2: expected w1's dtype float32, got float64": lambda: excitation(
        b2=zeros(6, dtype=torch.float64)
    ),
    "w2: expected [6, 3] or [6, 3, 1, 1], got [3, 6]": lambda: excitation(w2=zeros(3, 6)),
    "activation: expected 'silu', 'relu' or 'hardswish', got 'gelu'": lambda: excitation(
        activation="gelu"
    ),
    "gate: expected 'sigmoid' or 'hardsigmoid', got 'tanh'": lambda: excitation(gate="tanh"),
    "x: expected [N, C, H, W], got [2, 6, 4, 5, 1]": lambda: chain(x=zeros(2, 6, 4, 5, 1)),
    "running_mean: expected [6], got [3]": lambda: chain(running_mean=zeros(3)),
    "running_var: expected running_mean's dtype float32, got float64": lambda: chain(
        running_var=zeros(6, dtype=torch.double)
    ),
    "bias: expected [6], got [6, 1]": lambda: chain(bias=zeros(6, 1)),
    "w1: expected [R, 6] or [R, 6, 1, 1], got [6]": lambda: chain(w1=zeros(6)),
    "w2: expected [6, 3] or [6, 3, 1, 1], got [6, 4]": lambda: chain(w2=zeros(6, 4)),
    "b2: expected running_mean's dtype float32, got float16": lambda: chain(
        b2=zeros(6, dtype=torch.half)
    ),
    "num_batches_tracked: expected dtype int64, got float32": lambda: chain(
        num_batches_tracked=zeros()
    ),
    "running_mean: expected memory that no other tensor of the call uses, got memory that overlaps "
    "running_var": lambda: chain(**dict.fromkeys(("running_mean", "running_var"), zeros(6))),
    "activation: expected 'identity', 'relu', 'relu6', 'silu' or 'hardswish', got 'gelu'": (
        lambda: chain(activation="gelu")
    ),
    "hidden_activation: expected 'silu', 'relu' or 'hardswish', got 'gelu'": lambda: chain(
        hidden_activation="gelu"
    ),
    "x: expected [..., K], got []": lambda: layer(x=zeros()),
    "x: expected a floating dtype, got int32": lambda: layer(x=zeros(3, 6, dtype=torch.int32)),
    "x: expected a floating dtype, got uint8": lambda: layer(x=zeros(3, 6, dtype=torch.uint8)),
    "w: expected [N, 6], got [4, 5]": lambda: layer(w=zeros(4, 5)),
    "w: expected [N, 6], got [6]": lambda: layer(w=zeros(6)),
    "w: expected [N, 5], got [4, 6]": lambda: layer(x=zeros(2, 2, 2, 2, 2, 2, 5)),
    "w: expected at most 6 dimensions, got 7": lambda: layer(w=zeros(1, 1, 1, 1, 1, 1, 1)),
    "w: expected x's dtype float32, got float64": lambda: layer(w=zeros(4, 6, dtype=torch.double)),
    "b: expected [4], got [6]": lambda: layer(b=zeros(6)),
    "b: expected x's dtype float16, got bfloat16": lambda: layer(
        x=zeros(3, 6, dtype=torch.half), b=zeros(4, dtype=torch.bfloat16)
    ),
    f"activation: expected {ACTIVATIONS}, got 'tanh'": lambda: layer(activation="tanh"),
    "layer 0: x: expected [..., K], got []": lambda: stack(x=zeros()),
    "layer 0: x: expected a floating dtype, got bool": lambda: stack(
        x=zeros(3, 6, dtype=torch.bool)
    ),
    "layer 0: w: expected [N, 6], got [5, 7]": lambda: stack(0, weights=zeros(5, 7)),
    "layer 1: w: expected [N, 5], got [4, 6]": lambda: stack(1, weights=zeros(4, 6)),
    "layer 1: w: expected x's dtype float32, got float64": lambda: stack(
        1, weights=zeros(4, 5, dtype=torch.double)
    ),
    "layer 0: b: expected a floating dtype, got int64": lambda: stack(
        0, biases=zeros(5, dtype=torch.int64)
    ),
    "layer 1: b: expected [4], got [5]": lambda: stack(1, biases=zeros(5)),
    f"final_activation: expected {ACTIVATIONS}, got 'tanh'": lambda: stack(final_activation="tanh"),
    "x: expected 2 images, one per stream, got 1": lambda: streams(
        first=True, x=[zeros(2, 3, 5, 4)]
    ),
    "x: expected one tensor [3, N, C, H, W] beside previous, got 2": lambda: streams(
        x=[zeros(2, 6, 5, 4)] * 2
    ),
    "x: expected [3, N, C, H, W], got [2, 2, 6, 5, 4]": lambda: streams(x=zeros(2, 2, 6, 5, 4)),
    "stream 1: x: expected [N, C, H, W], got [2, 1, 5]": lambda: streams(
        1, first=True, x=zeros(2, 1, 5)
    ),
    "stream 0: x: expected [N, C, H, W] with C, H and W >= 1, got [2, 3, 0, 4]": lambda: streams(
        0, first=True, x=zeros(2, 3, 0, 4)
    ),
    "stream 1: x: expected [2, C, 5, 4], as stream 0, got [2, 1, 5, 3]": lambda: streams(
        1, first=True, x=zeros(2, 1, 5, 3)
    ),
    "stream 1: x: expected x's dtype float32, got float64": lambda: streams(
        1, first=True, x=zeros(2, 1, 5, 4, dtype=torch.double)
    ),
    "stream 0: w: expected [K, 6, R, R], got [4, 6, 3, 1]": lambda: streams(
        0, weights=zeros(4, 6, 3, 1)
    ),
    "stream 1: w: expected [4, 6, 3, 3], got [5, 6, 3, 3]": lambda: streams(
        1, weights=zeros(5, 6, 3, 3)
    ),
    "stream 1: w: expected a floating dtype, got int64": lambda: streams(
        1, weights=zeros(4, 6, 3, 3, dtype=torch.int64)
    ),
    "stream 0: mix: expected [D, 4], got [4, 3]": lambda: streams(0, mix=zeros(4, 3)),
    "stream 1: mix: expected [4, 4], got [3, 4]": lambda: streams(1, mix=zeros(3, 4)),
    "stream 0: mix: expected [4, 4], because all streams are packed into one tensor, got [5, 4]": (
        lambda: streams(mix=[zeros(5, 4)] * 2, previous=zeros(5, 6))
    ),
    "previous: expected [4, 6], got [4, 5]": lambda: streams(previous=zeros(4, 5)),
    "stride: expected at least 1, got 0": lambda: streams(stride=0),
    "padding: expected at least 0, got -1": lambda: streams(padding=-1),
    "padding: expected 1 for a kernel of 3 where m is given, got 0": lambda: streams(padding=0),
    "padding: expected less than the kernel's 3, got 3": lambda: streams(first=True, padding=3),
    "w: expected an odd kernel size where m is given, got 2": lambda: streams(
        weights=[zeros(4, 6, 2, 2)] * 2
    ),
    "x: expected H and W >= 3 for a kernel of 3 with padding 0, got [2, 3, 5, 2]": (
        lambda: streams(first=True, x=[zeros(2, 3, 5, 2), zeros(2, 1, 5, 2)], padding=0)
    ),
    "x: expected [N, 18] or [N, 3, 6], got [2, 17]": lambda: model(x=zeros(2, 17)),
    "x: expected [N, 18] or [N, 3, 6], got [2, 6, 3]": lambda: model(x=zeros(2, 6, 3)),
    "x: expected a floating dtype, got bool": lambda: model(x=zeros(2, 18, dtype=torch.bool)),
    "encoder_weight: expected [S, M], got [5]": lambda: model(encoder_weight=zeros(5)),
    "encoder_weight: expected [S, M] with S and M >= 1, got [0, 6]": lambda: model(
        encoder_weight=zeros(0, 6)
    ),
    "basis: expected [L, F * 5], got [4, 16]": lambda: model(basis=zeros(4, 16)),
    "mid_weight: expected [4, 4], got [4, 3]": lambda: model(mid_weight=zeros(4, 3)),
    "decoder_bias: expected norm_weight's dtype float32, got float16": lambda: model(
        decoder_bias=zeros(6, dtype=torch.float16)
    ),
    "norm_weight: expected x's dtype float32, got float64": lambda: model(
        norm_weight=zeros(6, dtype=torch.float64)
    ),
    "output: expected 'reconstruction', 'latent' or 'score', got 'loss'": lambda: model(
        output="loss"
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_one_mistake_has_one_message(message):
    function, named, changes = MISTAKES[message]()
    arguments = named | changes
    with pytest.raises(RuntimeError) as eager:
        function(**arguments)
    assert str(eager.value) == message
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError) as traced:
        function(**arguments)
    assert str(traced.value) == message
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    with pytest.raises(Exception, match="Error") as caught:
        compiled(**arguments)
    assert message in str(caught.value)
    with pytest.raises(RuntimeError) as transformed:
        torch.func.vmap(lambda _: function(**arguments), randomness="same")(torch.zeros(1))
    assert str(transformed.value) == message


WRONG_TYPES = {
    "w1: expected a tensor, got None": lambda: excitation(w1=None),
    "w: expected a tensor, got None": lambda: layer(w=None),
    "norm_bias: expected a tensor, got None": lambda: model(norm_bias=None),
    "gate: expected 'sigmoid' or 'hardsigmoid', got 3": lambda: excitation(gate=3),
    "running_var: expected a tensor or None, got float": lambda: norm(running_var=1.0),
    "training: expected True or False, got 'yes'": lambda: norm(training="yes"),
    "momentum: expected a number or None, got 'x'": lambda: norm(momentum="x"),
    "momentum: expected a number that is not negative, or None, got -0.5": lambda: norm(
        momentum=-0.5
    ),
    "eps: expected a number, got None": lambda: norm(eps=None),
    "training: expected True or False, got [1]": lambda: chain(training=[1]),
    "momentum: expected a number that is not negative, or None, got -1": lambda: chain(momentum=-1),
    "eps: expected a number, got '1e-5'": lambda: chain(eps="1e-5"),
    "stride: expected a whole number, got '2'": lambda: streams(stride="2"),
    "padding: expected a whole number, got 1.5": lambda: streams(padding=1.5),
}


@pytest.mark.parametrize("message", WRONG_TYPES)
@pytest.mark.parametrize("gradient", [False, True], ids=["no_grad", "grad"])
def test_an_argument_of_another_type_has_one_message(message, gradient):
    function, named, changes = WRONG_TYPES[message]()
    arguments = named | changes
    if gradient and isinstance(arguments["x"], torch.Tensor):
        arguments["x"].requires_grad_()

    def forced():
        with fusewise.implementation("torch"):
            function(**arguments)

    def transformed():
        torch.func.vmap(lambda _: function(**arguments), randomness="same")(torch.zeros(1))

    for way in (lambda: function(**arguments), forced, transformed):
        with pytest.raises((TypeError, ValueError)) as raised:
            way()
        assert str(raised.value) == message
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises((TypeError, ValueError)) as raised,
    ):
        function(**arguments)
    assert str(raised.value) == message
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    with pytest.raises(Exception, match="Error") as caught:
        compiled(**arguments)
    assert message.replace("'", "\\'") in str(caught.value) or message in str(caught.value)


def test_cpp_has_the_same_messages():
    """What the C++ tests expect of the core are messages of the list."""
    source = (Path(__file__).parents[1] / "cpp" / "test_messages.cpp").read_text()
    expected = re.findall(r'"(.*: expected .*)"', source)
    assert len(expected) >= 5
    assert set(expected) <= set(MISTAKES)


@pytest.mark.parametrize("make", [excitation, chain, layer, stack, model])
@pytest.mark.parametrize("rows", [1, 3])
def test_right_arguments_pass_everywhere(make, rows):
    function, named, _ = make()
    named["x"] = named["x"][:1].expand(rows, *named["x"].shape[1:])
    y = function(**named)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert function(**named).shape == y.shape
