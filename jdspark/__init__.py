"""jdspark: the DSpark / DFlash drafter decode step in JAX, jitted as one function."""

from .checkpoint import CheckpointError, inspect_checkpoint, load_drafter, save_drafter
from .config import ConfigError, DrafterConfig, Geometry, StepOptions, YarnConfig
from .engine import Engine, Event, RequestRefused, RequestResult
from .ops import BackendUnavailable, RowSampling
from .pages import PageAllocator, PageError
from .params import DrafterParams, LayerParams
from .prefill import store_prefill_context
from .requests import RequestSlots
from .sampling import SamplingParams, row_sampling
from .state import DecodeState, init_state
from .step import DecodeStep, StepInputs, StepOutputs, make_decode_step
from .target import Target

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "DecodeState",
    "DecodeStep",
    "DrafterConfig",
    "DrafterParams",
    "Engine",
    "Event",
    "Geometry",
    "LayerParams",
    "PageAllocator",
    "PageError",
    "RequestRefused",
    "RequestResult",
    "RequestSlots",
    "RowSampling",
    "SamplingParams",
    "StepInputs",
    "StepOptions",
    "StepOutputs",
    "Target",
    "YarnConfig",
    "inspect_checkpoint",
    "init_state",
    "load_drafter",
    "make_decode_step",
    "row_sampling",
    "save_drafter",
    "store_prefill_context",
]
