"""The unfused torch chain: each op of `jdspark.ops` as a sequence of torch calls, pools and `ctx_len` updated in place.

Nothing here waits for the device or depends on its values in a shape, so a CUDA graph can capture the chain.
"""

from jdspark.ops import BlockPlacement, PreparedStep, Prologue

from .accept_strict import accept_strict
from .advance_ctx_len import advance_ctx_len
from .block_attention import block_attention
from .block_placement import block_placement
from .context_latents import context_latents
from .gen_prologue import gen_prologue
from .head_product import head_product
from .linear import linear
from .markov_chain import markov_chain
from .next_tokens import next_tokens
from .noise_block import noise_block
from .norm_rope import norm_rope
from .norm_rope_store import norm_rope_store
from .prepare_step import prepare_step
from .refresh_block_tables import refresh_block_tables
from .rms_norm import rms_norm
from .rope import rope
from .scatter_context import scatter_context
from .store_gen_context import store_gen_context
from .store_prepared import store_prepared
from .swiglu import swiglu
from .write_block_latents import write_block_latents

__all__ = [
    "BlockPlacement",
    "PreparedStep",
    "Prologue",
    "accept_strict",
    "advance_ctx_len",
    "block_attention",
    "block_placement",
    "context_latents",
    "gen_prologue",
    "head_product",
    "linear",
    "markov_chain",
    "next_tokens",
    "noise_block",
    "norm_rope",
    "norm_rope_store",
    "prepare_step",
    "refresh_block_tables",
    "rms_norm",
    "rope",
    "scatter_context",
    "store_gen_context",
    "store_prepared",
    "swiglu",
    "write_block_latents",
]
