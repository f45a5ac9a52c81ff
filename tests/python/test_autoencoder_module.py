"""SpectralShapeAutoencoder: the module, its checkpoints, and the C++ example that reads them."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

from autoencoder_reference import (
    DEFAULT,
    OUTPUTS,
    eager,
    make_case,
)
from fusewise.models import SpectralShapeAutoencoder
from reference import same_bits

# --- the module --------------------------------------------------------------------------------


STATE = {
    "global_basis": (4, 15),
    "slice_encoder.0.weight": (6,),
    "slice_encoder.0.bias": (6,),
    "slice_encoder.1.weight": (5, 6),
    "slice_encoder.1.bias": (5,),
    "bottleneck_mlp.0.weight": (4,),
    "bottleneck_mlp.0.bias": (4,),
    "bottleneck_mlp.1.weight": (4, 4),
    "bottleneck_mlp.1.bias": (4,),
    "slice_decoder.0.weight": (6, 5),
    "slice_decoder.0.bias": (6,),
}
ORDER = [
    *list(STATE)[1:5],
    "global_basis",
    *list(STATE)[5:],
]


@pytest.fixture
def module(device):
    return SpectralShapeAutoencoder(6, 3, 4, 5, device=device)


def test_names_and_shapes_of_the_state_dict(module):
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == STATE
    assert [tuple(t.shape) for t in SpectralShapeAutoencoder().state_dict().values()][0] == (
        32,
        320,
    )


def test_methods_are_the_models(module, device):
    state = module.state_dict()
    weights = [state[name] for name in ORDER]
    for shape in ((7, 18), (7, 3, 6)):
        x = torch.randn(shape, device=device)
        y, z, score = module(x), module.encode(x), module.anomaly_score(x)
        assert y.shape == x.shape and z.shape == (7, 4) and score.shape == (7,)
        torch.testing.assert_close(y, eager(x, *weights))
        torch.testing.assert_close(z, eager(x, *weights, output="latent"))
        torch.testing.assert_close(score, eager(x, *weights, output="score"))
        torch.testing.assert_close(score, (y - x).square().flatten(1).mean(1))


def test_scores_of_half_data_are_float32(module, device):
    x = torch.randn(7, 18, device=device)
    assert module.half().anomaly_score(x.half()).dtype == torch.float32
    assert module(x.half()).dtype == module.encode(x.half()).dtype == torch.float16
    assert module.double().anomaly_score(x.double()).dtype == torch.float64
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_it_is_initialised_as_its_parts_are():
    torch.manual_seed(3)
    module = SpectralShapeAutoencoder(6, 3, 4, 5)
    again = SpectralShapeAutoencoder(6, 3, 4, 5, device="meta").to_empty(device="cpu")
    torch.manual_seed(3)
    again.reset_parameters()
    assert not any(t.isnan().any() for t in again.parameters())
    torch.manual_seed(3)
    linear = torch.nn.Linear(6, 5)
    assert torch.equal(module.slice_encoder[1].weight, linear.weight)
    for part in (module.slice_encoder[0], module.bottleneck_mlp[0]):
        assert (part.weight == 1).all() and (part.bias == 0).all()


def test_meta_device():
    module = SpectralShapeAutoencoder(device="meta", dtype=torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in module.parameters())
    assert module(torch.empty(2, 320, device="meta", dtype=torch.float64)).is_meta


def test_old_checkpoints_load(module):
    state = module.state_dict()
    state["global_decoder.weight"] = torch.randn(18, 15)
    fresh = SpectralShapeAutoencoder(6, 3, 4, 5)
    fresh.load_state_dict(state)
    nested = torch.nn.Sequential(SpectralShapeAutoencoder(6, 3, 4, 5))
    nested.load_state_dict({f"0.{name}": t for name, t in state.items()})
    for name, t in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name].to(t), t)
        assert torch.equal(nested.state_dict()[f"0.{name}"].to(t), t)
    assert "global_decoder.weight" in state  # the caller's own stays as it was


def test_a_checkpoint_that_does_not_fit_names_the_tensor(module):
    state = module.state_dict()
    state["bottleneck_mlp.1.weight"] = torch.randn(4, 5)
    with pytest.raises(RuntimeError, match="bottleneck_mlp.1.weight"):
        module.load_state_dict(state)


def _saved_and_loaded(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies(module, device, copied):
    x = torch.randn(7, 18, device=device)
    other = copied(module)
    assert torch.equal(other(x), module(x))
    with torch.no_grad():
        other.global_basis.zero_()
    assert module.global_basis.any() and not torch.equal(other(x), module(x))


def test_parametrized_and_pruned_parts_are_used(module, device):
    x = torch.randn(7, 18, device=device)
    before = module(x)
    torch.nn.utils.parametrizations.weight_norm(module.slice_encoder[1])
    torch.testing.assert_close(module(x), before)
    prune.random_unstructured(module.slice_decoder[0], "weight", 0.5)
    pruned = module(x)
    assert not torch.allclose(pruned, before)
    with torch.no_grad():
        module.slice_decoder[0].weight_orig.add_(1)
    assert not torch.allclose(module(x), pruned)
    for _ in range(2):
        module(x).sum().backward()
    module.slice_decoder[0] = torch.nn.Linear(5, 6, device=device)
    assert torch.autograd.grad(module(x).sum(), module.slice_decoder[0].bias)[0].any()


def test_functional_call(module, device):
    x = torch.randn(7, 18, device=device)
    doubled = {name: 2 * t for name, t in module.named_parameters()}
    ours = torch.func.functional_call(module, doubled, (x,))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(ours, module(x))


def test_training_lowers_the_score(device):
    torch.manual_seed(0)
    module = SpectralShapeAutoencoder(6, 3, 4, 5, device=device)
    x = torch.randn(64, 1, device=device) * torch.randn(18, device=device)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    scores = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = module.anomaly_score(x).mean()
        loss.backward()
        optimizer.step()
        scores.append(loss.item())
    assert scores[-1] < scores[0] / 2
    assert all(p.grad is not None for p in module.parameters())


def test_the_two_losses_have_the_same_gradients(module, device):
    x = torch.randn(33, 18, device=device)
    found = []
    for loss in (lambda: module.anomaly_score(x).mean(), lambda: F.mse_loss(module(x), x)):
        found.append(torch.autograd.grad(loss(), list(module.parameters())))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


def test_distributed_data_parallel(module, device, tmp_path):
    x = torch.randn(9, 18, device=device)
    module(x).square().sum().backward()
    right = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    backend, store = ("gloo" if device == "cpu" else "nccl"), f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(module)
        parallel(x).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close([p.grad for p in module.parameters()], right)


def test_repr():
    assert repr(SpectralShapeAutoencoder()).splitlines()[1] == (
        "  n_mels=64, frames=5, latent_dim=32, slice_latent_dim=64"
    )


@pytest.mark.parametrize("value", [0, -3, 2.0, "8", True])
@pytest.mark.parametrize("name", ["n_mels", "frames", "latent_dim", "slice_latent_dim"])
def test_bad_sizes(name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .*, got {value!r}"):
        SpectralShapeAutoencoder(**{name: value})


def test_the_rule_sees_another_formula(monkeypatch):
    """Even float32's is so near that GELU by tanh or another eps is not taken for rounding."""
    gelu, layer_norm = F.gelu, F.layer_norm
    wrong = {
        "gelu": lambda z: gelu(z, approximate="tanh"),
        "layer_norm": lambda x, *rest: layer_norm(x, *rest, eps=1e-3),
    }
    for output in OUTPUTS:
        case = make_case(40, DEFAULT, output=output)
        case.check_one(output, eager(*case.inputs, output=output))
        for name, function in wrong.items():
            with monkeypatch.context() as patched:
                patched.setattr(F, name, function)
                found = eager(*case.inputs, output=output)
            with pytest.raises(AssertionError, match=f"^{output}: off by"):
                case.check_one(output, found)


def test_bad_dtype():
    with pytest.raises(ValueError, match="^dtype: expected a floating dtype, got torch.int32"):
        SpectralShapeAutoencoder(dtype=torch.int32)


def test_errors_name_parameters_as_the_module_does(module, device):
    module.half()
    said = r"^slice_encoder\.0\.weight: expected x's dtype float32, got float16"
    with pytest.raises(RuntimeError, match=said):
        module(torch.ones(2, 18, device=device))


def test_rows_of_another_length(module, device):
    with pytest.raises(
        RuntimeError, match=r"^x: expected \[N, 18\] or \[N, 3, 6\], got \[\d+, 20\]"
    ):
        module(torch.ones(2, 20, device=device))


# --- .safetensors ------------------------------------------------------------------------------


def test_save_safetensors(module, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "weights.safetensors"
    module.save_safetensors(file)
    loaded = safetensors.load_file(file)
    assert loaded.keys() == STATE.keys()
    for name, t in module.state_dict().items():
        assert torch.equal(loaded[name], t.cpu())
    SpectralShapeAutoencoder(6, 3, 4, 5).load_state_dict(loaded)


def test_others_may_read_a_saved_file(module, tmp_path):
    """As any file that is written here: a service runs as another user."""
    pytest.importorskip("safetensors")
    (tmp_path / "plain").touch()
    module.save_safetensors(tmp_path / "weights.safetensors")
    modes = [path.stat().st_mode for path in sorted(tmp_path.iterdir())]
    assert modes[0] == modes[1]


def test_a_pruned_model_is_saved_as_it_computes(module, device, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    prune.l1_unstructured(module.slice_encoder[1], "weight", 0.5)
    module.save_safetensors(tmp_path / "weights.safetensors")
    plain = SpectralShapeAutoencoder(6, 3, 4, 5, device=device)
    plain.load_state_dict(safetensors.load_file(tmp_path / "weights.safetensors"))
    x = torch.randn(3, 18, device=device)
    assert same_bits(plain(x), module(x))
    assert (plain.slice_encoder[1].weight == 0).sum() == 15


def test_save_safetensors_without_the_package(module, monkeypatch, tmp_path):
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        module.save_safetensors(tmp_path / "weights.safetensors")
    assert not list(tmp_path.iterdir())


# --- C++ ---------------------------------------------------------------------------------------

SCORE = Path(__file__).parents[2] / "build" / "dev" / "tests" / "cpp" / "score"


def run_score(*arguments):
    if not SCORE.is_file():
        pytest.skip("examples/cpp/score.cpp is not built here; `make build` does it")
    return subprocess.run([SCORE, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_from_cpp_are_pythons(tmp_path, dtype):
    """The example of examples/cpp, with the weights that Python wrote."""
    pytest.importorskip("safetensors")
    module = SpectralShapeAutoencoder().to(dtype)
    x = torch.randn(70, 320)
    module.save_safetensors(tmp_path / "weights.safetensors")
    x.numpy().tofile(tmp_path / "rows.f32")
    done = run_score(tmp_path / "weights.safetensors", tmp_path / "rows.f32")
    if dtype == torch.float16:  # beside float32 rows they are of another type, and it says so
        assert done.returncode == 1
        assert "norm_weight: expected x's dtype float32, got float16" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    scores = torch.tensor([float(line) for line in done.stdout.split()])
    ours = module.anomaly_score(x).detach()
    torch.testing.assert_close(scores, ours, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_the_cpp_example_brings_rows_to_what_the_model_learned(tmp_path):
    """With the mean and deviation that the file carries, as examples/machine_sound writes them."""
    pytest.importorskip("safetensors")
    module = SpectralShapeAutoencoder()
    x = torch.randn(7, 320)
    (3 * x - 5).numpy().tofile(tmp_path / "rows.f32")
    module.save_safetensors(tmp_path / "w", {"mean": "-5.0", "deviation": "3.0"})
    done = run_score(tmp_path / "w", tmp_path / "rows.f32")
    scores = torch.tensor([float(line) for line in done.stdout.split()])
    torch.testing.assert_close(scores, module.anomaly_score(x).detach(), rtol=1e-5, atol=0)
    for metadata, said in (
        ({"mean": "much"}, "the file's mean is 'much', which is not a number"),
        ({"deviation": "nan"}, "the file's deviation is 'nan', which is not a number"),
        ({"deviation": "0"}, "expected a deviation above 0"),
    ):
        module.save_safetensors(tmp_path / "w", metadata)
        done = run_score(tmp_path / "w", tmp_path / "rows.f32")
        assert done.returncode == 1 and said in done.stderr, done.stderr


@pytest.mark.parametrize(
    "weights, rows, said",
    [
        (b"", bytes(1280), "weights: too short for a .safetensors file: 0 bytes"),
        (None, bytes(1280), "nothing: is not a file that can be read"),
        (
            "good",
            bytes(1279),
            "rows: has 1279 bytes, which is not a whole number of float32 values",
        ),
        ("good", bytes(1284), "rows: has 321 values, which is not a whole number of rows of 320"),
        ("truncated", bytes(1280), "do not lie in the"),
    ],
)
def test_bad_files_of_the_cpp_example(tmp_path, weights, rows, said):
    pytest.importorskip("safetensors")
    file = tmp_path / ("weights" if weights is not None else "nothing")
    if weights in ("good", "truncated"):
        SpectralShapeAutoencoder().save_safetensors(file)
        if weights == "truncated":
            file.write_bytes(file.read_bytes()[:-1])
    elif weights is not None:
        file.write_bytes(weights)
    (tmp_path / "rows").write_bytes(rows)
    done = run_score(file, tmp_path / "rows")
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert done.stdout == ""
