import pickle

import pytest
from burnish_data import BadRowError, validate_messages


def chat(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "text"} for role in roles]


@pytest.mark.parametrize(
    "roles",
    [
        ["user"],
        ["system", "user"],
        ["user", "user"],
        ["system", "user", "assistant", "user", "assistant"],
        ["user", "assistant", "tool", "tool", "assistant", "user"],
    ],
)
def test_a_chat_is_returned_as_it_is(roles):
    messages = chat(*roles)
    assert validate_messages(messages) == messages


@pytest.mark.parametrize(
    ("roles", "error"),
    [
        (["assistant"], r"\[0\]\.role': expected 'system' or 'user' first, got 'assistant'\."),
        (["tool"], r"\[0\]\.role': expected 'system' or 'user' first, got 'tool'\."),
        (
            ["user", "system"],
            r"\[1\]\.role': expected 'user' or 'assistant' after 'user', got 'sys",
        ),
        (["system", "system"], r"\[1\]\.role': expected 'user' after 'system', got 'system'\."),
        (["system", "assistant"], r"\[1\]\.role': expected 'user' after 'system', got 'assistant'"),
        (
            ["user", "assistant", "assistant"],
            r"\[2\]\.role': expected 'user' or 'tool' after 'assistant', got 'assistant'\.",
        ),
        (
            ["user", "tool"],
            r"\[1\]\.role': expected 'user' or 'assistant' after 'user', got 'tool'",
        ),
        (
            ["human"],
            r"\[0\]\.role': expected one of \('system', 'user', 'assistant', 'tool'\), got 'human'",
        ),
    ],
)
def test_wrong_roles_are_named(roles, error):
    with pytest.raises(ValueError, match=error):
        validate_messages(chat(*roles))


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "expected a list of at least one message, got \\[\\]"),
        ("user: hello", "expected a list"),
        (None, "expected a list"),
        (["hello"], r"'m\[0\]': expected .* got 'hello'"),
        ([{"role": "user"}], r"'m\[0\]\.content': expected text that is not empty, got None"),
        ([{"role": "user", "content": ""}], r"'m\[0\]\.content': expected text"),
        (
            [{"role": "user", "content": 7}],
            r"'m\[0\]\.content': expected text, or a list .* got 7\.",
        ),
        ([{"content": "hello"}], r"'m\[0\]\.role': expected one of .* got None"),
        ([{"role": ["user"], "content": "hello"}], r"'m\[0\]\.role': expected one of"),
    ],
)
def test_what_is_no_chat_is_named(messages, error):
    with pytest.raises(ValueError, match=error):
        validate_messages(messages, where="m")


def asks(**fields: object) -> list[dict[str, object]]:
    """A chat whose second message is an assistant's with these fields."""
    return [{"role": "user", "content": "?"}, {"role": "assistant", **fields}]


def test_messages_come_back_in_the_librarys_one_form():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    given = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0},
        {"role": "tool", "content": "", "tool_call_id": "c1", "tool_calls": None},
        {"role": "assistant", "content": "Done.", "reasoning_content": "So.", "tool_calls": []},
    ]
    assert validate_messages(given) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "weight": 0.0,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"x": 1}},
                    "id": "c1",
                }
            ],
        },
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "So."},
    ]
    assert given[2]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'  # left as it was


@pytest.mark.parametrize(
    ("call", "made"),
    [
        ({"name": "f", "arguments": {"x": None}}, {"name": "f", "arguments": {"x": None}}),
        ({"function": {"name": "f"}}, {"name": "f", "arguments": {}}),
        ({"function": {"name": "f", "arguments": None}}, {"name": "f", "arguments": {}}),
        ({"function": {"name": "f", "arguments": " "}}, {"name": "f", "arguments": {}}),
    ],
)
def test_tool_calls_in_other_forms(call, made):
    (_, message) = validate_messages(asks(tool_calls=[call]))
    assert message["tool_calls"] == [{"type": "function", "function": made}]


@pytest.mark.parametrize(
    ("part", "image"),
    [
        ({"type": "image", "image": b"png"}, b"png"),
        ({"type": "image_url", "image_url": {"url": "a/b.png"}}, "a/b.png"),
        ({"type": "image_url", "image_url": {"url": "file:///a/b%20c.png"}}, "/a/b c.png"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}, b"png"),
    ],
)
def test_images_are_bytes_or_paths(part, image):
    text = {"type": "text", "text": "Which?"}
    (message,) = validate_messages([{"role": "user", "content": [part, text]}])
    assert message["content"] == [{"type": "image", "image": image}, text]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"content": " \n"},
            r"messages\[1\]\.content': expected text that is not empty, got ' \\n",
        ),
        ({"content": b"x"}, r"\.content': expected text, or a list of text and image parts, got b"),
        (
            {"content": []},
            r"\.content': expected text, or a list of text and image parts, got \[\]",
        ),
        ({"content": [{"type": "audio"}]}, r"\.content\[0\]': expected \{\"type\": \"text\""),
        ({"content": [{"type": "image", "image": None}]}, r"\.content\[0\]': expected \{\"type\""),
        (
            {"content": "x", "weight": -1},
            r"\.weight': expected a finite number of 0 or more, got -1",
        ),
        ({"content": "x", "weight": float("inf")}, r"\.weight': expected a finite .* got inf"),
        ({"content": "x", "weight": True}, r"\.weight': expected a finite .* got True"),
        ({"content": "x", "name": 7}, r"\.name': expected text, got 7"),
        ({"tool_calls": "f()"}, r"\.tool_calls': expected a list of tool calls, got 'f\(\)'"),
        (
            {"tool_calls": [{}]},
            r"\.tool_calls\[0\]': expected \{\"type\": \"function\", .* got \{\}",
        ),
        (
            {"tool_calls": [{"name": 7}]},
            r"\[0\]\.function\.name': expected a function's name, got 7",
        ),
        (
            {"tool_calls": [{"name": "f", "arguments": "{x"}]},
            r"\[0\]\.function\.arguments': expected JSON \(Expecting property .* got '\{x'",
        ),
        (
            {"tool_calls": [{"name": "f", "arguments": '{"x": 1, "x": 2}'}]},
            r"\[0\]\.function\.arguments': expected each key of an object once, got 'x'",
        ),
        (
            {"tool_calls": [{"name": "f", "arguments": "[1]"}]},
            r"\[0\]\.function\.arguments': expected an object, got \[1\]",
        ),
        ({"tool_calls": [{"name": "f", "id": 1}]}, r"\.tool_calls\[0\]\.id': expected text, got 1"),
    ],
)
def test_wrong_fields_are_named(fields, error):
    with pytest.raises(BadRowError, match=error):
        validate_messages(asks(**fields))


