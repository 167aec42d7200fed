"""Chat templates are programs of others: whatever they try, it ends, with an error that says what is wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from router_service.text.omissions import TOOLS
from router_service.text.template import MAX_RENDERED
from router_service.text.tokens import ChatTemplate, TextCodec, Turn
from slipstream.base.errors import InvalidRequest, ModelError, Unavailable
from slipstream.base.offload import ChildProcess
from tests.tiny import with_template

CPU_S = 0.25
USER: Any = [{"role": "user", "content": "x"}]
BILLION = "10 ** 9"
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
                    "{% endfor %}{% endfor %}",
    "a power": "{% set n = 9 ** (9 ** 9) %}",
    "a power of what is given": "{% set n = (messages | length + 8) ** (10 ** 9) %}",
    "rounding": "{{ 1.5 | round(10 ** 8, 'ceil') }}",
    "slices": "{{ messages | slice(10 ** 10) | list | length }}",
    "slices one by one": "{% for s in messages | slice(10 ** 12) %}{% endfor %}",
    "batches": "{{ messages | batch(10 ** 10, 1) | list | length }}",
    "dummy text": "{{ lipsum(n=10 ** 7) | length }}",
    "calls of calls": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "sums": "{% set ns = namespace(n=3) %}{% for i in range(64) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a long repeat": f"{{{{ 'a' * {BILLION} * 10 }}}}",
    "a repeat of what is given": f"{{% set x = messages[0].content * {BILLION} %}}",
    "a list": f"{{% set x = messages * {BILLION} %}}",
    "padding": "{{ 'a'.ljust(10 ** 11) }}",
    "centred": "{{ 'a' | center(10 ** 10) }}",
    "indented": "{{ messages | tojson(indent=10 ** 10) }}",
    "printf": "{{ '%099999999999d' % 1 }}",
    "printf filter": "{{ '%*d' | format(10 ** 9, 1) }}",
    "format": "{{ '{:>99999999999}'.format(1) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(10 ** 8) }}",
    "growing text": "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "growing lists": "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a tree printed": "{% set ns = namespace(x=[1, 1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}"
                      "{% endfor %}{{ ns.x }}",
    "a tree as JSON": "{% set ns = namespace(x=[1, 1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}"
                      "{% endfor %}{{ ns.x | tojson }}",
    "trees compared": "{% set a = namespace(x=1) %}{% set b = namespace(x=1) %}{% for i in range(64) %}"
                      "{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}",
    "replacing": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x.replace('', 'abc') %}"
                 "{% endfor %}",
    "joining": "{{ range(99999) | map('string') | join('x' * 10 ** 8) }}",
    "bytes": "{{ (1).to_bytes(10 ** 11, 'big') }}",
    "blocks of blocks": "{% set x = 'ab' %}" + ("{% set x %}" + "{{ x }}" * 9 + "{% endset %}") * 30,
    "output": "{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}",
}
BROKEN = {
    "syntax": "{% for %}",
    "no end": "{% if true %}",
    "unknown tag": "{% include_all %}",
    "unknown filter": "{{ messages | shell }}",
    "another file": "{% include '/etc/passwd' %}",
    "another template": "{% extends 'x' %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "outside of a loop": "{% break %}",
    "a loop within itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "the sandbox": "{{ ''.__class__.__mro__ }}",
    "the sandbox, by a filter": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "the sandbox, by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "changed messages": "{{ messages.append(1) }}",
    "a null": "\x00{% \x00",
}


def rendered(template: ChatTemplate, messages: Sequence[Any] = USER) -> str:
    return "".join(template.render(messages))


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_that_takes_too_much_is_not_loaded(source: str) -> None:
    with pytest.raises(ModelError, match=r"does not end within|takes more|longer than|ends its process") as caught:
        ChatTemplate(source, {}, [], CPU_S)
    assert str(caught.value).startswith("chat_template: ")


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_template_says_so_by_name(source: str) -> None:
    """When it is loaded, or, where only the messages show it, to the client, with the field's name."""
    try:
        ChatTemplate(source, {}, [], CPU_S).render(USER)
    except ModelError as error:
        assert str(error).startswith("chat_template: ")
    except InvalidRequest as error:
        assert error.field == "messages"


