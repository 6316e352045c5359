"""Source files as byte tokens: by default the Python standard library's own, some of them held out."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from ..byte_lm import START

HELD_OUT = 25
"""One file in so many is held out."""
LARGEST_FILE = 200_000
"""Bytes; larger files are tables and generated text."""


def standard_library() -> Path:
    """The folder of this Python's own source files."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(name: str) -> bool:
    """Whether a file, by its path below the corpus folder, is kept from training; the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0


def source_files(folder: Path) -> list[Path]:
    """The `*.py` files below `folder`, sorted by path, without installed packages, empty and very large files."""
    files = [
        file for file in folder.rglob("*.py") if not {"site-packages", "__pycache__"} & set(file.relative_to(folder).parts)
    ]
    return [file for file in sorted(files) if 0 < file.stat().st_size <= LARGEST_FILE]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents end to end, each behind a `START`: `[N]` uint16 tokens."""

    train: np.ndarray
    held_out: np.ndarray
    num_train_files: int
    num_held_out_files: int

    @classmethod
    def read(cls, folder: Path, seed: int = 0) -> Corpus:
        """Read and shuffle the source files below `folder`. Raises ValueError if there are too few to hold some out."""
        files = source_files(folder)
        parts: dict[bool, list[Path]] = {True: [], False: []}
        for file in files:
            parts[is_held_out(file.relative_to(folder).as_posix())].append(file)
        if not parts[True] or not parts[False]:
            raise ValueError(f"corpus: {folder} has {len(files)} usable *.py files, too few to train on and hold some out")
        rng = np.random.default_rng(seed)

        def joined(part: list[Path]) -> np.ndarray:
            shuffled = [part[i] for i in rng.permutation(len(part))]
            start = np.array([START], np.uint16)
            return np.concatenate(
                [piece for file in shuffled for piece in (start, np.frombuffer(file.read_bytes(), np.uint8).astype(np.uint16))]
            )

        return cls(joined(parts[False]), joined(parts[True]), len(parts[False]), len(parts[True]))


def windows(tokens: np.ndarray, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """`count` random windows of a token stream: `[count, length]` int32."""
    if len(tokens) <= length:
        raise ValueError(f"corpus: {len(tokens)} tokens are fewer than one window of {length}")
    starts = rng.integers(0, len(tokens) - length, count)
    return tokens[starts[:, None] + np.arange(length)].astype(np.int32)
