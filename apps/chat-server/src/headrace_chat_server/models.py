"""Finding the model that a person named, with one-line errors."""

from typing import TYPE_CHECKING

from headrace_chat_server.errors import ModelUnavailable

if TYPE_CHECKING:
    from headrace_models import ModelSource


def find_model(name: str | None) -> "ModelSource":
    """Resolve a model, fetching it with a progress bar where needed; None is the default model.

    Raises:
        ModelUnavailable: when there is no such model or fetching it failed.
    """
    from headrace_models import DEFAULT_MODEL, ModelError, resolve

    try:
        return resolve(DEFAULT_MODEL if name is None else name, progress=True)
    except ModelError as error:
        raise ModelUnavailable(str(error)) from error
