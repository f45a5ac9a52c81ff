"""The calls for compute-sanitizer: every implementation, small and odd shapes, both directions.

    python3 tools/sanitizer_calls.py FAMILY

The shapes are small because a kernel runs a hundred times slower under the sanitizer.
"""

import itertools
import os
import sys

import torch

import fusewise

SHAPES = (
    # n, channels, height, width, reduced
    (2, 64, 8, 8, 8),
    (3, 65, 7, 5, 3),
    (1, 1, 1, 1, 1),
    (2, 336, 12, 12, 14),
    (5, 264, 3, 3, 33),
)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def call(shape, dtype, layout) -> None:
    n, channels, height, width, reduced = shape
    weights = (reduced, channels), (reduced,), (channels, reduced), (channels,)
    sizes = ((n, channels, height, width), *weights)
    tensors = [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
    tensors[0] = tensors[0].to(memory_format=layout)
    for choice in choices(tensors):
        with fusewise.implementation(**choice):
            learned = [tensor.detach().requires_grad_() for tensor in tensors]
            y = fusewise.functional.squeeze_excite(*learned, "silu")
            torch.autograd.grad(y, learned, torch.ones_like(y))


def choices(tensors) -> list[dict[str, str]]:
    """Every implementation that can run the call, in both directions if it has both."""
    learned = [tensor.detach().requires_grad_() for tensor in tensors]
    forward, backward = fusewise.explain(fusewise.functional.squeeze_excite, *learned, "silu")
    able = {"squeeze_excite": forward.able, "squeeze_excite_backward": backward.able}
    return [
        {operator: name for operator, names in able.items() if name in names}
        for name in dict.fromkeys(forward.able + backward.able)
    ]


MATRICES = (
    # rows, in, out
    (40, 32, 24),
    (3, 65, 7),
    (1, 1, 1),
    (300, 16, 130),
)


def linear_calls(size, dtype) -> int:
    """A linear layer and a stack of two: every activation and implementation, both directions."""
    rows, k, n = size
    sizes = (rows, k), (n, k), (n,), (5, n), (5,)
    x, w, b, w2, b2 = tensors = [torch.randn(s, device="cuda", dtype=dtype) for s in sizes]
    done = 0
    for activation in ("identity", "relu", "gelu", "gelu_tanh", "silu"):
        learned = [tensor.detach().requires_grad_() for tensor in tensors]
        records = fusewise.explain(fusewise.functional.linear_act, *learned[:3], activation)
        for forward in records[0].able:
            for backward in records[1].able:
                with fusewise.implementation(linear_act=forward, linear_act_backward=backward):
                    y = fusewise.functional.linear_act(*learned[:3], activation)
                    # Once with the gradient of a sum, which has stride 0, and once with a dense
                    # gradient.
                    torch.autograd.grad(y.sum(), learned[:3], retain_graph=True)
                    torch.autograd.grad(y, learned[:3], torch.ones_like(y))
                done += 1
        with torch.no_grad():  # not forced: an implementation may decline these
            fusewise.functional.linear_act(x, w, None, activation)
            fusewise.functional.linear_act(x[:, ::2], w[:, ::2], b, activation)
        lx, lw, lb, lw2, lb2 = learned
        y = fusewise.functional.mlp(lx, [lw, lw2], [lb, lb2], activation, "relu")
        torch.autograd.grad(y, learned, torch.ones_like(y))
        done += 1
    return done


def padded_call() -> int:
    """Large enough that the unaligned operands are padded."""
    sizes = (600, 999), (1001, 999), (1001,)
    learned = [torch.randn(s, device="cuda", dtype=torch.float16) for s in sizes]
    learned = [tensor.requires_grad_() for tensor in learned]
    y = fusewise.functional.linear_act(*learned, "relu")
    torch.autograd.grad(y, learned, torch.ones_like(y))
    return 1


AUTOENCODERS = (
    # rows, mels, frames, latent, slice latent
    (20, 64, 5, 32, 64),
    (20, 64, 2, 32, 64),
    (3, 33, 2, 17, 70),
    (3, 130, 2, 17, 20),  # too many columns for norm_linear.cu
    (1, 1, 1, 1, 1),
    # any_size.cu with two and four rows per block on 132 SMs; the last block is not full
    (201, 9, 2, 5, 7),
    (301, 9, 2, 5, 7),
)
MANY_ROWS = 2128  # of the default model: forward's kernel for many rows, backward's twice a block
WARPGROUP_ROWS = 24037  # of the default model: backward's kernel for many rows, in TF32 and fp16


def autoencoder_size(size, dtype) -> int:
    """Every output and implementation, both directions, on contiguous and on strided rows."""
    rows, mels, frames, latent, slices = size
    model = fusewise.models.SpectralShapeAutoencoder(
        mels, frames, latent, slices, device="cuda", dtype=dtype
    )
    learned = list(model.parameters())
    dense = torch.randn(rows, frames * mels, device="cuda", dtype=dtype)
    strided = torch.randn(rows, mels, frames, device="cuda", dtype=dtype).transpose(1, 2)
    done = 0
    for output in (model, model.encode, model.anomaly_score):
        for x, pairs in ((dense, itertools.product), (strided, zip)):
            forward, backward = fusewise.explain(output, x.requires_grad_())
            for ahead, back in pairs(forward.able, backward.able):
                with fusewise.implementation(autoencoder=ahead, autoencoder_backward=back):
                    result = output(x)
                    torch.autograd.grad(result, [x, *learned], torch.ones_like(result))
                done += 1
    return done


def autoencoder_many_rows(rows, dtype) -> int:
    model = fusewise.models.SpectralShapeAutoencoder(device="cuda", dtype=dtype)
    x = torch.randn(rows, 320, device="cuda", dtype=dtype).requires_grad_()
    for output in (model, model.anomaly_score):
        result = output(x)
        torch.autograd.grad(result, [x, *model.parameters()], torch.ones_like(result))
    return 2


def squeeze_excite_calls() -> int:
    for shape in SHAPES:
        for dtype in (torch.float16, torch.float32):
            for layout in LAYOUTS:
                call(shape, dtype, layout)
    return len(SHAPES) * 2 * len(LAYOUTS)


def linear_act_calls() -> int:
    done = sum(
        linear_calls(size, dtype) for size in MATRICES for dtype in (torch.float16, torch.float32)
    )
    return done + padded_call()


def autoencoder_calls() -> int:
    dtypes = (torch.float16, torch.float32)
    done = sum(autoencoder_size(size, dtype) for size in AUTOENCODERS for dtype in dtypes)
    done += sum(autoencoder_many_rows(MANY_ROWS, dtype) for dtype in dtypes)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    return done + sum(autoencoder_many_rows(WARPGROUP_ROWS, dtype) for dtype in dtypes)


def batch_norm_call(shape, dtype, layout, max_pool) -> int:
    """Every activation and implementation, with a residual or a max-pool, in both directions."""
    done = 0
    x = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=layout)
    weight, bias = (torch.randn(shape[1], device="cuda") for _ in range(2))
    statistics = torch.zeros(shape[1], device="cuda"), torch.ones(shape[1], device="cuda")
    learned = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    residual = None if max_pool else torch.randn_like(x)
    name = "batch_norm_act_pool" if max_pool else "batch_norm_act"
    for activation in ("identity", "relu", "relu6", "silu", "hardswish"):

        def call(x, activation=activation):
            return fusewise.functional.batch_norm_act(
                x,
                *statistics,
                weight,
                bias,
                residual,
                activation=activation,
                training=True,
                max_pool=max_pool,
            )

        forward, backward = fusewise.explain(call, x)
        for choice in itertools.zip_longest(forward.able, backward.able, fillvalue=""):
            names = dict(zip((name, f"{name}_backward"), choice, strict=True))
            with fusewise.implementation(**names):
                y = call(x)
                torch.autograd.grad(y, learned, torch.ones_like(y))
            done += 1
    return done


