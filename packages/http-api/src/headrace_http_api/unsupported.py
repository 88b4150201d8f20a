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
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "hlg": ({"enabled": False},),
    "json_schema": (),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}

CHAT_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_COMMON,
    "add_generation_prompt": (True,),
    "audio": (),
    "enable_thinking": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_COMMON,
    "logprobs": (False,),
    "suffix": ("",),
}

_REMEDIES: Mapping[str, str] = {
    "enable_thinking": 'set it in `chat_template_kwargs`, as {"enable_thinking": false}',
    "n": "send the request several times",
    "best_of": "send the request several times",
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