@pytest.mark.parametrize("trigger", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ n ** (n ** n) }}"])
def test_a_template_that_waits_for_its_messages_costs_one_request(trigger: str) -> None:
    source = "{% set n = 9 + messages | length %}{% if 'now' in messages[0].content %}" + trigger + "{% endif %}fine"
    template = ChatTemplate(source, {}, [], CPU_S)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="does not end") as caught:
            template.render([{"role": "user", "content": "now"}])
        assert caught.value.field == "messages"
        assert rendered(template) == "fine"


def test_memory_and_length_are_bounded_for_every_request() -> None:
    template = ChatTemplate("{{ messages[0].content * (messages[0].factor or 1) }}", {}, [], CPU_S)
    for factor in (MAX_RENDERED + 1, 1 << 40):
        with pytest.raises(InvalidRequest, match=r"takes more than|longer than"):
            template.render([{"role": "user", "content": "x", "factor": factor}])
    assert rendered(template) == "x"


def test_a_process_that_is_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, ["<s>"])
    asked = [{"role": "user", "content": "a<s>\ud800"}]
    assert template.render(asked) == ["a", "<s>", "\ud800"]
    os.kill(template.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, template.process.pid, os.WEXITED | os.WNOWAIT)
    assert template.render(asked)[1] == "<s>"
    os.kill(template.process.pid, signal.SIGKILL)  # maybe with the question in its hands
    try:
        assert rendered(template) == "x"
    except Unavailable:
        assert rendered(template) == "x"


def test_a_process_that_is_killed_while_it_begins_again_is_no_fault_of_the_model(
        monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, [])
    template.close()
    with monkeypatch.context() as killed:
        killed.setattr(ChildProcess, "ask", lambda child, line: child.kill())
        with pytest.raises(Unavailable, match="has ended"):
            rendered(template)
    assert rendered(template) == "x"


def test_messages_are_joined_where_a_template_takes_no_others() -> None:
    """As Qwen3.5's and Mistral's: opencode sends two of the system, and others one in mid-conversation, and got 400."""
    said: Any = [{"role": role, "content": word} for role, word in (
        ("system", "a"), ("system", "b"), ("user", "c"), ("user", "d"), ("assistant", "e"), ("assistant", "f"),
        ("system", "g"))]
    free = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    strict = ("{% for m in messages %}{% if m.role != (['assistant', 'user'][loop.index0 % 2] if loop.index0 else "
              "'system') %}{{ raise_exception('roles') }}{% endif %}{% endfor %}")
    for source, wanted in ((strict + free, "[system: a\nb][user: c\nd][assistant: e\nf][user: g]"), (free, (
            "[system: a][system: b][user: c][user: d][assistant: e][assistant: f][system: g]"))):
        with closing(ChatTemplate(source, {}, [])) as template:
            assert template.render(said) == [wanted], "as they are, where that can be"
            if source is not free:
                with pytest.raises(InvalidRequest, match="roles"):
                    template.render(said[2:4])


def test_what_the_system_says_is_the_users_where_a_template_has_no_system() -> None:
    """As Gemma's and older ones of Mistral's: every agent begins with such words, and got 400. So did who sent tools,
    of which such a model is told in the system's message."""
    said: Any = [{"role": role, "content": word} for role, word in (
        ("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"))]
    source = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
              "{{ raise_exception('roles') }}{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}")
    with closing(ChatTemplate(source, {}, [])) as template:
        assert template.render(said) == ["[user: a\nb][assistant: c][user: d]"]
        assert template.render(said[:1]) == ["[user: a]"]
        with pytest.raises(InvalidRequest, match="roles"):
            template.render([*said[1:3], {"role": "critic", "content": "e"}])