def batch_norm_calls() -> int:
    return sum(
        batch_norm_call(shape[:4], dtype, layout, max_pool)
        for shape in SHAPES
        if shape[0] * shape[2] * shape[3] > 1
        for dtype in (torch.float16, torch.float32)
        for layout in LAYOUTS
        for max_pool in (False, True)
    )


def batch_norm_excite_call(shape, dtype, layout) -> int:
    """Every activation and implementation, in both directions, with float32 parameters."""
    n, channels, height, width, reduced = shape
    done, sizes = 0, ((channels,), (channels,), (reduced, channels), (reduced,))
    x = torch.randn(n, channels, height, width, device="cuda", dtype=dtype)
    others = [torch.randn(s, device="cuda") for s in (*sizes, (channels, reduced), (channels,))]
    learned = [t.requires_grad_() for t in (x.to(memory_format=layout), *others)]
    statistics = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    for activation in ("identity", "relu", "relu6", "silu", "hardswish"):

        def call(x, *parameters, activation=activation):
            return fusewise.functional.batch_norm_excite(
                x, *statistics, *parameters, activation=activation, training=True
            )

        forward, backward = fusewise.explain(call, *learned)
        for choice in itertools.zip_longest(forward.able, backward.able, fillvalue=""):
            names = ("batch_norm_excite", "batch_norm_excite_backward")
            with fusewise.implementation(**dict(zip(names, choice, strict=True))):
                y = call(*learned)
                torch.autograd.grad(y, learned, torch.ones_like(y))
            done += 1
    return done


