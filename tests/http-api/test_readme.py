"""The README's example runs as printed."""

import re
from pathlib import Path

import httpx

README = Path(__file__).parents[2] / "packages" / "http-api" / "README.md"


async def test_example_serves_its_own_route_with_the_shared_checks(services):
    """A reader's own route gets the key check and the error body of the package."""
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL).group(1)
    names = {"services": services}
    exec(example, names)

    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        key = {"authorization": "Bearer secret"}
        good = await client.post("/v1/shout", json={"text": "hi"}, headers=key)
        bad = await client.post("/v1/shout", json={"text": 5}, headers=key)
        without_key = await client.post("/v1/shout", json={"text": "hi"})

    assert good.json() == {"text": "HI"}
    assert bad.json()["error"]["param"] == "text"
    assert without_key.status_code == 401