def test_the_user_says_nothing_where_the_assistant_begins() -> None:
    """As chats do that greet: Gemma's and Mistral's templates want a user first, and each such conversation got 400."""
    source = ("{% for m in messages | selectattr('role', 'ne', 'system') %}{% if (m.role == 'user') != "
              "(loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"
              "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}")
    with closing(ChatTemplate(source, {}, [])) as template:
        said: Any = [{"role": role, "content": word} for role, word in (
            ("system", "a"), ("assistant", "b"), ("user", "c"))]
        assert template.render(said) == ["[user: a][assistant: b][user: c]"]
        assert template.render(said[1:]) == ["[user: ][assistant: b][user: c]"]
        assert template.render(said[1:2], Turn(False, True)) == ["[user: ][assistant: b"]


def test_what_a_template_leaves_out_of_the_system_is_the_users() -> None:
    """As Phi 3's do: an agent's instructions, and the tools that such a model is told of in them, came to nobody."""
    template = ChatTemplate("{% for m in messages %}{% if m.role in ['user', 'assistant'] %}[{{ m.role }}: "
                            "{{ m.content }}]{% endif %}{% endfor %}", {}, [])
    try:
        said: Any = [{"role": role, "content": word} for role, word in (
            ("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"))]
        assert template.render(said) == ["[user: a\nb][assistant: c][user: d]"]
        assert template.render(said[1:]) == ["[user: b][assistant: c][user: d]"]
    finally:
        template.close()


@pytest.mark.parametrize("source", [
    "{% if messages[0].role == 'system' %}[system: {{ messages[0].content }}]{% endif %}{% for m in messages %}"
    "{% if m.role != 'system' %}[{{ m.role }}: {{ m.content }}]{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role != 'system' or loop.index0 < 2 %}[{{ m.role }}: {{ m.content }}]{% endif %}"
    "{% endfor %}",
    "{% for m in messages %}{% if m.role != 'system' or not loop.last %}[{{ m.role }}: {{ m.content }}]{% endif %}"
    "{% endfor %}"])
def test_what_a_template_leaves_out_of_the_system_s_later_words_is_a_user_s(source: str) -> None:
    """SmolLM3's, Qwen3-VL's and GPT-OSS' write the first message alone, Command R's and Vicuna's none at the end: what
    an agent says in mid-conversation came to nobody."""
    with closing(ChatTemplate(source, {}, [])) as template:
        said: Any = [{"role": role, "content": word} for role, word in (
            ("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("system", "e"))]
        assert template.render(said) == ["[system: a\nb][user: c][assistant: d][user: e]"]
        assert template.render([said[0], *said[2:4], said[2], said[2]]) == [
            "[system: a][user: c][assistant: d][user: c][user: c]"]


def test_a_text_is_a_part_where_a_template_writes_parts_alone() -> None:
    """As SmolVLM's and LLaVA's: of a conversation without images nothing but the roles came to the model."""
    source = ("{% for m in messages %}{{ m.role }}:{% if m.content[0].type == 'image' %}<image>{% endif %}"
              "{% for part in m.content %}{% if part['type'] == 'text' %} {{ part['text'] }}{% endif %}{% endfor %};"
              "{% endfor %}")
    with closing(ChatTemplate(source, {}, ["<s>"])) as template:
        said: Any = [{"role": "user", "content": "Why<s>?"}, {"role": "assistant", "content": "So"}]
        assert template.render(said) == ["user: Why", "<s>", "?;assistant: So;"]
        assert template.render(said, Turn(False, True)) == ["user: Why", "<s>", "?;assistant: So"]


def test_calls_without_words_are_said_to_a_template_that_looks_at_the_first_part() -> None:
    """As Command A Reasoning's, which takes texts, too: an agent's second step ended with 400."""
    source = ("{% for m in messages %}[{{ m.role }}: {% if m.tool_calls and m.content[0].thinking %}{% endif %}{% if "
              "m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
              "{% for c in m.tool_calls or [] %}{{ c.id ~ c.function.name }}{% endfor %}]{% endfor %}")
    with closing(ChatTemplate(source, {}, [])) as template:
        said: Any = [{"role": "user", "content": "c"}, {**calls_of("c0"), "content": ""}, {
            "role": "tool", "tool_call_id": "c0", "content": "y"}]
        assert template.render(said) == ["[user: c][assistant: c0f0][tool: y]"]


# In the words of their templates, which speak of a call and its results alone.
WRITES = ("{% for m in messages %}[{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %} {{ c.function.name }}"
          "={{ c.id }}{% endfor %}{{ ' of ' + m.tool_call_id if m.tool_call_id }}]{% endfor %}")
MISTRALS = """{% set ns = namespace(index=0) %}{% for m in messages %}
{%- if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}
{%- for id in ([m.tool_call_id] if m.role == 'tool' else m.tool_calls | default([]) | map(attribute='id')) %}
{%- if id | length != 9 %}{{ raise_exception('ids of nine characters') }}{% endif %}{% endfor %}{% endfor %}"""
LLAMAS = ("{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
          "{{ raise_exception('only single tool-calls at once') }}{% endif %}{% endfor %}")

DEEPSEEKS = ("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'x: ' + c.function.arguments + '; ' }}"
             "{% endfor %}{% endfor %}")


def calls_of(*ids: str) -> dict[str, Any]:
    functions = [{"name": f"f{i}", "arguments": {"a": "é"}} for i in range(len(ids))]
    return {"role": "assistant", "content": "e", "tool_calls": [
        {"id": id_, "type": "function", "function": function} for id_, function in zip(ids, functions, strict=True)]}


@pytest.mark.parametrize(("source", "wanted"), [
    (MISTRALS, "[user: c][assistant: e f0=1711e7978 f1=aB3456789][tool: y of aB3456789][tool: x\nd of 1711e7978]"
               "[assistant: g]"),
    (LLAMAS, "[user: c][assistant: e f0=call_abcdef][tool: x of call_abcdef][assistant:  f1=aB3456789]"
             "[tool: y of aB3456789][user: d][assistant: g]"),
    (DEEPSEEKS, 'x: {"a": "é"}; x: {"a": "é"}; [user: c][assistant: e f0=call_abcdef f1=aB3456789]'
                '[tool: y of aB3456789][tool: x of call_abcdef][user: d][assistant: g]'),
    ("", "[user: c][assistant: e f0=call_abcdef f1=aB3456789][tool: y of aB3456789][tool: x of call_abcdef][user: d]"
         "[assistant: g]")])
def test_calls_and_results_are_said_as_a_template_takes_them(source: str, wanted: str) -> None:
    """Agents say something beside the results of tools, bring ids of other models, and answer several calls at once:
    each such conversation ended with 400."""
    said: Any = [{"role": "user", "content": "c"}, calls_of("call_abcdef", "aB3456789"),
                 {"role": "tool", "tool_call_id": "aB3456789", "content": "y"},
                 {"role": "tool", "tool_call_id": "call_abcdef", "content": "x"},
                 {"role": "user", "content": "d"}, {"role": "assistant", "content": "g"}]
    with closing(ChatTemplate(source + WRITES, {}, [])) as template:
        assert template.render(said) == [wanted]


def test_what_a_template_refuses_for_two_reasons_is_said_in_both_other_ways() -> None:
    """A chat that the assistant begins with a greeting and that holds calls of another model: Mistral's templates want
    a user first and short ids, and with either alone the conversation ended with 400."""
    said: Any = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "c"}, calls_of("call_abcdef"),
                 {"role": "tool", "tool_call_id": "call_abcdef", "content": "x"}, {"role": "assistant", "content": "g"}]
    with closing(ChatTemplate(MISTRALS + WRITES, {}, [])) as template:
        assert template.render(said) == ["[user: ][assistant: a][user: c][assistant: e f0=1711e7978]"
                                         "[tool: x of 1711e7978][assistant: g]"]


def test_reasoning_begins_no_turn_where_turns_alternate() -> None:
    """A model that thinks again before it goes on has two messages in a row: after a change to Gemma's or Mistral's
    model the conversation ended with 400."""
    said: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"},
                 {"role": "assistant", "content": "d", "reasoning_content": "e"}, {"role": "user", "content": "f"}]
    writes = "{% for m in messages %}[{{ m.role }}: {{ m.reasoning_content }} {{ m.content }}]{% endfor %}"
    with closing(ChatTemplate(MISTRALS + writes, {}, [])) as template:
        assert template.render(said) == ["[user:  a][assistant: c\ne b\nd][user:  f]"]
    with closing(ChatTemplate(writes, {}, [])) as template:
        assert template.render(said) == ["[user:  a][assistant: c b][assistant: e d][user:  f]"]


