"""Fields of the OpenAI API and its dialects that would change the answer and are not served yet.

A request that sets one to its neutral value asks for nothing and is served.
"""

from collections.abc import Mapping
from typing import Any

from headrace_http_api.errors import UnsupportedParameter
from headrace_http_api.json_body import shown

__all__ = ["CHAT_UNSUPPORTED", "COMPLETION_UNSUPPORTED", "refuse_unsupported"]

_COMMON: Mapping[str, tuple[Any, ...]] = {
    "adapter": ("",),
    "adapters": ([],),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "documents": ([],),
    "dry_sequence_breakers": ([],),
    "dynatemp_range": (0,),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repeat_last_n": (),
    "repeat_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

CHAT_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_COMMON,
    "add_generation_prompt": (True,),
    "audio": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_COMMON,
    "suffix": ("",),
}

_REMEDIES: Mapping[str, str] = {
    "function_call": "set tool_choice",
    "functions": "set tools",
    "dry_sequence_breakers": "leave it out: runs are counted across line ends",
    "prompt_logprobs": "send the prompt to /v1/completions with echo, logprobs and max_tokens 0",
    "repeat_last_n": "set repetition_context_size",
    "repeat_penalty": "set repetition_penalty",
    "stop_token_ids": "set stop to the tokens' texts",
    "suffix": "no model here fills in the middle; put all of the text before the gap into prompt",
}


def refuse_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a body that sets an unserved field to anything but a neutral value.

    Raises:
        UnsupportedParameter: names the field, its value and the neutral values.
    """
    for name in body.keys() & unsupported.keys():
        value, neutral = body[name], unsupported[name]
        if value is None or any(_is_same(value, one) for one in neutral):
            continue
        accepted = " or ".join([*(shown(one) for one in neutral), "null"])
        remedy = _REMEDIES.get(name, "leave it out")
        raise UnsupportedParameter(
            f"{name} is {shown(value)}, which this server does not serve yet; {name} may be {accepted}: {remedy}",
            param=name,
        )


def _is_same(value: object, neutral: object) -> bool:
    # True == 1 in Python, but not in JSON.
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral
