"""The autoencoder where only a GPU can show it.

The matrix of dtypes, layouts, outputs and sizes is in tests/python and runs on the GPU too.
"""

import contextlib
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import fusewise
from autoencoder_reference import (
    DEFAULT,
    DTYPES,
    OUTPUTS,
    SMALL,
    autoencoder,
    eager,
    gradients,
    make_case,
)
from fusewise.models import SpectralShapeAutoencoder
from gpu_helpers import slow_down
from reference import same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@contextlib.contextmanager
def precision(name):
    """Of torch's own products of float32, "ieee" or "tf32"."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = name
    try:
        yield
    finally:
        matmul.fp32_precision = before


def kind_of_products(kind):
    """The dtypes of a case, and the setting of torch under which it is made and checked."""
    tf32 = kind == "tf32"
    return DTYPES["fp32" if tf32 else kind], precision("tf32" if tf32 else "ieee")


@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16", "fp16-fp32"])
@pytest.mark.parametrize("rows", [1, 32, 512, 4099])
def test_default_sizes_in_every_implementation(dtypes, rows):
    for output in OUTPUTS:
        case = make_case(rows, DEFAULT, "cuda", DTYPES[dtypes], output=output)
        assert {"fused", "general"} <= case.check_every_implementation()


@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16"])
def test_many_rows(kind, output):
    """Values and gradients where every block has many tiles of rows; the reference comes in
    pieces."""
    dtypes, setting = kind_of_products(kind)
    with setting:
        make_case(65536, DEFAULT, "cuda", dtypes, output=output).check()


# So many that backward on Hopper is by warpgroups, in TF32 and halves: some blocks have a second
# tile of 128 rows, and the last one is not whole.
WARPGROUP_ROWS = 24037


@pytest.mark.parametrize("layout", ["rows", "padded", "misaligned"])
@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["tf32", "bf16", "fp16", "fp16-fp32"])
def test_backward_by_warpgroups(kind, output, layout):
    """Rows of x that follow one another, that have room between them, that another kernel takes."""
    dtypes, setting = kind_of_products(kind)
    with setting:
        padded = layout == "padded"
        case = make_case(
            WARPGROUP_ROWS, DEFAULT, "cuda", dtypes, "rows" if padded else layout, output=output
        )
        if padded:
            case.x = case.x.new_empty(WARPGROUP_ROWS, 384)[:, :320].copy_(case.x)
        found = case.check()
        again = gradients(autoencoder, case)
    for name, value in found.items():
        assert same_bits(value, again[name]), name


@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_rows_of_nan_by_warpgroups(kind, output):
    """Not a bit of another row's gradient changes, in the same tile or another."""
    dtypes, setting = kind_of_products(kind)
    with setting:
        case = make_case(WARPGROUP_ROWS, DEFAULT, "cuda", dtypes, output=output)
        clean = gradients(autoencoder, case)["dx"]
        bad = [7, 500, WARPGROUP_ROWS - 1]
        case.x[bad, 3] = math.nan
        found = gradients(autoencoder, case)["dx"]
    others = torch.ones(WARPGROUP_ROWS, dtype=torch.bool, device="cuda")
    others[bad] = False
    assert torch.equal(found[others], clean[others])
    assert found[~others].isnan().any(1).all()


@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_warpgroups_without_dx(kind, output):
    """The same gradients, bit by bit, for x that needs none, and beside a frozen basis."""
    dtypes, setting = kind_of_products(kind)
    with setting:
        case = make_case(WARPGROUP_ROWS, DEFAULT, "cuda", dtypes, output=output)
        right = gradients(autoencoder, case)
        names = [name for name in right if name not in (output, "dx")]
        for frozen in (None, "dbasis"):
            x, *parameters = (t.detach() for t in case.inputs)
            learned = [name for name in names if name != frozen]
            for name, p in zip(names, parameters, strict=True):
                p.requires_grad_(name in learned)
            result = autoencoder(x, *parameters, output=output)
            wanted = [p for p in parameters if p.requires_grad]
            found = torch.autograd.grad(result, wanted, case.gradient)
            for name, value in zip(learned, found, strict=True):
                assert same_bits(value, right[name]), f"{name}, frozen: {frozen}"


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
def test_where_another_kernel_takes_over(dtypes):
    """By so many rows for each multiprocessor; both sides of every boundary."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for rows_of_each in (1, 2, 4, 16, 32, 64, 80, 128):
        for rows in (rows_of_each * count, rows_of_each * count + 1):
            make_case(rows, DEFAULT, "cuda", DTYPES[dtypes]).check()


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["rows", "misaligned", "sliced", "spectrogram"])
def test_many_rows_otherwise(layout, dtypes):
    """Of another model, and of the default one where rows do not lie as its kernels want them."""
    for rows, sizes in ((20000, SMALL), (700, DEFAULT), (5000, DEFAULT)):
        make_case(rows, sizes, "cuda", DTYPES[dtypes], layout).check()


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("frames", [1, 4, 6])
def test_other_frames_of_the_default_model(frames, dtypes):
    """Where backward's kernel for five of them does not apply."""
    for rows, output in itertools.product((16, 3000), OUTPUTS):
        make_case(rows, DEFAULT | {"frames": frames}, "cuda", DTYPES[dtypes], output=output).check()


