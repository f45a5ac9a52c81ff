"""Every public name has a docstring with shapes and an example that runs."""

import doctest
import inspect
import re

import pytest
import torch

import fusewise
from fusewise._explain import Record
from fusewise.rewrite import registry
from fusewise.rewrite.report import Report

PACKAGES = (fusewise, fusewise.functional, fusewise.models, fusewise.nn, fusewise.rewrite)
RETURNED = (Record, Report)
# Methods that torch's layers have too, such as reset_parameters, need no example.
TORCHS = {*dir(torch.nn.Linear), *dir(torch.nn.BatchNorm2d)}
SHAPE = re.compile(r"`\[[^`]*\]`|\bshape")


def public_names():
    """Functions and classes, and the classes' own methods and properties, by their full name."""
    found = {}
    for package in PACKAGES:
        for name in package.__all__:
            thing = getattr(package, name)
            if callable(thing):
                found.setdefault(thing, f"{package.__name__}.{name}")
    for cls in RETURNED:
        found[cls] = f"{cls.__module__}.{cls.__name__}"
    for cls in [thing for thing in found if isinstance(thing, type)]:
        for name in dir(cls):
            member = inspect.getattr_static(cls, name)
            member = getattr(member, "__func__", getattr(member, "fget", member))
            if not inspect.isfunction(member) or name.startswith("_"):
                continue
            torchs = name != "forward" and hasattr(torch.nn.Module, name)
            if member.__module__.startswith("fusewise.") and not torchs:
                found[member, cls] = f"{found[cls]}.{name}"
    return {full: thing for thing, full in found.items()}


NAMES = public_names()


def thing_and_class(name):
    thing = NAMES[name]
    return thing if isinstance(thing, tuple) else (thing, None)


def example_of(thing, name):
    return doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {}, name, None, None)


def source(thing):
    return "".join(each.source for each in example_of(thing, "").examples)


def missing(thing, cls=None):
    """What the docstring lacks."""
    doc = inspect.getdoc(thing)
    if not doc:
        return "a docstring"
    called = thing.__init__ if isinstance(thing, type) else thing
    takes = str(inspect.signature(called).parameters.values())
    if "Tensor" in takes and not SHAPE.search(doc):
        return "shapes"
    if cls is None:
        return "" if example_of(thing, "").examples else "an example"
    known = thing.__name__ in TORCHS or f".{thing.__name__}" in source(thing) + source(cls)
    return "" if known else "an example"


def run(thing, name):
    """What doctest prints about the examples that failed."""
    report = []
    doctest.DocTestRunner(verbose=False).run(example_of(thing, name), out=report.append)
    return "".join(report)


def test_public_names_are_found():
    assert {
        "fusewise.explain",
        "fusewise.functional.li_conv",
        "fusewise.models.SpectralShapeAutoencoder.save_safetensors",
        "fusewise.nn.LIBottleneck.forward_stream",
        "fusewise.nn.LIBatchNorm2d.stream_updates",
        "fusewise.nn.LinearAct.from_linear",
        "fusewise.rewrite.register",
        "fusewise.rewrite.report.Report.restore",
    } <= NAMES.keys()
    assert "fusewise.nn.MLP.state_dict" not in NAMES


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_package_has_a_docstring(package):
    assert package.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_is_complete(name):
    assert not missing(*thing_and_class(name))


@pytest.fixture
def no_patterns_afterwards(monkeypatch):
    monkeypatch.setattr(registry, "_OWN", dict(registry._OWN))


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name, no_patterns_afterwards):
    thing, _ = thing_and_class(name)
    for package in re.findall(r"\b(timm|torchvision|safetensors)\b", source(thing)):
        pytest.importorskip(package)
    failures = run(thing, name)
    assert not failures, failures


def test_gaps_are_found():
    def silent(x): ...

    def shapeless(x: torch.Tensor):
        """Doubles x.

        >>> 1 + 1
        2
        """

    def unused(x: torch.Tensor):
        """Doubles x, `[N]`."""

    def wrong():
        """Adds.

        >>> 1 + 1
        3
        """

    assert [missing(f) for f in (silent, shapeless, unused)] == [
        "a docstring",
        "shapes",
        "an example",
    ]
    assert missing(unused, torch.nn.Linear) == "an example"
    assert not missing(wrong)
    assert "Got:" in run(wrong, "wrong")
