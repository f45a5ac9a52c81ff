"""Classifies operators and kernels by their names."""

import re

CONVOLUTION = "convolution"
PRODUCT = "matrix product"
NORMALISATION = "normalisation"
ELEMENTWISE = "elementwise"
POOLING = "pooling"
REDUCTION = "reduction"
COPY = "copies and casts"
LAYOUT = "layout conversion"
FUSEWISE = "fusewise"
COMPILED = "compiled"
OTHER = "other"

KINDS = (
    CONVOLUTION,
    PRODUCT,
    NORMALISATION,
    ELEMENTWISE,
    POOLING,
    REDUCTION,
    COPY,
    LAYOUT,
    FUSEWISE,
    COMPILED,
    OTHER,
)

# Kernels with these names are of this kind, whichever operator launched them.
_KERNELS = (
    (
        LAYOUT,
        r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|tensorTransformGeneric|transpose_readWrite",
    ),
    (COPY, r"^Memcpy|^Memset"),
)
# Otherwise the operators decide: the innermost one and those that called it. The first rule that
# matches any of them wins. So a copy inside a convolution is a copy, and a sum inside a
# convolution's backward is convolution.
_OPERATORS = (
    (FUSEWISE, r"fusewise::"),
    (LAYOUT, r"aten::contiguous|mkldnn_reorder|to_mkldnn|_to_dense"),
    (COPY, r"aten::(copy_|clone|_to_copy|cat|stack|zero_|fill_|index|pad|constant_pad_nd|roll)$"),
    (CONVOLUTION, r"conv"),
    (
        PRODUCT,
        r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|addmv|mv|dot|einsum)|attention|_rnn|lstm|gru",
    ),
    (NORMALISATION, r"norm"),
    (POOLING, r"pool|interpolate|upsample"),
    (REDUCTION, r"softmax|aten::(mean|sum|amax|max|min|argmax|var|std|cumsum|nll_loss|cross_ent)"),
    (
        ELEMENTWISE,
        r"aten::(_?(foreach_)?(add|sub|rsub|mul|div|addcmul|addcdiv|neg|abs|pow|sqrt|rsqrt|exp|log)"
        r"|relu|threshold|silu|sigmoid|hard|tanh|gelu|elu|celu|selu|leaky_relu|mish|softplus|glu"
        r"|clamp|where|masked_fill|dropout|native_dropout|bernoulli|lerp|reciprocal|erf|sin|cos"
        r"|eq|ne|lt|gt|le|ge|logical|bitwise|maximum|minimum|floor|round)",
    ),
    (COMPILED, r"CompiledF|Torch-Compiled"),
)
# Kernels that no torch operator launched: those of compilers and of other libraries.
_ALONE = (
    (CONVOLUTION, r"conv|wgrad|dgrad|fprop"),
    (PRODUCT, r"gemm|cutlass|xmma|cublas"),
    (NORMALISATION, r"batch_norm|layer_norm|bn_fw|bn_bw"),
    (POOLING, r"pool"),
    (REDUCTION, r"reduce"),
    (ELEMENTWISE, r"elementwise"),
    (COMPILED, r"^triton_"),
)


def short_name(kernel: str) -> str:
    """A kernel's name without template arguments and parameters; an operator's name unchanged."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0]


def kind_of(operators: list[str], kernel: str = "") -> str:
    """`operators` from the innermost to the outermost; `kernel` is empty on a CPU."""
    return (
        _first(_KERNELS, [kernel])
        or _first(_OPERATORS, operators)
        or _first(_ALONE, [kernel])
        or OTHER
    )


def _first(rules, names: list[str]) -> str:
    for kind, pattern in rules:
        if any(name and re.search(pattern, name, re.IGNORECASE) for name in names):
            return kind
    return ""
