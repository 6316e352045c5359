"""Names, signatures and refusals of the ops, the same in every place they live; and who may import whom."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jdspark import BackendUnavailable, ops
from jdspark.ops.backends import has_kernel
from torch_bridge import compare, eager, to_torch, triton_kernels
from torch_bridge.cases import BOUNDED_OPS, EXACT_OPS, draw_case

ROOT = Path(__file__).parent.parent
OPS = sorted({*EXACT_OPS, *BOUNDED_OPS})

INTERFACE = {
    "refresh_block_tables": "encoded_offsets, *, pool_idx, num_seqs, divisor, backend",
    "gen_prologue": "accepted_tokens, num_accepted, ctx_len, slots, *, block_size, max_ctx, mask_token_id, backend",
    "noise_block": "embedding, bonus, *, block_size, mask_token_id, mask_row, backend",
    "store_gen_context": (
        "pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, *, layout, first_row, backend"
    ),
    "advance_ctx_len": "ctx_len, slots, num_accepted, block_counts, *, page_size, block_size, max_ctx, first_row, backend",
    "scatter_context": "pool, latents, rows, positions, block_tables, *, layout, backend",
    "block_placement": "advertised, block_tables, *, block_size, page_size, first_row, block_counts, backend",
    "write_block_latents": "pool, block_latents, placement, *, layout, layer, backend",
    "prepare_step": (
        "encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots, *, pool_idx, divisor, page_size, block_size, max_ctx,"
        " mask_token_id, num_contexts, advance, embedding, mask_row, backend"
    ),
    "store_prepared": "pool, latents, num_accepted, store_pages, store_offsets, *, layout, backend",
    "accept_strict": "logits, draft_tokens, *, num_contexts, force, force_counter, backend",
    "markov_chain": "base_logits, anchor, w1, w2, *, backend",
    "next_tokens": "accepted_tokens, num_accepted, draft_tokens, *, backend",
}


def signature(function):
    parts, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        parts.append(parameter.name)
    return ", ".join(parts)


@pytest.mark.parametrize("op", OPS)
def test_one_op_has_one_name_and_one_signature_everywhere(op):
    jax_signature = signature(getattr(ops, op))
    if op in INTERFACE:
        assert jax_signature == INTERFACE[op]
    assert signature(getattr(eager, op)) == re.sub(r"(, \*)?, backend$", "", jax_signature)
    folders = ["jdspark/ops", "torch_bridge/eager"]
    if op != "block_attention":
        assert signature(getattr(triton_kernels, op)) == signature(getattr(eager, op))
        folders.append("torch_bridge/triton_kernels")
    if has_kernel(op, "pallas"):
        kernel = getattr(importlib.import_module(f"pallas_kernels.{op}"), op)
        assert signature(kernel) == signature(getattr(eager, op))
        folders.append("pallas_kernels")
    for folder in folders:
        assert (ROOT / folder / f"{op}.py").is_file(), "one op per file"


def zeros(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


POOL, LATENTS = zeros(2, 6, 4, 8, dtype=np.float32), zeros(4, 2, 8, dtype=np.float32)
CTX, TABLE = zeros(5), zeros(2, 3)
BAD_CALLS = [
    ("refresh_block_tables", (zeros(1, 2, 2, 3, dtype=np.int64),), {"pool_idx": 0, "num_seqs": 1, "divisor": 1},
     TypeError, "encoded_offsets has dtype int64, expected int32"),
    ("refresh_block_tables", (zeros(1, 2, 3, 3),), {"pool_idx": 0, "num_seqs": 1, "divisor": 1},
     ValueError, "encoded_offsets has shape [1, 2, 3, 3], expected [pools, seqs, 2=2, max_blocks]"),
    ("refresh_block_tables", (zeros(1, 2, 2, 3),), {"pool_idx": 1, "num_seqs": 1, "divisor": 1},
     ValueError, "pool_idx is 1, expected in [0, 0]"),
    ("refresh_block_tables", (zeros(1, 2, 2, 3),), {"pool_idx": 0, "num_seqs": 3, "divisor": 1}, ValueError, "num_seqs is 3"),
    ("refresh_block_tables", (zeros(1, 2, 2, 3),), {"pool_idx": 0, "num_seqs": 1, "divisor": 0}, ValueError, "divisor is 0"),
    ("gen_prologue", (zeros(2, 4), zeros(3), CTX, zeros(2)), {"block_size": 1, "max_ctx": 9, "mask_token_id": 0},
     ValueError, "num_accepted has shape [3], expected [B=2]"),
    ("gen_prologue", (zeros(2, 4), zeros(2), CTX, zeros(2)), {"block_size": 0, "max_ctx": 9, "mask_token_id": 0},
     ValueError, "block_size is 0, expected at least 1"),
    ("noise_block", (zeros(5, 4, dtype=np.float32), zeros(2)), {"block_size": 2, "mask_token_id": 5},
     ValueError, "mask_token_id is 5, expected in [0, 4]"),
    ("noise_block", (zeros(5, 4, dtype=np.float32), zeros(2)),
     {"block_size": 2, "mask_token_id": 5, "mask_row": zeros(3, dtype=np.float32)},
     ValueError, "mask_row has shape [3], expected [H=4]"),
    ("store_gen_context", (POOL, LATENTS[:3], CTX, zeros(2), zeros(2), TABLE, zeros(2)), {},
     ValueError, "latents has 3 rows, expected B*(K+1) with B=2"),
    ("store_gen_context", (POOL, LATENTS.astype(np.float16), CTX, zeros(2), zeros(2), TABLE, zeros(2)), {},
     TypeError, "latents has dtype float16 but the pool holds float32"),
    ("store_gen_context", (POOL, LATENTS, CTX, zeros(2), zeros(2), TABLE, zeros(2)), {"first_row": 1},
     ValueError, "block_tables has 2 rows, but first_row=1 and B=2 need 3"),
    ("store_gen_context", (POOL, LATENTS, CTX, zeros(2), zeros(2), TABLE, zeros(2)), {"layout": "flat"},
     ValueError, "layout is 'flat', expected one of layer_major, page_major"),
    ("store_gen_context", (POOL, LATENTS, CTX, zeros(2), zeros(2), TABLE, zeros(2)), {"layout": "page_major"},
     ValueError, "latents has shape [4, 2, 8], expected [B*(K+1), L=6, D=8]"),
    ("advance_ctx_len", (CTX, zeros(2), zeros(2), zeros(1)), {"page_size": 4, "block_size": 2, "max_ctx": 9},
     ValueError, "block_counts has 1 rows"),
    ("advance_ctx_len", (CTX.astype(np.float32), zeros(2), zeros(2), zeros(2)),
     {"page_size": 4, "block_size": 2, "max_ctx": 9}, TypeError, "ctx_len has dtype float32"),
    ("scatter_context", (POOL, LATENTS, zeros(4), zeros(3), TABLE), {}, ValueError, "positions has shape [3], expected [N=4]"),
    ("block_placement", (zeros(2), TABLE), {"block_size": 2, "page_size": 0}, ValueError, "page_size is 0"),
    ("block_placement", (zeros(2), TABLE), {"block_size": 2, "page_size": 4, "block_counts": zeros(3)},
     ValueError, "block_counts has shape [3], expected [rows=2]"),
    ("accept_strict", (zeros(5, 9, dtype=np.float32), zeros(2, 2)), {},
     ValueError, "logits has shape [5, 9], expected [num_contexts + B*(K+1)=6, V]"),
    ("accept_strict", (zeros(6, 9, dtype=np.float32), zeros(2, 2)), {"force": -1.0}, ValueError, "force is -1.0"),
    ("accept_strict", (zeros(6, 9, dtype=np.float32), zeros(2, 2)), {"force": float("nan")}, ValueError, "force is nan"),
    ("accept_strict", (zeros(6, 9), zeros(2, 2)), {}, TypeError, "logits has dtype int32, expected float32"),
    ("markov_chain", (zeros(2, 3, 9, dtype=np.float32), zeros(2), zeros(8, 2, dtype=np.float32),
     zeros(9, 2, dtype=np.float32)), {}, ValueError, "the rows V1 of w1 is 8, expected at least 9"),
    ("next_tokens", (zeros(2, 3), zeros(2), zeros(3, 2)), {}, ValueError, "rows - B is -1"),
]  # fmt: skip


@pytest.mark.parametrize("module", [ops, eager], ids=["jax", "torch"])
@pytest.mark.parametrize(("op", "operands", "static", "error", "message"), BAD_CALLS)
def test_refusals_name_the_operand(module, op, operands, static, error, message):
    if module is eager:
        if "int64" in message:
            static = static | {}
        operands = [torch.from_numpy(x) for x in operands]
        static = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in static.items()}
    with pytest.raises(error, match=re.escape(message)) as raised:
        getattr(module, op)(*operands, **static)
    assert str(raised.value).startswith(f"{op}: ")


def test_write_block_latents_refusals():
    placement = ops.block_placement(jnp.zeros(2, jnp.int32), TABLE, block_size=3, page_size=4)
    block = zeros(2, 2, 3, 8, dtype=np.float32)
    with pytest.raises(ValueError, match=r"block_latents has shape \[1, 2, 3, 8\], expected \[L=2, B=2, block_size=3, D=8\]"):
        ops.write_block_latents(POOL, block[:1], placement)
    with pytest.raises(ValueError, match=r"layer is 2, expected in \[0, 1\]"):
        ops.write_block_latents(POOL, block[0], placement, layer=2)


def test_unavailable_backends_say_why():
    tokens = (jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros((1, 0), jnp.int32))
    with pytest.raises(ValueError, match="backend is 'cuda', expected one of xla, pallas, triton"):
        ops.next_tokens(*tokens, backend="cuda")
    if jnp.zeros(1).device.platform == "cpu":
        with pytest.raises(BackendUnavailable, match=r"next_tokens: backend='triton' is not available: .*JAX runs on cpu here"):
            ops.next_tokens(*tokens, backend="triton")


def imported_by(package):
    names = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return names


def test_direction_of_dependence():
    assert not imported_by("jdspark") & {"torch", "triton", "jax_triton", "torch_bridge", "pallas_kernels"}
    assert not imported_by("pallas_kernels") & {"torch", "triton", "torch_bridge"}
    assert not imported_by("torch_bridge") & {"pallas_kernels"}


def test_import_needs_only_jax_numpy_and_safetensors():
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'rich', 'matplotlib', 'jax_triton', 'hypothesis', 'optax'): sys.modules[name] = None\n"
        "import jdspark; from jdspark import cli; print(jdspark.__version__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_import_looks_at_no_device():
    """Or what the command sets for JAX's allocator came too late: on a GPU it would keep three quarters of the memory."""
    code = "from jdspark import cli, StepOptions; from jdspark.bench import command, whole_step; StepOptions(backend='triton')"
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr


class CountHostReads(TorchDispatchMode):
    """Counts what would wait for a GPU, and so break the capture of a CUDA graph."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", sorted(EXACT_OPS))
def test_the_torch_chain_never_reads_from_the_device(op):
    for index in range(4):
        case = draw_case(op, index, 0)
        operands = jax.tree.map(lambda x: to_torch(jnp.asarray(x), copy=True), case.operands)
        with CountHostReads() as counted:
            getattr(eager, op)(**operands, **case.static)
        assert counted.reads == 0, case.label


def test_a_long_prefill_resolves_duplicates_through_a_table():
    """More tokens than are compared pairwise, half of them onto places taken later."""
    num_tokens, page_size = 3000, 4
    pool = np.zeros((1, 400, page_size, 2), np.float32)
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 400 * page_size, num_tokens).astype(np.int32)
    latents = np.arange(num_tokens * 2, dtype=np.float32).reshape(num_tokens, 1, 2)
    table = np.arange(400, dtype=np.int32)[None]
    operands = (pool, latents, np.zeros(num_tokens, np.int32), positions, table)
    wanted = pool.copy()
    for latent, position in zip(latents, positions):
        wanted[0, position // page_size, position % page_size] = latent[0]
    assert compare(ops.scatter_context(*operands), wanted)
    assert compare(eager.scatter_context(*(torch.from_numpy(x.copy()) for x in operands)), wanted)
