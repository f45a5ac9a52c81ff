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
    WEIGHTS,
    autoencoder,
    check_together,
    eager,
    gradients,
    make_case,
)
from fusewise.models import SpectralShapeAutoencoder
from gpu_helpers import (
    HOPPER,
    allocated,
    check_all_but_general_decline,
    check_graph,
    fails_with_out_of_memory,
    late_on_side_stream,
    matmul_settings,
    needs_gpu,
    peak,
    slow_down,
)
from reference import same_bits

pytestmark = needs_gpu


def kind_of_products(kind):
    """The dtypes of a case, and the setting of torch under which it is made and checked."""
    tf32 = kind == "tf32"
    setting = matmul_settings(fp32_precision="tf32" if tf32 else "ieee")
    return DTYPES["fp32" if tf32 else kind], setting


def chosen(case):
    """The entries of both lists that a call of the case runs."""
    x = case.x.detach().requires_grad_()
    records = fusewise.explain(autoencoder, x, *case.weights, output=case.output)
    return tuple(record.chosen for record in records)


@contextlib.contextmanager
def forced(case, forward="", backward=""):
    """With these entries of the lists, which run: nothing else is chosen in their place."""
    with fusewise.implementation(autoencoder=forward, autoencoder_backward=backward):
        for wanted, found in zip((forward, backward), chosen(case), strict=True):
            assert wanted in ("", found)
        yield


# By warpgroups, in TF32 and half precision.
needs_hopper = pytest.mark.skipif(not HOPPER, reason="wgmma needs a Hopper GPU")
FORWARD = {"few_rows", "many_rows", "block16", "any_size", "general"}
BACKWARD = {"wgmma", "block16", "warps", "general"}


@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16", "fp16-fp32"])
@pytest.mark.parametrize("rows", [1, 32, 512, 4099])
def test_default_sizes_in_every_implementation(dtypes, rows):
    """All of them can be forced, for any number of rows."""
    for output in OUTPUTS:
        # The error of a single score is a matter of luck.
        case, *others = (
            make_case(rows, DEFAULT, "cuda", DTYPES[dtypes], output=output)
            for _ in range(8 if rows == 1 else 1)
        )
        checked = case.check_every_implementation(*others)
        exact = dtypes == "fp32" or output == "latent"  # which wgmma does not do
        if HOPPER:
            assert checked == (FORWARD | BACKWARD) - ({"wgmma"} if exact else set())
        else:
            assert {"few_rows", "any_size", "general"} <= checked


@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16"])
def test_many_rows(kind, output):
    """Values and gradients where every block has many tiles of rows; the reference comes in
    pieces."""
    dtypes, setting = kind_of_products(kind)
    with setting:
        case = make_case(65536, DEFAULT, "cuda", dtypes, output=output)
        if HOPPER:
            assert chosen(case) == ("many_rows", "block16" if kind == "fp32" else "wgmma")
        case.check()


# Some of the warpgroups' blocks have a second tile of 128 rows, and the last one is not whole.
WARPGROUP_ROWS = 24037


@needs_hopper
@pytest.mark.parametrize("layout", ["rows", "spaced"])
@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["tf32", "bf16", "fp16", "fp16-fp32"])
def test_backward_by_warpgroups(kind, output, layout):
    """Rows of x that follow one another, and that have room between them."""
    dtypes, setting = kind_of_products(kind)
    with setting:
        case = make_case(WARPGROUP_ROWS, DEFAULT, "cuda", dtypes, output=output)
        if layout == "spaced":
            case.x = case.x.new_empty(WARPGROUP_ROWS, 384)[:, :320].copy_(case.x)
        with forced(case, backward="wgmma"):
            found = case.check()
            again = gradients(autoencoder, case)
    for name, value in found.items():
        assert same_bits(value, again[name]), name


@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["tf32", "bf16", "fp16", "fp16-fp32"])
def test_misaligned_rows(kind, output):
    """Which the default model's kernels do not take."""
    dtypes, setting = kind_of_products(kind)
    with setting:
        case = make_case(WARPGROUP_ROWS, DEFAULT, "cuda", dtypes, "misaligned", output=output)
        assert not {*chosen(case)} & {"many_rows", "wgmma", "block16", "warps"}
        case.check()


