"""Linear + activation and stacks of it where only a GPU can show it.

The matrix of dtypes, layouts and functions is in tests/python and runs on the GPU too.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fusewise
from fusewise.functional import linear_act, mlp
from gpu_helpers import (
    allocated,
    check_graph,
    check_memory_is_flat,
    check_out_of_memory_in_backward,
    check_reduce_overhead,
    fails_with_out_of_memory,
    late_on_side_stream,
    matmul_settings,
    needs_gpu,
    on_side_stream,
    peak,
    train_under_autocast,
)
from linear_reference import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    Case,
    assert_close,
    eager,
    eager_mlp,
    gradients,
    make_case,
    make_mlp_case,
    same_bits,
)

pytestmark = needs_gpu


# --- every implementation -----------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16", "fp64", "fp16-fp32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sizes_that_suit_the_gpu(dtypes, activation):
    for m, k, n in ((256, 256, 512), (1024, 784, 2048), (300, 130, 1000), (4096, 64, 72)):
        make_case((m,), k, n, "cuda", DTYPES[dtypes], activation).check_every_implementation()


def test_both_forward_implementations_are_able_where_they_should_be():
    def able(activation, dtypes, grad):
        case = make_case((256,), 256, 512, "cuda", DTYPES[dtypes], activation)
        forced = case.implementations(backward=grad)
        return {choice["linear_act"] for choice in forced if "linear_act" in choice}

    for dtypes in ("fp32", "fp16", "bf16", "fp64"):
        for grad in (False, True):
            # The epilogue only where one of the vendor's algorithms keeps NaN.
            assert able("relu", dtypes, grad) >= {"pass"}
            assert able("silu", dtypes, grad) == able("gelu", dtypes, grad) == {"pass"}
    assert able("relu", "bf16", False) == able("relu", "bf16", True) == {"epilogue", "pass"}
    assert able("gelu_tanh", "bf16", True) == able("gelu_tanh", "fp32", False) == {"pass"}
    assert able("gelu_tanh", "fp16", False) == {"pass"}


def test_a_declined_implementation_says_why():
    case = make_case((64,), 64, 64, "cuda", activation="silu")
    with (
        fusewise.implementation(linear_act="epilogue"),
        pytest.raises(RuntimeError, match="'epilogue' declines: cuBLASLt has no epilogue"),
    ):
        linear_act(*case.arguments)


@pytest.mark.parametrize("dtypes", ["fp16", "fp32"])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_a_hidden_layer_larger_than_the_cache(dtypes, activation):
    case = make_mlp_case((5000,), (64, 4096, 48), "cuda", DTYPES[dtypes], activation)
    case.check_every_implementation()


def test_cpu_and_cuda_agree():
    for dtypes, activation in (("fp64", "gelu"), ("fp32", "relu")):
        case = make_case((65,), 129, 33, "cuda", DTYPES[dtypes], activation)
        cpu = Case(*(t.cpu() for t in (*case.inputs, case.dy)), activation)
        ours, theirs = gradients(case), gradients(cpu)
        for name in ours:
            torch.testing.assert_close(ours[name].cpu(), theirs[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["x", "w", "b"])
@pytest.mark.parametrize("other", ["cpu", "cuda"])
def test_mixed_devices(name, other):
    case = make_case((4,), 6, 5, "cuda" if other == "cpu" else "cpu")
    setattr(case, name, getattr(case, name).to(other))
    with pytest.raises(RuntimeError, match=r"^[xwb]: expected a tensor on \w+.*got one on"):
        linear_act(*case.arguments)


# --- > 2^31 elements, > 65535 in any dimension --------------------------------------------------


def check_in_pieces(found, x, w, b, dy, activation, rows=1 << 16):
    """Row by row, as the whole in fp64 takes too much memory; dw and db summed up over pieces."""
    total = None
    for start in range(0, len(x), rows):
        cut = slice(start, start + rows)
        right = Case(x[cut], w, b, dy[cut], activation).reference()
        if activation == "relu":
            # Of so many elements some are so near to 0 that rounding decides on which side; y,
            # whose sign is compared too, tells on which they came out.
            open_dy = dy[cut] * (found["y"][cut] > 0)
            masked = Case(x[cut], w, b, open_dy, "identity").reference()
            right |= {name: masked[name] for name in ("dx", "dw", "db")}
        for name in ("y", "dx"):
            value, scale, decided = right[name]
            assert_close(name, found[name][cut], value.to(x.dtype), value, scale, decided)
        sums = {name: right[name][:2] for name in ("dw", "db")}
        total = (
            sums
            if total is None
            else {
                name: (total[name][0] + sums[name][0], total[name][1] + sums[name][1])
                for name in sums
            }
        )
    for name, (value, scale) in total.items():
        assert_close(name, found[name], value.to(x.dtype), value, scale)


@pytest.mark.parametrize("k, n", [(1024, 8), (8, 1024)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_more_than_2_to_the_31_elements(k, n, activation):
    m = (1 << 21) + 8
    assert m * max(k, n) > 2**31
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GiB of GPU memory")

    def draw(*size):
        return torch.empty(size, dtype=torch.float16, device="cuda").normal_()

    x, w, b, dy = draw(m, k), draw(n, k) / k**0.5, draw(n), draw(m, n)
    dy = dy / 64  # so that sums over two million rows stay inside of fp16
    inputs = [t.requires_grad_() for t in (x, w, b)]
    y = linear_act(*inputs, activation)
    found = dict(zip(("dx", "dw", "db"), torch.autograd.grad(y, inputs, dy), strict=True))
    with torch.no_grad():
        check_in_pieces({"y": y, **found}, x, w, b, dy, activation)


@pytest.mark.parametrize(
    "m, k, n", [(70000, 8, 8), (8, 70000, 8), (8, 8, 70000), (70001, 3, 5), (3, 5, 70001)], ids=str
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "stepped"])
def test_more_than_65535_of_anything(m, k, n, layout):
    case = make_case((m,), k, n, "cuda", DTYPES["bf16"], "gelu", layout=layout, dy_layout=layout)
    case.check_every_implementation()


# --- streams, graphs, devices -------------------------------------------------------------------


@pytest.fixture(params=["relu", "gelu"])
def case(request):
    return make_case((512,), 256, 384, "cuda", DTYPES["fp16"], request.param)


def test_side_stream(case):
    for choice in case.implementations():
        with fusewise.implementation(**choice):
            expected = gradients(case)
            late = Case(*(torch.zeros_like(t) for t in (*case.inputs, case.dy)), case.activation)
            empty, full = (*late.inputs, late.dy), (*case.inputs, case.dy)
            found = late_on_side_stream(empty, full, lambda late=late: gradients(late))
        for output in expected:
            assert same_bits(found[output], expected[output]), f"{choice}: {output}"


def test_the_first_use_on_a_side_stream():
    """Then algorithms are measured on that stream, and the result is that of a later call."""
    case = make_case((511,), 264, 392, "cuda", DTYPES["fp16"], "relu")
    found = on_side_stream(lambda: gradients(case))
    expected = gradients(case)
    for output in expected:
        assert same_bits(found[output], expected[output])


def test_several_threads_at_once():
    """On their own streams, with sizes not measured before, two of them the same."""
    cases = [
        make_case((257,), k, 392, "cuda", DTYPES["bf16"], "relu") for k in (72, 72, 88, 104, 120)
    ]
    torch.cuda.synchronize()

    def work(case):
        return on_side_stream(lambda: [gradients(case) for _ in range(5)])

    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(work, cases))
    for case, found in zip(cases, results, strict=True):
        expected = case.check()
        for each in found:
            assert all(same_bits(each[output], expected[output]) for output in expected)


def make_step(case):
    """Forward and backward, and the tensors that they read."""
    inputs = [t.detach().clone().requires_grad_() for t in case.inputs]
    dy = case.dy.clone()

    def step():
        y = case.call(case.ours, inputs)
        return [y, *torch.autograd.grad(y, inputs, dy)]

    return step, (*inputs, dy)


@pytest.mark.parametrize("kind", ["linear_act", "mlp"])
def test_cuda_graph(case, kind):
    if kind == "mlp":
        case = make_mlp_case((512,), (256, 384, 64), "cuda", DTYPES["fp16"], case.activation)
    for choice in case.implementations():
        step, inputs = make_step(case)
        with fusewise.implementation(**choice):
            check_graph(step, inputs)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_first_use_inside_a_capture(activation):
    """Nothing is measured there; what is taken then stays, so results do not change afterwards."""
    case = make_case((520,), 272, 328, "cuda", DTYPES["bf16"], activation)
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    step, inputs = make_step(case)
    check_graph(step, inputs, warm=False)


@pytest.mark.two_gpus
def test_second_device_while_the_first_is_current():
    assert torch.cuda.current_device() == 0
    for case in (
        make_case((64,), 96, 40, "cuda:1", DTYPES["fp16"], "relu"),
        make_mlp_case((64,), (96, 40, 24), "cuda:1", DTYPES["fp16"], "gelu"),
    ):
        case.check_every_implementation()
    assert torch.cuda.current_device() == 0
    case = make_case((64,), 96, 40, "cuda:1")
    case.w = case.w.to("cuda:0")
    with pytest.raises(RuntimeError, match="^w: expected a tensor on cuda:1, got one on cuda:0"):
        linear_act(*case.arguments)


# --- what torch is set to -----------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_tf32_as_torch_is_set(activation):
    errors = {}
    case = make_case((256,), 512, 384, "cuda", DTYPES["fp32"], activation)
    for value in ("tf32", "ieee", "tf32"):  # TF32 first: dy is 0 at its kinks, which are more
        case._expected = None
        with matmul_settings(fp32_precision=value):
            ours = case.check()
            right = case.reference()
        error = {n: (ours[n] - right[n][0]).abs().max().item() for n in ours}
        if value in errors:
            assert errors[value] == error  # back to what it was
        errors[value] = error
    for name in ("y", "dx", "dw"):
        assert errors["tf32"][name] > 10 * errors["ieee"][name], name


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_sums_of_halves_as_torch_is_set(name):
    """Few outputs and long sums, which vendors split. Where parts are added in half, they blur the
    sign of z, for torch too: then without relu."""
    for value, activation in ((False, "relu"), (True, "gelu")):
        with matmul_settings(**{f"allow_{name}_reduced_precision_reduction": value}):
            case = make_case((32,), 16384, 32, "cuda", DTYPES[name], activation)
            case.check_every_implementation()


def test_deterministic_algorithms(monkeypatch):
    case = make_case((512,), 256, 384, "cuda", DTYPES["fp16"], "relu")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        case.check_every_implementation()
    finally:
        torch.use_deterministic_algorithms(False)


# --- memory -------------------------------------------------------------------------------------


def test_out_of_memory_forward():
    """Inputs without features cost nothing, their result 2^45 bytes."""
    x = torch.zeros(2**22, 0, device="cuda", dtype=torch.float16)
    small = make_case((4,), 6, 5, "cuda", DTYPES["fp16"])
    before = allocated()
    for learned in (False, True):
        for activation in ("relu", "gelu"):
            w = torch.zeros_like(x).requires_grad_(learned)
            assert fails_with_out_of_memory(lambda w=w, a=activation: linear_act(x, w, None, a))
            last = torch.zeros(1, 2**22, device="cuda", dtype=torch.float16)
            assert fails_with_out_of_memory(
                lambda w=w, a=activation, last=last: mlp(x, [w, last], None, a)
            )
    del w, last
    assert allocated() == before
    assert linear_act(*small.arguments).isfinite().all()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_out_of_memory_backward(activation):
    case = make_case((16384,), 1024, 1024, "cuda", DTYPES["fp16"], activation)
    dx = gradients(case)["dx"]
    check_out_of_memory_in_backward(
        lambda *inputs: linear_act(*inputs, activation),
        case.inputs,
        case.dy,
        room=8 * 2**20,  # dx alone is 32 MiB
        dx=dx,
    )


def training_peak(case, fn):
    """Of forward and backward into .grad, as in training: y is gone when backward runs."""
    inputs = [t.detach().requires_grad_() for t in case.inputs]

    def step():
        case.call(fn, inputs).backward(case.dy)
        for t in inputs:
            t.grad = None

    return peak(step)


@pytest.mark.parametrize("m, k, n", [(8192, 4096, 4096), (2048, 1024, 1024)], ids=str)
def test_peak_memory_of_relu_is_below_eagers(m, k, n):
    case = make_case((m,), k, n, "cuda", DTYPES["bf16"], "relu")
    ours, theirs = training_peak(case, linear_act), training_peak(case, eager)
    assert ours < theirs, f"{ours} of {theirs} bytes"
    with torch.no_grad():
        inference = [peak(lambda fn=fn: fn(*case.arguments)) for fn in (linear_act, eager)]
    # Eager's relu has z beside y; the vendor's workspace is all that may come to ours.
    assert inference[0] <= inference[1] + (32 << 20)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_peak_memory_of_the_others_is_not_above_eagers(activation):
    case = make_case((8192,), 2048, 2048, "cuda", DTYPES["bf16"], activation)
    assert training_peak(case, linear_act) <= training_peak(case, eager) + (32 << 20)


def test_peak_memory_of_a_stack_is_not_above_eagers():
    case = make_mlp_case((8192,), (1024, 2048, 2048, 1024), "cuda", DTYPES["bf16"], "relu")
    assert training_peak(case, mlp) <= training_peak(case, eager_mlp)


def test_inference_of_a_stack_needs_two_outputs_at_a_time():
    case = make_mlp_case((16384,), (2048,) * 5, "cuda", DTYPES["bf16"], "relu")
    with torch.no_grad():
        inputs = [t.detach() for t in case.inputs]
        used = peak(lambda: case.call(mlp, inputs))
    assert used <= 2 * case.dy.nbytes + (32 << 20)  # beside them the vendor's workspace


def test_memory_is_flat_over_many_calls(case):
    stack = make_mlp_case((64,), (96, 40, 24), "cuda", DTYPES["fp16"], case.activation)

    def step():
        gradients(case)
        gradients(stack)

    check_memory_is_flat(step)


# --- the file of measured algorithms ------------------------------------------------------------

TUNED = """
    import hashlib, os, warnings
    os.dup2(1, 2)  # a warning is one of Python's or a line of the library's own
    warnings.simplefilter("always")
    import torch
    from linear_reference import gradients, make_case
    torch.manual_seed(0)
    found = []
    for activation in ("relu", "gelu"):
        for m, k, n in ((256, 256, 512), (333, 136, 72)):
            case = make_case((m,), k, n, "cuda", activation=activation)
            found += [t.cpu().numpy().tobytes() for t in gradients(case).values()]
    print(hashlib.sha256(b"".join(found)).hexdigest())
