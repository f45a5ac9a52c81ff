"""An operator built from its C++ description: argument checks and fake kernels for tracing.

The checks repeat those of the C++ core, with the same messages, for callers that do not reach the
core: tracing and torch.func. Sizes may be symbolic here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._library import refuse_onnx

_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, *_HALF)
_MOST_DIMENSIONS = 6


class TensorRule(NamedTuple):
    """The fields are those of `TensorRule` in src/common/description.h."""

    name: str
    role: str
    shape: str
    type: str
    layout: str
    read: bool
    """Whether backward reads this tensor."""
    only_for: str
    """The one input whose gradient needs this tensor in backward, if no other does; else ''."""
    differentiable: bool
    only_with: list[str]

    @property
    def optional(self) -> bool:
        return self.role == "optional_input"


class Operator:
    """One operator of `torch.ops.fusewise`, with its backward and its `explain`."""

    def __init__(self, name: str):
        self.name = name
        for suffix in ("", "_backward", "_explain"):
            function = getattr(torch.ops.fusewise, f"_{name}{suffix}").default
            setattr(self, suffix.removeprefix("_") or "forward", function)
        tensors, self.choices, self.flags = [], {}, []
        for line in getattr(torch.ops.fusewise, f"_{name}_description")().splitlines():
            kind, *fields = line.split("\t")
            if kind == "tensor":
                *texts, read, only_for, differentiable, only_with = fields
                use = (read == "1", only_for, differentiable == "1")
                tensors.append(TensorRule(*texts, *use, only_with.split()))
            elif kind == "choice":
                self.choices[fields[0]] = fields[1].split()
            elif kind == "flag":
                self.flags.append(fields[0])
            elif kind == "positive":
                self._positive = fields[0]
            else:
                self._order = fields[0].split()
        self.inputs = [rule for rule in tensors if rule.role in ("input", "optional_input")]
        self._outputs = [rule for rule in tensors if rule.role == "output"]
        self._saved = [rule for rule in tensors if rule.role in ("saved", "optional_saved")]
        self._read = [i for i, rule in enumerate(self.inputs) if rule.read]
        self.read_back = [*self._read, len(self.inputs)]
        """What backward receives: indices into the inputs followed by the saved tensor."""
        self.all_inputs = (1 << len(self.inputs)) - 1
        """Backward's `needed` if every input needs a gradient."""
        names = [rule.name for rule in self.inputs]
        only_for = self.inputs[0].only_for
        self.first_is_for = names.index(only_for) if only_for else None
        """Index of the one input whose gradient needs the first input, if no other does."""
        torch.library.register_fake(f"fusewise::_{name}")(self.fake_forward)
        torch.library.register_fake(f"fusewise::_{name}_backward")(self._fake_backward)

    def wrong_type(self, tensors, words=()) -> TypeError | None:
        """A TypeError that names the first argument that is not a tensor or not a string, or None.

        Called after a failure, whose own message would be about attributes and schemas.
        """
        for rule, value in zip(self.inputs, tensors, strict=True):
            if not isinstance(value, Tensor) and not (rule.optional and value is None):
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                got = "None" if value is None else kind.removeprefix("builtins.")
                wanted = "a tensor or None" if rule.optional else "a tensor"
                return TypeError(f"{rule.name}: expected {wanted}, got {got}")
        for name, word in zip(self.choices, words, strict=False):
            if not isinstance(word, str):
                return self.wrong_word(name, word)
        return None

    def wrong_word(self, choice: str, word: str, name: str = "") -> Exception | None:
        """The error for a value that the choice does not offer, or None; `name` replaces its
        name."""
        if word in self.choices[choice]:
            return None
        message = f"{name or choice}: expected {self.words(choice)}, got {word!r}"
        return RuntimeError(message) if isinstance(word, str) else TypeError(message)

    def words(self, choice: str) -> str:
        """The allowed values, as in "'silu', 'relu' or 'hardswish'"."""
        *rest, last = map(repr, self.choices[choice])
        return f"{', '.join(rest)} or {last}" if rest else last

    def check(self, tensors, words) -> dict[str, int]:
        """Raises what the operator would raise; returns the size of each letter in the shapes."""
        if error := self.wrong_type(tensors, words):
            raise error
        return self._check(list(zip(self.inputs, tensors, strict=True)), words)

    def check_shape(self, name: str, tensor: Tensor, **sizes: int) -> None:
        """Checks the shape of one input, given the sizes of some letters."""
        self._check_shape(next(r for r in self.inputs if r.name == name), tensor, sizes)

    def _check(self, given, words) -> dict[str, int]:
        given = [(rule, tensor) for rule, tensor in given if tensor is not None]
        for rule, tensor in given:
            if tensor.dtype not in _FLOATING:
                _refuse(f"{rule.name}: expected a floating dtype, got {_name(tensor.dtype)}")
            if tensor.dim() > _MOST_DIMENSIONS and not _has_leading(rule.shape):
                most = f"at most {_MOST_DIMENSIONS} dimensions"
                _refuse(f"{rule.name}: expected {most}, got {tensor.dim()}")
        for name, word in zip(self.choices, words, strict=True):
            if error := self.wrong_word(name, word):
                raise error
        named = {rule.name: (rule, tensor) for rule, tensor in given}
        sizes: dict[str, int] = {}
        for name in self._order:
            self._check_shape(*named[name], sizes)
        first = given[0][1]
        for rule, tensor in given:
            self._check_shape(rule, tensor, sizes)
            _check_device(rule.name, tensor, first.device)
        self._check_types(given)
        return sizes

    def _check_shape(self, rule, tensor, sizes):
        shape = list(tensor.shape)
        for alternative in rule.shape.split(" | "):
            found = _fitted(alternative.split(), shape, sizes)
            if found is not None:
                break
        else:
            _refuse(f"{rule.name}: expected {_written_shape(rule.shape, sizes)}, got {shape}")
        fresh = [letter for letter in found if letter not in sizes and letter in self._positive]
        if any(found[letter] < 1 for letter in fresh):
            *rest, last = (c for c in dict.fromkeys(rule.shape) if c in fresh)
            letters = f"{', '.join(rest)} and {last}" if rest else last
            wanted = f"{_written_shape(rule.shape, sizes)} with {letters} >= 1"
            _refuse(f"{rule.name}: expected {wanted}, got {shape}")
        sizes.update(found)

    @staticmethod
    def _check_types(given):
        settled: dict[str, tuple[str, torch.dtype]] = {}
        for rule, tensor in given:
            dtype = tensor.dtype
            if rule.type == "weight" and "weight" not in settled:
                first, data = settled["data"]
                half = data in _HALF
                if dtype != data and not (half and dtype == torch.float32):
                    wanted = f"{first}'s dtype {_name(data)}" + ", or float32" * half
                    _refuse(f"{rule.name}: expected {wanted}, got {_name(dtype)}")
            first, expected = settled.setdefault(rule.type, (rule.name, dtype))
            if dtype != expected:
                wanted = f"{first}'s dtype {_name(expected)}"
                _refuse(f"{rule.name}: expected {wanted}, got {_name(dtype)}")

    def fake_forward(self, *arguments):
        """The fake kernel: outputs of the right shape, dtype and layout, without data."""
        refuse_onnx(self.name)
        count = len(self.inputs)
        tensors, words = arguments[:count], arguments[count : count + len(self.choices)]
        save = arguments[-2]
        sizes = self._check(list(zip(self.inputs, tensors, strict=True)), words)
        named = dict(zip((rule.name for rule in self.inputs), tensors, strict=True))
        (output,) = _with_word(self._outputs, words)
        if output.shape in named:
            result = torch.empty_like(named[output.shape])
        else:
            result = self._empty(output, self.inputs, tensors, sizes, tensors[0].shape[:-1])
        if not save:
            return [result]
        rules = _with_word(self._saved, words)
        saved = [self._empty(rule, self.inputs, tensors, sizes) for rule in rules]
        if not saved:
            return [result, tensors[0].new_empty(0, dtype=torch.float32)]
        if len(saved) == 1:
            return [result, saved[0]]
        return [result, saved[0].new_empty(sum(t.numel() for t in saved))]

    def _fake_backward(self, gradient, *arguments):
        read = [self.inputs[i] for i in self._read]
        tensors, words = arguments[: len(read)], arguments[len(read) + 1 :][: len(self.choices)]
        needed = arguments[-2]
        sizes = self._check(list(zip(read, tensors, strict=True)), words)
        for name, tensor in (("gradient", gradient), ("saved", arguments[len(read)])):
            _check_device(name, tensor, tensors[0].device)
        named = dict(zip((rule.name for rule in read), tensors, strict=True))
        results = []
        for i, rule in enumerate(self.inputs):
            if not needed >> i & 1:
                continue
            tensor = named.get(rule.name)
            if tensor is None:
                results.append(self._empty(rule, read, tensors, sizes))
            elif rule.layout == "dense":
                results.append(tensor.new_empty(tensor.shape))
            else:
                results.append(torch.empty_like(tensor))
        return results

    @staticmethod
    def _empty(rule, inputs, tensors, sizes, leading=None):
        """A dense tensor as the rule describes it; `leading` replaces its leading sizes, if it has
        any."""
        shape = [
            int(size) if size.isdigit() else _product(sizes[letter] for letter in size.strip("*"))
            for size in rule.shape.split(" | ")[0].split()
        ]
        if rule.type == "bits":
            return tensors[0].new_empty((*shape[:-1], (shape[-1] + 7) // 8), dtype=torch.uint8)
        if leading is not None and _has_leading(rule.shape):
            shape = [*leading, *shape[1:]]
        if rule.type == "statistics":
            return tensors[0].new_empty(shape, dtype=wide_dtype(tensors[0]))
        same = (t for r, t in zip(inputs, tensors, strict=True) if r.type == rule.type)
        return next(same).new_empty(shape)


def _with_word(rules: list[TensorRule], words) -> list[TensorRule]:
    """The rules that apply with this value of the first choice."""
    return [rule for rule in rules if not rule.only_with or words[0] in rule.only_with]


def _has_leading(shape: str) -> bool:
    return shape[1:2] == "*"


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums and of all intermediate results."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _product(values):
    """Not math.prod, which torch.compile does not trace."""
    result = 1
    for value in values:
        result = result * value
    return result


def _refuse(message: str):
    raise RuntimeError(message)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        _refuse(f"{name}: expected a tensor on {device}, got one on {tensor.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fitted(wanted: list[str], shape: list[int], sizes: dict[str, int]) -> dict[str, int] | None:
    """The sizes of the letters, with those that this shape adds; None if the shape does not fit."""
    if wanted[0].endswith("*") and len(shape) >= len(wanted) - 1:
        # The leading sizes are only multiplied, never compared, so symbolic sizes stay dynamic.
        count = len(shape) - len(wanted) + 1
        wanted = [wanted[0].strip("*"), *wanted[1:]]
        shape = [_product(shape[:count]), *shape[count:]]
    if len(wanted) != len(shape):
        return None
    found = dict(sizes)
    for size, value in zip(wanted, shape, strict=True):
        if size.isdigit():
            if value != int(size):
                return None
            continue
        known = _product(found[letter] for letter in size if letter in found)
        unknown = [letter for letter in size if letter not in found]
        if len(unknown) > 1:
            return None
        if not unknown:
            if value != known:
                return None
        elif size == unknown[0]:
            found[size] = value
        elif known == 0 or value % known:
            return None
        else:
            found[unknown[0]] = value // known
    return found


def _written_shape(shape: str, sizes: dict[str, int]) -> str:
    """A shape for error messages, as in "[R, 48] or [R, 48, 1, 1]"."""

    def written(size):
        if size.endswith("*"):
            return str(sizes[size[0]]) if size[0] in sizes else "..."
        unknown = [letter for letter in size if letter not in sizes and not letter.isdigit()]
        if size.isdigit():
            return size
        known = [sizes[letter] for letter in size if letter in sizes]
        return " * ".join(unknown + ([str(_product(known))] if known else []))

    return " or ".join(
        f"[{', '.join(written(size) for size in alternative.split())}]"
        for alternative in shape.split(" | ")
    )