def test_only_an_assistant_calls_tools():
    messages = [{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}]
    with pytest.raises(
        BadRowError, match=r"expected tool calls of the assistant alone, got 'user'"
    ):
        validate_messages(messages)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (
            "https://example.org/a.png",
            r"\.image_url\.url': expected a path .* \(nothing is fetched\)",
        ),
        ("data:image/png;base64,%%", r"\.image_url\.url': expected base64 \("),
        ("", r"\.image_url\.url': expected a path"),
        (None, r"\.image_url\.url': expected a path"),
    ],
)
def test_images_that_are_not_here(url, error):
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(BadRowError, match=r"messages\[0\]\.content\[0\]" + error):
        validate_messages([{"role": "user", "content": [part]}])


def test_bad_messages_are_counted_under_their_reasons():
    for messages, reason in [
        (chat("user", "system"), "wrong order of roles"),
        ([{"role": "user", "content": ""}], "empty message"),
        ([{"role": "human", "content": "x"}], "bad row"),
    ]:
        with pytest.raises(BadRowError) as caught:
            validate_messages(messages)
        assert caught.value.reason == reason


@pytest.mark.parametrize("weight", [10**400, 1e300, 3.5e38, 1e-300, 1e-46])
def test_a_weight_that_float32_cannot_hold_is_refused(weight):
    messages = [{"role": "user", "content": "x"}]
    messages.append({"role": "assistant", "content": "x", "weight": weight})
    error = r"messages\[1\]\.weight': expected 0, or a finite number that float32 can hold"
    with pytest.raises(BadRowError, match=error):
        validate_messages(messages)


@pytest.mark.parametrize("weight", [0, 0.0, 1, 1e-30, 3e38])
def test_a_weight_that_float32_can_hold_stays(weight):
    messages = [{"role": "user", "content": "x", "weight": weight}]
    assert validate_messages(messages)[0]["weight"] == weight


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        ({"content": "\ud83d"}, "content"),
        ({"content": [{"type": "text", "text": "a\udc00"}]}, "content"),
        (
            {
                "content": [
                    {"type": "text", "text": "a\udc00"},
                    {"type": "image", "image": "a.png"},
                ]
            },
            "content",
        ),
        ({"content": "x", "reasoning_content": "\ud83d"}, "reasoning_content"),
        ({"content": "x", "name": "\ud83d"}, "name"),
        ({"content": "x", "note": {"\ud83d": 1}}, "note"),
        ({"tool_calls": [{"name": "f", "arguments": {"x": ["\ud83d"]}}]}, "tool_calls"),
        (
            {"tool_calls": [{"name": "f", "arguments": '{"x": "\\ud83d"}'}]},
            r"tool_calls\[0\]\.function\.arguments",
        ),
    ],
)
def test_half_a_surrogate_pair_is_refused(fields, column):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", **fields}]
    error = rf"messages\[1\]\.{column}': expected whole characters, no half of a surrogate pair"
    with pytest.raises(BadRowError, match=error):
        validate_messages(messages)


@pytest.mark.parametrize("url", ["file://[bad", "data:image/png;base64,\u00e9"])
def test_an_image_url_that_cannot_be_read(url):
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(BadRowError, match=r"content\[0\]\.image_url\.url': expected "):
        validate_messages([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("roles", "remedy"),
    [
        (["Assistant"], "got 'assistant'. Leave it out, or put a user's message before it."),
        (
            ["user", "assistant", "assistant"],
            "got 'assistant'. Join the two messages before the format.",
        ),
        (
            ["user", "system"],
            "got 'system'. Move it to the beginning, or make it a user's.",
        ),
        (
            ["user", "tool"],
            "got 'tool'. Put the message that is missing before it, or leave the row out.",
        ),
    ],
)
def test_a_wrong_order_says_what_to_do(roles, remedy):
    with pytest.raises(BadRowError) as caught:
        validate_messages([{"role": role, "content": "Hi"} for role in roles])
    assert str(caught.value).endswith(remedy)
    assert str(caught.value.at("a.jsonl, line 1")).endswith(remedy)
    assert str(pickle.loads(pickle.dumps(caught.value))).endswith(remedy)
