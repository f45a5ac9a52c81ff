"""LINet: a ResNet for several aligned images, and a stream that integrates them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..functional._transforms import refuse_script
from ..nn import LIBasicBlock, LIBatchNorm2d, LIBottleneck, LIConv2d
from ..nn._checks import floating, whole
from ..nn.li_conv import check_stream, with_integrated


class LIResNet(nn.Module):
    """A ResNet with S streams (RGB, depth, ...) and an integrated one, which mixes them in every
    layer and is classified.

    The streams share the architecture and have weights of their own. All activations are in one
    tensor `[S + 1, N, C, H, W]`, each stream channels-last, so that every convolution sees a dense
    image and every other operator all streams at once.

    After the last block only the integrated stream is read, so the rest of that block is not
    computed for the others: its parameters get gradients of 0, and its statistics stay.

    Args:
        block: `fusewise.nn.LIBasicBlock` or `LIBottleneck`.
        layers: the number of blocks in each of the four stages.
        stream_channels: the channels of each stream's images.
        num_classes: size of the output.
        width: factor of all channel counts; 64 times it must be a whole number.
        dropout: probability before the last layer.

    Example:
        >>> import torch, fusewise
        >>> block = fusewise.nn.LIBasicBlock
        >>> model = fusewise.models.LIResNet(block, (1, 1, 1, 1), (3, 1), 10, width=0.25)
        >>> rgb, depth = torch.randn(2, 3, 64, 64), torch.randn(2, 1, 64, 64)
        >>> blanked = torch.tensor([[False, False], [False, True]])  # one sample has no depth
        >>> model(rgb, depth, blanked=blanked).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        block: type[LIBasicBlock] | type[LIBottleneck],
        layers: Sequence[int],
        stream_channels: Sequence[int] = (3, 1, 1),
        num_classes: int = 1000,
        width: float = 1.0,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        whole("num_classes", num_classes)
        floating(dtype)
        if not isinstance(width, (int, float)) or not (64 * width >= 1 and width * 64 % 1 == 0):
            raise ValueError(f"width: expected 64 * width to be a whole number, got {width!r}")
        channels = int(64 * width)
        if len(layers) != 4:
            raise ValueError(f"layers: expected the blocks of four stages, got {tuple(layers)}")
        for count in layers:
            whole("layers", count)
        kind = {"device": device, "dtype": dtype}
        self.conv1 = LIConv2d(stream_channels, channels, 7, 2, first=True, **kind)
        streams = len(stream_channels)
        self.bn1 = LIBatchNorm2d(channels, streams, max_pool=True, **kind)
        inputs = channels
        for stage, count in enumerate(layers):
            planes, blocks = channels << stage, []
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(inputs, planes, streams, stride, **kind))
                inputs = planes * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(inputs, num_classes, **kind)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew as torchvision's ResNet does, and resets the statistics."""
        for module in self.modules():
            if isinstance(module, (LIBatchNorm2d, nn.Linear)):
                module.reset_parameters()
            elif isinstance(module, LIConv2d):
                for weight in module.parameters():
                    nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")

    def forward(self, *streams: Tensor, blanked: Tensor | None = None) -> Tensor:
        """
        Args:
            streams: an image `[N, C_s, H, W]` per stream, all of one dtype.
            blanked: bool `[S, N]`, or None. True where a stream has nothing for a sample. Its
                values do not matter, NaN included; the integrated stream gets 0 in their place, and
                the statistics are those of the other samples.

        Returns:
            `[N, num_classes]`.
        """
        count = len(self.conv1.stream_channels)
        if len(streams) != count:
            packed = len(streams) == 1 and isinstance(streams[0], (list, tuple))
            got = (
                f"one {type(streams[0]).__name__}; call model(*images)" if packed else len(streams)
            )
            raise ValueError(f"streams: expected {count} images, got {got}")
        x = self.conv1(streams, blanked)
        absent = None if blanked is None else with_integrated(blanked)
        x = self.bn1(x, blanked=absent)
        *blocks, last = self._blocks()
        for block in blocks:
            x = block(x, absent)
        x = last(x, absent, integrated_only=True)
        return self.fc(self.dropout(x.mean((2, 3))))

    def forward_stream(self, i: int, x: Tensor) -> Tensor:
        """The features of stream i alone, for monitoring.

        x passes through every block but the last, which is the last place where the stream's own
        path is trained, and is averaged over its pixels. In training mode this updates the running
        statistics of stream i, and not `num_batches_tracked`.

        Args:
            i: which stream.
            x: `[N, C_i, H, W]`.

        Returns:
            `[N, features]`.

        Example:
            >>> import torch, fusewise
            >>> model = fusewise.models.li_resnet18((3, 1), num_classes=10, width=0.125)
            >>> model.forward_stream(1, torch.randn(2, 1, 64, 64)).shape
            torch.Size([2, 64])
        """
        x = self.bn1.forward_stream(i, self.conv1.forward_stream(i, x))
        for block in self._blocks()[:-1]:
            x = block.forward_stream(i, x)
        return x.mean((2, 3))

    def stream_parameters(self, i: int) -> list[nn.Parameter]:
        """The parameters of stream i: its convolutions and its norms.

        Example:
            >>> import torch, fusewise
            >>> model = fusewise.models.li_resnet18((3, 1), num_classes=10, width=0.125)
            >>> groups = [{"params": model.stream_parameters(i), "lr": 0.01} for i in (0, 1)]
            >>> groups.append({"params": model.integrated_parameters(), "lr": 0.1})
            >>> optimizer = torch.optim.SGD(groups)
        """
        check_stream(i, len(self.conv1.stream_channels))
        ends = (f"stream_weights.{i}", f"stream_biases.{i}")
        return [p for name, p in self.named_parameters() if name.endswith(ends)]

    def integrated_parameters(self) -> list[nn.Parameter]:
        """All others: what mixes the streams, the integrated stream and the last layer.

        Example:
            >>> import fusewise
            >>> model = fusewise.models.li_resnet18((3, 1), num_classes=10, width=0.125)
            >>> [p.shape for p in model.integrated_parameters()][-1]  # the bias of the last layer
            torch.Size([10])
        """
        streams = range(len(self.conv1.stream_channels))
        own = {id(p) for i in streams for p in self.stream_parameters(i)}
        return [p for p in self.parameters() if id(p) not in own]

    def _blocks(self):
        return [block for i in range(1, 5) for block in self.get_submodule(f"layer{i}")]

    __prepare_scriptable__ = refuse_script


