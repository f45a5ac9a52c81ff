"""A short list for a torch other than the one that the library was built with.

Plain Python, because the environment it runs in has torch and fusewise and nothing else.
"""

import torch

import fusewise
from fusewise._amx import avoid_broken_amx
from fusewise.bench.accuracy import Results, check
from fusewise.bench.families.squeeze_excite import expected, formula

avoid_broken_amx()
origin = "site-packages" if "site-packages" in fusewise.__file__ else "the source tree"
print(f"fusewise {fusewise.__version__} from {origin}, torch {torch.__version__}")


def inputs(dtype, layout=torch.contiguous_format):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 65, 7, 5), (3, 65), (3,), (65, 3), (65,)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    values[0] = values[0].to(memory_format=layout)
    return [value.requires_grad_() for value in values]


def forward_and_backward():
    """Every dtype and both layouts, with all five gradients."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            tensors = inputs(dtype, layout)
            outputs = []
            for function in (fusewise.functional.squeeze_excite, formula):
                y = function(*tensors, "silu")
                dy = torch.ones_like(y)
                outputs.append((y, *torch.autograd.grad(y, tensors, dy)))
            assert outputs[0][0].is_contiguous(memory_format=layout)
            right = expected(*tensors, dy)
            named = (dict(zip(right, each, strict=True)) for each in outputs)
            found = check(*(Results(each, right) for each in named))
            assert found.passed, found


def fake_kernels():
    """Tracing gives the sizes and strides that running gives."""
    x, *weights = inputs(torch.float32, torch.channels_last)
    real = fusewise.functional.squeeze_excite(x, *weights, "silu")
    meta = fusewise.functional.squeeze_excite(
        torch.empty_like(x, device="meta"), *(weight.to("meta") for weight in weights), "silu"
    )
    assert meta.shape == real.shape and meta.stride() == real.stride()


def export():
    """A module with a batch of any size."""
    module = fusewise.nn.SqueezeExcitation(8, 2, "silu")
    x = torch.randn(4, 8, 6, 6)
    exported = torch.export.export(
        module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )
    other = torch.randn(7, 8, 6, 6)
    torch.testing.assert_close(exported.module()(other), module(other))


def linear_layers():
    """Every dtype and activation, against torch's own layers; one layer and a stack."""
    functional = torch.nn.functional
    kinds = {
        "identity": lambda z: z,
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
        "silu": functional.silu,
    }
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for name, activate in kinds.items():
            shapes = (2, 33, 65), (40, 65), (40,), (7, 40), (7,)
            values = [
                torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes
            ]
            x, w1, b1, w2, b2 = tensors = [v.to(dtype).requires_grad_() for v in values]
            hidden = activate(functional.linear(x, w1, b1))
            pairs = (
                (fusewise.functional.linear_act(x, w1, b1, name), hidden),
                (
                    fusewise.functional.mlp(x, [w1, w2], [b1, b2], name),
                    functional.linear(hidden, w2, b2),
                ),
            )
            for ours, eager in pairs:
                used = tensors if ours.shape[-1] == 7 else tensors[:3]
                dy = torch.ones_like(ours) / 64
                tolerance = 40 * torch.finfo(dtype).eps
                torch.testing.assert_close(
                    [ours, *torch.autograd.grad(ours, used, dy)],
                    [eager, *torch.autograd.grad(eager, used, dy, retain_graph=True)],
                    atol=tolerance,
                    rtol=tolerance,
                )


def linear_modules():
    """Traced, run, compiled without a gradient, and exported with a batch of any size."""
    for module in (fusewise.nn.LinearAct(8, 6, activation="gelu"), fusewise.nn.MLP([8, 12, 6])):
        x = torch.randn(4, 8)
        meta = module.to("meta")(x.to("meta"))
        module.to_empty(device="cpu").reset_parameters()
        real = module(x)
        assert meta.shape == real.shape and meta.stride() == real.stride()
        exported = torch.export.export(
            module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
        )
        other = torch.randn(7, 8)
        torch.testing.assert_close(exported.module()(other), module(other))


