"""Errors of the sampling package.

SamplingError(Exception)
├── InvalidSamplingParams   caller: a sampling parameter is outside its range (ValueError)
├── InvalidGrammar          caller: a grammar is malformed, unsupported, or matches nothing (ValueError)
├── GrammarUnavailable      operator: the extra `grammar` is not installed (ImportError)
├── GrammarFailed           row: no token may follow, or the grammar grew beyond a limit (RuntimeError)
├── TokenNotAllowed         programmer: a token that the grammar closes was accepted (ValueError)
├── InvalidDrafts           programmer: drafts do not fit the logits (ValueError)
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


class InvalidGrammar(SamplingError, ValueError):
    """A grammar is malformed, uses what is not supported, or can match nothing. Picklable.

    Attributes:
        field: kind of the grammar, or name of the option, for example `json_schema`.
        reason: why, as the compiler says it.
        remedy: what to do.
    """

    def __init__(self, field: str, reason: str, remedy: str) -> None:
        super().__init__(f"{field} cannot be used: {reason}; {remedy}")
        self.field = field
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["InvalidGrammar"], tuple[str, str, str]]:
        return type(self), (self.field, self.reason, self.remedy)


class GrammarUnavailable(SamplingError, ImportError):
    """Grammars need llguidance, which the extra `grammar` installs."""

    def __init__(self) -> None:
        super().__init__('grammars need llguidance: pip install "headrace-sampling[grammar]"')

    def __reduce__(self) -> tuple[type["GrammarUnavailable"], tuple[()]]:
        return type(self), ()


class GrammarFailed(SamplingError, RuntimeError):
    """A row's grammar cannot go on: no token may follow, or it grew beyond a limit. Ends that row only.

    Attributes:
        reason: why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the grammar cannot go on: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[type["GrammarFailed"], tuple[str]]:
        return type(self), (self.reason,)


class TokenNotAllowed(SamplingError, ValueError):
    """A grammar was given a token that it closes. Its state is unchanged.

    Attributes:
        token_id: the token.
        reason: why.
    """

    def __init__(self, token_id: int, reason: str) -> None:
        super().__init__(f"token {token_id} is not allowed here: {reason}; accept only what was sampled under the mask")
        self.token_id = token_id
        self.reason = reason

    def __reduce__(self) -> tuple[type["TokenNotAllowed"], tuple[int, str]]:
        return type(self), (self.token_id, self.reason)


class InvalidDrafts(SamplingError, ValueError):
    """Drafts do not fit the logits that verify them.

    Attributes:
        field: the argument.
        value: what it has.
        allowed: what it must have, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {_shown(value)}; it must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type["InvalidDrafts"], tuple[str, object, str]]:
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
