"""What a caller asks of the engine, and the immutable decision on how it runs."""

from __future__ import annotations

from math import isfinite
from typing import Literal

from attrs import field, frozen, validators

from headrace_sampling import SamplingParams

Mechanism = Literal["continuous", "serial"]
Priority = Literal["interactive", "batch"]
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


def _positive_or_none(_instance: object, attribute: object, value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        name = getattr(attribute, "name", "value")
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1, or None for no limit")


def _num_choices(_instance: object, _attribute: object, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_CHOICES:
        raise ValueError(f"num_choices is {value!r}; it must be an integer from 1 to {MAX_CHOICES}")


def _num_top(_instance: object, _attribute: object, value: object) -> None:
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS):
        raise ValueError(
            f"prompt_logprobs is {value!r}; it must be an integer from 0 to {MAX_TOP_LOGPROBS}, or None for none"
        )


def _timeout(_instance: object, _attribute: object, value: object) -> None:
    if value is not None and (type(value) not in (int, float) or not isfinite(value) or value <= 0):  # type: ignore[arg-type]
        raise ValueError(f"timeout_s is {value!r}; it must be a number of seconds above 0, or None for no limit")


def _boundary(instance: GenerationRequest, _attribute: object, value: object) -> None:
    if value is not None and (type(value) is not int or not 0 <= value <= len(instance.prompt_ids)):
        raise ValueError(
            f"stable_boundary is {value!r}; it must be an integer from 0 to the length of the prompt, "
            f"{len(instance.prompt_ids)}, or None"
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
        num_choices: replies to generate for the one prompt, which is computed once. Choice 0 draws from the seed
            itself, choice i from a seed mixed with i.
        prompt_logprobs: score the prompt's tokens after the first, with so many best candidates each, 0 to 20. Such
            a request computes its whole prompt: stored prefixes are neither used nor added to. None scores nothing.
    """

    max_tokens: int | None = field(default=None, validator=_positive_or_none)
    stop: tuple[str, ...] = field(
        default=(),
        validator=validators.deep_iterable(validators.instance_of(str), validators.instance_of(tuple)),
    )
    ignore_eos: bool = False
    sampling: SamplingParams = field(factory=SamplingParams)
    num_choices: int = field(default=1, validator=_num_choices)
    prompt_logprobs: int | None = field(default=None, validator=_num_top)


@frozen(kw_only=True)
class GenerationRequest:
    """One generation: prompt ids, options, and what the engine needs to know of its place among others. Picklable.

    Attributes:
        prompt_ids: the whole prompt.
        stable_boundary: how many leading prompt tokens the next turn of the conversation will have too; None if
            nothing is known, which is taken as all of them.
        tenant: whose stored prefixes the request may use and add to; None is a tenant too.
        caches_prefix: whether stored prefixes are used and added to at all.
        session_id: names the conversation to the prefix cache.
        priority: interactive requests are admitted before batch ones, until these have waited long.
        timeout_s: seconds from submission until which the request must have ended; past it, it fails.
        grammar: what the reply must match; of the type that the engine's grammar compiler takes.
    """

    prompt_ids: tuple[int, ...]
    options: GenerateOptions = field(factory=GenerateOptions)
    stable_boundary: int | None = field(default=None, validator=_boundary)
    tenant: str | None = None
    caches_prefix: bool = True
    session_id: str | None = None
    priority: Priority = field(default="interactive", validator=validators.in_(("interactive", "batch")))
    timeout_s: float | None = field(default=None, validator=_timeout)
    grammar: object | None = None


@frozen(kw_only=True)
class RequestShape:
    """The facts of a request that its placement records (rulings G-02a). None of them makes it run alone.

    Attributes:
        user_seed: the client set a seed.
        has_logits_extras: min-p, XTC, a logit bias, or a presence or frequency penalty.
        kv_quant, turbo_quant: how this server stores keys and values.
        has_draft: this server drafts.
        has_prepared_prefix_identity: the media have an identity, so that their prefix may be stored.
    """

    num_prompt_tokens: int
    max_tokens: int | None = None
    num_choices: int = 1
    caches_prefix: bool = True
    has_vision: bool = False
    has_adapters: bool = False
    has_repetition_penalty: bool = False
    user_seed: bool = False
    kv_quant: bool = False
    turbo_quant: bool = False
    has_logits_extras: bool = False
    has_grammar: bool = False
    wants_logprobs: bool = False
    has_draft: bool = False
    has_prepared_prefix_identity: bool = False

    @classmethod
    def of(cls, request: GenerationRequest) -> RequestShape:
        """Read the facts off a request."""
        options, params = request.options, request.options.sampling
        extras = (params.min_p, params.xtc_probability, params.logit_bias, params.presence_penalty,
                  params.frequency_penalty)  # fmt: skip
        return cls(
            num_prompt_tokens=len(request.prompt_ids),
            max_tokens=options.max_tokens,
            num_choices=options.num_choices,
            caches_prefix=request.caches_prefix and options.prompt_logprobs is None,
            has_repetition_penalty=params.penalises_repetition,
            user_seed=params.seed is not None,
            has_logits_extras=any(extras),
            has_grammar=request.grammar is not None,
            wants_logprobs=params.logprobs is not None or options.prompt_logprobs is not None,
        )


@frozen(kw_only=True)
class ExecutionPlan:
    """What will run for a request.

    Attributes:
        method: always autoregressive so far.
        prompt_cache: whether the row begins with a stored prefix if there is one, and stores its own.
        checkpoint, fill, compiled_decode: reserved; always False so far.
        reasons: codes that say why the plan is not the widest one; empty for the widest.
    """

    method: Literal["autoregressive"] = "autoregressive"
    prompt_cache: bool = True
    checkpoint: bool = False
    fill: bool = False
    compiled_decode: bool = False
    reasons: tuple[str, ...] = ()


@frozen(kw_only=True)
class GenerationPlacement:
    """The one immutable answer to "how does this request run", never dependent on load (design D2).

    Attributes:
        max_tokens: tokens that each row of the request may generate after clamping to the context.
        issuer: what made it; only its maker runs it.
    """

    shape: RequestShape
    mechanism: Mechanism
    plan: ExecutionPlan
    max_tokens: int
    issuer: object = field(default=None, repr=False, eq=False)
