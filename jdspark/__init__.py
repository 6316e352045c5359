"""jdspark: the DSpark / DFlash drafter decode step in JAX, jitted as one function."""

from .checkpoint import CheckpointError, inspect_checkpoint, load_drafter, save_drafter
from .config import ConfigError, DrafterConfig, Geometry, StepOptions, YarnConfig
from .ops import BackendUnavailable
from .params import DrafterParams, LayerParams
from .prefill import store_prefill_context
from .requests import RequestSlots
from .state import DecodeState, init_state
from .step import DecodeStep, StepInputs, StepOutputs, make_decode_step

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "DecodeState",
    "DecodeStep",
    "DrafterConfig",
    "DrafterParams",
    "Geometry",
    "LayerParams",
    "RequestSlots",
    "StepInputs",
    "StepOptions",
    "StepOutputs",
    "YarnConfig",
    "inspect_checkpoint",
    "init_state",
    "load_drafter",
    "make_decode_step",
    "save_drafter",
    "store_prefill_context",
]
