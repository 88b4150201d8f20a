"""Continuous batching for MLX language models: engine port, gateway and batch scheduler.

Public modules: `library` (`Engine`, for programs without an event loop), `gateway` and `stream` (the asyncio side),
`thread_port` and `process_port` (the two transports of an engine), `spawning` (a child's process ahead of its
engine), `config` (what an engine is built from), `engine` (its loop), `scheduler` (which rows run), `steps` (what
goes between scheduler and runner), `runner` (steps on the device), `text` (text and stop strings), `messages`,
`events`, `requests`, `ports`, `operations`, `restarts`, `trace`, `errors`, `testing` (fakes).
Importing this root imports no mlx.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_scheduling.config import EngineConfig as EngineConfig
    from headrace_scheduling.config import OperationHandler as OperationHandler
    from headrace_scheduling.engine import EngineLoop as EngineLoop
    from headrace_scheduling.errors import ContextOverBudget as ContextOverBudget
    from headrace_scheduling.errors import DeadlineExceeded as DeadlineExceeded
    from headrace_scheduling.errors import EngineFailed as EngineFailed
    from headrace_scheduling.errors import EngineGone as EngineGone
    from headrace_scheduling.errors import EngineUnavailable as EngineUnavailable
    from headrace_scheduling.errors import GatewayClosed as GatewayClosed
    from headrace_scheduling.errors import GenerationCancelled as GenerationCancelled
    from headrace_scheduling.errors import QueueFull as QueueFull
    from headrace_scheduling.errors import RequestRefused as RequestRefused
    from headrace_scheduling.errors import SchedulingError as SchedulingError
    from headrace_scheduling.events import Cancelled as Cancelled
    from headrace_scheduling.events import Failed as Failed
    from headrace_scheduling.events import Finished as Finished
    from headrace_scheduling.events import FinishReason as FinishReason
    from headrace_scheduling.events import GenerateStats as GenerateStats
    from headrace_scheduling.events import RowEnd as RowEnd
    from headrace_scheduling.events import TextDelta as TextDelta
    from headrace_scheduling.gateway import GatewayStats as GatewayStats
    from headrace_scheduling.gateway import GenerationGateway as GenerationGateway
    from headrace_scheduling.library import Engine as Engine
    from headrace_scheduling.library import GenerationResult as GenerationResult
    from headrace_scheduling.messages import Cancel as Cancel
    from headrace_scheduling.messages import Drain as Drain
    from headrace_scheduling.messages import EngineInfo as EngineInfo
    from headrace_scheduling.messages import EngineMessage as EngineMessage
    from headrace_scheduling.messages import EngineStatus as EngineStatus
    from headrace_scheduling.messages import Exclusive as Exclusive
    from headrace_scheduling.messages import OperationResult as OperationResult
    from headrace_scheduling.messages import Prefetch as Prefetch
    from headrace_scheduling.messages import Prepare as Prepare
    from headrace_scheduling.messages import RowEvents as RowEvents
    from headrace_scheduling.messages import StepEvents as StepEvents
    from headrace_scheduling.messages import Stop as Stop
    from headrace_scheduling.messages import Submit as Submit
    from headrace_scheduling.operations import EncodeTexts as EncodeTexts
    from headrace_scheduling.ports import EnginePort as EnginePort
    from headrace_scheduling.ports import GrammarCompiler as GrammarCompiler
    from headrace_scheduling.ports import LoadedModel as LoadedModel
    from headrace_scheduling.ports import ModelFacts as ModelFacts
    from headrace_scheduling.ports import ModelLoader as ModelLoader
    from headrace_scheduling.ports import PrefixHit as PrefixHit
    from headrace_scheduling.ports import PrefixStore as PrefixStore
    from headrace_scheduling.ports import RowContext as RowContext
    from headrace_scheduling.ports import RuntimeModel as RuntimeModel
    from headrace_scheduling.ports import StepRunner as StepRunner
    from headrace_scheduling.ports import TextCodec as TextCodec
    from headrace_scheduling.ports import TokenDecoder as TokenDecoder
    from headrace_scheduling.process_port import ProcessEnginePort as ProcessEnginePort
    from headrace_scheduling.requests import ExecutionPlan as ExecutionPlan
    from headrace_scheduling.requests import GenerateOptions as GenerateOptions
    from headrace_scheduling.requests import GenerationPlacement as GenerationPlacement
    from headrace_scheduling.requests import GenerationRequest as GenerationRequest
    from headrace_scheduling.requests import Priority as Priority
    from headrace_scheduling.requests import RequestShape as RequestShape
    from headrace_scheduling.restarts import RestartPolicy as RestartPolicy
    from headrace_scheduling.runner import MlxStepRunner as MlxStepRunner
    from headrace_scheduling.scheduler import BatchScheduler as BatchScheduler
    from headrace_scheduling.steps import CacheTraits as CacheTraits
    from headrace_scheduling.steps import PrefillSlice as PrefillSlice
    from headrace_scheduling.steps import RowId as RowId
    from headrace_scheduling.steps import RowOpening as RowOpening
    from headrace_scheduling.steps import RowSpec as RowSpec
    from headrace_scheduling.steps import RowTokens as RowTokens
    from headrace_scheduling.steps import SharedPrefix as SharedPrefix
    from headrace_scheduling.steps import Snapshot as Snapshot
    from headrace_scheduling.steps import Step as Step
    from headrace_scheduling.steps import StepResult as StepResult
    from headrace_scheduling.stream import GenerationStream as GenerationStream
    from headrace_scheduling.text import TextStream as TextStream
    from headrace_scheduling.thread_port import ThreadEnginePort as ThreadEnginePort
    from headrace_scheduling.trace import PromptResponseTrace as PromptResponseTrace

__all__ = [
    "BatchScheduler",
    "CacheTraits",
    "Cancel",
    "Cancelled",
    "ContextOverBudget",
    "DeadlineExceeded",
    "Drain",
    "EncodeTexts",
    "Engine",
    "EngineConfig",
    "EngineFailed",
    "EngineGone",
    "EngineInfo",
    "EngineLoop",
    "EngineMessage",
    "EnginePort",
    "EngineStatus",
    "EngineUnavailable",
    "Exclusive",
    "ExecutionPlan",
    "Failed",
    "FinishReason",
    "Finished",
    "GatewayClosed",
    "GatewayStats",
    "GenerateOptions",
    "GenerateStats",
    "GenerationCancelled",
    "GenerationGateway",
    "GenerationPlacement",
    "GenerationRequest",
    "GenerationResult",
    "GenerationStream",
    "GrammarCompiler",
    "LoadedModel",
    "MlxStepRunner",
    "ModelFacts",
    "ModelLoader",
    "OperationHandler",
    "OperationResult",
    "Prefetch",
    "PrefillSlice",
    "PrefixHit",
    "PrefixStore",
    "Prepare",
    "Priority",
    "ProcessEnginePort",
    "PromptResponseTrace",
    "QueueFull",
    "RequestRefused",
    "RequestShape",
    "RestartPolicy",
    "RowContext",
    "RowEnd",
    "RowEvents",
    "RowId",
    "RowOpening",
    "RowSpec",
    "RowTokens",
    "RuntimeModel",
    "SchedulingError",
    "SharedPrefix",
    "Snapshot",
    "Step",
    "StepEvents",
    "StepResult",
    "StepRunner",
    "Stop",
    "Submit",
    "TextCodec",
    "TextDelta",
    "TextStream",
    "ThreadEnginePort",
    "TokenDecoder",
]

_MODULES = {
    "BatchScheduler": "scheduler",
    "CacheTraits": "steps",
    "Cancel": "messages",
    "Cancelled": "events",
    "ContextOverBudget": "errors",
    "DeadlineExceeded": "errors",
    "Drain": "messages",
    "EncodeTexts": "operations",
    "Engine": "library",
    "EngineConfig": "config",
    "EngineFailed": "errors",
    "EngineGone": "errors",
    "EngineInfo": "messages",
    "EngineLoop": "engine",
    "EngineMessage": "messages",
    "EnginePort": "ports",
    "EngineStatus": "messages",
    "EngineUnavailable": "errors",
    "Exclusive": "messages",
    "ExecutionPlan": "requests",
    "Failed": "events",
    "FinishReason": "events",
    "Finished": "events",
    "GatewayClosed": "errors",
    "GatewayStats": "gateway",
    "GenerateOptions": "requests",
    "GenerateStats": "events",
    "GenerationCancelled": "errors",
    "GenerationGateway": "gateway",
    "GenerationPlacement": "requests",
    "GenerationRequest": "requests",
    "GenerationResult": "library",
    "GenerationStream": "stream",
    "GrammarCompiler": "ports",
    "LoadedModel": "ports",
    "MlxStepRunner": "runner",
    "ModelFacts": "ports",
    "ModelLoader": "ports",
    "OperationHandler": "config",
    "OperationResult": "messages",
    "Prefetch": "messages",
    "PrefillSlice": "steps",
    "PrefixHit": "ports",
    "PrefixStore": "ports",
    "Prepare": "messages",
    "Priority": "requests",
    "ProcessEnginePort": "process_port",
    "PromptResponseTrace": "trace",
    "QueueFull": "errors",
    "RequestRefused": "errors",
    "RequestShape": "requests",
    "RestartPolicy": "restarts",
    "RowContext": "ports",
    "RowEnd": "events",
    "RowEvents": "messages",
    "RowId": "steps",
    "RowOpening": "steps",
    "RowSpec": "steps",
    "RowTokens": "steps",
    "RuntimeModel": "ports",
    "SchedulingError": "errors",
    "SharedPrefix": "steps",
    "Snapshot": "steps",
    "Step": "steps",
    "StepEvents": "messages",
    "StepResult": "steps",
    "StepRunner": "ports",
    "Stop": "messages",
    "Submit": "messages",
    "TextCodec": "ports",
    "TextDelta": "events",
    "TextStream": "text",
    "ThreadEnginePort": "thread_port",
    "TokenDecoder": "ports",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