@needs_hopper
@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_rows_of_nan_by_warpgroups(kind, output):
    """Not a bit of another row's gradient changes, in the same tile or another."""
    dtypes, setting = kind_of_products(kind)
    case = make_case(WARPGROUP_ROWS, DEFAULT, "cuda", dtypes, output=output)
    with setting, forced(case, backward="wgmma"):
        clean = gradients(autoencoder, case)["dx"]
        bad = [7, 500, WARPGROUP_ROWS - 1]
        case.x[bad, 3] = math.nan
        found = gradients(autoencoder, case)["dx"]
    others = torch.ones(WARPGROUP_ROWS, dtype=torch.bool, device="cuda")
    others[bad] = False
    assert torch.equal(found[others], clean[others])
    assert found[~others].isnan().any(1).all()


@needs_hopper
@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_warpgroups_without_dx(kind, output):
    """The same gradients, bit by bit, for x that needs none, and beside a frozen basis."""
    dtypes, setting = kind_of_products(kind)
    case = make_case(WARPGROUP_ROWS, DEFAULT, "cuda", dtypes, output=output)
    with setting, forced(case, backward="wgmma"):
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


@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16"])
def test_where_another_kernel_takes_over(kind):
    """By so many rows for each multiprocessor; both sides of every boundary, and where a kernel is
    laid out in another way."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    shared = {"fp32": 32, "tf32": 16, "bf16": 0}[kind]  # by the warps of a block
    dtypes, setting = kind_of_products(kind)
    with setting:
        for rows_of_each, more in itertools.product((1, 2, 4, 16, 32, 64, 80, 128), (0, 1)):
            rows = rows_of_each * count + more
            forward = "many_rows" if rows > shared * count else "block16"
            if rows <= 4 * count:
                forward = "few_rows"
            # Up to a tile of 128 rows for each; with one row more, one of them has two.
            many = 80 * count < rows <= 128 * count
            backward = "wgmma" if many and kind != "fp32" else "block16"
            cases = [make_case(rows, DEFAULT, "cuda", dtypes) for _ in range(4)]
            if HOPPER:
                assert chosen(cases[0]) == (forward, backward), rows
            check_together(*cases)


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["rows", "misaligned", "sliced", "spectrogram"])
def test_layouts_in_general(layout, dtypes):
    """Another model, and the default one, whose own kernels need aligned rows."""
    for rows, sizes in ((20000, SMALL), (700, DEFAULT), (5000, DEFAULT)):
        case = make_case(rows, sizes, "cuda", DTYPES[dtypes], layout)
        case.check()
        with forced(case, "general", "general"):
            case.check()


# n_mels, frames, latent, slice_latent. 'general' computes a LayerNorm and the following Linear in
# one kernel for up to 128 columns (and 256 slice_latent), which the last three exceed.
NORMS = [
    (7, 2, 48, 2),
    (128, 1, 32, 48),
    (80, 7, 48, 24),
    (128, 5, 128, 8),
    (40, 11, 40, 16),
    (40, 5, 32, 64),
    (9, 37, 6, 5),
    (129, 2, 16, 8),
    (20, 3, 129, 9),
    (20, 2, 16, 257),
]


def sizes_of(numbers):
    return dict(zip(DEFAULT, numbers, strict=True))


@pytest.mark.parametrize("kind", ["fp32", "tf32", "fp16", "bf16", "fp16-fp32"])
@pytest.mark.parametrize("numbers", NORMS, ids=str)
def test_norms_in_general(numbers, kind):
    """Whole and partial tiles of 16 rows and 16 columns."""
    dtypes, setting = kind_of_products(kind)
    with setting:
        for rows, output in (
            (1, "reconstruction"),
            (15, "score"),
            (16, "latent"),
            (17, "reconstruction"),
            (777, "score"),
        ):
            # torch multiplies few rows without TF32, even where that is allowed.
            if kind == "tf32" and rows < 100:
                continue
            # The largest of a few rounding errors is a matter of luck: few rows need more draws.
            draws = 1 if rows > 100 else 3
            cases = [
                make_case(rows, sizes_of(numbers), "cuda", dtypes, output=output)
                for _ in range(draws)
            ]
            with forced(cases[0], "general", "general"):
                check_together(*cases)


@pytest.mark.parametrize("kind", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("numbers", [(7, 2, 48, 2), (128, 5, 128, 8), (129, 2, 16, 8)], ids=str)
def test_a_row_of_nan_in_general(numbers, kind):
    """The row becomes NaN, and not a bit of another row changes."""
    dtypes, setting = kind_of_products(kind)
    case = make_case(33, sizes_of(numbers), "cuda", dtypes)
    with setting, forced(case, "general", "general"):
        clean = gradients(autoencoder, case)
        case.x[20, 3] = math.nan
        found = gradients(autoencoder, case)
    others = torch.arange(33, device="cuda") != 20
    for name in ("reconstruction", "dx"):
        assert torch.equal(found[name][others], clean[name][others]), name
        assert found[name][20].isnan().all(), name


@pytest.mark.parametrize("name", ["norm_weight", "mid_norm_weight"])
def test_nan_in_a_norms_weight_in_general(name):
    """Also where all weights of the next Linear are zero."""
    case = make_case(5, SMALL, "cuda")
    case.weights[WEIGHTS.index(name)][2] = math.nan
    case.weights[WEIGHTS.index(name) + 2].zero_()
    with forced(case, "general", "general"):
        assert autoencoder(*case.inputs).isnan().all()


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("frames", [1, 4, 6])
def test_other_frames_of_the_default_model(frames, dtypes):
    """Where backward's kernels for five of them decline, and forward's for few rows."""
    for rows, output in itertools.product((16, 3000), OUTPUTS):
        sizes = DEFAULT | {"frames": frames}
        case = make_case(rows, sizes, "cuda", DTYPES[dtypes], output=output)
        for forward in ("many_rows", "block16"):
            with forced(case, forward, "warps"):
                case.check()


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (2000, {"n_mels": 7, "frames": 2, "latent": 48, "slice_latent": 2}),
        (300, {"n_mels": 128, "frames": 1, "latent": 48, "slice_latent": 32}),
        (700, DEFAULT),
        (5000, DEFAULT),
        (65536, DEFAULT),
    ],
)
def test_float32_errors_of_tensor_cores(rows, sizes):
    """Tensor cores cut every sum. Chains of such sums, and halves of values that have a sign, made
    errors several times torch's."""
    squares = {}
    for _ in range(4):
        case = make_case(rows, sizes, "cuda")
        for name, value in gradients(autoencoder, case).items():
            eager_value, right = case.expected()[name][:2]
            both = [(v.double() - right).square().mean() for v in (value, eager_value)]
            squares[name] = squares.get(name, 0) + torch.stack(both)
    for name, (ours, torchs) in squares.items():
        assert ours.sqrt() < 2 * torchs.sqrt(), (
            f"{name}: {ours.sqrt():.3g}, torch's {torchs.sqrt():.3g}"
        )


