"""The log-probability of one token as plain data, for processes without MLX."""

from attrs import frozen


@frozen(kw_only=True)
class TokenLogprobs:
    """The log-probability of one token, and the best candidates of its step. Picklable.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability; minus infinity if it was impossible.
        top: pairs of token id and log-probability, best first, lowest id first among equals.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
