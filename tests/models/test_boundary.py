"""The stable boundary: measured with the replies that can follow, remembered for each way of rendering."""

import pytest
from attrs import define, field

from headrace_models.boundary import BoundaryProbe

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CHAT = [{"role": "user", "content": "hi"}]


@define
class Rendering:
    """A template as a function: `primer` opens the reply at hand; `kept` of it are still there in earlier replies."""

    primer: int = 5
    kept: int = 0
    kept_before_calls: int = 0
    calls: list = field(factory=list)

    def __call__(self, messages):
        self.calls.append(messages)
        ids = []
        for message in messages:
            if message["role"] == "assistant":
                kept = self.kept_before_calls if message.get("tool_calls") else self.kept
                ids += [1, *([2] * kept), 3]
            else:
                ids += [4, 5]
        return ids if messages[-1]["role"] == "assistant" else [*ids, 1, *([2] * self.primer)]


def stable_length(probe, rendering, *, num_ids=None, canonical=None, **variables):
    canonical = rendering(CHAT) if canonical is None else canonical
    rendering.calls.clear()
    return probe.stable_length(
        num_ids=len(canonical) if num_ids is None else num_ids,
        canonical=canonical,
        messages=CHAT,
        template_kwargs=variables,
        encode=rendering,
    )


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("kept_before_calls", [0, 2])
def test_the_boundary_suits_every_reply_that_can_follow(with_tools, kept_before_calls):
    """A primer that a text keeps and a tool call drops counts as dropped where tools make a call possible."""
    rendering = Rendering(primer=2, kept=2, kept_before_calls=kept_before_calls)
    length = stable_length(BoundaryProbe(), rendering, tools=TOOLS if with_tools else None)
    # The user's two tokens and the reply's first; then what of the primer every kind of reply keeps.
    assert length == 3 + (kept_before_calls if with_tools else 2)


def test_the_probes_replies_are_followed_by_a_user():
    """A text, and with tools a call of the first one without arguments, each with the next user turn behind."""
    rendering = Rendering()
    stable_length(BoundaryProbe(), rendering, tools=TOOLS)
    text, call = rendering.calls
    assert text == [*CHAT, {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]
    (made,) = call[1]["tool_calls"]
    assert (made["id"], made["function"]) == ("cache-boundary-probe", {"name": "look_up", "arguments": {}})
    assert call[1]["content"] is None
    assert call[2] == {"role": "user", "content": "x"}


@pytest.mark.parametrize(("primer", "is_remembered"), [(64, True), (65, False)])
def test_a_primer_of_64_is_remembered_and_one_of_65_is_not(primer, is_remembered):
    """Invariant 26: longer differences come from the conversation and are measured anew."""
    probe, rendering = BoundaryProbe(), Rendering(primer=primer)
    assert stable_length(probe, rendering) == 3
    assert stable_length(probe, rendering) == 3
    assert len(rendering.calls) == (0 if is_remembered else 1)


def test_each_mode_has_its_own_primer():
    """Switches, efforts and tools render differently, so each way is measured; long texts make no mode of their own."""
    probe, rendering = BoundaryProbe(), Rendering(primer=3)
    modes = [{}, {"enable_thinking": True}, {"enable_thinking": False}, {"reasoning_effort": "low"}]
    modes += [{"preserve_thinking": True}, {"tools": TOOLS}]
    for mode in modes:
        stable_length(probe, rendering, **mode)
        assert rendering.calls, mode
    for mode in modes:
        stable_length(probe, rendering, **mode)
        stable_length(probe, rendering, **mode, notes="a long text " * 9)
        assert not rendering.calls, mode


def test_the_primer_is_subtracted_from_the_real_prompt():
    """Measured on the tokenizer's segmentation, the primer counts from the end of the ids that are really used."""
    probe, rendering = BoundaryProbe(), Rendering(primer=2)
    assert stable_length(probe, rendering, num_ids=100) == 98
    assert stable_length(probe, rendering, num_ids=1) == 0


@pytest.mark.parametrize("tools", [None, [{"name": "no function"}], [{}]])
def test_a_template_that_fails_on_the_probe_keeps_the_whole_prompt(tools):
    """Any exception of the probe means the full length, never an error of the request."""

    def refuse(_messages):
        raise RuntimeError("roles must alternate")

    encode = refuse if tools is None else Rendering()
    length = BoundaryProbe().stable_length(
        num_ids=9, canonical=[1] * 9, messages=CHAT, template_kwargs={"tools": tools}, encode=encode
    )
    assert length == 9


def test_modes_that_clients_invent_do_not_pile_up():
    """However many switches requests come with, only so many primers are held."""
    probe = BoundaryProbe()
    for number in range(200):
        stable_length(probe, Rendering(), made_up=number)
    assert len(probe._primers) <= 64