def test_an_empty_answer_is_a_blank_where_a_template_takes_none() -> None:
    """Of a model whose tokens ended while it reasoned: at Ministral's the conversation ended with 400 from then on."""
    source = ("{% for m in messages %}{% if m.content == '' and not m.tool_calls %}{{ raise_exception('empty') }}"
              "{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}")
    said: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "reasoning_content": "b"},
                 {"role": "user", "content": "c"}]
    with closing(ChatTemplate(source, {}, [])) as template:
        assert template.render(said) == ["[user: a][assistant:  ][user: c]"]


def test_what_the_system_says_is_the_users_where_a_template_forgets_it_behind_results() -> None:
    """As Mistral Nemo's, which writes it where the user's message is the last: between its calls an agent's model had
    no instructions."""
    source = ("{% for m in messages if m.role != 'system' %}[{{ m.role }}: {% if loop.last and m.role == 'user' and "
              "messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content }}"
              "{% for c in m.tool_calls or [] %}{{ c.id ~ c.function.name }}{% endfor %}]{% endfor %}")
    with closing(ChatTemplate(source, {}, [])) as template:
        said: Any = [{"role": role, "content": word} for role, word in (
            ("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"))]
        assert template.render(said) == ["[user: b][assistant: c][user: a\n\nd]"]
        called = [*said, calls_of("c0"), {"role": "tool", "tool_call_id": "c0", "content": "x"}]
        assert template.render(called) == ["[user: b][assistant: c][user: a\n\nd][assistant: ec0f0][tool: x]"]
        assert template.render(called[1:]) == ["[user: b][assistant: c][user: d][assistant: ec0f0][tool: x]"]
        assert template.render(said[:3], Turn(False, True)) == ["[user: a\n\nb][assistant: c"]


@pytest.mark.parametrize(("asks", "wanted"), [
    ("{# <tool_call> #}", '[assistant: e\n<tool_call>\n{"name": "f0", "arguments": {"a": "é"}}\n</tool_call>'
     '\n<tool_call>\n{"name": "f1", "arguments": {"a": "é"}}\n</tool_call>]'),
    ("{# <|tool_call|> #}", '[assistant: e\n<|tool_call|>[{"name": "f0", "arguments": {"a": "é"}}, '
     '{"name": "f1", "arguments": {"a": "é"}}]]'),
    ("", '[assistant: e\n[{"name": "f0", "arguments": {"a": "é"}}, {"name": "f1", "arguments": {"a": "é"}}]]')])
def test_a_call_is_the_assistants_words_where_a_template_writes_none(asks: str, wanted: str) -> None:
    """As SmolLM3's and Granite's: of its own calls the model read nothing but the results, and called again."""
    said: Any = [{"role": "user", "content": "c"}, calls_of("c0", "c1"), {"role": "tool", "content": "y"}]
    source = asks + "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    for written, told in ((source, f"[user: c]{wanted}[tool: y]"), (
            source + "{% if tools %}{{ messages | tojson }}{% endif %}", "[user: c][assistant: e][tool: y]")):
        with closing(ChatTemplate(written, {}, [])) as template:
            assert template.render(said) == [told]


def test_calls_stay_as_a_template_writes_them_where_it_omits_those_of_the_last_message_alone() -> None:
    """As Nemotron Nano's, before a new turn of the assistant's: all earlier calls came without the marks that its model
    was taught, and it went on to call without them."""
    source = ("{% for m in messages %}[{{ m.role }}: {{ m.content }}{% if not (loop.last and add_generation_prompt) %}"
              "{% for c in m.tool_calls or [] %} <TOOLCALL>{{ c.function.name ~ c.id ~ c.function.arguments }}"
              "{% endfor %}{% endif %}]{% endfor %}")
    said: Any = [{"role": "user", "content": "c"}, calls_of("c0"), {"role": "tool", "content": "y"}]
    with closing(ChatTemplate(source, {}, [])) as template:
        assert template.render(said) == ["[user: c][assistant: e <TOOLCALL>f0c0{'a': 'é'}][tool: y]"]


def test_calls_are_said_one_by_one_where_a_template_writes_the_first_alone() -> None:
    """As GPT-OSS', which names a result by the latest call: its model read every result as that of the first."""
    source = ("{% for m in messages %}[{{ m.role }}: {{ m.content }}{% if m.tool_calls %}"
              "{{ m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments }}{% endif %}]{% endfor %}")
    with closing(ChatTemplate(source, {}, [])) as template:
        said: Any = [{"role": "user", "content": "c"}, calls_of("c0", "c1"), *(
            {"role": "tool", "tool_call_id": id_, "content": word} for id_, word in (("c1", "y"), ("c0", "x")))]
        assert template.render(said) == [
            "[user: c][assistant: ef0{'a': 'é'}][tool: x][assistant: f1{'a': 'é'}][tool: y]"]


def test_calls_stay_one_by_one_where_a_template_leaves_out_the_system_s_later_words_too() -> None:
    """GPT-OSS' does: calls that were parted, and stand without results, were joined with the turns around them."""
    source = ("{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}: {{ m.content }}"
              "{% if m.tool_calls %}{{ m.tool_calls[0].id ~ m.tool_calls[0].function.name }}{% endif %}]{% endif %}"
              "{% endfor %}")
    with closing(ChatTemplate(source, {}, [])) as template:
        said: Any = [{"role": "user", "content": "c"}, calls_of("c0", "c1"), {"role": "system", "content": "d"}]
        assert template.render(said) == ["[user: c][assistant: ec0f0][assistant: c1f1][user: d]"]


def test_reasoning_before_a_call_is_said_as_a_template_calls_it() -> None:
    """GPT-OSS' calls it thinking: between its calls the model did not know what it had thought."""
    source = ("{% for message in messages %}[{% if message.thinking and message.content %}{{ raise_exception('both') }}"
              "{% endif %}{{ message.thinking or message.content }}{% for c in message.tool_calls or [] %}"
              "{{ c.function.arguments.city or c.id }}{% endfor %}]{% endfor %}")
    with closing(ChatTemplate(source, {}, [])) as template:
        said: Any = [USER[0], {**calls_of("c0"), "content": "", "reasoning_content": "Hm."}, {
            "role": "tool", "content": "y"}, {**calls_of("c1"), "reasoning_content": "Hm."}]
        assert template.render(said) == ["[x][Hm.c0][y][ec1]"]