def li_resnet18(
    stream_channels: Sequence[int] = (3, 1, 1), num_classes: int = 1000, width: float = 1.0, **more
) -> LIResNet:
    """LINet on the plan of ResNet-18. `more`: `dropout`, `device` and `dtype` of `LIResNet`.

    Example:
        >>> import torch, fusewise
        >>> model = fusewise.models.li_resnet18((3, 1), num_classes=10, width=0.125)
        >>> model(torch.randn(2, 3, 64, 64), torch.randn(2, 1, 64, 64)).shape
        torch.Size([2, 10])
    """
    return LIResNet(LIBasicBlock, (2, 2, 2, 2), stream_channels, num_classes, width, **more)


def li_resnet34(
    stream_channels: Sequence[int] = (3, 1, 1), num_classes: int = 1000, width: float = 1.0, **more
) -> LIResNet:
    """LINet on the plan of ResNet-34. `more`: `dropout`, `device` and `dtype` of `LIResNet`.

    Example:
        >>> import torch, fusewise
        >>> model = fusewise.models.li_resnet34((3, 1), num_classes=10, width=0.125)
        >>> model(torch.randn(2, 3, 64, 64), torch.randn(2, 1, 64, 64)).shape
        torch.Size([2, 10])
    """
    return LIResNet(LIBasicBlock, (3, 4, 6, 3), stream_channels, num_classes, width, **more)


def li_resnet50(
    stream_channels: Sequence[int] = (3, 1, 1), num_classes: int = 1000, width: float = 1.0, **more
) -> LIResNet:
    """LINet on the plan of ResNet-50. `more`: `dropout`, `device` and `dtype` of `LIResNet`.

    Example:
        >>> import torch, fusewise
        >>> model = fusewise.models.li_resnet50((3, 1), num_classes=10, width=0.125)
        >>> model(torch.randn(2, 3, 64, 64), torch.randn(2, 1, 64, 64)).shape
        torch.Size([2, 10])
    """
    return LIResNet(LIBottleneck, (3, 4, 6, 3), stream_channels, num_classes, width, **more)
