"""Mutation run: each mutant is one changed comparison, clamp, index, stride, mask or layer in a kernel; tests must fail.

`python scripts/mutants.py [--only TEXT]` copies the repository for each mutant, changes one place, and runs the mutated op's
own kernel test there, the short one first and the one over every family if that passes. Prints a line per mutant and the
survivors last; exit status 1 if there are any. Two at a time it takes well under an hour on 2 cores. `--gpu` runs the few of
what a GPU has and the interpreter has not.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("jdspark", "pallas_kernels", "torch_bridge", "tests", "pyproject.toml")
SHORT, LONG = "test_kernel_has_the_bits_of_the_definition", "test_kernel_has_the_bits_of_the_definition_in_every_family"
BOUND_SHORT, BOUND_LONG = "test_kernel_stays_within_its_bound", "test_kernel_stays_within_its_bound_in_every_family"
BOUNDED_OPS = ("rms_norm", "rope", "swiglu", "block_attention")
"""Ops without a bitwise test on a CPU; their mutants change more than the bound allows."""
MANY = "test_kernel_with_many_tokens"
FUSED_STORE = "test_norm_rope_in_the_store_has_the_bits_of_the_two_kernels"
POOL_WRITERS = ("store_gen_context", "store_prepared", "scatter_context", "write_block_latents")
SECONDS = 600


class Mutant(NamedTuple):
    """One change: the first `old` behind the text `after` in `file` becomes `new`."""

    op: str
    file: str
    old: str
    new: str
    after: str = ""

    @property
    def backend(self) -> str:
        return "pallas" if self.file.startswith("pallas") else "torch triton"

    def applies(self) -> bool:
        """Whether the file still has the place that is changed."""
        text = (ROOT / self.file).read_text()
        return self.after in text and self.old in text[text.index(self.after) :]

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests of its op, the shortest first."""
        if self in ON_A_GPU:
            return ("tests/test_block_layers.py::test_a_divided_contraction_on_a_gpu",)
        if self.backend == "pallas" and self.op in ("block_attention", "block_layers"):
            return (f"tests/test_{self.op}.py",)
        if self in ONE_LAUNCH:
            return ("tests/test_markov_chain.py",)
        if (self.op, self.backend) == ("norm_rope_store", "pallas"):
            return tuple(f"tests/test_kernels.py::{FUSED_STORE}[pallas-{layout}]" for layout in ("layer_major", "page_major"))
        names = [BOUND_SHORT, BOUND_LONG] if self.op in BOUNDED_OPS else [SHORT, LONG]
        if self.op in POOL_WRITERS:
            names.insert(1, MANY)
        return tuple(f"tests/test_kernels.py::{name}[{self.op}-{self.backend}]" for name in names)


def pallas(op: str, old: str, new: str, *, file: str = "", after: str = "") -> Mutant:
    return Mutant(op, f"pallas_kernels/{file or op}.py", old, new, after)


def triton(op: str, old: str, new: str, *, file: str = "", after: str = "@triton.jit") -> Mutant:
    return Mutant(op, f"torch_bridge/triton_kernels/{file or op}.py", old, new, after)


ONE_LAUNCH = (
    pallas("markov_chain", "ceil_div(ceil_div(vocab_size, programs), TILE)", "ceil_div(vocab_size // programs, TILE)"),
    pallas("markov_chain", "b, B - together", "b, B - 1"),
    pallas("markov_chain", "is_top, indices, NOT_FOUND", "is_top, indices, -1"),
    pallas("markov_chain", "base.at[part, i, mine]", "base.at[part, 0, mine]"),
    pallas("markov_chain", "positions(x.shape) + start", "positions(x.shape) + start + 1"),
    pallas("markov_chain", "positions(order.shape) < programs", "positions(order.shape) <= programs"),
    pallas("markov_chain", "jnp.clip(anchor[b], 0, num_tokens - 1)", "jnp.clip(anchor[b], 0, num_tokens - 2)"),
    pallas("markov_chain", "number == b", "number == 1"),
    pallas("markov_chain", "return winners", "return previous"),
    pallas("markov_chain", "pl.get_global(plgpu.SemaphoreType.REGULAR)", "pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))",
           file="grid_barrier"),
)  # fmt: skip
"""Of the Markov chain's single launch."""

