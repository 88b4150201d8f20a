"""The sampling parameters of one row: validated once, frozen, picklable, free of arrays."""

from attrs import field, frozen

from headrace_sampling.curves import HlgCurve, ToneCurve
from headrace_sampling.errors import InvalidSamplingParams
from headrace_sampling.validation import (
    BiasPairs,
    bias_pairs,
    flag,
    instance_or_none,
    integer,
    number,
    number_or_zero,
    optional,
    seed_or_none,
    token_ids,
)

_MAX_TEMPERATURE = 1e6
_MAX_PENALTY = 1e4
_MAX_WINDOW = 2**20
_WHOLE = "; 0 is the whole history"
_OFF = "; 0 and 1 turn the filter off"


def _only_with_logprobs(instance: "SamplingParams", _attribute: object, value: bool) -> None:
    if value and instance.logprobs is None:
        raise InvalidSamplingParams("logprob_histogram", value, "False where logprobs is None, which captures nothing")


@frozen(kw_only=True)
class SamplingParams:
    """How to pick the next token of one row.

    Processors change the logits: logit bias, repetition, presence and frequency penalty, DRY. Filters keep part of
    the vocabulary: top-n-sigma, top-p, min-p, typical-p, XTC, top-k. Then the token is drawn from the softmax of what
    is kept over `temperature`. Filters see the distribution before the temperature, as in mlx-lm. A tone curve
    replaces filters and temperature.

    Attributes:
        temperature: 0 takes the best token after the processors and ignores every filter; otherwise the divisor of
            the log-probabilities, up to 1e6.
        top_p: keep the smallest set of best tokens that holds this share of the probability; 0 and 1 are off.
        top_k: keep the best `top_k` tokens; 0, or at least the vocabulary size, is off.
        min_p: keep tokens at least this likely relative to the best one, 0 to 1; 0 is off.
        min_tokens_to_keep: how many of the best tokens min-p never drops, 1 to 1024.
        top_n_sigma: keep tokens at most this many standard deviations of the logits below the best; 0 is off.
        typical_p: keep the tokens closest to the expected surprise that hold this share; 0 and 1 are off.
        xtc_probability: how often a step excludes the top choices, 0 to 1; 0 is off.
        xtc_threshold: tokens more likely than the least likely one above this threshold are excluded, 0 to 0.5.
        xtc_exempt: token ids that XTC never excludes; the EOS tokens that the sampler knows never are.
        repetition_penalty: divides a seen token's positive logit and multiplies a negative one; 1 and 0 are off.
        repetition_window: how many last tokens of prompt and reply count as seen; 0 is the whole history.
        presence_penalty: subtracted once from the logit of each token in the reply.
        presence_window: how many last tokens of the reply count; 0 is the whole reply.
        frequency_penalty: subtracted for each occurrence of a token in the reply.
        frequency_window: how many last tokens of the reply count; 0 is the whole reply.
        dry_multiplier: DRY's penalty for a token that would extend a repeated run of `dry_allowed_length` tokens;
            0 is off.
        dry_base: the penalty grows by this factor with each token that the run is longer.
        dry_allowed_length: the longest run that may repeat freely.
        dry_breakers: token ids that no repeated run reaches across.
        dry_window: how many last tokens of prompt and reply are searched for repeats, 2 to 16384.
        logit_bias: added to the logits; given as a mapping from token id to a finite number, kept as pairs
            sorted by id.
        min_tokens: EOS tokens that the sampler knows cannot be picked before so many tokens.
        ignore_eos: EOS does not end the row. That is the scheduler's to do; a sampler ignores it.
        logprobs: capture the picked token's log-probability and so many of the best, 0 to 20; None captures nothing.
        logprob_histogram: capture how the whole vocabulary spreads, too.
        hlg: replaces filters and temperature, unless the temperature is 0.
        curve: replaces filters and temperature, also at temperature 0.
        seed: fixes the row's randomness; any integer from -2**63 to 2**64 - 1, kept modulo 2**64. None draws a
            fresh seed for each sampler.

    Raises:
        InvalidSamplingParams: names the field, its value and the allowed range.
    """

    temperature: float = field(default=0.0, converter=number("temperature", 0, _MAX_TEMPERATURE, "; 0 is greedy"))
    top_p: float = field(default=1.0, converter=number("top_p", 0, 1, _OFF))
    top_k: int = field(default=0, converter=integer("top_k", 0, remedy="; 0 turns the filter off"))
    min_p: float = field(default=0.0, converter=number("min_p", 0, 1, "; 0 turns the filter off"))
    min_tokens_to_keep: int = field(default=1, converter=integer("min_tokens_to_keep", 1, 1024))
    top_n_sigma: float = field(default=0.0, converter=number("top_n_sigma", 0, 1e6, "; 0 turns the filter off"))
    typical_p: float = field(default=1.0, converter=number("typical_p", 0, 1, _OFF))
    xtc_probability: float = field(default=0.0, converter=number("xtc_probability", 0, 1, "; 0 turns XTC off"))
    xtc_threshold: float = field(default=0.1, converter=number("xtc_threshold", 0, 0.5))
    xtc_exempt: tuple[int, ...] = field(default=(), converter=token_ids("xtc_exempt"))
    repetition_penalty: float = field(
        default=1.0,
        converter=number_or_zero("repetition_penalty", 1 / _MAX_PENALTY, _MAX_PENALTY, "; 0 and 1 turn it off"),
    )
    repetition_window: int = field(default=20, converter=integer("repetition_window", 0, _MAX_WINDOW, _WHOLE))
    presence_penalty: float = field(default=0.0, converter=number("presence_penalty", -_MAX_PENALTY, _MAX_PENALTY))
    presence_window: int = field(default=0, converter=integer("presence_window", 0, _MAX_WINDOW, _WHOLE))
    frequency_penalty: float = field(default=0.0, converter=number("frequency_penalty", -_MAX_PENALTY, _MAX_PENALTY))
    frequency_window: int = field(default=0, converter=integer("frequency_window", 0, _MAX_WINDOW, _WHOLE))
    dry_multiplier: float = field(default=0.0, converter=number("dry_multiplier", 0, _MAX_PENALTY, "; 0 turns DRY off"))
    dry_base: float = field(default=1.75, converter=number("dry_base", 1, 1e3))
    dry_allowed_length: int = field(default=2, converter=integer("dry_allowed_length", 1, 1024))
    dry_breakers: tuple[int, ...] = field(default=(), converter=token_ids("dry_breakers"))
    dry_window: int = field(default=1024, converter=integer("dry_window", 2, 16_384))
    logit_bias: BiasPairs = field(default=(), converter=bias_pairs)
    min_tokens: int = field(default=0, converter=integer("min_tokens", 0))
    ignore_eos: bool = field(default=False, converter=flag("ignore_eos"))
    logprobs: int | None = field(
        default=None, converter=optional(integer("logprobs", 0, 20, ", or None to capture nothing"))
    )
    logprob_histogram: bool = field(default=False, converter=flag("logprob_histogram"), validator=_only_with_logprobs)
    hlg: HlgCurve | None = field(default=None, converter=instance_or_none("hlg", HlgCurve))
    curve: ToneCurve | None = field(default=None, converter=instance_or_none("curve", ToneCurve))
    seed: int | None = field(default=None, converter=seed_or_none)

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the best token and draws nothing."""
        return self.temperature == 0 and self.curve is None

    @property
    def penalises_repetition(self) -> bool:
        """Whether the repetition penalty changes anything."""
        return self.repetition_penalty not in (0.0, 1.0)
