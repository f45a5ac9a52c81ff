"""The autoencoder on random sizes, strides, dtypes and outputs, under the accuracy rule."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from autoencoder_reference import (  # noqa: E402
    DTYPES,
    OUTPUTS,
    SMALL,
    Case,
    autoencoder,
    gradients,
    make_case,
)
from fusewise.bench.families.autoencoder import shapes  # noqa: E402
from layouts import moved  # noqa: E402
from strategies import relaid  # noqa: E402


@st.composite
def cases(draw):
    # Of two values a LayerNorm makes plus and minus one: its gradient is nothing but rounding.
    sizes = {
        "n_mels": draw(st.integers(3, 20)),
        "frames": draw(st.integers(1, 4)),
        "latent": draw(st.integers(3, 20)),
        # Of a single value the normalised basis makes plus or minus that value: the LayerNorm
        # behind it may see nothing but rounding.
        "slice_latent": draw(st.integers(2, 20)),
    }
    torch.manual_seed(draw(st.integers(0, 2**31)))
    rows, output = draw(st.integers(1, 40)), draw(st.sampled_from(OUTPUTS))
    dtypes = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    layout = draw(st.sampled_from(["rows", "frames"]))
    case, *others = (
        make_case(rows, sizes, dtypes=dtypes, layout=layout, output=output) for _ in range(4)
    )
    x = draw(relaid(case.x.shape))(case.x)
    gradient = draw(relaid(case.gradient.shape))(case.gradient)
    weights = [draw(relaid(w.shape))(w) if w.dim() == 2 else w for w in case.weights]
    if any(0 in w.stride() for w in weights):  # equal rows leave norms nothing but noise
        weights = case.weights
    if x.reshape(x.shape[0], sizes["frames"], -1).std(-1).min() < 0.1:
        x = case.x
    return Case(x, weights, gradient, output), *others


@settings(max_examples=40)
@given(drawn=cases())
def test_any_call_is_right(device, drawn):
    case, *others = (
        Case(
            moved(each.x, device),
            [moved(w, device) for w in each.weights],
            moved(each.gradient, device),
            each.output,
        )
        for each in drawn
    )
    case.check_every_implementation(*others)
    found = gradients(autoencoder, case)
    assert found["dx"].stride() == torch.empty_like(case.x).stride()


@pytest.mark.parametrize("step", [0, 2, 3])
def test_gradients_of_scores_at_any_distance(device, step):
    case = make_case(21, SMALL, device, output="score")
    room = torch.randn(64, device=device)
    case.gradient = room.as_strided((21,), (step,), 1)
    case.check_every_implementation()


GOOD = shapes(4, 3, 2, 5)


@settings(max_examples=60)
@given(
    x=st.lists(st.integers(0, 12), max_size=4) | st.sampled_from([[2, 12], [2, 3, 4]]),
    name=st.sampled_from(sorted(GOOD)),
    shape=st.lists(st.integers(0, 15), max_size=3),
)
@example(x=[2, 12], name="basis", shape=[2, 15])
@example(x=[0, 3, 4], name="mid_bias", shape=[2])
def test_any_shapes_are_right_or_refused(device, x, name, shape):
    """One weight of any shape: the same verdict from the kernels and from the fake."""

    def attempt(where):
        weights = (GOOD | {name: tuple(shape)}).values()
        try:
            return autoencoder(*(torch.ones(s, device=where) for s in (x, *weights))).shape
        except RuntimeError as error:
            return str(error).split(":")[0]

    verdict = attempt(device)
    assert verdict == attempt("meta")
    fits = tuple(shape) == GOOD[name] and len(x) > 1 and x[1:] in ([12], [3, 4])
    assert (verdict == tuple(x)) == fits
