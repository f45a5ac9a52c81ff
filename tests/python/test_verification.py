"""What the benchmark and the tests take for right: whatever is plainly wrong must fail, in every
output and gradient of every family."""

import pytest
import torch

import autoencoder_reference
import linear_reference
import reference
from fusewise.bench import accuracy
from fusewise.bench.accuracy import Results
from fusewise.bench.baselines import OURS, caller
from fusewise.bench.families import FAMILIES, autoencoder, linear_stack
from fusewise.bench.families.family import BOTH, DTYPES, TF32, Case
from fusewise.bench.verify import Verification


def _changed(t, place, value):
    flat = t.detach().clone().flatten()
    flat[place] = value
    return flat.reshape(t.shape)


def _largest_is_zero(t):
    return _changed(t, t.abs().argmax(), 0)


def _typical_has_the_other_sign(t):
    """Of the size of the root of the mean square."""
    size = t.double().abs()
    place = (size - size.square().mean().sqrt()).abs().argmin()
    return _changed(t, place, -t.flatten()[place])


WRONG = {
    "zeros": torch.zeros_like,
    "a tenth too large": lambda t: t * 1.1,
    "the largest is zero": _largest_is_zero,
    "a typical one has the other sign": _typical_has_the_other_sign,
}

# Small, but not so small that torch itself is far off: its error counts twice in the rule.
CASES = {
    "squeeze_excite": [((3, 65, 7, 5), {"reduced": 9})],
    "batch_norm_excite": [
        (
            (3, 65, 7, 5),
            {"reduced": 16, "activation": kind, "hidden_activation": hidden, "gate": gate},
        )
        for kind, hidden, gate in (
            ("silu", "silu", "sigmoid"),
            ("hardswish", "relu", "hardsigmoid"),
            ("relu", "relu", "sigmoid"),
            ("identity", "relu", "sigmoid"),
            ("relu6", "hardswish", "sigmoid"),
        )
    ],
    "linear_act": [((33, 65, 31), {"activation": kind}) for kind in linear_stack.ACTIVATIONS],
    "mlp": [((64, 33, 48, 17), {"activation": kind}) for kind in linear_stack.ACTIVATIONS],
    "autoencoder": [
        ((37, 5, 64), {"latent": 32, "slice_latent": 64, "output": output})
        for output in ("reconstruction", "score", *autoencoder.LOSSES)
    ],
}


def verified(family, shape, extra, dtype):
    """For every mode: what ours gives, and what torch gives."""
    case = Case(family, "case", shape, dtype, extra=extra)
    family = FAMILIES[family]
    workload = family.build(case, "cpu", 1)
    verification = Verification(family, case, workload)
    for mode in family.modes(case):
        call = caller(workload.functions[OURS], workload, mode)
        yield verification.results(call, mode), verification.eager(mode)


@pytest.mark.parametrize("dtype", (*DTYPES, TF32))
@pytest.mark.parametrize(
    "family, shape, extra",
    [(family, *case) for family, cases in CASES.items() for case in cases],
    ids=lambda value: next(iter(reversed(value.values()))) if isinstance(value, dict) else None,
)
def test_the_benchmark_refuses_wrong_results(family, shape, extra, dtype):
    """TF32 is a rule of its own, here on float32 results."""
    for ours, eager in verified(family, shape, extra, dtype):
        found = accuracy.check(ours, eager)
        assert found.passed, found
        for name, output in ours.outputs.items():
            for kind, wrong in WRONG.items():
                spoiled = Results({name: wrong(output)}, ours.expected)
                assert not accuracy.check(spoiled, eager).passed, f"{name}: {kind}"


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_long_sums_of_halves_hide_nothing(activation):
    """Of a thousand terms: neither their sum nor relu's kinks make room for a wrong result."""
    extra = {"activation": activation}
    *_, (ours, eager) = verified("linear_act", (512, 1024, 1024), extra, "bfloat16")
    assert accuracy.check(ours, eager).passed
    for name, output in ours.outputs.items():
        for wrong in (*WRONG.values(), lambda t: t / 2, lambda t: t * 1.05):
            spoiled = Results({name: wrong(output)}, ours.expected)
            assert not accuracy.check(spoiled, eager).passed, name


