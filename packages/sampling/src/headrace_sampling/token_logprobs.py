"""The log-probability of one token as plain data, for processes without MLX."""

from attrs import frozen


@frozen(kw_only=True)
class LogprobHistogram:
    """How a step's whole vocabulary spreads over log-probabilities, from `low` to 0 in bins of equal width. Picklable.

    Attributes:
        low: natural logarithm of the least probability that has a bin.
        counts: tokens in each bin, the least likely first.
        masses: their probability together.
        num_below: tokens below `low`, impossible ones included.
        mass_below: their probability together.
    """

    low: float
    counts: tuple[int, ...]
    masses: tuple[float, ...]
    num_below: int
    mass_below: float


@frozen(kw_only=True)
class TokenLogprobs:
    """The log-probability of one token, and the best candidates of its step. Picklable.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability; minus infinity if it was impossible.
        top: pairs of token id and log-probability, best first, lowest id first among equals.
        histogram: of all tokens of the step; None unless it was asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    histogram: LogprobHistogram | None = None
