"""KV caches for MLX language models: single and batched, quantized or not, with exact byte accounting.

Public modules: `plain`, `quantized`, `rotating`, `chunked`, `recurrent`, `composite`, `turbo_cache` (one row),
`prompt_cache` (caches for a model), `rows` (`RowBatch`, many rows in slots), `attention` (`attend`), `scheme`
(`KVScheme`), `spec` and `specs` (geometry and bytes), `budget`, `prefix_cache` (`PrefixCache`), `clones` and `trims`,
`cache_file` and `prefix_folder` (caches in files), `rollback` and `row_rollback` (rounds of speculation), `errors`.
Importing this root imports no mlx.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_kvcache.attention import AttendingCache as AttendingCache
    from headrace_kvcache.attention import attend as attend
    from headrace_kvcache.batch_cache import BatchCache as BatchCache
    from headrace_kvcache.budget import KVBudget as KVBudget
    from headrace_kvcache.budget import Reservation as Reservation
    from headrace_kvcache.budget import batch_row_kv_bytes as batch_row_kv_bytes
    from headrace_kvcache.cache_file import SavedCaches as SavedCaches
    from headrace_kvcache.cache_file import load_caches as load_caches
    from headrace_kvcache.cache_file import save_caches as save_caches
    from headrace_kvcache.capacity import CapacityClasses as CapacityClasses
    from headrace_kvcache.chunked import ChunkedKVCache as ChunkedKVCache
    from headrace_kvcache.chunked_rows import ChunkedRowBatch as ChunkedRowBatch
    from headrace_kvcache.clones import clone_caches as clone_caches
    from headrace_kvcache.composite import CacheList as CacheList
    from headrace_kvcache.errors import BudgetExceeded as BudgetExceeded
    from headrace_kvcache.errors import CacheFileError as CacheFileError
    from headrace_kvcache.errors import EmptyCache as EmptyCache
    from headrace_kvcache.errors import IncompleteRoundError as IncompleteRoundError
    from headrace_kvcache.errors import IntegrityError as IntegrityError
    from headrace_kvcache.errors import InvalidCountError as InvalidCountError
    from headrace_kvcache.errors import InvalidGeometry as InvalidGeometry
    from headrace_kvcache.errors import InvalidLength as InvalidLength
    from headrace_kvcache.errors import InvalidPrefix as InvalidPrefix
    from headrace_kvcache.errors import InvalidScheme as InvalidScheme
    from headrace_kvcache.errors import InvalidSlots as InvalidSlots
    from headrace_kvcache.errors import KVCacheError as KVCacheError
    from headrace_kvcache.errors import NotTrimmable as NotTrimmable
    from headrace_kvcache.errors import RoundRefusedError as RoundRefusedError
    from headrace_kvcache.errors import SlotsExhausted as SlotsExhausted
    from headrace_kvcache.errors import StateInvalidError as StateInvalidError
    from headrace_kvcache.errors import UnsupportedCache as UnsupportedCache
    from headrace_kvcache.mlx_lm_batch import BatchCacheList as BatchCacheList
    from headrace_kvcache.mlx_lm_batch import BatchRecurrentCache as BatchRecurrentCache
    from headrace_kvcache.mlx_lm_batch import merge_caches as merge_caches
    from headrace_kvcache.model_rows import ModelRowBatch as ModelRowBatch
    from headrace_kvcache.model_rows import make_row_batch as make_row_batch
    from headrace_kvcache.plain import KVCache as KVCache
    from headrace_kvcache.prefix_cache import PrefixCache as PrefixCache
    from headrace_kvcache.prefix_cold import ColdHit as ColdHit
    from headrace_kvcache.prefix_cold import ColdStore as ColdStore
    from headrace_kvcache.prefix_folder import FolderReport as FolderReport
    from headrace_kvcache.prefix_folder import PrefixFolder as PrefixFolder
    from headrace_kvcache.prefix_hit import PrefixHit as PrefixHit
    from headrace_kvcache.prefix_hit import PrefixView as PrefixView
    from headrace_kvcache.prefix_namespace import PrefixNamespace as PrefixNamespace
    from headrace_kvcache.prefix_stats import PrefixCacheStats as PrefixCacheStats
    from headrace_kvcache.prompt_cache import make_prompt_cache as make_prompt_cache
    from headrace_kvcache.prompt_cache import make_slot_prototypes as make_slot_prototypes
    from headrace_kvcache.quantized import QuantizedKVCache as QuantizedKVCache
    from headrace_kvcache.quantized_rows import QuantizedRowBatch as QuantizedRowBatch
    from headrace_kvcache.quantized_rows import RotatingQuantizedRowBatch as RotatingQuantizedRowBatch
    from headrace_kvcache.recurrent import RecurrentCache as RecurrentCache
    from headrace_kvcache.recurrent_rows import RecurrentRowBatch as RecurrentRowBatch
    from headrace_kvcache.replay import Kept as Kept
    from headrace_kvcache.ring_rows import RotatingRowBatch as RotatingRowBatch
    from headrace_kvcache.rollback import bind_cache_rollback as bind_cache_rollback
    from headrace_kvcache.rotating import RotatingKVCache as RotatingKVCache
    from headrace_kvcache.rotating import RotatingQuantizedKVCache as RotatingQuantizedKVCache
    from headrace_kvcache.row_rollback import bind_row_cache_rollback as bind_row_cache_rollback
    from headrace_kvcache.rows import RowBatch as RowBatch
    from headrace_kvcache.scheme import KVScheme as KVScheme
    from headrace_kvcache.scheme import first_chunk_length as first_chunk_length
    from headrace_kvcache.spec import CacheSpec as CacheSpec
    from headrace_kvcache.spec import LayerSpec as LayerSpec
    from headrace_kvcache.spec import kv_bytes_at as kv_bytes_at
    from headrace_kvcache.spec import slot_kv_bytes_at as slot_kv_bytes_at
    from headrace_kvcache.specs import cache_spec_of as cache_spec_of
    from headrace_kvcache.speculative_transaction import SpeculativeTransaction as SpeculativeTransaction
    from headrace_kvcache.trims import can_trim_to as can_trim_to
    from headrace_kvcache.trims import trim_to as trim_to
    from headrace_kvcache.turbo_cache import TurboQuantKVCache as TurboQuantKVCache
    from headrace_kvcache.views import SlotView as SlotView

__all__ = [
    "AttendingCache",
    "BatchCache",
    "BatchCacheList",
    "BatchRecurrentCache",
    "BudgetExceeded",
    "CacheFileError",
    "CacheList",
    "CacheSpec",
    "CapacityClasses",
    "ChunkedKVCache",
    "ChunkedRowBatch",
    "ColdHit",
    "ColdStore",
    "EmptyCache",
    "FolderReport",
    "IncompleteRoundError",
    "IntegrityError",
    "InvalidCountError",
    "InvalidGeometry",
    "InvalidLength",
    "InvalidPrefix",
    "InvalidScheme",
    "InvalidSlots",
    "KVBudget",
    "KVCache",
    "KVCacheError",
    "KVScheme",
    "Kept",
    "LayerSpec",
    "ModelRowBatch",
    "NotTrimmable",
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixFolder",
    "PrefixHit",
    "PrefixNamespace",
    "PrefixView",
    "QuantizedKVCache",
    "QuantizedRowBatch",
    "RecurrentCache",
    "RecurrentRowBatch",
    "Reservation",
    "RotatingKVCache",
    "RotatingQuantizedKVCache",
    "RotatingQuantizedRowBatch",
    "RotatingRowBatch",
    "RoundRefusedError",
    "RowBatch",
    "SavedCaches",
    "SlotView",
    "SlotsExhausted",
    "SpeculativeTransaction",
    "StateInvalidError",
    "TurboQuantKVCache",
    "UnsupportedCache",
    "attend",
    "batch_row_kv_bytes",
    "bind_cache_rollback",
    "bind_row_cache_rollback",
    "cache_spec_of",
    "can_trim_to",
    "clone_caches",
    "first_chunk_length",
    "kv_bytes_at",
    "load_caches",
    "make_prompt_cache",
    "make_row_batch",
    "make_slot_prototypes",
    "merge_caches",
    "save_caches",
    "slot_kv_bytes_at",
    "trim_to",
]

_MODULES = {
    "AttendingCache": "attention",
    "BatchCache": "batch_cache",
    "BatchCacheList": "mlx_lm_batch",
    "BatchRecurrentCache": "mlx_lm_batch",
    "BudgetExceeded": "errors",
    "CacheFileError": "errors",
    "CacheList": "composite",
    "CacheSpec": "spec",
    "CapacityClasses": "capacity",
    "ChunkedKVCache": "chunked",
    "ChunkedRowBatch": "chunked_rows",
    "ColdHit": "prefix_cold",
    "ColdStore": "prefix_cold",
    "EmptyCache": "errors",
    "FolderReport": "prefix_folder",
    "IncompleteRoundError": "errors",
    "IntegrityError": "errors",
    "InvalidCountError": "errors",
    "InvalidGeometry": "errors",
    "InvalidLength": "errors",
    "InvalidPrefix": "errors",
    "InvalidScheme": "errors",
    "InvalidSlots": "errors",
    "KVBudget": "budget",
    "KVCache": "plain",
    "KVCacheError": "errors",
    "KVScheme": "scheme",
    "Kept": "replay",
    "LayerSpec": "spec",
    "ModelRowBatch": "model_rows",
    "NotTrimmable": "errors",
    "PrefixCache": "prefix_cache",
    "PrefixCacheStats": "prefix_stats",
    "PrefixFolder": "prefix_folder",
    "PrefixHit": "prefix_hit",
    "PrefixNamespace": "prefix_namespace",
    "PrefixView": "prefix_hit",
    "QuantizedKVCache": "quantized",
    "QuantizedRowBatch": "quantized_rows",
    "RecurrentCache": "recurrent",
    "RecurrentRowBatch": "recurrent_rows",
    "Reservation": "budget",
    "RotatingKVCache": "rotating",
    "RotatingQuantizedKVCache": "rotating",
    "RotatingQuantizedRowBatch": "quantized_rows",
    "RotatingRowBatch": "ring_rows",
    "RoundRefusedError": "errors",
    "RowBatch": "rows",
    "SavedCaches": "cache_file",
    "SlotView": "views",
    "SlotsExhausted": "errors",
    "SpeculativeTransaction": "speculative_transaction",
    "StateInvalidError": "errors",
    "TurboQuantKVCache": "turbo_cache",
    "UnsupportedCache": "errors",
    "attend": "attention",
    "batch_row_kv_bytes": "budget",
    "bind_cache_rollback": "rollback",
    "bind_row_cache_rollback": "row_rollback",
    "cache_spec_of": "specs",
    "can_trim_to": "trims",
    "clone_caches": "clones",
    "first_chunk_length": "scheme",
    "kv_bytes_at": "spec",
    "load_caches": "cache_file",
    "make_prompt_cache": "prompt_cache",
    "make_row_batch": "model_rows",
    "make_slot_prototypes": "prompt_cache",
    "merge_caches": "mlx_lm_batch",
    "save_caches": "cache_file",
    "slot_kv_bytes_at": "spec",
    "trim_to": "trims",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