def autoencoder():
    """Every dtype and output against torch's own operators; traced, and exported."""
    from fusewise.bench.families.autoencoder import OUTPUTS, eager, random_weights
    from fusewise.models._autoencoder import autoencoder

    generator = torch.Generator().manual_seed(0)

    def draw(shape, scale=1.0):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    weights, x = random_weights(9, 3, 5, 7, draw), draw((33, 27))
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors = [t.to(dtype).requires_grad_() for t in (x, *weights)]
        for output in OUTPUTS:
            found = []
            for function in (autoencoder, eager):
                result = function(*tensors, output=output)
                gradient = torch.ones_like(result) / 64
                found.append(
                    [
                        result,
                        *torch.autograd.grad(result, tensors, gradient, materialize_grads=True),
                    ]
                )
            tolerance = 60 * torch.finfo(dtype).eps
            torch.testing.assert_close(*found, atol=tolerance, rtol=tolerance)
    module = fusewise.models.SpectralShapeAutoencoder(9, 3, 5, 7)
    rows = torch.randn(4, 27)
    assert module.to("meta")(rows.to("meta")).shape == rows.shape
    module.to_empty(device="cpu").reset_parameters()
    exported = torch.export.export(
        module, (rows,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )
    torch.testing.assert_close(exported.module()(x.float()), module(x.float()))


def batch_norm():
    """Every dtype, activation and layout against torch's own layers; traced, exported, compiled."""
    functional = torch.nn.functional
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for name in ("identity", "relu", "relu6", "silu", "hardswish"):
            for layout in (torch.contiguous_format, torch.channels_last):
                x, residual = (
                    torch.randn((3, 9, 5, 4), generator=generator).to(dtype, memory_format=layout)
                    for _ in range(2)
                )
                tensors = [t.requires_grad_() for t in (x, residual)]
                y = fusewise.functional.batch_norm_act(
                    x, None, None, residual=residual, activation=name, training=True
                )
                v = functional.batch_norm(x, None, None, training=True) + residual
                eager = v if name == "identity" else getattr(functional, name)(v)
                tolerance = 60 * torch.finfo(dtype).eps
                torch.testing.assert_close(y, eager, atol=tolerance, rtol=tolerance)
                assert y.is_contiguous(memory_format=layout)
                torch.autograd.grad(y, tensors, torch.ones_like(y))
    for max_pool in (False, True):
        module = fusewise.nn.BatchNormAct2d(8, max_pool=max_pool)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x = torch.randn(4, 8, 6, 6)
        compiled(x).sum().backward()
        assert module.num_batches_tracked == 1
        exported = torch.export.export(
            module.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
        )
        other = torch.randn(7, 8, 6, 6)
        torch.testing.assert_close(exported.module()(other), module(other))


def batch_norm_excite():
    """Every dtype and layout against torch's own layers; compiled, and exported."""
    functional = torch.nn.functional
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 9, 5, 4), (9,), (9,), (12, 9, 1, 1), (12,), (9, 12, 1, 1), (9,)

    def eager(x, weight, bias, *excitation):
        v = functional.batch_norm(x, None, None, weight, bias, training=True)
        return formula(functional.silu(v), *excitation, "silu")

    def ours(x, *parameters):
        return fusewise.functional.batch_norm_excite(x, None, None, *parameters, training=True)

    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            values = [torch.randn(shape, generator=generator) for shape in shapes]
            values[0] = values[0].to(memory_format=layout)
            tensors = [value.to(dtype).requires_grad_() for value in values]
            y, right = ours(*tensors), eager(*tensors)
            assert y.is_contiguous(memory_format=layout)
            tolerance = 100 * torch.finfo(dtype).eps
            found, expected = (
                [t, *torch.autograd.grad(t, tensors, torch.ones_like(t) / 64)] for t in (y, right)
            )
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)

    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm2d(8)
            self.weights = torch.nn.ParameterList([torch.randn(2, 8), torch.randn(8, 2)])

        def forward(self, x):
            w1, w2 = self.weights
            return fusewise.functional.batch_norm_excite(
                x,
                self.norm.running_mean,
                self.norm.running_var,
                self.norm.weight,
                self.norm.bias,
                w1,
                None,
                w2,
                None,
                training=self.training,
                num_batches_tracked=self.norm.num_batches_tracked,
            )

    module, x = Chain(), torch.randn(4, 8, 6, 6)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    assert module.norm.num_batches_tracked == 1
    exported = torch.export.export(
        module.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )
    other = torch.randn(7, 8, 6, 6)
    torch.testing.assert_close(exported.module()(other), module(other))


def linet():
    """A training step against the formula; compiled, with a batch of another size."""
    torch.manual_seed(0)
    model = fusewise.models.li_resnet18((3, 1), num_classes=5, width=0.125).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (3, 4):
        images = [torch.randn(batch, c, 33, 40, dtype=torch.float64) for c in (3, 1)]
        blanked = torch.arange(2 * batch).view(2, batch) % 5 == 0
        found = []
        for call in (model, compiled):
            y = call(*images, blanked=blanked)
            found.append([y, *torch.autograd.grad(y.sum(), list(model.parameters()))])
        torch.testing.assert_close(*found)
        with fusewise.implementation(li_conv="torch"):
            y = model(*images, blanked=blanked)
        torch.testing.assert_close(y, found[0][0])


def bad_input():
    """Errors keep their words."""
    try:
        fusewise.functional.squeeze_excite(torch.randn(2, 3), *inputs(torch.float32)[1:], "silu")
    except (RuntimeError, ValueError) as error:
        assert "x" in str(error).split(":")[0], error
    else:
        raise AssertionError("a two-dimensional x was accepted")
    try:
        fusewise.functional.linear_act(torch.randn(2, 3), torch.randn(4, 5))
    except (RuntimeError, ValueError) as error:
        assert str(error).startswith("w: expected [N, 3]"), error
    else:
        raise AssertionError("a weight of another size was accepted")


if __name__ == "__main__":
    for test in (
        forward_and_backward,
        fake_kernels,
        export,
        linear_layers,
        linear_modules,
        autoencoder,
        batch_norm,
        batch_norm_excite,
        linet,
        bad_input,
    ):
        test()
        print(f"  {test.__name__}: passed")