NARROW = {"n_mels": 40, "frames": 5, "latent": 32, "slice_latent": 64}
WIDE = {"n_mels": 128, "frames": 8, "latent": 64, "slice_latent": 128}
HUGE = {"n_mels": 250, "frames": 3, "latent": 77, "slice_latent": 190}


def why_not_any_size(rows, sizes, dtypes):
    """The reason of 'any_size' in forward's list; empty where it is chosen."""
    gpu = torch.cuda.get_device_properties(0)
    count = gpu.multi_processor_count
    if dtypes == "fp64":
        return "it has no float64 kernels"
    if sizes is NARROW:
        most = (4 if dtypes == "fp32" else 2) * count
        return f"'general' is faster for more than {most} rows" if rows > most else ""
    rows_of_block = 1 if rows <= count else 2 if rows <= 2 * count else 4
    parameters, row = (413980, 8704) if sizes is WIDE else (586044, 5896)
    return (
        f"it needs {parameters + rows_of_block * row + 4 * sizes['latent']} bytes of shared "
        f"memory, and a block has {gpu.shared_memory_per_block_optin}"
    )


def check_other_sizes(records, rows, sizes, dtypes):
    """Which kernels can run another model than the default one, which one does, and why."""
    n_mels, _, latent, slice_latent = sizes.values()
    default_only = (
        "it has no float64 kernels"
        if dtypes == "fp64"
        else "it is for n_mels 64, latent 32 and slice_latent 64, "
        f"not {n_mels}, {latent} and {slice_latent}"
    )
    why_not = why_not_any_size(rows, sizes, dtypes)
    forward, backward = records
    assert [(c.name, c.chosen, c.able, c.reason) for c in forward.candidates] == [
        *((name, False, False, default_only) for name in ("few_rows", "many_rows", "block16")),
        ("any_size", not why_not, dtypes != "fp64" and sizes is NARROW, why_not),
        ("general", bool(why_not), True, ""),
    ]
    wgmma, *others = backward.candidates
    assert (wgmma.name, wgmma.chosen, wgmma.able) == ("wgmma", False, False)
    if HOPPER:  # other GPUs are a reason of their own
        assert wgmma.reason == default_only
    assert [(c.name, c.chosen, c.able, c.reason) for c in others] == [
        ("block16", False, False, default_only),
        ("warps", False, False, default_only),
        ("general", True, True, ""),
    ]


