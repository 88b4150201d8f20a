"""What a caller asks of the engine, and the immutable decision on how it runs."""

from typing import Literal

from attrs import field, frozen, validators

from headrace_sampling import SamplingParams

Mechanism = Literal["continuous", "serial"]


def _positive_or_none(_instance: object, attribute: object, value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        name = getattr(attribute, "name", "value")
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1, or None for no limit")


def _without_logprobs(_instance: object, _attribute: object, value: SamplingParams) -> None:
    if value.logprobs is not None:
        raise ValueError(
            f"sampling.logprobs is {value.logprobs!r}; this engine delivers no log-probabilities yet: leave it None"
        )


@frozen(kw_only=True)
class GenerateOptions:
    """How to generate.

    Attributes:
        max_tokens: most tokens to generate; None runs until EOS, a stop string or the end of the context.
            A value above the context's remainder is lowered to that remainder.
        stop: stop strings, matched on decoded text across token borders; never delivered.
        ignore_eos: generate on past EOS tokens.
        sampling: the sampling parameters, seed included; a None seed is chosen by the engine.
    """

    max_tokens: int | None = field(default=None, validator=_positive_or_none)
    stop: tuple[str, ...] = field(
        default=(),
        validator=validators.deep_iterable(validators.instance_of(str), validators.instance_of(tuple)),
    )
    ignore_eos: bool = False
    sampling: SamplingParams = field(factory=SamplingParams, validator=_without_logprobs)


@frozen(kw_only=True)
class GenerationRequest:
    """One generation: prompt ids and options. Picklable."""

    prompt_ids: tuple[int, ...]
    options: GenerateOptions = field(factory=GenerateOptions)


@frozen(kw_only=True)
class RequestShape:
    """The facts of a request that placement looks at (rulings G-02a)."""

    num_prompt_tokens: int
    max_tokens: int | None = None
    user_seed: bool = False


@frozen(kw_only=True)
class ExecutionPlan:
    """What will run for a request.

    Attributes:
        method: always autoregressive so far.
        reasons: codes that say why the plan is not the widest one; empty for the widest.
    """

    method: Literal["autoregressive"] = "autoregressive"
    reasons: tuple[str, ...] = ()


@frozen(kw_only=True)
class GenerationPlacement:
    """The one immutable answer to "how does this request run", never dependent on load (design D2).

    Attributes:
        max_tokens: tokens that the row may generate after clamping to the context.
    """

    shape: RequestShape
    mechanism: Mechanism
    plan: ExecutionPlan
    max_tokens: int