WIDE = {"n_mels": 128, "frames": 8, "latent": 64, "slice_latent": 128}
HUGE = {"n_mels": 250, "frames": 3, "latent": 77, "slice_latent": 190}


@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "fp16-fp32", "fp64"])
@pytest.mark.parametrize("sizes", [WIDE, HUGE], ids=["wide", "huge"])
def test_sizes_for_which_products_are_faster(sizes, dtypes):
    for rows, output in itertools.product((40, 300, 3000), OUTPUTS):
        case = make_case(rows, sizes, "cuda", DTYPES[dtypes], output=output)
        able = {"general"} if sizes is HUGE or dtypes == "fp64" else {"fused", "general"}
        assert case.check_every_implementation() == able


@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
def test_products_of_more_rows_than_are_taken_together(dtypes, output):
    case = make_case(65537, DEFAULT, "cuda", DTYPES[dtypes], output=output)
    with fusewise.implementation(autoencoder="general", autoencoder_backward="general"):
        case.check()


def test_the_list_says_when_products_are_faster():
    """Not where rows are copied first, and then lie as the default model's kernels like them."""
    for sizes, layout, chosen in (
        (DEFAULT, "rows", "fused"),
        (DEFAULT, "columns", "fused"),
        (WIDE, "rows", "general"),
    ):
        case = make_case(600, sizes, "cuda", layout=layout)
        case.x.requires_grad_()
        for record in fusewise.explain(autoencoder, *case.inputs):
            assert record.chosen == chosen
            if chosen == "general":
                assert "products are faster" in record.candidates[0].reason


@pytest.mark.parametrize("rows", [40, 700])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
def test_a_variance_beyond_the_largest_number(dtypes, rows):
    """It is infinite, and a frame divided by its root is 0, as torch has it on the CPU; on a GPU
    torch has NaN."""
    case = make_case(rows, DEFAULT, "cuda", DTYPES[dtypes])
    clean = autoencoder(*case.inputs)
    case.x[3] *= 1e25
    case.x[5, 64:128] *= 1e30
    found = autoencoder(*case.inputs)
    assert found.isfinite().all()
    others = torch.ones(rows, dtype=torch.bool, device="cuda")
    others[[3, 5]] = False
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("output", OUTPUTS)
def test_tf32_where_torch_allows_it(output):
    """Held against eager with the same setting."""
    with precision("tf32"):
        case, *others = (make_case(700, DEFAULT, "cuda", output=output) for _ in range(8))
        case.check_every_implementation(*others)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("rows, sizes", [(40, DEFAULT), (700, DEFAULT), (40, SMALL)], ids=str)
def test_rows_of_nan_and_inf(rows, sizes, dtypes, output, value):
    """In x: NaN where torch has it, gradients included, and not a bit of another row changes."""
    case = make_case(rows, sizes, "cuda", DTYPES[dtypes], output=output)
    clean = gradients(autoencoder, case)
    case.x[7, 3] = value
    case.x[20] = value
    found = case.check()
    case.check_every_implementation()
    others = torch.ones(rows, dtype=torch.bool, device="cuda")
    others[[7, 20]] = False
    for name in (output, "dx"):
        assert torch.equal(found[name][others], clean[name][others]), name
        assert found[name][~others].isnan().any()


@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("rows", [4096, WARPGROUP_ROWS])
def test_tf32_of_plain_sums(rows, output):
    """A gradient of ones loses nothing when it is cut: what makes up for the cut of others must
    not show in the sums over many rows."""
    case = make_case(rows, DEFAULT, "cuda", output=output)
    case.gradient.fill_(1)
    with precision("tf32"):
        case.check()


@pytest.mark.parametrize("rows", [40, 700, 5000, WARPGROUP_ROWS])
def test_differences_too_large_for_float16(rows):
    case = make_case(rows, DEFAULT, "cuda", DTYPES["fp16"])
    case.x[3] = -60000
    case.x[3, ::64] = 60000
    case.check()


def test_float32_is_exact_by_default():
    """With TF32 the error of a product would be some 1e-3 of its terms."""
    case = make_case(700, DEFAULT, "cuda")
    right = eager(*(t.double() for t in case.inputs))
    assert (autoencoder(*case.inputs) - right).abs().max() < 2e-5 * right.abs().max()


