"""`fusewise.optimize` on what it cannot work on: skipped with the reason, or a clear error."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewise
from fusewise.nn import BatchNormAct2d
from fusewise.rewrite import register
from fusewise.rewrite.registry import _OWN
from optimize_models import IMAGE, ROWS, Head, Stem, draw, inject, names_and_types, shaken

__all__ = ["inject"]


def rows(model, x=None, **options):
    """The results and reasons, by module. The model must be as it was."""
    before = names_and_types(model), {n: v.clone() for n, v in model.named_buffers()}
    _, report = fusewise.optimize(model, draw(IMAGE) if x is None else x, **options)
    assert names_and_types(model) == before[0]
    assert all(torch.equal(before[1][name], value) for name, value in model.named_buffers())
    return {row.name: (row.result, row.reason) for row in report.rows}


def found_alone(model):
    """Whether the norm is swapped without the activation, which it is no chain with."""
    _, report = fusewise.optimize(model, draw(IMAGE))
    found = [(row.name, row.pattern, row.result) for row in report.rows]
    return found == [("bn1", "BatchNorm", "swapped")]


def reasons(model):
    """By pattern: why the norm is not swapped in it."""
    _, report = fusewise.optimize(model, draw(IMAGE))
    return {row.pattern: row.reason for row in report.rows if row.name == "bn1"}


@pytest.mark.parametrize(
    "options, kind, said",
    [
        ({"min_gain": 0}, ValueError, "min_gain: expected a number above 0, got 0"),
        ({"min_gain": -1.5}, ValueError, "min_gain: expected a number above 0, got -1.5"),
        ({"min_gain": float("nan")}, ValueError, "min_gain: .* got nan"),
        ({"min_gain": "2"}, ValueError, "min_gain: .* got '2'"),
        ({"training": 1}, TypeError, "training: expected True or False, got 1"),
        ({"verify": None}, TypeError, "verify: expected True or False, got None"),
        ({"amp": "fp16"}, TypeError, "amp: expected True, False, None or a dtype, got 'fp16'"),
        ({"include": "layer9"}, ValueError, "include: 'layer9' matches no module"),
        ({"exclude": [nn.LSTM]}, ValueError, "exclude: .*LSTM.* matches no module"),
        ({"exclude": 3.5}, TypeError, "exclude: expected names or classes, got 3.5"),
        ({"graph": True}, ValueError, "graph: expected a model on a GPU, got one on cpu"),
    ],
)
def test_wrong_arguments(inject, options, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        fusewise.optimize(Stem(nn.Identity()), draw(IMAGE), **options)


@pytest.mark.parametrize(
    "inputs, said",
    [
        (torch.randn(4, 5, 14, 14), "RuntimeError: .* to have 3 channels, but got 5"),
        ((), "TypeError: .*missing 1 required positional argument"),
        ((draw(IMAGE), 1), "TypeError: .*takes 2 positional arguments"),
        ({"image": draw(IMAGE)}, "TypeError: .*unexpected keyword argument 'image'"),
        (draw(IMAGE).long(), "RuntimeError: "),
        (torch.randn(1, 3, 3, 3), "ValueError: Expected more than 1 value per channel"),
    ],
    ids=range(6),
)
def test_inputs_that_do_not_run_through_the_model(inject, inputs, said):
    model = Stem(nn.Identity())
    expected = "^example_inputs: expected inputs that run through the model, but it raised "
    with pytest.raises(ValueError, match=expected + said):
        fusewise.optimize(model, inputs)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("form, name", [(lambda x: x, "0"), (lambda x: {"x": x}, "x")])
def test_inputs_that_are_not_finite(inject, value, form, name):
    x = draw(IMAGE)
    x[1, 2, 3, 4] = value
    said = f"^example_inputs: expected finite values, got NaN or infinity in input {name}, .*False$"
    with pytest.raises(ValueError, match=said):
        fusewise.optimize(Stem(nn.Identity()), form(x))
    fusewise.optimize(Stem(nn.Identity()), form(x), verify=False)


def test_a_mask_of_infinities_that_the_output_does_not_see(inject):
    class Masked(Head):
        def forward(self, x, mask):
            return super().forward(F.scaled_dot_product_attention(x, x, x, mask))

    mask = torch.full((ROWS[0], ROWS[0]), -math.inf).triu(1)
    _, report = fusewise.optimize(Masked(nn.ReLU()), (draw(ROWS), mask))
    assert report.swapped


@pytest.mark.parametrize("inputs", [(draw(IMAGE),), [draw(IMAGE)], {"x": draw(IMAGE)}])
def test_forms_of_inputs(inject, inputs):
    _, report = fusewise.optimize(Stem(nn.Identity()), inputs)
    assert report.swapped


@pytest.mark.parametrize(
    "make, kind, said",
    [
        (lambda: torch.nn.functional.relu, TypeError, "model: expected a torch.nn.Module, got"),
        (
            lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 4))),
            TypeError,
            "model: expected an ordinary module, got a scripted one; pass the module that was "
            "scripted, and use torch.compile or torch.export on the result, because",
        ),
        (
            lambda: torch.compile(Head(nn.ReLU())),
            TypeError,
            "model: expected an ordinary module, got a compiled one; pass the module itself",
        ),
        (
            lambda: nn.DataParallel(Head(nn.ReLU())),
            TypeError,
            "model: expected a model that is not wrapped yet, got DataParallel",
        ),
        (
            lambda: nn.Sequential(Head(nn.ReLU()), nn.Linear(4, 4, device="meta")),
            ValueError,
            "model: expected all parameters, buffers and inputs on one device, got cpu and meta",
        ),
        (
            lambda: Head(nn.ReLU()).requires_grad_(False),
            ValueError,
            "model: expected an output that needs a gradient, got none",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_cannot_be_optimized(inject, make, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        fusewise.optimize(make(), draw(ROWS), training=True)


def test_compiled_in_place(inject):
    model = Head(nn.ReLU())
    model.compile()
    with pytest.raises(TypeError, match="^model: expected an ordinary module, got a compiled one"):
        fusewise.optimize(model, draw(ROWS))


def test_hooks_for_all_modules(inject):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="^model: hooks are registered for all modules"):
            fusewise.optimize(Head(nn.ReLU()), draw(ROWS))
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_and_compiled_parts_are_left_alone(inject):
    scripted = torch.jit.script(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
    compiled = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())
    compiled.compile(backend="eager")
    model = Stem(scripted, compiled)
    new, report = fusewise.optimize(model, draw(IMAGE))
    assert [row.name for row in report.rows] == ["bn1"]
    assert new.blocks[0] is scripted


def hooked(model, name):
    model.get_submodule(name).register_forward_hook(lambda *_: None)
    return model


def with_backward_hook(model, name):
    model.get_submodule(name).register_full_backward_hook(lambda *_: None)
    return model


def own_forward(model, name):
    module = model.get_submodule(name)
    module.forward = module.forward
    return model


def pruned(model, name):
    nn.utils.prune.l1_unstructured(model.get_submodule(name), "weight", 0.5)
    return model


def parametrised(model, name):
    nn.utils.parametrize.register_parametrization(
        model.get_submodule(name), "weight", nn.Softplus()
    )
    return model


@pytest.mark.parametrize("change", [hooked, with_backward_hook, own_forward, pruned])
def test_hooks_on_a_norm(inject, change):
    import torch.nn.utils.prune  # noqa: F401

    model = Stem(nn.Identity())
    model.relu = nn.ReLU()  # one that writes to its input does not go with backward hooks
    result, reason = rows(change(model, "bn1"))["bn1"]
    assert result == "unsupported"
    assert reason.startswith("norm: has hooks") or reason.startswith("norm: overrides forward")


def test_a_parametrised_norm_is_none_that_is_known(inject):
    assert rows(parametrised(Stem(nn.Identity()), "bn1")) == {}


@pytest.mark.parametrize("change", [hooked, own_forward])
@pytest.mark.parametrize("name, said", [("relu", "activation"), ("maxpool", "max-pool")])
def test_hooks_behind_a_norm(inject, change, name, said):
    result, reason = rows(change(Stem(nn.Identity()), name))["bn1"]
    assert result == "unsupported" and reason.startswith(said)


def test_hooks_on_a_state_dict(inject):
    model = Stem(nn.Identity())
    model.bn1.register_load_state_dict_pre_hook(lambda *_: None)
    assert rows(model)["bn1"] == (
        "unsupported",
        "bn1 has hooks, which would be lost; remove them first",
    )


@pytest.mark.parametrize("name", ["blocks.0", "blocks.0.bn2", "blocks.0.relu"])
def test_hooks_in_a_residual_block(inject, name):
    resnet = pytest.importorskip("torchvision").models.resnet
    found = rows(hooked(Stem(resnet.BasicBlock(8, 8)), name))
    assert found["bn1"][0] == "swapped"
    assert found["blocks.0"][0] == "unsupported" and "has hooks" in found["blocks.0"][1]


@pytest.mark.parametrize("change", [hooked, pruned, parametrised])
def test_changed_linear_layers(inject, change):
    import torch.nn.utils.prune  # noqa: F401

    found = rows(change(Head(nn.ReLU()), "fc1"), draw(ROWS))
    assert all(result == "unsupported" and "has hooks" in why for result, why in found.values())


def test_squeeze_and_excitation_with_other_parts(inject):
    misc = pytest.importorskip("torchvision").ops.misc
    found = rows(Stem(misc.SqueezeExcitation(8, 4, activation=nn.Tanh)))
    assert found["blocks.0"][0] == "unsupported"
    assert found["blocks.0"][1].startswith("module.activation: expected ReLU, SiLU or Hardswish")


def test_an_activation_that_is_not_fused(inject):
    model = Stem(nn.Identity())
    model.relu = nn.ELU()
    result, reason = rows(model)["bn1"]
    assert result == "unsupported"
    assert reason.startswith("activation: expected ReLU, ReLU6, SiLU")


def test_parameters_that_are_used_in_two_places(inject):
    model = nn.Sequential(Head(nn.ReLU()), nn.Linear(4, 6), Head(nn.ReLU()))
    model[2].fc1 = model[0].fc1
    found = rows(model, draw(ROWS))
    assert found["0.fc1"] == ("unsupported", "0.fc1.weight is also used as 2.fc1.weight")
    model[2].fc1 = nn.Linear(6, 10)
    model[2].fc1.weight = model[0].fc1.weight
    assert rows(model, draw(ROWS))["0.fc1"][0] == "unsupported"


def test_an_activation_that_is_used_in_two_places_is_no_obstacle(inject):
    act = nn.ReLU()
    new, report = fusewise.optimize(
        nn.Sequential(Head(act), nn.Linear(4, 6), Head(act)), draw(ROWS)
    )
    assert [row.result for row in report.rows] == ["swapped"] * 2


def test_an_activation_that_one_forward_calls_twice(inject):
    class Twice(Stem):
        def forward(self, x):
            return self.relu(super().forward(x))

    found = reasons(Twice(nn.Identity()))
    assert found["BatchNorm"] == ""
    assert found["BatchNorm + activation"].startswith("relu is called in several places; use a")


@pytest.mark.parametrize("act", [F.relu, F.silu, torch.relu, lambda v: v.relu()])
def test_an_activation_that_is_a_function(inject, act):
    class Function(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1 = nn.BatchNorm2d(3)

        def forward(self, x):
            return act(self.bn1(x))

    found = reasons(Function())
    assert found["BatchNorm"] == ""
    assert "is called as a function; use a module" in found["BatchNorm + activation"]


def test_an_activation_that_a_sequential_has_twice(inject):
    act = nn.ReLU()
    _, report = fusewise.optimize(
        nn.Sequential(nn.BatchNorm2d(3), act, nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act),
        draw(IMAGE),
    )
    found = [(row.name, row.pattern, row.result) for row in report.rows]
    assert found == [(name, "BatchNorm + activation", "swapped") for name in ("0", "3")]


def test_a_norm_whose_result_is_read_twice(inject):
    class Read(Stem):
        def forward(self, x):
            y = self.bn1(self.conv1(x))
            return self.fc((self.relu(y) + y).mean((2, 3)))

    assert found_alone(Read(nn.Identity()))


def test_a_chain_that_one_mode_does_not_have(inject):
    class Training(Stem):
        def forward(self, x):
            y = self.bn1(self.conv1(x))
            if self.training:
                y = y * 2
            return self.fc(self.relu(y).mean((2, 3)))

    assert found_alone(Training(nn.Identity()))


def test_a_forward_that_cannot_be_traced(inject):
    class Branches(Stem):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    found = rows(Branches(nn.Identity()))
    assert found.keys() == {"bn1", ""} and found["bn1"][0] == "swapped"
    assert found[""][0] == "unsupported" and "cannot be traced" in found[""][1]


def test_a_candidate_that_the_inputs_never_reach(inject):
    class Skips(Stem):
        def __init__(self):
            super().__init__(nn.Identity())
            self.unused = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())

    assert rows(Skips())["unused.0"] == ("not reached", "")


def test_a_candidate_that_only_training_reaches(inject):
    class Auxiliary(Stem):
        def __init__(self):
            super().__init__(nn.Identity())
            self.extra = Head(nn.ReLU())

        def forward(self, x):
            y = super().forward(x)
            return (y, self.extra(x[:, 0, 0, :6])) if self.training else y

    assert rows(Auxiliary(), training=True)["extra.fc1"][0] == "swapped"
    assert rows(Auxiliary(), training=False)["extra.fc1"][0] == "not reached"


def test_quantized_layers_are_left_alone(inject):
    model = Head(nn.ReLU()).eval()
    model.fc1 = torch.ao.nn.quantized.dynamic.Linear(6, 10)
    assert rows(model, draw(ROWS)) == {}


def test_a_model_that_looks_at_its_layers(inject):
    """One candidate does not stand in the way of the others."""

    class Looks(nn.Sequential):
        def forward(self, x):
            assert self[0].fc1.weight.shape[0] == 10
            return super().forward(x) * self[0].act.inplace

    found = rows(Looks(Head(nn.ReLU(inplace=True)), nn.Linear(4, 6), Head(nn.SiLU())), draw(ROWS))
    assert found["0.fc1"][0] == "unsupported"
    assert "the model does not run with it: AttributeError: 'Identity'" in found["0.fc1"][1]
    assert found["2.fc1"] == ("swapped", "")


def test_a_model_that_looks_at_what_was_replaced(inject):
    class Looks(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * len(self[0])

    stack = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model = Looks(stack, nn.Identity())
    new, report = fusewise.optimize(model, draw(ROWS))
    assert report.rows[0].result == "taken back"
    assert "WRONG, TypeError: object of type 'MLP' has no len()" in report.conclusion
    assert names_and_types(new) == names_and_types(model)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, factor=1.0):
        return x * self.scale * factor


@pytest.fixture
def block():
    yield Block
    _OWN.clear()


def test_hooks_in_a_candidate_of_the_user(inject, block):
    register(Block, lambda module: module)
    assert rows(Stem(Block()))["blocks.0"][0] == "swapped"
    result, reason = rows(hooked(Stem(Block()), "blocks.0"))["blocks.0"]
    assert result == "unsupported" and reason.startswith("blocks.0 has hooks")


def test_integer_inputs_of_a_candidate(inject, block):
    class Counts(Stem):
        def forward(self, x):
            return super().forward(x) + self.extra(torch.arange(4))

    model = Counts(nn.Identity())
    model.extra = Block()
    register(Block, lambda module: module)
    result, reason = rows(model)["extra"]
    assert (result, reason) == (
        "unsupported",
        "gets a tensor of torch.int64; expected a floating dtype",
    )


def test_keyword_arguments_of_a_candidate(inject, block):
    class Keywords(Stem):
        def forward(self, x):
            return self.extra(super().forward(x), factor=2.0)

    model = Keywords(nn.Identity())
    model.extra = Block()
    register(Block, lambda module: module)
    assert rows(model)["extra"] == ("unsupported", "is called with keyword arguments: factor")


@pytest.mark.parametrize(
    "convert, said",
    [
        (lambda block: None, "the conversion returned NoneType, not a module"),
        (lambda block: nn.Identity(), "the replacement's parameters are not the module's own"),
        (lambda block: copy.deepcopy(block), "the replacement's parameters are not the module's"),
        (lambda block: 1 / 0, "division by zero"),
    ],
)
def test_conversions_that_break_their_contract(inject, block, convert, said):
    register(Block, convert)
    result, reason = rows(Stem(Block()))["blocks.0"]
    assert result == "unsupported" and said in reason


def test_a_replacement_that_fails(inject, block):
    class Fails(Block):
        def forward(self, x):
            raise IndexError("no such thing")

    def convert(module):
        made = Fails()
        made.scale = module.scale
        return made

    register(Block, convert)
    assert rows(Stem(Block()))["blocks.0"] == ("unsupported", "no such thing")
    assert rows(Stem(Block()), verify=False)["blocks.0"] == (
        "unsupported",
        "cannot be measured: IndexError: no such thing",
    )


def test_a_model_that_is_itself_a_candidate(inject):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    new, report = fusewise.optimize(model, draw(ROWS))
    assert type(new) is fusewise.nn.MLP and report.restore() is model
    same, report = fusewise.optimize(model, draw(ROWS), inplace=True)
    assert same is model
    assert "inplace=True cannot replace" in report.rows[0].reason


def test_a_model_that_cannot_be_copied(inject):
    model = Stem(nn.Identity())
    model.file = open(__file__)  # noqa: SIM115 - the model keeps it
    with model.file, pytest.raises(TypeError, match="^model: expected a module that can be copied"):
        fusewise.optimize(model, draw(IMAGE))


def test_one_value_per_channel(inject):
    """Torch's own error in training; nothing special in inference."""
    model = shaken(Stem(nn.Identity())).eval()
    new, report = fusewise.optimize(model, draw((1, 3, 14, 14)))
    assert report.swapped and type(new.bn1) is BatchNormAct2d
