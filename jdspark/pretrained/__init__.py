"""The shipped pair: a byte-level target and the MLA DSpark drafter trained for it; `CARD.md` describes both."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..byte_lm import ByteTarget, load_byte_lm
from ..checkpoint import load_drafter
from ..config import DrafterConfig
from ..params import DrafterParams

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and its drafter, ready for an `Engine`."""

    target: ByteTarget
    config: DrafterConfig
    params: DrafterParams


def load_pair(folder: Path = FOLDER, *, dtype: str = "float32") -> Pair:
    """Load `target/` and `drafter/` of a folder that `python -m jdspark.train` wrote; the shipped one by default.

    The weights are stored in bfloat16; `dtype` is what they are computed in. Raises CheckpointError, ConfigError.
    """
    target = ByteTarget(*load_byte_lm(folder / "target", dtype=dtype))
    config, params = load_drafter(folder / "drafter", dtype=dtype)
    return Pair(target, config, params.with_lm_head(target.lm_head))
