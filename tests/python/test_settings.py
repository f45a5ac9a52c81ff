"""Forcing an implementation, and asking which one runs."""

import threading

import pytest
import torch

import fusewise
from fusewise._settings import settings
from fusewise.functional import squeeze_excite
from probes import Calls
from reference import make_case


@pytest.fixture
def case(device):
    return make_case((2, 16, 4, 4), 4, device)


@pytest.fixture
def last(case):
    """The implementation that takes every call: the last of the list."""
    (record,) = fusewise.explain(squeeze_excite, *case.arguments)
    return record.candidates[-1].name


def chosen(case):
    (record,) = fusewise.explain(squeeze_excite, *case.arguments)
    return record.chosen


def test_a_forced_implementation_is_used_and_given_back(case):
    default = chosen(case)
    for choice in case.implementations(backward=False):
        with fusewise.implementation(**choice):
            assert chosen(case) == choice["squeeze_excite"]
    assert chosen(case) == default


def test_forcing_nests_and_survives_errors():
    force = fusewise.implementation(squeeze_excite="one")
    with pytest.raises(KeyError), force, fusewise.implementation(squeeze_excite="two"), force:
        with fusewise.implementation(squeeze_excite=""):
            assert settings.squeeze_excite == ""
        assert settings.squeeze_excite == "one"
        raise KeyError
    assert settings.squeeze_excite == ""


def test_an_unknown_implementation_is_the_operators_error(case, last):
    with (
        fusewise.implementation(squeeze_excite="magic"),
        pytest.raises(RuntimeError, match=f"none named 'magic'.*'{last}'"),
    ):
        squeeze_excite(*case.arguments)


def test_nothing_can_be_forced_under_a_transform(case, last):
    """There the formula runs in torch's operators, and a forced name must not be ignored."""
    call = torch.func.vmap(lambda x: squeeze_excite(x, *case.arguments[1:]))
    batch = torch.stack([case.x, case.x])
    with (
        fusewise.implementation(squeeze_excite=last),
        pytest.raises(RuntimeError, match=f"implementation: '{last}' was forced"),
    ):
        call(batch)
    assert call(batch).shape == batch.shape


def test_an_unknown_operator_is_an_error():
    with pytest.raises(
        ValueError, match="no operator is named 'squeeze'; there are: .*squeeze_excite"
    ):
        fusewise.implementation(squeeze="general")
    with pytest.raises(TypeError, match="expected a name for squeeze_excite"):
        fusewise.implementation(squeeze_excite=None)


def test_backward_uses_what_held_when_forward_ran(case, last):
    x = case.x.requires_grad_()
    with Calls() as calls:
        with fusewise.implementation(squeeze_excite="", squeeze_excite_backward=last):
            y = squeeze_excite(*case.arguments)
        torch.autograd.grad(y, x, case.dy)
    assert [arguments[-1] for _, arguments, _ in calls.seen] == ["", last]


def test_other_threads_are_not_forced():
    seen = []
    with fusewise.implementation(squeeze_excite="general"):
        thread = threading.Thread(target=lambda: seen.append(settings.squeeze_excite))
        thread.start()
        thread.join()
    assert seen == [""]


def test_compiled_functions_follow_the_setting(case, last):
    """A setting is a constant of the graph, and a change of it compiles anew."""
    torch._dynamo.reset()
    forced = []

    def backend(graph, _):
        nodes = [n for n in graph.graph.nodes if "squeeze_excite" in str(n.target)]
        forced.extend(node.args[-1] for node in nodes)
        return graph

    def inside(*arguments):
        with fusewise.implementation(squeeze_excite=last):
            return squeeze_excite(*arguments)

    outside = torch.compile(squeeze_excite, fullgraph=True, backend=backend)
    outside(*case.arguments)
    with fusewise.implementation(squeeze_excite=last):
        outside(*case.arguments)
    torch.compile(inside, fullgraph=True, backend=backend)(*case.arguments)
    assert forced == ["", last, last]
    assert settings.squeeze_excite == ""


def test_explain_tells_forward_and_backward(case):
    x = case.x.requires_grad_()
    explanation = fusewise.explain(squeeze_excite, *case.arguments)
    assert [(r.operator, r.direction) for r in explanation] == [
        ("squeeze_excite", "forward"),
        ("squeeze_excite", "backward"),
    ]
    for record in explanation:
        assert [c.name for c in record.candidates if c.chosen] == [record.chosen]
        assert not record.candidates[-1].reason  # the last takes every call
        assert record.input.startswith("[2, 16, 4, 4] float32 " + x.device.type)
    with torch.no_grad():
        assert len(fusewise.explain(squeeze_excite, *case.arguments)) == 1


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_explain_sees_through_a_model(device, compiled):
    def block():
        return fusewise.nn.SqueezeExcitation(8, 2, "silu", device=device)

    model = torch.nn.Sequential(block(), torch.nn.ReLU(), block())
    run = torch.compile(model) if compiled else model
    explanation = fusewise.explain(run, torch.randn(2, 8, 4, 4, device=device))
    assert [r.direction for r in explanation] == ["forward", "backward"] * 2
    text = str(explanation)
    assert "2 x squeeze_excite forward [2, 8, 4, 4] float32" in text
    assert len(text.splitlines()) == sum(len(r.candidates) for r in explanation[:2])
    assert settings.records is None


def test_explain_says_why_others_decline():
    record = fusewise._explain.Record(
        "op",
        "forward",
        "[1]",
        (
            fusewise._explain.Candidate("fast", False, "x is not aligned", False),
            fusewise._explain.Candidate("general", True, "", True),
            fusewise._explain.Candidate("slow", False, "", True),
        ),
    )
    assert str(record).splitlines() == [
        "op forward [1]: general",
        "    fast declines: x is not aligned",
        "    slow would take it too",
    ]


def test_explain_without_fused_operators():
    assert str(fusewise.explain(torch.relu, torch.ones(2))) == "no fusewise operator ran"


def test_explain_ends_when_the_function_raises():
    with pytest.raises(ZeroDivisionError):
        fusewise.explain(lambda: 1 / 0)
    assert settings.records is None
