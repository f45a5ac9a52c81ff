"""What to try first according to a profile, the largest possible speed-up first."""

from dataclasses import dataclass

from torch import nn

from .._ops import SQUEEZE_EXCITE
from ..nn._others import excitation_parts
from .analysis import LAUNCH_BOUND, Profile, amdahl
from .kinds import COMPILED, CONVOLUTION, COPY, ELEMENTWISE, LAYOUT, NORMALISATION, PRODUCT

_WORTH = 1.03  # a smaller bound is not worth trying
_SQUEEZE_EXCITE = ("SqueezeExcitation", "SqueezeExcite", "SEModule")


@dataclass(frozen=True)
class Advice:
    what: str
    bound: float
    """Upper bound on the speed-up of a whole step. If it comes from less work, idle time is assumed
    not to change."""
    why: str


def advise(profile: Profile) -> list[Advice]:
    found = [
        *_launches(profile),
        *_layout(profile),
        *_operators(profile),
        *_fusable(profile),
        *_compile(profile),
    ]
    worth = sorted((item for item in found if item.bound >= _WORTH), key=lambda item: -item.bound)
    return worth or [_nothing(profile)]


def operator_for(module: nn.Module) -> str:
    """The fusewise operator that can replace a Squeeze-and-Excitation module; empty if none can.

    A class that is not from fusewise, torchvision or timm is recognised by its name and
    activations.
    """
    if type(module).__name__ not in _SQUEEZE_EXCITE:
        return ""
    if type(module).__module__.startswith(("fusewise.", "torchvision.", "timm.")):
        try:
            excitation_parts(module)
        except (TypeError, ValueError):
            return ""
        return "fusewise.nn.SqueezeExcitation.from_module"
    inner = {type(child).__name__.lower() for child in module.modules()}
    activation, gate = (inner & {*words} for words in SQUEEZE_EXCITE.choices.values())
    if not (activation and gate):
        return ""
    return f'fusewise.nn.SqueezeExcitation(..., "{activation.pop()}", "{gate.pop()}")'


def _share(profile: Profile, *kinds: str) -> float:
    return sum(profile.kinds.get(kind, 0) for kind in kinds) / sum(profile.kinds.values())


def _bound(profile: Profile, share: float, factor: float = float("inf")) -> float:
    """The speed-up of a step if this share of the work gets faster and idle time stays the same."""
    return amdahl(share * profile.work_us / profile.wall_us, factor)


def _on_top(profile: Profile) -> str:
    """A note that fewer launches also save idle time, which the bound does not include."""
    return (
        "; it also saves idle time, which is not counted here"
        if profile.idle > LAUNCH_BOUND
        else ""
    )


def _launches(profile: Profile):
    bound = profile.wall_us / profile.work_us
    if profile.device == "cuda":
        yield Advice(
            'a CUDA graph: torch.compile(model, mode="reduce-overhead") or '
            "torch.cuda.make_graphed_callables",
            bound,
            f"launch-bound: the GPU idles {profile.idle:.0%} of a step, waiting for "
            f"{profile.launches:.0f} kernels to be launched one by one",
        )
    else:
        yield Advice(
            "a larger batch",
            bound,
            f"{profile.idle:.0%} of a step is spent outside of operators: in Python, and in "
            f"calling {profile.launches:.0f} operators",
        )


def _layout(profile: Profile):
    share = _share(profile, LAYOUT)
    bound = _bound(profile, share)
    if profile.channels_last:
        named = ", ".join(list(profile.conversions)[:2])
        why = f"channels_last is set, yet {share:.0%} of the work converts layouts: {named}"
        yield Advice("find the module that returns another layout", bound, why)
        return
    why = f"{share:.0%} of the work converts layouts"
    convolutions = _share(profile, CONVOLUTION)
    if profile.device == "cuda" and profile.amp and convolutions > 0.1:
        # The conversions are measured. How much faster the convolutions would get is unknown.
        why += f", and {convolutions:.0%} are half-precision convolutions, which want NHWC"
        bound = max(bound, _WORTH)
    yield Advice("--channels-last, here and in your own script", bound, why)


def _operators(profile: Profile):
    for kind in profile.modules:
        if operator := operator_for(kind.module):
            yield Advice(
                f"{operator} for {kind.name}",
                _bound(profile, kind.share, kind.to_floor),
                f"{kind.calls} calls take {kind.share:.0%} of the work and "
                f"{kind.to_floor:.1f} times as long as their floor{_on_top(profile)}",
            )


def _fusable(profile: Profile):
    for each in profile.fusable:
        yield Advice(
            f"{each.operator} for {each.name}",
            _bound(profile, each.share),
            f"{each.calls} activations after linear layers take {each.share:.0%} of the work, and "
            f"would be computed together with the GEMM{_on_top(profile)}",
        )


def _compile(profile: Profile):
    if COMPILED in profile.kinds:
        return
    share = _share(profile, ELEMENTWISE, NORMALISATION, COPY)
    yield Advice(
        "torch.compile",
        _bound(profile, share),
        f"{share:.0%} of the work is elementwise, normalisation and copies, which a compiler can "
        f"fuse; only trying it shows how much time that saves{_on_top(profile)}",
    )


def _nothing(profile: Profile) -> Advice:
    share = _share(profile, CONVOLUTION, PRODUCT)
    return Advice(
        "nothing: already at the floor",
        1.0,
        f"{share:.0%} of the work is convolutions and matrix products, which the vendor's library "
        "computes, and nothing else is worth trying",
    )