# --- relu's decisions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, shape, name", [("linear_act", (33, 65, 31), "y"), ("mlp", (64, 33, 48, 17), "h0")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_benchmark_refuses_a_wrong_decision(family, shape, name, dtype):
    """The smallest activation becomes 0, or a closed one opens by as little."""
    *_, (ours, eager) = verified(family, shape, {"activation": "relu"}, dtype)
    output, decided = ours.outputs[name].detach(), ours.expected[name].decided
    smallest = torch.where((output > 0) & decided, output, torch.inf).min()
    closed = ((output == 0) & decided).flatten().nonzero()[0]
    for wrong in (torch.where(output == smallest, 0, output), _changed(output, closed, smallest)):
        found = accuracy.check(Results({name: wrong}, ours.expected), eager)
        assert "on the wrong side of relu's kink, 1 elements" in found.wrong


def test_what_rounding_decides_is_free():
    """z is 0 in fp64, but a sum of terms that cancel: either side, and no gradient passes there.
    Where there is nothing to cancel, 0 is closed."""
    x = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    w, b = torch.tensor([[3.0, -3.0], [0.0, 0.0]]), torch.zeros(2)
    assert linear_stack.undecided(x, w, b).tolist() == [[True, False], [False, False]]
    expected = linear_stack.Stack(x, [w], [b], ["relu"]).expected(torch.ones(2, 2))
    y, dz = expected["y"].value.float(), expected["db0"].value
    assert dz.tolist() == [0, 0]
    for value in (0.0, 1e-7):
        assert accuracy.compare("y", _changed(y, 0, value), y, *expected["y"]).passed
        assert not accuracy.compare("y", _changed(y, 1, 1e-7), y, *expected["y"]).passed


def test_tf32_blurs_more_decisions_and_half_no_more_than_float32():
    torch.manual_seed(0)
    x, w, b = torch.randn(64, 256), torch.randn(64, 256) / 16, torch.randn(64)
    counts = [linear_stack.undecided(x, w, b, tf32).sum().item() for tf32 in (False, True)]
    assert counts[0] <= 2 and 20 < counts[1] < 400
    halves = [t.bfloat16() for t in (x, w, b)]
    assert linear_stack.undecided(*halves).equal(
        linear_stack.undecided(*(t.float() for t in halves))
    )


def test_a_kink_gets_no_gradient_in_the_benchmark():
    case = Case("linear_act", "case", (256, 128, 192), TF32, extra={"activation": "relu"})
    workload = FAMILIES["linear_act"].build(case, "cpu", 2)
    kinks = linear_stack.undecided(*workload.inputs[0], *workload.weights, tf32=True)
    first, second = workload.gradients
    assert kinks.any() and torch.equal(first == 0, kinks) and second.all()


def test_hidden_layers_start_from_what_the_call_kept():
    """A decision that only rounding made is taken over: given it, the gradients are right."""
    case = linear_reference.make_mlp_case(
        (64,), (33, 48, 17), dtypes=linear_reference.DTYPES["bf16"]
    )
    found, kept = linear_reference.recorded(case)
    hidden = case.stack(kept).hidden["h0"]
    other, kinds = hidden.clone(), ["relu", "identity"]
    other[hidden == hidden[hidden > 0].min()] = 0
    first, second = (
        linear_stack.Stack(case.x, case.w, case.b, kinds, kept=[h]).expected(case.dy)
        for h in (hidden, other)
    )
    assert torch.equal(case.stack((*kept, found["y"])).layers[1].x, hidden.double())
    assert not torch.equal(first["db0"].value, second["db0"].value)
    assert "h0" in first and first["h0"].value.equal(second["h0"].value)


class Overwriting(torch.autograd.Function):
    """Two layers that use what they kept as scratch memory, as compiled code does."""

    @staticmethod
    def forward(ctx, x, w0, w1, b0, b1):
        hidden = torch.relu(torch.nn.functional.linear(x, w0, b0))
        ctx.save_for_backward(x, w0, w1, hidden)
        return torch.nn.functional.linear(hidden, w1, b1)

    @staticmethod
    def backward(ctx, dy):
        x, w0, w1, hidden = ctx.saved_tensors
        dz = torch.where(hidden > 0, dy @ w1, 0)
        found = dz @ w0, dz.T @ x, dy.T @ hidden, dz.sum(0), dy.sum(0)
        hidden.zero_()
        return found


