import pytest
from burnish_data import validate_messages


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
    assert validate_messages(messages) is messages


@pytest.mark.parametrize(
    ("roles", "error"),
    [
        (["assistant"], r"\[0\]\['role'\]: 'assistant' may not stand first"),
        (["tool"], r"\[0\]\['role'\]: 'tool' may not stand first"),
        (["user", "system"], r"\[1\]\['role'\]: 'system' may not .* after .* role 'user'"),
        (["system", "system"], r"\[1\]\['role'\]: 'system' may not .* after .* role 'system'"),
        (["system", "assistant"], r"\[1\]\['role'\]: 'assistant' may not .* role 'system'"),
        (["user", "assistant", "assistant"], r"\[2\]\['role'\]: 'assistant' may not"),
        (["user", "tool"], r"\[1\]\['role'\]: 'tool' may not .* role 'user'"),
        (["human"], r"\[0\]\['role'\]: expected one of .*'user'.* got 'human'"),
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
        (["hello"], r"m\[0\]: expected .* got 'hello'"),
        ([{"role": "user"}], r"m\[0\]\['content'\]: expected text that is not empty, got None"),
        ([{"role": "user", "content": ""}], r"m\[0\]\['content'\]: expected text"),
        ([{"role": "user", "content": 7}], r"m\[0\]\['content'\]: expected text .* got 7"),
        ([{"content": "hello"}], r"m\[0\]\['role'\]: expected one of .* got None"),
        ([{"role": ["user"], "content": "hello"}], r"m\[0\]\['role'\]: expected one of"),
    ],
)
def test_what_is_no_chat_is_named(messages, error):
    with pytest.raises(ValueError, match=error):
        validate_messages(messages, where="m")
