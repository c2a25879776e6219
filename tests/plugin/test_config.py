"""Our options: defaults are V4.1's training, and nothing misspelt passes."""

import pytest

from deepinfer_plugin.model_executor.config import DeepInferConfig

read = DeepInferConfig.from_additional_config


@pytest.mark.parametrize("nothing_said", [None, {}, {"deepinfer": {}}, {"other_plugin": {"x": 1}}])
def test_defaults_are_the_trained_model(nothing_said):
    options = read(nothing_said)
    assert options == DeepInferConfig(activation_rounding=True, kv_rounding=True, force_kernels={})
    assert options.deviations == []


def test_options_are_read_from_our_section():
    options = read({"deepinfer": {"kv_rounding": False, "force_kernels": {"swiglu": "reference"}}})
    assert not options.kv_rounding and options.activation_rounding
    assert options.force_kernels == {"swiglu": "reference"}
    assert options.deviations == ["kv_rounding"]


def test_a_misspelt_option_is_refused_with_the_right_one():
    with pytest.raises(ValueError, match="unknown option 'kv_roundin'; did you mean 'kv_rounding'.*known: activation"):
        read({"deepinfer": {"kv_roundin": False}})


def test_a_misspelt_section_is_refused():
    with pytest.raises(ValueError, match="stand under 'deepinfer', got the key 'DeepInfer'"):
        read({"DeepInfer": {"kv_rounding": False}})


@pytest.mark.parametrize("section", [[], "kv_rounding", 1])
def test_a_section_that_is_no_mapping_is_refused(section):
    with pytest.raises(ValueError, match="must be a mapping of options"):
        read({"deepinfer": section})


@pytest.mark.parametrize("option", ["activation_rounding", "kv_rounding"])
@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_switch_takes_only_true_and_false(option, value):
    with pytest.raises(ValueError, match=f"{option}: must be true or false, got"):
        read({"deepinfer": {option: value}})


@pytest.mark.parametrize("option", ["packed_weights", "packed_kv"])
@pytest.mark.parametrize("value", [True, False, None])
def test_packing_may_be_left_to_the_target(option, value):
    assert getattr(read({"deepinfer": {option: value}}), option) is value
    assert getattr(read({"deepinfer": {}}), option) is None


@pytest.mark.parametrize("option", ["packed_weights", "packed_kv"])
@pytest.mark.parametrize("value", ["true", 1, []])
def test_packing_takes_no_other_value(option, value):
    with pytest.raises(ValueError, match=f"{option}: must be true, false or null, got"):
        read({"deepinfer": {option: value}})


def test_records_need_rounding():
    with pytest.raises(ValueError, match="packed_kv: records hold rounded rows only"):
        read({"deepinfer": {"packed_kv": True, "kv_rounding": False}})


@pytest.mark.parametrize("value", ["reference", {"swiglu": 1}, ["swiglu"]])
def test_forced_kernels_are_names_by_op(value):
    with pytest.raises(ValueError, match="force_kernels: must map op names to module names"):
        read({"deepinfer": {"force_kernels": value}})
