"""torchvision's residual blocks with a forward that passes the residual to a fused norm.

A class says which norms are fused, with the activation behind each, whether a block has stochastic
depth, and whether its forward can apply it.
"""

from torch import Tensor, nn
from torchvision.models.efficientnet import FusedMBConv, MBConv
from torchvision.models.mobilenetv2 import InvertedResidual as MobileNetV2Block
from torchvision.models.mobilenetv3 import InvertedResidual as MobileNetV3Block
from torchvision.models.regnet import ResBottleneckBlock
from torchvision.models.resnet import BasicBlock, Bottleneck


class _NeverDrops:
    can_drop = False

    @staticmethod
    def drops(block: nn.Module) -> bool:
        return False


class _FusedResNet(_NeverDrops):
    """What BasicBlock and Bottleneck have in common. All norms of a block are fused together,
    because they share one relu."""

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        return self.main_path(x, residual)


class FusedBasicBlock(_FusedResNet, BasicBlock):
    @staticmethod
    def fused_norms(block: BasicBlock) -> dict[str, str | None]:
        return {"bn1": "relu", "bn2": "relu"}

    def main_path(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        return self.bn2(self.conv2(x), residual)


class FusedBottleneck(_FusedResNet, Bottleneck):
    @staticmethod
    def fused_norms(block: Bottleneck) -> dict[str, str | None]:
        return {"bn1": "relu", "bn2": "relu", "bn3": "relu"}

    def main_path(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = self.bn2(self.conv2(x))
        return self.bn3(self.conv3(x), residual)


class FusedResBottleneckBlock(_NeverDrops, ResBottleneckBlock):
    @staticmethod
    def fused_norms(block: ResBottleneckBlock) -> dict[str, str | None]:
        return {"f.c.1": "activation"}

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.proj is None else self.proj(x)
        *layers, last = self.f
        for layer in layers:
            x = layer(x)
        return last[1](last[0](x), residual)


class _FusedInverted:
    """Blocks whose last layer is a convolution and a norm, without an activation."""

    can_drop = True

    @staticmethod
    def drops(block: nn.Module) -> bool:
        depth = getattr(block, "stochastic_depth", None)
        return depth is not None and depth.p > 0

    @staticmethod
    def fused_norms(block: nn.Module) -> dict[str, str | None]:
        last = len(block.block) - 1
        ends = block.use_res_connect and len(block.block[last]) == 2
        return {f"block.{last}.1": None} if ends else {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drops(self):
            return self.stochastic_depth(self.block(x)) + x
        *layers, last = self.block
        residual = x
        for layer in layers:
            x = layer(x)
        return last[1](last[0](x), residual)


class FusedMBConvBlock(_FusedInverted, MBConv):
    pass


class FusedFusedMBConvBlock(_FusedInverted, FusedMBConv):
    pass


class FusedMobileNetV3Block(_FusedInverted, MobileNetV3Block):
    pass


class FusedMobileNetV2Block(_NeverDrops, MobileNetV2Block):
    @staticmethod
    def fused_norms(block: MobileNetV2Block) -> dict[str, str | None]:
        return {f"conv.{len(block.conv) - 1}": None} if block.use_res_connect else {}

    def forward(self, x: Tensor) -> Tensor:
        *layers, norm = self.conv
        residual = x
        for layer in layers:
            x = layer(x)
        return norm(x, residual)


FUSED = {
    BasicBlock: FusedBasicBlock,
    Bottleneck: FusedBottleneck,
    ResBottleneckBlock: FusedResBottleneckBlock,
    MBConv: FusedMBConvBlock,
    FusedMBConv: FusedFusedMBConvBlock,
    MobileNetV2Block: FusedMobileNetV2Block,
    MobileNetV3Block: FusedMobileNetV3Block,
}