"""


def read(output):
    """The hash of all results of a process, and how many warnings it gave."""
    return output.split()[-1], output.count("it is ignored and will be written again")


@pytest.fixture
def tuned(run_python):
    """Runs the program once for each folder, all at once, and reads what they say."""

    def run(*folders, tune="1"):
        def one(folder):
            return read(run_python(TUNED, XDG_CACHE_HOME=str(folder), FUSEWISE_TUNE=tune))

        with ThreadPoolExecutor() as pool:
            return list(pool.map(one, folders))

    return run


@pytest.fixture(scope="module")
def measured(run_python, tmp_path_factory):
    """A folder with measured algorithms, and what the process that measured them said."""
    folder = tmp_path_factory.mktemp("measured")
    return folder, read(run_python(TUNED, XDG_CACHE_HOME=str(folder)))


def entries(folder):
    lines = (folder / "fusewise" / "products").read_text().splitlines()
    assert lines[0] == "fusewise choices 1"
    return lines[1:]


def keys(folder):
    return [line.split("\t")[0] for line in entries(folder)]


def test_choices_outlive_the_process(tuned, measured, tmp_path):
    folder, first = measured
    assert first[1] == 0
    kept = entries(folder)
    assert kept and all(torch.cuda.get_device_name() in line for line in kept)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert tuned(tmp_path) == [first]
    assert entries(tmp_path) == kept  # nothing was measured again


def test_a_damaged_file_is_told_once_and_written_anew(tuned, measured, tmp_path):
    folder, _ = measured
    good = (folder / "fusewise" / "products").read_text()
    folders = []
    for i, damaged in enumerate(("nonsense", good[:-30], good.replace(" 0", " 1"))):
        folders.append(tmp_path / str(i))
        (folders[-1] / "fusewise").mkdir(parents=True)
        (folders[-1] / "fusewise" / "products").write_text(damaged)
    assert [told for _, told in tuned(*folders)] == [1, 1, 1]
    assert [keys(each) for each in folders] == [keys(folder)] * 3
    assert [told for _, told in tuned(*folders)] == [0, 0, 0]


def test_nothing_is_measured_where_nobody_wants_it(tuned, measured, tmp_path):
    empty, full = tmp_path / "empty", tmp_path / "full"
    shutil.copytree(measured[0], full)
    first, second, third = tuned(empty, empty, full, tune="0")
    assert not (empty / "fusewise" / "products").exists()
    assert first == second
    assert first == third, "what was measured was used"


def test_a_folder_that_cannot_be_written(tuned, tmp_path):
    (tmp_path / "fusewise").write_text("in the way")
    tuned(tmp_path)


def test_two_processes_at_once(tuned, tmp_path):
    """Both measure and write; whatever each took, the file is whole."""
    assert [told for _, told in tuned(tmp_path, tmp_path)] == [0, 0]
    assert entries(tmp_path) and len(set(keys(tmp_path))) == len(keys(tmp_path))


# --- whole models -------------------------------------------------------------------------------


def test_training_step_under_autocast():
    """Against torch's own layers, loss for loss."""
    losses = []
    for fused in (True, False):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(
            torch.nn.Linear(48, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32), torch.nn.ReLU()
        ).cuda()
        model = fusewise.nn.MLP.from_sequential(layers) if fused else layers
        x = torch.randn(256, 48, device="cuda")
        losses.append(train_under_autocast(model, x)[1])
        assert layers[0].weight.grad.dtype == torch.float32
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_compile_with_cuda_graphs(kind):
    if kind == "linear":
        module = fusewise.nn.LinearAct(64, 48, device="cuda")
    else:
        module = fusewise.nn.MLP([64, 96, 48], "gelu", device="cuda")
    check_reduce_overhead(module, lambda: torch.randn(32, 64, device="cuda"))


def test_layouts_of_halves_on_the_gpu():
    """Odd leading dimensions of sliced rows, for both forward implementations."""
    for layout in LAYOUTS:
        for k, n in ((65, 33), (64, 40)):
            make_case(
                (48,), k, n, "cuda", DTYPES["bf16"], "relu", layout=layout, w_layout=layout
            ).check_every_implementation()
