"""An operator built from its C++ description: argument checks and fake kernels for tracing.

The checks repeat those of the C++ core, with the same messages, for callers that do not reach the
core: tracing and torch.func. Sizes may be symbolic here.
"""

from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ._library import refuse_onnx

_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, *_HALF)
_MOST_DIMENSIONS = 6
_INPUTS = ("input", "optional_input", "updated")
_DTYPES = {"flags": torch.bool, "counter": torch.int64}


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
    given: str
    """The input without which the tensor is not saved; else ''."""
    read_with: list[str]
    """The values of the first choice for which backward reads this tensor; empty: all."""

    @property
    def optional(self) -> bool:
        return self.role in ("optional_input", "updated")


class Operator:
    """One operator of `torch.ops.fusewise`, with its backward and its `explain`.

    kept: inputs that a second backward needs, though backward does not read them. For operators
    that write inputs, because these do not keep all of them.
    """

    def __init__(self, name: str, kept: tuple[str, ...] = ()):
        self.name = name
        for suffix in ("", "_backward", "_explain"):
            function = getattr(torch.ops.fusewise, f"_{name}{suffix}").default
            setattr(self, suffix.removeprefix("_") or "forward", function)
        tensors, self.choices, self.flags, self.numbers = [], {}, [], []
        for line in getattr(torch.ops.fusewise, f"_{name}_description")().splitlines():
            kind, *fields = line.split("\t")
            if kind == "tensor":
                *texts, read, only_for, differentiable, only_with, given, read_with = fields
                use = (read == "1", only_for, differentiable == "1")
                when = (only_with.split(), given, read_with.split())
                tensors.append(TensorRule(*texts, *use, *when))
            elif kind == "choice":
                self.choices[fields[0]] = fields[1].split()
            elif kind == "flag":
                self.flags.append(fields[0])
            elif kind == "number":
                self.numbers.append(fields[0])
            elif kind == "positive":
                self._positive = fields[0]
            elif kind == "halves":
                letters = fields[0]
                self._halves = list(zip(letters[::2], letters[1::2], strict=True))
            else:
                self._order = fields[0].split()
        self.inputs = [rule for rule in tensors if rule.role in _INPUTS]
        self.updates = any(rule.role == "updated" for rule in tensors)
        self._outputs = [rule for rule in tensors if rule.role == "output"]
        self._saved = [rule for rule in tensors if rule.role in ("saved", "optional_saved")]
        self._read = [i for i, rule in enumerate(self.inputs) if rule.read]
        self.read_back = [*self._read, len(self.inputs)]
        """What backward receives: indices into the inputs followed by the saved tensor."""
        self.index = {rule.name: i for i, rule in enumerate(self.inputs)}
        """The inputs' places by name."""
        self.constant = [i for i, rule in enumerate(self.inputs) if not rule.differentiable]
        """The inputs that have no gradient."""
        only_for = self.inputs[0].only_for
        self.first_is_for = self.index[only_for] if only_for else None
        """Index of the one input whose gradient needs the first input, if no other does."""

        def keeps(rule: TensorRule, word: str) -> bool:
            read = rule.read and (not rule.read_with or word in rule.read_with)
            return read or rule.name in kept

        # Only what a backward needs of the inputs, if forward writes some; -1 is an appended None.
        self._kept = {
            word: [i if keeps(rule, word) else -1 for i, rule in enumerate(self.inputs)]
            for word in (next(iter(self.choices.values())) if self.updates else ())
        }
        self._gradients = {}  # what `gradients` returned
        torch.library.register_fake(f"fusewise::_{name}")(self.fake_forward)
        torch.library.register_fake(f"fusewise::_{name}_backward")(self._fake_backward)

    def kept(self, tensors, words):
        """The inputs that are kept for backward. If forward writes inputs, only those that a
        backward needs; otherwise all, for a second backward."""
        if not self.updates:
            return tensors
        tensors = (*tensors, None)
        return [tensors[i] for i in self._kept[words[0]]]

    def gradients(self, needed: tuple[bool, ...], passed_on: int | None):
        """Backward's `needed`, and what takes the gradients for autograd from backward's results
        followed by the incoming gradient, which is that of the input `passed_on`, and None.
        `needed` begins with an argument that is no input."""
        if torch.compiler.is_compiling():  # which would have to guard the cache
            return self._new_gradients(needed, passed_on)
        found = self._gradients.get((needed, passed_on))
        if found is None:
            found = self._gradients[needed, passed_on] = self._new_gradients(needed, passed_on)
        return found

    @staticmethod
    def _new_gradients(needed, passed_on):
        mask, count, places = 0, 0, []
        for i, need in enumerate(needed, -1):
            if not need:
                places.append(-1)
            elif i == passed_on:
                places.append(-2)
            else:
                places.append(count)
                mask, count = mask | 1 << i, count + 1
        return mask, _taker(places)

    def wrong_type(self, tensors, words=(), flags=(), numbers=()) -> TypeError | None:
        """A TypeError that names the first argument of another type than the operator takes, or
        None.

        Called after a failure, whose own message would be about attributes and schemas, and by
        `torch.compile`, which does not hand such a failure on.
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
        return self.wrong_scalar(flags, numbers)

    def wrong_scalar(self, flags, numbers) -> TypeError | None:
        """The same for flags and numbers alone."""
        for names, values, wrong in (
            (self.flags, flags, wrong_flag),
            (self.numbers, numbers, wrong_number),
        ):
            for name, value in zip(names, values, strict=False):
                error = wrong(name, value)
                if error is not None:
                    return error
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

    def check(self, tensors, words, flags=(), numbers=()) -> dict[str, int]:
        """Raises what the operator would raise; returns the size of each letter in the shapes."""
        if error := self.wrong_type(tensors, words, flags, numbers):
            raise error
        return self._check(list(zip(self.inputs, tensors, strict=True)), words)

    def check_shape(self, name: str, tensor: Tensor, **sizes: int) -> None:
        """Checks the shape of one input, given the sizes of some letters."""
        self._check_shape(next(r for r in self.inputs if r.name == name), tensor, sizes)

    def _check(self, given, words) -> dict[str, int]:
        given = [(rule, tensor) for rule, tensor in given if tensor is not None]
        for rule, tensor in given:
            if tensor.dtype not in _FLOATING and rule.type not in _DTYPES:
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
            if rule.shape in named:
                expected = list(named[rule.shape][1].shape)
                if list(tensor.shape) != expected:
                    got = f"{rule.shape}'s shape {expected}, got {list(tensor.shape)}"
                    _refuse(f"{rule.name}: expected {got}")
            else:
                self._check_shape(rule, tensor, sizes)
            _check_device(rule.name, tensor, first.device)
        self._check_types(given)
        self._check_updated(given)
        return sizes

    def _check_shape(self, rule, tensor, sizes):
        shape = list(tensor.shape)
        for alternative in rule.shape.split("|"):
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
        for whole, half in self._halves:
            if whole in sizes:
                sizes[half] = (sizes[whole] + 1) // 2

    @staticmethod
    def _check_types(given):
        settled: dict[str, tuple[str, torch.dtype]] = {}
        for rule, tensor in given:
            dtype = tensor.dtype
            if rule.type in _DTYPES or rule.type == "statistics":
                wanted = _DTYPES.get(rule.type, wide_dtype(given[0][1]))
                if dtype != wanted:
                    _refuse(f"{rule.name}: expected dtype {_name(wanted)}, got {_name(dtype)}")
                continue
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

    @staticmethod
    def _check_updated(given):
        """The core sees the memory; a tracer only sees that two of them are one tensor."""
        updated = [(rule.name, tensor) for rule, tensor in given if rule.role == "updated"]
        for i, (name, tensor) in enumerate(updated):
            for other, second in updated[i + 1 :]:
                if tensor is second:
                    own = "memory that no other tensor of the call uses"
                    _refuse(f"{name}: expected {own}, got memory that overlaps {other}")

    def fake_forward(self, *arguments):
        """The fake kernel: outputs of the right shape, dtype and layout, without data."""
        refuse_onnx(self.name)
        count = len(self.inputs)
        tensors, words = arguments[:count], arguments[count : count + len(self.choices)]
        save = arguments[-2]
        sizes = self.check(tensors, words)
        named = dict(zip((rule.name for rule in self.inputs), tensors, strict=True))
        (output,) = _with_word(self._outputs, words)
        if output.shape in named:
            result = torch.empty_like(named[output.shape])
        else:
            result = self._empty(output, self.inputs, tensors, sizes, tensors[0].shape[:-1])
        if not save and not self.updates:
            return [result]
        rules = _with_word(self._saved, words) if save else []
        saved = [
            self._empty(rule, self.inputs, tensors, sizes)
            for rule in rules
            if not rule.given or named[rule.given] is not None
        ]
        if not saved:
            kept = tensors[0].new_empty(0, dtype=torch.float32)
        elif len(saved) == 1:
            kept = saved[0]
        else:
            size = saved[0].element_size()
            kept = saved[0].new_empty(sum(-(-t.numel() * t.element_size() // size) for t in saved))
        return (result, kept) if self.updates else [result, kept]

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
            tensor = named.get(rule.shape, named.get(rule.name))
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
            int(size) if size.isdigit() else _product(sizes[letter] for letter in size.strip("*?"))
            for size in _present(rule.shape.split("|")[0].split(), sizes)
        ]
        if rule.type == "bytes":
            return tensors[0].new_empty(shape, dtype=torch.uint8)
        if rule.type == "bits":
            return tensors[0].new_empty((*shape[:-1], (shape[-1] + 7) // 8), dtype=torch.uint8)
        if leading is not None and _has_leading(rule.shape):
            shape = [*leading, *shape[1:]]
        if rule.type == "statistics":
            return tensors[0].new_empty(shape, dtype=wide_dtype(tensors[0]))
        pairs = zip(inputs, tensors, strict=True)
        same = (t for r, t in pairs if r.type == rule.type and t is not None)
        result = next(same).new_empty(shape)
        if rule.layout == "any" and len(shape) >= 4 and has_adjacent_channels(tensors[0]):
            return torch.empty_like(result.movedim(-3, -1).contiguous()).movedim(-1, -3)
        return result


def wrong_flag(name: str, value) -> TypeError | None:
    """The error for a flag that torch's schemas do not take, or None. They take what has a truth
    value of its own."""
    if isinstance(value, (bool, int)) or hasattr(value, "__bool__"):
        return None
    return TypeError(f"{name}: expected True or False, got {value!r}")


def wrong_number(name: str, value, wanted: str = "a number") -> TypeError | None:
    """The same for a float. They take what converts to one."""
    if isinstance(value, (float, int)) or hasattr(value, "__float__"):
        return None
    return TypeError(f"{name}: expected {wanted}, got {value!r}")


def wrong_whole(name: str, value) -> TypeError | None:
    """The same for an int."""
    if isinstance(value, int) or hasattr(value, "__index__"):
        return None
    return TypeError(f"{name}: expected a whole number, got {value!r}")


def _taker(places: list[int]):
    """operator.itemgetter, which torch.compile cannot trace."""
    if torch.compiler.is_compiling():
        return lambda values: tuple([values[i] for i in places])
    return itemgetter(*places)


def _with_word(rules: list[TensorRule], words) -> list[TensorRule]:
    """The rules that apply with this value of the first choice."""
    return [rule for rule in rules if not rule.only_with or words[0] in rule.only_with]


def _present(wanted: list[str], sizes: dict[str, int]) -> list[str]:
    """Without the sizes that the tensors of this call lack."""
    return [size for size in wanted if not (size[-1] == "?" and sizes.get(size) == 0)]


def _has_leading(shape: str) -> bool:
    return shape[1:2] == "*"


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums and of all intermediate results."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def has_adjacent_channels(x: Tensor) -> bool:
    """Whether an image is channels-last, as the core sees it."""
    return x.shape[-3] > 1 and x.stride(-3) == 1


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
    if wanted and wanted[0].endswith("*") and len(shape) >= len(wanted) - 1:
        # The leading sizes are only multiplied, never compared, so symbolic sizes stay dynamic.
        count = len(shape) - len(wanted) + 1
        wanted = [wanted[0].strip("*"), *wanted[1:]]
        shape = [_product(shape[:count]), *shape[count:]]
    found = dict(sizes)
    for size in wanted:
        if size[-1] == "?" and size not in found:
            # Of an optional dimension: whether there is one, and its size, which as a factor is 1.
            found[size] = int(len(shape) == len(wanted))
            if not found[size]:
                found[size[0]] = 1
    wanted = [size.strip("?") for size in _present(wanted, found)]
    if len(wanted) != len(shape):
        return None
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

    def alternatives():
        for alternative in shape.split("|"):
            wanted = _present(alternative.split(), sizes)
            yield [size.strip("?") for size in wanted]
            if any(size[-1] == "?" and size not in sizes for size in wanted):
                yield [size for size in wanted if size[-1] != "?"]

    texts = (", ".join(map(written, each)) for each in alternatives())
    return " or ".join(dict.fromkeys(f"[{text}]" if text else "a scalar" for text in texts))
