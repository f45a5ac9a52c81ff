"""Parts of a module that hold its parameters and are not called themselves."""

from torch import Tensor, nn


def parameter(part: nn.Module, name: str) -> Tensor | None:
    """Past Module.__getattr__, which would cost more than some operators do on few rows."""
    if name in part._parameters:
        return part._parameters[name]
    # Pruning, and norms of weights in their older form, make the tensor anew in a hook that runs
    # before a call.
    for hook in part._forward_pre_hooks.values():
        hook(part, ())
    return getattr(part, name)


def weight_and_bias(part: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    own = part._parameters
    if "weight" in own and "bias" in own:
        return own["weight"], own["bias"]
    return parameter(part, "weight"), parameter(part, "bias")


def computes_as(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the part would do what its kind does; a wrapper in its place would not."""
    return type(part).forward is kind.forward
