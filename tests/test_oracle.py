"""The oracle itself, against cases that were worked out by hand or published: nothing here comes from the product."""

import pytest
import torch

from tests.oracle.checkpoint import decode, e2m1, e8m0
from tests.oracle.engram import multipliers_of, primes_of, rows_of
from tests.oracle.model import Oracle, exact_rounding, no_rounding, rope_frequencies, rotate, sinkhorn
from tests.oracle.quantisers import fq4i, fq4k, fq8, power_of_two_above

RELEASED = {"engram_layer_ids": [1, 14], "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_vocab_size": 16000000}
TINY = {"engram_layer_ids": [1, 4], "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_vocab_size": 256}
RELEASED_ROPE = {
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
}


def group(*values: float, size: int = 32) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (size - len(values))], dtype=torch.float64)


def test_fp4_codes_are_sign_and_magnitude():
    values = e2m1(torch.arange(16)).tolist()
    assert values == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_exponent_bytes_are_powers_of_two():
    assert e8m0(torch.tensor([0, 126, 127, 130], dtype=torch.uint8)).tolist() == [2.0**-127, 0.5, 1, 8]


def test_the_low_half_of_a_byte_is_the_even_column():
    byte = torch.full((1, 16), 0x72, dtype=torch.int8)  # 2 -> 1.0, 7 -> 6.0
    assert decode(byte, torch.tensor([[128]], dtype=torch.uint8))[0, :4].tolist() == [2, 12, 2, 12]


def test_a_negative_byte_is_read_by_its_bits():
    byte = torch.full((1, 16), -1, dtype=torch.int8)  # both halves 15: -6
    assert decode(byte, torch.tensor([[127]], dtype=torch.uint8)).unique().tolist() == [-6]


def test_fp8_blocks_take_the_factor_of_their_block():
    weight = torch.ones(33, 64).to(torch.float8_e4m3fn)
    decoded = decode(weight, torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8))
    assert (decoded[0, 0], decoded[0, 32], decoded[32, 0], decoded[32, 63]) == (1, 2, 4, 8)


@pytest.mark.parametrize(("x", "above"), [(1.0, 1), (1.0000001, 2), (0.75, 1), (0.5, 0.5), (448 / 448, 1), (3, 4)])
def test_factors_are_rounded_up_to_powers_of_two(x, above):
    assert power_of_two_above(torch.tensor(x, dtype=torch.float64)) == above


def test_fp8_rounds_halfway_to_even_and_keeps_the_largest():
    # factor 1; between 16 and 18 lies 17, halfway: 16 has the even code; 19 lies between 18 and 20: 20
    assert fq8(group(448, 17, 19, -17.5, 0.001953125 / 2))[:5].tolist() == [448, 16, 20, -18, 0]


def test_index_midpoints_go_to_the_even_code():
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert fq4i(group(6, *midpoints))[1:8].tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_entries_have_a_factor_of_three_mantissa_bits():
    # 6.3 / 6 = 1.05 rounds to 1 in E4M3, so 6.3 saturates at 6; 6.6 / 6 = 1.1 rounds to 1.125
    assert fq4k(group(6.3, size=16))[0] == 6
    assert fq4k(group(6.6, size=16))[0] == 6 * 1.125


def test_groups_of_zeros_stay_zero():
    for rounding, size in ((fq8, 32), (fq4i, 32), (fq4k, 16)):
        assert rounding(torch.zeros(2, size, dtype=torch.float64)).eq(0).all()


def test_table_sizes_are_the_published_primes():
    first, second = primes_of(RELEASED)
    assert first[0] == [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183]
    assert [sum(map(sum, layer)) for layer in (first, second)] == [384006168, 384016682]
    assert primes_of(TINY)[0] == [[257, 263], [269, 271], [277, 281]]


def test_multipliers_are_the_published_ones():
    assert multipliers_of(1, 99092, 4) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert multipliers_of(14, 99092, 4) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_ngrams_end_at_the_start_and_at_images():
    config, classes = TINY | {"engram_pad_token_id": 2}, list(range(10))
    rows = lambda tokens, image: rows_of(tokens, image, config, classes, 1)  # noqa: E731
    assert rows([5, 6], [False, False])[0] == rows([5], [False])[0] == rows([2, 2, 2, 5], [False] * 4)[3]
    after_image = rows([3, 9, 5], [False, True, False])
    assert after_image[1] == [] and after_image[2] == rows([5], [False])[0]
    assert rows([3, 5], [False, False])[1] != rows([5], [False])[0]


def test_rotary_frequencies_are_the_published_ones():
    scaled = rope_frequencies(RELEASED_ROPE, True)
    for i, value in {1: 0.6876560, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4, 25: 5.372313e-6}.items():
        assert scaled[i] == pytest.approx(value, rel=1e-6)
    assert rope_frequencies(RELEASED_ROPE, False)[1] == pytest.approx(10000 ** (-2 / 64), rel=1e-6)


def test_rotation_turns_the_last_channels_in_pairs_and_back():
    x, frequencies = torch.randn(3, 2, 70, dtype=torch.float64), rope_frequencies(RELEASED_ROPE, True)
    turned = rotate(x, [0, 5, 9], frequencies)
    assert torch.equal(turned[..., :6], x[..., :6]) and torch.equal(turned[0], x[0])
    assert torch.allclose(rotate(turned, [0, 5, 9], frequencies, -1), x, atol=1e-14)
    one = torch.zeros(1, 1, 64, dtype=torch.float64)
    one[..., 0] = 1  # pair 0 has frequency 1: position 1 turns it by 1 radian
    assert rotate(one, [1], frequencies)[0, 0, :2].tolist() == pytest.approx([0.5403023, 0.8414710])


def test_mixing_matrices_are_doubly_stochastic_columns_last():
    a = sinkhorn(torch.randn(5, 4, 4, dtype=torch.float64), 20, 1e-6)
    assert torch.allclose(a.sum(1), torch.ones(5, 4, dtype=torch.float64), atol=4e-6)
    assert torch.allclose(a.sum(2), torch.ones(5, 4, dtype=torch.float64), atol=1e-2)


@pytest.fixture(scope="module")
def exact(tiny_checkpoint):
    return Oracle(tiny_checkpoint, exact_rounding)


def test_no_token_sees_a_later_one(exact):
    tokens = [3 + 7 * i % 400 for i in range(40)]
    changed = tokens[:25] + [9] + tokens[26:]
    before, after = exact.logits(tokens), exact.logits(changed)
    assert torch.equal(before[:25], after[:25])
    assert not torch.allclose(before[25], after[25]) and not torch.allclose(before[39], after[39])


def test_images_take_other_experts_and_no_ngrams(exact):
    image = exact.config["image_token_id"]
    logits = exact.logits([5, image, 7])
    exact.weights = {k: v + 5 * torch.randn_like(v) if k.endswith("bias_vl") else v for k, v in exact.weights.items()}
    changed = exact.logits([5, image, 7])
    assert torch.equal(logits[0], changed[0]) and not torch.allclose(logits[1], changed[1])


def test_rounding_changes_the_logits(tiny_checkpoint, exact):
    tokens = list(range(5, 30))
    plain, rounded = Oracle(tiny_checkpoint, no_rounding).logits(tokens), exact.logits(tokens)
    assert plain.shape == (25, 512)
    assert float((plain - rounded).abs().max() / plain.abs().max()) > 1e-3