def test_a_declined_implementation_says_why():
    case = make_case(7, SMALL, "cuda", DTYPES["fp64"])
    (record,) = fusewise.explain(autoencoder, *case.inputs)
    assert record.chosen == record.candidates[-1].name == "general"
    for candidate in record.candidates[:-1]:
        assert candidate.reason
        with (
            fusewise.implementation(autoencoder=candidate.name),
            pytest.raises(RuntimeError, match=f"'{candidate.name}' declines: "),
        ):
            autoencoder(*case.inputs)


def test_other_streams():
    case = make_case(600, DEFAULT, "cuda")
    right = gradients(autoencoder, case)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        slow_down()
        case.x = case.x.clone()  # only there once the stream got to it
        found = gradients(autoencoder, case)
    stream.synchronize()
    for name in right:
        assert same_bits(found[name], right[name]), name


def test_several_streams_at_once():
    """Nothing that a call needs is shared with another that runs at the same time."""
    cases = [make_case(rows, DEFAULT, "cuda") for rows in (1, 40, 600, 5000)]
    right = [gradients(autoencoder, case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(5):
        found = []
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                slow_down(1)  # so that the host has launched all before the first is done
                found.append(gradients(autoencoder, case))
        torch.cuda.synchronize()
        for each, expected in zip(found, right, strict=True):
            assert all(same_bits(each[name], expected[name]) for name in expected)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("rows", [100, 700])
def test_a_graph_of_a_training_step(rows, output):
    case = make_case(rows, DEFAULT, "cuda", output=output)
    inputs = [t.detach().requires_grad_() for t in case.inputs]

    def step():
        result = autoencoder(*inputs, output=output)
        return result, torch.autograd.grad(result, inputs, case.gradient, materialize_grads=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, found = step()
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in inputs:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        replayed = [result.clone(), *(t.clone() for t in found)]
        again, gradient = step()
        for a, b in zip(replayed, (again, *gradient), strict=True):
            assert same_bits(a, b)


@pytest.mark.two_gpus
def test_a_device_that_is_not_current():
    case = make_case(100, DEFAULT, "cuda:1")
    with torch.cuda.device(0):
        case.check_every_implementation()


def test_out_of_memory_leaves_nothing_behind():
    case = make_case(1, DEFAULT, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    free, _ = torch.cuda.mem_get_info()
    x = case.x.expand(2 * free // (320 * 4), 320)
    with pytest.raises(torch.OutOfMemoryError):
        autoencoder(x, *case.weights)
    assert torch.cuda.memory_allocated() == before


def test_sizes_beyond_32_bits_are_declined():
    """No rows, so that the 0.5 GB of the basis are all that is needed."""
    frames = 2**28 + 1
    make = functools.partial(torch.ones, device="cuda", dtype=torch.float16)
    norm, mid_norm, linear = [make(1), make(1)], [make(1), make(1)], [make(1, 1), make(1)]
    weights = [*norm, *linear, make(1, frames), *mid_norm, *linear, *linear]
    with pytest.raises(RuntimeError, match="too large for its 32-bit indices"):
        autoencoder(make(0, frames), *weights)


def test_a_score_writes_no_reconstruction():
    case = make_case(65536, DEFAULT, "cuda")
    autoencoder(*case.inputs, output="score")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    autoencoder(*case.inputs, output="score")
    assert torch.cuda.max_memory_allocated() - before < case.x.nbytes / 10


@pytest.mark.parametrize("loss, share", [("score", 5), ("mse", 2.3)])
def test_peak_memory_of_a_training_step(loss, share):
    """With x as the unit, eager holds 7.44, of which two are torch's mse_loss's own: one as long as
    the loss lives, and a passing one. With ours it has the same two, beside the reconstruction and
    0.1: 3.1, and a share of 2.4 (docs/autoencoder.md)."""
    model = SpectralShapeAutoencoder(device="cuda")
    x = torch.randn(65536, 320, device="cuda")
    state = model.state_dict()
    order = [name for name in state if name != "global_basis"]
    order.insert(4, "global_basis")
    weights = [dict(model.named_parameters())[name] for name in order]

    def peak(fn):
        fn()
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        return torch.cuda.max_memory_allocated() - before

    def step():
        result = model.anomaly_score(x).mean() if loss == "score" else F.mse_loss(model(x), x)
        result.backward()

    def eager_step():
        F.mse_loss(eager(x, *weights), x).backward()

    ours, eagers = peak(step), peak(eager_step)
    assert ours * share <= eagers
    if loss == "mse":
        theirs = 2 * x.nbytes  # of mse_loss itself
        assert (ours - theirs) * 4 <= eagers - theirs