def batch_norm_excite_calls() -> int:
    return sum(
        batch_norm_excite_call(shape, dtype, layout)
        for shape in SHAPES
        if shape[0] * shape[2] * shape[3] > 1
        for dtype in (torch.float16, torch.float32)
        for layout in LAYOUTS
    )


LI_CONVS = (
    # n, channels, height, width; stride; first layer
    ((2, 64, 8, 9), 1, True),
    ((2, 64, 8, 9), 1, False),
    ((3, 128, 7, 5), 2, False),
    ((3, 65, 7, 5), 2, False),
    ((1, 1, 1, 1), 1, True),
)


def li_conv_call(shape, stride, first) -> int:
    """Three streams, with the integrated one or, in the first layer, without. The weights are
    float32 beside images in half precision, so that they are cast."""
    n, channels, height, width = shape
    images = torch.randn(4, n, height, width, channels, device="cuda", dtype=torch.float16)
    images = images.movedim(-1, 2)
    weights = [torch.randn(channels, channels, 3, 3, device="cuda") for _ in range(3)]
    mix = [torch.randn(channels, channels, device="cuda") for _ in range(3)]
    x = list(images[:3].unbind()) if first else images
    previous = None if first else torch.randn(channels, channels, device="cuda")
    learned = [*(x if first else [x]), *weights, *mix, *([] if first else [previous])]
    for t in learned:
        t.requires_grad_()

    def call():
        return fusewise.functional.li_conv(x, weights, mix, previous, stride=stride, padding=1)

    forward, backward = fusewise.explain(call)
    assert set(forward.able) <= set(backward.able)
    for name in backward.able:
        forced = {"li_conv": name} if name in forward.able else {}
        with fusewise.implementation(**forced, li_conv_backward=name):
            y = call()
            torch.autograd.grad(y, learned, torch.ones_like(y))
    return len(backward.able)


LI_BLOCKS = (
    # channels, planes, stride
    (64, 64, 1),
    (64, 128, 2),
    (33, 17, 2),
)


def li_block_call(channels, planes, stride) -> int:
    """Float32 parameters beside half-precision images, a blanked sample, both kinds of results."""
    block = fusewise.nn.LIBasicBlock(channels, planes, 2, stride, device="cuda")
    x = torch.randn(3, 2, 7, 6, channels, device="cuda", dtype=torch.float16).movedim(-1, 2)
    blanked = torch.tensor([[False, True], [False, False]], device="cuda")
    x[:-1][blanked] = 0
    for integrated_only in (False, True):
        leaf = x.detach().requires_grad_()
        y = block(leaf, blanked, integrated_only)
        torch.autograd.grad(y, [leaf, *block.parameters()], torch.ones_like(y))
    return 2


def linet_calls() -> int:
    """Few: cuDNN and cuBLASLt take most of the time."""
    convolutions = sum(li_conv_call(*arguments) for arguments in LI_CONVS)
    return convolutions + sum(li_block_call(*arguments) for arguments in LI_BLOCKS)


FAMILIES = {
    "squeeze_excite": squeeze_excite_calls,
    "linear": linear_act_calls,
    "autoencoder": autoencoder_calls,
    "batch_norm": batch_norm_calls,
    "batch_norm_excite": batch_norm_excite_calls,
    "linet": linet_calls,
}

if __name__ == "__main__":
    # Tuning would run the vendors' kernels a hundred times, and ours no more often.
    os.environ["FUSEWISE_TUNE"] = "0"
    done = FAMILIES[sys.argv[1]]()
    torch.cuda.synchronize()
    print(f"{done} calls, every implementation")
