"""instructor against a running server: models as replies, by schema and by tools, whole, partial and many.

python instructor_python.py http://127.0.0.1:8080/v1
"""

import json
import sys
from importlib.metadata import version
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

MODEL = "default_model"
QUESTION = [{"role": "user", "content": "Name a river."}]


class River(BaseModel):
    # Else the schema allows any further names, and a small model goes on inventing some.
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe"]


def main(base_url):
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 120, "temperature": 1, "seed": 5}
    exercised = []
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        river = instructor.from_openai(client, mode=mode).chat.completions.create(
            response_model=River, max_retries=0, **asked
        )
        assert isinstance(river, River)
        exercised.append(f"a model as the reply, {mode.name}")

    schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = schema.chat.completions.create_partial(response_model=River, max_retries=0, **asked)
    assert last.name is not None
    exercised.append("create_partial: the model as it grows in a stream")

    river, raw = schema.chat.completions.create_with_completion(response_model=River, max_retries=0, **asked)
    assert isinstance(river, River)
    assert raw.usage.completion_tokens > 0
    exercised.append("create_with_completion: the model and the answer it came in")
    print(json.dumps({"client": "instructor", "version": version("instructor"), "exercised": exercised}))


if __name__ == "__main__":
    main(sys.argv[1])
