"""What no kernel can do is refused when a job is read, and not in the middle of a run: every value the schema takes."""

import importlib
import itertools
import pkgutil
import typing

import pytest

from maniple import kernels
from maniple.config.check import check, resolve_card
from maniple.config.load import load
from maniple.config.schema import DataConfig, MoEConfig, PrecisionConfig
from maniple.errors import UserError
from maniple.kernels import registry

LOW_PRECISION = {"quantize", "quantized_grouped_gemm", "quantized_linear", "quantized_swiglu"}
TINY = ["model.variant=tiny", "model.card=qwen3-30b-a3b", "train.device=cpu"]


def choices(section, name):
    return typing.get_args(section.model_fields[name].annotation)


@pytest.fixture(scope="module")
def operations():
    """Every operation that a layer of a job calls, all implementations registered."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg]
    for name in names:
        importlib.import_module(f"maniple.kernels.{name}")
    found = {row["op"] for row in registry.describe()}
    assert {"grouped_gemm", "permute", "swiglu"} <= set(names)
    assert found
    assert found > LOW_PRECISION
    return found


def can_run(operations, recipe, device, pin):
    """Whether there is an implementation of every operation: those of layers that are not quantized are bf16's."""
    try:
        for operation in operations - LOW_PRECISION:
            registry.select(operation, "bf16", device, pin)
        for operation in LOW_PRECISION if recipe != "bf16" else ():
            # the job's choice is of the experts' kernels
            registry.select(operation, recipe, device, pin if operation == "quantized_grouped_gemm" else None)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("recipe", "dtype", "pin"),
    [
        *itertools.product(
            choices(PrecisionConfig, "recipe"), choices(PrecisionConfig, "dtype"), choices(MoEConfig, "kernels")
        )
    ],
)
def test_a_recipe_is_accepted_only_if_every_operation_has_it(operations, recipe, dtype, pin):
    config = load(None, [*TINY, f"precision.recipe={recipe}", f"precision.dtype={dtype}", f"moe.kernels={pin}"]).config
    runs = can_run(operations, recipe, "cpu", pin)
    try:
        check(config, resolve_card(config), 1)
    except UserError as error:
        message = str(error)
    else:
        message = ""
        assert runs
    assert "\n" not in message
    if recipe == "bf16" or dtype == "bf16":
        assert not message
    else:
        assert "set precision.dtype=bf16" in message


def test_every_choice_of_the_schema_is_real(operations):
    """No key takes a name that nothing answers to."""
    registered = {row["name"] for row in registry.describe()}
    assert set(choices(MoEConfig, "kernels")) - {"auto"} <= registered
    assert set(choices(DataConfig, "source")) == {"python", "megatron", "synthetic"}
    for dispatcher in choices(MoEConfig, "dispatcher"):
        config = load(None, [*TINY, f"moe.dispatcher={dispatcher}"]).config
        check(config, resolve_card(config), 1)


def test_a_number_of_ranks_that_does_not_fit_names_those_that_do():
    config = load(None, ["model.card=qwen3-30b-a3b", "parallel.expert_parallel_size=12"]).config
    with pytest.raises(UserError) as caught:
        check(config, resolve_card(config), 12)
    assert "it can be 1, 2, 4, 8, 16, 32, 64, 128" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_twelve_ranks_sixteen_experts_a_token_and_an_odd_width_are_accepted():
    """What other exchanges hard-code."""
    overrides = "{hidden_size: 3584, num_heads: 28, num_kv_heads: 4, moe: {num_experts: 48, topk: 16}}"
    sets = ["model.card=qwen3-30b-a3b", f"model.overrides={overrides}", "parallel.expert_parallel_size=12"]
    config = load(None, [*sets, "train.global_batch_size=12"]).config
    check(config, resolve_card(config), 12)
