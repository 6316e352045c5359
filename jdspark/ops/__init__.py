"""The bookkeeping and drafter ops, one per file: the plain JAX definition of each is its specification.

Every op takes `backend=`: `"xla"` runs the definition itself, `"pallas"` and `"triton"` a kernel of the same name. The
sampling ops (`filtered_probabilities`, `sampled_chain`, `accept_sampled`) have only their definition.
"""

from .accept_sampled import accept_sampled
from .accept_strict import accept_strict
from .advance_ctx_len import advance_ctx_len
from .backends import BackendUnavailable, FloatBackends
from .block_attention import block_attention
from .block_placement import BlockPlacement, block_placement
from .context_latents import context_latents
from .filtered_probabilities import filtered_probabilities
from .gen_prologue import Prologue, gen_prologue
from .head_product import head_product
from .linear import linear
from .markov_chain import markov_chain
from .next_tokens import next_tokens
from .noise_block import noise_block
from .norm_rope import norm_rope
from .norm_rope_store import norm_rope_store
from .prepare_step import PreparedStep, prepare_step
from .randomness import RowSampling
from .refresh_block_tables import refresh_block_tables
from .rms_norm import rms_norm
from .rope import rope
from .sampled_chain import sampled_chain
from .scatter_context import scatter_context
from .store_gen_context import store_gen_context
from .store_prepared import store_prepared
from .swiglu import swiglu
from .write_block_latents import write_block_latents

__all__ = [
    "BackendUnavailable",
    "BlockPlacement",
    "FloatBackends",
    "PreparedStep",
    "Prologue",
    "RowSampling",
    "accept_sampled",
    "accept_strict",
    "advance_ctx_len",
    "block_attention",
    "block_placement",
    "context_latents",
    "filtered_probabilities",
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
    "sampled_chain",
    "scatter_context",
    "store_gen_context",
    "store_prepared",
    "swiglu",
    "write_block_latents",
]