def test_reasoning_is_a_part_of_the_content_where_a_template_takes_it_as_one() -> None:
    """As Ministral's reasoning models' do: between its calls such a model did not know what it had thought."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city or c.id }}{% endfor %}]{% endfor %}"
    parts = ("{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text "
             "if part.type == 'text' else '[THINK]' + part.thinking + '[/THINK]' }}{% endfor %}{% endif %}")
    said: Any = [USER[0], {**calls_of("c0"), "content": "", "reasoning_content": "Hm."}, {
        "role": "tool", "content": "y"}, {**calls_of("c1"), "reasoning_content": "Hm."}]
    for content, wanted in ((parts, "[x][[THINK]Hm.[/THINK]c0][y][[THINK]Hm.[/THINK]ec1]"),
                            ("{{ m.content }}", "[x][c0][y][ec1]")):
        with closing(ChatTemplate("{% for m in messages %}[" + content + calls, {}, [])) as template:
            assert template.render(said) == [wanted]


def test_results_of_tools_are_the_users_where_a_template_writes_none() -> None:
    """Granite 3.0's and older ones of Mistral's know them by other roles: an agent's model never read one."""
    source = ("{% for m in messages %}{% if m.role in ['user', 'assistant'] %}[{{ m.role }}: {{ m.content }}"
              "{% for c in m.tool_calls or [] %}{{ c.id ~ c.function.name }}{% endfor %}]{% endif %}{% endfor %}")
    with closing(ChatTemplate(source, {}, [])) as template:
        said: Any = [{"role": "user", "content": "c"}, calls_of("c0", "c1"), *(
            {"role": "tool", "tool_call_id": id_, "content": word} for id_, word in (("c0", "x"), ("c1", "y")))]
        assert template.render(said) == ["[user: c][assistant: ec0f0c1f1][user: <tool_response>\nx\n</tool_response>\n"
                                         "<tool_response>\ny\n</tool_response>]"]


def test_a_template_that_writes_no_tools_takes_none(tiny_folder: Path, tmp_path: Path) -> None:
    """As SmolLM3's first, which knows them as xml_tools and speaks of <tools>: a model that was given some heard of
    none. Command R+'s for tools takes no others than those whose parameters are described, and nothing without."""
    plain = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    for i, (source, takes) in enumerate((("{% for t in xml_tools or [] %}<tools>{{ t }}</tools>{% endfor %}", False), (
            "{% for t in tools or [] %}<tools>{{ t }}</tools>{% endfor %}", True), (
            "{% for t in tools %}{% for n, of in t.function.parameters.properties.items() %}<tools>{{ t.function.name"
            " + n + of.description }}</tools>{% endfor %}{% endfor %}", True))):
        codec = TextCodec(with_template(source + plain, tiny_folder, tmp_path / str(i)))
        try:
            assert codec.style.takes_tools == takes
        finally:
            codec.close()


def test_a_template_for_tools_is_taken_where_there_are_tools(tiny_folder: Path, tmp_path: Path) -> None:
    """As Hermes 2 Pro and 3 have one beside the default, and transformers chooses it: their tools were told to them in
    words that they were not taught."""
    plain = "\n  {% for m in messages %}\n[{{ m.role }}: {{ m.content }}]\n  {% endfor %}\n"
    for i, (call, wanted) in enumerate((("<tool_call>", "\n  weather <tool_call>"), ("Action:", ""))):
        named = {"default": plain, "tool_use": "\n  {{ tools | map(attribute='function.name') | join }} " + call
                 + plain.replace("}}]", "}}{% for c in m.tool_calls or [] %}{{ c.id ~ c.function.name }}{% endfor %}]"),
                 "rag": "x"}
        listed, saved = (with_template(plain, tiny_folder, tmp_path / f"{i}{form}") for form in ("listed", "saved"))
        (listed / "chat_template.jinja").unlink()
        config = json.loads((listed / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        (listed / "tokenizer_config.json").write_text(json.dumps(config))
        (saved / "additional_chat_templates").mkdir()
        (saved / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        for folder in (listed, saved):
            codec = TextCodec(folder)
            try:
                assert codec.style.takes_tools == (i == 0)
                assert codec.text(codec.chat(USER)) == "\n[user: x]\n"
                assert codec.text(codec.chat(USER, Turn(variables=TOOLS))) == f"{wanted}\n[user: x]\n"
                if i == 0:
                    assert codec.text(codec.chat([calls_of("c0")])) == "\n   <tool_call>\n[assistant: ec0f0]\n"
            finally:
                codec.close()