ON_A_GPU = (
    pallas("block_layers", "utils.c(member,", "utils.c(0,", file="cluster"),
    pallas("block_layers", "for member in range(division.cluster)", "for member in range(1)", file="streamed_product"),
    pallas("block_layers", "rank * division.steps + step", "0 * rank + step", file="streamed_product"),
    pallas("block_layers", "rank * rows_each +", "0 * rank +", file="streamed_product"),
)
"""Of a cluster's programs. Their meetings are not among them: without one a result may be right."""

MUTANTS = (
    # Pallas
    pallas("refresh_block_tables", "owned = encoded >= 0", "owned = encoded > 0"),
    pallas("refresh_block_tables", "jnp.maximum(piece.load(row, start), 0)", "piece.load(row, start)"),
    pallas("refresh_block_tables", "chunk * width, max_blocks - width", "chunk * width, max_blocks"),
    pallas("refresh_block_tables", "encoded.at[pool_idx, row, 0]", "encoded.at[pool_idx, row, 1]"),
    pallas("gen_prologue", "slot >= num_slots", "slot > num_slots"),
    pallas("gen_prologue", "jnp.clip(num_accepted, 1, width)", "jnp.clip(num_accepted, 0, width)"),
    pallas("gen_prologue", "jnp.minimum(c, max_ctx) + n, max_ctx)", "jnp.minimum(c, max_ctx) + n, max_ctx + n)"),
    pallas("gen_prologue", "context_positions[b, j] = c + j", "context_positions[b, j] = jnp.minimum(c, max_ctx) + j"),
    pallas("noise_block", "jnp.clip(bonus, 0, vocab_size - 1)", "jnp.clip(bonus, 0, vocab_size - 2)"),
    pallas("noise_block", "jnp.where(j == 0, anchor, mask_token_id)", "jnp.where(j <= 1, anchor, mask_token_id)"),
    pallas("store_gen_context", "last = count * self.page_size - 1", "last = count * self.page_size"),
    pallas("store_gen_context", "(other == b) & (j < self.K)", "(other == b) & (j < 0)"),
    pallas("store_gen_context", "(other > b)", "(other > b + 1)"),
    pallas("store_gen_context", "writes = (last >= 0) &", "writes ="),
    pallas("store_gen_context", "accepted=j < jnp.clip(", "accepted=j <= jnp.clip("),
    pallas("store_gen_context", "(bits & exponents) == exponents", "(bits & exponents) != 0", file="latent_rows"),
    pallas("store_gen_context", "tuple(range(shape.num_layers))", "tuple(range(max(shape.num_layers - 1, 1)))"),
    pallas("store_gen_context", "self.block_counts[self.first_row + b]", "self.block_counts[b]"),
    pallas("advance_ctx_len", "jnp.maximum(piece.load(num_accepted), 1)", "jnp.maximum(piece.load(num_accepted), 0)"),
    pallas("advance_ctx_len", "slot == num_slots - 1, 0", "slot == num_slots, 0"),
    pallas("advance_ctx_len", "block_count * page_size - block_size, 0", "block_count * page_size - block_size + 1, 0"),
    pallas("advance_ctx_len", "block_counts[first_row + b]", "block_counts[b]"),
    pallas("scatter_context", "(row < num_rows)", "(row <= num_rows)"),
    pallas("scatter_context", "lambda layer: latents.at[i, layer]", "lambda layer: latents.at[i, 0]"),
    pallas("block_placement", "(column < owned)", "(column <= owned)"),
    pallas("block_placement", "seq_lens[b] = length + block_size", "seq_lens[b] = length + block_size - 1"),
    pallas("write_block_latents", "block_latents.at[written, b, j]", "block_latents.at[written, b, 0]"),
    pallas("write_block_latents", "shape.holds(page, offset) & ~overwritten", "shape.holds(page, offset) | ~overwritten"),
    pallas("store_prepared", "(offset < self.page_size)", "(offset <= self.page_size)", file="latent_rows"),
    pallas("write_block_latents", "same = piece.positions() + start > index", "same = piece.positions() + start < index",
           file="latent_rows"),
    pallas("prepare_step", "lost = count == 0", "lost = count < 0"),
    pallas("prepare_step", "places[j + 1 :]", "places[j + 2 :]"),
    pallas("prepare_step", "if advance else ctx_len[slot]", "if not advance else ctx_len[slot]"),
    pallas("prepare_step", "jnp.maximum(row_of(b)[column], 0)", "row_of(b)[column]"),
    pallas("prepare_step", "length, length + block_size", "length, length + block_size - 1"),
    pallas("prepare_step", "encoded.at[pool_idx, num_contexts + b, 0]", "encoded.at[pool_idx, b, 0]"),
    pallas("store_prepared", "accepted=j < jnp.clip(", "accepted=j < 1 + jnp.clip("),
    pallas("store_prepared", "(offsets, offset))", "(pages, page))"),
    pallas("prepare_step", "jnp.clip(num_accepted[b], 1, width) - 1]", "jnp.clip(num_accepted[b], 1, width) - 2]"),
    pallas("prepare_step", "num_gen * block_size if embeddings", "num_gen * block_size - 1 if embeddings"),
    pallas("norm_rope_store", "accepted = j < jnp.clip(", "accepted = j <= jnp.clip("),
    pallas("norm_rope_store", "~overwritten(i,", "overwritten(i,"),
    pallas("norm_rope_store", "weights.at[layer], cos_sin", "weights.at[0], cos_sin"),
    pallas("norm_rope_store", "shape.row(pool, layer, page, offset), values", "shape.row(pool, 0, page, offset), values"),
    pallas("accept_strict", "merged(keys.at[first + j], indices.at[first + j]", "merged(keys.at[first + j], indices.at[first]"),
    pallas("accept_strict", "matches = jnp.where(drafts[0][b, j] == tokens[j], matches, 0)",
           "matches = jnp.where(drafts[0][b, j] == tokens[j], 1, 0)"),
    pallas("accept_strict", "magnitude > 0x7F800000", "magnitude >= 0x7F800000", file="row_argmax"),
    pallas("accept_strict", "jnp.where(bits < 0, -magnitude, bits)", "bits", file="row_argmax"),
    pallas("markov_chain", "base.at[b, i]", "base.at[b, 0]"),
    pallas("markov_chain", "w1.at[jnp.minimum(token, num_tokens - 1)]", "w1.at[jnp.minimum(token + 1, num_tokens - 1)]"),
    *ONE_LAUNCH,
    pallas("next_tokens", "accepted[row, n - 1]", "accepted[row, 0]"),
    pallas("next_tokens", "row < num_contexts, 0, token", "row < 0, 0, token"),
    pallas("scatter_context", "writes = (place >= 0) & ~overwritten(", "writes = (place >= 0) | overwritten("),
    pallas("scatter_context", "index // width, -(-num_entries", "index // width + 99, -(-num_entries", file="latent_rows"),
    pallas("store_gen_context", "lax.fori_loop(b // UNROLLED,", "lax.fori_loop(b // UNROLLED + 99,"),
    triton("scatter_context", "(place >= 0) & (lost == 0)", "(place >= 0)"),
    pallas("block_attention", "jnp.int32(KEYS - 1), jnp.int32(KEYS))", "jnp.int32(0), jnp.int32(KEYS))"),
    pallas("block_attention", "program * share + jnp.minimum(program, longer)", "program * share + program"),
    pallas("block_attention", "jnp.minimum(end - start, count)", "jnp.minimum(end - start, count - 1)"),
    pallas("block_attention", "jnp.where(stop <= begin, stop, first_start)", "jnp.where(stop <= begin, 0, 0)"),
    pallas("block_attention", "last - first + 1, warpgroups", "last - first + 2, warpgroups"),
    pallas("block_attention", "pl.ds(first + b, programs)", "pl.ds(first, programs)"),
    pallas("block_attention", "(p >= 0) & (p < num_pages)", "(p >= 0)"),
    pallas("block_attention", "jnp.int32(block_size), jnp.minimum", "jnp.int32(block_size + 1), jnp.minimum"),
    pallas("block_attention", "offset = first_row + lax.rem(", "offset = lax.rem("),
    pallas("block_attention", "first_row + lax.rem(t * KEYS, jnp.int32(page_size))", "first_row"),
    pallas("block_attention", "(key >= from_key) & (key < to_key)", "(key >= from_key) & (key <= to_key)"),
    pallas("block_attention", "(key >= from_key) & (key < to_key)", "(key < to_key)"),
    pallas("block_attention", "total * decay + weights.sum(axis=1)", "total + weights.sum(axis=1)"),
    pallas("block_attention", "[total * lax.broadcast_in_dim(decay, total.shape, [0]) for total in totals]", "totals"),
    pallas("block_attention", "jnp.where(key < keys, found", "jnp.where(key <= keys, found"),
    pallas("block_attention", "return following", "return found"),
    pallas("block_attention", "maxima = jnp.where(there, maxima, LOWEST)", "maxima = maxima + 0"),
    pallas("block_attention", "merged + scaled(i, load(i))", "merged"),
    pallas("block_attention", "jnp.minimum(start + i * warpgroups, last) + b", "jnp.minimum(start + i * warpgroups, last)"),
    pallas("block_layers", "Stacked(params.kv_a_proj, index)", "Stacked(params.kv_a_proj, 0)"),
    pallas("block_layers", "params.kv_a_layernorm[index], rope_cos", "params.kv_a_layernorm[0], rope_cos"),
    pallas("block_layers", "params.layers[index + 1].input_layernorm", "params.layers[index].input_layernorm"),
    pallas("block_layers", "residual=out.values", "residual=h"),
    pallas("block_layers", "range(0, TILE, 2)] = -1", "range(0, TILE, 2)] = 1", file="attention_operands"),
    pallas("block_layers", "(part - tiles) * TILE, TILE)", "0 * TILE, TILE)", file="attention_operands"),
    pallas("block_layers", "head * head_dim, 64)", "head * nope, 64)", file="attention_operands"),
    pallas("block_layers", "compressed.at[i]", "compressed.at[0]", file="attention_operands"),
    pallas("block_layers", "jnp.clip(positions[i]", "jnp.clip(positions[0]", file="attention_operands"),
    pallas("block_layers", "store_rows(whole * CORE, num_rows % CORE)", "store_rows(whole * CORE, 0)",
           file="attention_operands"),
    pallas("block_layers", "params.kv_a_proj.reshape", "params.kv_a_proj[::-1].reshape", file="compress_context"),
    pallas("block_layers", "slot_hidden.reshape", "slot_hidden.swapaxes(0, 1).reshape", file="draft_logits"),
    pallas("block_layers", "+ fold) * owned + side * columns", "+ fold) * owned", file="streamed_product"),
    pallas("block_layers", "rows_of(turn, fold), pl.ds(", "rows_of(turn, 0), pl.ds(", file="streamed_product"),
    pallas("block_layers", "pl.ds(fold * owned + index", "pl.ds(0 * owned + index", file="streamed_product"),
    pallas("block_layers", "jnp.float32(1 / K)", "jnp.float32(2 / K)", file="streamed_product"),
    pallas("block_layers", "+ jnp.float32(eps)", "", file="streamed_product"),
    pallas("block_layers", "values = values + added", "values = values", file="streamed_product"),
    pallas("block_layers", "* side(1, turn", "* side(0, turn", file="streamed_product"),
    pallas("block_layers", "rows_of(turn), number]", "rows_of(turn), 0]", file="streamed_product"),
    pallas("block_layers", "parts[i] > division.tiles[i]", "parts[i] < 0", file="streamed_product"),
    pallas("block_layers", "w.layer if isinstance", "0 if isinstance", file="streamed_product"),
    pallas("block_layers", "lax.rem(start, jnp.int32(group)) if group", "start if group", file="streamed_product"),
    pallas("block_layers", "range(first, end)", "range(first, end - 1)", file="streamed_product"),
    pallas("block_layers", "+ step) * folds + fold) * chunk", "+ step) * folds) * chunk", file="streamed_product"),
    pallas("block_layers", "+ step) * folds + fold) * chunk", "+ step) + fold) * chunk", file="streamed_product"),
    pallas("block_layers", "(slot * folds + fold) * owned", "(slot + fold) * owned", file="streamed_product"),
    pallas("block_layers", "chunks // folds, stages", "1 if folds > 1 else chunks, stages", file="streamed_product"),
    pallas("block_layers", "store_rows(i * CORE, CORE)", "store_rows(0, CORE)", file="attention_operands"),
    pallas("block_layers", "min(turn * rows_at_once,", "min(0,", file="streamed_product"),
    pallas("block_layers", "*(known(turn) if turn else ahead)", "*ahead", file="streamed_product"),
    pallas("block_layers", "squares_ref.at[rows_of(turn)], number", "squares_ref.at[rows_of(0)], number",
           file="streamed_product"),
    pallas("block_layers", "factors(some) if some.start else ahead", "ahead", file="attention_operands"),
    pallas("block_layers", "columns_of(transposed, some) * s", "columns_of(transposed, pl.ds(0, some.size)) * s",
           file="attention_operands"),
    pallas("block_layers", "rows), head, columns]", "rows), 0, columns]", file="attention_operands"),
    pallas("block_layers", "normed_rows(linear(captured, fc), norm)", "normed_rows(linear(captured, fc), norm * 2)",
           file="compress_context"),
    pallas("block_attention", "t == piece.high - 1", "t == piece.low"),
    pallas("block_attention", "leave, piece, column, totals", "leave, piece, 0, totals"),
    pallas("block_attention", "total[:, start - column : start", "total[:, 0 : start"),
    # Triton
    triton("refresh_block_tables", "(encoded >= 0)", "(encoded > 0)"),
    triton("refresh_block_tables", "mask=inside, other=-1", "mask=inside, other=0"),
    triton("gen_prologue", "(n - 1) * TOKEN_STRIDE", "n * TOKEN_STRIDE"),
    triton("gen_prologue", "(slots > DUMMY)", "(slots >= DUMMY + 9)", file="safety"),
    triton("noise_block", "row % BLOCK_SIZE == 0", "row == 0"),
    triton("noise_block", "row // BLOCK_SIZE", "row % BLOCK_SIZE"),
    triton("store_gen_context", "count * PAGE_SIZE - 1", "count * PAGE_SIZE"),
    triton("store_gen_context", "token % K1 < n", "token % K1 <= n"),
    triton("store_gen_context", "(lost == 0)", "(lost >= 0)"),
    triton("store_gen_context", "layer.to(tl.int64) * LATENT_LAYER_STRIDE", "layer.to(tl.int64)"),
    triton("store_gen_context", "bits & SIGN", "bits & 0", file="latent_pool"),
    triton("advance_ctx_len", "slot == DUMMY, 0, advanced", "slot < 0, 0, advanced"),
    triton("advance_ctx_len", "PAGE_SIZE - BLOCK_SIZE", "PAGE_SIZE"),
    triton("scatter_context", "(place >= 0) & (lost == 0)", "(lost == 0)"),
    triton("scatter_context", "token.to(tl.int64) * TOKEN_STRIDE", "(token // 2).to(tl.int64) * TOKEN_STRIDE"),
    triton("block_placement", "(column < owned)", "(column <= owned)"),
    triton("block_placement", "key > query", "key >= query"),
    triton("write_block_latents", "FIRST_LAYER + layer", "layer"),
    triton("write_block_latents", "tokens[:, None] < later_tokens[None, :]", "tokens[:, None] > later_tokens[None, :]",
           file="latent_pool"),
    triton("prepare_step", "verified & (count > 0)", "verified"),
    triton("prepare_step", "block_column < count", "block_column <= count"),
    triton("prepare_step", "b = row - NUM_CONTEXTS", "b = NUM_CONTEXTS + NUM_GEN - 1 - row"),
    triton("store_prepared", "token % K1 < n", "token // K1 < n"),
    triton("accept_strict", "draft == token), K, tl.minimum(j, K)", "draft == token), K, tl.minimum(j + 1, K)"),
    triton("accept_strict", "values != values, 0x7FFFFFFF, order", "values != values, 0, order", file="argmax",
           after="def value_order"),
    triton("markov_chain", "SLOT * SLOT_STRIDE", "0 * SLOT_STRIDE"),
    triton("next_tokens", "(b >= 0) & (j >= 1)", "(j >= 1)"),
    triton("linear", "(split * TILES + tile) * BLOCK_K", "tile * BLOCK_K"),
    triton("linear", "tl.static_range(1, SPLITS)", "tl.static_range(2, SPLITS)"),
    triton("linear", "columns.to(tl.int64)[None, :] * COLUMN_STRIDE", "columns.to(tl.int64)[None, :]"),
    triton("linear", "addend + rounded", "addend - rounded"),
    triton("linear", "tl.program_id(0) * BLOCK_M", "tl.program_id(1) * BLOCK_M"),
    triton("head_product", "+ head.to(tl.int64) * N * K", "", file="linear"),
    triton("head_product", "(rows.to(tl.int64) * HEADS + head)[:, None] * K", "rows.to(tl.int64)[:, None] * K", file="linear"),
    triton("head_product", "(K, 1) if transposed else (1, N)", "(1, N) if transposed else (K, 1)", after="def head_product("),
    triton("rms_norm", "row % WEIGHTS * WIDTH", "0 * WIDTH"),
    triton("rms_norm", "tl.sum(values * values) * ONE_OVER_WIDTH", "tl.sum(values * values)"),
    triton("rope", "re * c - im * s", "re * c + im * s"),
    triton("rope", "cos + token * PAIRS + pair % PAIRS", "cos + token * PAIRS + pair // PAIRS"),
    triton("swiglu", "tl.exp(-g)", "tl.exp(g)"),
    triton("block_attention", "mask=position < length", "mask=position <= length"),
    triton("block_attention", "if split == 0:", "if split >= 0:"),
    triton("block_attention", "tl.load(layer).to(tl.int64) * LAYER_STRIDE", "tl.load(layer).to(tl.int64) * 0"),
    triton("block_attention", "sums * kept[:, None]", "sums"),
    triton("block_attention", "split * share + share, tiles)", "split * share + share - 1, tiles)"),
    triton("block_attention", "total += weight * share", "total += share"),
    triton("block_attention", "j < BLOCK_SIZE, best", "j <= BLOCK_SIZE, best"),
)  # fmt: skip