def test_what_a_call_kept_is_read_before_backward():
    case = Case("mlp", "case", (64, 33, 48, 17), "bfloat16", extra={"activation": "relu"})
    workload = FAMILIES["mlp"].build(case, "cpu", 1)
    verification = Verification(FAMILIES["mlp"], case, workload)
    found = verification.check(caller(Overwriting.apply, workload, BOTH), BOTH)
    assert found.passed, found


# --- the tests' own comparators ----------------------------------------------------------------


def assert_refuses(case, outputs, pretend):
    """`pretend` makes `case.check` see the outputs that it is given."""
    for name, output in outputs.items():
        if not output.any():  # such as the decoder's, where the output is the latent
            continue
        for kind, wrong in WRONG.items():
            pretend(outputs | {name: wrong(output)})
            with pytest.raises(AssertionError, match=f"^{name}: "):
                case.check()
                pytest.fail(f"{name}: {kind}", pytrace=False)


@pytest.mark.parametrize("dtypes", reference.DTYPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("gate", reference.GATES)
def test_squeeze_excites_tests_refuse_wrong_results(monkeypatch, dtypes, activation, gate):
    kinds = {"activation": activation, "gate": gate}
    case = reference.make_case((4, 12, 5, 5), 6, dtypes=reference.DTYPES[dtypes], **kinds)
    outputs = case.check()
    assert_refuses(
        case,
        outputs,
        lambda spoiled: monkeypatch.setattr(reference, "gradients", lambda *_: spoiled),
    )


@pytest.mark.parametrize("dtypes", linear_reference.DTYPES)
@pytest.mark.parametrize("activation", linear_reference.ACTIVATIONS)
@pytest.mark.parametrize("kind", ["linear_act", "mlp"])
def test_linear_layers_tests_refuse_wrong_results(monkeypatch, dtypes, activation, kind):
    dtypes = linear_reference.DTYPES[dtypes]
    if kind == "linear_act":
        case = linear_reference.make_case((19,), 40, 24, "cpu", dtypes, activation)
    else:
        sizes = (40, 24, 12)
        case = linear_reference.make_mlp_case((19,), sizes, "cpu", dtypes, activation, activation)
    case.check()
    outputs, kept = linear_reference.recorded(case)

    def pretend(spoiled):
        monkeypatch.setattr(linear_reference, "recorded", lambda *_: (spoiled, kept))

    assert_refuses(case, outputs, pretend)
    for place, bits in enumerate(kept):
        if bits.dtype == torch.uint8:
            other = [*kept[:place], bits ^ 1, *kept[place + 1 :]]
            monkeypatch.setattr(linear_reference, "recorded", lambda *_, k=other: (outputs, k))
            with pytest.raises(AssertionError, match="bits are on the wrong side of relu's kink"):
                case.check()


@pytest.mark.parametrize("dtypes", autoencoder_reference.DTYPES)
@pytest.mark.parametrize("output", autoencoder_reference.OUTPUTS)
def test_the_autoencoders_tests_refuse_wrong_results(monkeypatch, dtypes, output):
    dtypes = autoencoder_reference.DTYPES[dtypes]
    case = autoencoder_reference.make_case(16, dtypes=dtypes, output=output)
    outputs = case.check()
    assert_refuses(
        case,
        outputs,
        lambda spoiled: monkeypatch.setattr(autoencoder_reference, "gradients", lambda *_: spoiled),
    )


def _units_near_kinks(activation, gate, dtypes):
    case = reference.make_case((8, 96, 3, 3), 24, dtypes=dtypes, activation=activation, gate=gate)
    functions = zip(reference.units(case), (activation, gate), strict=True)
    return sum(reference.near_kinks(z, fn, case.x.dtype).sum().item() for z, fn in functions)


@pytest.mark.parametrize("dtypes", ["bf16", "fp16-fp32"])
@pytest.mark.parametrize("functions", [("relu", "hardsigmoid"), ("hardswish", "sigmoid")])
def test_rounding_decides_no_slope(functions, dtypes, monkeypatch):
    """In the random inputs of the tests of Squeeze-and-Excitation."""
    dtypes = reference.DTYPES[dtypes]
    assert [_units_near_kinks(*functions, dtypes) for _ in range(10)] == [0] * 10
    monkeypatch.setattr(reference, "leave_kinks", lambda case: None)
    assert any(_units_near_kinks(*functions, dtypes) for _ in range(100))