@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "fp16-fp32", "fp64"])
@pytest.mark.parametrize("sizes", [NARROW, WIDE, HUGE], ids=["narrow", "wide", "huge"])
def test_other_sizes_in_every_implementation(sizes, dtypes):
    for rows, output in itertools.product((40, 300, 3000), OUTPUTS):
        case = make_case(rows, sizes, "cuda", DTYPES[dtypes], output=output)
        x = case.x.detach().requires_grad_()
        records = fusewise.explain(autoencoder, x, *case.weights, output=output)
        check_other_sizes(records, rows, sizes, dtypes)
        able = {*records[0].able, *records[1].able}
        assert case.check_every_implementation() == able


@pytest.mark.parametrize("output", ["reconstruction", "score"])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
def test_products_of_more_rows_than_are_taken_together(dtypes, output):
    case = make_case(65537, DEFAULT, "cuda", DTYPES[dtypes], output=output)
    with forced(case, "general", "general"):
        case.check()


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_block16_takes_copied_rows_too(layout):
    """Columns are copied into rows first, and the copy is aligned."""
    case = make_case(600, DEFAULT, "cuda", layout=layout)
    assert chosen(case) == ("block16", "block16")


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
    with matmul_settings(fp32_precision="tf32"):
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
@pytest.mark.parametrize(
    "rows, backward",
    [(4096, "block16"), pytest.param(WARPGROUP_ROWS, "wgmma", marks=needs_hopper)],
)
def test_tf32_of_plain_sums(rows, backward, output):
    """A gradient of ones loses nothing when it is cut: what makes up for the cut of others must
    not show in the sums over many rows."""
    case = make_case(rows, DEFAULT, "cuda", output=output)
    case.gradient.fill_(1)
    with matmul_settings(fp32_precision="tf32"), forced(case, backward=backward):
        case.check()


@pytest.mark.parametrize(
    "rows, forward, backward",
    [
        (40, "few_rows", "block16"),
        (700, "block16", "warps"),
        (5000, "many_rows", "block16"),
        (5000, "general", "general"),
        pytest.param(WARPGROUP_ROWS, "many_rows", "wgmma", marks=needs_hopper),
    ],
)
def test_differences_too_large_for_float16(rows, forward, backward):
    case = make_case(rows, DEFAULT, "cuda", DTYPES["fp16"])
    case.x[3] = -60000
    case.x[3, ::64] = 60000
    with forced(case, forward, backward):
        case.check()


def test_float32_is_exact_by_default():
    """With TF32 the error of a product would be some 1e-3 of its terms."""
    case = make_case(700, DEFAULT, "cuda")
    right = eager(*(t.double() for t in case.inputs))
    assert (autoencoder(*case.inputs) - right).abs().max() < 2e-5 * right.abs().max()


def test_a_declined_implementation_says_why():
    case = make_case(7, SMALL, "cuda", DTYPES["fp64"])
    check_all_but_general_decline("autoencoder", autoencoder, *case.inputs)


def test_other_streams():
    case = make_case(600, DEFAULT, "cuda")
    right = gradients(autoencoder, case)
    full, case.x = case.x, torch.zeros_like(case.x)
    found = late_on_side_stream([case.x], [full], lambda: gradients(autoencoder, case))
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
        found = torch.autograd.grad(result, inputs, case.gradient, materialize_grads=True)
        return [result, *found]

    check_graph(step, (*inputs, case.gradient))


@pytest.mark.two_gpus
def test_a_device_that_is_not_current():
    case = make_case(100, DEFAULT, "cuda:1")
    with torch.cuda.device(0):
        case.check_every_implementation()


def test_out_of_memory_leaves_nothing_behind():
    case = make_case(1, DEFAULT, "cuda")
    before = allocated()
    free, _ = torch.cuda.mem_get_info()
    x = case.x.expand(2 * free // (320 * 4), 320)
    assert fails_with_out_of_memory(lambda: autoencoder(x, *case.weights))
    assert allocated() == before


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
    assert peak(lambda: autoencoder(*case.inputs, output="score")) < case.x.nbytes / 10


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

    def step():
        result = model.anomaly_score(x).mean() if loss == "score" else F.mse_loss(model(x), x)
        result.backward()
        model.zero_grad()

    def eager_step():
        F.mse_loss(eager(x, *weights), x).backward()
        model.zero_grad()

    ours, eagers = peak(step), peak(eager_step)
    assert ours * share <= eagers
    if loss == "mse":
        theirs = 2 * x.nbytes  # of mse_loss itself
        assert (ours - theirs) * 4 <= eagers - theirs