def run_test(folder: Path, node: str) -> bool:
    """Whether a test passes; one that does not end in time, or crashes on a wild address, fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "long or not long", node]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # on a GPU several run at once
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return False
    if result.returncode < 0:
        return False
    if result.returncode not in (0, 1) or ("passed" not in result.stdout and "failed" not in result.stdout):
        raise RuntimeError(f"{node} did not run:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == 0


def try_mutant(mutant: Mutant) -> tuple[Mutant, str]:
    """The mutant and what became of it: killed by the short test, by the long one, or survived."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / part)
        file = folder / mutant.file
        text = file.read_text()
        start = text.index(mutant.old, text.index(mutant.after))
        file.write_text(text[:start] + mutant.new + text[start + len(mutant.old) :])
        for node in mutant.tests:
            if not run_test(folder, node):
                return mutant, "killed by the long test" if "in_every_family" in node else "killed"
        return mutant, "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose op or file contains this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="those of what only a GPU has, on a GPU")
    args = parser.parse_args()
    chosen = [mutant for mutant in (ON_A_GPU if args.gpu else MUTANTS) if args.only in mutant.op or args.only in mutant.file]
    for mutant in chosen:
        if not mutant.applies():
            parser.error(f"{mutant.file} has no {mutant.old!r} behind {mutant.after!r}: the list is out of date")
    started, survivors = time.monotonic(), []
    for mutant in {(mutant.op, mutant.backend): mutant for mutant in chosen}.values():
        if not run_test(ROOT, mutant.tests[0]):
            parser.error(f"the test of {mutant.op} on {mutant.backend} fails without any mutant")
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for mutant, fate in pool.map(try_mutant, chosen):
            print(f"{fate:24}{mutant.file}: {mutant.old}  ->  {mutant.new}", flush=True)
            if fate == "survived":
                survivors.append(mutant)
    print(f"{len(chosen) - len(survivors)}/{len(chosen)} mutants killed in {time.monotonic() - started:.0f} s")
    for mutant in survivors:
        print(f"SURVIVED {mutant.op} ({mutant.backend}): {mutant.old}  ->  {mutant.new}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
