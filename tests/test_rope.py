"""YaRN tables against the formulas written out one number at a time, and against facts about the published config."""

import dataclasses
import math

import numpy as np
import pytest

from jdspark.presets import K3_DSPARK, TINY
from jdspark.rope import softmax_scale, yarn_inverse_frequencies, yarn_mscale, yarn_tables


def inverse_frequency(yarn, dim, i):
    def turns_dim(turns):
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(yarn.rope_theta))

    low, high = max(math.floor(turns_dim(yarn.beta_fast)), 0), min(math.ceil(turns_dim(yarn.beta_slow)), dim - 1)
    keep = 1 - min(max((i - low) / ((high - low) or 0.001), 0), 1)
    plain = 1 / yarn.rope_theta ** (2 * i / dim)
    return plain / yarn.factor * (1 - keep) + plain * keep


def test_inverse_frequencies():
    for config in (K3_DSPARK, TINY):
        dim = config.qk_rope_head_dim
        wanted = [inverse_frequency(config.rope, dim, i) for i in range(dim // 2)]
        np.testing.assert_allclose(yarn_inverse_frequencies(config.rope, dim), wanted, rtol=1e-14)


def test_fast_pairs_are_kept_and_slow_ones_stretched():
    frequencies = yarn_inverse_frequencies(K3_DSPARK.rope, 64)
    plain = 50000.0 ** -(np.arange(32) / 32)
    assert frequencies[0] == 1.0
    np.testing.assert_allclose(frequencies[-1], plain[-1] / 32, rtol=1e-14)
    # 32 turns within 32768 positions: pairs below floor(64 ln(32768 / 64pi) / (2 ln 50000)) = 15 keep their frequency
    np.testing.assert_allclose(frequencies[:16], plain[:16], rtol=1e-14)
    assert (frequencies[16:] < plain[16:]).all()


def test_tables_are_float64_cosines_rounded_once():
    cos, sin = yarn_tables(K3_DSPARK, 5000)
    assert cos.shape == sin.shape == (5000, 32)
    assert cos.dtype == sin.dtype == np.float32
    angle = 4321 * inverse_frequency(K3_DSPARK.rope, 64, 20)
    assert cos[4321, 20] == np.float32(math.cos(angle))
    assert sin[4321, 20] == np.float32(math.sin(angle))
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()


def test_mscale_moves_into_the_softmax():
    mscale = 0.1 * math.log(32) + 1
    assert yarn_mscale(32, 1) == mscale
    assert softmax_scale(K3_DSPARK) == pytest.approx(mscale**2 / math.sqrt(192), rel=1e-15)
    without = dataclasses.replace(K3_DSPARK, rope=dataclasses.replace(K3_DSPARK.rope, mscale_all_dim=0.0))
    assert softmax_scale(without) == pytest.approx(1 / math.sqrt(192), rel=1e-15)
    assert yarn_tables(without, 2)[0][0, 0] == np.float32(mscale)  # then the tables carry it
    unscaled = dataclasses.replace(K3_DSPARK, rope=dataclasses.replace(K3_DSPARK.rope, factor=1.0))
    assert softmax_scale(unscaled) == pytest.approx(1 / math.sqrt(192), rel=1e-15)
