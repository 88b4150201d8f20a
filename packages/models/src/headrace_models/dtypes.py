"""What weights may become when they are loaded, by name. Imports nothing, so that whatever loads may check it early."""

from typing import Literal

__all__ = ["DtypeName", "check_dtype"]

DtypeName = Literal["auto", "checkpoint", "float32", "bfloat16", "float16"]

_DTYPES: tuple[DtypeName, ...] = ("auto", "checkpoint", "float32", "bfloat16", "float16")


def check_dtype(dtype: str) -> None:
    """Refuse a representation that is not known.

    Raises:
        ValueError: naming the known ones.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}.")
