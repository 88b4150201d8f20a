"""Errors of the sampling package.

SamplingError(Exception)
├── InvalidSamplingParams   caller: a sampling parameter is outside its range (ValueError)
└── BatchMismatch           caller: not one sampler per row of the logits (ValueError)
"""


class SamplingError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidSamplingParams(SamplingError, ValueError):
    """A sampling parameter has a wrong type or is outside its range. Picklable.

    Attributes:
        field: name of the parameter, for example `top_p`.
        value: the refused value.
        allowed: the allowed range, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {_shown(value)}; it must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type["InvalidSamplingParams"], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


class BatchMismatch(SamplingError, ValueError):
    """The number of samplers is not the number of rows.

    Attributes:
        num_rows: rows of the logits.
        num_samplers: samplers given.
    """

    def __init__(self, num_rows: int, num_samplers: int) -> None:
        super().__init__(
            f"{num_samplers} row samplers are given for logits of {num_rows} rows; there must be one per row"
        )
        self.num_rows = num_rows
        self.num_samplers = num_samplers

    def __reduce__(self) -> tuple[type["BatchMismatch"], tuple[int, int]]:
        return type(self), (self.num_rows, self.num_samplers)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to print integers of more than 4,300 digits.
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
