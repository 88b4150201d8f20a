"""Errors of the sampling package.

SamplingError(Exception)
└── InvalidSamplingParams   caller: a sampling parameter is outside its range (ValueError)
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


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to print integers of more than 4,300 digits.
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
