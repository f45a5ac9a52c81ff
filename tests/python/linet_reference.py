"""LINet in plain PyTorch, as the specification states it: one convolution, norm and sum at a time.

A layer takes a list with a tensor per stream, and the integrated tensor. Nothing is packed. Torch's
autograd gives the gradients, in any dtype.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Conv(nn.Module):
    """u_s = conv(x_s, W_s);  m' = conv1x1(m, W_prev, stride) + sum over s of conv1x1(u_s, W_mix,s).

    A bias of a stream is added to that stream's output, which the integration does not see.
    """

    def __init__(self, channels, out, integrated, kernel, stride=1, bias=False):
        super().__init__()
        self.stride, self.padding = stride, kernel // 2

        def weight(*size):
            return nn.init.kaiming_normal_(nn.Parameter(torch.empty(size)), mode="fan_out")

        self.stream_weights = nn.ParameterList(weight(out, c, kernel, kernel) for c in channels)
        self.integration_from_streams = nn.ParameterList(weight(out, out, 1, 1) for _ in channels)
        if integrated:
            self.integrated_weight = weight(out, integrated, 1, 1)
        else:  # the first layer has no integrated input
            self.register_buffer("integrated_weight", torch.empty(out, 0, 1, 1))
        if bias:
            self.stream_biases = nn.ParameterList(torch.zeros(out) for _ in channels)
            self.integrated_bias = nn.Parameter(torch.zeros(out))
        else:
            self.stream_biases, self.integrated_bias = None, None

    def forward(self, streams, integrated, blanked=None):
        raw = [self.raw(i, x, row(blanked, i)) for i, x in enumerate(streams)]
        mixed = sum(map(F.conv2d, raw, self.integration_from_streams))
        if integrated is not None:
            mixed = mixed + F.conv2d(integrated, self.integrated_weight, stride=self.stride)
        if self.integrated_bias is not None:
            mixed = mixed + channels(self.integrated_bias)
        return [self.biased(i, u, row(blanked, i)) for i, u in enumerate(raw)], mixed

    def stream(self, i, x):
        return self.biased(i, self.raw(i, x))

    def raw(self, i, x, gone=None):
        u = F.conv2d(zeroed(x, gone), self.stream_weights[i], None, self.stride, self.padding)
        return zeroed(u, gone)

    def biased(self, i, u, gone=None):
        return zeroed(u + channels(self.stream_biases[i]), gone) if self.stream_biases else u


class Norm(nn.Module):
    """BatchNorm of every stream and of the integrated one, each with statistics of its own."""

    def __init__(self, streams, features, momentum=0.1, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.stream_weights = nn.ParameterList(torch.ones(features) for _ in range(streams))
        self.stream_biases = nn.ParameterList(torch.zeros(features) for _ in range(streams))
        self.integrated_weight = nn.Parameter(torch.ones(features))
        self.integrated_bias = nn.Parameter(torch.zeros(features))
        for name in (*(f"stream{i}" for i in range(streams)), "integrated"):
            self.register_buffer(f"{name}_running_mean", torch.zeros(features))
            self.register_buffer(f"{name}_running_var", torch.ones(features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("stream_updates", torch.zeros(streams, dtype=torch.int64))

    def forward(self, streams, integrated, blanked=None):
        """`streams` is None after the last block, where only the integrated one is read."""
        if self.training:
            self.num_batches_tracked += 1
        if streams is not None:
            streams = [self.stream(i, x, row(blanked, i)) for i, x in enumerate(streams)]
        parameters = self.integrated_weight, self.integrated_bias
        return streams, self._norm("integrated", integrated, *parameters, self.num_batches_tracked)

    def stream(self, i, x, gone=None):
        if not self.training:
            return zeroed(self._norm(f"stream{i}", x, *self._stream_parameters(i)), gone)
        if x.shape[0] * x.shape[2] * x.shape[3] == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        # The statistics are those of the samples that are there.
        there = x if gone is None else x[~gone]
        y = self._train_stream(i, there)
        if gone is None:
            return y
        padded = torch.zeros(x.shape, dtype=y.dtype, device=y.device)
        padded[~gone] = y
        return padded

    def _train_stream(self, i, x):
        values = x.shape[0] * x.shape[2] * x.shape[3]
        if not values:
            return x
        weight, bias = self._stream_parameters(i)
        if values == 1:  # the variance is 0; the running statistics stay
            return (x - x) * channels(weight) + channels(bias)
        self.stream_updates[i] += 1
        return self._norm(f"stream{i}", x, weight, bias, self.stream_updates[i])

    def _stream_parameters(self, i):
        return self.stream_weights[i], self.stream_biases[i]

    def _norm(self, name, x, weight, bias, updates=None):
        mean, var = getattr(self, f"{name}_running_mean"), getattr(self, f"{name}_running_var")
        factor = 0.0
        if self.training:
            if not x.shape[0]:
                return x * channels(weight) + channels(bias)
            factor = self.momentum if self.momentum is not None else 1 / updates.item()
        return F.batch_norm(x, mean, var, weight, bias, self.training, factor, self.eps)


class Block(nn.Module):
    """A chain of convolutions and norms with a ReLU between them, the residual, and a ReLU."""

    expansion = 1

    def __init__(self, streams, inside, planes, stride, momentum):
        super().__init__()
        out = planes * self.expansion
        sizes = self.sizes(inside, planes, stride)
        for i, (before, after, kernel, step) in enumerate(sizes, 1):
            convolution = Conv([before] * streams, after, before, kernel, step)
            setattr(self, f"conv{i}", convolution)
            setattr(self, f"bn{i}", Norm(streams, after, momentum))
        self.length = len(sizes)
        self.relu = nn.ReLU()
        self.downsample = None
        if stride != 1 or inside != out:
            convolution = Conv([inside] * streams, out, inside, 1, stride)
            self.downsample = nn.Sequential(convolution, Norm(streams, out, momentum))

    def layers(self):
        return [
            (getattr(self, f"conv{i}"), getattr(self, f"bn{i}")) for i in range(1, self.length + 1)
        ]

    def forward(self, streams, integrated, blanked=None, last=False):
        """With `last`, only the integrated stream is finished."""
        residuals, residual = streams, integrated
        if self.downsample is not None:
            for layer in self.downsample:
                residuals, residual = layer(residuals, residual, blanked)
        for i, (convolution, norm) in enumerate(self.layers(), 1):
            streams, integrated = convolution(streams, integrated, blanked)
            if i < self.length:
                streams, integrated = norm(streams, integrated, blanked)
                streams, integrated = [self.relu(x) for x in streams], self.relu(integrated)
            else:
                streams, integrated = norm(None if last else streams, integrated, blanked)
        integrated = self.relu(integrated + residual)
        if last:
            return None, integrated
        return [self.relu(x + r) for x, r in zip(streams, residuals, strict=True)], integrated

    def stream(self, i, x):
        residual = x
        if self.downsample is not None:
            for layer in self.downsample:
                residual = layer.stream(i, residual)
        for place, (convolution, norm) in enumerate(self.layers(), 1):
            x = norm.stream(i, convolution.stream(i, x))
            if place < self.length:
                x = self.relu(x)
        return self.relu(x + residual)


class BasicBlock(Block):
    @staticmethod
    def sizes(inside, planes, stride):
        return [(inside, planes, 3, stride), (planes, planes, 3, 1)]


class Bottleneck(Block):
    expansion = 4

    @staticmethod
    def sizes(inside, planes, stride):
        return [(inside, planes, 1, 1), (planes, planes, 3, stride), (planes, 4 * planes, 1, 1)]


class LINet(nn.Module):
    def __init__(
        self, block, layers, stream_channels=(3, 1, 1), num_classes=1000, width=1.0, momentum=0.1
    ):
        super().__init__()
        streams, planes = len(stream_channels), int(64 * width)
        self.conv1 = Conv(stream_channels, planes, 0, 7, 2)
        self.bn1 = Norm(streams, planes, momentum)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inside = planes
        for i, count in enumerate(layers):
            blocks = []
            for j in range(count):
                stride = 2 if i and not j else 1
                blocks.append(block(streams, inside, planes * 2**i, stride, momentum))
                inside = planes * 2**i * block.expansion
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inside, num_classes)

    def blocks(self):
        return [block for i in range(1, 5) for block in getattr(self, f"layer{i}")]

    def forward(self, *streams, blanked=None):
        streams, integrated = self.bn1(*self.conv1(streams, None, blanked), blanked)
        streams = [self.maxpool(self.relu(x)) for x in streams]
        integrated = self.maxpool(self.relu(integrated))
        blocks = self.blocks()
        for block in blocks:
            last = block is blocks[-1]
            streams, integrated = block(streams, integrated, blanked, last)
        return self.fc(integrated.mean((2, 3)))

    def forward_stream(self, i, x):
        """Stream i alone through every block but the last, pooled."""
        x = self.maxpool(self.relu(self.bn1.stream(i, self.conv1.stream(i, x))))
        for block in self.blocks()[:-1]:
            x = block.stream(i, x)
        return x.mean((2, 3))

    def stream_parameters(self, i):
        ends = f"stream_weights.{i}", f"stream_biases.{i}"
        return [p for name, p in self.named_parameters() if name.endswith(ends)]

    def integrated_parameters(self):
        streams = range(len(self.conv1.stream_weights))
        own = {p for i in streams for p in self.stream_parameters(i)}
        return [p for p in self.parameters() if p not in own]


def row(blanked, i):
    return None if blanked is None else blanked[i]


def zeroed(x, gone):
    """Zero where the stream has no sample. A product with 0 would keep NaN."""
    return x if gone is None else x.masked_fill(gone[:, None, None, None], 0)


def channels(t):
    return t[:, None, None]


def li_resnet18(stream_channels=(3, 1, 1), num_classes=1000, width=1.0, momentum=0.1):
    return LINet(BasicBlock, (2, 2, 2, 2), stream_channels, num_classes, width, momentum)


def li_resnet34(stream_channels=(3, 1, 1), num_classes=1000, width=1.0, momentum=0.1):
    return LINet(BasicBlock, (3, 4, 6, 3), stream_channels, num_classes, width, momentum)


def li_resnet50(stream_channels=(3, 1, 1), num_classes=1000, width=1.0, momentum=0.1):
    return LINet(Bottleneck, (3, 4, 6, 3), stream_channels, num_classes, width, momentum)


def weights_of_a_resnet(resnet):
    """The state dict of a LINet with one stream that computes what torchvision's ResNet computes.

    The integrated stream copies the raw outputs of the stream and has the same norms, so its
    activations are those of the stream.
    """
    found = {}
    modules = dict(resnet.named_modules())
    for name, value in resnet.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module == "fc":
            found[name] = value
        elif isinstance(modules[module], nn.Conv2d):
            out, inside = value.shape[:2]
            first = module == "conv1"
            eye = torch.eye(out, dtype=value.dtype)[..., None, None]
            found[f"{module}.stream_weights.0"] = value
            found[f"{module}.integration_from_streams.0"] = eye
            found[f"{module}.integrated_weight"] = eye.new_zeros(out, 0 if first else inside, 1, 1)
        elif kind == "num_batches_tracked":
            found[name] = value
            found[f"{module}.stream_updates"] = value[None]
        elif kind.startswith("running"):
            found[f"{module}.stream0_{kind}"] = found[f"{module}.integrated_{kind}"] = value
        else:
            plural = {"weight": "weights", "bias": "biases"}[kind]
            found[f"{module}.stream_{plural}.0"] = found[f"{module}.integrated_{kind}"] = value
    return {name: value.clone() for name, value in found.items()}
