"""timm's residual blocks with a forward that passes the residual to a fused norm.

A class says which norms are fused, with the activation behind each, whether a block has stochastic
depth, and whether its forward can apply it.
"""

from timm.models._efficientnet_blocks import DepthwiseSeparableConv, EdgeResidual, InvertedResidual
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn


class _Drops:
    @staticmethod
    def drops(block: nn.Module) -> bool:
        return bool(getattr(block.drop_path, "drop_prob", None))


class _FusedResNet(_Drops):
    """The last norm, the sum and the activation behind it. The norms before are chains."""

    can_drop = False

    @classmethod
    def fused_norms(cls, block: nn.Module) -> dict[str, str | None]:
        return {} if block.se is not None else dict([cls.last])


class FusedBasicBlock(_FusedResNet, BasicBlock):
    last = "bn2", "act2"

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.drop_block(self.bn1(self.conv1(x))))
        return self.bn2(self.conv2(self.aa(x)), residual)


class FusedBottleneck(_FusedResNet, Bottleneck):
    last = "bn3", "act3"

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.drop_block(self.bn2(self.conv2(x))))
        return self.bn3(self.conv3(self.aa(x)), residual)


class _FusedInverted(_Drops):
    """Blocks whose last layer is a norm without an activation. `layers` are those before it."""

    can_drop = True

    @classmethod
    def fused_norms(cls, block: nn.Module) -> dict[str, str | None]:
        return {cls.last: None} if block.has_skip else {}

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        if getattr(self, "conv_s2d", None) is not None:
            x = self.bn_s2d(self.conv_s2d(x))
        for name in self.layers:
            x = getattr(self, name)(x)
        norm = getattr(self, self.last)
        if self.training and self.drops(self):
            return self.drop_path(norm(x)) + residual
        return norm(x, residual)


class FusedInvertedResidual(_FusedInverted, InvertedResidual):
    layers = ("conv_pw", "bn1", "conv_dw", "bn2", "aa", "se", "conv_pwl")
    last = "bn3"


class FusedDepthwiseSeparableConv(_FusedInverted, DepthwiseSeparableConv):
    layers = ("conv_dw", "bn1", "aa", "se", "conv_pw")
    last = "bn2"


class FusedEdgeResidual(_FusedInverted, EdgeResidual):
    layers = ("conv_exp", "bn1", "aa", "se", "conv_pwl")
    last = "bn2"


FUSED = {
    BasicBlock: FusedBasicBlock,
    Bottleneck: FusedBottleneck,
    InvertedResidual: FusedInvertedResidual,
    DepthwiseSeparableConv: FusedDepthwiseSeparableConv,
    EdgeResidual: FusedEdgeResidual,
}
