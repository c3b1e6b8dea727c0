import datetime
import re

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.chat import (
    check_variables,
    render_chat,
    render_continued,
    template_variables,
)

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " Is 1 < 2 & 3?\n"}

# Like Qwen's template: tools, namespaces, a reversed loop.
QWEN = """\
{%- if tools %}
    {{- 'Tools: ' + tools | tojson }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == 'user' %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Unexpected role: ' + message.role) }}
    {%- endif %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {%- generation %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- endgeneration %}
    {{- ' (last)' if loop.index0 == ns.last else '' }}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


def test_features_of_published_templates():
    text = render_chat(QWEN, [SYSTEM, USER])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n Is 1 < 2 & 3?\n (last)<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # Not escaped, as HTML would be.
    template = "{{ bos_token }}{{ messages[0].content | tojson }}"
    text = render_chat(template, [USER], bos_token="<s>")
    assert text == '<s>" Is 1 < 2 & 3?\\n"'
    with pytest.raises(UserError, match="rendered: Unexpected role: judge"):
        render_chat(QWEN, [{"role": "judge", "content": ""}])


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('No system message.') }}", "No system message"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        # Code must not run, and messages must not change.
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe|undefined"),
        # More than there is memory.
        ("{{ 'x'.ljust(1000000000000000) }}", "MemoryError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_invalid_and_unsafe_templates_are_refused(template, reason):
    with pytest.raises(UserError) as error:
        render_chat(template, [USER])
    message = str(error.value)
    assert message.startswith("the chat template cannot be rendered: ")
    assert re.search(reason, message), message
    assert "\n" not in message


def test_blocks_times_and_operators():
    """Block tags leave no blank lines."""
    template = "a\n  {% if true %}\nb\n  {% endif %}\nc\n"
    assert render_chat(template, []) == "a\nb\nc"
    year = render_chat("{{ strftime_now('%Y') }}", [])
    assert int(year) in (datetime.date.today().year, datetime.date.today().year - 1)
    template = "{{ 'a'.ljust(3) }}|{{ '%5.1f%%' % 2.5 }}|{{ '%(a)s' % {'a': 7} }}"
    template += "|{{ 7 % 4 }}|{{ 3 * 4 }}|{{ '=' * 3 }}|{{ 2 * [1] }}"
    assert render_chat(template, []) == "a  |  2.5%|7|3|12|===|[1, 1]"


HEAD = "<user>hi<end>\n<assistant>\n"
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>"
    r"{% if m.role == 'assistant' %}{{ '\n' }}{% endif %}"
    "{{ CONTENT }}END\n{% endfor %}"
)
CONTENTS = ("", "end", "assistant", "\n", " x", "x ", "x\n\n", "Is\n it", "<end>")


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("m.content", lambda text: text),
        ("m.content | trim", str.strip),
        ("m.content.rstrip('\\n')", lambda text: text.rstrip("\n")),
    ],
)
@pytest.mark.parametrize("end", ["<end>", " <end>", ""])
def test_continued_messages_end_after_their_content(content, shown, end):
    template = PLAIN.replace("CONTENT", content).replace("END", end)
    for text in CONTENTS:
        chat = [{"role": "user", "content": "hi"}]
        chat.append({"role": "assistant", "content": text})
        want = HEAD.replace("<end>", end) + shown(text)
        assert continued(template, chat) == want, text


REASONING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}<end>"
    "{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{{ part.text }}{% endfor %}<end>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        ("{{ messages[0].content }}!", {"content": "b"}, "does not write the content"),
        # Also where the part that is left out occurs elsewhere in the conversation.
        (REASONING, {"content": "<think>\n\n</think>\n\n"}, "leaves out a part of it"),
        (REASONING, {"content": "a</think>"}, "leaves out a part of it"),
        ("{{ messages[1].content | upper }}", {"content": "b"}, "changes its content"),
        (REASONING, {}, "it has no text"),
        (PARTS, {"content": [{"type": "image"}]}, "it has no text"),
    ],
)
def test_messages_that_cannot_be_continued_are_refused(template, answer, reason):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
    with pytest.raises(UserError, match=f"cannot be continued: .*{reason}"):
        continued(template, chat)


def test_what_is_continued_may_be_empty_or_have_parts():
    with pytest.raises(UserError, match="the conversation is empty"):
        continued(REASONING, [])
    # The header is there even if the template leaves out empty messages.
    template = (
        "{% for m in messages if m.content %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    assert continued(template, [{"role": "assistant", "content": ""}]) == "<assistant>"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    assert continued(PARTS, [{"role": "user", "content": parts}]) == "<user>ab "
    assert parts[1] == {"type": "text", "text": "b "}


def continued(template, chat):
    def render(messages):
        return render_chat(template, messages, add_generation_prompt=False)

    return render_continued(render, chat)


def test_variables_reach_the_template():
    template = "{{ enable_thinking }}{{ tools | tojson }}{{ documents }}"
    assert render_chat(template, []) == "nullNone"
    variables = {"enable_thinking": False, "tools": [{"name": "f"}]}
    check_variables(template, variables)
    text = render_chat(template, [], variables=variables)
    assert text == 'False[{"name": "f"}]None'
    # A variable with a default in the template is one of it, too.
    check_variables(
        "{% if not date is defined %}{% set date = 'May' %}{% endif %}{{ date }}",
        {"date": "June"},
    )


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"enable_thinkin": False}, "variable 'enable_thinkin'; it has enable_"),
        ({"messages": []}, "messages is set by the conversation"),
        ({"raise_exception": ""}, "raise_exception is set by"),
        ({"tools": "f"}, "tools of the chat template must be a list of JSON objects"),
    ],
)
def test_variables_without_effect_are_refused(variables, reason):
    with pytest.raises(UserError, match=reason):
        check_variables(QWEN, variables)


def test_values_of_variables_are_json_or_text():
    arguments = ["a=true", "b=False", "c=[1]", "d=x=y", "e="]
    want = {"a": True, "b": False, "c": [1], "d": "x=y", "e": ""}
    assert template_variables(arguments) == want
    for argument in ("thinking", "=1", "a b=1"):
        with pytest.raises(UserError, match="--template_arg must be NAME=VALUE"):
            template_variables([argument])
