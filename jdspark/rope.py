"""YaRN rotary tables, as HF's DeepSeek-V3 computes them, for rope on adjacent pairs."""

from __future__ import annotations

import math

import numpy as np

from .config import DrafterConfig, YarnConfig


def yarn_mscale(factor: float, mscale: float) -> float:
    """`0.1 * mscale * ln(factor) + 1`, 1 for a factor up to 1 or an mscale of 0."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 and mscale else 1.0


def yarn_inverse_frequencies(yarn: YarnConfig, dim: int) -> np.ndarray:
    """`[dim / 2]` float64 radians per position.

    Pair i turns with `theta^(-2i/dim)`. Pairs with more than `beta_fast` turns over the original context keep that,
    those with fewer than `beta_slow` are slowed down by `factor`, a linear ramp lies between.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    plain = yarn.rope_theta**-exponents

    def pair_with_turns(turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(yarn.rope_theta))

    low = max(math.floor(pair_with_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(yarn.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / max(high - low, 0.001), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def yarn_tables(config: DrafterConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of positions `0 .. length-1`: `[length, qk_rope_head_dim / 2]` fp32.

    Computed once in float64 and handed to every framework: their own cosines differ.
    """
    yarn = config.rope
    angles = np.arange(length, dtype=np.float64)[:, None] * yarn_inverse_frequencies(yarn, config.qk_rope_head_dim)
    amplitude = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return (np.cos(angles) * amplitude).astype(np.float32), (np.sin(angles) * amplitude).astype(np.float32)


def softmax_scale(config: DrafterConfig) -> float:
    """`mscale^2 / sqrt(nope + rope)` with YaRN's `mscale_all_dim`: of the heads' width, never of the latent's."""
    mscale = yarn_mscale(config.rope.factor, config.rope.mscale_all_dim)
    return mscale * mscale / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
